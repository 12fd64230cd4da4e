"""The operations in plain torch: the oracle for every other backend, and a usable CPU backend.

Shapes: T new tokens, B sequences, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv),
D head dimension, ps page size. One layer's cache is `kv_layer [pages, 2, Hkv, ps, D]`: K, then V.

Slots that a sequence does not own may hold anything, NaN and huge values included: gathered copies
are zeroed there before any arithmetic, since a zero weight does not cancel a NaN (0 * NaN = NaN).

Attention on a step works in two ways, planned once per step and reused by every layer:
- decode rows (one new token) go in groups of similar length, each group one gather and one fused
  attention call; the query heads that share a key head act as that head's query rows;
- longer chunks go one by one.
Both read pages through `_gather`, whose index yields `[2, rows, Hkv, slots, D]` untransposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.head_norms import HeadNorms

GROUP_WASTE_SLOTS = 1024
"""A decode group may hold at most this many padding slots: about what one more group costs."""

GROUP_SLOTS = 16384
"""And this many slots in all: bounds the gathered copy (12 MiB for 3 bf16 heads of 64)."""


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Write `k`, `v` [T, Hkv, D] into the slots; rows with slot -1 are not stored."""
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    page_size = kv_layer.shape[3]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    kv_layer[page, 0, :, offset] = k
    kv_layer[page, 1, :, offset] = v


def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> Tensor:
    """Causal attention of `q` [T, Hq, D] over each row's own sequence; returns [T, Hq, D].

    A query at position p sees positions <= p, and with `window` only the `window` newest of them.
    The batch's K and V must have been stored. Scores and softmax are float32 inside the fused call.
    Rows of no sequence (beyond `cu_seqlens_q[-1]`) and of one with `seq_len` 0 come back as zeros.
    """
    key = ("reference", kv_layer.shape[1:], window, q.dtype)
    plan = batch.derived.get(key)
    if plan is None:
        plan = batch.derived[key] = _plan(batch, kv_layer, window, q.dtype)
    if plan.whole is not None:
        return _decode(q, kv_layer, plan.whole, scale)
    out = q.new_zeros(q.shape)
    for group in plan.decode:
        out[group.rows] = _decode(q[group.rows], kv_layer, group, scale)
    for chunk in plan.chunks:
        out[chunk.first : chunk.end] = _chunk(q[chunk.first : chunk.end], kv_layer, chunk, scale)
    return out


@dataclass(frozen=True)
class _Pages:
    """A gather of whole pages: `[2, rows, Hkv, slots, D]` out of one layer."""

    index: Tensor
    """int64 [2 * rows * Hkv * pages]; rows of the layer seen as [pages * 2 * Hkv, ps * D]."""
    unowned: Tensor
    """int64; rows of the gathered [2 * rows * Hkv * slots, D] that must be zeroed."""
    shape: tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _DecodeGroup:
    rows: Tensor
    """int64 [n]; rows of q."""
    pages: _Pages
    mask: Tensor | None
    """[n, 1, 1, slots] of q's dtype, 0 or -inf."""


@dataclass(frozen=True)
class _Chunk:
    first: int
    end: int
    """Rows first .. end of q."""
    pages: _Pages
    skip: int
    length: int
    """Slots skip .. skip + length of the gathered pages take part."""
    mask: Tensor | None
    """bool [queries, length]; None: plainly causal."""


@dataclass(frozen=True)
class _Plan:
    whole: _DecodeGroup | None
    """Set when the step is one decode group in row order: no scatter needed."""
    decode: list[_DecodeGroup]
    chunks: list[_Chunk]


@dataclass(frozen=True)
class _Span:
    """One sequence: query rows `first .. end`, keys at positions `begin .. length`."""

    sequence: int
    first: int
    end: int
    begin: int
    length: int


def _plan(batch: AttentionBatch, kv_layer: Tensor, window: int | None, dtype: torch.dtype) -> _Plan:
    bounds: list[int] = batch.cu_seqlens_q.tolist()
    lengths: list[int] = batch.seq_lens.tolist()
    spans = []
    for i, length in enumerate(lengths):
        first, end = bounds[i], bounds[i + 1]
        if length == 0 or first == end:
            continue
        oldest_query = length - (end - first)
        begin = 0 if window is None else max(0, oldest_query + 1 - window)
        spans.append(_Span(i, first, end, begin, length))
    single = [s for s in spans if s.end - s.first == 1]
    page_size = kv_layer.shape[3]
    groups = [_decode_group(group, batch, kv_layer, dtype) for group in _similar(single, page_size)]
    chunks = [_chunk_plan(s, batch, kv_layer, window) for s in spans if s.end - s.first > 1]
    total_rows = batch.positions.shape[0]
    in_order = len(groups) == 1 and not chunks and len(single) == total_rows
    return _Plan(groups[0] if in_order else None, groups, chunks)


