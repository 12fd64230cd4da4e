"""What the cores could do at best: measured ceilings, and the limit they set for a workload.

- Read bandwidth: every core at once sums memory of its own, far larger than the caches
  (`pf_read_bandwidth` of the CPU kernels; without them a torch reduction).
- GEMM rate: a bfloat16 product of two 2048 x 2048 matrices on all cores.

The limit for a load of n streams: a decode step reads all weights and the KV of n sequences; a
prompt token costs 2 x parameters FLOPs; both use all cores, one after the other, and nothing else
costs anything. Overlapping memory-bound with compute-bound work could pass it a little.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from pageferry.compose.bench_workload import Request
from pageferry.kernels.native import library

READ_BYTES = 512 * 2**20
REPEATS = 7
GEMM_SIZE = 2048


@dataclasses.dataclass(frozen=True)
class ModelSize:
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, model: Path) -> ModelSize:
        """Of a directory with safetensors, computed and cached in bfloat16."""
        parameters = 0
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    shape = tensors.get_slice(name).get_shape()
                    parameters += int(torch.Size(shape).numel())
        c = json.loads((model / "config.json").read_text())
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        heads = c.get("num_key_value_heads") or c["num_attention_heads"]
        return cls(parameters, 2 * parameters, 2 * 2 * c["num_hidden_layers"] * heads * head_dim)


@dataclasses.dataclass(frozen=True)
class Machine:
    cores: tuple[int, ...]
    read_bytes_per_s: float
    """All cores together."""
    gemm_flops_per_s: float


def read_bandwidth(cores: Sequence[int]) -> float:
    """Bytes/s that all `cores` read together; one thread pinned to each."""
    rates = [0.0] * len(cores)
    ready = threading.Barrier(len(cores))

    def read(index: int, core: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        ready.wait()
        rates[index] = _read_here()

    threads = [threading.Thread(target=read, args=item) for item in enumerate(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(rates):
        raise RuntimeError("the read bandwidth could not be measured on every core")
    return sum(rates)


def _read_here() -> float:
    if (lib := library()) is not None:
        return float(lib.pf_read_bandwidth(READ_BYTES, REPEATS))
    data = torch.ones(READ_BYTES // 4)
    fastest = min(_seconds(lambda: data.sum()) for _ in range(REPEATS))
    return READ_BYTES / fastest


def gemm_rate(cores: Sequence[int]) -> float:
    """bfloat16 FLOP/s of a large matrix product on all `cores`."""
    before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(len(cores))
    try:
        os.sched_setaffinity(0, cores)
        a = torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16()
        fastest = min(_seconds(lambda: a @ a) for _ in range(REPEATS))
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(before)
    return 2 * GEMM_SIZE**3 / fastest


def _seconds(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started


def measure(cores: Sequence[int]) -> Machine:
    """Takes about two seconds; nothing else should run."""
    return Machine(tuple(cores), read_bandwidth(cores), gemm_rate(cores))


def step_seconds(machine: Machine, model: ModelSize, sequences: int, context: float) -> float:
    """The least time of a decode step of `sequences` with `context` tokens each."""
    read = model.weight_bytes + sequences * context * model.kv_bytes_per_token
    return read / machine.read_bytes_per_s


def limit(
    machine: Machine, model: ModelSize, requests: Sequence[Request], streams: int
) -> dict[str, float]:
    """Output tokens/s that no system on these cores can pass with this load, and its two parts."""
    streams = min(streams, len(requests))
    prompt = sum(r.prompt for r in requests)
    output = sum(r.output for r in requests)
    context = sum(r.output * (r.prompt + r.output / 2) for r in requests) / output
    prefill_s = prompt * 2 * model.parameters / machine.gemm_flops_per_s
    decode_s = output / streams * step_seconds(machine, model, streams, context)
    return {
        "output_tokens_per_s": output / (prefill_s + decode_s),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "decode_step_ms": 1e3 * step_seconds(machine, model, streams, context),
        "prefill_tokens_per_s": machine.gemm_flops_per_s / (2 * model.parameters),
    }
