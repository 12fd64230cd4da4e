"""Booking pages: who is asked first, when waiting ends, and that a grant is never lost."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Future
from typing import Any

import pytest

from pageferry.kvtransfer.handoff import NEVER, STALE_EPOCH, HandoffDenied, HandoffFailed
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.wire import Ledger, Request, SamplingParams, WorkerRecord
from pageferry.prefill_worker.ferry import Ferry, Peer
from pageferry.prefill_worker.job import Job


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


def job(hashes: tuple[bytes, ...] = (), ttl_ms: int = 10_000) -> Job:
    request = Request("r", 0, "gw", (1, 2, 3), 3, SamplingParams(), ttl_ms=ttl_ms)
    return Job(request, "queue", b"1-0", list(hashes))


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
