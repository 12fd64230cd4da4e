"""Turns a GGUF file into a model directory as transformers 5 writes it.

1. `plan` reads architecture and dimensions from the metadata and lays out which tensor of the file
   becomes which tensor of the checkpoint, with the shape it must have. A tensor that is missing,
   left over or of another shape ends it: nothing is guessed.
2. `convert_gguf` writes config.json, generation_config.json and the tokenizer files, then streams
   the tensors, one after the other and dequantised, into model.safetensors.

Stored type: bfloat16 for quantised files. The dequantised values have more bits than bfloat16
holds, but half the size means half the load time, workers compute in bfloat16 where they can, and
whoever checks results loads the very same directory. Files wholly in F16 or F32 keep their type.

llama.cpp stores q and k of the Llama family with the two halves of each head interleaved (its
rotary embedding turns adjacent pairs); `_unpermute` restores the order of rotate-half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from pageferry.kernels.gguf_file import BadGGUF, GGUFFile
from pageferry.kernels.gguf_tokenizer import write_tokenizer

CHUNK_VALUES = 16 << 20
"""Values dequantised at a time: 64 MiB of float32."""

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16

Progress = Callable[[int], None]
"""Called with the number of bytes just written."""


class UnsupportedGGUF(ValueError):
    """The file is sound, but holds a model (or a variant of one) that cannot be converted."""


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture maps to transformers."""

    model_type: str
    model_class: str
    interleaved: bool  # q and k are stored for llama.cpp's adjacent-pair rotation
    qkv_bias: bool = False
    qk_norm: bool = False
    scales: tuple[tuple[str, str], ...] = ()  # metadata key tail -> config name; all required


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", interleaved=False, qkv_bias=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", interleaved=False, qk_norm=True),
    "granite": Family(
        "granite",
        "GraniteForCausalLM",
        interleaved=True,
        scales=(
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ),
    ),
}


@dataclass(frozen=True)
class Move:
    """One tensor's way from the file into the checkpoint."""

    source: str
    target: str
    shape: tuple[int, ...]
    heads: int = 0  # not 0: rows are to be un-permuted per head


@dataclass(frozen=True)
class Plan:
    config: dict[str, Any]
    generation_config: dict[str, Any]
    moves: tuple[Move, ...]
    dtype: str  # "BF16", "F16" or "F32", as safetensors names it


