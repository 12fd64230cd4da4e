"""Answers to clients that may read slowly, or not at all: event streams and whole bodies.

Life of an `EventStream`:

1. Nothing is sent until `send` or `comment` is called first: until then the call can still end in
   an ordinary HTTP error.
2. `send` writes one or more complete events at once. What the client does not take is buffered by
   the transport up to its high-water mark; then `send` waits, at most `slow_client_s`.
3. `finish` ends with `[DONE]`; `fail` with one error event and without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from pageferry.gateway.errors import ApiError
from pageferry.gateway.responses import dumps

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
CLOSED = "the client closed the connection"
UNBUFFERED_BYTES = 32 * 1024
"""Half of a transport's high-water mark: onto an empty buffer, so much never has to wait."""


class ClientGone(Exception):
    """The client closed the connection, or did not read for `slow_client_s`."""


class EventStream:
    def __init__(self, request: web.Request, slow_client_s: float) -> None:
        self._request = request
        self._slow_client_s = slow_client_s
        self._loop = asyncio.get_running_loop()
        self._response = web.StreamResponse(headers=HEADERS)
        self.last_write = 0.0
        """Loop time of the latest write."""

    @property
    def started(self) -> bool:
        """Headers are out: from now on errors travel as events."""
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns, also when the client is gone."""
        return self._response

    async def send(self, data: bytes) -> None:
        """Write complete events. `ClientGone` when nobody takes them."""
        if not self._takes_at_once(len(data)):
            await self._within_deadline(self._write(data))
            return
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise ClientGone(CLOSED) from error
        self.last_write = self._loop.time()

    async def comment(self) -> None:
        await self.send(KEEPALIVE)

    async def finish(self, data: bytes = b"") -> web.StreamResponse:
        """Write the last events and `[DONE]`."""
        return await self._end(data + DONE)

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Write the error event and close the connection."""
        response = await self._end(f"data: {dumps(error.body())}\n\n".encode())
        response.force_close()
        return response

    async def _end(self, data: bytes) -> web.StreamResponse:
        await self.send(data)
        await self._within_deadline(self._response.write_eof())
        return self._response

    def _takes_at_once(self, size: int) -> bool:
        """Whether a write cannot have to wait: no deadline is needed (it would cost a timer)."""
        transport = self._request.transport
        return (
            size <= UNBUFFERED_BYTES
            and self._response.prepared
            and transport is not None
            and transport.get_write_buffer_size() == 0
        )

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def _within_deadline(self, write: Awaitable[None]) -> None:
        await within_deadline(self._request, write, self._slow_client_s)
        self.last_write = self._loop.time()


async def within_deadline(request: web.Request, write: Awaitable[None], seconds: float) -> None:
    """Await a write; `ClientGone` when the client does not take it, after cutting it off."""
    try:
        async with asyncio.timeout(seconds):
            await write
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGone(f"the client took no data for {seconds:g} s") from None
    except ConnectionError as error:
        raise ClientGone(CLOSED) from error


async def send_whole(request: web.Request, answer: web.StreamResponse, seconds: float) -> None:
    """Send an answer that is complete; aiohttp alone would wait for its reader without end.

    A client that takes longer than `seconds` is cut off: the answer's memory must not stay.
    """

    async def write() -> None:
        await answer.prepare(request)
        await answer.write_eof()

    await within_deadline(request, write(), seconds)
