"""GGUF files: conversion against transformers' own models, and files that lie about themselves."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType as Kind

from pageferry.kernels.gguf_convert import UnsupportedGGUF, convert_gguf, plan
from pageferry.kernels.gguf_file import BadGGUF, GGUFFile
from pageferry.kernels.gguf_tokenizer import UnsupportedTokenizer, build_bpe
from pageferry.kernels.weights import open_checkpoint

VOCAB = 280  # 256 bytes, three special tokens, padding
Edit = Callable[[gguf.GGUFWriter], None]

DIMS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}

SOURCE_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens = [*byte_letters(), "<|end|>", "<|start|>", "th"]
    tokens += [f"<pad{i}>" for i in range(VOCAB - len(tokens))]
    kinds = [1] * 256 + [3, 3, 1] + [5] * (VOCAB - 259)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)


def write_gguf(
    path: Path,
    architecture: str,
    model: torch.nn.Module,
    config: dict[str, Any],
    *,
    kind: Kind = Kind.F32,
    edit: Edit = add_tokenizer,
) -> Path:
    """What llama.cpp's converter writes for `model`: q and k interleaved for the Llama family."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    edit(writer)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if architecture in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
            half = config["head_dim"] // 2
            heads = values.shape[0] // config["head_dim"]
            order = [
                h * 2 * half + j * half + i
                for h in range(heads)
                for i in range(half)
                for j in (0, 1)
            ]
            values = values[order]
        base, _, part = name.rpartition(".")
        if base.startswith("model.layers."):
            _, _, layer, rest = base.split(".", 3)
            base = f"blk.{layer}.{SOURCE_NAMES[rest]}"
        else:
            base = SOURCE_NAMES[base]
        if kind != Kind.F32 and values.ndim == 2:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{base}.{part}", data, raw_dtype=kind)
        else:
            writer.add_tensor(f"{base}.{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(architecture: str, **changes: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A random model of the architecture with biases and norms that are not neutral."""
    config_class = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "granite": transformers.GraniteConfig,
    }[architecture]
    config = DIMS | changes
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model, config


def convert(source: Path, target: Path) -> Path:
    target.mkdir()
    convert_gguf(GGUFFile(source), target)
    return target


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, config = tiny("llama")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", model, config)


def granite_scales(writer: gguf.GGUFWriter) -> None:
    add_tokenizer(writer)
    writer.add_attention_scale(0.3)
    writer.add_embedding_scale(3.0)
    writer.add_residual_scale(0.7)
    writer.add_logit_scale(5.0)


def llama3_scaling(writer: gguf.GGUFWriter) -> None:
    """llama.cpp's `rope_freqs`: what each inverse frequency is divided by."""
    add_tokenizer(writer, "llama-bpe")
    divisors = []
    for i in range(0, DIMS["head_dim"], 2):
        wave = 2 * math.pi * 100000.0 ** (i / DIMS["head_dim"])
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192:
            divisors.append(8.0)
        else:
            smooth = (8192 / wave - 1) / 3
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def qwen_tokenizer(writer: gguf.GGUFWriter) -> None:
    add_tokenizer(writer, "qwen2")


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 5.0,
}


@pytest.mark.parametrize(
    ("architecture", "changes", "edit"),
    [
        ("llama", {}, add_tokenizer),
        ("llama", {"rope_parameters": LLAMA3_ROPE}, llama3_scaling),
        (
            "qwen2",
            {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1},
            qwen_tokenizer,
        ),
        ("qwen3", {}, qwen_tokenizer),
        (
            "granite",
            GRANITE | {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1},
            granite_scales,
        ),
    ],
    ids=["llama", "llama3-rope", "qwen2", "qwen3", "granite"],
)
def test_converted_model_computes_what_the_original_does(
    tmp_path: Path, architecture: str, changes: dict[str, Any], edit: Edit
) -> None:
    model, config = tiny(architecture, **changes)
    source = write_gguf(tmp_path / "m.gguf", architecture, model, config, edit=edit)
    converted = transformers.AutoModelForCausalLM.from_pretrained(
        convert(source, tmp_path / "out"), dtype=torch.float32
    )
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_missing_output_means_tied_embeddings(tmp_path: Path) -> None:
    model, config = tiny("llama", tie_word_embeddings=True)
    # A tied model lists lm_head in its state; llama.cpp's converter leaves it out.
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    holder = torch.nn.Module()
    holder.state_dict = lambda: state  # type: ignore[method-assign,assignment]
    out = convert(write_gguf(tmp_path / "m.gguf", "llama", holder, config), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in open_checkpoint(out).names()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_0])
def test_quantised_values_are_rounded_to_nearest_bfloat16(tmp_path: Path, kind: Kind) -> None:
    model, config = tiny("qwen3")
    source = write_gguf(tmp_path / "m.gguf", "qwen3", model, config, kind=kind, edit=qwen_tokenizer)
    out = convert(source, tmp_path / "out")
    file, checkpoint = GGUFFile(source), open_checkpoint(out)
    for move in plan(file).moves:
        rows = 1 if len(move.shape) == 1 else move.shape[0]
        exact = torch.from_numpy(file.rows(move.source, 0, rows).copy()).reshape(move.shape)
        assert torch.equal(checkpoint.tensor(move.target), exact.bfloat16()), move.target


