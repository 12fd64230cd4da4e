# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of a tile of query rows over a run of paged keys: the prefill and the decode kernel.

A program's rows are the (token, query head) pairs of one KV head (`query_tile`); it walks its keys
tile by tile (`attend_keys`, a loop of `attend_tile`).

The running softmax is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): a row carries the
largest score seen (`peak`), the sum of weights relative to it (`total`) and the weighted sum of V
(`acc`); a new tile rescales what went before. Scores are in units of log2, so that one `exp2` makes
a weight. Keys are gathered through a block table as in PagedAttention (Kwon et al. 2023,
arXiv:2309.06180): key `n` lies in page `table[n // PAGE_SIZE]`, slot `n % PAGE_SIZE`.

Invariants that callers keep:
- `keys_from <= key < keys_to` holds for exactly the keys that some row of the tile may see. Nothing
  outside is loaded, so freed pages, unwritten slots and what a peer left in a page's tail never
  enter, whatever their bytes: a masked load yields 0, and 0 * 0 is added to `acc`, not 0 * NaN.
- Page ids are widened to 64 bits before the multiplication: a pool has more than 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_tile(
    q,
    row_start,
    first_token,
    query_len,
    kv_head,
    stride_q_token,
    stride_q_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(q, tokens, heads, live) of `BLOCK_M // GROUP` tokens with all GROUP heads of a KV head.

    Token t of the sequence is row `row_start + t` of q. Rows that are not live are padding: 0.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    live = (rows < TOKENS * GROUP) & (tokens < query_len)
    wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (row_start + tokens).to(tl.int64) * stride_q_token + heads * stride_q_head
    tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=wanted, other=0.0)
    return tile, tokens, heads, live


@triton.jit
def pages_of(table, first_key, keys_from, keys_to, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each key of a tile; page 0 for keys outside `keys_from .. keys_to`.

    Callers load these one tile ahead and carry them. Were they loaded where they are used, Triton's
    pipeliner would take the table for the copy to overlap and keep a single buffer of K and V:
    copy, wait, compute, with nothing in flight (seen in the compiled code for 9.0).
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    present = (keys >= keys_from) & (keys < keys_to)
    return tl.load(table + keys // PAGE_SIZE, mask=present, other=0)


@triton.jit
def attend_tile(
    state,
    q,
    kv_head,
    pages,
    first_key,
    keys_from,
    keys_to,
    positions,
    scale_log2,
    stride_page,
    stride_half,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take keys `first_key .. first_key + BLOCK_N` into `state = (acc, peak, total)`.

    `kv_head` points at slot 0 of page 0 of this KV head, `stride_half` leads from K to V.
    MASKED=False promises that every row sees every key of the tile.
    """
    acc, peak, total = state
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if MASKED:
        present = (keys >= keys_from) & (keys < keys_to)
        wanted = present[:, None] & (dims < HEAD_DIM)[None, :]
    else:
        wanted = (keys >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    slots = pages.to(tl.int64) * stride_page + (keys % PAGE_SIZE) * HEAD_DIM
    places = kv_head + slots[:, None] + dims[None, :]
    if MASKED or HEAD_DIM < BLOCK_D:  # noqa: SIM108 (a branch of the compiler, not of the kernel)
        k = tl.load(places, mask=wanted, other=0.0)
    else:
        k = tl.load(places)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        visible = (keys < keys_to)[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has peak -inf, and -inf - -inf is NaN: measure from 0 instead.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(peak - base)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None]
    if MASKED or HEAD_DIM < BLOCK_D:
        v = tl.load(places + stride_half, mask=wanted, other=0.0)
    else:
        v = tl.load(places + stride_half)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit
def attend_keys(
    state,
    q,
    kv_head,
    table,
    run_from,
    run_to,
    keys_from,
    keys_to,
    positions,
    scale_log2,
    stride_page,
    stride_half,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`attend_tile` from key `run_from`, a tile's first, to `run_to`."""
    pages = pages_of(table, run_from, keys_from, keys_to, PAGE_SIZE, BLOCK_N)
    for first_key in range(run_from, run_to, BLOCK_N):
        following = pages_of(table, first_key + BLOCK_N, keys_from, keys_to, PAGE_SIZE, BLOCK_N)
        state = attend_tile(
            state, q, kv_head, pages, first_key, keys_from, keys_to, positions,
            scale_log2, stride_page, stride_half,
            HEAD_DIM, PAGE_SIZE, WINDOW, MASKED, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        pages = following
    return state


@triton.jit
def store_rows(
    out,
    tile,
    row_start,
    tokens,
    heads,
    live,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the live rows of a tile to `out` [T, num_heads, HEAD_DIM], contiguous."""
    dims = tl.arange(0, BLOCK_D)
    rows = ((row_start + tokens).to(tl.int64) * num_heads + heads) * HEAD_DIM
    wanted = live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + rows[:, None] + dims[None, :], tile.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(acc, peak, total) of rows that have seen no key."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    return acc, peak, total


@triton.jit
def average(acc, total):
    """Weighted mean of V; 0 for rows that saw no key."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
