"""Every error leaves in OpenAI's shape, also those that aiohttp raises by itself.

Three places can answer: our handlers (`ApiError`), aiohttp's router (404, 405, …) and its protocol,
which rejects malformed HTTP before any handler runs. The first two pass through `errors_as_json`,
the last through `JsonServer`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pageferry.gateway.errors import ApiError
from pageferry.gateway.log_lines import call_end, place
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.rate_limits import Tenant
from pageferry.kvtransfer import metric_names as names

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = "x-request-id"
FIRST_REQUEST_S = 30.0
"""For the headers of a connection's first request; later ones have the keep-alive time."""

TENANT = web.RequestKey("tenant", Tenant)
"""Whose call it is."""
QUEUED = web.RequestKey("queued", bool)
"""Set when it has been queued, so that its end is logged there."""
_ID = web.RequestKey("id", str)

_SHOWABLE_ID = re.compile(r"[!-~]+")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)


def from_http_exception(error: web.HTTPException, method: str) -> ApiError:
    """The router's or aiohttp's own refusals."""
    if error.status == 404:
        return ApiError(404, "There is nothing at this path.", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{method} is not allowed here.", code="method_not_allowed")
    if error.status == 413:
        return ApiError(413, "The body is too large.", code="body_too_large")
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return ApiError(error.status, error.reason or "The request failed.", kind)


def errors_as_json(metrics: GatewayMetrics) -> Any:
    """Middleware: exceptions to answers, with a log line for calls that were never queued.

    `CancelledError` and `ConnectionError` (the client left) pass through.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        arrived = loop.time()

        def ended(error: BaseException) -> None:
            if QUEUED not in request:
                key = request[TENANT].name if TENANT in request else ""
                call_end(request_id(request), key, error, loop.time() - arrived)

        try:
            return await handler(request)
        except ApiError as error:
            ended(error)
            return error_response(error)
        except web.HTTPException as error:
            api = from_http_exception(error, request.method)
            ended(api)
            response = error_response(api)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except (ConnectionError, asyncio.CancelledError) as error:
            ended(error)
            raise
        except Exception as error:
            # The text of an unexpected error may quote the request: only its class is logged
            # with the place, and the client gets neither.
            metrics.count(names.INTERNAL_ERRORS)
            log.error(
                "unexpected %s at %s id=%s", type(error).__name__, place(error), request_id(request)
            )
            text = "The gateway failed on this request; it is logged."
            return error_response(ApiError(500, text, "server_error", "internal_error"))

    return middleware


def request_id(request: web.Request) -> str:
    """The client's request id, cut to a harmless length, or one of our own; always the same."""
    if _ID not in request:
        given = request.headers.get(REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS]
        request[_ID] = given if _SHOWABLE_ID.fullmatch(given) else uuid.uuid4().hex
    return request[_ID]


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: runs before the headers of every answer."""
    response.headers[REQUEST_ID] = request_id(request)


class JsonRequestHandler(RequestHandler):
    """One connection. aiohttp sets no time limit for the headers of its first request; we do."""

    __slots__ = ("_opening",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opening = self._loop.call_later(FIRST_REQUEST_S, self._end_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._opening.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self._request_count == 0:
            log.info("connection closed: no request within %g s", FIRST_REQUEST_S)
            self.force_close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What is left of a body after its answer may be malformed: no error of ours."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            log.info("malformed HTTP body behind an answer")
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Malformed HTTP. aiohttp would answer with text that repeats the bad input."""
        del message
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error")
        log.info("malformed HTTP request: %s", type(exc).__name__)
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = "This is not a well-formed HTTP request, or one of its lines is too long."
        response = error_response(ApiError(status, text, kind, "malformed_http"))
        response.force_close()
        return response


class JsonServer(web.Server):
    def __call__(self) -> RequestHandler:
        return JsonRequestHandler(self, loop=self._loop, **self._kwargs)


class JsonRunner(web.AppRunner):
    """An `AppRunner` whose connections answer malformed HTTP in JSON."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()

        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await plain.request_handler(request)
            except web.HTTPException as error:  # raised before any middleware: Expect
                return error_response(from_http_exception(error, request.method))

        return JsonServer(
            handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,
        )
