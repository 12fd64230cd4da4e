"""Whether this worker may admit new work: memory, clocks and errors of its device.

`HealthMonitor.poll`, once a second, in a thread:

1. read: NVML for a GPU; what NVML does not know about memory, CUDA itself, then the host or its
   cgroup. On a CPU always the latter. Readers only read; unknown stays None and is never 0.
2. `judge`: a pure function of the figures and the previous `Health`.

Verdicts, in rising order: "ok"; "reduced" (admit less); "stop" (admit nothing, running work goes
on); "unhealthy" (hardware errors; for good, only a restart ends it).

A GPU's own page pool is allocated at start, so that little free memory is no sign of trouble.
What counts is foreign growth: memory used by others, against what they used at the first reading.

NVML can be lost while CUDA goes on (a systemd reload on the host does it). Then the last good
figures stand, with their age; after `STALE_S` only the block accounting of the page pool decides;
NVML is opened again with growing pauses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pageferry.kvtransfer.host_memory import CGROUP, MEMINFO, read_memory
from pageferry.kvtransfer.nvml_devices import (
    BoardFigures,
    CudaId,
    GpuGone,
    NoSuchDevice,
    NvmlBoard,
    NvmlUnavailable,
    load_pynvml,
)

log = logging.getLogger(__name__)

MIB = 1 << 20
STALE_S = 10.0
"""Age up to which figures of a lost NVML still decide."""
MAX_PAUSE_S = 60.0
NOISE_BYTES = 64 * MIB
"""Foreign growth below this is jitter (contexts and caches of monitoring tools)."""

SEVERITY = {"ok": 0, "reduced": 1, "stop": 2, "unhealthy": 3}

THROTTLE_REASONS = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""nvmlClocksEventReasons bits of a GPU in trouble. Power capping and idle clocks are normal."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a faulty program causes, often another one on the same GPU (NVIDIA's XID catalogue);
ours would see its own CUDA error."""

DEVICE_HEALTH = "device_health"
STATS = {
    DEVICE_HEALTH: "0 ok, 1 reduced intake, 2 no intake, 3 unhealthy.",
    "nvml_available": "1 when NVML answers, 0 when a GPU is used without it.",
    "device_figures_age_seconds": "Age of the device figures; grows while NVML is lost.",
    "memory_used_bytes": "Memory in use on the worker's device or host.",
    "memory_total_bytes": "Memory of the worker's device or host.",
    "device_foreign_growth_bytes": "Device memory that other processes took since the start.",
    "device_throttle_reasons": "NVML's clock event reason bits.",
    "device_ecc_uncorrected_errors": "Uncorrected ECC errors since the driver was loaded.",
    "device_xid_errors": "XID errors since the worker started, those of other programs too.",
}
"""Names in `Health.figures` -> help. What is unknown is left out."""


@dataclass(frozen=True)
class Cuda:
    """What the torch side lends this torch-free module, for one device."""

    id: CudaId = field(default_factory=CudaId)
    mem_get_info: Callable[[], tuple[int, int]] | None = None
    """(free, total) bytes: torch.cuda.mem_get_info."""
    own_bytes: Callable[[], int] | None = None
    """Bytes that this process took from the device: torch.cuda.memory_reserved."""


@dataclass(frozen=True)
class Memory:
    free_bytes: int
    total_bytes: int
    source: str
    """"nvml", "cuda", "cgroup" or "host"."""
    own_bytes: int | None = None
    own_source: str = ""

    @property
    def is_device(self) -> bool:
        return self.source in ("nvml", "cuda")

    @property
    def foreign_bytes(self) -> int | None:
        """In use, but not by this process; None: not known whose it is."""
        if not self.is_device or self.own_bytes is None:
            return None
        return self.total_bytes - self.free_bytes - self.own_bytes


@dataclass(frozen=True)
class Figures:
    """Everything one poll found out. None: unknown."""

    memory: Memory | None = None
    board: BoardFigures | None = None
    nvml: str = "unused"
    """"unused" (CPU), "missing", "working", "lost" or "gone" (the GPU itself)."""
    problem: str = ""
    """Why it is lost or gone."""
    age_s: float = 0.0


