"""Paged attention in Triton against a plain oracle: interpreted, and native where there is CUDA.

Pools are filled with NaN (or 1e38) but for the slots that the sequences own; pages are permuted.
The interpreter computes bf16 dot products wrongly without notice, hence fp32 and fp16 there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this platform")

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.triton_attention import paged_attention, store_kv
from pageferry.kernels.triton_decode import decode_attention, num_splits_of
from pageferry.kernels.triton_launch import (
    SHARED_BYTES,
    SMALLEST_SHARED_BYTES,
    AttentionShape,
    SplitConfig,
    launch_config,
    split_config,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Setup:
    chunks: tuple[tuple[int, int], ...]
    """(start, new tokens) of each sequence."""
    group: int = 3
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    garbage: float = math.nan


@dataclass(frozen=True)
class Problem:
    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    """[context, 2, Hkv, D] of each sequence: what its pages hold."""


def build(setup: Setup) -> Problem:
    generator = torch.Generator().manual_seed(7)
    lengths = [start + new for start, new in setup.chunks]
    width = max(1, *(-(-length // setup.page_size) for length in lengths))
    total = len(lengths) * width + 3
    # Page 0, where a table's padding points, is nobody's: reading it by mistake finds garbage.
    tables = torch.randperm(total - 1, generator=generator)[: len(lengths) * width] + 1
    tables = tables.reshape(len(lengths), width)
    shape = (total, 2, setup.kv_heads, setup.page_size, setup.head_dim)
    kv = torch.full(shape, setup.garbage).to(setup.dtype)
    keys = []
    for table, length in zip(tables, lengths, strict=True):
        own = torch.randn(length, 2, setup.kv_heads, setup.head_dim, generator=generator)
        own = own.to(setup.dtype)
        for position in range(length):
            page = table[position // setup.page_size]
            kv[page, :, :, position % setup.page_size] = own[position]
        keys.append(own)
    news = [new for _, new in setup.chunks]
    positions = [torch.arange(start, start + new) for start, new in setup.chunks]
    heads = setup.kv_heads * setup.group
    q = torch.randn(sum(news), heads, setup.head_dim, generator=generator).to(setup.dtype)
    batch = AttentionBatch(
        positions=torch.cat(positions).to(DEVICE),
        slot_mapping=torch.full((sum(news),), -1).to(DEVICE),
        cu_seqlens_q=torch.tensor([0, *news]).cumsum(0).to(torch.int32).to(DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(torch.int32).to(DEVICE),
        max_query_len=max(news),
        max_seq_len=max(lengths),
    )
    return Problem(q.to(DEVICE), kv.to(DEVICE), batch, keys)


def oracle(setup: Setup, problem: Problem, scale: float) -> Tensor:
    """One query at a time in float64, from the sequences themselves, not from pages."""
    rows, row = [], 0
    for (start, new), own in zip(setup.chunks, problem.keys, strict=True):
        k, v = own.double().repeat_interleave(setup.group, dim=2).unbind(1)
        for position in range(start, start + new):
            low = 0 if setup.window is None else max(0, position + 1 - setup.window)
            seen = slice(low, position + 1)
            scores = torch.einsum("hd,nhd->hn", problem.q[row].cpu().double(), k[seen]) * scale
            rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[seen]))
            row += 1
    return torch.stack(rows)


def attend(setup: Setup, problem: Problem) -> Tensor:
    scale = 1.3 / math.sqrt(setup.head_dim)
    return paged_attention(problem.q, problem.kv, problem.batch, scale, setup.window).cpu()


def check(setup: Setup) -> None:
    problem = build(setup)
    got = attend(setup, problem)
    want = oracle(setup, problem, 1.3 / math.sqrt(setup.head_dim))
    assert got.dtype == setup.dtype
    tolerance = TOLERANCE[setup.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


PREFILL = Setup(chunks=((0, 5), (0, 47), (17, 1)))
CONTINUED = Setup(chunks=((33, 9), (100, 70), (15, 1), (16, 16)))
DECODE = Setup(chunks=((0, 1), (15, 1), (16, 1), (299, 1)))


def check_strided_inputs() -> None:
    """q as a slice of a fused projection, kv_layer as one layer of a pool."""
    problem = build(CONTINUED)
    q = problem.q
    fused = torch.full((q.shape[0], q.shape[1] + 5, q.shape[2]), math.nan, device=DEVICE)
    fused[:, 2 : 2 + q.shape[1]] = q
    pool = torch.full((3, *problem.kv.shape), math.nan, device=DEVICE)
    pool[1] = problem.kv
    strided = replace(problem, q=fused[:, 2 : 2 + q.shape[1]], kv=pool[1])
    assert torch.equal(attend(CONTINUED, strided), attend(CONTINUED, problem))


def check_neighbours_and_padding() -> None:
    """A decode row's bits do not depend on its neighbours, on padding, or on max_seq_len."""
    setup = replace(DECODE, chunks=((40, 1), (699, 1)))
    problem = build(setup)
    both = attend(setup, problem)
    b = problem.batch
    first = replace(
        b,
        cu_seqlens_q=b.cu_seqlens_q[:2],
        seq_lens=b.seq_lens[:1],
        block_tables=b.block_tables[:1],
        max_seq_len=41,
    )
    alone = replace(problem, q=problem.q[:1], batch=first)
    assert torch.equal(attend(setup, alone)[0], both[0])
    padded = replace(
        b,
        cu_seqlens_q=torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32).to(DEVICE),
        seq_lens=torch.tensor([41, 700, 0, 0], dtype=torch.int32).to(DEVICE),
        block_tables=torch.cat((b.block_tables, b.block_tables * 0)),
        max_seq_len=1000,
    )
    q = torch.cat((problem.q, problem.q, problem.q))
    q[2:] = math.nan
    rows = attend(setup, replace(problem, q=q, batch=padded))
    assert torch.equal(rows[:2], both)
    assert torch.equal(rows[3:], torch.zeros_like(rows[3:]))


