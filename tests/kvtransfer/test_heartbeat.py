"""The lease of a worker whose loop, engine or Redis is not well, against a real Valkey."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from pageferry.kvtransfer import heartbeat
from pageferry.kvtransfer.bus import Renewal, connect, publish_worker
from pageferry.kvtransfer.engine_thread import StepClock
from pageferry.kvtransfer.heartbeat import EngineStuck, Heartbeat, Patient
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.wire import Ledger, WorkerRecord

KEYS = Keys("m")
RECORD = WorkerRecord(
    "w1", "decode", 1, "h", "ready", "m", "f", {}, Ledger(1, 1, 0, 0, 0, 0, 16), 100
)
LEASE_S = 0.6


class Worker:
    """What a heartbeat sees of a worker."""

    def __init__(self, url: str) -> None:
        self.reason = ""
        self.renewals: list[Renewal] = []
        self.failures: list[BaseException] = []
        patient = Patient(self.beat, self.failures.append, lambda: self.reason)
        self.heartbeat = Heartbeat(url, KEYS, LEASE_S, patient)

    async def beat(self, client: Any) -> None:
        self.renewals.append(await publish_worker(client, KEYS, RECORD, LEASE_S))


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[Worker]:
    worker = Worker(redis_url)
    yield worker
    worker.heartbeat.stop()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    opened = connect(redis_url)
    yield opened
    await opened.aclose()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def lapsed(client: Any) -> None:
    async with asyncio.timeout(20):
        while await client.exists(KEYS.worker("w1")):
            await asyncio.sleep(0.02)


class Watch(threading.Thread):
    """Looks for the lease in a thread of its own and notes whether it was ever missing."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._client = redis.Redis.from_url(url)
        self._stop_it = threading.Event()
        self.missing = 0

    def run(self) -> None:
        while not self._stop_it.wait(0.02):
            self.missing += not self._client.exists(KEYS.worker("w1"))
        self._client.close()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_it.set()
        self.join()


async def test_a_loop_that_stands_still_for_a_while_loses_no_lease(
    worker: Worker, redis_url: str
) -> None:
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    with Watch(redis_url) as watch:
        time.sleep(3 * LEASE_S)  # noqa: ASYNC251 - that is the fault
    assert watch.missing == 0
    assert [r.lapsed for r in worker.renewals[:2]] == [True, False]


async def test_a_loop_that_stands_still_for_long_counts_as_dead(
    worker: Worker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "LOOP_SILENCE_S", 1.0)
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    await lapsed(client)
    count = len(worker.renewals)
    worker.heartbeat.say()
    await until(lambda: len(worker.renewals) > count)
    assert worker.renewals[count].lapsed
    assert worker.failures == []


async def test_a_stuck_engine_ends_the_heartbeat_and_the_worker(
    worker: Worker, client: Any
) -> None:
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    clock = StepClock()
    assert clock.stuck(60) == ""
    clock.begin()
    time.sleep(0.02)  # noqa: ASYNC251 - a step
    worker.reason = clock.stuck(0.01)
    assert "engine" in worker.reason
    await until(lambda: worker.failures)
    worker.heartbeat.say()
    await lapsed(client)
    assert [type(f) for f in worker.failures] == [EngineStuck]
    clock.end()
    assert clock.stuck(0.01) == ""


async def test_full_memory_is_no_death(worker: Worker, client: Any, redis_url: str) -> None:
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    await client.config_set("maxmemory", "1")
    try:
        with Watch(redis_url) as watch:
            await asyncio.sleep(2 * LEASE_S)
        assert watch.missing == 0
        await client.delete(KEYS.worker("w1"))
        # The beat that was on its way meanwhile may have found the old lease.
        count = len(worker.renewals) + 1
        await asyncio.sleep(LEASE_S)
        assert len(worker.renewals) <= count, "a lease that cannot be had was reported as renewed"
    finally:
        await client.config_set("maxmemory", "0")
    await until(lambda: len(worker.renewals) > count)


async def test_a_frozen_redis_costs_no_more_than_it_froze(
    worker: Worker, client: Any, redis_url: str
) -> None:
    """The reply that never comes is given up before the lease ends; the next beat is heard."""
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    await client.client_pause(int(LEASE_S * 700))
    await asyncio.sleep(LEASE_S)
    with Watch(redis_url) as watch:
        await asyncio.sleep(LEASE_S)
    assert watch.missing == 0


async def test_no_beat_after_the_end(worker: Worker, client: Any) -> None:
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    await asyncio.to_thread(worker.heartbeat.stop)
    await client.delete(KEYS.worker("w1"))
    worker.heartbeat.say()
    await asyncio.sleep(LEASE_S / 2)
    assert not await client.exists(KEYS.worker("w1"))


async def test_the_end_does_not_wait_for_the_next_beat(worker: Worker) -> None:
    """`WorkerBus.close` has two seconds for this and for leaving the registry."""
    worker.heartbeat._lease_s = 60.0
    worker.heartbeat.say()
    await until(lambda: worker.renewals)
    begun = time.monotonic()
    await asyncio.to_thread(worker.heartbeat.stop)
    assert time.monotonic() - begun < 1.0


async def test_a_heartbeat_that_breaks_ends_the_worker(worker: Worker) -> None:
    async def broken(client: Any) -> None:
        raise KeyError("bug")

    worker.heartbeat._patient = Patient(broken, worker.failures.append)
    worker.heartbeat.say()
    await until(lambda: worker.failures)
    assert [type(f) for f in worker.failures] == [KeyError]
