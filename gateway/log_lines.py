"""What the gateway writes about calls: one line for each that ends, and never what clients wrote.

- `request_end` (`endings.log_end`): one per sequence that was queued.
- `call_end`: one per call that ended before anything was queued; refused, malformed, given up, or
  failed by a fault of ours.
- Both have the call's request id (`client_id`), API key's name, status and seconds, and an error's
  code and class; both are made of `name=value` pairs whose values have no spaces.

Texts of unexpected exceptions may quote what a client sent, so tracebacks of this process show
places and class names only (`NoValues`). `--log-prompts` adds a line with the text of each request.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from types import TracebackType
from typing import Any

from pageferry.gateway.errors import ApiError
from pageferry.gateway.requests import Generation
from pageferry.gateway.responses import TokenTexts
from pageferry.kvtransfer import logs

log = logging.getLogger(__name__)


class NoValues(logging.Formatter):
    """Tracebacks without the exceptions' texts."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        lines = []
        error = ei[1]
        while error is not None:
            lines += [*traceback.format_tb(error.__traceback__), type(error).__name__]
            error = error.__cause__ or error.__context__
        return "\n".join(line.rstrip("\n") for line in lines)


def configure(level: str) -> None:
    """As `kvtransfer.logs.configure`, for a process that holds what clients write."""
    logs.configure(level, "gateway", NoValues)


def contain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Event loop's handler of errors that nobody awaited: class and place, no values."""
    error = context.get("exception")
    if isinstance(error, BaseException):
        log.error("unawaited %s at %s", type(error).__name__, place(error))
    else:
        log.error("event loop: %s", context.get("message", "?"))


def place(error: BaseException) -> str:
    """`file:line` where it was raised."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "?"


def class_name(error: BaseException) -> str:
    """Of the error, or of what it was made from."""
    return type(error.__cause__ or error).__name__


def log_text(generation: Generation, tokenizer: TokenTexts) -> None:
    """What was asked and answered, with --log-prompts only."""
    prompt, answer = (
        b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        for ids in (generation.prompt, generation.tokens)
    )
    log.info("request_text id=%s prompt=%r answer=%r", generation.id, prompt, answer)


def call_end(client_id: str, key: str, error: BaseException, seconds: float) -> None:
    """The line of a call that ended before it was queued.

    `seconds` since its headers came; 0 where aiohttp refuses it by itself, before our handlers.
    """
    api = error if isinstance(error, ApiError) else None
    outcome = "refused" if api else "abort"
    if api is not None and api.status >= 500:
        outcome = "error"
    log.info(
        "call_end client_id=%s key=%s outcome=%s status=%s error=%s class=%s total_s=%.3f",
        client_id,
        key or "-",
        outcome,
        api.status if api else "-",
        (api.code or api.type) if api else "-",
        class_name(error),
        seconds,
    )
