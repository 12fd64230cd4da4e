"""Which device, which data type, which cores: decided once, at the start of a worker.

Each worker pins its own cores and uses as many compute threads as it has cores. Two thread pools
on the same cores slow each other tenfold, so workers on one machine should be given disjoint cores.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class DeviceError(ValueError):
    """The wanted device, data type or cores are not there; the message says what is."""


def pick_device(name: str) -> torch.device:
    """ "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not match:
        raise DeviceError(f'device {name!r} is not "auto", "cpu", "cuda" or "cuda:N"')
    if not count:
        raise DeviceError(f"device {name!r}: torch sees no CUDA device here; use cpu or auto")
    index = int(match[1] or 0)
    if index >= count:
        raise DeviceError(f"device {name!r}: there are {count} CUDA devices, numbered from 0")
    return torch.device("cuda", index)


def pick_dtype(name: str, device: torch.device, cpuinfo: Path = CPUINFO) -> torch.dtype:
    """A name of `DTYPES`, or "auto": bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        if name not in DTYPES:
            raise DeviceError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = bool(cpu_flags(cpuinfo) & {"avx512_bf16", "amx_bf16", "bf16"})
    return torch.bfloat16 if native else torch.float32


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Instruction set flags of the first core; empty where the kernel does not list them."""
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def allowed_cores() -> list[int]:
    """Cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota_cores(cpu_max: Path = CPU_QUOTA) -> int | None:
    """Cores' worth of time that a container may use (cgroup v2 `cpu.max`), rounded up, or None.

    More compute threads than this are stopped in the middle of each other's work.
    """
    if not cpu_max.is_file():
        return None
    quota, _, period = cpu_max.read_text(encoding="utf-8").partition(" ")
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def parse_cores(text: str) -> list[int]:
    """ "0", "0-3" or "0,2,5-6" -> core numbers, ascending, each once."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise DeviceError(
                f'cores {text!r}: {part!r} is neither a number nor a range like "0-3"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > 4095:
            raise DeviceError(f"cores {text!r}: {part!r} is not a range of core numbers")
        cores.update(range(first, last + 1))
    return sorted(cores)


def pin_cores(text: str) -> list[int]:
    """Bind this thread and those it starts to the cores; one compute thread per core.

    Empty text: all cores this process is allowed, and no more threads than its quota. Call it
    before the first tensor operation: threads that torch has already started stay where they are.
    Returns the cores.
    """
    allowed = allowed_cores()
    cores = parse_cores(text) if text.strip() else allowed
    missing = sorted(set(cores) - set(allowed))
    if missing:
        raise DeviceError(
            f"cores {text!r}: {', '.join(map(str, missing))} not available; this process may use "
            f"{', '.join(map(str, allowed))}"
        )
    if text.strip():
        if not hasattr(os, "sched_setaffinity"):
            raise DeviceError("this system cannot pin cores; leave the setting empty")
        os.sched_setaffinity(0, cores)
    threads = len(cores) if text.strip() else min(len(cores), quota_cores() or len(cores))
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    return cores
