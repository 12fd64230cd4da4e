"""What a prefill worker takes from the queues, and what it leaves uncomputed. A real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pageferry.kvtransfer.bus import connect, ensure_groups
from pageferry.kvtransfer.fair_share import MAX_PASSES
from pageferry.kvtransfer.keys import CLASSES, FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.wire import Request, SamplingParams, pack
from pageferry.prefill_worker.claims import Claim, Claims

LEASE_S = 0.5
KEYS = Keys("m")


class Queues:
    """The gateways' side."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.claims = Claims(client, KEYS, "prefill-1", LEASE_S)

    async def add(
        self, name: str, queue_class: str = "interactive", gateway: str = "alive", **more: Any
    ) -> bytes:
        entry_id = more.pop("entry_id", "*")
        request = Request(name, 0, gateway, (1, 2), 2, SamplingParams(), queue_class, **more)
        fields = {FIELD: pack(request.to_dict())}
        added: bytes = await self.client.xadd(KEYS.prefill_queue(queue_class), fields, id=entry_id)
        return added

    async def pending(self) -> int:
        groups = [await self.client.xpending(q, PREFILL_GROUP) for q in KEYS.prefill_queues]
        return sum(group["pending"] for group in groups)

    async def lengths(self) -> int:
        return sum([await self.client.xlen(q) for q in KEYS.prefill_queues])

    async def recover(self, known: list[Claim]) -> list[Claim]:
        return await self.claims.recover((c.queue, c.entry_id) for c in known)


@pytest.fixture
async def queues(redis_url: str) -> AsyncIterator[Queues]:
    client = connect(redis_url, KEYS, max_block_s=3)
    await ensure_groups(client, KEYS)
    await client.set(KEYS.gateway("alive"), b"1")
    yield Queues(client)
    await client.aclose()


def names(claims: list[Claim]) -> list[str]:
    return [claim.request.request_id for claim in claims]


async def test_no_class_waits_for_ever(queues: Queues) -> None:
    """Each class has more than enough to do, and one request is asked for at a time."""
    for queue_class in CLASSES:
        for i in range(100):
            await queues.add(f"{queue_class}-{i}", queue_class)
    seen = []
    for _ in range(100):
        seen += [c.request.queue_class for c in await queues.claims.read(1)]
    counts = {queue_class: seen.count(queue_class) for queue_class in CLASSES}
    assert counts["resume"] > counts["interactive"] >= counts["batch"] >= 100 // (MAX_PASSES + 3)
    assert seen[:MAX_PASSES] == ["resume"] * MAX_PASSES


async def test_an_urgent_class_goes_first_when_nobody_was_passed_over(queues: Queues) -> None:
    await queues.add("b", "batch")
    await queues.add("i", "interactive")
    await queues.add("r", "resume")
    order = [names(await queues.claims.read(4)) for _ in CLASSES]
    assert order == [["r"], ["i"], ["b"]]


async def test_requests_of_a_dead_gateway_are_never_computed(queues: Queues) -> None:
    await queues.add("orphan", gateway="dead")
    await queues.add("other")
    assert names(await queues.claims.read(8)) == ["other"]
    assert await queues.pending() == 2, "one look is not enough: Redis may have been away"
    await asyncio.sleep(LEASE_S / 2)
    assert names(await queues.recover([])) == ["other"]
    assert await queues.lengths() == 1


async def test_a_gateway_whose_lease_had_lapsed_gets_its_turn(queues: Queues) -> None:
    await queues.add("late", gateway="slow")
    assert not await queues.claims.read(8)
    await queues.client.set(KEYS.gateway("slow"), b"1")
    await asyncio.sleep(LEASE_S / 2)
    assert names(await queues.recover([])) == ["late"]


