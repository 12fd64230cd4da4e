"""Valid frames of the handoff protocol turned into others, for the fuzzer."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from typing import Any

from pageferry.kvtransfer.frames import (
    CHECK_BYTES,
    HEADER,
    Cancel,
    Commit,
    Deny,
    Grant,
    Message,
    Nack,
    Pages,
    Ping,
    Refuse,
    Reserve,
    Seal,
    checksum,
    encode,
)
from pageferry.kvtransfer.wire import pack, unpack

HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2, 127, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5,
    float("nan"), "", "x" * 300, "\n\0", b"", b"x" * 16, b"\xff" * 300, [], [[]], [1] * 50,
    [None, {}], {}, {"a": {"b": [1]}}, {1: 2},
]  # fmt: skip


class Mutator:
    """Turns valid frames into others."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def session(self, frames: list[tuple[Message, bytes]]) -> Iterator[bytes]:
        """The bytes to send for a valid session, one or more of its frames changed."""
        rng = self.rng
        frames = list(frames)
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            spot = rng.randrange(len(frames))
            match rng.randrange(3):
                case 0:
                    frames.insert(spot, frames[spot])
                case 1:
                    frames.insert(rng.randrange(len(frames)), frames.pop(spot))
                case 2 if len(frames) > 1:
                    frames.pop(spot)
        wrong = {rng.randrange(len(frames)) for _ in range(rng.choice([1, 1, 2, 3]))}
        for index, (message, payload) in enumerate(frames):
            yield self.frame(message, payload) if index in wrong else encode(message) + payload

    def frame(self, message: Message, payload: bytes = b"") -> bytes:
        rng, valid = self.rng, encode(message)
        tag, packed = valid[HEADER.size - 1], valid[HEADER.size : -CHECK_BYTES]
        match rng.choices(range(9), [9, 2, 2, 2, 1, 2, 2, 1, 2])[0]:
            case 0:
                return self._framed(tag, pack(self._changed(unpack(packed)))) + payload
            case 1:
                return self._framed(rng.randrange(256), packed) + payload
            case 2:
                length = rng.choice([0, 1, len(packed), 2**16, 2**31, 2**32 - 1, 9 * 2**20])
                return HEADER.pack(length, tag) + valid[HEADER.size :] + payload
            case 3:
                flipped = bytearray(valid + payload)
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                return bytes(flipped)
            case 4:
                nest = rng.choice([b"\x91", b"\x81\xa1a", b"\x81\xc0"]) * rng.choice(
                    [20, 700, 5000]
                )
                return self._framed(tag, nest + b"\xc0")
            case 5:
                return valid + rng.choice(
                    [payload[:-1], payload + b"x", rng.randbytes(len(payload))]
                )
            case 6:
                whole = valid + payload
                return whole[: rng.randrange(len(whole))]
            case 7:
                return rng.randbytes(rng.choice([1, 4, 5, 40, 3000]))
            case _:
                return self._framed(tag, rng.randbytes(rng.randrange(40))) + payload

    def _changed(self, value: Any, depth: int = 0) -> Any:
        """Plain data with one thing in it replaced, added or missing."""
        rng = self.rng
        if (depth and rng.random() < 0.4) or not isinstance(value, list | dict) or not value:
            return rng.choice(HOSTILE)
        if isinstance(value, dict):
            key = rng.choice(list(value))
            if rng.random() < 0.2:
                return {k: v for k, v in value.items() if k != key}
            return {**value, key: self._changed(value[key], depth + 1)}
        spot = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:spot] + value[spot + 1 :]
        if rng.random() < 0.15:
            return [*value[:spot], rng.choice(HOSTILE), *value[spot:]]
        return [*value[:spot], self._changed(value[spot], depth + 1), *value[spot + 1 :]]

    @staticmethod
    def _framed(tag: int, packed: bytes) -> bytes:
        body = packed + checksum(tag, packed)
        return HEADER.pack(len(body), tag) + body


def answers_to(message: Message, page_size: int, rng: random.Random) -> list[Message]:
    """What a receiver could say, not always what it should."""
    hid = getattr(message, "handoff_id", 0)
    match message:
        case Reserve():
            count = -(-message.n_tokens // page_size)
            pages = rng.sample(range(32), count)
            return [rng.choice([Grant(hid, pages, 0, 1000)] * 6 + [Deny(hid, "full")])]
        case Seal():
            return [rng.choice([Commit(hid), Commit(hid), Nack(hid, "no"), Cancel(hid, "no")])]
        case Pages():
            return rng.choice([[], [], [], [Commit(hid)], [Ping()], [Refuse("enough")]])
        case Ping():
            return [message]
        case _:
            return []


def pages_in(data: bytes) -> set[int]:
    """Page ids that a frame grants, if it is one that grants any."""
    with contextlib.suppress(ValueError, LookupError, TypeError, struct.error):
        length, _ = HEADER.unpack_from(data)
        values = unpack(data[HEADER.size : HEADER.size + length - CHECK_BYTES])
        return {page for page in values[1] if type(page) is int}
    return set()
