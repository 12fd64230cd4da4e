"""Notices what has died: workers, other gateways, Redis itself. Runs every third of a lease.

1. Renew our own lease (a thread prolongs it too, see `kvtransfer.heartbeat`, but cannot bring back
   one that has lapsed). The answer tells whether it had lapsed (Redis was restarted or flushed, or
   we were frozen), and whether another server answers (a failover: what the former had accepted
   last may be lost). Then every request is doubted (`Dispatcher.on_possible_loss`).
2. Read the registry. Requests of workers that are gone go to others.
3. Read the consumers of the prefill queues. What a dead consumer had claimed is removed: our own
   requests are resubmitted, those of dead gateways dropped, those of live gateways left to them.
   A consumer is deleted only while nothing is pending under its name, which one script checks and
   does, because XGROUP DELCONSUMER silently drops pending entries.

After Redis was away, nobody's lease says anything until everybody could renew: no deaths are
declared for two leases.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from redis.exceptions import ResponseError

from pageferry.gateway.dispatch import Dispatcher
from pageferry.gateway.fleet import Fleet
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.outbox import RedisHealth
from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.bus import (
    TOKENS_LIFETIME_LEASES,
    TRANSIENT,
    Client,
    ensure_groups,
    left_on_purpose,
    list_workers,
    memory_policy_fault,
    renew_lease,
)
from pageferry.kvtransfer.heartbeat import Heartbeat, Patient
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.wire import Request, WireError, unpack

log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often deadlines are looked at."""
PENDING_PAGE = 100
POLICY_S = 30.0
"""How often the server's memory policy is looked at."""

