"""Rotary position embedding: frequencies per scaling kind, and the table the kernels read.

Rotate-half convention: element `i` pairs with element `i + head_dim / 2`.
Sources: RoPE arXiv:2104.09864; position interpolation ("linear") arXiv:2306.15595; yarn
arXiv:2309.00071; "llama3" as published with Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pageferry.kernels.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: cosines in the first half, sines in the second."""
    inverse = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "yarn":
        return _yarn(inverse, rope, head_dim)
    return inverse


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cosines and sines; other than 1 only for yarn (its section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / rope.factor + keep * inverse


def _yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often within the original context are kept, slow ones interpolated."""

    def pair_with(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in the published code: avoids a division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolate = ramp.clamp(0, 1)
    return inverse / rope.factor * interpolate + inverse * (1 - interpolate)
