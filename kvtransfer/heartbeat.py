"""A process's heartbeat: its lease, renewed from a thread and a connection of its own.

On an overloaded machine a beat from the event loop came late by seconds: each of the loop's turns
waits for the interpreter lock behind the engine and every job's task. Here it waits for nobody
else's turn, it begins after a sixth of a lease, and a reply that takes half a lease means a new
connection.

It does not speak for the dead. It stops when

- the event loop has not said for `LOOP_SILENCE_S`, or two leases, that it turns: it goes on once
  the loop is back;
- the engine is stuck (`StepClock.stuck`, `--engine-timeout-s`). The worker is then told to end;
- the whole process is frozen or gone: so is the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pageferry.kvtransfer.bus import TRANSIENT, Client, connect
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.retries import growing_pause

log = logging.getLogger(__name__)

LOOP_SILENCE_S = 10.0
BEATS_PER_LEASE = 6
MAX_PATIENCE_S = 2.5
JOIN_S = 3.0
"""More than a beat may take."""


def never_stuck() -> str:
    return ""


class EngineStuck(RuntimeError):
    """The engine's thread does not come back from something."""


@dataclass(frozen=True)
class Patient:
    """Whose life the heartbeat vouches for. All are called in the heartbeat's thread."""

    beat: Callable[[Client], Awaitable[object]]
    """Renews the lease, in the thread's own event loop."""
    failed: Callable[[BaseException], None]
    """Called with `EngineStuck`, or with what broke the heartbeat; there is none after that."""
    stuck: Callable[[], str] = never_stuck
    """Why the engine does not count as alive; empty if it does."""


class Heartbeat:
    def __init__(self, url: str, keys: Keys, lease_s: float, patient: Patient) -> None:
        self._keys = keys
        self._lease_s = lease_s
        self._patience_s = min(lease_s / 2, MAX_PATIENCE_S)
        self._patient = patient
        self._url = url
        self._said = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def say(self) -> None:
        """The event loop turns. The first call starts the heartbeat."""
        self._said = time.monotonic()
        if not self._thread.ident and not self._stop.is_set():
            self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """No beat starts after this. The last may need `JOIN_S` to end; `wait` blocks as long."""
        self._stop.set()
        if wait and self._thread.ident:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_on())
        except Exception as error:
            log.exception("the heartbeat broke")
            self._patient.failed(error)

    async def _beat_on(self) -> None:
        client = connect(self._url, self._keys, max_block_s=0.0, reply_s=self._patience_s)
        beat_s = self._lease_s / BEATS_PER_LEASE
        silent, failures = "", 0
        try:
            while not self._stop.is_set():
                reason = self._silence()
                if reason and not silent:
                    log.error("heartbeat stops: %s", reason)
                silent = reason
                if not silent:
                    failures = 0 if await self._beat(client, failures) else failures + 1
                # Blocks this loop, where nothing else runs, and ends as soon as `stop` is called.
                pause_s = growing_pause(failures, most_s=beat_s) if failures else beat_s
                self._stop.wait(pause_s)
        finally:
            await client.aclose()

    def _silence(self) -> str:
        """Why not to beat; empty if all is well."""
        if reason := self._patient.stuck():
            self._stop.set()
            self._patient.failed(EngineStuck(reason))
            return reason
        quiet_s = time.monotonic() - self._said
        if quiet_s > max(LOOP_SILENCE_S, 2 * self._lease_s):
            return f"the event loop has not turned for {quiet_s:.0f} s"
        return ""

    async def _beat(self, client: Client, failures: int) -> bool:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._patient.beat(client)
        except TRANSIENT as error:
            if not failures:
                log.warning("heartbeat: Redis: %s: %s", type(error).__name__, error)
            return False
        if failures:
            log.info("heartbeat: Redis is back")
        return True
