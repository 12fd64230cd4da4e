"""Finding prepared models: only whole ones are found, and the sentence says what to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageferry.kvtransfer.model_files import (
    DEMO_MODEL_NAME,
    MARKER,
    ModelNotFound,
    cache_dir,
    resolve_model_dir,
    served_name,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pageferry"


def put(cache: Path, source: str, name: str = "m", **changes: Any) -> Path:
    """A prepared model of one file with 5 bytes."""
    directory = cache / "models" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{   }")
    marker = {
        "format": 1,
        "source": source,
        "name": name,
        "directory": ".",
        "files": {"config.json": {"size": 5, "sha256": "-"}},
    }
    (directory / MARKER).write_text(json.dumps(marker | changes))
    return directory


def gguf_source(path: Path) -> str:
    stat = path.stat()
    return f"gguf:{path}:{stat.st_size}:{stat.st_mtime_ns}"


def test_cache_follows_xdg(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == cache
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "pageferry"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "pageferry"


@pytest.mark.parametrize("model", ["", DEMO_MODEL_NAME])
def test_demo_model(cache: Path, model: str) -> None:
    with pytest.raises(ModelNotFound, match="run: pageferry prepare"):
        resolve_model_dir(model)
    directory = put(cache, "demo")
    assert resolve_model_dir(model) == directory


def test_directory_is_itself(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model_dir(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_dir(str(tmp_path)) == tmp_path


def test_gguf_is_found_until_it_changes(cache: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"run: pageferry prepare .*x\.gguf"):
        resolve_model_dir(str(gguf))
    directory = put(cache, gguf_source(gguf))
    assert resolve_model_dir(str(gguf)) == directory
    os.utime(gguf, ns=(0, 0))
    with pytest.raises(ModelNotFound, match="not prepared"):
        resolve_model_dir(str(gguf))


def test_hub_id_points_elsewhere(cache: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{   }")
    put(cache, "hub:org/name", directory=str(snapshot))
    assert resolve_model_dir("org/name") == snapshot
    with pytest.raises(ModelNotFound, match="run: pageferry prepare org/other"):
        resolve_model_dir("org/other")


@pytest.mark.parametrize("model", ["/no/such", "./no", "no/such/place", "x.gguf", "~/nothing-here"])
def test_missing_paths_are_not_taken_for_hub_ids(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model_dir(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"expected a directory, a \.gguf file"):
        resolve_model_dir(str(tmp_path / "model.bin"))


def test_incomplete_model_is_not_used(cache: Path) -> None:
    directory = put(cache, "demo")
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match=r"config\.json of the prepared model .* run: "):
        resolve_model_dir("")


@pytest.mark.parametrize(
    "marker", ["", "[]", "{", '{"format": 1}', '{"format": 2}', '{"format": 1, "files": 3}']
)
def test_foreign_markers_are_skipped(cache: Path, marker: str) -> None:
    (put(cache, "demo", "a") / MARKER).write_text(marker)
    with pytest.raises(ModelNotFound, match="not prepared"):
        resolve_model_dir("")
    good = put(cache, "demo", "b")
    assert resolve_model_dir("") == good


def test_served_names(cache: Path, tmp_path: Path) -> None:
    assert served_name("", "mine") == "mine"
    assert served_name("") == DEMO_MODEL_NAME
    assert served_name("HuggingFaceTB/SmolLM2-360M") == "SmolLM2-360M"
    assert served_name("/models/SmolLM2-135M.Q4_1.gguf") == "SmolLM2-135M.Q4_1"
    (tmp_path / "My-Model").mkdir()
    assert served_name(f"{tmp_path}/My-Model/") == "My-Model"
    prepared = put(cache, "gguf:x", "tiny-1234", name_in_marker="")
    assert served_name(str(prepared)) == "tiny-1234"


def test_prepared_directory_keeps_the_models_name(cache: Path) -> None:
    directory = put(cache, "gguf:x", "tiny-0123456789ab")
    marker = json.loads((directory / MARKER).read_text()) | {"name": "tiny"}
    (directory / MARKER).write_text(json.dumps(marker))
    assert served_name(str(directory)) == "tiny"


def test_gateways_can_ask_without_heavy_imports() -> None:
    code = (
        "import sys, pageferry.kvtransfer.model_files\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
