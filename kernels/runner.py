"""Execute one step of a schedule: chunks in, sampled tokens out.

The scheduler decides, this executes. A step:

1. `execute` checks the chunks (a wrong one would write into another sequence's pages).
2. `build_batch` turns the lists into tensors; the only place that does.
3. The model runs over all new tokens at once, storing K/V as it goes (`on_layer` per layer).
4. Logits are computed for the last token of those chunks that want one, and sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import Decoder
from pageferry.kernels.sampling import Sampled, SampleSpec, Sampling, sample

__all__ = ["BadChunk", "Chunk", "ModelRunner", "SampleSpec", "Sampled", "Sampling", "build_batch"]


class BadChunk(ValueError):
    """A chunk cannot be executed; nothing of the step was. `index` is its place in the step."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"chunk {index}: {reason}")
        self.index = index


@dataclass(frozen=True)
class Chunk:
    """One sequence's share of a step."""

    token_ids: Sequence[int]
    """The new tokens."""
    start: int
    """Position of the first of them: so many tokens of the sequence have K/V already."""
    block_table: Sequence[int]
    """Physical page ids in order, enough for start + len(token_ids) tokens; may be longer."""
    sample: SampleSpec | None
    """None: no token wanted (the prompt goes on in a later step)."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ModelRunner:
    """A model together with the KV pool that it computes in. One caller at a time."""

    def __init__(self, model: Decoder, kv: Tensor, page_size: int) -> None:
        """kv: [layers, pages, 2, kv_heads, page_size, head_dim] on the model's device."""
        c = model.config
        pages = kv.shape[1] if kv.dim() == 6 else 0
        expected = (c.num_layers, pages, 2, c.num_kv_heads, page_size, c.head_dim)
        if tuple(kv.shape) != expected or not kv.is_contiguous():
            raise ValueError(f"kv must be contiguous {expected}, got {tuple(kv.shape)}")
        if kv.dtype != model.dtype or kv.device != model.device:
            raise ValueError(
                f"kv is {kv.dtype} on {kv.device}, the model {model.dtype} on {model.device}"
            )
        self.model = model
        self.kv = kv
        self.page_size = page_size

    def execute(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> list[Sampled | None]:
        """Run one step. The result is aligned with `chunks`; None where no token was wanted.

        `BadChunk` before anything is computed; a row whose logits are not finite has
        `Sampled.error` set and does not disturb the others.
        """
        if not chunks:
            return []
        for index, chunk in enumerate(chunks):
            self._check(index, chunk)
        with torch.inference_mode():
            input_ids, batch = build_batch(chunks, self.page_size, self.model.device)
            hidden = self.model.forward(input_ids, batch, self.kv, on_layer)
            return self._sample(chunks, hidden)

    def _sample(self, chunks: Sequence[Chunk], hidden: Tensor) -> list[Sampled | None]:
        ends = np.cumsum([len(c.token_ids) for c in chunks])
        wanted = [i for i, c in enumerate(chunks) if c.sample is not None]
        results: list[Sampled | None] = [None] * len(chunks)
        if not wanted:
            return results
        rows = torch.from_numpy(ends[wanted] - 1).to(hidden.device)
        logits = self.model.logits(hidden[rows])
        logits[:, self.model.config.sampled_vocab_size :] = float("-inf")
        specs = [s for c in chunks if (s := c.sample) is not None]
        for i, sampled in zip(wanted, sample(logits, specs), strict=True):
            results[i] = sampled
        return results

    def _check(self, index: int, chunk: Chunk) -> None:
        count, pages = len(chunk.token_ids), self.kv.shape[1]
        if count == 0 or chunk.start < 0:
            raise BadChunk(index, f"{count} tokens from position {chunk.start}")
        if chunk.end > self.model.max_positions:
            raise BadChunk(
                index, f"ends at {chunk.end}, the model computes {self.model.max_positions} tokens"
            )
        used = -(-chunk.end // self.page_size)
        if used > len(chunk.block_table):
            raise BadChunk(index, f"needs {used} pages, has {len(chunk.block_table)}")
        for page in chunk.block_table[:used]:
            if not 0 <= page < pages:
                raise BadChunk(index, f"page {page} is not in the pool of {pages}")
        low, high = min(chunk.token_ids), max(chunk.token_ids)
        if low < 0 or high >= self.model.config.vocab_size:
            raise BadChunk(
                index,
                f"token id {low if low < 0 else high} is not in the vocabulary of "
                f"{self.model.config.vocab_size}",
            )


def build_batch(
    chunks: Sequence[Chunk], page_size: int, device: torch.device
) -> tuple[Tensor, AttentionBatch]:
    """Input ids int64 [T] and the batch, on the device."""
    lengths = np.array([len(c.token_ids) for c in chunks])
    seq_lens = np.array([c.end for c in chunks])
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    total = int(bounds[-1])
    input_ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    used = -(-seq_lens // page_size)
    tables = np.zeros((len(chunks), int(used.max())), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        rows = slice(bounds[i], bounds[i + 1])
        where = np.arange(chunk.start, chunk.end)
        tables[i, : used[i]] = chunk.block_table[: used[i]]
        input_ids[rows] = chunk.token_ids
        positions[rows] = where
        slots[rows] = tables[i, where // page_size] * page_size + where % page_size

    def move(array: NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    batch = AttentionBatch(
        positions=move(positions),
        slot_mapping=move(slots),
        cu_seqlens_q=move(bounds, torch.int32),
        seq_lens=move(seq_lens, torch.int32),
        block_tables=move(tables, torch.int32),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return move(input_ids), batch
