"""What one named API key may use, and what it has used: requests and tokens a minute, concurrency.

A call passes these stages (`Visit`), each of which may refuse with 429, the limit's name and
Retry-After, before any work is done for it:

1. `start`, before the body is read: one request of the minute's, one of the concurrent ones; the
   minute's tokens must not be used up.
2. `grow`, when the call is known to be several sequences: each counts as a concurrent request.
3. `spend`: prompt tokens once, output tokens as they are delivered. A call that was let in is never
   cut off; what it takes beyond the minute's tokens is owed, and later calls wait for it.
4. Leaving the `with` block gives back what counts as concurrent.

Everything here is of one process: with several gateways each grants the limits by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

from pageferry.gateway.errors import ApiError, bad_request

Clock = Callable[[], float]
"""Seconds, never backwards."""


@dataclass(frozen=True)
class Limits:
    """0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and output tokens together, as in `usage`."""
    concurrent_requests: int = 0
    """Sequences at a time: every prompt of a call and each of its `n` choices counts."""


LIMIT_NAMES = tuple(field.name for field in fields(Limits))


class Bucket:
    """A token bucket that holds a minute's worth and refills evenly; it may be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def set_rate(self, per_minute: int, now: float) -> None:
        """Change the rate. What was used stays used; a limit that is new starts full."""
        self._refill(now)
        used = self.per_minute - self._level if self.per_minute else 0.0
        self._level = per_minute - used
        self.per_minute = per_minute

    def take(self, amount: int, now: float) -> None:
        if self.per_minute:
            self._refill(now)
            self._level -= amount

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` can be taken without overdrawing; 0 when it can be now."""
        if not self.per_minute:
            return 0.0
        self._refill(now)
        return max(0.0, (amount - self._level) * 60 / self.per_minute)

    def _refill(self, now: float) -> None:
        gained = (now - self._updated) * self.per_minute / 60
        self._level = min(float(self.per_minute), self._level + gained)
        self._updated = now


class Tenant:
    """The holder of one named key: its rights, and what it has used so far."""

    def __init__(
        self, name: str, limits: Limits, *, admin: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        """Empty for everybody, where no keys are asked for. Also the salt of the prefix cache."""
        self.limits = limits
        self.admin = admin
        self.in_use = 0
        """Sequences that count as concurrent requests now."""
        self.clock = clock
        now = clock()
        self.requests = Bucket(limits.requests_per_minute, now)
        self.tokens = Bucket(limits.tokens_per_minute, now)

    def change(self, limits: Limits, admin: bool) -> None:
        """New rights for the same name; what it has used is kept."""
        self.limits, self.admin = limits, admin
        now = self.clock()
        self.requests.set_rate(limits.requests_per_minute, now)
        self.tokens.set_rate(limits.tokens_per_minute, now)

    def visit(self) -> Visit:
        return Visit(self)


class Visit:
    """One call of a tenant."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tenant.in_use -= self._held
        self._held = 0

    @property
    def salt(self) -> str:
        """Partition of the prefix cache: nobody finds what another tenant has sent."""
        return self._tenant.name

    def start(self) -> None:
        """Take one request; `ApiError` 429 names the limit that is in the way."""
        tenant = self._tenant
        now = tenant.clock()
        self._check_concurrency(1)
        self._check_rate("requests_per_minute", tenant.requests.wait_s(1, now))
        self._check_rate("tokens_per_minute", tenant.tokens.wait_s(1, now))
        tenant.requests.take(1, now)
        self._hold(1)

    def grow(self, count: int) -> None:
        """The call is `count` sequences: 400 if they are more than ever allowed, else 429."""
        limit = self._tenant.limits.concurrent_requests
        if limit and count > limit:
            raise bad_request(
                f"The call asks for {count} sequences; its API key may run {limit} at a time "
                "(concurrent_requests).",
                "n",
            )
        self._check_concurrency(count - self._held)
        self._hold(count - self._held)

    def spend(self, tokens: int) -> None:
        """Prompt or output tokens of this call."""
        if self._tenant.tokens.per_minute:
            self._tenant.tokens.take(tokens, self._tenant.clock())

    def _hold(self, count: int) -> None:
        self._tenant.in_use += count
        self._held += count

    def _check_concurrency(self, more: int) -> None:
        limit, in_use = self._tenant.limits.concurrent_requests, self._tenant.in_use
        if limit and in_use + more > limit:
            raise self._exceeded("concurrent_requests", f"has {in_use} of {limit} in use", 1)

    def _check_rate(self, name: str, wait_s: float) -> None:
        if wait_s > 0:
            limit = getattr(self._tenant.limits, name)
            seconds = math.ceil(wait_s)
            text = f"may use {limit}; there is more in {seconds} s"
            raise self._exceeded(name, text, seconds)

    def _exceeded(self, name: str, what: str, retry_after: int) -> ApiError:
        text = f"Rate limit {name}: the API key {self._tenant.name!r} {what}."
        return ApiError(429, text, "rate_limit_error", "rate_limit_exceeded", name, retry_after)
