"""Finds the files of a model without reading weights: gateways, workers and the CLI ask here.

1. `python -m pageferry.kernels.prepare MODEL` puts a model where this module finds it: it writes
   `<cache>/models/<name>/prepared.json`, the marker, last of all. The marker says which source it
   was made from, in which directory the model lies, and which files of which size belong to it.
2. `resolve_model_dir` looks for the marker of the wanted source and checks that the files are
   there. It never downloads, converts or waits; what is not there raises `ModelNotFound` with the
   command to run.

Sources: `demo`, `gguf:<path>:<size>:<mtime_ns>` (so a replaced file is a new source), `hub:<id>`.
A directory needs no marker: it is the model.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
"""Served name of the model that an empty `--model` means."""

MARKER = "prepared.json"
MARKER_FORMAT = 1

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelNotFound(ValueError):
    """The model is not on this machine; the text says what to run."""


@dataclass(frozen=True)
class Prepared:
    """What a marker says."""

    source: str
    name: str
    directory: Path
    sizes: dict[str, int]  # file name -> bytes

    def missing(self) -> str:
        """The first file that is absent or of another size; "" when all are as they were."""
        for name, size in self.sizes.items():
            file = self.directory / name
            if not file.is_file() or file.stat().st_size != size:
                return name
        return ""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pageferry`, or `~/.cache/pageferry` (XDG: a relative value is ignored)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pageferry"


def _read_marker(path: Path) -> Prepared | None:
    """None for a file that is no marker of this version: whoever prepares replaces it."""
    try:
        fields = json.loads(path.read_bytes())
        if fields["format"] != MARKER_FORMAT:
            return None
        return Prepared(
            source=str(fields["source"]),
            name=str(fields["name"]),
            directory=(path.parent / fields["directory"]).resolve(),
            sizes={str(name): int(file["size"]) for name, file in fields["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _find_prepared(source: str) -> Prepared | None:
    for path in sorted((cache_dir() / "models").glob(f"*/{MARKER}")):
        marker = _read_marker(path)
        if marker is not None and marker.source == source:
            return marker
    return None


def _source(model: str, path: Path) -> str:
    """The source that `model` names, given that it is no directory."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"model {model!r} is a file; expected a directory, a .gguf file or a hub id"
            )
        resolved = path.resolve()
        stat = resolved.stat()
        return f"gguf:{resolved}:{stat.st_size}:{stat.st_mtime_ns}"
    if model == DEMO_MODEL_NAME:
        return "demo"
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"model {model!r}: no such file or directory")
    return f"hub:{model}"


def resolve_model_dir(model: str) -> Path:
    """Directory with config.json, tokenizer and weights of `model` (as in `--model`).

    Raises `ModelNotFound` with a sentence that says what to do.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model directory {model!r} has no config.json")
        return path.resolve()
    source = _source(model, path) if model else "demo"
    command = f"pageferry prepare {model}".rstrip()
    prepared = _find_prepared(source)
    if prepared is None:
        shown = repr(model) if model else "the demo model"
        raise ModelNotFound(f"{shown} is not prepared on this machine; run: {command}")
    if missing := prepared.missing():
        raise ModelNotFound(
            f"{missing} of the prepared model in {prepared.directory} is missing or incomplete; "
            f"run: {command}"
        )
    return prepared.directory


def served_name(model: str, override: str = "") -> str:
    """Model id that clients use: `override`, else the last part of the model's own name."""
    if override:
        return override
    if not model:
        return DEMO_MODEL_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        marker = _read_marker(path / MARKER)
        return marker.name if marker else path.resolve().name
    if path.suffix == ".gguf":
        return path.stem
    return model.rstrip("/").rpartition("/")[2]
