"""Taking requests from the prefill queues, and settling them.

1. read: new entries of one class; which class goes first is for `Turns` to say.
2. judge: nobody waits any more for a request whose gateway is gone or whose time to live passed in
   the queue. Such an entry is settled and never computed.
3. settle: acknowledged and deleted, when its job has ended or is somebody else's.

An entry stays pending under our name from 1 to 3: while we live nobody takes it from us, however
slow we are; when our lease lapses, the gateways settle it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pageferry.kvtransfer.bus import TRANSIENT, Client
from pageferry.kvtransfer.fair_share import Turns
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.retries import Outage
from pageferry.kvtransfer.wire import Request, WireError, unpack
from pageferry.kvtransfer.worker_bus import BLOCK_S

log = logging.getLogger(__name__)

RECOVER_S = 5.0
"""How often our own pending entries are compared with our jobs."""
MAX_PENDING = 1000
MAX_REFUSALS = 60
"""Times, about a second apart, that Redis may refuse to delete an entry. One that nobody can delete
must not be computed again and again: the worker ends and says why."""

Place = tuple[str, bytes]
"""Queue and entry id."""


@dataclass(frozen=True)
class Claim:
    """An entry that is ours."""

    queue: str
    entry_id: bytes
    request: Request
    """With the time to live that is left."""
    expired: bool = False
    """It waited too long. Only its gateway knows for sure (Redis' clock may have jumped): it is
    told, and sends again what it still wants."""


class Claims:
    """One worker's side of the prefill queues. Event loop only."""

    def __init__(self, client: Client, keys: Keys, worker_id: str, lease_s: float) -> None:
        self._client = client
        self._keys = keys
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._turns = Turns(keys.prefill_queues)
        self._loop = asyncio.get_running_loop()
        self._recover_at = 0.0
        self._doubted: set[Place] = set()
        """Entries whose gateway had no lease when we looked. Redis may have been away for longer
        than a lease: only if it has none the next time either, it is gone."""

    async def read(self, room: int) -> list[Claim]:
        """Up to `room` new requests of one class; waits up to `BLOCK_S` when there are none."""
        for queue, most in self._turns.order(room):
            found = await self._read({queue: ">"}, most, None)
            self._turns.took(queue, len(found))
            if found:
                return await self._judge(found)
        found = await self._read(
            dict.fromkeys(self._keys.prefill_queues, ">"), 1, int(BLOCK_S * 1000)
        )
        return await self._judge(found)

    async def recover(self, known: Iterable[Place]) -> list[Claim]:
        """What is ours and not `known`: it came in a reply that got lost, or was in doubt."""
        if self._loop.time() < self._recover_at:
            return []
        self._recover_at = self._loop.time() + RECOVER_S
        known = set(known)  # before we wait: what ends meanwhile was known too
        found = []
        for queue in self._keys.prefill_queues:
            found += await self._read({queue: "0"}, MAX_PENDING, None)
        return await self._judge([entry for entry in found if entry[:2] not in known])

    async def settle(self, queue: str, entry_id: bytes) -> None:
        """Delete an entry, however long Redis is away; deleting twice is harmless.

        `RuntimeError`, which ends the worker, when Redis keeps refusing.
        """
        outage = Outage("ack")
        while True:
            try:
                async with self._client.pipeline(transaction=True) as pipe:
                    pipe.xack(queue, PREFILL_GROUP, entry_id)
                    pipe.xdel(queue, entry_id)
                    await pipe.execute()
                outage.over()
                return
            except TRANSIENT as error:
                await outage.wait(error)
                if outage.refusals >= MAX_REFUSALS:
                    raise RuntimeError(
                        f"Redis refuses to delete from {queue} ({type(error).__name__}: {error}); "
                        "mend the user or password of --redis-url, or what is stored there"
                    ) from error

    async def _read(
        self, streams: dict[str, str], count: int, block_ms: int | None
    ) -> list[tuple[str, bytes, Any]]:
        reply = await self._client.xreadgroup(
            PREFILL_GROUP, self._worker_id, streams, count=max(1, count), block=block_ms
        )
        return [
            (queue.decode(), entry_id, fields)
            for queue, entries in reply or ()
            for entry_id, fields in entries
        ]

    async def _judge(self, entries: list[tuple[str, bytes, Any]]) -> list[Claim]:
        claims = []
        for queue, entry_id, fields in entries:
            try:
                claims.append(Claim(queue, entry_id, Request.from_dict(unpack(fields[FIELD]))))
            except (WireError, KeyError, TypeError) as error:  # TypeError: deleted meanwhile
                log.warning("queue entry %s ignored: %s", entry_id.decode(), error)
                self._doubted.discard((queue, entry_id))
                await self.settle(queue, entry_id)
        if not claims:
            return []
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.mget([self._keys.gateway(claim.request.gateway) for claim in claims])
            pipe.time()
            leases, (seconds, microseconds) = await pipe.execute()
        now_ms = seconds * 1000 + microseconds // 1000
        wanted = []
        for claim, lease in zip(claims, leases, strict=True):
            if lease is not None:
                self._doubted.discard((claim.queue, claim.entry_id))
                wanted.append(_aged(claim, now_ms))
            else:
                await self._doubt(claim)
        return wanted

    async def _doubt(self, claim: Claim) -> None:
        """Its gateway has no lease: look again when a living one would have renewed it."""
        place = (claim.queue, claim.entry_id)
        if place in self._doubted:
            self._doubted.remove(place)
            log.info("%s: nobody waits for it", claim.request.request_id)
            await self.settle(*place)
        else:
            self._doubted.add(place)
            self._recover_at = min(self._recover_at, self._loop.time() + self._lease_s / 2)


def _aged(claim: Claim, now_ms: int) -> Claim:
    """The claim with what is left of its time to live by the server's clock."""
    queued_ms = int(claim.entry_id.partition(b"-")[0])
    left_ms = claim.request.ttl_ms - max(0, now_ms - queued_ms)
    request = dataclasses.replace(claim.request, ttl_ms=max(1, left_ms))
    return Claim(claim.queue, claim.entry_id, request, left_ms <= 0)
