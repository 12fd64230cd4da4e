# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels that treat token rows one by one: norms, rotation, the gated activation.

All are bound by memory: each input is read once, everything in between is fp32 in registers, each
output is written once. They round where the torch reference rounds (the normalised row before the
weight, silu before the product), so the two backends differ by the order of additions alone.

Inputs may be strided in their leading axes (slices of a fused projection); the last axis is
contiguous. Outputs are new and contiguous. Row offsets are 64-bit; nothing outside the rows and
columns of a tensor is read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.triton_launch import (
    TILE_ELEMENTS,
    next_power_of_2,
    rows_config,
    warps_for,
)


@lru_cache(maxsize=64)
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (8, 0), the smallest that is tuned for, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    guard: AbstractContextManager[object] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return guard


@triton.jit
def normalize(x, weight, eps, COLUMNS: tl.constexpr):
    """RMSNorm (arXiv:1910.07467) of fp32 rows [ROWS, BLOCK]; columns past COLUMNS hold 0."""
    variance = tl.sum(x * x, 1) / COLUMNS
    normed = x * tl.rsqrt(variance + eps)[:, None]
    return normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    num_rows,
    inner_rows,
    stride_outer,
    stride_inner,
    eps,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r is x[r // inner_rows, r % inner_rows]: one kernel for [T, D] and [T, H, D]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    starts = (rows // inner_rows).to(tl.int64) * stride_outer + (rows % inner_rows) * stride_inner
    row = tl.load(x + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < COLUMNS, other=0.0)
    places = out + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tl.store(places, normalize(row, scale, eps, COLUMNS).to(out.dtype.element_ty), mask=inside)


@triton.jit
def fused_add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    num_rows,
    stride_x,
    stride_residual,
    eps,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    x_places = x + rows[:, None] * stride_x + columns[None, :]
    residual_places = residual + rows[:, None] * stride_residual + columns[None, :]
    added = tl.load(x_places, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual_places, mask=inside, other=0.0).to(tl.float32)
    added = added.to(new_residual.dtype.element_ty)  # the norm sees what the next layer will see
    places = rows[:, None] * COLUMNS + columns[None, :]
    tl.store(new_residual + places, added, mask=inside)
    scale = tl.load(weight + columns, mask=columns < COLUMNS, other=0.0)
    normed = normalize(added.to(tl.float32), scale, eps, COLUMNS)
    tl.store(out + places, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    x,
    out,
    cos,
    sin,
    token,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    inside = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    places = x + token * stride_token + heads[:, None] * stride_head + dims[None, :]
    left = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    new_left = left * cos[None, :] - right * sin[None, :]
    new_right = right * cos[None, :] + left * sin[None, :]
    places = out + token * (HEADS * HALF * 2) + heads[:, None] * (HALF * 2) + dims[None, :]
    tl.store(places, new_left.to(out.dtype.element_ty), mask=inside)
    tl.store(places + HALF, new_right.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q,
    k,
    q_out,
    k_out,
    table,
    positions,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_table,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program: one token, all its heads. A table row is cos (HALF values), then sin."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    angles = table + tl.load(positions + token) * stride_table + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)
    rotate_heads(
        q, q_out, cos, sin, token, stride_q_token, stride_q_head,
        Q_HEADS, HALF, BLOCK_Q, BLOCK_HALF,
    )  # fmt: skip
    rotate_heads(
        k, k_out, cos, sin, token, stride_k_token, stride_k_head,
        K_HEADS, HALF, BLOCK_K, BLOCK_HALF,
    )  # fmt: skip


@triton.jit
def silu_mul_kernel(gate_up, out, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    gate = tl.load(gate_up + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + COLUMNS + columns, mask=inside, other=0.0)
    # exp overflows to inf below gate = -88, and gate / inf = -0, as silu has it.
    gate = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    product = gate * up.to(tl.float32)
    tl.store(out + token * COLUMNS + columns, product.to(out.dtype.element_ty), mask=inside)


def _contiguous_last(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1:
        raise ValueError(f"{name}'s last axis must be contiguous, got strides {x.stride()}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of x [T, N] or [T, H, N], times weight [N] of x's dtype."""
    _contiguous_last("x", x)
    if x.dim() not in (2, 3) or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"x must be [T, N] or [T, H, N] and weight [N] of the same dtype, got "
            f"{tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * inner
    if num_rows == 0:
        return out
    config = rows_config(x.shape[-1])
    with on_device_of(x):
        rms_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
            x, weight, out, num_rows, inner, x.stride(0), x.stride(1), eps,
            COLUMNS=x.shape[-1], ROWS=config.rows, BLOCK=config.columns,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`s = x + residual` [T, N], rounded to their dtype; returns (rms_norm(s), s), both new."""
    _contiguous_last("x", x)
    _contiguous_last("residual", residual)
    if x.dim() != 2 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x and residual must be [T, N] and weight [N], got {tuple(x.shape)}, "
            f"{tuple(residual.shape)} and {tuple(weight.shape)}"
        )
    if not x.dtype == residual.dtype == weight.dtype:
        raise ValueError(
            f"dtypes must be equal, got {x.dtype}, {residual.dtype} and {weight.dtype}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(out)
    if x.shape[0] == 0:
        return out, new_residual
    config = rows_config(x.shape[1])
    with on_device_of(x):
        fused_add_rms_norm_kernel[(triton.cdiv(x.shape[0], config.rows),)](
            x, residual, weight, out, new_residual, x.shape[0],
            x.stride(0), residual.stride(0), eps,
            COLUMNS=x.shape[1], ROWS=config.rows, BLOCK=config.columns,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out, new_residual


def rope(q: Tensor, k: Tensor, cos_sin_table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by their positions [T] (RoFormer, arXiv:2104.09864).

    Rotate-half pairing (dimension i with i + D/2); the table is fp32 [max_positions, D], cos in its
    first half and sin in its second. Positions must be below max_positions: they are not checked.
    """
    _contiguous_last("q", q)
    _contiguous_last("k", k)
    head_dim = q.shape[-1]
    if head_dim % 2 or k.shape[-1] != head_dim or cos_sin_table.shape[-1] != head_dim:
        raise ValueError(
            f"q, k and the table must share an even last dimension, got {head_dim}, {k.shape[-1]} "
            f"and {cos_sin_table.shape[-1]}"
        )
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return q_out, k_out
    half = head_dim // 2
    block_half, block_heads = next_power_of_2(half), next_power_of_2(num_heads)
    with on_device_of(q):
        rope_kernel[(num_tokens,)](
            q, k, q_out, k_out, cos_sin_table, positions,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin_table.stride(0),
            Q_HEADS=num_heads, K_HEADS=k.shape[1], HALF=half,
            BLOCK_Q=block_heads, BLOCK_K=next_power_of_2(k.shape[1]), BLOCK_HALF=block_half,
            num_warps=warps_for(block_heads * block_half),
        )  # fmt: skip
    return q_out, k_out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], gate first: returns silu(gate) * up, [T, I] (SwiGLU, arXiv:2002.05202)."""
    _contiguous_last("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 I], got {tuple(gate_up.shape)}")
    num_tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    block = min(TILE_ELEMENTS // 4, next_power_of_2(columns))
    with on_device_of(gate_up):
        silu_mul_kernel[(num_tokens, triton.cdiv(columns, block))](
            gate_up, out, gate_up.stride(0),
            COLUMNS=columns, BLOCK=block, num_warps=warps_for(block * 2),
        )  # fmt: skip
    return out
