"""Connecting to Redis, leases, and the registry of live workers.

Timeouts are set on purpose: a blocking read may wait `max_block_s` on the server, so the socket
timeout is longer than that (redis-py 8 defaults to 5 s, which turns every idle poll into an error).
A command whose reply was lost is not repeated here: XADD is not idempotent, and the caller knows
better. Only a connection that broke before is opened again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import OutOfMemoryError as RedisFull

from pageferry.kvtransfer import redis_url
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.redis_servers import connection_arguments
from pageferry.kvtransfer.wire import WireError, WorkerRecord

Client: TypeAlias = Any
"""A `redis.asyncio.Redis`. Untyped on purpose: redis-py's own annotations are unions over sync and
async, bytes and str, which no caller can use without casting every reply."""

MAX_CONTROL_ENTRIES = 10_000
TOKENS_LIFETIME_LEASES = 20
"""A gateway's token stream expires this many leases after its last sign of life."""
LEFT_MS = 60_000
"""How long it is known that a worker left on purpose; gateways look every third of a lease."""
CONNECT_TIMEOUT_S = 3.0
REPLY_MARGIN_S = 5.0
"""How long a reply may take beyond the time that the command itself may block."""

TRANSIENT = (RedisError, OSError, TimeoutError)
"""What a client may see while the server restarts, is cut off or is full: wait and try again."""

DENIED = (AuthenticationError, NoPermissionError)
"""Among these: what an operator has to mend, in the URL or in the server's users."""

UNABLE = ("OOM", "MISCONF", "NOREPLICAS", "TRYAGAIN", "ASK", "BUSY", "UNBLOCKED")
"""First words of refusals that are about the server's state, not about the command."""
_FIRST_WORD = re.compile(r"(?:Command # .* caused error: \(['\"])?(\w*).*", re.DOTALL)
"""redis-py puts other words before it when the command was part of a transaction."""


def is_state(error: Exception) -> bool:
    """Whether Redis refused for what it is going through: the same command will do later."""
    if isinstance(error, RedisFull):
        return True
    if isinstance(error, DENIED):
        return False
    word = getattr(error, "status_code", None) or _FIRST_WORD.sub(r"\1", str(error), count=1)
    return not isinstance(error, ResponseError) or word in UNABLE


def connect(
    url: str,
    keys: Keys | None = None,
    *,
    max_block_s: float = 5.0,
    reply_s: float = REPLY_MARGIN_S,
) -> Client:
    """A client for `url` (see `redis_url`) and the commands on `keys`.

    Commands may block up to `max_block_s` seconds on the server; a reply that is `reply_s` seconds
    late is an error. Without `keys`, a cluster client reaches some node, which will do for PING.
    No connection is made before the first command. `ValueError` for a malformed URL.
    """
    found = redis_url.parse(url)
    common: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, reply_s),
        "socket_timeout": max_block_s + reply_s,
        "health_check_interval": 0,
        "retry": Retry(NoBackoff(), 0),
    }
    if found.kind != "unix":
        common["socket_keepalive"] = True
    arguments = connection_arguments(found, keys.control if keys is not None else "")
    pool = redis.asyncio.ConnectionPool(**common, **arguments)
    return redis.asyncio.Redis.from_pool(pool)


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


@dataclass(frozen=True)
class Renewal:
    lapsed: bool
    """The lease had ended: Redis lost it, or it was not renewed in time."""
    server: str
    """Which server process answered. Another one may lack what the former had accepted."""


async def renew_lease(
    client: Client, key: str, value: bytes, lease_s: float, *more: tuple[str | int, ...]
) -> Renewal:
    """Renew a lease, which ends by the server's clock; `more` commands go along.

    A full server takes no new value, but the old one lives on: nobody dies of full memory.
    """
    lease_ms = max(1, int(lease_s * 1000))
    async with client.pipeline(transaction=False) as pipe:
        pipe.set(key, value, px=lease_ms, get=True)
        pipe.pexpire(key, lease_ms)
        pipe.info("server")
        for command in more:
            pipe.execute_command(*command)
        before, lives, info, *others = await pipe.execute(raise_on_error=False)
    for reply in (before, lives, info, *others):
        if isinstance(reply, Exception) and not (isinstance(reply, RedisFull) and lives):
            raise reply
    return Renewal(before is None, info["run_id"])


async def publish_worker(
    client: Client, keys: Keys, record: WorkerRecord, lease_s: float
) -> Renewal:
    """Renew a worker's lease and publish its record."""
    enlist = ("SADD", keys.workers, record.id)
    return await renew_lease(client, keys.worker(record.id), record.to_bytes(), lease_s, enlist)


async def memory_policy_fault(client: Client) -> str:
    """Empty, or why the server may throw away what we have stored there."""
    memory = await client.info("memory")
    policy = memory.get("maxmemory_policy", "noeviction")
    if not memory.get("maxmemory") or policy == "noeviction":
        return ""
    return (
        f"Redis evicts keys when its memory is full (maxmemory-policy {policy}): queued requests "
        "and leases may vanish at any time. Set maxmemory-policy to noeviction."
    )


async def retire_worker(
    client: Client, keys: Keys, worker_id: str, *, on_purpose: bool = True
) -> None:
    """Leave the registry now instead of by lapse of the lease; `on_purpose`: it is no death."""
    async with client.pipeline(transaction=False) as pipe:
        if on_purpose:
            pipe.set(keys.left(worker_id), b"1", px=LEFT_MS)
        pipe.delete(keys.worker(worker_id), keys.decode_queue(worker_id))
        pipe.srem(keys.workers, worker_id)
        await pipe.execute()


async def left_on_purpose(client: Client, keys: Keys, worker_ids: Sequence[str]) -> set[str]:
    """Which of these workers, no longer registered, have left in good order."""
    if not worker_ids:
        return set()
    values = await client.mget([keys.left(i) for i in worker_ids])
    return {i for i, value in zip(worker_ids, values, strict=True) if value is not None}


def control_command(keys: Keys, message: bytes) -> tuple[str | bytes | int, ...]:
    """The command that says something to all workers: `message` is from `wire.pack_control`."""
    return ("XADD", keys.control, "MAXLEN", "~", MAX_CONTROL_ENTRIES, "*", FIELD, message)


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
