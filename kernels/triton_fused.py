# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""From the fused projection straight into the pages: q/k norm, rotation and store in one kernel.

Done apart, a step reads and writes q and k up to three times between the projection and attention
(norm, rotation, store). Here each value is read once from the projection's output; rotated q goes
to a new tensor, rotated k and plain v go to their slots. Values are rounded where the separate
operations round; only the norm's sum is added in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.head_norms import HeadNorms
from pageferry.kernels.triton_launch import next_power_of_2, warps_for
from pageferry.kernels.triton_ops import on_device_of


@triton.jit
def rotated(
    places,
    inside,
    weight,
    eps,
    cos,
    sin,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Both halves of a tile of heads, normed if NORM and turned; fp32."""
    left = tl.load(places, mask=inside, other=0.0)
    right = tl.load(places + HALF, mask=inside, other=0.0)
    stored = left.dtype
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    if NORM:
        dims = tl.arange(0, BLOCK_HALF)
        variance = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
        scale = tl.rsqrt(variance + eps)[:, None]
        left_weight = tl.load(weight + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        right_weight = tl.load(weight + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        left = (left * scale).to(stored).to(tl.float32) * left_weight[None, :]
        right = (right * scale).to(stored).to(tl.float32) * right_weight[None, :]
        left = left.to(stored).to(tl.float32)
        right = right.to(stored).to(tl.float32)
    new_left = left * cos[None, :] - right * sin[None, :]
    new_right = right * cos[None, :] + left * sin[None, :]
    return new_left, new_right


@triton.jit
def rope_store_kernel(
    qkv,
    q_out,
    kv,
    q_weight,
    k_weight,
    table,
    positions,
    slot_mapping,
    eps,
    stride_token,
    stride_head,
    stride_table,
    stride_page,
    stride_half,
    stride_kv_head,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (token, 0: its query heads, 1: its keys and values). Slots are int64."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    angles = table + tl.load(positions + token) * stride_table + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)
    row = qkv + token * stride_token
    if tl.program_id(1) == 0:
        heads = tl.arange(0, BLOCK_Q)[:, None]
        inside = (heads < Q_HEADS) & (dims < HALF)[None, :]
        left, right = rotated(
            row + heads * stride_head + dims[None, :], inside, q_weight, eps, cos, sin,
            HALF, NORM, BLOCK_HALF,
        )  # fmt: skip
        places = q_out + token * (Q_HEADS * HALF * 2) + heads * (HALF * 2) + dims[None, :]
        tl.store(places, left.to(q_out.dtype.element_ty), mask=inside)
        tl.store(places + HALF, right.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            heads = tl.arange(0, BLOCK_K)[:, None]
            inside = (heads < K_HEADS) & (dims < HALF)[None, :]
            from_k = row + (Q_HEADS + heads) * stride_head + dims[None, :]
            left, right = rotated(from_k, inside, k_weight, eps, cos, sin, HALF, NORM, BLOCK_HALF)
            places = kv + slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * (HALF * 2)
            places = places + heads * stride_kv_head + dims[None, :]
            tl.store(places, left.to(kv.dtype.element_ty), mask=inside)
            tl.store(places + HALF, right.to(kv.dtype.element_ty), mask=inside)
            from_v = from_k + K_HEADS * stride_head
            places = places + stride_half
            tl.store(places, tl.load(from_v, mask=inside), mask=inside)
            tl.store(places + HALF, tl.load(from_v + HALF, mask=inside), mask=inside)


def rope_store(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos_sin_table: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotate the new tokens' q and k, store k and v in their slots; returns q [T, Hq, D].

    qkv [T, Hq + 2 Hkv, D]: query, key, value heads of the projection, last axis contiguous, token
    and head strides free. kv_layer [pages, 2, Hkv, page_size, D] of qkv's dtype, written in place;
    slot_mapping int64 [T], a negative slot stores nothing. cos_sin_table fp32 [max_positions, D].
    Neither slots nor positions are checked against their ranges.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    tokens, heads, head_dim = qkv.shape
    kv_heads, page_size = kv_layer.shape[2], kv_layer.shape[3]
    q_heads = heads - 2 * kv_heads
    _check(qkv, norms, cos_sin_table, kv_layer, q_heads)
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half = head_dim // 2
    block_half, block_q = next_power_of_2(half), next_power_of_2(q_heads)
    with on_device_of(qkv):
        rope_store_kernel[(tokens, 2)](
            qkv, q, kv_layer, norms.q if norms else qkv, norms.k if norms else qkv,
            cos_sin_table, positions, slot_mapping, norms.eps if norms else 0.0,
            qkv.stride(0), qkv.stride(1), cos_sin_table.stride(0),
            kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
            Q_HEADS=q_heads, K_HEADS=kv_heads, HALF=half, PAGE_SIZE=page_size,
            NORM=norms is not None,
            BLOCK_Q=block_q, BLOCK_K=next_power_of_2(kv_heads), BLOCK_HALF=block_half,
            num_warps=warps_for(block_q * block_half),
        )  # fmt: skip
    return q


def _check(
    qkv: Tensor, norms: HeadNorms | None, table: Tensor, kv_layer: Tensor, q_heads: int
) -> None:
    head_dim = qkv.shape[2]
    if q_heads < 1 or kv_layer.shape[4] != head_dim or kv_layer.shape[1] != 2:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit kv_layer {tuple(kv_layer.shape)}: expected "
            "[T, Hq + 2 Hkv, D] and [pages, 2, Hkv, page_size, D]"
        )
    if head_dim % 2 or table.shape[-1] != head_dim or table.dtype != torch.float32:
        raise ValueError(
            f"head_dim {head_dim} must be even and the table fp32 [positions, {head_dim}], "
            f"got {table.dtype} {tuple(table.shape)}"
        )
    dtypes = {qkv.dtype, kv_layer.dtype} | ({norms.q.dtype, norms.k.dtype} if norms else set())
    if len(dtypes) != 1:
        raise ValueError(f"qkv, kv_layer and norms must have one dtype, got {dtypes}")
    if norms and not norms.q.shape == norms.k.shape == (head_dim,):
        raise ValueError(f"norms must be [{head_dim}], got {norms.q.shape} and {norms.k.shape}")
    if qkv.stride(2) != 1 or kv_layer.stride(4) != 1 or kv_layer.stride(3) != head_dim:
        raise ValueError(
            f"heads must be contiguous and slots of a page adjacent, got strides {qkv.stride()} "
            f"and {kv_layer.stride()}"
        )
