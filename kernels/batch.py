"""One step's new tokens, as attention needs them.

A step mixes prefill chunks (many new tokens of one sequence) and decode rows (one new token each)
in one ragged batch: sequence `b` owns rows `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` and ends at
context length `seq_lens[b]`, which counts those rows. There is no separate notion of prefill.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """New tokens of several sequences, ragged, over paged KV. All tensors on the compute device."""

    positions: Tensor
    """int64 [T]; position of each new token in its sequence."""
    slot_mapping: Tensor
    """int64 [T]; page_id * page_size + offset, -1 = do not store (padding)."""
    cu_seqlens_q: Tensor
    """int32 [B + 1]."""
    seq_lens: Tensor
    """int32 [B]; context length including this step's new tokens."""
    block_tables: Tensor
    """int32 [B, max_pages]; physical page ids in order, padded with 0."""
    max_query_len: int
    max_seq_len: int
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """Scratch of the backends: what they work out from this batch once and reuse in each layer."""
