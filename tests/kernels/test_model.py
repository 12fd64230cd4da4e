"""The decoder against transformers: every family, every way of cutting a sequence into steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pageferry.kernels import native
from pageferry.kernels.config import UnsupportedModel
from pageferry.kernels.model import load_model
from pageferry.kernels.weights import BadCheckpoint

TOLERANCE = 1e-4
"""Largest difference of float32 logits; measured: 2.1e-5."""
CPU = torch.device("cpu")


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "the expected logits are too flat to prove anything"
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("size", [1, 7, 16, 61])
def test_equals_transformers_however_it_is_cut(
    tiny: Any, paged: Any, tokens: Any, size: int
) -> None:
    ids = tokens(61)
    assert_close(paged(tiny.load()).chunked(ids, size), tiny.reference_logits(ids))


@pytest.mark.parametrize("poison", [float("nan"), 1e38])
def test_ragged_batch_of_chunks_and_decode_rows(
    tiny: Any, paged: Any, tokens: Any, poison: float
) -> None:
    run = paged(tiny.load(), poison=poison)
    sequences = {i: tokens(n, i) for i, n in enumerate([40, 33, 17, 70, 1, 16])}
    for i, computed in {0: 39, 1: 20, 3: 32, 5: 15}.items():
        run.chunked(sequences[i][:computed], 13, i)
    starts = {3: 32, 0: 39, 4: 0, 1: 20, 5: 15, 2: 0}
    results = run.logits([(i, start, sequences[i][start:]) for i, start in starts.items()])
    for (i, start), got in zip(starts.items(), results, strict=True):
        assert_close(got, tiny.reference_logits(sequences[i])[start:])


def test_decode_of_many_lengths_at_once(tiny: Any, paged: Any, tokens: Any) -> None:
    run = paged(tiny.load(), num_pages=96)
    lengths = [1, 2, 15, 16, 17, 31, 48, 64, 100, 200]
    sequences = [tokens(n, n) for n in lengths]
    for i, ids in enumerate(sequences):
        if len(ids) > 1:
            run.logits([(i, 0, ids[:-1])])
    results = run.logits([(i, len(ids) - 1, ids[-1:]) for i, ids in enumerate(sequences)])
    for ids, got in zip(sequences, results, strict=True):
        assert_close(got, tiny.reference_logits(ids)[-1:])


@pytest.mark.parametrize("length", [15, 16, 17, 48])
@pytest.mark.parametrize("size", [1, 5, 48])
def test_mistral_window_boundaries(
    make_model: Any, paged: Any, tokens: Any, length: int, size: int
) -> None:
    tiny = make_model("mistral")
    ids = tokens(length, length)
    assert_close(paged(tiny.load()).chunked(ids, size), tiny.reference_logits(ids))


def test_slots_outside_the_window_are_not_read(make_model: Any, paged: Any, tokens: Any) -> None:
    tiny = make_model("mistral")
    run = paged(tiny.load())
    ids = tokens(70)
    run.chunked(ids[:69], 23)
    run.kv[:, run.tables[0][:3]] = float("nan")  # positions 0..47; the window is 54..69
    assert_close(run.logits([(0, 69, ids[69:])])[0], tiny.reference_logits(ids)[69:])


def test_bfloat16_stays_near_float32(tiny: Any, paged: Any, tokens: Any) -> None:
    """Mean error against the logits' standard deviation; measured: at most 2.0 %."""
    ids = tokens(48)
    expected = tiny.reference_logits(ids)
    model = tiny.load(torch.bfloat16)
    run = paged(model)
    got = torch.cat(
        [
            run.chunked(ids[:40], 40),
            *(run.logits([(0, p, ids[p : p + 1])])[0] for p in range(40, 48)),
        ]
    )
    assert model.dtype == torch.bfloat16
    assert (got - expected).abs().mean() < 0.04 * expected.std()


