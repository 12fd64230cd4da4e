"""Reading request bodies within three bounds: of one body, of all together, and of time.

A body is held while it arrives, is parsed and tokenised; after that only its token ids are. What
clients send is counted as it arrives, so that a `Content-Length` alone takes nothing from others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from pageferry.gateway.errors import ApiError, bad_request, overloaded

BODIES_AT_ONCE = 8
"""Memory for bodies, in bodies of the largest size. Parsing and tokenising take about ten times the
body while they last."""
BODY_TIMEOUT_S = 60.0
"""For a whole body; the largest one takes that long at 140 kB/s."""


class Bodies:
    """Those that are held now."""

    def __init__(self, max_body_bytes: int) -> None:
        self.limit = max_body_bytes
        """Bytes of one body; more get 413."""
        self.held = 0
        """Bytes of all bodies; what would exceed `BODIES_AT_ONCE` times the limit gets 429."""

    @contextlib.asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body; it counts as held until the block ends.

        `ApiError` 400, 408, 413, 415 or 429.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            text = "Compressed bodies are not accepted; send the JSON as it is."
            raise ApiError(415, text, "invalid_request_error", "unsupported_encoding")
        if request.content_length is not None and request.content_length > self.limit:
            raise self._too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for part in request.content.iter_any():
                        self._take(body, part)
            except web.RequestPayloadError:
                text = "The body's chunks are not well-formed HTTP."
                raise bad_request(text, code="malformed_http") from None
            except TimeoutError:
                text = f"The body did not arrive within {BODY_TIMEOUT_S:g} s."
                raise ApiError(408, text, "invalid_request_error", "body_timeout") from None
            yield bytes(body)
        finally:
            self.held -= len(body)

    def _take(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self.limit:
            raise self._too_large()
        most = BODIES_AT_ONCE * self.limit
        if self.held + len(part) > most:
            raise overloaded(f"{self.held} bytes of requests are being read (limit {most}).")
        body += part
        self.held += len(part)

    def _too_large(self) -> ApiError:
        text = f"The body is larger than {self.limit} bytes (see --max-body-mib)."
        return ApiError(413, text, "invalid_request_error", "body_too_large")
