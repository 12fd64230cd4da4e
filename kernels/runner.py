"""Execute one step of a schedule: chunks in, sampled tokens out.

The scheduler decides, this executes. A step:

1. `HostBatch` turns the chunks into arrays; the only place that does.
2. They are checked (a wrong page would write into another sequence's memory).
3. The model runs over all new tokens at once, storing K/V as it goes (`on_layer` per layer).
4. Logits are computed for the last token of those chunks that want one, and sampled.

Nothing here walks a sequence in Python. Token ids and block tables come as integer buffers
(`array("i")`, int32 numpy), which numpy copies as memory; plain lists work too, and slower.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import Model
from pageferry.kernels.sampling import Sampled, SampleSpec, Sampling, sample

__all__ = ["BadChunk", "Chunk", "ModelRunner", "SampleSpec", "Sampled", "Sampling", "build_batch"]


class BadChunk(ValueError):
    """A chunk cannot be executed; nothing of the step was. `index` is its place in the step."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"chunk {index}: {reason}")
        self.index = index


@dataclass(slots=True)
class Chunk:
    """One sequence's share of a step."""

    token_ids: Sequence[int]
    """The new tokens; int32."""
    start: int
    """Position of the first of them: so many tokens of the sequence have K/V already."""
    block_table: Sequence[int]
    """Physical page ids in order, int32; enough for start + len(token_ids) tokens or more."""
    sample: SampleSpec | None
    """None: no token wanted (the prompt goes on in a later step)."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ModelRunner:
    """A model together with the KV pool that it computes in. One caller at a time."""

    def __init__(self, model: Model, kv: Tensor, page_size: int) -> None:
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
        self.kernel_seconds = 0.0
        """Seconds in the model and in sampling. What remains of a step is our own overhead."""

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
            self._check_shape(index, chunk)
        step = HostBatch.of(chunks, self.page_size)
        self._check_values(step)
        with torch.inference_mode():
            input_ids, batch = step.to(self.model.device)
            begun = time.perf_counter()
            hidden = self.model.forward(input_ids, batch, self.kv, on_layer)
            results = self._sample(chunks, hidden)
            self.kernel_seconds += time.perf_counter() - begun
            return results

    def _sample(self, chunks: Sequence[Chunk], hidden: Tensor) -> list[Sampled | None]:
        specs = [s for c in chunks if (s := c.sample) is not None]
        if not specs:
            return [None] * len(chunks)
        if len(specs) < hidden.shape[0]:
            ends = itertools.accumulate(len(c.token_ids) for c in chunks)
            last = [end - 1 for c, end in zip(chunks, ends, strict=True) if c.sample is not None]
            hidden = hidden[torch.tensor(last, device=hidden.device)]
        logits = self.model.logits(hidden)
        if (usable := self.model.config.sampled_vocab_size) < logits.shape[1]:
            logits[:, usable:] = float("-inf")
        sampled = iter(sample(logits, specs))
        return [None if c.sample is None else next(sampled) for c in chunks]

    def _check_shape(self, index: int, chunk: Chunk) -> None:
        count, end = len(chunk.token_ids), chunk.end
        if count == 0 or chunk.start < 0:
            raise BadChunk(index, f"{count} tokens from position {chunk.start}")
        if end > self.model.max_positions:
            raise BadChunk(
                index, f"ends at {end}, the model computes {self.model.max_positions} tokens"
            )
        pages = -(-end // self.page_size)
        if pages > len(chunk.block_table):
            raise BadChunk(index, f"needs {pages} pages, has {len(chunk.block_table)}")

    def _check_values(self, step: HostBatch) -> None:
        tables, num_pages = step.block_tables, self.kv.shape[1]
        if tables.min() < 0 or tables.max() >= num_pages:
            index, at = np.argwhere((tables < 0) | (tables >= num_pages))[0]
            raise BadChunk(
                int(index), f"page {tables[index, at]} is not in the pool of {num_pages}"
            )
        ids, vocab = step.rows[0], self.model.config.vocab_size
        if ids.min() < 0 or ids.max() >= vocab:
            row = int(np.argmax((ids < 0) | (ids >= vocab)))
            index = int(np.searchsorted(step.bounds, row, side="right")) - 1
            raise BadChunk(index, f"token id {ids[row]} is not in the vocabulary of {vocab}")


@dataclass(frozen=True, eq=False)
class HostBatch:
    """`AttentionBatch` and the input ids, still in numpy and in three pieces.

    After a pass over the weights nothing of ours is left in the caches, and each numpy call takes
    some 10 us: so few of them, and none per row where a step only decodes.
    """

    rows: NDArray[np.int64]
    """[3, T]; input ids, positions, slots."""
    bounds: NDArray[np.int32]
    """[B + 1]; first row of each chunk."""
    seq_lens: NDArray[np.int32]
    """[B]."""
    block_tables: NDArray[np.int32]
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_size: int) -> Self:
        lengths = [len(c.token_ids) for c in chunks]
        ends = [c.end for c in chunks]
        bounds = [0, *itertools.accumulate(lengths)]
        used = [-(-end // page_size) for end in ends]
        tables = np.zeros((len(chunks), max(used)), dtype=np.int32)
        for table, chunk, pages in zip(tables, chunks, used, strict=True):
            table[:pages] = chunk.block_table[:pages]
        fill = _decode_rows if bounds[-1] == len(chunks) else _chunk_rows
        return cls(
            rows=fill(chunks, tables, bounds, page_size),
            bounds=np.array(bounds, dtype=np.int32),
            seq_lens=np.array(ends, dtype=np.int32),
            block_tables=tables,
            max_query_len=max(lengths),
            max_seq_len=max(ends),
        )

    def to(self, device: torch.device) -> tuple[Tensor, AttentionBatch]:
        def move(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        input_ids, positions, slots = move(self.rows).unbind()
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=move(self.bounds),
            seq_lens=move(self.seq_lens),
            block_tables=move(self.block_tables),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )
        return input_ids, batch


def _decode_rows(
    chunks: Sequence[Chunk], tables: NDArray[np.int32], bounds: list[int], page_size: int
) -> NDArray[np.int64]:
    """`HostBatch.rows` where each chunk is one token."""
    ids = [c.token_ids[0] for c in chunks]
    positions = [c.start for c in chunks]
    slots = [
        c.block_table[p // page_size] * page_size + p % page_size
        for c, p in zip(chunks, positions, strict=True)
    ]
    return np.array((ids, positions, slots), dtype=np.int64)


def _chunk_rows(
    chunks: Sequence[Chunk], tables: NDArray[np.int32], bounds: list[int], page_size: int
) -> NDArray[np.int64]:
    rows = np.empty((3, bounds[-1]), dtype=np.int64)
    for chunk, table, (first, end) in zip(chunks, tables, itertools.pairwise(bounds), strict=True):
        rows[0, first:end] = chunk.token_ids
        rows[1, first:end] = np.arange(chunk.start, chunk.end)
        page, offset = np.divmod(rows[1, first:end], page_size)
        rows[2, first:end] = table[page].astype(np.int64) * page_size + offset
    return rows


def build_batch(
    chunks: Sequence[Chunk], page_size: int, device: torch.device
) -> tuple[Tensor, AttentionBatch]:
    """Input ids int64 [T] and the batch, on the device; the chunks are taken to be right."""
    return HostBatch.of(chunks, page_size).to(device)
