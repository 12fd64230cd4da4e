"""How a generation ends otherwise than by its last token, and what is written down at any end."""

from __future__ import annotations

import logging

from pageferry.gateway.errors import ApiError, unavailable
from pageferry.gateway.log_lines import class_name
from pageferry.gateway.outbox import Command
from pageferry.gateway.requests import Generation
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.wire import Event, pack

log = logging.getLogger(__name__)

MAX_DEAD_LETTERS = 1_000

WORKER_ERROR_STATUS = {
    "out_of_memory": 503,
    "context_length_exceeded": 400,
    "draining": 503,
}
"""HTTP status by the code of an ERROR event; others are 500."""


def worker_error(event: Event) -> ApiError:
    """What a worker's ERROR means to the client."""
    status = WORKER_ERROR_STATUS.get(event.code, 500)
    kind = "invalid_request_error" if status == 400 else "server_error"
    text = event.message or f"A worker gave up on this request ({event.code})."
    retry_after = 2 if status == 503 else None
    return ApiError(status, text, kind, event.code or "request_failed", None, retry_after)


def nobody(reason: str) -> ApiError:
    """No decode worker can take it; the reason in one sentence."""
    return unavailable(reason, "no_decode_worker", 2)


def out_of_time(seconds: float) -> ApiError:
    text = f"The request did not finish within {seconds:g} s and was cancelled."
    return ApiError(504, text, "timeout_error", "request_timeout")


def condemned(num_deaths: int) -> ApiError:
    text = f"{num_deaths} workers died or failed with this request; it is not tried again."
    return ApiError(500, text, "server_error", "request_failed")


def dead_letter(generation: Generation, keys: Keys) -> Command:
    """The record that a condemned request leaves in Redis: no text."""
    letter = {
        "request_id": generation.id,
        "code": "request_failed",
        "prompt_tokens": len(generation.prompt),
        "output_tokens": len(generation.tokens),
        "workers": generation.workers,
        "gateway": generation.gateway,
    }
    return "XADD", keys.dead, "MAXLEN", "~", MAX_DEAD_LETTERS, "*", FIELD, pack(letter)


def log_end(generation: Generation, now: float) -> None:
    """The one line per generation: ids, counts and times, no text."""

    def since(start: float | None, end: float | None) -> str:
        return "-" if start is None or end is None else f"{max(0.0, end - start):.3f}"

    error = generation.error
    log.info(
        "request_end id=%s client_id=%s key=%s outcome=%s error=%s class=%s status=%s "
        "prompt_tokens=%d cached_tokens=%d output_tokens=%d queue_s=%s prefill_s=%s "
        "transfer_s=%s decode_s=%s total_s=%.3f epoch=%d workers=%s",
        generation.id,
        generation.client_id or "-",
        generation.salt or "-",
        generation.outcome,
        (error.code or error.type) if error else "-",
        class_name(error) if error else ("ClientGone" if generation.outcome == "abort" else "-"),
        error.status if error else 200,
        len(generation.prompt),
        generation.cached_tokens,
        generation.delivered,
        since(generation.arrived, generation.claimed),
        since(generation.claimed, generation.first_token),
        since(generation.first_token, generation.handed_over),
        since(generation.first_token, generation.last_token),
        now - generation.arrived,
        generation.epoch,
        ",".join(generation.workers) or "-",
    )
