"""Every error leaves in OpenAI's shape, also those that aiohttp raises by itself.

Three places can answer: our handlers (`ApiError`), aiohttp's router (404, 405, …) and its protocol,
which rejects malformed HTTP before any handler runs. The first two pass through `errors_as_json`,
the last through `JsonServer`. Each leaves a line in the log (see `log_lines`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler, _ErrInfo

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

        def answer(error: ApiError) -> web.Response:
            error.__traceback__ = None  # generations keep their error; its frames keep those
            ended(error)
            return error_response(error)

        try:
            return await handler(request)
        except web.HTTPException as error:
            error.__traceback__ = None  # the route keeps it; its frames keep the request
            response = answer(from_http_exception(error, request.method))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except (ConnectionError, asyncio.CancelledError) as error:
            ended(error)
            raise
        except Exception as error:
            return answer(as_api_error(error, metrics, request_id(request)))

    return middleware


def as_api_error(error: Exception, metrics: GatewayMetrics, client_id: str) -> ApiError:
    """`error` itself, or a 500 for what nobody expected, which is counted and logged.

    The text of an unexpected error may quote the request: only its class is logged, with the place,
    and the client gets neither. Its traceback is dropped: generations keep their error, its frames
    keep those.
    """
    if isinstance(error, ApiError):
        return error
    metrics.count(names.INTERNAL_ERRORS)
    log.error("unexpected %s at %s client_id=%s", type(error).__name__, place(error), client_id)
    error.__traceback__ = None
    text = "The gateway failed on this request; it is logged."
    failure = ApiError(500, text, "server_error", "internal_error")
    failure.__cause__ = error
    return failure


def request_id(request: web.BaseRequest) -> str:
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
        self._messages.clear()  # their bodies refer to this object: a cycle

    def _end_if_silent(self) -> None:
        if self._request_count == 0:
            log.info("connection closed: no request within %g s", FIRST_REQUEST_S)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """What aiohttp leaves undone where HTTP turns out to be malformed.

        The frames of the error hold `data` and this object, which holds the error: 64 KiB wait for
        the garbage collector. And whoever reads a body that breaks off, at once or when the calls
        before it are done, waits for the rest.
        """
        super().data_received(data)
        if not self._messages:
            return
        latest, _ = self._messages[-1]
        if not isinstance(latest, _ErrInfo):
            return
        latest.exc.__traceback__ = None
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof():
                body.set_exception(web.RequestPayloadError(type(latest.exc).__name__))

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
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = "This is not a well-formed HTTP request, or one of its lines is too long."
        error = ApiError(status, text, kind, "malformed_http")
        error.__cause__ = exc
        call_end(request_id(request), "", error, 0.0)
        response = error_response(error)
        response.headers[REQUEST_ID] = request_id(request)
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
                api = from_http_exception(error, request.method)
                call_end(request_id(request), "", api, 0.0)
                return error_response(api)

        return JsonServer(
            handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,
        )
