"""A TCP proxy between workers that cuts, stalls, delays, and flips bits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable

CHUNK_BYTES = 64 * 1024
PAGES_BYTES = 8 * 1024
"""Smaller chunks are mostly messages about pages."""
INVERTED_BYTES = 256


class LinkProxy:
    """Forwards `listen_host:port` to `host:port`. Faults apply to all its connections."""

    def __init__(self, listen_host: str, host: str, port: int) -> None:
        self._listen = listen_host
        self._address = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self.delay_s = 0.0
        """Added to each chunk."""
        self.flips = 0
        """How many more chunks get one bit flipped, of whatever it is."""
        self.page_flips = 0
        """How many more large chunks, which are pages, get some bytes inverted."""
        self._rng = random.Random(0)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._listen, self._address[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.resume()
        self.cut()

    def cut(self) -> int:
        """Reset every connection; returns how many there were."""
        count = len(self._writers) // 2
        self._abort(list(self._writers))
        return count

    def stall(self) -> None:
        """Nothing passes until `resume`; connections stay open."""
        self._flow.clear()

    def resume(self) -> None:
        self._flow.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, far_writer)
        self._writers.update(ends)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except OSError:
            self._abort(ends)
        finally:
            self._writers.difference_update(ends)
            writer.close()
            far_writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._flow.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            sink.write(self._maybe_flip(data))
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    @staticmethod
    def _abort(ends: Iterable[asyncio.StreamWriter]) -> None:
        for end in ends:
            end.transport.abort()

    def _maybe_flip(self, data: bytes) -> bytes:
        if self.page_flips > 0 and len(data) >= PAGES_BYTES:
            self.page_flips -= 1
            at = self._rng.randrange(len(data) - INVERTED_BYTES)
            inverted = bytes(255 - byte for byte in data[at : at + INVERTED_BYTES])
            return data[:at] + inverted + data[at + INVERTED_BYTES :]
        if self.flips > 0:
            self.flips -= 1
            changed = bytearray(data)
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
            return bytes(changed)
        return data