@dataclass(frozen=True)
class History:
    """What `judge` must remember."""

    foreign_at_start: int | None = None
    foreign_growth: int = 0
    yardstick: str = ""
    """The sources that the two figures above were measured with."""
    ecc_at_start: int | None = None
    num_xids: int = 0


@dataclass(frozen=True)
class Health:
    verdict: str
    reason: str
    free_bytes: int | None
    total_bytes: int | None
    age_s: float
    source: str
    figures: dict[str, float] = field(default_factory=dict)
    """For metrics; names as in `STATS`."""
    history: History = History()


# --- deciding ----------------------------------------------------------------------------------


def judge(figures: Figures, previous: Health | None) -> Health:
    """The verdict; with several findings the worst one, and all reasons."""
    memory = figures.memory
    before = previous.history if previous else History()
    history = _remember(figures, before)
    if previous and previous.verdict == "unhealthy":
        findings = [("unhealthy", previous.reason)]
    else:
        findings = _errors(figures, history)
        is_stale = figures.nvml == "lost" and figures.age_s > STALE_S
        if is_stale:
            findings.append(("ok", f"{figures.problem}; only the page pool decides"))
        else:
            findings += _throttling(figures.board)
        if memory is not None and not (is_stale and memory.source == "nvml"):
            findings += _pressure(memory, history, previous)
    verdict = max((v for v, _ in findings), key=SEVERITY.__getitem__, default="ok")
    return Health(
        verdict=verdict,
        reason="; ".join(reason for _, reason in findings),
        free_bytes=memory.free_bytes if memory else None,
        total_bytes=memory.total_bytes if memory else None,
        age_s=figures.age_s,
        source=memory.source if memory else "",
        figures=_metrics(figures, history, verdict),
        history=history,
    )


def _remember(figures: Figures, before: History) -> History:
    board = figures.board or BoardFigures()
    history = replace(before, num_xids=before.num_xids + len(board.xids or ()))
    if history.ecc_at_start is None:
        history = replace(history, ecc_at_start=board.ecc_uncorrected)
    memory = figures.memory
    if memory is None or memory.foreign_bytes is None:
        return history
    foreign, yardstick = memory.foreign_bytes, f"{memory.source}/{memory.own_source}"
    start = before.foreign_at_start
    if start is None or yardstick != before.yardstick:
        # Another source counts other things as used: what is comparable is the growth so far.
        start = foreign - before.foreign_growth
    growth = max(0, foreign - start)
    return replace(history, foreign_at_start=start, foreign_growth=growth, yardstick=yardstick)


def _errors(figures: Figures, history: History) -> list[tuple[str, str]]:
    board = figures.board or BoardFigures()
    found = []
    if figures.nvml == "gone":
        found.append(("unhealthy", figures.problem))
    if board.ecc_uncorrected is not None and history.ecc_at_start is not None:
        growth = board.ecc_uncorrected - history.ecc_at_start
        if growth > 0:
            found.append(("unhealthy", f"{growth} uncorrected ECC errors since the start"))
    if board.retired_pages_pending:
        found.append(("unhealthy", "memory pages wait to be retired: reset the GPU"))
    if board.rows_failed:
        found.append(("unhealthy", "row remapping failed: replace the GPU"))
    elif board.rows_pending:
        found.append(("reduced", "row remapping is pending: reset the GPU when it is idle"))
    fatal = sorted(set(board.xids or ()) - APPLICATION_XIDS)
    if fatal:
        found.append(("unhealthy", "XID " + ", ".join(map(str, fatal))))
    return found


def _throttling(board: BoardFigures | None) -> list[tuple[str, str]]:
    bits = (board.throttle_reasons if board else None) or 0
    return [
        ("reduced", f"GPU clocks: {name}") for bit, name in THROTTLE_REASONS.items() if bits & bit
    ]