def check_padding_of_graphs() -> None:
    """As `cuda_graphs` pads: each row a sequence, context 0 beyond the live ones, whose tables keep
    what an earlier step left; the grid is launched for the longest context that the graph serves.
    """
    for start, longest in ((15, 64), (15, 700), (200, 300)):
        setup = replace(DECODE, chunks=((40, 1), (start, 1)))
        problem = build(setup)
        b = problem.batch
        padded = replace(
            b,
            positions=torch.cat((b.positions, b.positions)),
            slot_mapping=torch.cat((b.slot_mapping, b.slot_mapping)),
            cu_seqlens_q=torch.arange(5, dtype=torch.int32).to(DEVICE),
            seq_lens=torch.cat((b.seq_lens, b.seq_lens * 0)),
            block_tables=torch.cat((b.block_tables, b.block_tables)),
            max_seq_len=longest,
        )
        q = torch.cat((problem.q, torch.full_like(problem.q, math.nan)))
        rows = attend(setup, replace(problem, q=q, batch=padded))
        assert torch.equal(rows[:2], attend(setup, problem))
        assert torch.equal(rows[2:], torch.zeros_like(rows[2:]))


def check_splits_that_grow() -> None:
    """A context of more than `most` shortest splits: each takes more keys, none is left out."""
    setup = replace(DECODE, chunks=((640, 1), (3, 1), (320, 1)), kv_heads=1)
    problem = build(setup)
    shape = AttentionShape(setup.head_dim, setup.group, 4)
    config = replace(launch_config("decode", shape, (8, 0)), block_n=32)
    scale_log2 = math.log2(math.e) / 8
    got = decode_attention(
        problem.q, problem.kv, problem.batch, scale_log2, 0, config, SplitConfig(64, 5)
    )
    want = oracle(setup, problem, 1 / 8)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


def check_unused_rows_of_prefill() -> None:
    problem = build(PREFILL)
    q = torch.cat((problem.q, torch.full_like(problem.q[:70], math.nan)))
    rows = attend(PREFILL, replace(problem, q=q))
    assert torch.equal(rows[: len(problem.q)], attend(PREFILL, problem))
    assert torch.equal(rows[len(problem.q) :], torch.zeros_like(rows[len(problem.q) :]))


