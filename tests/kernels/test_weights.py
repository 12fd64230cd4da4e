"""Weight files: complete ones load, damaged ones are named, the fingerprint notices a change."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pageferry.kernels.weights import (
    EDGE_BYTES,
    INDEX,
    SINGLE,
    STRIDE_WINDOWS,
    BadCheckpoint,
    open_checkpoint,
)

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "rope_theta": 1e4}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "embed": torch.randn(400, 512),  # 800 KiB: sampled, not read whole
        "norm": torch.randn(16).bfloat16(),
        "proj": torch.randn(24, 16).half(),
    }


def write_config(path: Path, **changes: Any) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "tokenizer.json").write_text("{}")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / SINGLE, metadata={"format": "pt"})
    write_config(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    parts = {"a.safetensors": ["embed"], "b.safetensors": ["norm", "proj"]}
    for shard, names in parts.items():
        save_file({name: tensors()[name] for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in parts.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_config(tmp_path)
    return tmp_path


def edit_index(directory: Path, **changes: str | None) -> None:
    index = json.loads((directory / INDEX).read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_come_as_stored(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    expected = tensors()
    assert checkpoint.names() == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.tensor(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.shape(name) == tuple(tensor.shape)
    with pytest.raises(BadCheckpoint, match="lm_head"):
        checkpoint.tensor("lm_head")


def cut(path: Path, count: int) -> None:
    """Take `count` bytes off the end; a negative count puts zeros there."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-count] if count > 0 else whole + bytes(-count))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "b.safetensors").unlink(), r"b\.safetensors is missing"),
        (lambda d: cut(d / "a.safetensors", 1), r"a\.safetensors: cut off"),
        (lambda d: cut(d / "a.safetensors", 500_000), r"a\.safetensors: cut off"),
        (lambda d: (d / "a.safetensors").write_bytes(b"abc"), r"a\.safetensors: .*cut off"),
        (lambda d: cut(d / "a.safetensors", -1), "longer than its header"),
        (
            lambda d: (d / "a.safetensors").write_bytes(
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
            ),
            r"a\.safetensors: a git-LFS pointer",
        ),
        (lambda d: save_file(tensors(), d / "stray.safetensors"), r"stray\.safetensors belongs"),
        (lambda d: edit_index(d, ghost="a.safetensors"), r"a\.safetensors: tensor ghost"),
        (lambda d: edit_index(d, norm="a.safetensors"), r"b\.safetensors: tensor norm is in a"),
        (lambda d: edit_index(d, norm=None), r"b\.safetensors: tensor norm is in no file"),
        (lambda d: edit_index(d, norm="../b.safetensors"), "no file name"),
        (lambda d: save_file(tensors(), d / "b.safetensors"), r"b\.safetensors: tensor embed is"),
        (lambda d: (d / INDEX).write_text("{"), "not valid JSON"),
        (lambda d: (d / INDEX).write_text("{}"), "weight_map"),
        (lambda d: (d / INDEX).unlink(), "has neither"),
    ],
)
def test_incomplete_checkpoints_name_the_culprit(
    sharded: Path, damage: Callable[[Path], object], message: str
) -> None:
    open_checkpoint(sharded)
    damage(sharded)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(sharded)


def forge(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)


def one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (one(dtype="F8_E4M3"), "tensor t is stored as F8_E4M3"),
        (one(dtype=["F32"]), "tensor t is stored as"),
        (one(shape=[3]), "tensor t of shape"),
        (one(shape=[-2]), "malformed"),
        (one(shape=[2.0]), "malformed"),
        (one(shape=[True]), "malformed"),
        (one(shape="2"), "malformed"),
        (one(offsets=[0]), "malformed"),
        (one(offsets=[8, 16]), "begins at"),
        (one(shape=[2**62], offsets=[0, 2**64]), "cut off"),
        ({"t": 3}, "malformed"),
        (one() | {"u": one()["t"]}, "begins at"),
        ([], "JSON object"),
        (b'{"t":1,"t":2}', "twice"),
        (b"[" * 200_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_forged_headers_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    forge(tmp_path, one(), bytes(8))
    open_checkpoint(tmp_path)
    forge(tmp_path, header, bytes(8))
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(tmp_path)


def fingerprint(directory: Path) -> str:
    return open_checkpoint(directory).fingerprint


def test_fingerprint_ignores_sharding_and_cosmetic_fields(sharded: Path, tmp_path: Path) -> None:
    before = fingerprint(sharded)
    write_config(sharded, transformers_version="9.9", use_cache=False)
    assert fingerprint(sharded) == before
    other = tmp_path / "other"
    other.mkdir()
    save_file(load_file(sharded / "a.safetensors") | load_file(sharded / "b.safetensors"),
              other / SINGLE)  # fmt: skip
    write_config(other)
    assert fingerprint(other) == before


@pytest.mark.parametrize("position", [0, EDGE_BYTES // 4 - 1, -1, "between"])
def test_fingerprint_notices_one_changed_value(single: Path, position: int | str) -> None:
    before = fingerprint(single)
    changed = tensors()
    flat = changed["embed"].view(-1)
    if position == "between":
        room = flat.nbytes - 2 * EDGE_BYTES - (4 << 10)
        position = (EDGE_BYTES + room * 5 // (STRIDE_WINDOWS - 1)) // 4 + 3
    flat[int(position)] += 1
    save_file(changed, single / SINGLE)
    assert fingerprint(single) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda d: write_config(d, rope_theta=5e5),
        lambda d: write_config(d, hidden_size=17),
        lambda d: (d / "tokenizer.json").write_text('{"version": 2}'),
        lambda d: save_file({k: v.bfloat16() for k, v in tensors().items()}, d / SINGLE),
        lambda d: save_file({k: v.half().float().to(v.dtype) for k, v in tensors().items()},
                            d / SINGLE),
        lambda d: save_file({k + "x": v for k, v in tensors().items()}, d / SINGLE),
        lambda d: save_file(tensors() | {"proj": tensors()["proj"].reshape(16, 24)}, d / SINGLE),
    ],
    ids=["rope", "dims", "tokenizer", "dtype", "requantised", "name", "shape"],
)  # fmt: skip
def test_fingerprint_notices_another_model(single: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(single)
    change(single)
    assert fingerprint(single) != before


def test_fingerprint_needs_the_configuration(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"config\.json cannot be read"):
        fingerprint(single)
