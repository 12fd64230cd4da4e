"""Notices what has died: workers, other gateways, Redis itself. Runs every third of a lease.

1. Renew our own lease. The server's answer tells whether it had lapsed; if so, Redis was restarted
   or flushed, or we were frozen: every request is doubted (`Dispatcher.on_possible_loss`).
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
from pageferry.kvtransfer.bus import TRANSIENT, Client, ensure_groups, list_workers
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.wire import Request, WireError, unpack

log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often deadlines are looked at."""
TOKENS_LIFETIME_LEASES = 20
"""A gateway's token stream expires this many leases after its last sign of life."""
PENDING_PAGE = 100

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
        lease_s: float,
        parts: tuple[Dispatcher, Fleet, GatewayMetrics, RedisHealth],
    ) -> None:
        self._client = client
        self._keys = keys
        self._gateway_id = gateway_id
        self._lease_s = lease_s
        self._dispatcher, self._fleet, self._metrics, self._health = parts
        self._loop = asyncio.get_running_loop()
        self._announced = False
        self._no_deaths_before = 0.0
        self.losses = 0
        """How often Redis may have lost our messages; the token reader starts over then."""

    async def run(self) -> None:
        """The task; ends only by cancellation."""
        due = self._loop.time()
        while True:
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
            await self._renew_lease()
            seen_at = self._loop.time()
            records = await list_workers(self._client, self._keys)
        self._health.good()
        if self._loop.time() < self._no_deaths_before:
            kept = {r.id: r for r in self._fleet.records.values()}
            self._fleet.update(list({**kept, **{r.id: r for r in records}}.values()))
            self._dispatcher.reroute()
            return
        gone = self._fleet.update(records)
        draining = {record.id for record in gone if record.state == "draining"}
        for record in gone:
            if record.id not in draining:
                log.warning("%s worker %s is gone: its lease lapsed", record.role, record.id)
                self._metrics.count(names.WORKER_DEATHS, 1, record.role)
        live = {record.id for record in records}
        self._dispatcher.on_workers_missing(live, seen_at, draining)
        async with asyncio.timeout(max(1.0, self._lease_s)):
            await self._sweep_queues(live)
        self._dispatcher.reroute()

    async def _renew_lease(self) -> None:
        lease_ms = max(1, int(self._lease_s * 1000))
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._keys.gateway(self._gateway_id), b"1", px=lease_ms, get=True)
            pipe.pexpire(self._keys.tokens(self._gateway_id), TOKENS_LIFETIME_LEASES * lease_ms)
            before, _ = await pipe.execute()
        if before is None:
            await ensure_groups(self._client, self._keys)
            if self._announced:
                log.warning("our lease had lapsed: Redis lost data, or this process stood still")
                self.losses += 1
                self._no_deaths_before = self._loop.time() + 2 * self._lease_s
                self._dispatcher.on_possible_loss()
        self._announced = True

    async def _sweep_queues(self, live: set[str]) -> None:
        for queue in self._keys.prefill_queues:
            try:
                consumers = await self._client.xinfo_consumers(queue, PREFILL_GROUP)
            except ResponseError:  # No such key or group: somebody flushed Redis.
                await ensure_groups(self._client, self._keys)
                continue
            for consumer in consumers:
                name = consumer["name"].decode()
                if name in live:
                    continue
                if consumer["pending"]:
                    await self._sweep_consumer(queue, name)
                await self._client.eval(DELETE_IDLE_CONSUMER, 1, queue, PREFILL_GROUP, name)

    async def _sweep_consumer(self, queue: str, consumer: str) -> None:
        """Settle up to `PENDING_PAGE` entries that a dead consumer had claimed."""
        pending = await self._client.xpending_range(
            queue, PREFILL_GROUP, min="-", max="+", count=PENDING_PAGE, consumername=consumer
        )
        for item in pending:
            entry_id = item["message_id"]
            found = await self._client.xrange(queue, min=entry_id, max=entry_id)
            request = self._read_request(entry_id, found[0][1] if found else None)
            if request is not None and await self._belongs_to_another(request):
                continue
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xack(queue, PREFILL_GROUP, entry_id)
                pipe.xdel(queue, entry_id)
                await pipe.execute()
            if request is not None and request.gateway == self._gateway_id:
                self._dispatcher.on_claim_lost(request.request_id, request.epoch)

    async def _belongs_to_another(self, request: Request) -> bool:
        """Another gateway that lives: it will settle its entry itself."""
        if request.gateway == self._gateway_id:
            return False
        return bool(await self._client.exists(self._keys.gateway(request.gateway)))

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
