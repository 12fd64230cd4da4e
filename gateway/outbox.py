"""All of the gateway's writes to Redis, made by one task, in the order they were asked for.

HTTP handlers are cancelled whenever a client leaves. If one were cancelled between a command and
its reply, the connection would carry a reply that the next user takes for its own. So handlers
never touch Redis: they leave a `Job` here and are told when it is done. Jobs that come in during a
round trip travel together in the next one.

1. `put` appends the job (any coroutine of the loop, never blocks).
2. The task takes up to `MAX_BATCH` jobs or `MAX_BATCH_BYTES` and runs them as one pipeline.
3. `done` of each job is called with its replies, or with the error. A job with `keep` is repeated
   until Redis takes it: cancels and clean-up must not get lost in an outage.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pageferry.kvtransfer.bus import TRANSIENT, Client, is_state
from pageferry.kvtransfer.retries import growing_pause

log = logging.getLogger(__name__)

MAX_BATCH = 256
MAX_BATCH_BYTES = 2**20
"""A round trip takes more only if its first job alone has more: it is put together on the loop."""
MAX_JOBS = 100_000
FIRST_PAUSE_S, MAX_PAUSE_S = 0.04, 1.0
MAX_REFUSALS = 100
"""Times that Redis may refuse a job with `keep` before it is given up. That it is full or otherwise
unable to write at the moment does not count."""

Command: TypeAlias = tuple[str | bytes | int, ...]
Done: TypeAlias = Callable[[list[Any], Exception | None], None]


def _ignore(replies: list[Any], error: Exception | None) -> None:
    del replies, error


@dataclass
class Job:
    commands: list[Command]
    done: Done = _ignore
    """Called on the loop with one reply per command, or with no replies and the error."""
    keep: bool = False
    wanted: bool = True
    """Set to False to leave out a job that was not sent yet."""
    refusals: int = 0

    @property
    def size(self) -> int:
        """Bytes of the commands' long parts."""
        return sum(len(part) for c in self.commands for part in c if isinstance(part, bytes))


class RedisHealth:
    """Whether Redis answered last time, and since when it has done so without a break."""

    def __init__(self) -> None:
        self.up = False
        self.error = "not connected yet"
        self.moves = 0
        """How often another server process has answered: connections may lead to the former."""

    def good(self) -> None:
        if not self.up:
            log.info("Redis answers")
        self.up = True
        self.error = ""

    def bad(self, who: str, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        if self.up:
            log.warning("%s: Redis: %s", who, self.error)
        self.up = False


class Follower:
    """Lets a client leave the server that Redis has moved away from."""

    def __init__(self, client: Client, health: RedisHealth) -> None:
        self._client = client
        self._health = health
        self._moves = health.moves

    async def follow(self) -> None:
        """Between commands: drop connections that may lead to the former server."""
        if self._moves != self._health.moves:
            self._moves = self._health.moves
            await self._client.connection_pool.disconnect()


class Outbox:
    def __init__(self, client: Client, health: RedisHealth) -> None:
        self._client = client
        self._health = health
        self._follower = Follower(client, health)
        self._jobs: collections.deque[Job] = collections.deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, job: Job) -> None:
        """Queue a job. When `MAX_JOBS` wait, the oldest one fails to make room."""
        if len(self._jobs) >= MAX_JOBS:
            self._jobs.popleft().done([], TimeoutError("too many commands wait for Redis"))
        self._jobs.append(job)
        self._idle.clear()
        self._wake.set()

    async def sent(self, command: Command) -> None:
        """Return when Redis has taken it, or raise why not; the caller sets a bound."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(replies: list[Any], error: Exception | None) -> None:
            del replies
            if taken.done():
                return
            if error is None:
                taken.set_result(None)
            else:
                taken.set_exception(error)

        job = Job([command], done)
        self.put(job)
        try:
            await taken
        finally:
            job.wanted = False

    async def flushed(self) -> None:
        """Wait until everything put so far was sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """The task; ends only by cancellation."""
        failures = 0
        while True:
            await self._wake.wait()
            batch = self._next_batch()
            try:
                await self._follower.follow()
                refused = await self._execute(batch) if batch else []
                failures = failures + 1 if refused else 0
            except TRANSIENT as error:
                self._health.bad("outbox", error)
                failures += 1
                refused = [job for job in batch if job.keep]
                for job in batch:
                    if not job.keep:
                        job.done([], error)
            self._jobs.extendleft(reversed(refused))
            if not self._jobs:
                self._wake.clear()
                self._idle.set()
            if failures:
                await asyncio.sleep(growing_pause(failures, FIRST_PAUSE_S, MAX_PAUSE_S))

    def _next_batch(self) -> list[Job]:
        batch: list[Job] = []
        num_bytes = 0
        while self._jobs and len(batch) < MAX_BATCH:
            if batch and num_bytes + self._jobs[0].size > MAX_BATCH_BYTES:
                break
            job = self._jobs.popleft()
            if job.wanted:
                num_bytes += job.size
                batch.append(job)
        return batch

    async def _execute(self, batch: list[Job]) -> list[Job]:
        """Run the jobs in one round trip; returns those to repeat."""
        async with self._client.pipeline(transaction=False) as pipe:
            for job in batch:
                for command in job.commands:
                    pipe.execute_command(*command)
            replies = await pipe.execute(raise_on_error=False)
        self._health.good()
        repeat = []
        for job in batch:
            own, replies = replies[: len(job.commands)], replies[len(job.commands) :]
            error = next((r for r in own if isinstance(r, Exception)), None)
            if error is None:
                job.done(own, None)
            elif job.keep and (is_state(error) or job.refusals < MAX_REFUSALS):
                job.refusals += not is_state(error)
                repeat.append(job)
            else:
                log.warning("Redis refused: %s: %s", type(error).__name__, error)
                job.done([], error)
        return repeat