def _similar(spans: Sequence[_Span], page_size: int) -> list[list[_Span]]:
    """Cut the spans into groups of similar length; row order is kept within a group."""

    def slots(span: _Span) -> int:
        return (-(-span.length // page_size) - span.begin // page_size) * page_size

    groups: list[list[_Span]] = []
    waste = widest = 0
    for span in sorted(spans, key=slots, reverse=True):
        waste += widest - slots(span)
        full = groups and (len(groups[-1]) + 1) * widest > GROUP_SLOTS
        if not groups or waste > GROUP_WASTE_SLOTS or full:
            groups.append([])
            waste, widest = 0, slots(span)
        groups[-1].append(span)
    return [sorted(group, key=lambda s: s.first) for group in groups]


def _page_gather(
    spans: Sequence[_Span], batch: AttentionBatch, kv_layer: Tensor
) -> tuple[_Pages, Tensor]:
    """The gather of the spans' pages, and which gathered slots each owns: bool [n, slots]."""
    _, _, heads, page_size, head_dim = kv_layer.shape
    device = kv_layer.device
    first_page = torch.tensor([s.begin // page_size for s in spans], device=device)
    count = max(-(-s.length // page_size) - s.begin // page_size for s in spans)
    columns = first_page[:, None] + torch.arange(count, device=device)
    table = batch.block_tables[[s.sequence for s in spans]].long()
    # Columns past a sequence's own pages are clamped: what they gather is not owned and zeroed.
    pages = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    kind = torch.arange(2, device=device).view(2, 1, 1, 1)
    head = torch.arange(heads, device=device).view(1, 1, heads, 1)
    index = (pages[None, :, None, :] * 2 + kind) * heads + head
    slot = torch.arange(count * page_size, device=device)
    position = first_page[:, None] * page_size + slot
    begin = torch.tensor([s.begin for s in spans], device=device)[:, None]
    length = torch.tensor([s.length for s in spans], device=device)[:, None]
    owned = (position >= begin) & (position < length)
    shape = (2, len(spans), heads, count * page_size, head_dim)
    unowned = (~owned)[None, :, None, :].expand(shape[:4]).reshape(-1).nonzero().flatten()
    return _Pages(index.reshape(-1), unowned, shape), owned


def _gather(kv_layer: Tensor, pages: _Pages) -> Tensor:
    rows = kv_layer.view(-1, kv_layer.shape[3] * kv_layer.shape[4])
    gathered = rows.index_select(0, pages.index)
    if pages.unowned.numel():
        gathered.view(-1, kv_layer.shape[4]).index_fill_(0, pages.unowned, 0)
    return gathered.view(pages.shape)


def _decode_group(
    spans: Sequence[_Span], batch: AttentionBatch, kv_layer: Tensor, dtype: torch.dtype
) -> _DecodeGroup:
    pages, owned = _page_gather(spans, batch, kv_layer)
    mask = None
    if pages.unowned.numel():
        mask = torch.zeros(owned.shape, dtype=dtype, device=owned.device)
        mask = mask.masked_fill_(~owned, float("-inf"))[:, None, None, :]
    rows = torch.tensor([s.first for s in spans], device=owned.device)
    return _DecodeGroup(rows, pages, mask)


def _decode(q: Tensor, kv_layer: Tensor, group: _DecodeGroup, scale: float) -> Tensor:
    k, v = _gather(kv_layer, group.pages).unbind(0)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=scale)
    return out.reshape(rows, heads, head_dim)


def _chunk_plan(span: _Span, batch: AttentionBatch, kv_layer: Tensor, window: int | None) -> _Chunk:
    pages, _ = _page_gather([span], batch, kv_layer)
    queries = span.end - span.first
    skip = span.begin % kv_layer.shape[3]
    keys = span.length - span.begin
    mask = None
    if queries != span.length or (window is not None and window < span.length):
        key = torch.arange(span.begin, span.length, device=kv_layer.device)
        query = torch.arange(span.length - queries, span.length, device=kv_layer.device)[:, None]
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    return _Chunk(span.first, span.end, pages, skip, keys, mask)


def _chunk(q: Tensor, kv_layer: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    k, v = _gather(kv_layer, chunk.pages).narrow(3, chunk.skip, chunk.length).unbind(0)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis (arXiv:1910.07467), float32 inside."""
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype) * weight


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`s = x + residual`; returns (rms_norm(s), s)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, cos_sin_table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by their positions; float32 inside, new tensors out."""
    heads = q.shape[1]
    both = torch.cat((q, k), dim=1)
    cos, sin = cos_sin_table[positions].unsqueeze(1).chunk(2, dim=-1)
    left, right = both.float().chunk(2, dim=-1)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    rotated = rotated.to(q.dtype)
    return rotated[:, :heads], rotated[:, heads:]


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], gate first; returns silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_store(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos_sin_table: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    heads = kv_layer.shape[2]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * heads, heads, heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    q, k = rope(q, k, cos_sin_table, positions)
    store_kv(k, v, kv_layer, slot_mapping)
    return q