async def test_what_waited_too_long_is_not_computed_but_reported(queues: Queues) -> None:
    seconds, _ = await queues.client.time()
    await queues.add("old", entry_id=f"{(seconds - 20) * 1000}-0", ttl_ms=10_000)
    await queues.add("aged", entry_id=f"{(seconds - 20) * 1000}-1", ttl_ms=60_000)
    await queues.add("fresh", ttl_ms=10_000)
    claims = await queues.claims.read(8)
    assert [(c.request.request_id, c.expired) for c in claims] == [
        ("old", True),
        ("aged", False),
        ("fresh", False),
    ]
    assert 35_000 < claims[1].request.ttl_ms < 41_000
    assert 5_000 < claims[2].request.ttl_ms <= 10_000


async def test_what_cannot_be_read_is_deleted(queues: Queues) -> None:
    await queues.client.xadd(KEYS.prefill_queue("batch"), {FIELD: b"\xc1"})
    await queues.client.xadd(KEYS.prefill_queue("batch"), {b"other": b""})
    assert not await queues.claims.read(8)
    assert (await queues.lengths(), await queues.pending()) == (0, 0)


async def test_a_claim_whose_reply_was_lost_is_found_again(queues: Queues) -> None:
    await queues.add("lost")
    await queues.client.xreadgroup(
        PREFILL_GROUP, "prefill-1", {KEYS.prefill_queue("interactive"): ">"}
    )
    found = await queues.recover([])
    assert names(found) == ["lost"]
    await queues.claims.settle(found[0].queue, found[0].entry_id)
    assert (await queues.lengths(), await queues.pending()) == (0, 0)


async def test_known_and_deleted_entries_are_not_found_again(queues: Queues) -> None:
    await queues.add("known")
    deleted = await queues.add("deleted")
    claims = await queues.claims.read(8)
    await queues.client.xdel(KEYS.prefill_queue("interactive"), deleted)
    assert not await queues.recover(claims[:1])
    assert await queues.pending() == 1


async def test_an_entry_that_redis_refuses_to_delete_ends_the_worker_after_a_while(
    queues: Queues,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mistake in the server's users does not heal; it is said once, not at every try."""
    monkeypatch.setattr("pageferry.prefill_worker.claims.MAX_REFUSALS", 3)
    await queues.add("kept")
    [claim] = await queues.claims.read(1)
    rules = {"passwords": ["+pw"], "keys": ["*"], "commands": ["+@all", "-xdel"]}
    await queues.client.acl_setuser("reader", enabled=True, **rules)
    client = connect(redis_url.replace("//", "//reader:pw@"), KEYS)
    claims = Claims(client, KEYS, "prefill-1", LEASE_S)
    with pytest.raises(RuntimeError, match=r"refuses to delete from .*NoPermissionError"):
        await claims.settle(claim.queue, claim.entry_id)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert await queues.pending() == 1
    await queues.client.acl_deluser("reader")
    with pytest.raises(RuntimeError, match="AuthenticationError"):
        await claims.settle(claim.queue, claim.entry_id)
    await client.aclose()


async def test_an_entry_is_deleted_however_long_redis_cannot(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server goes through is no refusal: here it takes no writes for want of a replica."""
    monkeypatch.setattr("pageferry.prefill_worker.claims.MAX_REFUSALS", 1)
    await queues.add("late")
    [claim] = await queues.claims.read(1)
    await queues.client.config_set("min-replicas-to-write", "1")
    settling = asyncio.create_task(queues.claims.settle(claim.queue, claim.entry_id))
    await asyncio.sleep(0.25)
    await queues.client.config_set("min-replicas-to-write", "0")
    await asyncio.wait_for(settling, 30)
    assert await queues.pending() == 0


async def test_what_ends_while_redis_answers_is_not_claimed_again(queues: Queues) -> None:
    """The worker's own set of jobs shrinks during the look."""
    for i in range(3):
        await queues.add(f"r{i}")
    jobs = dict.fromkeys((c.queue, c.entry_id) for c in await queues.claims.read(8))
    looking = asyncio.create_task(queues.claims.recover(place for place in jobs))
    await asyncio.sleep(0)
    del jobs[next(iter(jobs))]
    assert await looking == []
