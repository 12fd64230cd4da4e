"""The messages of a handoff connection, as bytes: `length (4, big-endian) | tag (1) | body`.

`length` counts the body: a msgpack list, the fields of the tag's dataclass in order, and 8 bytes of
checksum over tag and list. What a flipped bit could turn into another request or token is noticed.
Every tag has its own size cap and every field its checked type; what does not fit raises
`FrameError`, and the connection that sent it is closed, because its framing cannot be trusted.

In order of use (W: writer, which dials; R: receiver; see `handoff`):

| tag | from | meaning |
|---|---|---|
| HELLO | both | who I am, and a nonce |
| PROOF | both | HMAC of the cluster key over the peer's nonce (from R: welcome) |
| REFUSE | both | no data will flow, and why; the connection ends |
| RESERVE | W | pages for this request, please |
| GRANT / DENY | R | here they are / no, because |
| PAGES | W | pages of adjacent layers; over tcp `size` bytes follow, over shm they are in place |
| SEAL | W | that was all; the manifest and the first token |
| COMMIT / NACK | R | verified and taken / not taken, because |
| CANCEL | both | the handoff is over, in whatever state |
| STOPPED | W | I do not write to that handoff's pages any more |
| RENEW | W | still at it |
| PING | both | W: is anybody there? R: yes |
"""

from __future__ import annotations

import enum
import struct
import typing
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from pageferry.kvtransfer.wire import WireError, pack, unpack

PROTOCOL_VERSION = 3
HEADER = struct.Struct(">IB")
CHECK_BYTES = 8
MAX_INT = 2**63 - 1


class FrameError(ValueError):
    """Bytes on a handoff connection are not a message of the protocol."""


class VersionError(FrameError):
    """A HELLO of another protocol version, of which only that much is understood."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"version: mine {PROTOCOL_VERSION}, theirs {theirs}")


class Tag(enum.IntEnum):
    HELLO = 1
    PROOF = 2
    REFUSE = 3
    RESERVE = 4
    GRANT = 5
    DENY = 6
    PAGES = 7
    SEAL = 8
    COMMIT = 9
    NACK = 10
    CANCEL = 11
    STOPPED = 12
    RENEW = 13
    PING = 14


@dataclass(frozen=True)
class Hello:
    version: int
    """The first field in every version."""
    nonce: bytes
    worker_id: str
    role: str
    fingerprint: str
    layout: dict[str, int | str]
    num_pages: int
    transport: str
    patience_ms: int
    """Silence after which I give the connection up; the smaller of both ends' counts."""


@dataclass(frozen=True)
class Proof:
    mac: bytes


@dataclass(frozen=True)
class Refuse:
    reason: str


@dataclass(frozen=True)
class Reserve:
    handoff_id: int
    """Chosen by the writer; rises with every RESERVE of a connection."""
    request: dict[str, Any]
    n_tokens: int
    prefix_hashes: list[bytes]


@dataclass(frozen=True)
class Grant:
    handoff_id: int
    page_ids: list[int]
    """Physical pages of the logical pages `skip_pages...`: the only ones the writer may touch."""
    skip_pages: int
    lease_ms: int


@dataclass(frozen=True)
class Deny:
    handoff_id: int
    reason: str


@dataclass(frozen=True)
class Pages:
    """The same `count` pages in each of `layers` adjacent layers, layer after layer."""

    handoff_id: int
    layer: int
    """The first one."""
    first: int
    """Logical page of the sequence."""
    count: int
    digest: bytes
    """xxh3-128 over the bytes in order."""
    size: int
    """Payload bytes that follow this frame; 0 over shm."""
    layers: int = 1


@dataclass(frozen=True)
class Seal:
    handoff_id: int
    manifest: bytes
    first_token: list[Any]
    """`Event.to_list()`."""


@dataclass(frozen=True)
class Commit:
    handoff_id: int


@dataclass(frozen=True)
class Nack:
    handoff_id: int
    reason: str


@dataclass(frozen=True)
class Cancel:
    handoff_id: int
    reason: str


@dataclass(frozen=True)
class Stopped:
    handoff_id: int


@dataclass(frozen=True)
class Renew:
    handoff_id: int


@dataclass(frozen=True)
class Ping:
    pass


Message = (
    Hello
    | Proof
    | Refuse
    | Reserve
    | Grant
    | Deny
    | Pages
    | Seal
    | Commit
    | Nack
    | Cancel
    | Stopped
    | Renew
    | Ping
)

