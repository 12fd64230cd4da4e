"""The norm that some models apply to each head of q and of k before rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """RMSNorm weights of one layer (Qwen3, arXiv:2505.09388), of the model's dtype."""

    q: Tensor
    """[head_dim]."""
    k: Tensor
    """[head_dim]."""
    eps: float
