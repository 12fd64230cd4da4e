"""One server-sent event stream to one client.

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


class ClientGone(Exception):
    """The client closed the connection, or did not read for `slow_client_s`."""


class EventStream:
    def __init__(self, request: web.Request, slow_client_s: float) -> None:
        self._request = request
        self._slow_client_s = slow_client_s
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
        await self._within_deadline(self._write(data))

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

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def _within_deadline(self, write: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._slow_client_s):
                await write
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            text = f"the client took no data for {self._slow_client_s:g} s"
            raise ClientGone(text) from None
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        self.last_write = asyncio.get_running_loop().time()
