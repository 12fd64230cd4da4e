"""What a model's directory says about its shape: `config.json` and `generation_config.json`.

`ModelConfig.from_dir` reads the files once and yields one frozen object from which the decoder is
built. Everything that the decoder cannot compute exactly is refused here with `UnsupportedModel`,
one sentence that names the field and its value; nothing is approximated in silence.

Another way of running a model (an architecture that this decoder does not cover) would branch where
`FAMILIES` is looked up: that table is the list of what `kernels/model.py` can run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

N = TypeVar("N", int, float)


class UnsupportedModel(ValueError):
    """This model cannot be run as its files describe it; the message says which field and why."""


@dataclass(frozen=True)
class Family:
    """Where architectures of the Llama kind differ. Defaults are those of the published configs."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    num_kv_heads: int | None = None
    """When the file is silent; None: as many as query heads."""
    head_dim: int | None = None
    """When the file is silent; None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    """When the file is silent."""
    window_rule: str = "none"
    """"none", "all" layers, or "upper" (layers from `max_window_layers` on, if enabled)."""
    multipliers: bool = False
    """Granite's embedding, attention, residual and logits factors."""


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=None),
    "MistralForCausalLM": Family(
        qkv_bias=False, o_bias=False, num_kv_heads=8, sliding_window=4096, window_rule="all"
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, o_bias=False, num_kv_heads=32, sliding_window=4096, window_rule="upper"
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, num_kv_heads=32, head_dim=128, sliding_window=4096, window_rule="upper"
    ),
    "GraniteForCausalLM": Family(mlp_bias=None, multipliers=True),
}

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
}

REFUSED_FIELDS = (
    "attention_chunk_size",
    "attn_logit_softcapping",
    "clip_qkv",
    "final_logit_softcapping",
    "llama_4_scaling",
    "logit_scale",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "rotary_dim",
    "use_qk_norm",
)
"""Fields that change the computation in a way that the decoder does not follow."""

