"""How the outbox puts jobs together into round trips."""

import asyncio

import pytest

from pageferry.gateway import outbox as outbox_module
from pageferry.gateway.outbox import MAX_BATCH, MAX_BATCH_BYTES, Job, Outbox, RedisHealth
from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.tasks import end_tasks


async def test_large_jobs_do_not_travel_together(redis_url: str) -> None:
    client = connect(redis_url, max_block_s=1)
    outbox = Outbox(client, RedisHealth())
    large = b"x" * (MAX_BATCH_BYTES // 3)
    for _ in range(5):
        outbox.put(Job([("XADD", "large", "*", "m", large)]))
    outbox.put(Job([("XADD", "large", "*", "m", b"x" * (2 * MAX_BATCH_BYTES))]))
    for _ in range(MAX_BATCH + 1):
        outbox.put(Job([("XADD", "small", "*", "m", b"y")]))
    outbox.put(Job([("XADD", "small", "*", "m", b"unwanted")], wanted=False))
    sizes = []
    while batch := outbox._next_batch():
        sizes.append(len(batch))
    assert sizes == [3, 2, 1, MAX_BATCH, 1]
    await client.aclose()


async def test_all_jobs_arrive_in_order(redis_url: str) -> None:
    client = connect(redis_url, max_block_s=1)
    outbox = Outbox(client, RedisHealth())
    sent = [bytes([65 + k]) * (MAX_BATCH_BYTES // 4) for k in range(9)]
    for value in sent:
        outbox.put(Job([("XADD", "s", "*", "m", value)]))
    task = asyncio.create_task(outbox.run())
    await outbox.flushed()
    entries = await client.xrange("s")
    assert [fields[b"m"] for _, fields in entries] == sent
    await end_tasks([task])
    await client.aclose()


async def test_a_refused_command_is_given_up_and_a_full_server_is_waited_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_REFUSALS", 2)
    monkeypatch.setattr(outbox_module, "MAX_PAUSE_S", 0.01)
    client = connect(redis_url, max_block_s=1)
    outbox = Outbox(client, RedisHealth())
    outcomes: dict[str, Exception | None] = {}
    await client.set("text", b"no stream")
    await client.config_set("maxmemory", "1")
    try:
        for key in ("text", "stream"):
            add = [("XADD", key, "*", "m", b"x")]
            outbox.put(Job(add, lambda _, error, key=key: outcomes.update({key: error}), keep=True))
        task = asyncio.create_task(outbox.run())
        await asyncio.sleep(0.3)
        assert outcomes == {}, "a full server was taken for a refusal"
    finally:
        await client.config_set("maxmemory", "0")
    async with asyncio.timeout(10):
        await outbox.flushed()
    assert outcomes["stream"] is None
    assert "WRONGTYPE" in str(outcomes["text"])
    assert await client.xlen("stream") == 1
    await end_tasks([task])
    await client.aclose()


async def test_what_waits_for_redis_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_JOBS", 3)
    client = connect("unix:///nowhere.sock")
    outbox = Outbox(client, RedisHealth())
    lost: list[int] = []
    for i in range(5):
        outbox.put(Job([("PING",)], lambda _, error, i=i: lost.append(i)))
    assert lost == [0, 1]
    await client.aclose()
