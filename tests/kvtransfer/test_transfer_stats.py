"""What transfers cost, as workers publish it."""

from __future__ import annotations

import pytest

from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.handoff import TRANSPORTS
from pageferry.kvtransfer.transfer_stats import Tally, figures


def test_ratios_are_of_sums_not_of_handoffs():
    tally = Tally(bytes=3 * 10**9, pages=3, seconds=2.0, exposed_seconds=0.2, sealed=1)
    tally.add(Tally(bytes=10**9, pages=1, seconds=6.0, exposed_seconds=1.8, sealed=2))
    found = figures({"tcp": tally})
    assert found["kv_transfer_bytes_tcp_total"] == 4e9
    assert found["kv_transfer_exposed_seconds_tcp_total"] == 2.0
    assert found["kv_transfer_sealed_tcp_total"] == 3
    assert found["overlap_ratio_tcp"] == pytest.approx(0.75)
    assert found["gb_per_s_tcp"] == pytest.approx(0.5)


def test_what_was_not_measured_is_not_claimed():
    assert figures({}) == {}
    found = figures({"shm": Tally()})
    assert found["gb_per_s_shm"] == 0
    assert not any("overlap" in name or "exposed" in name for name in found)


def test_every_figure_of_every_transport_is_exposed_with_its_unit():
    assert tuple(names.TRANSPORTS) == TRANSPORTS
    tally = Tally(bytes=1, pages=1, seconds=1.0, exposed_seconds=0.5, sealed=1)
    found = figures(dict.fromkeys(TRANSPORTS, tally))
    assert found.keys() <= names.WORKER_STATS.keys()
    for name in found:
        text = names.WORKER_STATS[name].lower()
        unit = name.removesuffix("_total").rsplit("_", 1)[0].rsplit("_", 1)[-1]
        assert {"s": "per second", "ratio": "share", "sealed": "handoffs"}.get(unit, unit) in text
