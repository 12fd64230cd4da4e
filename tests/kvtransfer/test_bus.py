"""Registry and worker plumbing against a real Valkey."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from pageferry.kvtransfer.bus import (
    connect,
    ensure_groups,
    list_workers,
    publish_worker,
    retire_worker,
)
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.wire import (
    Cancel,
    Event,
    Kind,
    Ledger,
    WorkerRecord,
    pack_control,
    unpack_events,
)
from pageferry.kvtransfer.worker_bus import BusCallbacks, WorkerBus

KEYS = Keys("m")
RECORD = WorkerRecord(
    "w1", "decode", 1, "h", "ready", "m", "f", {}, Ledger(1, 1, 0, 0, 0, 0, 16), 100
)


@pytest.fixture
async def client(redis_url: str) -> Any:
    opened = connect(redis_url)
    yield opened
    await opened.aclose()


class Spy:
    """Stands in for a worker behind the bus."""

    def __init__(self) -> None:
        self.cancels: list[Cancel] = []
        self.lost: list[str] = []
        self.gateways: set[str] = set()
        self.failures: list[BaseException] = []

    def callbacks(self) -> BusCallbacks:
        return BusCallbacks(
            lambda: RECORD,
            self.cancels.extend,
            lambda: self.gateways,
            self.lost.append,
            self.failures.append,
        )


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_lease_that_is_not_renewed_lapses(client: Any) -> None:
    await publish_worker(client, KEYS, RECORD, lease_s=0.2)
    await publish_worker(client, KEYS, dataclasses.replace(RECORD, id="w2"), lease_s=60)
    assert [r.id for r in await list_workers(client, KEYS)] == ["w1", "w2"]
    await asyncio.sleep(0.4)
    assert [r.id for r in await list_workers(client, KEYS)] == ["w2"]
    assert await client.smembers(KEYS.workers) == {b"w2"}
    await retire_worker(client, KEYS, "w2")
    assert await list_workers(client, KEYS) == []


async def test_an_unreadable_record_is_left_out(client: Any) -> None:
    await publish_worker(client, KEYS, RECORD, lease_s=60)
    await client.set(KEYS.worker("odd"), b"\xc1")
    await client.sadd(KEYS.workers, "odd")
    assert [r.id for r in await list_workers(client, KEYS)] == ["w1"]


async def test_groups_are_created_once_and_see_what_was_queued_before(client: Any) -> None:
    await client.xadd(KEYS.prefill_queue("batch"), {FIELD: b"x"})
    await ensure_groups(client, KEYS)
    await ensure_groups(client, KEYS)
    reply = await client.xreadgroup("prefill", "c", dict.fromkeys(KEYS.prefill_queues, ">"))
    assert [(queue, len(entries)) for queue, entries in reply] == [(b"pf:{m}:prefill:batch", 1)]


async def test_events_go_to_their_gateways_in_order_also_after_an_outage(
    client: Any, redis_url: str
) -> None:
    spy = Spy()
    bus = WorkerBus(redis_url, KEYS, 1.0, spy.callbacks())
    await bus.start()
    events = [Event("r", 0, Kind.TOKENS, "w1", i, (i,)) for i in range(50)]
    await client.client_pause(300)
    for event in events:
        bus.emit([("ga", event), ("gb", event)])
    got: list[Event] = []
    async with asyncio.timeout(10):
        while len(got) < 50:
            entries = await client.xrange(KEYS.tokens("ga"))
            got = [e for _, fields in entries for e in unpack_events(fields[FIELD])]
            await asyncio.sleep(0.02)
    assert got == events
    assert await client.xlen(KEYS.tokens("gb"))
    await bus.close("w1")
    assert await list_workers(client, KEYS) == []


async def test_single_events_from_another_thread_arrive_each_once_and_in_order(
    client: Any, redis_url: str
) -> None:
    """The loop is woken once for several: none may be left behind when it has just looked."""
    bus = WorkerBus(redis_url, KEYS, 1.0, Spy().callbacks())
    await bus.start()
    events = [Event("r", 0, Kind.TOKENS, "w1", i, (i,)) for i in range(400)]

    def engine() -> None:
        for i, event in enumerate(events):
            bus.emit([("ga", event)])
            time.sleep(0.0005 * (i % 3))

    await asyncio.to_thread(engine)
    got: list[Event] = []

    async def read() -> bool:
        nonlocal got
        entries = await client.xrange(KEYS.tokens("ga"))
        got = [e for _, fields in entries for e in unpack_events(fields[FIELD])]
        return len(got) >= len(events)

    async with asyncio.timeout(10):
        while not await read():
            await asyncio.sleep(0.01)
    assert got == events
    await bus.close("w1")


async def test_cancels_reach_the_worker_and_those_before_its_start_do_not(
    client: Any, redis_url: str
) -> None:
    spy = Spy()
    await client.xadd(KEYS.control, {FIELD: pack_control([Cancel("old", 0)])})
    bus = WorkerBus(redis_url, KEYS, 1.0, spy.callbacks())
    await bus.start()
    await client.xadd(KEYS.control, {FIELD: b"\xc1 not a message"})
    await client.xadd(KEYS.control, {FIELD: pack_control([Cancel("new", 2)])})
    await until(lambda: spy.cancels)
    assert spy.cancels == [Cancel("new", 2)]
    await bus.close("w1")


async def test_a_gateway_without_a_lease_is_reported(client: Any, redis_url: str) -> None:
    spy = Spy()
    spy.gateways = {"gone", "alive"}
    await client.set(KEYS.gateway("alive"), b"1")
    bus = WorkerBus(redis_url, KEYS, 0.5, spy.callbacks())
    await bus.start()
    await until(lambda: spy.lost)
    await until(lambda: len(spy.lost) > 1)
    assert set(spy.lost) == {"gone"}
    await bus.close("w1")


async def test_a_task_that_breaks_is_reported_and_an_outage_is_not(redis_url: str) -> None:
    spy = Spy()
    bus = WorkerBus(redis_url, KEYS, 1.0, spy.callbacks())

    async def broken() -> None:
        raise KeyError("bug")

    attempts = []

    async def cut_off() -> None:
        attempts.append(1)
        raise ConnectionResetError("away")

    bus.spawn("broken", broken)
    outage = bus.spawn("outage", cut_off)
    await until(lambda: spy.failures and len(attempts) > 2)
    assert [type(f) for f in spy.failures] == [KeyError]
    outage.cancel()
    await bus.close("w1")
