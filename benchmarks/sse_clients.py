"""Streamed completions over raw sockets: cheap while they run, examined to the byte afterwards.

While streams run, a client only notes what arrived and when. `read_stream` then takes the HTTP
chunks and the events apart and compares the text with what the synthetic worker sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from itertools import accumulate
from typing import cast

DONE = "data: [DONE]"


class StreamClient(asyncio.Protocol):
    """One request and everything that comes back; times are of the monotonic clock."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.started = asyncio.Event()
        """Set when the first event has arrived."""
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.monotonic())
        self.pieces.append(data)
        if not self.started.is_set() and b"data: " in data:
            self.started.set()
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            self._transport.close()

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.started.set()
        self.ended.set()


def post_request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one finished stream showed."""

    arrivals: list[float]
    """When each token's text had arrived, by output index."""
    chunks: int
    """Events with text: as many as tokens unless tokens were put together."""


def read_stream(client: StreamClient, texts: list[str], *, whole: bool = True) -> Reading:
    """Check a stream against its tokens' `texts`; `RuntimeError` says what is wrong.

    Without `whole`, the stream was cut off on purpose: its text is the beginning.
    """
    raw = b"".join(client.pieces)
    head = raw.partition(b"\r\n\r\n")[0]
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"answer begins with {raw[:300]!r}")
    ends = list(accumulate(map(len, client.pieces)))
    offset, piece = len(head) + 4, 0
    marks = list(accumulate(map(len, texts)))
    shown, arrivals, chunks, finish, last = "", [], 0, None, ""
    while offset < len(raw):
        size_end = raw.index(b"\r\n", offset)
        size = int(raw[offset:size_end], 16)
        if not size or size_end + 2 + size > len(raw):
            break
        body = raw[size_end + 2 : size_end + 2 + size]
        offset = size_end + 2 + size + 2
        while ends[piece] < offset:
            piece += 1
        for event in body.decode().removesuffix("\n\n").split("\n\n"):
            last = event
            if event.startswith(":") or event == DONE:
                continue
            choice = json.loads(event.removeprefix("data: "))["choices"][0]
            shown += choice["text"]
            finish = choice["finish_reason"]
            chunks += bool(choice["text"])
            while len(arrivals) < len(marks) and marks[len(arrivals)] <= len(shown):
                arrivals.append(client.times[piece])
    if not whole and "".join(texts).startswith(shown):
        return Reading(arrivals, chunks)
    if shown != "".join(texts) or finish != "length" or last != DONE:
        raise RuntimeError(
            f"wrong stream: {len(shown)} of {marks[-1]} characters, finish {finish!r}, "
            f"last event {last[:60]!r}"
        )
    return Reading(arrivals, chunks)


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