def check_store(head_dim: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Stored slots equal, slot -1 skipped, every other byte untouched; k and v strided."""
    fused = torch.randn(6, 3 * kv_heads, head_dim).to(dtype).to(DEVICE)
    k, v = fused[:, :kv_heads], fused[:, 2 * kv_heads :]
    kv = torch.full((5, 2, kv_heads, 8, head_dim), 7.0, dtype=dtype, device=DEVICE)
    slots = [39, -1, 0, 8, -1, 21]
    want = kv.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 8, 0, :, slot % 8] = k[row]
            want[slot // 8, 1, :, slot % 8] = v[row]
    store_kv(k, v, kv, torch.tensor(slots, device=DEVICE))
    assert torch.equal(kv, want)


def check_high_page_ids() -> None:
    """A pool of more than 2**31 elements whose last pages are in use.

    Memory (fp16: 4.3 GB) is reserved, not committed: what nobody touches takes no RAM.
    """
    shape = (2**31 // (2 * 2 * 16 * 64) + 8, 2, 2, 16, 64)
    nbytes = 2 * math.prod(shape)
    if DEVICE == "cuda":
        pool = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    else:
        from triton.runtime import interpreter

        # The interpreter ends a launch by copying every argument's memory onto itself.
        interpreter.GridExecutor._restore_args_dev = lambda *_args: None
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; named from 3.13 on
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        memory = mmap.mmap(-1, nbytes, flags=flags)
        pool = torch.frombuffer(memory, dtype=torch.float16).view(shape)
    setup = Setup(chunks=((20, 1), (4, 3)), dtype=torch.float16)
    problem = build(setup)
    low = attend(setup, problem)
    far = problem.batch.block_tables + (shape[0] - problem.kv.shape[0])
    pool[-problem.kv.shape[0] :] = problem.kv
    moved = replace(problem, kv=pool, batch=replace(problem.batch, block_tables=far))
    assert torch.equal(attend(setup, moved), low)
    decode = replace(setup, chunks=((20, 1), (4, 1)))
    small = build(decode)
    pool[-small.kv.shape[0] :] = small.kv
    far = small.batch.block_tables + (shape[0] - small.kv.shape[0])
    moved = replace(small, kv=pool, batch=replace(small.batch, block_tables=far))
    assert torch.equal(attend(decode, moved), attend(decode, small))
    rows = torch.randn(1, 2, 64, device=DEVICE).to(torch.float16)
    store_kv(rows, rows + 1, pool, torch.tensor([shape[0] * 16 - 1], device=DEVICE))
    assert torch.equal(pool[-1, 0, :, 15], rows[0])
    assert torch.equal(pool[-1, 1, :, 15], rows[0] + 1)


CASES: dict[str, Callable[[], Any]] = {
    "strided_inputs": check_strided_inputs,
    "neighbours_and_padding": check_neighbours_and_padding,
    "padding_of_graphs": check_padding_of_graphs,
    "unused_rows_of_prefill": check_unused_rows_of_prefill,
    "high_page_ids": check_high_page_ids,
    "store-64-3": partial(check_store, 64, 3, torch.float32),
    "store-72-2": partial(check_store, 72, 2, torch.float16),
    "decode-long": check_splits_that_grow,
    "decode-long-window": partial(
        check, replace(DECODE, chunks=((2000, 1), (3, 1)), kv_heads=1, window=601)
    ),
}
for _kind, _setup in (("prefill", PREFILL), ("continued", CONTINUED), ("decode", DECODE)):
    _brief = _setup is CONTINUED  # the interpreter is slow, and this is the prefill kernel again
    for _dim in (64, 80) if _brief else (16, 64, 72, 80, 96, 112, 128, 256):
        CASES[f"{_kind}-dim{_dim}"] = partial(check, replace(_setup, head_dim=_dim))
    for _size in (8, 32):
        CASES[f"{_kind}-page{_size}"] = partial(check, replace(_setup, page_size=_size))
    for _group in (1, 8) if _brief else (1, 4, 8, 17):
        CASES[f"{_kind}-group{_group}"] = partial(check, replace(_setup, group=_group))
    for _window in (1, 20, 64, 1000):
        CASES[f"{_kind}-window{_window}"] = partial(check, replace(_setup, window=_window))
    CASES[f"{_kind}-fp16"] = partial(check, replace(_setup, dtype=torch.float16))
    CASES[f"{_kind}-huge"] = partial(check, replace(_setup, garbage=1e38, window=20))
    if DEVICE == "cuda":
        CASES[f"{_kind}-bf16"] = partial(check, replace(_setup, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_and_cover(capability: tuple[int, int], itemsize: int) -> None:
    for head_dim in (16, 64, 72, 128, 256):
        for group in (1, 3, 16):
            shape = AttentionShape(head_dim, group, itemsize)
            for phase in ("prefill", "decode"):
                config = launch_config(phase, shape, capability)
                assert config.block_m >= max(16, group)
                assert head_dim <= config.block_d < 2 * head_dim
                limit = SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)
                assert config.shared_bytes(itemsize) <= limit, (head_dim, group, phase, config)


def test_a_group_beyond_the_usual_tile() -> None:
    shape = AttentionShape(64, 200, 2)
    assert launch_config("prefill", shape, (9, 0)).block_m == 256
    assert launch_config("decode", shape, (9, 0)).block_m == 256


def test_no_tile_fits() -> None:
    with pytest.raises(ValueError, match="group=71"):
        launch_config("decode", AttentionShape(256, 71, 4), (8, 6))


def test_head_dim_out_of_range() -> None:
    with pytest.raises(ValueError, match="head_dim 257"):
        launch_config("decode", AttentionShape(257, 1, 2), (9, 0))


def test_splits_are_enough_for_every_row() -> None:
    """The kernel's own count (a function of the row's length) never exceeds the grid's."""
    for splits in (SplitConfig(256, 64), SplitConfig(64, 256), SplitConfig(256, 17)):
        for window in (0, 1, 63, 64, 601, 5000):
            for seq_len in (1, 255, 256, 257, 5000, splits.keys * splits.most, 17161, 131072):
                first = max(seq_len - window, 0) // 64 * 64 if window else 0
                span = seq_len - first
                share = max(splits.keys, math.ceil(math.ceil(span / splits.most) / 64) * 64)
                assert math.ceil(span / share) <= num_splits_of(seq_len, window, 64, splits)


