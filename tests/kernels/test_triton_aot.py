# ruff: noqa: E402 (what follows importorskip needs triton)
"""The GPU binaries themselves, without a GPU: compile each kernel and read what ptxas made of it.

A child process gives Triton a driver that names an architecture and nothing else, and takes kernels
from `JITFunction.run` before they are launched. The public functions then run as they would on that
card: their own arguments, alignment, `launch_config` and specialisations are what is compiled.
Register counts are printed (`pytest -rP`) and recorded as properties, not demanded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pageferry.kernels import (
    triton_attention,
    triton_fused,
    triton_ops,
    triton_pages,
    triton_sampling,
)
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.head_norms import HeadNorms
from pageferry.kernels.triton_launch import SHARED_BYTES

ARCHES = (80, 90, 100)
DTYPE = torch.bfloat16
PAGE_SIZE = 16
INSTRUCTIONS = (
    "mma.sync",
    "wgmma.mma_async",
    "tcgen05.mma",
    "cp.async.cg",
    "ld.global.v4",
    "ld.global.v2.b64",
    "st.global.v2.b64",
)


class NamedTarget:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches kernels by device: one per architecture

    def get_current_stream(self, _device: int) -> int:
        return 0


def compiled(arch: int, call: Callable[[], object]) -> list[dict[str, Any]]:
    """What each kernel launched by `call` became on `arch`."""
    found: list[dict[str, Any]] = []
    launch = JITFunction.run

    def take(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        found.append(measured(self.__name__, kernel, log.getvalue()))

    driver.set_active(NamedTarget(arch))
    capability = triton_attention.device_capability
    triton_attention.device_capability = lambda _device: divmod(arch, 10)
    JITFunction.run = take
    try:
        call()
    finally:
        JITFunction.run = launch
        triton_attention.device_capability = capability
    return found


def measured(name: str, kernel: Any, ptxas_log: str) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    (registers,) = re.findall(r"Used (\d+) registers", ptxas_log)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas_log)
    return {
        "kernel": name,
        "registers": int(registers),
        "spilled": int(stores) + int(loads),
        "shared": kernel.metadata.shared,
        "target": re.findall(r"\.target (\w+)", ptx)[0],
        **{word: ptx.count(word) for word in INSTRUCTIONS},
    }


def attention(head_dim: int, new_tokens: int, window: int | None = None) -> object:
    sequences = 3
    tokens = sequences * new_tokens
    q = torch.empty(tokens, 12, head_dim, dtype=DTYPE)
    kv = torch.empty(4, 2, 4, PAGE_SIZE, head_dim, dtype=DTYPE)
    batch = AttentionBatch(
        positions=torch.zeros(tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        cu_seqlens_q=torch.zeros(sequences + 1, dtype=torch.int32),
        seq_lens=torch.zeros(sequences, dtype=torch.int32),
        block_tables=torch.zeros(sequences, 256, dtype=torch.int32),
        max_query_len=new_tokens,
        max_seq_len=4096,
    )
    return triton_attention.paged_attention(q, kv, batch, 0.1, window)


def rows() -> None:
    x = torch.empty(6, 2048, dtype=DTYPE)
    heads = torch.empty(6, 12, 64, dtype=DTYPE)
    kv = torch.empty(4, 2, 12, PAGE_SIZE, 64, dtype=DTYPE)
    numbers = torch.zeros(6, dtype=torch.int64)
    triton_ops.rms_norm(x, x[0], 1e-5)
    triton_ops.fused_add_rms_norm(x, x, x[0], 1e-5)
    triton_ops.rope(heads, heads, torch.empty(8, 64), numbers)
    triton_ops.silu_mul(x)
    triton_attention.store_kv(heads, heads, kv, numbers)


def fused(norm: bool) -> None:
    """Llama-3-8B's heads, one layer's pages."""
    qkv, weight = torch.empty(6, 48, 128, dtype=DTYPE), torch.empty(128, dtype=DTYPE)
    norms = HeadNorms(weight, weight, 1e-6) if norm else None
    kv = torch.empty(4, 2, 8, PAGE_SIZE, 128, dtype=DTYPE)
    numbers = torch.zeros(6, dtype=torch.int64)
    triton_fused.rope_store(qkv, norms, torch.empty(8, 128), numbers, kv, numbers)


def pages() -> None:
    kv = torch.empty(3, 9, 2, 8, PAGE_SIZE, 128, dtype=DTYPE)
    listed = torch.zeros(5, dtype=torch.int64)
    triton_pages.gather_pages(kv, listed, kv[:, :5])
    triton_pages.scatter_pages(kv[1:2, :5], listed, kv[1:2])


def sampling() -> None:
    logits, ints = torch.empty(4, 128_256), torch.zeros(4, dtype=torch.int64)
    reals = torch.zeros(4, dtype=torch.float64)
    maxima = triton_sampling.row_maxima(logits)
    params = triton_sampling.DrawParams(reals, reals, ints, ints, reals, cut=True)
    triton_sampling.draw(logits, maxima, params)


CALLS: dict[str, Callable[[], object]] = {
    "fused": partial(fused, False),
    "fused-norm": partial(fused, True),
    "pages": pages,
    "sampling": sampling,
    "prefill-64": partial(attention, 64, 50),
    "prefill-128": partial(attention, 128, 50),
    "prefill-128-window": partial(attention, 128, 50, window=1000),
    "decode-64": partial(attention, 64, 1),
    "decode-128": partial(attention, 128, 1),
    "rows": rows,
}
CASES = {
    f"{name}-sm_{arch}": partial(compiled, arch, call)
    for arch in ARCHES
    for name, call in CALLS.items()
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Kernels by case. The cache is a fresh one: a cached kernel has no ptxas log."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton-cache")),
    }
    command = [sys.executable, str(Path(__file__).with_name("triton_child.py")), __file__]
    child = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    failed = [line["case"] + ": " + line["error"] for line in lines if line["error"]]
    assert not failed, "\n".join(failed)
    assert child.returncode == 0, child.stderr[-4000:]
    return {line["case"]: line["value"] for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_no_spills_and_fits(
    kernels: dict[str, list[dict[str, Any]]],
    case: str,
    record_property: Callable[[str, object], None],
) -> None:
    arch = int(case.rsplit("_", 1)[1])
    for kernel in kernels[case]:
        print(case, kernel)
        record_property(kernel["kernel"], kernel)
        assert kernel["target"].startswith(f"sm_{arch}")
        assert kernel["spilled"] == 0
        assert kernel["shared"] <= SHARED_BYTES[divmod(arch, 10)]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("prefill")])
def test_prefill_uses_the_archs_tensor_cores_on_copies_in_flight(
    kernels: dict[str, list[dict[str, Any]]], name: str, arch: int
) -> None:
    (kernel,) = kernels[f"{name}-sm_{arch}"]
    words = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    assert [word for word in words.values() if kernel[word]] == [words[arch]]
    assert kernel["cp.async.cg"] > 0
    assert kernel["ld.global.v4"] > 0  # q, 16 bytes a load


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_keeps_several_tiles_in_flight(
    kernels: dict[str, list[dict[str, Any]]], head_dim: int, arch: int
) -> None:
    """A tile of K and V is 2 * 64 * head_dim bf16; one alone in shared memory means no overlap."""
    decode, join = kernels[f"decode-{head_dim}-sm_{arch}"]
    assert (decode["kernel"], join["kernel"]) == ("decode_kernel", "join_kernel")
    assert decode["mma.sync"] > 0
    assert decode["cp.async.cg"] > 0
    assert decode["shared"] >= 2 * (2 * 64 * head_dim * 2)


@pytest.mark.parametrize("arch", ARCHES)
def test_row_kernels_load_wide(kernels: dict[str, list[dict[str, Any]]], arch: int) -> None:
    found = {kernel["kernel"]: kernel for kernel in kernels[f"rows-sm_{arch}"]}
    assert len(found) == 5
    for name in ("rms_norm_kernel", "fused_add_rms_norm_kernel", "silu_mul_kernel"):
        assert found[name]["ld.global.v4"] > 0, name


@pytest.mark.parametrize("arch", ARCHES)
def test_copies_of_pages_move_sixteen_bytes_a_time(
    kernels: dict[str, list[dict[str, Any]]], arch: int
) -> None:
    gather, scatter = kernels[f"pages-sm_{arch}"]
    for kernel in (gather, scatter):
        assert kernel["kernel"] == "copy_pages_kernel"
        assert kernel["ld.global.v2.b64"] > 0, kernel
        assert kernel["st.global.v2.b64"] > 0, kernel


@pytest.mark.parametrize("arch", ARCHES)
def test_fused_and_sampling_kernels_load_wide(
    kernels: dict[str, list[dict[str, Any]]], arch: int
) -> None:
    for name in ("fused", "fused-norm"):
        (kernel,) = kernels[f"{name}-sm_{arch}"]
        assert kernel["ld.global.v4"] > 0, kernel
        assert kernel["registers"] <= 64, kernel  # 1,024 threads of a processor or more
    found = {kernel["kernel"]: kernel for kernel in kernels[f"sampling-sm_{arch}"]}
    assert len(found) == 5
    for name in ("maxima_kernel", "draw_kernel"):
        assert found[name]["ld.global.v4"] > 0, name