def test_configuration_has_shortest_floats_and_rope_in_one_place(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = json.loads((convert(tiny_llama, tmp_path / "out") / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "rope_theta" not in config
    assert config["eos_token_id"] == 256
    assert config["dtype"] == "float32"


def test_end_of_turn_is_an_end_too(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer)
        writer.add_eot_token_id(257)

    model, config = tiny("llama")
    out = convert(
        write_gguf(tmp_path / "m.gguf", "llama", model, config, edit=edit), tmp_path / "o"
    )
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [256, 257]


# --- files that lie ---


def test_every_truncation_is_one_clear_error(tiny_llama: Path, tmp_path: Path) -> None:
    whole = tiny_llama.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400), *range(400, len(whole), len(whole) // 200), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BadGGUF, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_damaged_bytes_never_raise_anything_else(tiny_llama: Path, tmp_path: Path) -> None:
    whole = tiny_llama.read_bytes()
    header = min(tensor.offset for tensor in GGUFFile(tiny_llama).tensors.values())
    source = random.Random(5)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(header)] = source.choice((0, 1, 8, 9, 127, 255))
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            plan(file)
            build_bpe(file)
        except (BadGGUF, UnsupportedGGUF, UnsupportedTokenizer):
            refused += 1
    assert refused > 500


def key_values(*pairs: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF"),
        (b"PK\3\4" + bytes(100), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensor name 0"),
        (key_values(struct.pack("<Q", 2**63)), "cut off"),
        (key_values(text(b"k") + struct.pack("<IIQ", 9, 8, 2**61)), "strings"),
        (key_values(text(b"k") + struct.pack("<IIQ", 9, 4, 2**62)), "values"),
        (key_values(text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "array"),
        (key_values(text(b"k") + struct.pack("<I", 77)), "unknown value type"),
        (key_values(*[text(b"k") + struct.pack("<IB", 7, 1)] * 2), "twice"),
        (key_values(text(b"\xff") + struct.pack("<IB", 7, 1)), "UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"t")
            + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
            "ends at byte",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0),
            "multiple of 32",
        ),
    ],
)  # fmt: skip
def test_forged_headers_are_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "forged.gguf"
    path.write_bytes(content)
    with pytest.raises(BadGGUF, match=message):
        GGUFFile(path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    info = [text(name) + struct.pack("<IQIQ", 1, 16, 0, at) for name, at in ((b"a", 0), (b"b", 32))]
    path = tmp_path / "overlap.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + b"".join(info) + bytes(200))
    with pytest.raises(BadGGUF, match="a and b overlap"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("architecture", "edit", "message"),
    [
        ("gemma3", add_tokenizer, "gemma3.*not supported"),
        ("llama", lambda w: (add_tokenizer(w), w.add_expert_count(8)), "expert_count"),
        ("llama", lambda w: (add_tokenizer(w), w.add_rope_dimension_count(8)), "rope.dimension"),
        (
            "llama",
            lambda w: (add_tokenizer(w), w.add_tensor("x.weight", np.ones(4, np.float32))),
            "x.weight",
        ),
        (
            "llama",
            lambda w: (
                add_tokenizer(w),
                w.add_tensor("rope_freqs.weight", np.full(16, 3, np.float32)),
            ),
            "rope_freqs",
        ),
        ("qwen3", add_tokenizer, "attn_q_norm.weight is missing"),
    ],
    ids=["architecture", "experts", "partial-rope", "unknown-tensor", "rope-factors", "missing"],
)
def test_models_that_would_come_out_wrong_are_refused(
    tmp_path: Path, architecture: str, edit: Edit, message: str
) -> None:
    model, config = tiny("llama")
    source = write_gguf(tmp_path / "m.gguf", architecture, model, config, edit=edit)
    with pytest.raises((BadGGUF, UnsupportedGGUF), match=message):
        plan(GGUFFile(source))


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model, config = tiny("llama")
    model.state_dict()["model.norm.weight"][3] = math.nan
    with pytest.raises(BadGGUF, match=r"output_norm\.weight.*not finite"):
        convert(write_gguf(tmp_path / "m.gguf", "llama", model, config), tmp_path / "out")


# --- the demo model ---


def test_demo_continues_as_recorded(demo_model: Path) -> None:
    """Recorded with transformers in fp32 on weights dequantised to full precision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    fox = "The quick brown fox jumps over the lazy dog. "
    cases = [
        ("1, 2, 3, 4, 5,", 14, 64, "".join(f" {i}," for i in range(6, 23))),
        ("日本語" * 5, 30, 36, "日本語" * 6),
        ("Привет " * 4 + "Привет", 25, 40, " Привет" * 8),
        (fox * 6, 61, 64, ("\n" + fox * 4).rstrip(" ")),
    ]
    for prompt, prompt_tokens, max_new, continuation in cases:
        ids = tokenizer(prompt, return_tensors="pt")
        assert ids["input_ids"].shape[1] == prompt_tokens
        out = model.generate(**ids, max_new_tokens=max_new, do_sample=False)[0][prompt_tokens:]
        assert tokenizer.decode(out, skip_special_tokens=True) == continuation
        if prompt.startswith("The"):
            assert len(out) == 42
            assert out[-1] == 2