MULTIPLIER_FIELDS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the formulas are in `kernels/rope.py`."""

    theta: float
    kind: str = "default"
    """"default", "linear", "llama3" or "yarn"."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: given factor on cos and sin; None: derived from `factor` and the two below."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_ROPE_COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one decoder-only model. Sizes count elements; positions and windows count tokens."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding matrix; may exceed `tokenizer_vocab_size` (padding)."""
    max_position_embeddings: int
    """Longest sequence; with yarn scaling, the scaled length."""
    rms_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: a query sees this many newest positions, its own included; None: all."""
    attention_scale: float
    """Factor on q·k before the softmax."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """Union of both files, ascending."""
    tokenizer_vocab_size: int | None = None
    """Highest id in tokenizer.json plus one; None without that file."""

    @property
    def sampled_vocab_size(self) -> int:
        """Ids below this may be sampled; the rows above are padding."""
        return min(self.vocab_size, self.tokenizer_vocab_size or self.vocab_size)

    @classmethod
    def from_dir(cls, path: Path) -> Self:
        """Read the directory. `UnsupportedModel` for anything the decoder cannot run exactly."""
        raw = _read_json(path / "config.json")
        generation = (
            _read_json(path / "generation_config.json")
            if (path / "generation_config.json").is_file()
            else {}
        )
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _refuse_unknown_arithmetic(raw, family)
        reader = _Reader(raw)
        num_heads = reader.positive("num_attention_heads")
        num_layers = reader.positive("num_hidden_layers")
        hidden_size = reader.positive("hidden_size")
        num_kv_heads = reader.positive("num_key_value_heads", family.num_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        head_dim = _head_dim(reader, family, hidden_size, num_heads)
        rope = _rope(raw, reader)
        attention_bias = reader.flag("attention_bias")
        multiplier = reader.number if family.multipliers else _no_multiplier
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.positive("intermediate_size"),
            vocab_size=reader.positive("vocab_size"),
            max_position_embeddings=_max_positions(reader, rope),
            rms_eps=reader.number("rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=reader.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            tie_embeddings=reader.flag("tie_word_embeddings"),
            windows=_windows(raw, reader, family, num_layers),
            attention_scale=(
                reader.number("attention_multiplier", 1.0) if family.multipliers else head_dim**-0.5
            ),
            embedding_multiplier=multiplier("embedding_multiplier", 1.0),
            residual_multiplier=multiplier("residual_multiplier", 1.0),
            logits_divisor=multiplier("logits_scaling", 1.0),
            eos_token_ids=_eos_ids(raw, generation),
            tokenizer_vocab_size=_tokenizer_size(path / "tokenizer.json"),
        )


def _no_multiplier(_name: str, default: float) -> float:
    return default


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} does not exist: not a model directory") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@dataclass(frozen=True)
class _Reader:
    """Typed access to config.json; a missing or mistyped field is `UnsupportedModel`."""

    raw: Mapping[str, Any]

    def _get(self, name: str, kind: type[N], default: N | None) -> N:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise UnsupportedModel(f"config.json has no {name}")
            return default
        allowed = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise UnsupportedModel(f"config.json: {name}={value!r} is not of type {kind.__name__}")
        return kind(value)

    def positive(self, name: str, default: int | None = None) -> int:
        value = self._get(name, int, default)
        if value <= 0:
            raise UnsupportedModel(f"config.json: {name}={value} must be positive")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return self._get(name, float, default)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {name}={value!r} is not true or false")
        return bool(value)


def _architecture(raw: Mapping[str, Any]) -> str:
    listed = raw.get("architectures") or [MODEL_TYPES.get(str(raw.get("model_type")))]
    name = listed[0]
    if len(listed) != 1 or name not in FAMILIES:
        shown = name or f"model_type {raw.get('model_type')!r}"
        raise UnsupportedModel(
            f"architecture {shown} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return str(name)


def _refuse_unknown_arithmetic(raw: Mapping[str, Any], family: Family) -> None:
    for name in REFUSED_FIELDS:
        if raw.get(name):
            shown = str(raw[name])[:80]
            raise UnsupportedModel(f"config.json: {name}={shown} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"config.json: hidden_act={raw['hidden_act']!r}; only 'silu' works")
    if not family.multipliers:
        for name in MULTIPLIER_FIELDS:
            if raw.get(name, 1) != 1:
                raise UnsupportedModel(
                    f"config.json: {name}={raw[name]!r} is supported for Granite only"
                )
    if family.window_rule == "none" and raw.get("sliding_window"):
        raise UnsupportedModel(
            f"config.json: sliding_window={raw['sliding_window']!r} has no meaning for this "
            "architecture; remove it if the model attends to everything"
        )


def _head_dim(reader: _Reader, family: Family, hidden_size: int, num_heads: int) -> int:
    if family.head_dim is None and reader.raw.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads} "
            "and head_dim is not given"
        )
    head_dim = reader.positive("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim={head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _rope(raw: Mapping[str, Any], reader: _Reader) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and everything in `rope_parameters`."""
    given: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        part = raw.get(name) or {}
        if not isinstance(part, dict):
            raise UnsupportedModel(f"config.json: {name}={part!r} is not an object")
        given |= part
    fields = _Reader({**raw, **given})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported are {', '.join(_ROPE_FIELDS)}"
        )
    for name in given:
        if name not in _ROPE_FIELDS[kind] and name not in _ROPE_COMMON:
            raise UnsupportedModel(f"rope type {kind!r} with {name}={given[name]!r} is unsupported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor={fields.raw['partial_rotary_factor']} is not supported"
        )
    theta = fields.number("rope_theta", 10000.0)
    if kind in ("default", "dynamic"):
        # Dynamic scaling changes nothing up to max_position_embeddings, and we never go beyond.
        return RopeConfig(theta)
    scaled = _Reader(given)
    rope = RopeConfig(theta, kind, scaled.number("factor"))
    if rope.factor <= 0:
        raise UnsupportedModel(f"rope factor={rope.factor} must be positive")
    if kind == "linear":
        return rope
    name = "original_max_position_embeddings"
    original = (reader if raw.get(name) else scaled).positive(
        name, reader.positive("max_position_embeddings")
    )
    rope = replace(rope, original_max_position_embeddings=original)
    if kind == "llama3":
        low, high = scaled.number("low_freq_factor"), scaled.number("high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"rope low_freq_factor={low} is not below high_freq_factor")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    return replace(
        rope,
        beta_fast=scaled.number("beta_fast", 32.0),
        beta_slow=scaled.number("beta_slow", 1.0),
        attention_factor=scaled.number("attention_factor", 0.0) or None,
        mscale=scaled.number("mscale", 0.0),
        mscale_all_dim=scaled.number("mscale_all_dim", 0.0),
        truncate=bool(given.get("truncate", True)),
    )


def _max_positions(reader: _Reader, rope: RopeConfig) -> int:
    limit = reader.positive("max_position_embeddings")
    if rope.kind == "yarn":
        return max(limit, int(rope.original_max_position_embeddings * rope.factor))
    return limit


def _windows(
    raw: Mapping[str, Any], reader: _Reader, family: Family, num_layers: int
) -> tuple[int | None, ...]:
    everything: tuple[int | None, ...] = (None,) * num_layers
    if family.window_rule == "none":
        return everything
    given = raw.get("sliding_window", family.sliding_window)
    if given is None or (family.window_rule == "upper" and not reader.flag("use_sliding_window")):
        window = None
    else:
        window = _Reader({"sliding_window": given}).positive("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = reader.positive("max_window_layers", 28) if family.window_rule == "upper" else 0
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"layer_types must name full_attention or sliding_attention for each of "
            f"{num_layers} layers, got {len(kinds)} entries of {sorted(set(map(str, kinds)))}"
        )
    if family.window_rule == "all" and len(set(kinds)) > 1:
        raise UnsupportedModel("layer_types that differ between layers are not supported here")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(*files: Mapping[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for raw in files:
        value = raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise UnsupportedModel(f"eos_token_id={value!r} is not an id or a list of ids")
            found.add(token_id)
    return tuple(sorted(found))


def _tokenizer_size(path: Path) -> int | None:
    if not path.is_file():
        return None
    raw = _read_json(path)
    vocab = (raw.get("model") or {}).get("vocab") or {}
    highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    added = (entry["id"] for entry in raw.get("added_tokens") or ())
    return max(highest, *added, -1) + 1 or None
