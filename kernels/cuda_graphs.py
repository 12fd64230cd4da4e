"""CUDA graphs for decode steps: one launch in place of some ten per layer.

1. At start, `GraphedDecoder` captures the model's forward pass for each batch size of
   `graph_sizes` and each context limit of `context_limits`, largest first, over static inputs.
   All captures share one memory pool; the largest decides its size.
2. A step of one new token per sequence is copied into the static inputs, padded up to the next
   size, and the graph for its size and longest context is replayed. Rows of padding have context 0
   (attention yields 0 for them) and slot -1 (nothing is stored).
3. Every other step runs eagerly: one with prefill chunks, with more sequences than the largest
   size, with a per-layer callback, or over another pool.

Context limits exist because a launch's grid is frozen: attention must be launched for the longest
context that the graph serves, and programs without work still cost some time. Results do not
depend on it (`triton_decode`).

How a pass is captured is a seam (`Capture`), so that everything else runs without a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import Decoder, Model

log = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT_STEP = 8
FIRST_CONTEXT = 1024

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Takes a pass, returns (replay, its output): `replay` repeats the pass over the memory that it
read, whatever that holds now, and leaves the result in the output tensor."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last is `max_num_seqs` or SMALL_SIZES' largest."""
    largest = min(max_num_seqs, SMALL_SIZES[-1])
    return (*(size for size in SMALL_SIZES if size < largest), largest)


def context_limits(max_model_len: int) -> tuple[int, ...]:
    """Longest contexts to capture for, ascending: 1024, 8192, ... and `max_model_len`."""
    limits = []
    limit = FIRST_CONTEXT
    while limit < max_model_len:
        limits.append(limit)
        limit *= CONTEXT_STEP
    return (*limits, max_model_len)


def at_least(value: int, choices: tuple[int, ...]) -> int | None:
    """The smallest of the ascending `choices` that is not below `value`."""
    return next((choice for choice in choices if choice >= value), None)


class StaticInputs:
    """A decode step's inputs at fixed addresses, for up to `rows` sequences."""

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((rows, max_pages), dtype=torch.int32, device=device)
        self._live = 0
        """Rows from here on have slot -1 and context 0."""

    def fill(self, input_ids: Tensor, batch: AttentionBatch) -> None:
        """Copy a step of one token per sequence in; rows beyond it become padding.

        What padding rows keep of an earlier step (ids, positions, pages) is valid and has no effect
        at context 0.
        """
        count = input_ids.shape[0]
        self.input_ids[:count].copy_(input_ids)
        self.positions[:count].copy_(batch.positions)
        self.slot_mapping[:count].copy_(batch.slot_mapping)
        self.seq_lens[:count].copy_(batch.seq_lens)
        self.block_tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if self._live > count:
            self.slot_mapping[count : self._live].fill_(-1)
            self.seq_lens[count : self._live].fill_(0)
        self._live = count

    def batch(self, rows: int, max_seq_len: int) -> AttentionBatch:
        """The first `rows` rows as a batch; `derived` is new, so nothing stale is reused."""
        return AttentionBatch(
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_tables=self.block_tables[:rows],
            max_query_len=1,
            max_seq_len=max_seq_len,
        )


class CudaCapture:
    """`Capture` by torch.cuda.CUDAGraph; all graphs of one instance share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # compiles kernels and makes cuBLAS take its workspace, outside the graph
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads (health, transfers) may allocate meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = run()
        return graph.replay, output


@dataclass(frozen=True)
class GraphLimits:
    """What to capture for."""

    max_num_seqs: int
    max_model_len: int
    """Tokens."""
    page_size: int

    @property
    def max_pages(self) -> int:
        return -(-self.max_model_len // self.page_size)


class GraphedDecoder(Decoder):
    """A decoder whose decode steps over one pool are replayed from graphs. One caller at a time."""

    def __init__(self, model: Decoder, kv: Tensor, limits: GraphLimits, capture: Capture) -> None:
        """Captures at once: call it when weights and pool are in place, before threads start."""
        super().__init__(**{field.name: getattr(model, field.name) for field in fields(Decoder)})
        began = time.monotonic()
        self._kv = kv
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._contexts = context_limits(limits.max_model_len)
        self._inputs = StaticInputs(self._sizes[-1], limits.max_pages, self.device)
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], Tensor]] = {}
        with torch.inference_mode():
            for rows in reversed(self._sizes):
                for longest in reversed(self._contexts):
                    self._graphs[rows, longest] = capture(self._pass(rows, longest))
        log.info("%d decode graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    def forward(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """See `Decoder.forward`. A replayed step's result is overwritten by the next one."""
        key = self.graph_for(batch)
        if key is None or kv is not self._kv or on_layer is not None:
            return super().forward(input_ids, batch, kv, on_layer)
        self._inputs.fill(input_ids, batch)
        replay, output = self._graphs[key]
        replay()
        return output[: input_ids.shape[0]]

    def graph_for(self, batch: AttentionBatch) -> tuple[int, int] | None:
        """(rows, longest context) of the graph that serves the batch; None: run it eagerly."""
        count = batch.seq_lens.shape[0]
        if batch.max_query_len != 1 or batch.positions.shape[0] != count:
            return None
        if batch.block_tables.shape[1] > self._inputs.block_tables.shape[1]:
            return None
        rows = at_least(count, self._sizes)
        longest = at_least(batch.max_seq_len, self._contexts)
        return None if rows is None or longest is None else (rows, longest)

    def _pass(self, rows: int, longest: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            batch = self._inputs.batch(rows, longest)
            return Decoder.forward(self, self._inputs.input_ids[:rows], batch, self._kv)

        return run


def graphed(model: Model, kv: Tensor, limits: GraphLimits) -> Model:
    """The model with CUDA graphs for decode over `kv`; the model itself on a CPU."""
    if not (kv.is_cuda and isinstance(model, Decoder)):
        return model
    return GraphedDecoder(model, kv, limits, CudaCapture(kv.device))
