"""What every part of `gpu.py` uses: sizes, the clock, the ceilings, and a book of outcomes.

A *case* is one thing that is checked or measured. It fails alone: the book keeps the reason, prints
it, and the run goes on; a run with failures ends with exit status 1. After a fault that costs the
process its device context nothing else can be measured: the remaining cases fail and name it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton.testing

from pageferry.kvtransfer.nvml_devices import (
    CudaId,
    GpuGone,
    NoSuchDevice,
    NvmlBoard,
    NvmlUnavailable,
    load_pynvml,
    optional,
)

SAMPLE_S = 0.5


@dataclass(frozen=True)
class Scale:
    """Sizes of everything; the defaults are Llama-3-8B's."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocab: int = 128_256
    layers: int = 32
    page_size: int = 16
    tokens: tuple[int, ...] = (128, 4096)
    """Rows of the row-wise kernels."""
    decode: tuple[tuple[int, int], ...] = ((1, 4096), (32, 4096), (128, 1024), (1, 65536))
    """(sequences, context) of the attention kernel."""
    prefill: tuple[tuple[tuple[int, int], ...], ...] = (
        ((0, 2048),),
        ((0, 8192),),
        ((1024, 512), (0, 300), (2047, 1), (777, 1)),
    )
    """(start, new tokens) of each sequence."""
    checked_tokens: int = 2048
    """Longest prefill that is compared with the oracle, which holds all scores in fp32."""
    sampled_rows: int = 32
    pages: int = 1024
    """Pages of a gather, of four times as many."""
    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (512, 4096)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    steps: int = 24
    copy_bytes: int = 2**30
    gemm: int = 8192
    staging_calls: int = 200


TINY = Scale(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inner=96,
    vocab=300,
    layers=2,
    tokens=(3,),
    decode=((1, 40), (2, 20)),
    prefill=(((0, 20),), ((16, 9), (0, 3), (20, 1))),
    checked_tokens=20,
    sampled_rows=4,
    pages=5,
    batches=(1, 3),
    contexts=(20,),
    prompts=(33,),
    steps=3,
    copy_bytes=2**12,
    gemm=16,
    staging_calls=6,
)
"""For `--dry-run`: every line runs, nothing is worth reading."""


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    part: str
    name: str
    value: float
    unit: str
    ms: float | None = None
    """Median time of one run."""
    of_ceiling: float | None = None
    """Fraction of the measured copy bandwidth or GEMM rate; above 1: it ran from cache."""
    note: str = ""


class OutOfTime(Exception):
    """The run's time is over; the case was not measured."""


@dataclass
class Bench:
    """Where a run happens and what it found."""

    device: torch.device
    scale: Scale
    deadline: float
    """time.monotonic() after which nothing is timed."""
    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    bytes_per_s: float = 0.0
    """Measured by a copy: bytes read plus bytes written."""
    flop_per_s: float = 0.0
    lost: str = ""

    @property
    def dry(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """fp32 in a dry run: Triton's interpreter computes bf16 products wrongly."""
        return torch.float32 if self.dry else torch.bfloat16

    @contextlib.contextmanager
    def case(self, part: str, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is kept as this case's failure."""
        try:
            yield
            self.sync()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip()
            if self.lost:
                reason = f"the device context was lost in {self.lost}"
            elif isinstance(error, torch.AcceleratorError):
                self.lost = f"{part}: {name}"
            self.failures[f"{part}: {name}"] = reason
            print(f"FAILED {part}: {name}: {reason}", flush=True)
            if not isinstance(error, OutOfTime):
                traceback.print_exc()
        else:
            self.checks.append(f"{part}: {name}")
            print(f"ok     {part}: {name}", flush=True)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def _in_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime("not measured: the time for this benchmark is over (--budget-s)")

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of `run` on the device, its inputs out of the cache."""
        self._in_time()
        if self.dry:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        ms: float = triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")
        return ms / 1e3

    def wall_seconds(self, run: Callable[[], object], times: int) -> float:
        """Median wall time of `run` until the device is done, after two runs that do not count."""
        self._in_time()
        taken = []
        for _ in range(times + 2):
            began = time.perf_counter()
            run()
            self.sync()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[2:])

    def add(self, part: str, name: str, seconds: float, work: dict[str, float]) -> None:
        """A row of a kernel that moves `bytes` or computes `flops`, against the ceiling."""
        if "flops" in work:
            rate, ceiling = work["flops"] / seconds, self.flop_per_s
            value, unit = rate / 1e12, "TFLOP/s"
        else:
            rate, ceiling = work["bytes"] / seconds, self.bytes_per_s
            value, unit = rate / 1e9, "GB/s"
        fraction = rate / ceiling if ceiling else None
        self.rows.append(Row(part, name, value, unit, seconds * 1e3, fraction))


def measure_ceilings(bench: Bench) -> None:
    """The copy and the matrix product that everything else is held against."""
    with bench.case("ceilings", "copy"):
        source = torch.ones(bench.scale.copy_bytes, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        seconds = bench.seconds(lambda: target.copy_(source))
        bench.bytes_per_s = 2 * source.numel() / seconds
        bench.add("ceilings", "copy", seconds, {"bytes": 2 * source.numel()})
    with bench.case("ceilings", "bf16 GEMM"):
        size = bench.scale.gemm
        left = torch.randn(size, size, device=bench.device).to(bench.dtype)
        right = torch.randn(size, size, device=bench.device).to(bench.dtype)
        seconds = bench.seconds(lambda: left @ right)
        bench.flop_per_s = 2 * size**3 / seconds
        bench.add("ceilings", "bf16 GEMM", seconds, {"flops": 2 * size**3})


class NvmlWatch:
    """Readings twice a second in a thread of its own, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.readings: list[dict[str, Any]] = []
        self.unavailable = "this is a dry run" if device.type == "cpu" else ""
        self._device = device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        if not self.unavailable:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def summary(self) -> dict[str, Any]:
        """Least, mean and largest of each number; the union of throttle reasons; XIDs."""
        if self.unavailable:
            return {"unavailable": self.unavailable}
        found: dict[str, Any] = {"readings": len(self.readings)}
        for name in ("sm_mhz", "memory_mhz", "watts", "celsius", "free_bytes"):
            values = [r[name] for r in self.readings if r.get(name) is not None]
            if values:
                mean = statistics.fmean(values)
                found[name] = {"least": min(values), "mean": mean, "most": max(values)}
        reasons = 0
        for reading in self.readings:
            reasons |= reading.get("throttle_reasons") or 0
        found["throttle_reasons"] = hex(reasons)
        found["xids"] = sorted({x for r in self.readings for x in r.get("xids") or ()})
        return found

    def _run(self) -> None:
        try:
            nvml = load_pynvml()
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            ordinal = self._device.index or 0
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            board = NvmlBoard.open(nvml, ordinal, visible, CudaId(uuid=uuid))
        except (NvmlUnavailable, NoSuchDevice) as error:
            self.unavailable = str(error)
            return
        try:
            while not self._over.wait(SAMPLE_S):
                self.readings.append(_reading(nvml, board))
        except (nvml.NVMLError, GpuGone) as error:
            self.unavailable = f"lost after {len(self.readings)} readings: {error}"
        finally:
            board.close()


def _reading(nvml: Any, board: NvmlBoard) -> dict[str, Any]:
    handle = board.target.board
    milliwatts = optional(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        **asdict(board.read()),
        "sm_mhz": optional(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": optional(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "celsius": optional(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "watts": None if milliwatts is None else milliwatts / 1e3,
    }
