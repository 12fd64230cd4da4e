"""A decoder whose weights are packed for the CPU kernels and whose forward pass is one call.

The same interface as `Decoder`, for float32 and bfloat16 models on CPU. Weights are packed once, at
load, into one block of memory (huge pages where the system has them); activations stay float32
between the matrix products, and enter these rounded to bfloat16 where the instructions want that.
The call releases the GIL, so the worker's event loop runs beside it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pageferry.kernels import native
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.config import ModelConfig
from pageferry.kernels.native import Batch, LayerWeights, Matrix, ModelWeights

if TYPE_CHECKING:
    from pageferry.kernels.model import Layer

DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}
MAX_HEAD_DIM = 512
MAX_GROUP = 256
"""Query heads per KV head. Both limits are those of `native/backend.h`."""
PAGE = 4096


def usable(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library computes this model."""
    return (
        device.type == "cpu"
        and dtype in DTYPES
        and config.head_dim <= MAX_HEAD_DIM
        and config.num_heads // config.num_kv_heads <= MAX_GROUP
    )


@dataclass(frozen=True, eq=False)
class NativeDecoder:
    """A loaded model. Immutable; one forward pass at a time."""

    config: ModelConfig
    fingerprint: str
    dtype: torch.dtype
    max_positions: int
    num_bytes: int
    """Memory of the weights; a tied head counts once."""
    weights: ModelWeights = field(repr=False)
    lib: ctypes.CDLL = field(repr=False)
    kept: Sequence[object] = field(repr=False)
    """What `weights` points into."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `Decoder.forward`. An exception of `on_layer` is raised after the pass."""
        raised: list[BaseException] = []

        def call(layer: int) -> None:
            if raised:
                return
            try:
                on_layer(layer)  # type: ignore[misc]
            except BaseException as error:
                raised.append(error)

        hidden = torch.empty((input_ids.shape[0], self.config.hidden_size), dtype=self.dtype)
        self.weights.page_size = kv.shape[4]
        self.lib.pf_forward(
            self.weights,
            describe(input_ids, batch),
            kv.data_ptr(),
            kv.stride(0) * kv.element_size(),
            hidden.data_ptr(),
            native.ON_LAYER() if on_layer is None else native.ON_LAYER(call),
        )
        if raised:
            raise raised[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] from `forward` -> float32 [N, vocab]."""
        hidden = hidden.contiguous()
        logits = torch.empty((hidden.shape[0], self.config.vocab_size), dtype=torch.float32)
        self.lib.pf_logits(self.weights, hidden.data_ptr(), hidden.shape[0], logits.data_ptr())
        if self.config.logits_divisor != 1.0:
            logits /= self.config.logits_divisor
        return logits


def describe(input_ids: Tensor, batch: AttentionBatch) -> Batch:
    """The batch's tensors by address; they must outlive the call."""
    for tensor, dtype in (
        (input_ids, torch.int64),
        (batch.positions, torch.int64),
        (batch.slot_mapping, torch.int64),
        (batch.cu_seqlens_q, torch.int32),
        (batch.seq_lens, torch.int32),
        (batch.block_tables, torch.int32),
    ):
        if tensor.dtype != dtype or not (tensor.is_contiguous() or tensor is batch.block_tables):
            raise ValueError(f"expected a contiguous {dtype} tensor, got {tensor.dtype}")
    return Batch(
        num_tokens=input_ids.shape[0],
        num_seqs=batch.seq_lens.shape[0],
        table_stride=batch.block_tables.stride(0),
        input_ids=input_ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
        seq_lens=batch.seq_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
    )


