"""Every error leaves in OpenAI's shape, also those that aiohttp raises by itself.

Three places can answer: our handlers (`ApiError`), aiohttp's router (404, 405, …) and its protocol,
which rejects malformed HTTP before any handler runs. The first two pass through `errors_as_json`,
the last through `JsonServer`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pageferry.gateway.errors import ApiError
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.kvtransfer import metric_names as names

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = "x-request-id"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return web.json_response(error.body(), status=error.status, headers=headers)


def from_http_exception(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """The router's or aiohttp's own refusals."""
    if error.status == 404:
        api = ApiError(404, "There is nothing at this path.", code="not_found")
    elif error.status == 405:
        text = f"{request.method} is not allowed here."
        api = ApiError(405, text, code="method_not_allowed")
    elif error.status == 413:
        api = ApiError(413, "The body is too large.", code="body_too_large")
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        api = ApiError(error.status, error.reason or "The request failed.", kind)
    response = error_response(api)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def errors_as_json(metrics: GatewayMetrics) -> Any:
    """Middleware: exceptions to answers. `CancelledError` (the client left) passes through."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except web.HTTPException as error:
            return from_http_exception(error, request)
        except ConnectionError:
            raise
        except Exception as error:
            # The text of an unexpected error may quote the request: only its class is logged
            # with the place, and the client gets neither.
            metrics.count(names.INTERNAL_ERRORS)
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "?"
            log.error("unexpected %s at %s", type(error).__name__, place)
            text = "The gateway failed on this request; it is logged."
            return error_response(ApiError(500, text, "server_error", "internal_error"))

    return middleware


def echo_request_id(request: web.Request) -> str:
    """The client's request id, cut to a harmless length, or one of our own."""
    given = request.headers.get(REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS]
    if given and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: runs before the headers of every answer."""
    response.headers[REQUEST_ID] = echo_request_id(request)


class JsonRequestHandler(RequestHandler):
    __slots__ = ()

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
        return JsonServer(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,
        )