class _Metadata:
    """Typed access to `<architecture>.<key>`; errors name the key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def get(self, tail: str) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{tail}")

    def integer(self, tail: str, default: int | None = None) -> int:
        value = default if (found := self.get(tail)) is None else found
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise BadGGUF(
                f"{self._file.path}: {self._architecture}.{tail} is {value!r}, expected one count"
            )
        return value

    def number(self, tail: str, default: float | None = None) -> float:
        value = default if (found := self.get(tail)) is None else found
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise BadGGUF(
                f"{self._file.path}: {self._architecture}.{tail} is {value!r}, expected a number"
            )
        # Shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value)))


def _rope_factor_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3 scaling, recovered from the per-frequency divisors in `rope_freqs.weight`.

    The file holds the divisors only. All published Llama 3.x models use the wave length limits
    below with their own factor, so the divisors are computed again and must agree.
    """
    stored = file.rows("rope_freqs.weight", 0, 1)[0]
    low, high, original, factor = 1.0, 4.0, 8192, float(stored.max())
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if stored.shape == wave.shape and factor > 1:
        smooth = np.clip((original / wave - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(stored, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedGGUF(
        f"{file.path}: its rope_freqs.weight is not Llama 3 scaling with original length 8192; "
        "use the safetensors version of the model"
    )


def _rope_parameters(file: GGUFFile, meta: _Metadata, head_dim: int) -> dict[str, Any]:
    theta = meta.number("rope.freq_base", 10000.0)
    kind = meta.get("rope.scaling.type")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_rope_factor_scaling(file, head_dim, theta)}
    if kind in (None, "none"):
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedGGUF(f"{file.path}: rope scaling type {kind!r} is not supported")
    scaled: dict[str, Any] = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = meta.integer(
            "rope.scaling.original_context_length"
        )
    return {"rope_theta": theta, **scaled}


def _family(file: GGUFFile) -> tuple[str, Family]:
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise UnsupportedGGUF(
            f"{file.path}: architecture {architecture!r} is not supported "
            f"(supported: {', '.join(sorted(FAMILIES))})"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedGGUF(
            f"{file.path}: one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    return str(architecture), FAMILIES[str(architecture)]


def plan(file: GGUFFile) -> Plan:
    """What the checkpoint will be. Raises `BadGGUF` or `UnsupportedGGUF` with one sentence."""
    architecture, family = _family(file)
    meta = _Metadata(file, architecture)
    if "token_embd.weight" not in file.tensors:
        raise BadGGUF(f"{file.path}: tensor token_embd.weight is missing")
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if not hidden or not heads:
        raise BadGGUF(f"{file.path}: {hidden} hidden units in {heads} heads is no model")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    for tail, wanted in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if meta.integer(tail, wanted) != wanted:
            raise UnsupportedGGUF(
                f"{file.path}: {architecture}.{tail} is {meta.get(tail)}, only the head size "
                f"{head_dim} is supported"
            )
    for tail in ("expert_count", "attention.sliding_window"):
        if meta.integer(tail, 0):
            raise UnsupportedGGUF(
                f"{file.path}: {architecture}.{tail} is {meta.get(tail)}; such models cannot be "
                "converted from GGUF, use the safetensors version"
            )
    config: dict[str, Any] = {
        "architectures": [family.model_class],
        "attention_bias": family.qkv_bias,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "max_position_embeddings": meta.integer("context_length"),
        "model_type": family.model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": meta.integer("block_count"),
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, meta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        **{name: meta.number(tail) for tail, name in family.scales},
    }
    moves = tuple(_moves(config, family))
    _check_tensors(file, moves)
    dtype = _stored_dtype(file, moves)
    config["dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    token_ids = _special_ids(file, int(config["vocab_size"]))
    return Plan(config | token_ids, token_ids, moves, dtype)


def _special_ids(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """bos/eos/pad ids for config.json and generation_config.json; a turn's end counts as EOS."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "padding"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocab_size:
            raise BadGGUF(
                f"{file.path}: tokenizer.ggml.{name}_token_id is {value}, the vocabulary has "
                f"{vocab_size} tokens"
            )
        ids[name] = value
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    if not ends:
        raise BadGGUF(f"{file.path}: no tokenizer.ggml.eos_token_id, so no text would ever end")
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids.get("padding"),
    }


def _moves(config: dict[str, Any], family: Family) -> Iterator[Move]:
    """Every tensor that a model of this configuration has, in the order of the checkpoint."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    vocab = (config["vocab_size"], hidden)
    yield Move("token_embd.weight", "model.embed_tokens.weight", vocab)
    projections = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    for layer in range(config["num_hidden_layers"]):
        old, new = f"blk.{layer}.", f"model.layers.{layer}."
        yield Move(f"{old}attn_norm.weight", f"{new}input_layernorm.weight", (hidden,))
        for name, count in projections:
            rows = count * head_dim
            swap = count if family.interleaved and name != "v" else 0
            target = f"{new}self_attn.{name}_proj"
            yield Move(f"{old}attn_{name}.weight", f"{target}.weight", (rows, hidden), swap)
            if family.qkv_bias:
                yield Move(f"{old}attn_{name}.bias", f"{target}.bias", (rows,), swap)
            if family.qk_norm and name != "v":
                norm = f"{new}self_attn.{name}_norm.weight"
                yield Move(f"{old}attn_{name}_norm.weight", norm, (head_dim,))
        output = f"{new}self_attn.o_proj.weight"
        yield Move(f"{old}attn_output.weight", output, (hidden, heads * head_dim))
        yield Move(f"{old}ffn_norm.weight", f"{new}post_attention_layernorm.weight", (hidden,))
        yield Move(f"{old}ffn_gate.weight", f"{new}mlp.gate_proj.weight", (inner, hidden))
        yield Move(f"{old}ffn_up.weight", f"{new}mlp.up_proj.weight", (inner, hidden))
        yield Move(f"{old}ffn_down.weight", f"{new}mlp.down_proj.weight", (hidden, inner))
    yield Move("output_norm.weight", "model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Move("output.weight", "lm_head.weight", vocab)


def _check_tensors(file: GGUFFile, moves: tuple[Move, ...]) -> None:
    for move in moves:
        if move.source not in file.tensors:
            raise BadGGUF(f"{file.path}: tensor {move.source} is missing")
        shape = file.tensors[move.source].shape
        if shape != move.shape:
            raise BadGGUF(
                f"{file.path}: tensor {move.source} has shape {list(shape)}, the configuration "
                f"asks for {list(move.shape)}"
            )
    unknown = sorted(set(file.tensors) - {move.source for move in moves} - {"rope_freqs.weight"})
    if unknown:
        raise UnsupportedGGUF(
            f"{file.path}: tensor {unknown[0]} ({len(unknown)} in all) has no place in this "
            "architecture; use the safetensors version of the model"
        )


def _stored_dtype(file: GGUFFile, moves: tuple[Move, ...]) -> str:
    kinds = {file.tensors[move.source].kind for move in moves if len(move.shape) == 2}
    if kinds == {F32}:
        return "F32"
    return "F16" if kinds == {F16} else "BF16"


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows `(head, pair, half)` as llama.cpp keeps them to `(head, half, pair)`."""
    rows, width = values.shape
    grouped = values.reshape(heads, rows // heads // 2, 2, width)
    return grouped.swapaxes(1, 2).reshape(rows, width)


def _encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of `values` in `dtype`, rounded to nearest, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "F16" else "<f4").tobytes()


def _pieces(file: GGUFFile, move: Move, dtype: str) -> Iterator[bytes]:
    """The tensor's bytes, at most about `CHUNK_VALUES` values at a time."""
    count, width = (1, move.shape[0]) if len(move.shape) == 1 else move.shape
    step = count if move.heads else max(1, CHUNK_VALUES // width)
    for first in range(0, count, step):
        values = file.rows(move.source, first, min(step, count - first))
        if not np.isfinite(values).all():
            raise BadGGUF(f"{file.path}: tensor {move.source} holds values that are not finite")
        if move.heads:
            shape = values.shape
            column = values.reshape(-1, 1) if len(move.shape) == 1 else values
            values = _unpermute(column, move.heads).reshape(shape)
        yield _encode(np.ascontiguousarray(values), dtype)


def _write_safetensors(file: GGUFFile, todo: Plan, target: Path, progress: Progress | None) -> None:
    size = 4 if todo.dtype == "F32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for move in todo.moves:
        begin, end = end, end + math.prod(move.shape) * size
        header[move.target] = {
            "dtype": todo.dtype,
            "shape": list(move.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for move in todo.moves:
            for piece in _pieces(file, move, todo.dtype):
                out.write(piece)
                if progress:
                    progress(len(piece))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def converted_bytes(todo: Plan) -> int:
    """Size of the tensor data that `convert_gguf` will write, bytes."""
    size = 4 if todo.dtype == "F32" else 2
    return sum(math.prod(move.shape) for move in todo.moves) * size


def convert_gguf(file: GGUFFile, target: Path, progress: Progress | None = None) -> None:
    """Write the model in `file` into the existing, empty directory `target`.

    Raises `BadGGUF` (damaged), `UnsupportedGGUF` (sound, but not convertible) or `OSError`;
    what has been written by then is incomplete, so call it on a directory that can be thrown away.
    """
    todo = plan(file)
    write_json(target / "config.json", todo.config)
    write_json(target / "generation_config.json", todo.generation_config)
    write_tokenizer(file, target)
    _write_safetensors(file, todo, target / "model.safetensors", progress)