DELETE_IDLE_CONSUMER = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return 1
end
return 0
"""


class Watcher:
    def __init__(
        self,
        client: Client,
        keys: Keys,
        gateway_id: str,
        settings: GatewaySettings,
        parts: tuple[Dispatcher, Fleet, GatewayMetrics, RedisHealth],
    ) -> None:
        self._client = client
        self._keys = keys
        self._gateway_id = gateway_id
        self._lease_s = settings.lease_s
        self._dispatcher, self._fleet, self._metrics, self._health = parts
        self._loop = asyncio.get_running_loop()
        self._server = ""
        self._policy_due = 0.0
        self._policy_fault = ""
        self._no_deaths_before = 0.0
        self._broken: list[BaseException] = []
        patient = Patient(self._prolong_lease, self._broken.append)
        self._heartbeat = Heartbeat(settings.redis_url, keys, settings.lease_s, patient)
        self.losses = 0
        """How often Redis may have lost our messages; the token reader starts over then."""

    async def run(self) -> None:
        """The task; ends only by cancellation."""
        try:
            await self._watch()
        finally:
            self._heartbeat.stop(wait=False)

    async def _watch(self) -> None:
        due = self._loop.time()
        while True:
            self._heartbeat.say()
            if self._broken:
                raise self._broken[0]
            if self._loop.time() >= due:
                due = self._loop.time() + self._lease_s / 3
                try:
                    await self.look()
                except TRANSIENT as error:
                    self._health.bad("watcher", error)
                    self._no_deaths_before = self._loop.time() + 2 * self._lease_s
            self._dispatcher.tick()
            await asyncio.sleep(min(TICK_S, self._lease_s / 6))

    async def look(self) -> None:
        """One round. `RedisError`, `OSError` or `TimeoutError` when Redis is away."""
        async with asyncio.timeout(max(1.0, self._lease_s)):
            seen_at = self._loop.time()
            records = await list_workers(self._client, self._keys)
            # Later than that look: if Redis was emptied before it, our own lease is gone as well.
            await self._renew_lease()
            if self._loop.time() >= self._policy_due:
                await self._check_policy()
        self._health.good()
        if self._loop.time() < self._no_deaths_before:
            kept = {r.id: r for r in self._fleet.records.values()}
            self._fleet.update(list({**kept, **{r.id: r for r in records}}.values()))
            self._dispatcher.reroute()
            return
        live = {record.id for record in records}
        missing = sorted((self._fleet.records.keys() | self._dispatcher.holders()) - live)
        # Before the fleet forgets them: should Redis fail now, the next look asks again.
        left = await left_on_purpose(self._client, self._keys, missing)
        for record in self._fleet.update(records):
            if record.id not in left:
                log.warning("%s worker %s is gone: its lease lapsed", record.role, record.id)
                self._metrics.count(names.WORKER_DEATHS, 1, record.role)
        self._dispatcher.on_workers_missing(live, seen_at, left)
        async with asyncio.timeout(max(1.0, self._lease_s)):
            await self._sweep_queues(live)
        self._dispatcher.reroute()

    async def _renew_lease(self) -> None:
        keys, own = self._keys, self._gateway_id
        lifetime_ms = int(TOKENS_LIFETIME_LEASES * self._lease_s * 1000)
        renewal = await renew_lease(
            *(self._client, keys.gateway(own), b"1", self._lease_s),
            ("PEXPIRE", keys.tokens(own), lifetime_ms),
        )
        if renewal.lapsed or renewal.server != self._server:
            await ensure_groups(self._client, keys)
            if self._server:
                log.warning(
                    "our lease had lapsed: Redis lost data, or this process stood still"
                    if renewal.lapsed
                    else "Redis is another server now: the last messages may be lost"
                )
                self.losses += 1
                self._health.moves += 1
                self._no_deaths_before = self._loop.time() + 2 * self._lease_s
                self._dispatcher.on_possible_loss()
            self._server = renewal.server

    async def _prolong_lease(self, client: Client) -> None:
        """Runs in the heartbeat's thread."""
        await client.pexpire(self._keys.gateway(self._gateway_id), int(self._lease_s * 1000))

    async def _check_policy(self) -> None:
        """RDS: a server that evicts keys is no place for a queue."""
        self._policy_due = self._loop.time() + POLICY_S
        fault = await memory_policy_fault(self._client)
        if fault and fault != self._policy_fault:
            log.error(fault)
        self._policy_fault = fault

    async def _sweep_queues(self, live: set[str]) -> None:
        queues = self._keys.prefill_queues
        async with self._client.pipeline(transaction=False) as pipe:
            for queue in queues:
                pipe.xinfo_consumers(queue, PREFILL_GROUP)
            replies = await pipe.execute(raise_on_error=False)
        for queue, reply in zip(queues, replies, strict=True):
            if isinstance(reply, ResponseError):  # No such key or group: somebody flushed Redis.
                await ensure_groups(self._client, self._keys)
                continue
            for consumer in reply:
                name = consumer["name"].decode()
                if name in live:
                    continue
                if consumer["pending"]:
                    await self._sweep_consumer(queue, name)
                await self._client.eval(DELETE_IDLE_CONSUMER, 1, queue, PREFILL_GROUP, name)

    async def _sweep_consumer(self, queue: str, consumer: str) -> None:
        """Settle up to `PENDING_PAGE` entries that a dead consumer had claimed.

        Few round trips, so that a slow Redis does not hold up the next look."""
        pending = await self._client.xpending_range(
            queue, PREFILL_GROUP, min="-", max="+", count=PENDING_PAGE, consumername=consumer
        )
        ids = [item["message_id"] for item in pending]
        async with self._client.pipeline(transaction=False) as pipe:
            for entry_id in ids:
                pipe.xrange(queue, min=entry_id, max=entry_id)
            bodies = await pipe.execute()
        requests = {
            entry_id: self._read_request(entry_id, found[0][1] if found else None)
            for entry_id, found in zip(ids, bodies, strict=True)
        }
        others = await self._living({r.gateway for r in requests.values() if r is not None})
        settled = [i for i, r in requests.items() if r is None or r.gateway not in others]
        if not settled:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.xack(queue, PREFILL_GROUP, *settled)
            pipe.xdel(queue, *settled)
            await pipe.execute()
        for entry_id in settled:
            request = requests[entry_id]
            if request is not None and request.gateway == self._gateway_id:
                self._dispatcher.on_claim_lost(request.request_id, request.epoch)

    async def _living(self, gateways: set[str]) -> set[str]:
        """Which of these are other gateways that live: they settle their entries themselves."""
        others = sorted(gateways - {self._gateway_id})
        if not others:
            return set()
        values = await self._client.mget([self._keys.gateway(g) for g in others])
        return {g for g, value in zip(others, values, strict=True) if value is not None}

    @staticmethod
    def _read_request(entry_id: bytes, fields: dict[bytes, Any] | None) -> Request | None:
        """The request of an entry; None when it was deleted or cannot be read."""
        if fields is None:
            return None
        try:
            return Request.from_dict(unpack(fields[FIELD]))
        except (WireError, KeyError) as error:
            log.warning("unreadable queue entry %s removed: %s", entry_id.decode(), error)
            return None
