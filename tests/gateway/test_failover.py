"""Workers die, lie and give up; gateways die; Redis restarts: the client's text stays exact."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams, pack, unpack
from tests.gateway.fake_worker import CONTEXT
from tests.gateway.streams import FIELDS, PROMPT, TEXT, once, started, text_of

Cluster = Any


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


async def test_bystanders_of_a_poisonous_request_are_not_condemned_with_it(
    cluster: Cluster,
) -> None:
    """One batch dies with two workers; of it only the request that kills the third one ends."""
    await cluster.gateway()
    await cluster.worker("decode")
    victims = [
        await cluster.worker("prefill", claims=False, prefill_s=0.2, name=f"victim-{i}")
        for i in range(4)
    ]
    await asyncio.sleep(0.1)  # until nobody reads the queues any more
    calls = [asyncio.create_task(cluster.post(**FIELDS, seed=seed)) for seed in (1, 2, 666, 3)]
    await cluster.until(lambda: len([g for g in cluster.generations() if g.entry]) == 4)
    for victim in victims[:3]:
        victim.claims = True
        await cluster.until(lambda victim=victim: victim.dead, 20)
    assert [len(victim.claimed) for victim in victims[:2]] == [4, 4]
    victims[3].claims = True
    answers = await asyncio.gather(*calls)
    assert [status for status, _ in answers] == [200, 200, 500, 200]
    assert answers[2][1]["error"]["code"] == "request_failed"
    texts = [body["choices"][0]["text"] for status, body in answers if status == 200]
    assert texts == [TEXT] * 3
    assert await victims[0].client.xlen(victims[0].keys.dead) == 1


async def test_a_suspect_that_nobody_can_take_gives_way_to_the_next(cluster: Cluster) -> None:
    gateway = await cluster.gateway(worker_wait_s=60)
    large = await cluster.worker("decode", step_s=30)
    await cluster.worker("decode", max_model_len=80, num_pages=10)
    calls = []
    for prompt in (PROMPT * 2, PROMPT):  # the small worker holds only the second
        fields = {"prompt": prompt, "max_tokens": 30}
        calls.append(asyncio.create_task(cluster.events(**fields)))
        await cluster.until(lambda: len(cluster.generations()) == len(calls))
        await started(cluster, 1)
    suspects = cluster.generations()
    for suspect in suspects * 2:
        gateway.dispatcher.resubmit(suspect, "worker_death")
    await cluster.until(lambda: not suspects[0].parked)
    assert [s.is_suspect and s.parked for s in suspects] == [False, True]
    await large.retire()
    async with asyncio.timeout(15):
        assert await text_of(calls[1]) == PROMPT[:30]
    assert suspects[0].parked
    await cluster.worker("decode")
    assert await text_of(calls[0]) == PROMPT[:30]


async def test_deaths_count_only_in_a_row(service: Cluster) -> None:
    """A long stream outlives any number of workers, as long as each gets it on."""
    service.workers[0].step_s = 0.02
    call = asyncio.create_task(service.events(prompt=PROMPT, max_tokens=100))
    for i in range(3):
        await started(service, 5 + 15 * i)
        await service.until(lambda: service.generations()[0].owner)
        holder = next(w for w in service.workers if w.id == service.generations()[0].owner)
        await service.worker("decode", f"next-{i}", step_s=0.02)
        await holder.die()
        (generation,) = service.generations()
        epoch = generation.epoch
        await service.until(lambda g=generation, e=epoch: g.epoch > e)
    assert await text_of(call) == (PROMPT * 3)[:100]


async def test_a_draining_workers_stream_outlives_the_wait_for_another(cluster: Cluster) -> None:
    gateway = await cluster.gateway(worker_wait_s=0.3)
    worker = await cluster.worker("decode", step_s=0.03)
    call = asyncio.create_task(cluster.events(**FIELDS))
    await started(cluster, 3)
    worker.state = "draining"
    await cluster.until(lambda: not gateway.fleet.has_decode)
    assert await text_of(call) == TEXT
    status, body = await cluster.post(prompt="a")
    assert (status, body["error"]["code"]) == (503, "no_decode_worker")


async def test_a_slow_worker_that_lives_keeps_its_claim(service: Cluster) -> None:
    prefill = service.workers[1]
    prefill.prefill_s = 3 * service.gateways[0].settings.lease_s
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: prefill.active)
    spare = await service.worker("prefill", "spare")
    assert await text_of(call) == TEXT
    assert (len(prefill.claimed), len(spare.claimed)) == (1, 0)


async def test_a_look_at_the_registry_does_not_cut_a_pause_short(service: Cluster) -> None:
    service.workers[1].claims = False
    await asyncio.sleep(0.1)
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: [g for g in service.generations() if g.entry])
    (generation,) = service.generations()
    dispatcher = service.gateways[0].dispatcher
    for _ in range(4):
        dispatcher.resubmit(generation, "requeue")
    dispatcher.reroute()
    assert generation.parked
    service.workers[1].claims = True
    assert await text_of(call) == TEXT
    assert [r.epoch for r in service.workers[1].claimed] == [4]


async def test_what_some_prefill_worker_cannot_hold_goes_to_a_decode_worker(
    cluster: Cluster,
) -> None:
    await cluster.gateway()
    await cluster.worker("decode")
    workers = [await cluster.worker("prefill", max_model_len=n) for n in (20, CONTEXT)]
    status, body = await cluster.post(**FIELDS)
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
    assert not [r for w in workers for r in w.claimed]
    await cluster.post(prompt="abc", max_tokens=3)
    assert len([r for w in workers for r in w.claimed]) == 1


async def test_workers_that_are_short_of_memory_get_no_prompts(cluster: Cluster) -> None:
    await cluster.gateway()
    short = await cluster.worker("decode", stats={"device_health": 2.0}, num_pages=2000)
    await cluster.until(lambda: cluster.gateways[0].fleet.has_decode)
    status, body = await cluster.post(**FIELDS)
    assert status == 503
    assert "short of memory" in body["error"]["message"]
    roomy = await cluster.worker("decode", stats={"device_health": 1.0})
    assert (await cluster.post(**FIELDS))[0] == 200
    assert (len(short.accepted), len(roomy.accepted)) == (0, 1)


async def test_nothing_is_queued_while_all_decode_workers_are_short_of_memory(
    cluster: Cluster,
) -> None:
    await cluster.gateway()
    await cluster.worker("prefill")
    short = await cluster.worker("decode", stats={"device_health": 2.0})
    await cluster.until(lambda: cluster.gateways[0].fleet.has_prefill)
    for status, body in (await cluster.post(**FIELDS), await cluster.get("/ready")):
        assert status == 503
        assert "short of memory" in body["error"]["message"]
    short.stats = {}
    await cluster.until(lambda: not cluster.gateways[0].fleet.why_not_ready())
    assert (await cluster.post(**FIELDS))[0] == 200


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
