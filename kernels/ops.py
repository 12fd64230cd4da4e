"""The one place where a backend is chosen: by the device that the tensors are on.

CUDA tensors go to the Triton kernels where triton is installed, all others to the torch reference.
(A model on CPU mostly does not come here: `native_model.py` runs its whole pass in one call.)
Every backend offers these functions with these signatures; `kernels/reference.py` says what they
compute. Inputs may be strided in their leading axes (slices of a fused projection); the last axis
is contiguous.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from pageferry.kernels import reference
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.head_norms import HeadNorms

HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None

if HAS_TRITON:
    from pageferry.kernels import triton_attention, triton_fused, triton_ops


def _on_triton(x: Tensor) -> bool:
    return HAS_TRITON and x.is_cuda


def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> Tensor:
    """Causal attention of q [T, Hq, D] over pages, ragged; [T, Hq, D]."""
    if _on_triton(q):
        return triton_attention.paged_attention(q, kv_layer, batch, scale, window)
    return reference.paged_attention(q, kv_layer, batch, scale, window)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias; [T, out]. cuBLAS on CUDA."""
    return reference.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis of x [..., D]."""
    if _on_triton(x):
        return triton_ops.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual)."""
    if _on_triton(x):
        return triton_ops.fused_add_rms_norm(x, residual, weight, eps)
    return reference.fused_add_rms_norm(x, residual, weight, eps)


def rope_store(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos_sin_table: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotate q and k of qkv [T, Hq + 2 Hkv, D], store k and v in their slots of
    `kv_layer` (slot -1 is skipped); the queries [T, Hq, D]."""
    if _on_triton(qkv):
        return triton_fused.rope_store(qkv, norms, cos_sin_table, positions, kv_layer, slot_mapping)
    return reference.rope_store(qkv, norms, cos_sin_table, positions, kv_layer, slot_mapping)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    if _on_triton(gate_up):
        return triton_ops.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
