"""What is let in, decided before anything is queued. Refusals say the limit and the value.

Permanent reasons are 400 (SDKs do not retry those): too many choices or prompts, a prompt that no
worker could ever hold. Passing reasons are 429 or 503 with Retry-After.
"""

from __future__ import annotations

from pageferry.gateway.bodies import Bodies
from pageferry.gateway.errors import ApiError, bad_request, overloaded, unavailable
from pageferry.gateway.fleet import Fleet
from pageferry.kvtransfer.settings import GatewaySettings


class Admission:
    def __init__(self, settings: GatewaySettings, fleet: Fleet, context_len: int) -> None:
        self._settings = settings
        self._fleet = fleet
        self._context_len = context_len
        self.bodies = Bodies(int(settings.max_body_mib * 2**20))
        self.preparing = 0
        """Calls that are being parsed and tokenised now."""
        self.draining = False

    @property
    def context_len(self) -> int:
        """Tokens, prompt and output, of the longest sequence that could be served now."""
        longest = self._fleet.longest_sequence
        return min(self._context_len, longest) if longest else self._context_len

    def check_open(self, waiting: int) -> None:
        """Before a call is parsed: is there any point in doing so?"""
        if self.draining:
            raise unavailable("This gateway is shutting down; try again.", "shutting_down", 1)
        if waiting + self.preparing >= self._settings.max_queued_requests:
            limit = self._settings.max_queued_requests
            raise overloaded(f"{waiting} sequences wait for their first token (limit {limit}).")

    def check_shape(self, n: int, num_prompts: int) -> None:
        """Before a call is tokenised: numbers alone."""
        if n > self._settings.max_n:
            raise bad_request(f"n is {n}; at most {self._settings.max_n} are accepted.", "n")
        if num_prompts > self._settings.max_prompts:
            limit = self._settings.max_prompts
            raise bad_request(f"{num_prompts} prompts; at most {limit} are accepted.", "prompt")
        if n * num_prompts > self._settings.max_queued_requests:
            limit = self._settings.max_queued_requests
            raise bad_request(
                f"{n * num_prompts} sequences in one call; the limit is {limit}.", "n"
            )

    def check_room(self, count: int, waiting: int) -> None:
        """Right before queueing `count` sequences."""
        self.check_open(waiting)
        limit = self._settings.max_queued_requests
        if waiting + count > limit:
            raise overloaded(
                f"{waiting} sequences wait for their first token and the call adds {count} "
                f"(limit {limit})."
            )

    def output_budget(self, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """Tokens that may be generated; None takes all that the context has left.

        `ApiError` context_length_exceeded when not even one would fit.
        """
        limit = self.context_len
        if max_tokens == 0 and prompt_tokens <= limit:
            return 0
        if prompt_tokens + 1 > limit:
            raise self.too_long(f"{prompt_tokens}", param)
        left = limit - prompt_tokens
        return left if max_tokens is None else min(max_tokens, left)

    def too_long(self, counted: str, param: str) -> ApiError:
        text = (
            f"This model's maximum context length is {self.context_len} tokens, but the prompt has "
            f"{counted} tokens and at least 1 is needed for the output. Shorten the {param}."
        )
        return bad_request(text, param, "context_length_exceeded")
