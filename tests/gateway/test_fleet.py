"""Who may take what, by the registry alone."""

from __future__ import annotations

from typing import Any

import pytest

from pageferry.gateway import fleet as fleet_module
from pageferry.gateway.fleet import Fleet
from pageferry.kvtransfer.wire import Ledger, WorkerRecord


def record(name: str, fingerprint: str = "f", **fields: Any) -> WorkerRecord:
    """A ready worker; its role is what its name begins with."""
    values: dict[str, Any] = {
        "id": name,
        "role": "prefill" if name.startswith("p") else "decode",
        "pid": 1,
        "host": "h",
        "state": "ready",
        "model": "m",
        "fingerprint": fingerprint,
        "layout": {},
        "ledger": Ledger(100, 100, 0, 0, 0, 0, 16),
        "max_model_len": 1000,
        **fields,
    }
    return WorkerRecord(**values)


def fleet_of(*records: WorkerRecord) -> Fleet:
    fleet = Fleet()
    fleet.update(records)
    return fleet


def picked(fleet: Fleet, num_tokens: int, maker: str = "") -> str:
    found = fleet.pick_decode(num_tokens, maker)
    return found.id if found else ""


def test_a_decode_worker_of_the_same_weights_is_picked() -> None:
    fleet = fleet_of(record("d0"), record("d1", "g", ledger=Ledger(200, 200, 0, 0, 0, 0, 16)))
    assert [picked(fleet, 10), picked(fleet, 10, "d0"), picked(fleet, 10, "d1")] == [
        "d1",
        "d0",
        "d1",
    ]


def test_the_weights_of_a_worker_are_known_when_it_is_gone() -> None:
    fleet = fleet_of(record("d0"), record("d1"), record("e0", "g"))
    fleet.update([record("d1"), record("e0", "g")])
    assert picked(fleet, 10, "d0") == "d1"
    fleet.update([record("e0", "g")])
    assert picked(fleet, 10, "d0") == ""
    assert "weights" in fleet.why_nobody(10, "d0")
    assert fleet.why_nobody(10, "e0") == ""


def test_of_a_worker_never_seen_nothing_is_assumed_where_weights_differ() -> None:
    fleet = fleet_of(record("d0"))
    assert picked(fleet, 10, "unseen") == "d0"
    assert not fleet.may_continue("unseen", "d0")
    fleet.update([record("d0"), record("p0", "g")])
    assert picked(fleet, 10, "unseen") == ""
    assert fleet.may_continue("unseen", "")


@pytest.mark.parametrize(
    ("prefill", "maker", "expected"),
    [
        (["p0"], "", True),
        (["p0"], "d0", True),
        (["p0", "p1-g"], "", True),
        (["p0", "p1-g"], "d0", False),  # the other one might fetch it
        (["p1-g"], "d0", False),
        (["p1-h"], "", False),  # no decode worker takes its pages
        (["p0", "p1-h"], "d0", True),
    ],
)
def test_who_reads_the_shared_queues(prefill: list[str], maker: str, expected: bool) -> None:
    records = [record(name, name.partition("-")[2] or "f") for name in prefill]
    fleet = fleet_of(record("d0"), record("d1", "g"), *records)
    assert fleet.can_prefill(10, maker) is expected


def test_a_prefill_worker_needs_a_decode_worker_that_is_large_enough() -> None:
    fleet = fleet_of(record("p0"), record("d0", max_model_len=50), record("d1", "g"))
    assert fleet.can_prefill(49)
    assert not fleet.can_prefill(50)
    assert picked(fleet, 50) == "d1"


def test_why_nobody_takes_it() -> None:
    assert Fleet().why_nobody(10) == "No decode worker is registered."
    draining = record("d0", state="draining")
    assert "d0 is draining" in fleet_of(draining).why_nobody(10)
    small = fleet_of(draining, record("d1", max_model_len=50), record("e0", "g"))
    assert "at most 50 tokens" in small.why_nobody(50, "d0")
    assert small.why_nobody(49, "d0") == ""
    blocked = fleet_of(record("d0", stats={"device_health": 2.0}))
    assert blocked.why_nobody(10) == ""
    assert picked(blocked, 10) == ""


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "MAX_REMEMBERED", 3)
    fleet = Fleet()
    for i in range(9):
        fleet.update([record("d0"), record(f"d{i}"), record("e0", "g")])
    assert fleet.may_continue("d0", "d8")
    assert not fleet.may_continue("d7", "d8")
