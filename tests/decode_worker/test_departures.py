"""Leaving sequences on a worker whose departures nobody takes: what is asked, and what comes back.

Moves that succeed are in tests/e2e/test_drain.py and, message by message, in
tests/kvtransfer/test_protocol_model.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest

from pageferry.decode_worker.departures import Departure, Departures
from pageferry.decode_worker.engine import Engine, LocalRequest, Stop
from pageferry.decode_worker.scheduler import Limits
from pageferry.kernels.runner import Chunk, Sampled
from pageferry.kvtransfer.engine_thread import start_thread
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Event, Request, SamplingParams
from pageferry.kvtransfer.worker_bus import BusCallbacks, WorkerBus

NUM_TOKENS = 400
TTL_MS = 10_000


class SlowRunner:
    """Answers each wanted row with its position."""

    def execute(self, chunks: Seq[Chunk]) -> list[Sampled | None]:
        time.sleep(0.002)
        positions = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        return [
            Sampled(position, None, (), "") if chunk.sample else None
            for position, chunk in zip(positions, chunks, strict=True)
        ]


class FullFerry:
    """The other decode workers show room; asked, they have none, or do not answer."""

    has_room = True

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []
        """When, and with which time to live."""
        self.answers = asyncio.Event()
        self.answers.set()

    async def book_now(self, departure: Departure) -> bool:
        self.asked.append((time.monotonic(), departure.request.ttl_ms))
        await self.answers.wait()
        return False

    async def refresh(self, client: Any) -> None:
        await asyncio.sleep(0.05)

    async def close(self) -> None:
        pass


class Leaving:
    """One decode worker that has one sequence."""

    def __init__(self, bus: WorkerBus) -> None:
        self.begun = time.monotonic()
        self.pool = PagePool(256, 4)
        self.tokens: list[int] = []
        self.failures: list[BaseException] = []
        limits = Limits(8, 16, 1000, 1)
        self.engine = Engine("w", self.pool, SlowRunner(), limits, self._emit)  # type: ignore[arg-type]
        self.thread = start_thread(self.engine, self.failures.append)
        self.ferry = FullFerry()
        parts: Any = SimpleNamespace(worker_id="w", pool=self.pool)
        self.departures = Departures(parts, self.ferry, self.engine, bus)  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        request = Request("r", 0, "gw", tuple(range(6)), 6, sampling, ttl_ms=TTL_MS)
        self.engine.inbox.put(LocalRequest(request))

    def _emit(self, events: Iterable[tuple[str, Event]]) -> None:
        self.tokens.extend(token for _, event in events for token in event.token_ids)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert not self.failures
                await asyncio.sleep(0.002)


@pytest.fixture
async def leaving(redis_url: str) -> AsyncIterator[Leaving]:
    """In the end the sequence has all its tokens and the pool all its pages."""
    unused: Any = None
    bus = WorkerBus(redis_url, Keys("m"), 1.0, BusCallbacks(*[unused] * 6))
    leaving = Leaving(bus)
    await leaving.until(lambda: leaving.tokens)
    yield leaving
    assert leaving.departures.moving == []
    await leaving.until(lambda: len(leaving.tokens) == NUM_TOKENS)
    assert leaving.tokens == list(range(6, 6 + NUM_TOKENS))
    leaving.engine.inbox.put(Stop())
    leaving.thread.join(10)
    assert leaving.pool.ledger().live == 0
    leaving.pool.check_integrity()
    await bus._token_client.aclose()
    await bus.client.aclose()


async def test_each_try_carries_what_is_left_of_the_time_to_live(leaving: Leaving) -> None:
    """The next worker cannot know how long the sequence has lived already."""
    ferry = leaving.ferry
    running = asyncio.create_task(leaving.departures.run(asyncio.get_running_loop().time() + 30))
    await leaving.until(lambda: len(ferry.asked) > 1)
    leaving.departures.stop()
    await running
    for asked_at, ttl_ms in ferry.asked:
        assert ttl_ms >= TTL_MS - 1 - (asked_at - leaving.begun) * 1000
    first, second = ferry.asked[:2]
    assert first[1] < TTL_MS
    assert second[1] <= first[1] - 200


async def test_a_move_that_has_not_begun_when_time_is_up_comes_back(leaving: Leaving) -> None:
    leaving.ferry.answers.clear()
    await leaving.departures._start(1)
    assert len(leaving.departures.moving) == 1
    assert leaving.ferry.asked == []
    await leaving.departures._settle()


async def test_a_move_that_nobody_answers_comes_back_when_time_is_up(leaving: Leaving) -> None:
    leaving.ferry.answers.clear()
    await leaving.departures.run(asyncio.get_running_loop().time() + 0.1)
    assert len(leaving.ferry.asked) == 1
