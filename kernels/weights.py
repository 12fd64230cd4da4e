"""Opens the safetensors files of a model directory, refusing whatever is incomplete or stray.

1. `open_checkpoint` finds the files (`model.safetensors`, or the shards that
   `model.safetensors.index.json` names), reads their headers and compares: every tensor of the
   index present exactly once, each file exactly as long as its header says, no file left over.
   A truncated file would otherwise be mapped as zeros and the model would talk gibberish.
2. `Checkpoint.tensor` maps one tensor in its stored type; nothing is read before it is used.
3. `Checkpoint.fingerprint` identifies configuration, tokenizer and weights; workers that exchange
   KV pages compare it.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Stored types that are loaded, and their sizes in bytes."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format itself."""

EDGE_BYTES = 64 << 10
"""The fingerprint reads this much from either end of a tensor …"""

STRIDE_WINDOWS, WINDOW_BYTES = 16, 4 << 10
"""… and this many evenly spaced windows of this size between them."""

COSMETIC_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of config.json that change neither KV values nor texts; stored types count per tensor."""

_LFS_PREFIX = b"version https://git-lfs"


class BadCheckpoint(ValueError):
    """The weight files are missing, incomplete or inconsistent; names the file or tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place: `nbytes` bytes from `offset` (from the start of `file`)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name appears twice")
    return fields


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path, path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def _read_header(path: Path) -> dict[str, Entry]:
    """Tensors of one safetensors file; raises `BadCheckpoint` unless they fill it exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(_LFS_PREFIX))
        if prefix == _LFS_PREFIX:
            raise BadCheckpoint(
                f"{path}: a git-LFS pointer, not the weights themselves; run git lfs pull"
            )
        length = int.from_bytes(prefix[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise BadCheckpoint(
                f"{path}: header of {length} bytes in a file of {size}: cut off, or not safetensors"
            )
        file.seek(8)
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, fields, start) for name, fields in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise BadCheckpoint(
                f"{path}: tensor {name} begins at byte {entry.offset}, the one before ends at {end}"
            )
        end += entry.nbytes
    if end != size:
        what = "cut off" if end > size else "longer than its header says"
        raise BadCheckpoint(f"{path}: {what}: {size} bytes instead of {end}; fetch the file again")
    return entries


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise BadCheckpoint(f"{path}: the header's entry for {name} is malformed") from error
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadCheckpoint(
            f"{path}: tensor {name} is stored as {dtype}; {', '.join(DTYPE_BYTES)} are supported "
            "(quantised checkpoints are not)"
        )
    if not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
        raise BadCheckpoint(f"{path}: the header's entry for {name} is malformed")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise BadCheckpoint(
            f"{path}: tensor {name} of shape {shape} in {dtype} takes {nbytes} bytes, the header "
            f"gives it {end - begin}"
        )
    return Entry(path, dtype, tuple(shape), start + begin, nbytes)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{path}: has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard:
            raise BadCheckpoint(f"{path}: tensor {name} is in {shard!r}, which is no file name")
    return weight_map


def _collect(directory: Path) -> dict[str, Entry]:
    index = directory / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        shards = set(weight_map.values())
    elif (directory / SINGLE).is_file():
        weight_map, shards = {}, {SINGLE}
    else:
        raise BadCheckpoint(f"{directory}: has neither {SINGLE} nor {INDEX}")
    present = {path.name for path in directory.glob("*.safetensors")}
    if missing := sorted(shards - present):
        raise BadCheckpoint(f"{directory}: {missing[0]} is missing ({len(missing)} files in all)")
    if stray := sorted(present - shards):
        raise BadCheckpoint(
            f"{directory}: {stray[0]} belongs to no index; which weights are meant? Remove it"
        )
    entries: dict[str, Entry] = {}
    for shard in sorted(shards):
        for name, entry in _read_header(directory / shard).items():
            if name in entries:
                raise BadCheckpoint(f"{entry.file}: tensor {name} is also in {entries[name].file}")
            if weight_map and weight_map.get(name) != shard:
                said = weight_map.get(name, "no file")
                raise BadCheckpoint(f"{entry.file}: tensor {name} is in {said} by the index")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise BadCheckpoint(f"{directory / shard}: tensor {name} of the index is missing")
    return entries


def _sample(file: BinaryIO, entry: Entry) -> bytes:
    """The part of a tensor that the fingerprint covers; small tensors whole."""
    between = entry.nbytes - 2 * EDGE_BYTES
    if between <= STRIDE_WINDOWS * WINDOW_BYTES:
        spans = [(0, entry.nbytes)]
    else:
        room = between - WINDOW_BYTES
        spans = [(0, EDGE_BYTES), (entry.nbytes - EDGE_BYTES, EDGE_BYTES)]
        spans += [
            (EDGE_BYTES + room * i // (STRIDE_WINDOWS - 1), WINDOW_BYTES)
            for i in range(STRIDE_WINDOWS)
        ]
    pieces = []
    for begin, count in spans:
        file.seek(entry.offset + begin)
        piece = file.read(count)
        if len(piece) != count:
            raise BadCheckpoint(f"{entry.file}: shorter than when it was opened")
        pieces.append(piece)
    return b"".join(pieces)


class Checkpoint:
    """The weights of one model directory. Made by `open_checkpoint`; files stay mapped."""

    def __init__(self, directory: Path, entries: dict[str, Entry]) -> None:
        self.directory = directory
        self._entries = entries
        self._maps: dict[Path, Any] = {
            file: safe_open(file, framework="pt", device="cpu")
            for file in sorted({entry.file for entry in entries.values()})
        }

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises `BadCheckpoint` when there is none."""
        return self._entry(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in its stored type, mapped from the file: on the CPU and not to be written to.

        Raises `BadCheckpoint` when the checkpoint has no such tensor.
        """
        tensor: torch.Tensor = self._maps[self._entry(name).file].get_tensor(name)
        return tensor

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise BadCheckpoint(f"{self.directory}: tensor {name} is missing")
        return self._entries[name]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides KV values and texts: configuration, tokenizer, weights.

        Covered: config.json without `COSMETIC_CONFIG`; tokenizer.json; of each tensor name, shape,
        stored type and a sample: both ends (`EDGE_BYTES` each) and `STRIDE_WINDOWS` windows between
        them. At most 192 KiB a tensor are read, so a 16 GB model costs some 60 MB of reading; a
        different model, a fine-tune or another quantisation differs in it, a single value changed
        by hand in the middle of a large tensor may not. How the tensors are sharded is not covered.
        """
        digest = hashlib.sha256()

        def add(part: bytes) -> None:  # length-framed, so that parts cannot run into one another
            digest.update(len(part).to_bytes(8, "little") + part)

        config = _read_json(self.directory / "config.json")
        essentials = {key: value for key, value in config.items() if key not in COSMETIC_CONFIG}
        add(json.dumps(essentials, sort_keys=True, separators=(",", ":")).encode())
        tokenizer = self.directory / "tokenizer.json"
        add(hashlib.sha256(tokenizer.read_bytes()).digest() if tokenizer.is_file() else b"")
        open_files = {file: file.open("rb") for file in self._maps}
        try:
            for name, entry in sorted(self._entries.items()):
                add(f"{name} {entry.dtype} {list(entry.shape)}".encode())
                add(_sample(open_files[entry.file], entry))
        finally:
            for file in open_files.values():
                file.close()
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the weight files in the directory `path` and map them.

    Raises `BadCheckpoint`, naming file or tensor, unless they are complete and consistent.
    """
    try:
        return Checkpoint(path, _collect(path))
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{path}: {error}") from error
