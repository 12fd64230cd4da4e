"""Reads a GGUF file (versions 2 and 3, little-endian) without trusting it.

The `gguf` package parses headers too, but it believes every length that the file states (a forged
array length makes it loop for 2^64 rounds) and needs seconds for a 49,152-token vocabulary where
this reader needs tenths. So the header is parsed here, every length checked against the bytes that
are left before anything is allocated, and the package does what it is best at: dequantising.

1. `GGUFFile.open` maps the file and reads metadata and tensor table; any contradiction raises
   `BadGGUF` with one sentence.
2. `rows` dequantises a range of rows of one tensor to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF value type number -> numpy dtype."""


class BadGGUF(ValueError):
    """The file is not a GGUF file, is cut off, or contradicts itself."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place in the file. `shape` is in numpy order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads forward through `buffer`; never past its end."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.offset = 0

    def take(self, count: int, what: str) -> int:
        """Reserve `count` bytes for `what` and return where they begin."""
        start = self.offset
        if count > len(self.buffer) - start:
            raise BadGGUF(
                f"{self.path}: cut off or damaged: {what} needs {count} bytes at offset {start}, "
                f"the file has {len(self.buffer)}; fetch it again"
            )
        self.offset += count
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.buffer, self.take(8, what))[0])

    def text(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise BadGGUF(f"{self.path}: {what} is not UTF-8 ({error.reason})") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise BadGGUF(f"{self.path}: {key} has unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.buffer, dtype, 1, self.take(dtype.itemsize, key))[0].item()

    def _array(self, key: str) -> list[Any]:
        kind, count = self.u32(key), self.u64(key)
        if kind == _STRING:
            if count * 8 > len(self.buffer) - self.offset:  # 8: the length field of each string
                self.take(count * 8, f"{key} ({count} strings)")
            return [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise BadGGUF(f"{self.path}: {key} is an array of unsupported value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, f"{key} ({count} values)")
        items: list[Any] = np.frombuffer(self.buffer, dtype, count, start).tolist()
        return items


class GGUFFile:
    """A mapped GGUF file: `metadata` (key -> Python value) and `tensors` (name -> `TensorInfo`)."""

    def __init__(self, path: Path) -> None:
        """Map and check `path`. Raises `BadGGUF`; `OSError` when it cannot be read."""
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise BadGGUF(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map, path)
        cursor.take(4, "magic")
        version = cursor.u32("version")
        if version not in VERSIONS:
            raise BadGGUF(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, key_count = cursor.u64("tensor count"), cursor.u64("key count")
        self.metadata = self._read_metadata(cursor, key_count)
        self.tensors = self._read_tensors(cursor, tensor_count)

    def _read_metadata(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):  # each round consumes bytes or raises: bounded by the file size
            key = cursor.text(f"metadata key {index} of {count}")
            if key in metadata:
                raise BadGGUF(f"{self.path}: metadata key {key} appears twice")
            metadata[key] = cursor.value(cursor.u32(key), key)
        return metadata

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        heads = []
        for index in range(count):
            name = cursor.text(f"tensor name {index} of {count}")
            dims = cursor.u32(name)
            if dims > MAX_DIMS:
                raise BadGGUF(f"{self.path}: tensor {name} has {dims} axes, at most {MAX_DIMS}")
            shape = tuple(cursor.u64(name) for _ in range(dims))[::-1]
            heads.append((name, shape, cursor.u32(name), cursor.u64(name)))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise BadGGUF(f"{self.path}: general.alignment {alignment} is not a power of two")
        base = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in heads:
            if name in tensors:
                raise BadGGUF(f"{self.path}: tensor {name} appears twice")
            tensors[name] = self._place(name, shape, kind, base, offset)
        self._check_overlap(tensors)
        return tensors

    def _place(
        self, name: str, shape: tuple[int, ...], kind: int, base: int, offset: int
    ) -> TensorInfo:
        """Check one tensor's type and extent against the file."""
        try:
            known = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError) as error:
            raise BadGGUF(f"{self.path}: tensor {name} has unknown type {kind}") from error
        if not shape or 0 in shape or shape[-1] % block:
            raise BadGGUF(
                f"{self.path}: tensor {name} has shape {list(shape)}, which {known.name} cannot "
                f"have (rows of a multiple of {block})"
            )
        nbytes = math.prod(shape) // block * block_bytes
        if base + offset + nbytes > len(self._map):
            raise BadGGUF(
                f"{self.path}: cut off or damaged: tensor {name} ends at byte "
                f"{base + offset + nbytes}, the file has {len(self._map)}; fetch it again"
            )
        return TensorInfo(name, shape, known, base + offset, nbytes)

    def _check_overlap(self, tensors: dict[str, TensorInfo]) -> None:
        placed = sorted(tensors.values(), key=lambda t: t.offset)
        for before, after in itertools.pairwise(placed):
            if before.offset + before.nbytes > after.offset:
                raise BadGGUF(f"{self.path}: tensors {before.name} and {after.name} overlap")

    def rows(self, name: str, first: int, count: int) -> npt.NDArray[np.float32]:
        """Rows `first` to `first + count` (first axis) of a tensor of one or two axes, float32.

        A vector counts as one row. Raises `BadGGUF` for a type that cannot be dequantised.
        """
        info = self.tensors[name]
        width = info.shape[-1]
        row_bytes = info.nbytes // (math.prod(info.shape) // width)
        raw = np.frombuffer(
            self._map, np.uint8, count * row_bytes, info.offset + first * row_bytes
        ).reshape(count, row_bytes)
        try:
            values = dequantize(raw, info.kind)
        except NotImplementedError as error:
            raise BadGGUF(
                f"{self.path}: tensor {name} is stored as {info.kind.name}, which cannot be "
                "dequantised here; use a file with Q4_K_M, Q8_0, F16 or the like"
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(count, width)
