"""Who goes on with a request in a fleet of unlike workers, and what its client hears if nobody can.

Some have other weights, as in a rolling update, some hold shorter sequences.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from pageferry.gateway.dispatch import STRANGER_PAUSE_S
from pageferry.kvtransfer.wire import Event, Kind
from tests.gateway.streams import FIELDS, TEXT, once, started, text_of

Cluster = Any
OTHER = {"fingerprint": "other"}


def nonsense(event: Event) -> list[Event]:
    """What a worker with other weights says."""
    return [dataclasses.replace(event, token_ids=(ord("X"),) * len(event.token_ids))]


def give_back(event: Event) -> list[Event]:
    return [dataclasses.replace(event, kind=Kind.REQUEUE, token_ids=(), code="preempted")]


async def requeued(service: Cluster) -> asyncio.Task[list[Any]]:
    """A call that its decode worker gives back after nine tokens; no prefill worker claims it."""
    decode, prefill = service.workers
    decode.mangle, decode.step_s = once(give_back, 9), 0.03
    call = asyncio.create_task(service.events(**FIELDS))
    await started(service, 1)
    prefill.claims = False
    return call


async def no_taker(call: asyncio.Task[list[Any]], reason: str) -> None:
    """The stream ends with the error event that says so, long before its deadline."""
    async with asyncio.timeout(20):
        events = await call
    assert events[-1]["error"]["code"] == "no_decode_worker"
    assert reason in events[-1]["error"]["message"]


async def test_a_continuation_goes_to_the_weights_that_began_it(service: Cluster) -> None:
    first, prefill = service.workers
    first.step_s = 0.03
    call = asyncio.create_task(service.events(**FIELDS))
    await started(service, 5)
    same = await service.worker("decode", "same", num_pages=10)
    others = [await service.worker(r, mangle=nonsense, **OTHER) for r in ("decode", "prefill")]
    await first.die()
    assert await text_of(call) == TEXT
    assert [r.num_output_tokens >= 5 for r in same.accepted] == [True]
    assert not [r for w in others for r in (*w.claimed, *w.accepted)]
    assert [r.epoch for r in prefill.claimed] == [0]


async def test_one_that_others_have_fetched_is_taken_back(service: Cluster) -> None:
    """It went to the shared queue when all had the same weights; then other workers came."""
    call = await requeued(service)
    await service.until(lambda: [g for g in service.generations() if g.epoch and g.entry])
    other = await service.worker("prefill", claims=False, mangle=nonsense, **OTHER)
    await service.worker("decode", mangle=nonsense, **OTHER)
    other.claims = True
    assert await text_of(call) == TEXT
    assert [(r.epoch, r.num_output_tokens) for r in other.claimed] == [(1, 9)]
    assert await service.metric("request_resubmissions_total", cause="other_weights") == 1


async def test_a_worker_that_the_registry_does_not_show_yet_raises_no_pause(
    service: Cluster,
) -> None:
    """After a restart it may fetch a continuation before the next look, again and again."""
    decode, prefill = service.workers
    dispatcher = service.gateways[0].dispatcher
    call = await requeued(service)
    (generation,) = service.generations()
    for epoch in range(1, 6):
        await service.until(lambda e=epoch: generation.epoch == e and generation.entry)
        now = asyncio.get_running_loop().time()
        dispatcher.on_event(Event(generation.id, epoch, Kind.OWNED, "newcomer"), now)
        pause = generation.send_at - asyncio.get_running_loop().time()
        assert (generation.epoch, generation.fruitless) == (epoch + 1, 0)
        assert 0 < pause <= STRANGER_PAUSE_S
    prefill.claims, decode.step_s = True, 0.0
    assert await text_of(call) == TEXT
    assert await service.metric("request_resubmissions_total", cause="other_weights") == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_weights_that_are_gone_are_waited_for_and_named(
    cluster: Cluster, stream: bool
) -> None:
    gateway = await cluster.gateway(worker_wait_s=0.3)
    first = await cluster.worker("decode", step_s=0.03)
    ask = cluster.events if stream else cluster.post
    call = asyncio.create_task(ask(**FIELDS))
    await started(cluster, 5)
    other = await cluster.worker("decode", mangle=nonsense, **OTHER)
    await first.retire()
    if stream:
        await no_taker(call, "weights")
    else:
        async with asyncio.timeout(20):
            status, body = await call
        assert (status, body["error"]["code"]) == (503, "no_decode_worker")
        assert "weights" in body["error"]["message"]
    assert (other.accepted, gateway.dispatcher.generations) == ([], {})


async def test_without_tokens_any_weights_will_do(cluster: Cluster) -> None:
    """Its prefill worker lives, but nobody is left to whom that one could hand it over."""
    await cluster.gateway(worker_wait_s=0.3)
    first = await cluster.worker("decode")
    prefill = await cluster.worker("prefill", prefill_s=30)
    call = asyncio.create_task(cluster.events(**FIELDS))
    await cluster.until(lambda: prefill.active and cluster.generations()[0].owner)
    prefill.claims = False
    decode = await cluster.worker("decode", **OTHER)
    await first.retire()
    async with asyncio.timeout(20):
        assert await text_of(call) == TEXT
    assert len(decode.accepted) == 1


async def test_a_prefill_worker_without_decode_workers_is_not_waited_for(cluster: Cluster) -> None:
    await cluster.gateway(worker_wait_s=0.3)
    decode = await cluster.worker("decode")
    prefill = await cluster.worker("prefill", prefill_s=30)
    call = asyncio.create_task(cluster.post(**FIELDS))
    await cluster.until(lambda: prefill.active and cluster.generations()[0].owner)
    await decode.retire()
    async with asyncio.timeout(20):
        status, body = await call
    assert (status, body["error"]["code"]) == (503, "no_decode_worker")


async def test_a_worker_that_was_large_enough_is_not_waited_for(cluster: Cluster) -> None:
    await cluster.gateway(worker_wait_s=0.3)
    large = await cluster.worker("decode", step_s=0.03)
    await cluster.worker("decode", max_model_len=50, num_pages=10)
    call = asyncio.create_task(cluster.events(**FIELDS))
    await started(cluster, 15)
    await large.retire()
    await no_taker(call, "at most 50 tokens")


async def test_a_worker_that_is_short_of_memory_is_waited_for(cluster: Cluster) -> None:
    await cluster.gateway(worker_wait_s=0.2)
    first = await cluster.worker("decode", step_s=0.03)
    short = await cluster.worker("decode", stats={"device_health": 2.0})
    call = asyncio.create_task(cluster.events(**FIELDS))
    await started(cluster, 5)
    await first.retire()
    await cluster.until(lambda: cluster.generations()[0].parked)
    await asyncio.sleep(0.8)
    short.stats = {}
    assert await text_of(call) == TEXT