@dataclass
class Packer:
    """Packs a model's weights, layer by layer, into one block of memory."""

    config: ModelConfig
    dtype: torch.dtype
    lib: ctypes.CDLL
    deterministic: bool = False
    memory: mmap.mmap = field(init=False)
    address: int = field(init=False)
    used: int = 0
    kept: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = sum(self._bytes(*shape) for shape in self._shapes())
        # Private: the system has no huge pages for shared memory unless it is told to.
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(view)
        self.kept += [self.memory, view]

    def _shapes(self) -> Iterator[tuple[int, int, int]]:
        """(outputs of a half, inputs, halves) of each matrix."""
        c = self.config
        heads = c.num_heads * c.head_dim
        for _ in range(c.num_layers):
            yield heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size, 1
            yield c.hidden_size, heads, 1
            yield c.intermediate_size, c.hidden_size, 2
            yield c.hidden_size, c.intermediate_size, 1
        yield c.vocab_size, c.hidden_size, 1

    def _bytes(self, outputs: int, inputs: int, halves: int) -> int:
        size = self.lib.pf_packed_bytes(DTYPES[self.dtype], outputs, inputs, halves)
        return -(-int(size) // PAGE) * PAGE

    def matrix(self, weight: Tensor, bias: Tensor | None = None, halves: int = 1) -> Matrix:
        """weight [out, in]; of a gate/up matrix (two halves) the gate rows come first."""
        weight = weight.contiguous()
        outputs, inputs = weight.shape[0] // halves, weight.shape[1]
        at = self.address + self.used
        self.used += self._bytes(outputs, inputs, halves)
        self.lib.pf_pack(DTYPES[self.dtype], weight.data_ptr(), outputs, inputs, halves, at)
        return Matrix(
            data=at, bias=self._bias(bias, outputs, halves), outputs=outputs, inputs=inputs
        )

    def _bias(self, bias: Tensor | None, outputs: int, halves: int) -> int | None:
        """In the order of the packed outputs, zeros for those that are missing."""
        if bias is None:
            return None
        width = int(self.lib.pf_blocks(outputs, halves)) * native.WIDTH // halves
        padded = torch.zeros(halves, width)
        padded[:, :outputs] = bias.float().view(halves, outputs)
        return self.vector(padded)

    def vector(self, tensor: Tensor | None) -> int | None:
        """Address of the tensor as float32."""
        if tensor is None:
            return None
        tensor = tensor.float().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _identity(self, fingerprint: str) -> str:
        """Bits are promised among workers that compute alike: mode and level are part of it."""
        if not self.deterministic:
            return fingerprint
        return f"{fingerprint}+deterministic-{native.LEVELS[self.lib.pf_current_level()]}"

    def layer(self, layer: Layer, window: int | None) -> LayerWeights:
        return LayerWeights(
            qkv=self.matrix(layer.qkv, layer.qkv_bias),
            o=self.matrix(layer.o, layer.o_bias),
            gate_up=self.matrix(layer.gate_up, layer.gate_up_bias, halves=2),
            down=self.matrix(layer.down, layer.down_bias),
            input_norm=self.vector(layer.input_norm),
            post_norm=self.vector(layer.post_norm),
            q_norm=self.vector(layer.q_norm),
            k_norm=self.vector(layer.k_norm),
            window=window or 0,
        )

    def finish(self, layers: Sequence[LayerWeights], ends: Ends, fingerprint: str) -> NativeDecoder:
        c = self.config
        array = (LayerWeights * len(layers))(*layers)
        tied = ends.lm_head is ends.embedding
        weights = ModelWeights(
            dtype=DTYPES[self.dtype],
            num_layers=c.num_layers,
            hidden=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            intermediate=c.intermediate_size,
            deterministic=self.deterministic,
            eps=c.rms_eps,
            embedding_multiplier=c.embedding_multiplier,
            residual_multiplier=c.residual_multiplier,
            attention_scale=c.attention_scale,
            layers=array,
            final_norm=self.vector(ends.final_norm),
            rope_table=self.vector(ends.rope_table),
            embedding=None if tied else ends.embedding.data_ptr(),
            head=self.matrix(ends.lm_head),
        )
        self.kept += [array, *(() if tied else (ends.embedding,))]
        tensors = [t for t in self.kept if isinstance(t, Tensor)]
        self.lib.pf_set_threads(torch.get_num_threads())
        return NativeDecoder(
            config=c,
            fingerprint=self._identity(fingerprint),
            dtype=self.dtype,
            max_positions=ends.rope_table.shape[0],
            num_bytes=self.used + sum(t.numel() * t.element_size() for t in tensors),
            weights=weights,
            lib=self.lib,
            kept=tuple(self.kept),
        )


@dataclass(frozen=True, eq=False)
class Ends:
    """What stands before and after the layers."""

    embedding: Tensor
    final_norm: Tensor
    lm_head: Tensor
    rope_table: Tensor
