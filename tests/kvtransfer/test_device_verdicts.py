"""The pure decision over sequences of figures, and workers that have no NVML at all."""

from __future__ import annotations

import re
import sys

import pytest

from pageferry.kvtransfer import metric_names
from pageferry.kvtransfer.device_health import (
    STALE_S,
    STATS,
    Figures,
    Health,
    HealthMonitor,
    Memory,
    judge,
)
from pageferry.kvtransfer.nvml_devices import BoardFigures

MIB, GIB = 1 << 20, 1 << 30


def gpu_memory(free: float, own: int | None = 0) -> Memory:
    """80 GiB of which `free` are free; 2 % + 256 MiB are 1.85 GiB."""
    return Memory(int(free * GIB), 80 * GIB, "nvml", own, "nvml")


@pytest.mark.parametrize(
    ("steps", "verdicts"),
    [
        pytest.param([0.8] * 3, "ok ok ok", id="own pool leaves 1 % for ever"),
        pytest.param([0.8, 0.2, 0.5, 0.8], "ok stop stop ok", id="1 % free, others take most"),
        pytest.param([0.8, 0.78, 0.75], "ok ok ok", id="jitter"),
        pytest.param([10, 5, 3, 1.5, 3, 3.6, 5], "ok ok reduced stop stop stop ok", id="band"),
        pytest.param([0.8, 0.7, 0.5], "ok ok reduced", id="1 % free, others take some"),
        pytest.param([0.08, 0.03], "ok ok", id="jitter on a full GPU"),
        pytest.param([0.1, 0.02, 0.05, 0.08], "ok stop stop ok", id="band on a full GPU"),
        pytest.param([1, 30, 1], "ok ok ok", id="a neighbour leaves and comes back"),
    ],
)
def test_foreign_growth(steps: list[float], verdicts: str) -> None:
    health: Health | None = None
    seen = []
    for free in steps:
        health = judge(Figures(gpu_memory(free), nvml="working"), health)
        seen.append(health.verdict)
    assert " ".join(seen) == verdicts


def test_own_growth_is_no_pressure_and_unknown_use_is_not_blamed_on_others() -> None:
    first = judge(Figures(gpu_memory(40, own=40 * GIB)), None)
    full = judge(Figures(gpu_memory(0.01, own=80 * GIB - int(0.01 * GIB))), first)
    assert (full.verdict, full.figures["device_foreign_growth_bytes"]) == ("ok", 0)
    unknown = judge(Figures(gpu_memory(0.01, own=None)), judge(Figures(gpu_memory(40, None)), None))
    assert unknown.verdict == "ok"
    assert "device_foreign_growth_bytes" not in unknown.figures


def test_a_neighbour_that_leaves_is_no_negative_growth() -> None:
    health = judge(Figures(gpu_memory(30)), judge(Figures(gpu_memory(1)), None))
    assert health.figures["device_foreign_growth_bytes"] == 0


def test_growth_survives_a_change_of_source() -> None:
    health = judge(Figures(gpu_memory(10)), None)
    health = judge(Figures(gpu_memory(1)), health)
    cuda = Memory(1 * GIB, 79 * GIB, "cuda", 5 * GIB, "cuda")
    health = judge(Figures(cuda), health)
    assert health.verdict == "stop"
    assert health.figures["device_foreign_growth_bytes"] == 9 * GIB


