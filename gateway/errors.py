"""What clients see when something is refused or fails: one exception, one body shape.

    ApiError                 status, type and code decide what an SDK does with it
      bad_request(...)       400: the call can never succeed as it is; SDKs do not retry
      overloaded(...)        429: later, the same call may succeed; carries Retry-After
      unavailable(...)       503: a part of the system is missing now; carries Retry-After

The body is always `{"error": {"message", "type", "param", "code"}}` (OpenAI's shape), whether it
travels as an HTTP response or as the last SSE event of a stream that had begun.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer other than success. `message` never quotes prompts or other client text."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after
        """Whole seconds for the Retry-After header; None sends none."""

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", code, param)


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    return ApiError(429, message, "rate_limit_error", "overloaded", None, retry_after)


def unavailable(message: str, code: str = "unavailable", retry_after: int = 1) -> ApiError:
    return ApiError(503, message, "service_unavailable", code, None, retry_after)
