"""Reading config.json: what is understood, what is refused, and that refusals name the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pageferry.kernels.config import ModelConfig, UnsupportedModel
from pageferry.kernels.rope import attention_factor, inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(**fields)`: the Llama configuration above with these fields; None removes one."""

    def make(generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
        raw = {k: v for k, v in {**LLAMA, **fields}.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_dir(tmp_path)

    return make


def test_plain_llama(read: Read) -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (6, 16)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.windows == (None,) * 4
    assert config.attention_scale == 0.25
    assert config.rope.theta == 10000.0
    assert not config.tie_embeddings
    assert hash(config) == hash(read())


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_rope_theta_in_either_place(read: Read, fields: dict[str, Any]) -> None:
    assert read(**fields).rope.theta == 5e5


def test_given_head_dim_wins_over_division(read: Read) -> None:
    assert read(head_dim=80).head_dim == 80
    assert read(head_dim=None).head_dim == 16
    assert read(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2).head_dim == 128


def test_model_type_serves_without_architectures(read: Read) -> None:
    config = read(architectures=..., model_type="granite")
    assert config.architecture == "GraniteForCausalLM"


def test_eos_ids_are_the_union_of_both_files(read: Read) -> None:
    assert read(eos_token_id=[7, 2]).eos_token_ids == (2, 7)
    assert read({"eos_token_id": [151645, 151643]}, eos_token_id=151645).eos_token_ids == (
        151643,
        151645,
    )
    assert read({"eos_token_id": 0}, eos_token_id=None).eos_token_ids == (0,)
    assert read({}, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, (16, 16, 16, 16)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}, (4096,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, (None,) * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_sliding_windows(read: Read, fields: dict[str, Any], windows: tuple[int | None]) -> None:
    base = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    assert read(**{**base, **fields}).windows == windows


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ..., "model_type": "phi3"}, "phi3"),
        ({"architectures": ...}, "model_type None"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "96"}, "hidden_size='96'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": 100}, "hidden_size=100"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "layer_types": ["x"]},
            "layer_types",
        ),
    ],
)
def test_refusals_name_the_field(read: Read, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match="list"):
        ModelConfig.from_dir(tmp_path)


def test_tokenizer_size_bounds_what_may_be_sampled(read: Read, tmp_path: Path) -> None:
    assert read().sampled_vocab_size == 199
    added = [{"id": 150, "content": "<|im_end|>"}]
    tokenizer = {"model": {"vocab": {"a": 0, "b": 140}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read().sampled_vocab_size == 151
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0]] * 120}}))
    assert read().sampled_vocab_size == 120
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"z": 5000}}}))
    assert read().sampled_vocab_size == 199


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 1.2, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    ],
)
def test_scaled_frequencies_equal_transformers(read: Read, scaling: dict[str, Any]) -> None:
    parameters = {**scaling, "rope_theta": 1e4}
    config = read(rope_parameters=parameters)
    other = LlamaConfig(**{**LLAMA, "rope_parameters": dict(parameters)})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](other, torch.device("cpu"))
    got = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert attention_factor(config.rope) == pytest.approx(factor)


def test_yarn_extends_the_longest_sequence(read: Read) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_scaling=scaling).max_position_embeddings == 512
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).max_position_embeddings == 256