def _pressure(memory: Memory, history: History, previous: Health | None) -> list[tuple[str, str]]:
    """Stop below one threshold, go on above a higher one; in between: what was, or "reduced"."""
    was_stopped = previous is not None and previous.verdict == "stop"
    free = memory.free_bytes
    if memory.is_device:
        growth = history.foreign_growth
        if growth < NOISE_BYTES // (2 if was_stopped else 1):
            return []
        # Without foreign growth so much would be free. A pool that leaves less than the usual
        # thresholds is a choice: then foreign use may take half of what it leaves.
        left = free + growth
        stop_below = min(256 * MIB + memory.total_bytes // 50, left // 2)
        resume_at = min(2 * (256 * MIB + memory.total_bytes // 50), left * 3 // 4)
        cause = f"other processes took {growth // MIB} MiB of GPU memory"
    else:
        stop_below = max(256 * MIB, memory.total_bytes * 3 // 100)
        resume_at = 2 * stop_below
        cause = f"{memory.source} memory is short"
    if free >= resume_at:
        return []
    verdict = "stop" if free < stop_below or was_stopped else "reduced"
    return [(verdict, f"{cause}: {free // MIB} of {memory.total_bytes // MIB} MiB are free")]


def _metrics(figures: Figures, history: History, verdict: str) -> dict[str, float]:
    memory, board = figures.memory, figures.board or BoardFigures()
    known: dict[str, float | None] = {
        DEVICE_HEALTH: SEVERITY[verdict],
        "device_figures_age_seconds": figures.age_s,
        "device_throttle_reasons": board.throttle_reasons,
        "device_ecc_uncorrected_errors": board.ecc_uncorrected,
        "device_xid_errors": None if board.xids is None else history.num_xids,
    }
    if figures.nvml != "unused":
        known["nvml_available"] = figures.nvml == "working"
    if memory is not None:
        known["memory_used_bytes"] = memory.total_bytes - memory.free_bytes
        known["memory_total_bytes"] = memory.total_bytes
        if memory.foreign_bytes is not None:
            known["device_foreign_growth_bytes"] = history.foreign_growth
    return {name: float(value) for name, value in known.items() if value is not None}


# --- reading -----------------------------------------------------------------------------------


def host_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """Available and total memory of the host or the cgroup. `OSError` or `ValueError`."""
    return Memory(*read_memory(meminfo, cgroup))


class GpuReader:
    """NVML for one device, with what to do when it is missing or lost."""

    def __init__(
        self, nvml: Any, where: tuple[int, str | None, CudaId], clock: Callable[[], float]
    ):
        self._nvml = nvml
        self._where = where
        self._clock = clock
        self._board: NvmlBoard | None = None
        self._last = BoardFigures()
        self._last_at = clock()
        self._problem = ""
        self._pause_s = 1.0
        self._retry_at = 0.0
        self.is_missing = False

    def open(self) -> None:
        """First opening. Without NVML, or if it cannot tell the device: one warning, no more."""
        try:
            self._nvml = self._nvml or load_pynvml()
            self._board = NvmlBoard.open(self._nvml, *self._where)
        except (NvmlUnavailable, NoSuchDevice) as error:
            self.is_missing = True
            log.warning("GPU errors and throttling are not watched: %s", error)

    def read(self) -> Figures:
        """Board figures with their age; memory is filled in by others."""
        if self.is_missing:
            return Figures(nvml="missing")
        try:
            if self._board is None:
                self._reopen()
            if self._board is not None:
                self._last = self._board.read()
                self._recovered()
                return Figures(board=self._last, nvml="working")
        except GpuGone as error:
            return Figures(board=self._past(), nvml="gone", problem=str(error), age_s=self._age)
        except Exception as error:
            # Whatever NVML throws, CUDA may well go on working, and so must this worker.
            self._lost(error)
        problem = f"NVML has been lost for {self._age:.0f} s ({self._problem})"
        return Figures(board=self._past(), nvml="lost", problem=problem, age_s=self._age)

    @property
    def _age(self) -> float:
        return self._clock() - self._last_at

    def _past(self) -> BoardFigures:
        return self._last if self._last.xids is None else replace(self._last, xids=())

    def _recovered(self) -> None:
        if self._problem:
            log.info("NVML is back after %.0f s", self._age)
        self._problem, self._pause_s, self._last_at = "", 1.0, self._clock()

    def _lost(self, error: Exception) -> None:
        if not self._problem:
            log.warning("NVML is lost: %s: %s", type(error).__name__, error)
        self._problem = str(error) or type(error).__name__
        board, self._board = self._board, None
        self._retry_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if board is not None:
            board.close()

    def _reopen(self) -> None:
        if self._clock() >= self._retry_at:
            self._board = NvmlBoard.open(self._nvml, *self._where)


class HealthMonitor:
    """One per worker. `poll` from one thread at a time; `last` from any."""

    last: Health

    def __init__(self, gpu: GpuReader | None, cuda: Cuda, read_host: Callable[[], Memory]) -> None:
        self._gpu = gpu
        self._cuda = cuda
        self._read_host = read_host
        self._complaints: set[str] = set()
        self._device_memory: Memory | None = None
        self.last = judge(self._read(), None)

    @classmethod
    def create(
        cls,
        device: str,
        visible: str | None = None,
        *,
        cuda: Cuda | None = None,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
        read_host: Callable[[], Memory] = host_memory,
    ) -> Self:
        """For "cpu", "cuda" or "cuda:N". Call it after the page pool is allocated: what others
        use of the GPU at this moment is what later growth is measured against.

        `visible`: CUDA_VISIBLE_DEVICES, by default from the environment. `nvml`: by default the
        `pynvml` module. `ValueError` for another device name, nothing else.
        """
        cuda = cuda or Cuda()
        if device == "cpu":
            return cls(None, cuda, read_host)
        name = re.fullmatch(r"cuda(?::(\d+))?", device)
        if name is None:
            raise ValueError(f'device {device!r}: expected "cpu", "cuda" or "cuda:N"')
        if visible is None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reader = GpuReader(nvml, (int(name[1] or 0), visible, cuda.id), clock)
        reader.open()
        return cls(reader, cuda, read_host)

    @property
    def source(self) -> str:
        """Where the memory figures come from: "nvml", "cuda", "cgroup" or "host"; "": nowhere."""
        return self.last.source

    def poll(self) -> Health:
        """Read and judge. Never raises; a source that fails is named in the log, once."""
        self.last = judge(self._read(), self.last)
        return self.last

    def _read(self) -> Figures:
        if self._gpu is None:
            return Figures(memory=self._ask("host memory", self._read_host))
        figures = self._gpu.read()
        memory = self._device_memory
        if figures.nvml in ("lost", "gone") and memory is not None and memory.source == "nvml":
            return replace(figures, memory=memory)
        board = figures.board if figures.nvml == "working" else None
        self._device_memory = self._gpu_memory(board or BoardFigures())
        return replace(figures, memory=self._device_memory)

    def _gpu_memory(self, board: BoardFigures) -> Memory | None:
        own, own_source = board.own_bytes, "nvml"
        if own is None and self._cuda.own_bytes is not None:
            own, own_source = self._ask("CUDA's own use", self._cuda.own_bytes), "cuda"
        if board.free_bytes is not None and board.total_bytes is not None:
            return Memory(board.free_bytes, board.total_bytes, "nvml", own, own_source)
        if self._cuda.mem_get_info is not None:
            info = self._ask("CUDA's memory figures", self._cuda.mem_get_info)
            if info is not None and info[1] > 0:
                return Memory(info[0], info[1], "cuda", own, own_source)
        return self._ask("host memory", self._read_host)

    def _ask(self, name: str, source: Callable[[], Any]) -> Any | None:
        try:
            return source()
        except Exception as error:
            # Torch alone raises three unrelated kinds here; unknown memory must stop no worker.
            if name not in self._complaints:
                self._complaints.add(name)
                log.warning("%s cannot be read: %s", name, error)
            return None
