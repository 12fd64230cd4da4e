# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one new token per sequence over paged KV, the context split among programs.

Flash-Decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): with one row per
sequence there is no parallelism in queries, so several programs share a context, each leaves
a partial result and its softmax statistics, and a second kernel joins them. The query heads of
one KV head are the rows of one tile, padded to the 16 that a tensor-core instruction takes.

How a context is split depends on its own length, the model's heads and the card alone (`split_of`,
`triton_launch.split_config`), not on the batch: a row's result is bitwise the same whoever its
neighbours are and however the batch is padded. Adapting to the batch as well would save a large
batch its partial results, at most 1/8 of the bytes of K and V read (1/64 for a group of 4).
Longer contexts get longer splits, so the workspace is bounded by the number of splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.triton_launch import AttentionConfig, SplitConfig
from pageferry.kernels.triton_tile import (
    attend_keys,
    average,
    empty_state,
    query_tile,
    store_rows,
)

JOIN_AT_ONCE = 16
"""Partial results the joining kernel holds: fixed, so the order of additions never changes."""


@triton.jit
def split_of(
    seq_len,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first tile's first key, keys per split, number of splits) of one context."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    span = seq_len - first
    share = tl.cdiv(tl.cdiv(span, MAX_SPLITS), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, SPLIT_KEYS)
    return first, share, tl.cdiv(span, share)


@triton.jit
def decode_kernel(
    q,
    kv,
    out,
    partial,
    peaks,
    totals,
    tables,
    cu_seqlens,
    seq_lens,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_half,
    stride_kv_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (sequence, KV head, split). ALONE: one split is all, its result goes to `out`."""
    seq = tl.program_id(0)
    row_start = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - row_start
    seq_len = tl.load(seq_lens + seq)
    first, share, used = split_of(seq_len, WINDOW, SPLIT_KEYS, MAX_SPLITS, BLOCK_N)
    split = tl.program_id(2)
    if (split >= used) | (query_len == 0):
        return

    kv_head = tl.program_id(1)
    q_tile, tokens, heads, live = query_tile(
        q, row_start, 0, 1, kv_head, stride_q_token, stride_q_head,
        GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    positions = tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1)
    keys_from = 0
    if WINDOW > 0:
        keys_from = tl.maximum(seq_len - WINDOW, 0)
    run_from = first + split * share
    run_to = tl.minimum(run_from + share, seq_len)
    state = attend_keys(
        empty_state(BLOCK_M, BLOCK_D), q_tile, kv + kv_head.to(tl.int64) * stride_kv_head,
        tables + seq.to(tl.int64) * stride_table,
        run_from, run_to, keys_from, run_to, positions, scale_log2, stride_page, stride_half,
        HEAD_DIM, PAGE_SIZE, WINDOW, True, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, peak, total = state

    num_heads = tl.num_programs(1) * GROUP
    if ALONE:
        mean = average(acc, total)
        store_rows(out, mean, row_start, tokens, heads, live, num_heads, HEAD_DIM, BLOCK_D)
    else:
        dims = tl.arange(0, BLOCK_D)
        wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
        cells = (seq.to(tl.int64) * num_heads + heads) * tl.num_programs(2) + split
        tl.store(partial + cells[:, None] * HEAD_DIM + dims[None, :], acc, mask=wanted)
        tl.store(peaks + cells, peak, mask=live)
        tl.store(totals + cells, total, mask=live)


@triton.jit
def join_kernel(
    partial,
    peaks,
    totals,
    out,
    cu_seqlens,
    seq_lens,
    num_splits,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (sequence, query head): the weighted mean of that row's partial results.

    Only the first `used` cells of a row were written; the others hold whatever memory held.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(cu_seqlens + seq)
    if tl.load(cu_seqlens + seq + 1) == row:
        return
    seq_len = tl.load(seq_lens + seq)
    _first, _share, used = split_of(seq_len, WINDOW, SPLIT_KEYS, MAX_SPLITS, BLOCK_N)
    num_heads = tl.num_programs(1)
    cell = (seq.to(tl.int64) * num_heads + head) * num_splits
    dims = tl.arange(0, BLOCK_D)

    mean = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    peak = float("-inf")
    for first_split in range(0, used, AT_ONCE):
        splits = first_split + tl.arange(0, AT_ONCE)
        written = splits < used
        part_peaks = tl.load(peaks + cell + splits, mask=written, other=float("-inf"))
        part_totals = tl.load(totals + cell + splits, mask=written, other=0.0)
        places = partial + (cell + splits)[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(places, mask=written[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        # Finite: every written split holds at least one key that the row sees.
        new_peak = tl.maximum(peak, tl.max(part_peaks, 0))
        weights = tl.exp2(part_peaks - new_peak)
        kept = tl.exp2(peak - new_peak)
        mean = mean * kept + tl.sum(parts * weights[:, None], 0)
        total = total * kept + tl.sum(part_totals * weights, 0)
        peak = new_peak
    mean = mean / tl.where(total > 0.0, total, 1.0)
    places = out + (row.to(tl.int64) * num_heads + head) * HEAD_DIM + dims
    tl.store(places, mean.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def num_splits_of(max_seq_len: int, window: int, block_n: int, splits: SplitConfig) -> int:
    """Splits that the longest context of a batch may use: the grid's third axis."""
    span = max_seq_len
    if window:
        span = min(span, window + block_n - 1)  # the window's first tile may reach back
    return max(1, min(splits.most, -(-span // splits.keys)))


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale_log2: float,
    window: int,
    config: AttentionConfig,
    splits: SplitConfig,
) -> Tensor:
    """`paged_attention` where no sequence has more than one new token; `window` 0 means none."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_layer.shape[2], kv_layer.shape[3]
    num_seqs = batch.seq_lens.shape[0]
    num_splits = num_splits_of(batch.max_seq_len, window, config.block_n, splits)
    alone = num_splits == 1
    # Zeros, not `empty`: padding rows that belong to no sequence stay finite.
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    cells = (1,) if alone else (num_seqs, num_heads, num_splits)
    partial = torch.empty((*cells, head_dim), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, *cells), dtype=torch.float32, device=q.device)
    splitting = {"WINDOW": window, "SPLIT_KEYS": splits.keys, "MAX_SPLITS": splits.most}
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q, kv_layer, out, partial, statistics[0], statistics[1],
        batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, scale_log2,
        q.stride(0), q.stride(1),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), batch.block_tables.stride(0),
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        ALONE=alone, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
        num_warps=config.num_warps, num_stages=config.num_stages, **splitting,
    )  # fmt: skip
    if not alone:
        join_kernel[(num_seqs, num_heads)](
            partial, statistics[0], statistics[1], out, batch.cu_seqlens_q, batch.seq_lens,
            num_splits, HEAD_DIM=head_dim, AT_ONCE=JOIN_AT_ONCE,
            BLOCK_N=config.block_n, BLOCK_D=config.block_d, num_warps=4, **splitting,
        )  # fmt: skip
    return out
