"""Booking pages: who is asked first, when waiting ends, and that a grant is never lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pageferry.kvtransfer.bus import Client, connect, publish_worker, retire_worker
from pageferry.kvtransfer.ferry import Ferry, Peer
from pageferry.kvtransfer.handoff import (
    NEVER,
    STALE_EPOCH,
    HandoffDenied,
    HandoffFailed,
    Identity,
    Intake,
)
from pageferry.kvtransfer.handoff_client import ClientOptions
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Ledger, Request, SamplingParams, WorkerRecord

KEYS = Keys("m")
LAYOUT = KVLayout(dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=4)
IDENTITY = Identity("p", "prefill", "f", LAYOUT, 4)


class FakeHandoff:
    def __init__(self) -> None:
        self.cancelled = ""

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


class FakeClient:
    """A connection that answers RESERVE from a script; None leaves the answer open."""

    alive = True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Future[Any]] = []

    def reserve(self, request: Request, hashes: list[bytes]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.asked.append(future)
        answer = self.answers.pop(0) if self.answers else HandoffDenied("full")
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future


def ferry(**clients: FakeClient) -> Ferry:
    made = Ferry(None, None, Keys("m"), None)  # type: ignore[arg-type]
    for free, (name, client) in enumerate(clients.items(), 10):
        ledger = Ledger(100, free, 0, 100 - free, 0, 0, 16)
        record = WorkerRecord(name, "decode", 1, "h", "ready", "m", "f", {}, ledger, 1000)
        made.peers[name] = Peer(record, client)  # type: ignore[arg-type]
    return made


@dataclasses.dataclass
class Crate:
    """The least that can be booked for."""

    request: Request
    hashes: list[bytes]
    handoff: Any = None
    decode_worker: str = ""


def job(hashes: tuple[bytes, ...] = (), ttl_ms: int = 10_000) -> Crate:
    request = Request("r", 0, "gw", (1, 2, 3), 3, SamplingParams(), ttl_ms=ttl_ms)
    return Crate(request, list(hashes))


async def test_the_roomiest_is_asked_first_and_a_denial_goes_to_the_next() -> None:
    small, large = FakeClient(FakeHandoff()), FakeClient(HandoffDenied("full"))
    f, j = ferry(small=small, large=large), job()
    await f.book(j)
    assert (len(large.asked), len(small.asked)) == (1, 1)
    assert j.decode_worker == "small"


async def test_a_known_prefix_goes_where_it_lies() -> None:
    small, large = FakeClient(FakeHandoff(), FakeHandoff()), FakeClient(HandoffDenied("full"))
    f = ferry(small=small, large=large)
    await f.book(job((b"a", b"b")))
    await f.book(job((b"a", b"c")))
    assert (len(large.asked), len(small.asked)) == (1, 2)


async def test_full_workers_are_asked_again_until_one_has_room() -> None:
    client = FakeClient(HandoffDenied("full"), HandoffDenied("full"), FakeHandoff())
    j = job()
    await ferry(only=client).book(j)
    assert len(client.asked) == 3
    assert j.handoff is not None


@pytest.mark.parametrize("reason", [NEVER + "needs 9 pages", STALE_EPOCH + ": 0 is over"])
async def test_waiting_in_vain_ends_and_lets_the_next_job_book(reason: str) -> None:
    client = FakeClient(HandoffDenied(reason), FakeHandoff())
    f = ferry(only=client)
    with pytest.raises(HandoffFailed):
        await f.book(job())
    await asyncio.wait_for(f.book(job()), 5)


async def test_booking_ends_with_the_requests_time_to_live() -> None:
    with pytest.raises(HandoffFailed, match="time to live"):
        await ferry(only=FakeClient()).book(job(ttl_ms=100))


async def test_a_grant_that_comes_after_the_cancel_is_given_back() -> None:
    client, handoff = FakeClient(None), FakeHandoff()
    booking = asyncio.create_task(ferry(only=client).book(job()))
    while not client.asked:
        await asyncio.sleep(0.01)
    booking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await booking
    client.asked[0].set_result(handoff)
    async with asyncio.timeout(5):
        while not handoff.cancelled:
            await asyncio.sleep(0.01)


async def test_a_draining_worker_is_not_asked() -> None:
    draining, ready = FakeClient(FakeHandoff()), FakeClient(FakeHandoff())
    f = ferry(ready=ready, draining=draining)
    peer = f.peers["draining"]
    peer.record = dataclasses.replace(peer.record, state="draining")
    await f.book(job())
    assert (len(draining.asked), len(ready.asked)) == (0, 1)


class Idle:
    """A decode worker's listener that takes everything."""

    def admit(self, request: Request, num_pages: int) -> str:
        return ""

    def sealed(self, intake: Intake) -> None:
        raise AssertionError("nothing is handed over here")


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Client]:
    opened = connect(redis_url)
    yield opened
    await opened.aclose()


@contextlib.asynccontextmanager
async def real_ferry() -> AsyncIterator[Ferry]:
    memory = PoolMemory.create(LAYOUT, 4)
    made = Ferry(IDENTITY, memory, KEYS, ClientOptions("tcp"))
    yield made
    await made.close()
    memory.close()


async def register(registry: Client, worker_id: str, address: str) -> None:
    record = WorkerRecord(
        worker_id, "decode", 1, "h", "ready", "m", "f", LAYOUT.to_dict(),
        Ledger(4, 4, 0, 0, 0, 0, 4), 16, addresses={"tcp": address},
    )  # fmt: skip
    await publish_worker(registry, KEYS, record, 60)


@pytest.fixture
def answering() -> Iterator[HandoffServer]:
    memory, pool = PoolMemory.create(LAYOUT, 4), PagePool(4, LAYOUT.page_size, b"")
    identity = dataclasses.replace(IDENTITY, worker_id="z-answers", role="decode")
    server = HandoffServer(identity, pool, memory, Idle(), ServerOptions(transports=("tcp",)))
    server.start()
    yield server
    server.close()
    memory.close()


async def test_a_worker_that_does_not_answer_delays_no_other(
    registry: Client, answering: HandoffServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and says nothing
        await register(registry, "a-silent", f"127.0.0.1:{silent.getsockname()[1]}")
        await register(registry, "z-answers", answering.addresses["tcp"])
        async with real_ferry() as f, asyncio.timeout(30):
            while "z-answers" not in f.peers:
                await f.refresh(registry)
            assert f.dialling == {"a-silent"}
            await f.refresh(registry)  # goes on following the registry
            assert f.dialling == {"a-silent"}


async def test_counters_of_a_connection_outlive_it(
    registry: Client, answering: HandoffServer
) -> None:
    await register(registry, "z-answers", answering.addresses["tcp"])
    async with real_ferry() as f, asyncio.timeout(30):
        while not f.peers:
            await f.refresh(registry)
        request = Request("r", 0, "gw", tuple(range(99)), 99, SamplingParams())
        with pytest.raises(HandoffDenied):
            await asyncio.wrap_future(f.peers["z-answers"].client.reserve(request, []))
        before = f.stats()
        await retire_worker(registry, KEYS, "z-answers")
        while f.peers:
            await f.refresh(registry)
        assert f.stats() == before
        assert before["kv_handoffs_denied_total"] == 1