_KIB, _MIB = 2**10, 2**20

# Largest body by tag. RESERVE: 1 Mi token ids and their hashes at page size 16 are 6 MiB.
_TABLE: dict[Tag, tuple[type[Message], int]] = {
    Tag.HELLO: (Hello, 8 * _KIB),
    Tag.PROOF: (Proof, 256),
    Tag.REFUSE: (Refuse, 16 * _KIB),
    Tag.RESERVE: (Reserve, 8 * _MIB),
    Tag.GRANT: (Grant, 2 * _MIB),
    Tag.DENY: (Deny, 8 * _KIB),
    Tag.PAGES: (Pages, 256),
    Tag.SEAL: (Seal, 256 * _KIB),
    Tag.COMMIT: (Commit, 64),
    Tag.NACK: (Nack, 8 * _KIB),
    Tag.CANCEL: (Cancel, 8 * _KIB),
    Tag.STOPPED: (Stopped, 64),
    Tag.RENEW: (Renew, 64),
    Tag.PING: (Ping, 64),
}
_TAG_OF: dict[type[Message], Tag] = {cls: tag for tag, (cls, _) in _TABLE.items()}
_FIELDS = {
    cls: tuple((f.name, typing.get_type_hints(cls)[f.name]) for f in fields(cls)) for cls in _TAG_OF
}

MAX_REASON = 2000
"""Characters of a reason that are sent; far below its frame's cap."""


def _fits(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_INT
    if kind is str or kind is bytes:
        return type(value) is kind
    if kind == list[int]:
        return type(value) is list and all(_fits(v, int) for v in value)
    if kind == list[bytes]:
        return type(value) is list and all(type(v) is bytes for v in value)
    if kind == list[Any]:
        return type(value) is list
    if type(value) is not dict or not all(type(key) is str for key in value):
        return False
    return kind != dict[str, int | str] or all(type(v) in (int, str) for v in value.values())


def checksum(tag: int, packed: bytes) -> bytes:
    """xxh3-64: against accidents, not against attackers."""
    digest: bytes = xxhash.xxh3_64(packed, seed=tag).digest()
    return digest


def encode(message: Message) -> bytes:
    """Header and body of one message."""
    tag = _TAG_OF[type(message)]
    values = [getattr(message, name) for name, _ in _FIELDS[type(message)]]
    if isinstance(message, (Refuse, Deny, Nack, Cancel)):
        values[-1] = message.reason[:MAX_REASON]
    packed = pack(values)
    body = packed + checksum(tag, packed)
    cap = _TABLE[tag][1]
    if len(body) > cap:
        raise FrameError(f"{tag.name} of {len(body)} bytes exceeds {cap}")
    return HEADER.pack(len(body), tag) + body


def parse_header(header: bytes | memoryview) -> tuple[Tag, int]:
    """Tag and body length; `FrameError` for an unknown tag or a length above its cap."""
    length, number = HEADER.unpack(header)
    try:
        tag = Tag(number)
    except ValueError as error:
        raise FrameError(f"unknown tag {number}") from error
    if length > _TABLE[tag][1]:
        raise FrameError(f"{tag.name} of {length} bytes exceeds {_TABLE[tag][1]}")
    return tag, length


def decode(tag: Tag, body: bytes | memoryview) -> Message:
    """The message in `body`; `FrameError` unless every field has its type, `VersionError` for a
    HELLO of another version."""
    cls = _TABLE[tag][0]
    packed = bytes(body[:-CHECK_BYTES])
    if checksum(tag, packed) != body[-CHECK_BYTES:]:
        raise FrameError(f"{tag.name}: the checksum does not match")
    try:
        values = unpack(packed)
    except (WireError, TypeError) as error:
        raise FrameError(f"{tag.name}: {error}") from error
    specs = _FIELDS[cls]
    is_hello = cls is Hello and type(values) is list and values and _fits(values[0], int)
    if is_hello and values[0] != PROTOCOL_VERSION:
        raise VersionError(values[0])
    if type(values) is not list or len(values) != len(specs):
        raise FrameError(f"{tag.name} must be a list of {len(specs)} values")
    for value, (name, kind) in zip(values, specs, strict=True):
        if not _fits(value, kind):
            shown = getattr(kind, "__name__", str(kind))
            raise FrameError(f"{tag.name}.{name} must be {shown}, got {type(value).__name__}")
    return cls(*values)
