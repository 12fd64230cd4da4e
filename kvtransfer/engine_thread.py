"""What both kinds of engine share: their thread, and when a run of failed steps is enough."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.pool import PagePool

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""How long an engine without work waits for its inbox before it looks at its pool."""

JOIN_S = 5.0
"""What an engine that is told to end gets for its last step."""

MAX_FAILED_STEPS = 3
"""Steps that may fail one after another before the worker gives up and leaves."""


class Engine(Protocol):
    def run(self) -> None: ...


class StepWatch:
    """Counts failed steps in a row, and checks the pool once in each idle period."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._failed = 0
        self._in_all: set[str] = set()
        """Requests that were part of every failed step of this row."""
        self._checked = False

    def succeeded(self) -> None:
        self._failed = 0
        self._checked = False

    def failed(self, request_ids: Iterable[str] = ()) -> None:
        """`RuntimeError`, which ends the engine, at the third failure in a row.

        Not while one request was part of them all: that one may be the cause, and its gateway
        gives it up.
        """
        ids = set(request_ids)
        self._in_all = self._in_all & ids if self._failed else ids
        self._failed += 1
        if self._failed >= MAX_FAILED_STEPS and not self._in_all:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps failed in a row: the worker gives up")

    def idle(self) -> None:
        """`PoolCorrupted` if the ledger does not balance."""
        if not self._checked:
            self._pool.check_integrity()
            self._checked = True


class StepClock:
    """Where an engine's time goes: in steps, and in the gaps between them while there is work.

    A step is one call of the model runner. A gap is what the engine does from the end of one to the
    beginning of the next: report, take in, schedule, and wait for the interpreter lock.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = 0.0
        self.num_gaps = 0
        self.gap_seconds = 0.0
        self.longest_gap_seconds = 0.0
        self._begun = 0.0
        self._ended: float | None = None
        self._turned = time.monotonic()

    def stuck(self, limit_s: float) -> str:
        """Why the engine seems to hang; empty if it began, ended or skipped a step in `limit_s`.

        An idle engine skips a step every `IDLE_WAIT_S`. Any thread.
        """
        silent_s = time.monotonic() - self._turned
        return f"the engine has not come back for {silent_s:.0f} s" if silent_s > limit_s else ""

    def begin(self) -> None:
        self._begun = self._turned = time.monotonic()
        if self._ended is not None:
            gap = self._begun - self._ended
            self.num_gaps += 1
            self.gap_seconds += gap
            self.longest_gap_seconds = max(self.longest_gap_seconds, gap)

    def end(self) -> None:
        self._ended = self._turned = time.monotonic()
        self.num_steps += 1
        self.step_seconds += self._ended - self._begun

    def pause(self) -> None:
        """There is nothing to do, or the step failed: what follows is not a gap."""
        self._ended = None
        self._turned = time.monotonic()

    def stats(self) -> dict[str, float]:
        return {
            names.STEPS: self.num_steps,
            names.STEP_SECONDS: self.step_seconds,
            names.STEP_GAPS: self.num_gaps,
            names.STEP_GAP_SECONDS: self.gap_seconds,
            names.LONGEST_STEP_GAP: self.longest_gap_seconds,
        }


def start_thread(engine: Engine, failed: Callable[[BaseException], None]) -> threading.Thread:
    """Run the loop in a daemon thread; `failed` hears of the exception that ended it."""

    def body() -> None:
        try:
            engine.run()
        except BaseException as error:
            log.exception("engine ended")
            failed(error)

    thread = threading.Thread(target=body, name="engine", daemon=True)
    thread.start()
    return thread
