"""How the outbox puts jobs together into round trips."""

import asyncio

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
