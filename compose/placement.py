"""Sharing one machine among its workers: which cores each gets, and whether memory suffices.

Two thread pools on the same cores slow each other tenfold, so each worker is pinned to cores of its
own as long as there are enough of them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pageferry.kvtransfer.host_memory import default_pool_bytes
from pageferry.kvtransfer.layout import DTYPE_BYTES
from pageferry.kvtransfer.settings import SettingsError, WorkerSettings

PROCESS_BYTES = 400 * 2**20
"""Resident memory of a worker without weights and pool, measured with torch 2.13 on CPU."""

TOPOLOGY = Path("/sys/devices/system/cpu")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
"""One entry per GPU, made by the driver; read instead of NVML so that `up` needs no library."""


def parse_cores(text: str) -> list[int]:
    """`"0-3,6"` to `[0, 1, 2, 3, 6]`; `SettingsError` for anything else."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise SettingsError(f'--cores {text!r}: expected a list such as "0-3" or "0,2"') from error
    return sorted(cores)


def allowed_cores(text: str) -> list[int]:
    """The cores to share out: `text` if given, else all that this process may run on."""
    allowed = os.sched_getaffinity(0)
    if not text:
        return sorted(allowed)
    cores = parse_cores(text)
    if missing := [c for c in cores if c not in allowed]:
        raise SettingsError(
            f"--cores {text}: core {missing[0]} is not available to this process "
            f"(available: {', '.join(map(str, sorted(allowed)))})"
        )
    return cores


def siblings_together(cores: Sequence[int], topology: Path = TOPOLOGY) -> list[int]:
    """`cores` reordered so that hardware threads of one physical core are adjacent."""

    def position(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            package = int((folder / "physical_package_id").read_text())
            return package, int((folder / "core_id").read_text()), core
        except (OSError, ValueError):
            return 0, core, core

    return sorted(cores, key=position)


def divide_cores(cores: Sequence[int], workers: int) -> list[str]:
    """One `--cores` value per worker: contiguous shares; one core each, round robin, if scarce."""
    if workers > len(cores):
        return [str(cores[i % len(cores)]) for i in range(workers)]
    bounds = [i * len(cores) // workers for i in range(workers + 1)]
    shares = [cores[low:high] for low, high in itertools.pairwise(bounds)]
    return [",".join(str(core) for core in sorted(share)) for share in shares]


def count_gpus(visible: str | None, driver: Path = NVIDIA_DRIVER) -> int:
    """NVIDIA GPUs that a worker would see, given CUDA_VISIBLE_DEVICES (None: not set)."""
    installed = len(list(driver.iterdir())) if driver.is_dir() else 0
    if visible is None or not installed:
        return installed
    listed = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    return len(listed)


def divide_gpus(gpus: int, workers: int, fraction: float) -> list[tuple[str, float]]:
    """(--device, --gpu-memory-fraction) per worker: GPUs in turn; those that share one share it."""
    on_gpu = [len(range(i, workers, gpus)) for i in range(gpus)]
    return [(f"cuda:{i % gpus}", round(fraction / on_gpu[i % gpus], 4)) for i in range(workers)]


def weight_bytes(model_dir: Path, dtype: str) -> int:
    """Memory that one worker needs for the weights in `model_dir`."""
    stored = sum(f.stat().st_size for f in model_dir.glob("*.safetensors"))
    # Checkpoints are 16 bit as a rule; "auto" stays with that where the hardware can.
    return stored * 2 if dtype == "float32" else stored


def pool_bytes(model_dir: Path, settings: WorkerSettings, available: int) -> int:
    """Memory of one worker's KV pool."""
    if not settings.num_pages:
        return settings.kv_memory_mib * 2**20 or default_pool_bytes(available)
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    itemsize = DTYPE_BYTES.get(settings.dtype, 2)
    page = 2 * kv_heads * head_dim * settings.page_size * itemsize * config["num_hidden_layers"]
    return int(page) * settings.num_pages


def check_memory(
    model_dir: Path, settings: WorkerSettings, workers: int, available: int, source: str
) -> None:
    """`SettingsError` with one sentence if `workers` workers do not fit into `available` bytes."""
    weights = weight_bytes(model_dir, settings.dtype)
    pool = pool_bytes(model_dir, settings, available)
    needed = workers * (weights + pool + PROCESS_BYTES)
    if needed > available:
        raise SettingsError(
            f"{workers} workers need about {needed / 2**30:.1f} GiB (each {_mib(weights)} of "
            f"weights, {_mib(pool)} of KV pages and {_mib(PROCESS_BYTES)} for the process), but "
            f"only {available / 2**30:.1f} GiB are available ({source}); "
            "take fewer workers, a smaller model or a lower --kv-memory-mib"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
