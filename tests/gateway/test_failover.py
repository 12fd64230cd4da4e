"""Workers die, lie and give up; gateways die; Redis restarts: the client's text stays exact."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams, pack, unpack

Cluster = Any
PROMPT = "abcdefghij" * 4
FIELDS = {"prompt": PROMPT, "max_tokens": 60}
TEXT = (PROMPT * 2)[:60]


async def text_of(call: asyncio.Task[list[Any]]) -> str:
    events = await call
    assert events[-1] == "[DONE]", events[-1]
    return "".join(e["choices"][0]["text"] for e in events[:-1])


def once(fault: Callable[[Event], list[Event]], at: int) -> Callable[[Event], list[Event]]:
    """Apply a fault to the first TOKENS event with index `at`, and to no other."""
    left = [True]

    def mangle(event: Event) -> list[Event]:
        if event.kind is Kind.TOKENS and event.index == at and left:
            left.clear()
            return fault(event)
        return [event]

    return mangle


async def started(cluster: Cluster, tokens: int) -> None:
    await cluster.until(lambda: [g for g in cluster.generations() if len(g.tokens) >= tokens])


async def test_decode_worker_dies(service: Cluster) -> None:
    first = service.workers[0]
    first.step_s = 0.03
    call = asyncio.create_task(service.events(**FIELDS))
    await started(service, 5)
    await service.worker("decode", "spare")
    await first.die()
    assert await text_of(call) == TEXT
    assert await service.metric("request_resubmissions_total", cause="worker_death") == 1
    assert await service.metric("worker_deaths_total", role="decode") == 1
    resumed = service.workers[1].claimed[-1]
    assert (resumed.epoch, resumed.queue_class) == (1, "interactive")
    assert resumed.num_output_tokens >= 5
    assert service.workers[-1].cancelled, "the earlier epoch must be recalled"


async def test_prefill_worker_dies_with_a_claim(service: Cluster) -> None:
    prefill = service.workers[1]
    prefill.prefill_s = 30
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: prefill.active)
    await service.worker("prefill", "spare")
    await prefill.die()
    assert await text_of(call) == TEXT
    for queue in prefill.keys.prefill_queues:
        assert (await prefill.client.xpending(queue, PREFILL_GROUP))["pending"] == 0
        assert await prefill.client.xlen(queue) == 0


async def test_dead_consumer_is_removed_only_when_nothing_is_pending(service: Cluster) -> None:
    prefill = service.workers[1]
    queue = prefill.keys.prefill_queue("interactive")
    prefill.prefill_s = 30
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: prefill.active)
    await prefill.die()
    assert await text_of(call) == TEXT

    names = [prefill.id]
    async with asyncio.timeout(5):
        while prefill.id in names:
            consumers = await prefill.client.xinfo_consumers(queue, PREFILL_GROUP)
            names = [c["name"].decode() for c in consumers]
            await asyncio.sleep(0.05)


async def test_claim_without_a_word(service: Cluster) -> None:
    """The worker died between XREADGROUP and OWNED: only XPENDING knows."""
    prefill = service.workers[1]
    prefill.mangle = lambda event: []
    prefill.prefill_s = 30
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: prefill.active)
    assert not service.generations()[0].owner
    await service.worker("prefill", "spare")
    await prefill.die()
    assert await text_of(call) == TEXT


async def test_last_prefill_worker_dies_before_claiming(service: Cluster) -> None:
    prefill = service.workers[1]
    prefill.claims = False
    await asyncio.sleep(0.1)
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: [g for g in service.generations() if g.entry])
    await prefill.die()
    assert await text_of(call) == TEXT
    assert await prefill.client.xlen(prefill.keys.prefill_queue("interactive")) == 0
    assert await service.metric("request_resubmissions_total", cause="reroute") == 1


async def test_without_prefill_workers_decode_does_it_all(cluster: Cluster) -> None:
    await cluster.gateway()
    small = await cluster.worker("decode", num_pages=100)
    large = await cluster.worker("decode", num_pages=500)
    status, body = await cluster.post(**FIELDS)
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
    assert (len(small.accepted), len(large.accepted)) == (0, 1)
    assert await large.client.ttl(large.keys.decode_queue(large.id)) != -1


async def test_short_prompts_skip_the_prefill_workers(cluster: Cluster) -> None:
    await cluster.gateway(local_prefill_tokens=5)
    await cluster.worker("decode")
    prefill = await cluster.worker("prefill")
    await cluster.post(prompt="abcde", max_tokens=2)
    assert not prefill.claimed
    await cluster.post(prompt="abcdef", max_tokens=2)
    assert len(prefill.claimed) == 1


async def test_all_decode_workers_gone_then_one_comes(service: Cluster) -> None:
    service.workers[0].step_s = 0.03
    call = asyncio.create_task(service.events(**FIELDS))
    await started(service, 5)
    await service.workers[0].die()
    service.workers[1].claims = False
    await service.until(lambda: not service.gateways[0].fleet.has_decode)
    status, body = await service.post(**FIELDS)
    assert (status, body["error"]["code"]) == (503, "no_decode_worker")
    service.workers[1].claims = True
    await service.worker("decode", "late")
    assert await text_of(call) == TEXT


async def test_poison_stops_at_the_third_worker(service: Cluster) -> None:
    for i in range(3):
        await service.worker("prefill", f"victim-{i}")
    status, body = await service.post(**FIELDS, seed=666)
    assert (status, body["error"]["code"]) == (500, "request_failed")
    await service.until(lambda: len(service.gateways[0].fleet.ready("prefill")) == 1)
    client, keys = service.workers[0].client, service.workers[0].keys
    letters = await client.xrange(keys.dead)
    assert len(letters) == 1
    assert b"abcdefghij" not in letters[0][1][FIELD]
    letter = unpack(letters[0][1][FIELD])
    assert (letter["code"], letter["prompt_tokens"], len(letter["workers"])) == (
        "request_failed",
        40,
        3,
    )
    assert (await service.post(**FIELDS))[0] == 200


@pytest.mark.parametrize("at", [0, 7])
async def test_duplicates(service: Cluster, at: int) -> None:
    for worker in service.workers:
        worker.mangle = once(lambda event: [event] * 3, at)
    call = asyncio.create_task(service.events(**FIELDS))
    assert await text_of(call) == TEXT
    assert await service.metric("duplicate_tokens_dropped_total") == 2


async def test_gap(service: Cluster) -> None:
    service.workers[0].mangle = once(lambda event: [], 7)
    call = asyncio.create_task(service.events(**FIELDS))
    assert await text_of(call) == TEXT
    assert await service.metric("request_resubmissions_total", cause="gap") == 1


async def test_stale_epoch(service: Cluster) -> None:
    """A worker that was given up for dead goes on talking under the old epoch."""

    def lie(event: Event) -> list[Event]:
        return [dataclasses.replace(event, epoch=-1, token_ids=(1,)), event]

    service.workers[0].mangle = lie
    call = asyncio.create_task(service.events(**FIELDS))
    assert await text_of(call) == TEXT


async def test_requeue(service: Cluster) -> None:
    def give_back(event: Event) -> list[Event]:
        return [dataclasses.replace(event, kind=Kind.REQUEUE, token_ids=(), code="preempted")]

    service.workers[0].mangle = once(give_back, 9)
    call = asyncio.create_task(service.events(**FIELDS))
    assert await text_of(call) == TEXT
    again = service.workers[1].claimed[-1]
    assert (again.epoch, again.num_output_tokens) == (1, 9)


async def test_requeue_goes_ahead_of_new_work(service: Cluster) -> None:
    prefill = service.workers[1]

    def give_back(event: Event) -> list[Event]:
        prefill.claims = False
        return [dataclasses.replace(event, kind=Kind.REQUEUE, token_ids=(), code="draining")]

    service.workers[0].mangle = once(give_back, 9)
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(
        lambda: [g for g in service.generations() if g.entry and g.entry.queue.endswith("resume")]
    )
    prefill.claims = True
    assert await text_of(call) == TEXT


@pytest.mark.parametrize(
    ("code", "status"), [("non_finite_logits", 500), ("out_of_memory", 503), ("odd", 500)]
)
async def test_typed_worker_errors(service: Cluster, code: str, status: int) -> None:
    def fail(event: Event) -> list[Event]:
        return [dataclasses.replace(event, kind=Kind.ERROR, code=code, message="It broke.")]

    service.workers[1].mangle = once(fail, 0)
    got, body = await service.post(**FIELDS)
    assert (got, body["error"]["code"]) == (status, code)
    assert body["error"]["message"] == "It broke."


async def test_finish_survives_the_worker(service: Cluster) -> None:
    """Every token arrived, the worker gave the request back instead of finishing it."""

    def unfinished(event: Event) -> list[Event]:
        tail = dataclasses.replace(event, kind=Kind.REQUEUE, token_ids=(), code="draining")
        return [dataclasses.replace(event, finish=None), tail]

    service.workers[0].mangle = once(unfinished, 59)
    call = asyncio.create_task(service.events(**FIELDS))
    assert await text_of(call) == TEXT


async def test_orphans_of_dead_gateways_are_removed(service: Cluster) -> None:
    keys = Keys("tiny")
    worker = service.workers[1]
    queue = keys.prefill_queue("batch")
    await worker.client.set(keys.gateway("alive"), b"1", px=60_000)
    for gateway in ("gone", "alive"):
        request = Request(f"for-{gateway}", 0, gateway, (1, 2), 2, SamplingParams())
        await worker.client.xadd(queue, {FIELD: pack(request.to_dict())})
    worker.prefill_s = 30
    await service.until(lambda: len(worker.active) == 2)
    await worker.die()
    async with asyncio.timeout(5):
        while (await worker.client.xpending(queue, PREFILL_GROUP))["pending"] != 1:
            await asyncio.sleep(0.05)
    (left,) = await worker.client.xrange(queue)
    assert Request.from_dict(unpack(left[1][FIELD])).gateway == "alive"
    consumers = await worker.client.xinfo_consumers(queue, PREFILL_GROUP)
    assert [c["pending"] for c in consumers if c["name"].decode() == worker.id] == [1]
