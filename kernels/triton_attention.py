# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention over paged KV on the GPU: the store into pages, checks, dispatch.

A layer's step is `store_kv` (the new tokens' K and V go to their slots), then `paged_attention`,
which reads every key, the new ones included, from pages:

1. `max_query_len == 1`: triton_decode splits each context among programs and joins the parts.
2. Otherwise triton_prefill takes the ragged batch, prefill chunks and decode rows alike.

Both share triton_tile (the running softmax over one tile of gathered keys) and ask triton_launch
for their tiles. Sources: FlashAttention-2 (arXiv:2307.08691), Flash-Decoding
(https://pytorch.org/blog/flash-decoding/), PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.triton_decode import decode_attention
from pageferry.kernels.triton_launch import (
    AttentionShape,
    launch_config,
    next_power_of_2,
    split_config,
    warps_for,
)
from pageferry.kernels.triton_ops import device_capability, on_device_of
from pageferry.kernels.triton_prefill import prefill_attention


@triton.jit
def store_kv_kernel(
    k,
    v,
    kv,
    slot_mapping,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_page,
    stride_half,
    stride_kv_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program: one token, all its heads. Slots are int64, so page * stride cannot wrap."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < HEADS) & (dims < HEAD_DIM)
    places = kv + slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * HEAD_DIM
    places = places + heads * stride_kv_head + dims
    row = tl.load(k + token * stride_k_token + heads * stride_k_head + dims, mask=inside)
    tl.store(places, row, mask=inside)
    row = tl.load(v + token * stride_v_token + heads * stride_v_head + dims, mask=inside)
    tl.store(places + stride_half, row, mask=inside)


def store_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] into their slots of kv_layer [pages, 2, Hkv, page_size, D], in place.

    slot_mapping int64 [T] is page * page_size + offset; a negative slot stores nothing. Slots are
    not checked against the pool: a wrong one writes outside of it.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    if k.shape != v.shape or k.shape[1:] != (kv_layer.shape[2], kv_layer.shape[4]):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit kv_layer {tuple(kv_layer.shape)}"
        )
    if not k.dtype == v.dtype == kv_layer.dtype:
        raise ValueError(f"k is {k.dtype}, v is {v.dtype}, but kv_layer is {kv_layer.dtype}")
    _check_pages(kv_layer)
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError(f"k and v need a contiguous last axis, got {k.stride()}, {v.stride()}")
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_heads, block_d = next_power_of_2(num_heads), next_power_of_2(head_dim)
    with on_device_of(k):
        store_kv_kernel[(num_tokens,)](
            k, v, kv_layer, slot_mapping,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
            HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=kv_layer.shape[3],
            BLOCK_HEADS=block_heads, BLOCK_D=block_d, num_warps=warps_for(block_heads * block_d),
        )  # fmt: skip


def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of a ragged batch of new tokens over their sequences' pages.

    q [T, Hq, D]: the token and head strides are free, the last is 1. kv_layer
    [pages, 2, Hkv, page_size, D], Hq a multiple of Hkv, same dtype (fp32, fp16, bf16); slots of one
    page are adjacent. Query at position p sees keys p - window < key <= p (all up to p without a
    window). Softmax and sums are fp32; the result is [T, Hq, D] in q's dtype, contiguous. Rows
    of no sequence, and rows of a sequence with seq_len 0, are 0. Slots outside what a row may see
    are never read, whatever they hold.

    Raises ValueError for shapes, dtypes or strides outside of this.
    """
    _check(q, kv_layer, window)
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0 or batch.seq_lens.shape[0] == 0:
        return torch.zeros((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    shape = AttentionShape(head_dim, num_heads // kv_layer.shape[2], q.element_size())
    capability = device_capability(q.device)
    scale_log2 = scale * math.log2(math.e)
    with on_device_of(q):
        if batch.max_query_len == 1:
            config = launch_config("decode", shape, capability)
            splits = split_config(kv_layer.shape[2], shape.group, capability)
            return decode_attention(q, kv_layer, batch, scale_log2, window or 0, config, splits)
        config = launch_config("prefill", shape, capability)
        return prefill_attention(q, kv_layer, batch, scale_log2, window or 0, config)


def _check(q: Tensor, kv_layer: Tensor, window: int | None) -> None:
    if q.dim() != 3 or kv_layer.dim() != 5 or kv_layer.shape[1] != 2:
        raise ValueError(
            f"q must be [T, Hq, D] and kv_layer [pages, 2, Hkv, page_size, D], "
            f"got {tuple(q.shape)} and {tuple(kv_layer.shape)}"
        )
    if q.shape[2] != kv_layer.shape[4] or q.shape[1] % kv_layer.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit kv_layer {tuple(kv_layer.shape)}: head_dim must be "
            "equal and query heads a multiple of KV heads"
        )
    if q.dtype != kv_layer.dtype:
        raise ValueError(f"q is {q.dtype} but kv_layer is {kv_layer.dtype}; cast q to the pool's")
    if q.stride(2) != 1:
        raise ValueError(f"q needs a contiguous last axis, got strides {q.stride()}")
    _check_pages(kv_layer)
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")


def _check_pages(kv_layer: Tensor) -> None:
    if kv_layer.stride(4) != 1 or kv_layer.stride(3) != kv_layer.shape[4]:
        raise ValueError(
            f"slots of a page must be adjacent and contiguous, got kv_layer strides "
            f"{kv_layer.stride()} for shape {tuple(kv_layer.shape)}"
        )