@pytest.mark.parametrize(
    ("board", "verdict", "reason"),
    [
        (BoardFigures(), "ok", ""),
        (BoardFigures(throttle_reasons=0x1 | 0x2 | 0x4 | 0x20), "ok", ""),
        (BoardFigures(throttle_reasons=0x8), "reduced", "hardware slowdown"),
        (BoardFigures(throttle_reasons=0x40), "reduced", "thermal slowdown"),
        (BoardFigures(throttle_reasons=0x80 | 0x8), "reduced", "hardware slowdown.*power brake"),
        (BoardFigures(ecc_uncorrected=7), "ok", ""),
        (BoardFigures(ecc_uncorrected=8), "unhealthy", "1 uncorrected ECC errors"),
        (BoardFigures(retired_pages_pending=True), "unhealthy", "wait to be retired"),
        (BoardFigures(rows_pending=True), "reduced", "row remapping is pending"),
        (BoardFigures(rows_pending=True, rows_failed=True), "unhealthy", "remapping failed"),
        (BoardFigures(rows_failed=True, throttle_reasons=8), "unhealthy", "failed.*slowdown"),
        (BoardFigures(xids=(31, 48)), "unhealthy", "^XID 48$"),
    ],
)
def test_board_conditions(board: BoardFigures, verdict: str, reason: str) -> None:
    """Seven ECC errors are older than this worker. What is unhealthy stays so."""
    good = Figures(board=BoardFigures(ecc_uncorrected=7), nvml="working")
    first = judge(good, None)
    health = judge(Figures(board=board, nvml="working"), first)
    assert (first.verdict, health.verdict) == ("ok", verdict)
    assert re.search(reason, health.reason)
    assert judge(good, health).verdict == ("unhealthy" if verdict == "unhealthy" else "ok")


@pytest.mark.parametrize(
    ("board", "verdicts"),
    [(BoardFigures(), "stop stop ok"), (BoardFigures(xids=(79,)), "unhealthy unhealthy unhealthy")],
)
def test_figures_of_a_lost_nvml_decide_for_a_while(board: BoardFigures, verdicts: str) -> None:
    before = judge(Figures(gpu_memory(40), nvml="working"), None)
    health = judge(Figures(gpu_memory(1), board, "working"), before)
    seen = [health.verdict]
    for age_s in (STALE_S, STALE_S + 1):
        health = judge(Figures(gpu_memory(1), BoardFigures(), "lost", "lost", age_s), health)
        seen.append(health.verdict)
    assert " ".join(seen) == verdicts


def test_metric_names() -> None:
    """All names documented; none invents a figure; the shared ones are those of the registry."""
    full = BoardFigures(1, 2, 0, 0, 0, False, False, False, ())
    seen = judge(Figures(gpu_memory(1), full, "working"), None).figures
    assert seen.keys() == STATS.keys()
    assert judge(Figures(), None).figures.keys() == {
        "device_health",
        "device_figures_age_seconds",
    }
    assert STATS.keys() <= metric_names.WORKER_STATS.keys()


@pytest.mark.parametrize(
    ("total", "steps", "verdicts"),
    [
        pytest.param(4, [400, 250, 400, 511, 512], "reduced stop stop stop ok", id="256 MiB"),
        pytest.param(64, [4000, 3000, 1900, 2000], "ok reduced stop stop", id="3 %"),
    ],
)
def test_host_memory_on_a_cpu(total: int, steps: list[int], verdicts: str) -> None:
    left = iter([steps[0], *steps])
    worker = HealthMonitor.create(
        "cpu", read_host=lambda: Memory(next(left) * MIB, total * GIB, "host")
    )
    assert " ".join(worker.poll().verdict for _ in steps) == verdicts


def test_cpu_never_touches_nvml(caplog: pytest.LogCaptureFixture) -> None:
    worker = HealthMonitor.create(
        "cpu", nvml=object(), read_host=lambda: Memory(8 * GIB, 16 * GIB, "cgroup")
    )
    health = worker.poll()
    assert (health.verdict, worker.source, health.free_bytes) == ("ok", "cgroup", 8 * GIB)
    assert "nvml_available" not in health.figures
    assert not caplog.records


def test_no_pynvml_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    worker = HealthMonitor.create("cuda", "0", read_host=lambda: Memory(8 * GIB, 16 * GIB, "host"))
    assert (worker.poll().verdict, worker.source) == ("ok", "host")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_device_names(device: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        HealthMonitor.create(device)
