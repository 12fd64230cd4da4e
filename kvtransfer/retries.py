"""Trying again what failed: how long to pause, and what to say of Redis meanwhile."""

from __future__ import annotations

import asyncio
import logging

from pageferry.kvtransfer.bus import is_state

log = logging.getLogger(__name__)

SAY_AGAIN = 30
"""Failures in a row, about a second apart, after which the log says it once more."""


def growing_pause(failures: int, first_s: float = 0.1, most_s: float = 1.0) -> float:
    """Seconds to wait after so many failures in a row (at least 1): doubling, up to `most_s`."""
    return float(min(most_s, first_s * 2 ** min(failures - 1, 30)))


class Outage:
    """Redis as one task knows it: what failed since it last did what was asked."""

    def __init__(self, name: str) -> None:
        self.refusals = 0
        """Latest failures in a row that are not for what the server is going through."""
        self._name = name
        self._failures = 0

    async def wait(self, error: Exception) -> None:
        """Note a failure, say so if it is the first for a while, and pause."""
        self._failures += 1
        self.refusals = 0 if is_state(error) else self.refusals + 1
        if self._failures % SAY_AGAIN == 1:
            log.warning("%s: Redis: %s: %s", self._name, type(error).__name__, error)
        await asyncio.sleep(growing_pause(self._failures))

    def over(self) -> None:
        if self._failures:
            log.info("%s: Redis is back", self._name)
        self._failures = self.refusals = 0
