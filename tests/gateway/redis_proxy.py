"""A proxy between services and Redis that can be slow and can lead to another server."""

from __future__ import annotations

import asyncio
from pathlib import Path


class RedisProxy:
    """Listens on `url` between `start` and `close`."""

    def __init__(self, target: Path | int) -> None:
        self.target = target
        """A unix socket, or a port of 127.0.0.1; where new connections go."""
        self.delay_s = 0.0
        """Of a round trip, in seconds."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self.target, Path):
                server_reader, server_writer = await asyncio.open_unix_connection(self.target)
            else:
                server_reader, server_writer = await asyncio.open_connection(
                    "127.0.0.1", self.target
                )
        except OSError:
            writer.close()
            return
        for pump in (self._pump(reader, server_writer), self._pump(server_reader, writer)):
            self._tasks.add(asyncio.create_task(pump))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay_s / 2)
                writer.write(data)
        except OSError:
            pass  # The other side is gone, and so is this one.
        finally:
            writer.close()
