"""One decoder for the Llama family and its relatives, driven by `ModelConfig`.

It takes token ids, an `AttentionBatch` and the KV tensor as arguments and knows nothing of pools,
schedulers or workers. Per layer: norm, fused q/k/v projection, rotation, K/V stored in their pages
(then `on_layer`), attention over pages, output projection, norm, gated MLP. The residual stream is
added inside the norms.

On CPU the weights go into a `NativeDecoder` instead, where its library is installed and knows the
data type.

Loading is strict: each tensor of the checkpoint is used exactly once or is on `IGNORED`, has the
shape that the configuration implies, and none is left out; otherwise `BadCheckpoint` names it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pageferry.kernels import native, native_model, ops
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.config import ModelConfig
from pageferry.kernels.devices import DeviceError
from pageferry.kernels.head_norms import HeadNorms
from pageferry.kernels.native_model import NativeDecoder
from pageferry.kernels.rope import cos_sin_table
from pageferry.kernels.weights import BadCheckpoint, Checkpoint, open_checkpoint

log = logging.getLogger(__name__)

IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Tensors that old checkpoints carry and that follow from the configuration."""

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    """Query rows, then key rows, then value rows."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """Gate rows, then up rows."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def head_norms(self, eps: float) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm, self.k_norm, eps)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A loaded model. Immutable; safe to use from several threads."""

    config: ModelConfig
    fingerprint: str
    """Hex digest of configuration and weights: equal on all workers that may share KV pages."""
    embedding: Tensor
    """[vocab, hidden]."""
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor
    """[vocab, hidden]; the very same tensor as `embedding` when tied."""
    rope_table: Tensor
    """float32 [max_positions, head_dim]."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def max_positions(self) -> int:
        """Longest sequence that can be computed, tokens."""
        return self.rope_table.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; a tied head counts once."""
        tensors = {id(t): t for layer in self.layers for t in vars(layer).values() if t is not None}
        for t in (self.embedding, self.final_norm, self.lm_head, self.rope_table):
            tensors[id(t)] = t
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def forward(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute the new tokens and store their K/V.

        input_ids int64 [T]; kv [layers, pages, 2, kv_heads, page_size, head_dim] of the model's
        dtype. Returns the normed hidden states [T, hidden] for `logits`. `on_layer(i)` is called
        when layer i's K/V of this step are stored (on CUDA: queued on the current stream).
        """
        eps = self.config.rms_eps
        x = F.embedding(input_ids, self.embedding)
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        residual = x
        x = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            q = ops.rope_store(
                qkv.view(x.shape[0], -1, self.config.head_dim),
                layer.head_norms(eps),
                self.rope_table,
                batch.positions,
                kv[i],
                batch.slot_mapping,
            )
            if on_layer is not None:
                on_layer(i)
            x = ops.paged_attention(
                q, kv[i], batch, self.config.attention_scale, self.config.windows[i]
            )
            x = self._branch(ops.linear(x.flatten(1), layer.o, layer.o_bias))
            x, residual = ops.fused_add_rms_norm(x, residual, layer.post_norm, eps)
            x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = self._branch(ops.linear(x, layer.down, layer.down_bias))
            last = i + 1 == len(self.layers)
            norm = self.final_norm if last else self.layers[i + 1].input_norm
            x, residual = ops.fused_add_rms_norm(x, residual, norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] from `forward` -> float32 [N, vocab]."""
        logits = ops.linear(hidden, self.lm_head).float()
        if self.config.logits_divisor != 1.0:
            logits /= self.config.logits_divisor
        return logits

    def _branch(self, x: Tensor) -> Tensor:
        multiplier = self.config.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier


Model = Decoder | NativeDecoder


def load_model(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
    deterministic: bool = False,
) -> Model:
    """Load a directory of config.json and safetensors.

    `max_positions` limits the rotation table, which takes 4 * head_dim bytes per position.
    `deterministic`: the bits of a row, and of its K/V, depend on its sequence alone.
    Raises `UnsupportedModel` for the configuration, `BadCheckpoint` for the weights, `DeviceError`
    where nothing computes deterministically.
    """
    config = ModelConfig.from_dir(path)
    lib = native.library() if native_model.usable(config, device, dtype) else None
    if deterministic and lib is None:
        raise DeviceError(
            "deterministic: only the C++ kernels compute a row alike in every batch, and they are "
            f"not what computes {str(dtype).removeprefix('torch.')} on {device} here; use a CPU, "
            "bfloat16 or float32, and an installation that had a C++ compiler"
        )
    checkpoint = open_checkpoint(path)
    loader = _Loader(checkpoint, config, device, dtype)
    limit = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
    ends = loader.ends(cos_sin_table(config.rope, config.head_dim, limit).to(device))
    if lib is not None:
        packer = native_model.Packer(config, dtype, lib, deterministic)
        packed = [
            packer.layer(loader.layer(i), config.windows[i]) for i in range(config.num_layers)
        ]
        loader.finish()
        return packer.finish(packed, ends, checkpoint.fingerprint)
    layers = tuple(loader.layer(i) for i in range(config.num_layers))
    loader.finish()
    return Decoder(
        config=config,
        fingerprint=checkpoint.fingerprint,
        embedding=ends.embedding,
        layers=layers,
        final_norm=ends.final_norm,
        lm_head=ends.lm_head,
        rope_table=ends.rope_table,
    )


@dataclass
class _Loader:
    """Hands out each tensor once, checked, and knows at the end what nobody asked for."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor on the device in the model's dtype."""
        return self.fuse((name, shape))

    def fuse(self, *parts: tuple[str, tuple[int, ...]]) -> Tensor:
        """The named tensors stacked along their first axis."""
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            out[start : start + shape[0]].copy_(self._checked(name, shape))
            start += shape[0]
        return out

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.checkpoint.names():
            raise BadCheckpoint(f"tensor {name} is missing from the checkpoint")
        tensor = self.checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadCheckpoint(
                f"tensor {name} has shape {tuple(tensor.shape)}; the configuration implies {shape}"
            )
        if tensor.dtype not in STORED_DTYPES:
            raise BadCheckpoint(f"tensor {name} has data type {tensor.dtype}, which is unsupported")
        self.taken.add(name)
        return tensor

    def layer(self, index: int) -> Layer:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv = ((f"{attention}q_proj", q), (f"{attention}k_proj", kv), (f"{attention}v_proj", kv))
        gate_up = ((f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner))
        return Layer(
            input_norm=self.take(at + "input_layernorm.weight", hidden),
            qkv=self.fuse(*((f"{name}.weight", (rows, hidden)) for name, rows in qkv)),
            qkv_bias=self._bias(c.qkv_bias, *qkv),
            q_norm=self.take(attention + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=self.take(attention + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            o=self.take(attention + "o_proj.weight", hidden, q),
            o_bias=self._bias(c.o_bias, (attention + "o_proj", hidden)),
            post_norm=self.take(at + "post_attention_layernorm.weight", hidden),
            gate_up=self.fuse(*((f"{name}.weight", (rows, hidden)) for name, rows in gate_up)),
            gate_up_bias=self._bias(c.mlp_bias, *gate_up),
            down=self.take(mlp + "down_proj.weight", hidden, inner),
            down_bias=self._bias(c.mlp_bias, (mlp + "down_proj", hidden)),
        )

    def _bias(self, present: bool, *parts: tuple[str, int]) -> Tensor | None:
        if not present:
            return None
        return self.fuse(*((f"{name}.bias", (rows,)) for name, rows in parts))

    def ends(self, rope_table: Tensor) -> native_model.Ends:
        c = self.config
        embedding = self.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        return native_model.Ends(
            embedding=embedding,
            final_norm=self.take("model.norm.weight", c.hidden_size),
            lm_head=self.head(embedding),
            rope_table=rope_table,
        )

    def head(self, embedding: Tensor) -> Tensor:
        """The output matrix. A tied model may carry an equal copy, which is dropped."""
        name = "lm_head.weight"
        if not self.config.tie_embeddings:
            return self.take(name, self.config.vocab_size, self.config.hidden_size)
        if name in self.checkpoint.names():
            if not torch.equal(
                self._checked(name, tuple(embedding.shape)),
                self.checkpoint.tensor("model.embed_tokens.weight"),
            ):
                raise BadCheckpoint(
                    f"tensor {name} differs from model.embed_tokens.weight although "
                    "tie_word_embeddings is true"
                )
            log.warning("ignoring %s: equal to the tied embeddings", name)
        return embedding

    def finish(self) -> None:
        unknown = sorted(
            n for n in self.checkpoint.names() - self.taken if not IGNORED.fullmatch(n)
        )
        if unknown:
            raise BadCheckpoint(
                f"checkpoint has {len(unknown)} tensors that {self.config.architecture} with this "
                f"configuration does not use: {', '.join(unknown[:5])}"
            )
