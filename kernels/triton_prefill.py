# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of a ragged batch over paged KV: prefill chunks, and decode rows mixed with them.

FlashAttention-2 tiling (arXiv:2307.08691) over pages. One program takes one KV head and up to
`BLOCK_M // GROUP` consecutive tokens of one sequence, with all GROUP query heads of that KV head as
rows: K and V are read once for the group, and a group of 3 wastes one row of 64, not a quarter.

Which sequence a program serves is found on the device: sequence `b` owns the program numbers
`cu[b] // TOKENS + b .. cu[b + 1] // TOKENS + b`, inclusive, which is at least as many as
its tokens need and at most one more, so `T // TOKENS + B` programs cover any batch and the host
never waits for lengths.

Keys go in two runs: tiles that all rows see whole, without masks, then the tiles that the diagonal
cuts. With a window the first run is masked too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.triton_launch import AttentionConfig
from pageferry.kernels.triton_tile import (
    attend_keys,
    average,
    empty_state,
    query_tile,
    store_rows,
)


@triton.jit
def sequence_of(program, cu_seqlens, num_seqs, TOKENS: tl.constexpr):
    """The last sequence whose first program number is at most `program`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens + middle) // TOKENS + middle
        low = tl.where(first <= program, middle, low)
        high = tl.where(first <= program, high, middle)
    return low


@triton.jit(do_not_specialize=["num_seqs"])
def prefill_kernel(
    q,
    kv,
    out,
    tables,
    cu_seqlens,
    seq_lens,
    num_seqs,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    seq = sequence_of(tl.program_id(0), cu_seqlens, num_seqs, TOKENS)
    row_start = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - row_start
    first_token = (tl.program_id(0) - row_start // TOKENS - seq) * TOKENS
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    start = seq_len - query_len  # position of the sequence's first new token

    kv_head = tl.program_id(1)
    q_tile, tokens, heads, live = query_tile(
        q, row_start, first_token, query_len, kv_head, stride_q_token, stride_q_head,
        GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip

    positions = start + tokens
    first_position = start + first_token
    keys_to = tl.minimum(first_position + TOKENS, seq_len)
    keys_from = 0
    if WINDOW > 0:
        keys_from = tl.maximum(first_position - WINDOW + 1, 0)
    run_from = keys_from // BLOCK_N * BLOCK_N
    run_to = (first_position + 1) // BLOCK_N * BLOCK_N  # keys before it: visible to every row
    run_to = tl.maximum(run_to, run_from)
    kv_head_start = kv + kv_head.to(tl.int64) * stride_kv_head
    table = tables + seq.to(tl.int64) * stride_table

    state = attend_keys(
        empty_state(BLOCK_M, BLOCK_D), q_tile, kv_head_start, table,
        run_from, run_to, keys_from, keys_to, positions, scale_log2, stride_page, stride_half,
        HEAD_DIM, PAGE_SIZE, WINDOW, WINDOW > 0, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    state = attend_keys(
        state, q_tile, kv_head_start, table,
        run_to, keys_to, keys_from, keys_to, positions, scale_log2, stride_page, stride_half,
        HEAD_DIM, PAGE_SIZE, WINDOW, True, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, _peak, total = state
    num_heads = tl.num_programs(1) * GROUP
    mean = average(acc, total)
    store_rows(out, mean, row_start, tokens, heads, live, num_heads, HEAD_DIM, BLOCK_D)


def prefill_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale_log2: float,
    window: int,
    config: AttentionConfig,
) -> Tensor:
    """`paged_attention`, which checks the arguments, for any ragged batch; `window` 0: none."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_layer.shape[2], kv_layer.shape[3]
    group = num_heads // num_kv_heads
    num_seqs = batch.seq_lens.shape[0]
    # Zeros, not `empty`: padding rows that belong to no sequence stay finite.
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    programs = num_tokens // (config.block_m // group) + num_seqs
    prefill_kernel[(programs, num_kv_heads)](
        q, kv_layer, out, batch.block_tables, batch.cu_seqlens_q, batch.seq_lens,
        num_seqs, scale_log2,
        q.stride(0), q.stride(1),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), batch.block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size, WINDOW=window,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=config.block_d,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
