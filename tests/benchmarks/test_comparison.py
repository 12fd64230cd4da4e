"""The arithmetic of the comparison: workloads, KV waste, rooflines, tables and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import report
import roofline
from compare import check_exact
from interference import LONGEST, SHORTEST, storm
from kv_waste import LIVE_TOKENS, measure, tokens_at
from peers import PEERS, Setup, find
from systems import Broken, InProcess
from workload import Source, Workload

from pageferry.compose.bench_client import Outcome, Result
from pageferry.compose.bench_figures import Slo, summarise
from pageferry.compose.bench_workload import Request


def seen(prompt, times, due=0.0, **more):
    chunks = [(t, 1) for t in times]
    outcome = Outcome(Request(prompt, len(times)), due, due, chunks, times[-1], prompt, len(times))
    for name, value in more.items():
        setattr(outcome, name, value)
    return outcome


def workers(live, page_size=16, **stats):
    ledger = {"live": live, "page_size": page_size}
    return [
        {"role": "decode", "ledger": ledger, "stats": stats},
        {"role": "prefill", "ledger": {"live": 99, "page_size": page_size}, "stats": {}},
    ]


def test_levels_of_a_workload_grow_and_keep_the_shape_and_have_their_own_prompts(tmp_path):
    built = Source("conversation", None, 0.25, 0.5, 0, 8192).build(32)
    assert [len(built.level(n).closed) for n in (1, 8, 32)] == [8, 32, 128]
    for n in (1, 8, 32):
        prompts = [r.prompt for r in built.level(n).closed]
        assert 200 < sum(prompts) / len(prompts) < 400
    assert len({built.level(n).key for n in (1, 8, 32)}) == 3
    built.save(tmp_path / "w.json")
    assert Workload.load(tmp_path / "w.json") == built


def test_workload_is_scaled_to_the_context():
    built = Source("long-conversation", None, 1.0, 1.0, 0, 8192).build(8)
    assert built.max_len <= 8192
    assert "to fit 8192 tokens" in built.source


def test_tokens_are_in_pages_from_the_first_token_to_the_end():
    one = seen(10, [1.0, 2.0, 3.0])
    assert [tokens_at(one, t) for t in (0.5, 1.0, 2.5, 3.0, 3.1)] == [0, 11, 12, 13, 0]


def test_waste_is_live_tokens_over_live_pages_of_decode_workers():
    result = Result([seen(10, [1.0, 2.0, 3.0])], 4.0)
    samples = [(1.5, workers(1)), (2.5, workers(2)), (5.0, workers(1)), (0.1, None)]
    waste = measure(result, samples, 100)
    assert waste.paged == pytest.approx(1 - (11 + 12) / 64)  # one ledger was late
    told = measure(result, [(1.5, workers(1, **{LIVE_TOKENS: 16}))], 100)
    assert told.paged == 0
    assert measure(result, [], 100).paged is None


def test_waste_of_reservations_is_weighted_by_time():
    result = Result([seen(10, [1.0, 2.0, 3.0])], 4.0)  # 11 tokens for 1 s, 12 for 1 s
    waste = measure(result, [], 100)
    assert waste.reserved_context == pytest.approx(1 - 23 / 200)
    assert waste.reserved_exactly == pytest.approx(1 - 23 / 26)


def test_limit_is_prefill_and_decode_one_after_the_other():
    machine = roofline.Machine((0, 1), 100.0, 1000.0)
    model = roofline.ModelSize(parameters=5, weight_bytes=10, kv_bytes_per_token=1)
    found = roofline.limit(machine, model, [Request(10, 20), Request(10, 20)], streams=8)
    assert found["prefill_s"] == pytest.approx(20 * 10 / 1000)
    assert found["decode_s"] == pytest.approx(20 * (10 + 2 * 20) / 100)  # two sequences at a time
    assert found["output_tokens_per_s"] == pytest.approx(40 / (0.2 + 10))


def test_size_of_the_demo_model(demo_model):
    size = roofline.ModelSize.of(demo_model)
    assert size.parameters == 134_515_008
    assert size.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2


def test_ceilings_are_measured_here(monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "GEMM_SIZE", 64)
    machine = roofline.measure([0])
    assert machine.read_bytes_per_s > 1e8
    assert machine.gemm_flops_per_s > 1e6


def test_wrong_lengths_and_failures_are_not_compared(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    system = InProcess("fake", "1", [sys.executable], {}, log, {})
    check_exact(system, Result([seen(4, [1.0, 2.0])], 2.0))
    with pytest.raises(Broken, match="asked for 2 tokens, got 1"):
        check_exact(system, Result([seen(4, [1.0, 2.0], output_tokens=1)], 2.0))
    with pytest.raises(Broken, match="HTTP 500"):
        check_exact(system, Result([seen(4, [1.0], error="HTTP 500: oops")], 2.0))


def test_storm_comes_at_fixed_times_with_lengths_in_range():
    arrivals = storm(10.0, 1.5, seed=0)
    assert [r.arrival_s for r in arrivals] == [1.5, 3.0, 4.5, 6.0, 7.5, 9.0]
    assert all(SHORTEST <= r.prompt <= LONGEST for r in arrivals)
    assert storm(10.0, 1.5, seed=0) == arrivals != storm(10.0, 1.5, seed=1)


@pytest.fixture
def result():
    """What `compare.py` writes, for two systems."""
    slow = Result([seen(10, [1.0, 2.0, 3.0])], 3.0)
    fast = Result([seen(10, [0.5, 1.0, 1.5])], 1.5)
    level = {"peak_pss_bytes": 2**30, "kv_waste": {"paged": 0.03, "reserved_context": 0.9}}
    level["kv_waste"] |= {"reserved_exactly": 0.2, "samples": 40}

    def system(measured):
        return {"levels": {"8": {**level, "figures": summarise(measured, Slo()).as_json()}}}

    return {
        "levels": [8],
        "max_model_len": 8192,
        "machine": {"cores": [0, 1]},
        "systems": {"peer": system(slow), "pageferry": system(fast)},
        "roofline": {"levels": {"8": {"output_tokens_per_s": 4.0}}},
    }


def test_table_has_the_best_first_and_ratios_to_each(result):
    lines = report.comparison(result).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[0] for row in rows] == ["pageferry", "peer", "limit of the machine (2 cores)"]
    assert [row[3] for row in rows] == ["", "2.00 x", "0.50 x"]
    assert len({len(line) for line in lines}) == 1
    assert "3.0% in pages" in report.reservation(result)
    result["systems"]["pageferry"]["levels"]["8"]["kv_waste"]["samples"] = 3
    assert "not measured in pages" in report.reservation(result)


def test_plots_are_written(result, tmp_path):
    pytest.importorskip("matplotlib")
    raw = {name: {"8": {"ttft_ms": [1.0, 2.0], "itl_ms": [0.0, 3.0]}} for name in ("peer",)}
    paths = report.plot_comparison(result, raw, tmp_path / "c")
    assert [p.name for p in paths] == ["c-throughput.png", "c-latency.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_interference_table_and_plot(result, tmp_path):
    quick, slow = (
        {"streams": figures, "prompts": figures, "sent": 3}
        for figures in (
            result["systems"][name]["levels"]["8"]["figures"] for name in ("pageferry", "peer")
        )
    )
    systems = {
        "pageferry 1 prefill + 1 decode": {"chunk": 0, "quiet": quick, "storm": quick},
        "colocated, 64": {"chunk": 64, "quiet": quick, "storm": quick},
        "colocated, 512": {"chunk": 512, "quiet": quick, "storm": slow},
    }
    both = {"systems": systems}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in report.interference(both).splitlines()[2:]
    ]
    assert [row[3:5] for row in rows] == [["1.00 x"] * 2, ["1.00 x"] * 2, ["2.00 x"] * 2]
    assert rows[2][1:3] == ["500.0 / 1000.0"] * 2
    assert rows[0][-1] == "1 / 3"
    if report.HAS_PLOTS:
        assert report.plot_interference(both, tmp_path / "i")[0].exists()


def test_what_is_not_installed_is_known_and_setups_have_room(tmp_path, demo_model):
    assert not any(p.installed(tmp_path) for p in PEERS.values() if p.folder)
    assert all(p.installed(tmp_path) for p in PEERS.values() if not p.folder)
    setup = Setup(demo_model, (0, 1), 32, 2000, tmp_path)
    assert setup.kv_gib() == 2  # 32 x 2064 tokens x 23,040 bytes
    with pytest.raises(FileNotFoundError, match="install_peers"):
        find(tmp_path, "llama-server")


def test_sources_of_runners_import_nothing_of_ours():
    for name in ("run_openvino.py", "run_transformers.py"):
        text = (Path(report.__file__).parent / name).read_text()
        assert not any(w in text for w in ("import pageferry", "from pageferry", "from systems"))
        assert text.startswith('"""Runner')
