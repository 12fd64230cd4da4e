"""Connecting to Redis, and the registry of live workers.

Timeouts are set on purpose: a blocking read may wait `max_block_s` on the server, so the socket
timeout is longer than that (redis-py 8 defaults to 5 s, which turns every idle poll into an error).
A command whose reply was lost is not repeated here: XADD is not idempotent, and the caller knows
better. Only a connection that broke before is opened again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from pageferry.kvtransfer.keys import PREFILL_GROUP, Keys
from pageferry.kvtransfer.wire import WireError, WorkerRecord

Client: TypeAlias = Any
"""A `redis.asyncio.Redis`. Untyped on purpose: redis-py's own annotations are unions over sync and
async, bytes and str, which no caller can use without casting every reply."""

CONNECT_TIMEOUT_S = 3.0
REPLY_MARGIN_S = 5.0
"""How long a reply may take beyond the time that the command itself may block."""

TRANSIENT = (RedisError, OSError, TimeoutError)
"""What a client may see while the server restarts, is cut off or is full: wait and try again."""


def connect(url: str, *, max_block_s: float = 5.0) -> Client:
    """A client for `url` whose commands may block up to `max_block_s` seconds on the server.

    No connection is made before the first command. `ValueError` for a malformed URL.
    """
    tcp_only = {} if url.startswith("unix://") else {"socket_keepalive": True}
    return redis.asyncio.Redis.from_url(
        url,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=max_block_s + REPLY_MARGIN_S,
        **tcp_only,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
    )


async def ensure_groups(client: Client, keys: Keys) -> None:
    """Create the prefill queues and their consumer group where they do not exist.

    The group starts at 0: entries that were queued before it existed are still work to do.
    """
    for queue in keys.prefill_queues:
        try:
            await client.xgroup_create(queue, PREFILL_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


async def publish_worker(client: Client, keys: Keys, record: WorkerRecord, lease_s: float) -> None:
    """Renew a worker's lease and publish its record; the lease ends by the server's clock."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.set(keys.worker(record.id), record.to_bytes(), px=max(1, int(lease_s * 1000)))
        pipe.sadd(keys.workers, record.id)
        await pipe.execute()


async def retire_worker(client: Client, keys: Keys, worker_id: str) -> None:
    """Leave the registry now instead of by lapse of the lease."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.delete(keys.worker(worker_id), keys.decode_queue(worker_id))
        pipe.srem(keys.workers, worker_id)
        await pipe.execute()


async def list_workers(client: Client, keys: Keys) -> list[WorkerRecord]:
    """Records of the workers whose lease is running, ordered by id.

    Ids without a lease leave the set. A record that cannot be read is left out: its worker speaks
    another version and cannot be used.
    """
    ids = sorted(i.decode() for i in await client.smembers(keys.workers))
    if not ids:
        return []
    values = await client.mget([keys.worker(i) for i in ids])
    gone = [i for i, value in zip(ids, values, strict=True) if value is None]
    if gone:
        await client.srem(keys.workers, *gone)
    records = []
    for value in values:
        if value is not None:
            try:
                records.append(WorkerRecord.from_bytes(value))
            except WireError:
                continue
    return records
