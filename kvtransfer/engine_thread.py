"""What both kinds of engine share: their thread, and when a run of failed steps is enough."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from pageferry.kvtransfer.pool import PagePool

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""How long an engine without work waits for its inbox before it looks at its pool."""

MAX_FAILED_STEPS = 3
"""Steps that may fail one after another before the worker gives up and leaves."""


class Engine(Protocol):
    def run(self) -> None: ...


class StepWatch:
    """Counts failed steps in a row, and checks the pool once in each idle period."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._failed = 0
        self._checked = False

    def succeeded(self) -> None:
        self._failed = 0
        self._checked = False

    def failed(self) -> None:
        """`RuntimeError`, which ends the engine, at the third failure in a row."""
        self._failed += 1
        if self._failed == MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps failed in a row: the worker gives up")

    def idle(self) -> None:
        """`PoolCorrupted` if the ledger does not balance."""
        if not self._checked:
            self._pool.check_integrity()
            self._checked = True


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