@pytest.mark.parametrize(
    ("capability", "processors"), [((8, 0), 108), ((9, 0), 132), ((10, 0), 148)]
)
def test_one_long_context_fills_the_card(capability: tuple[int, int], processors: int) -> None:
    for kv_heads, group in ((1, 8), (2, 6), (3, 3), (8, 4), (32, 1)):
        splits = split_config(kv_heads, group, capability)
        assert splits.keys % 64 == 0  # whole tiles
        assert splits.keys >= 8 * group
        programs = kv_heads * num_splits_of(131072, 0, 64, splits)
        assert programs >= 1.7 * processors, (kv_heads, splits)
        assert programs <= 5 * processors, (kv_heads, splits)
    assert split_config(1, 32, capability).keys == 256


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "dtype", "window", "message"),
    [
        ((2, 6, 64), (4, 2, 2, 16, 32), torch.float32, None, "does not fit"),
        ((2, 5, 64), (4, 2, 2, 16, 64), torch.float32, None, "does not fit"),
        ((2, 6, 64), (4, 2, 2, 16, 64), torch.float16, None, "cast q"),
        ((2, 6, 64), (4, 2, 2, 16, 64), torch.float32, 0, "window"),
        ((2, 6, 64), (4, 3, 2, 16, 64), torch.float32, None, "must be"),
    ],
)
def test_refused_arguments(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
    window: int | None,
    message: str,
) -> None:
    batch = build(DECODE).batch
    with pytest.raises(ValueError, match=message):
        paged_attention(
            torch.zeros(q_shape, dtype=dtype), torch.zeros(kv_shape), batch, 1.0, window
        )