def test_layers_are_reported_when_their_pages_are_written(
    make_model: Any, paged: Any, tokens: Any
) -> None:
    model = make_model("llama").load()
    run = paged(model)
    ids, batch = run.batch([(0, 0, tokens(20))])
    seen = []

    def on_layer(layer: int) -> None:
        pages = run.tables[0]
        stored = run.kv[layer, pages].isfinite().all(-1)  # [2 pages, 2, heads, page_size]
        seen.append((layer, stored[0].all().item(), stored[1].all(0).all(0).sum().item()))

    with torch.inference_mode():
        model.forward(ids, batch, run.kv, on_layer)
    assert seen == [(0, True, 4), (1, True, 4)]


# --- loading


@pytest.fixture
def broken(make_model: Any, tmp_path: Path) -> Callable[..., Path]:
    """`broken(family, change)`: a copy of the checkpoint with its tensors changed."""

    def make(family: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(make_model(family).path, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def test_tied_head_is_the_embedding(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    tied, untied = make_model("smollm2").load(), make_model("llama").load()
    assert tied.lm_head is tied.embedding
    assert untied.lm_head is not untied.embedding
    matrix = tied.embedding.numel() * 4
    layers = sum(t.numel() * 4 for x in tied.layers for t in vars(x).values() if t is not None)
    rest = (tied.final_norm.numel() + tied.rope_table.numel()) * 4
    assert tied.num_bytes == matrix + layers + rest


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "lm_head.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_missing_tensor_is_named(broken: Any, family: str, name: str) -> None:
    path = broken(family, lambda t: t.pop(name))
    with pytest.raises(BadCheckpoint, match=name):
        load_model(path, CPU, torch.float32)


def test_unknown_tensor_is_named(broken: Any) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    path = broken("llama", lambda t: t.update({name: torch.zeros(480)}))
    with pytest.raises(BadCheckpoint, match=name):
        load_model(path, CPU, torch.float32)


def test_wrong_shape_is_named(broken: Any) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    path = broken("llama", lambda t: t.update({name: t[name].T.contiguous()}))
    with pytest.raises(BadCheckpoint, match=rf"{name} has shape \(160, 96\).*\(96, 160\)"):
        load_model(path, CPU, torch.float32)


def test_rotary_buffers_are_ignored(broken: Any) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = broken("llama", lambda t: t.update({name: torch.ones(40)}))
    assert load_model(path, CPU, torch.float32).config.num_layers == 2


def test_extra_tied_head_must_be_equal(
    broken: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    embed = "model.embed_tokens.weight"
    path = broken("smollm2", lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    model = load_model(path, CPU, torch.float32)
    assert model.lm_head is model.embedding
    assert "lm_head.weight" in caplog.text
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight"):
        load_model(path, CPU, torch.float32)


def test_fingerprint_tells_weights_and_configurations_apart(make_model: Any, broken: Any) -> None:
    tiny = make_model("llama")
    name = "model.layers.1.input_layernorm.weight"
    path = broken("llama", lambda t: t[name].add_(1))
    first = tiny.load().fingerprint
    assert first == tiny.load(torch.bfloat16).fingerprint
    assert first != load_model(path, CPU, torch.float32).fingerprint
    shutil.rmtree(path)
    path = broken("llama", lambda t: None)
    config = json.loads((path / "config.json").read_text())
    config["rms_norm_eps"] = 1e-5
    (path / "config.json").write_text(json.dumps(config))
    assert first != load_model(path, CPU, torch.float32).fingerprint


def test_other_architectures_are_refused_before_weights_are_read(
    make_model: Any, tmp_path: Path
) -> None:
    config = json.loads((make_model("llama").path / "config.json").read_text())
    config["architectures"] = ["MixtralForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM"):
        load_model(tmp_path, CPU, torch.float32)


def test_rope_table_can_be_limited(make_model: Any) -> None:
    model = load_model(make_model("llama").path, CPU, torch.float32, max_positions=100)
    assert model.max_positions == 100
    assert make_model("qwen2").load().max_positions == 256
