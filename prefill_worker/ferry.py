"""The decode workers as a prefill worker sees them: connections, ledgers, who gets a request.

Every decode worker in the registry is connected to once per incarnation. One that refuses (other
model, layout, key) is named in the log and the registry and not asked again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pageferry.kvtransfer.bus import Client, list_workers
from pageferry.kvtransfer.handoff import (
    NEVER,
    STALE_EPOCH,
    HandoffDenied,
    HandoffFailed,
    HandoffRefused,
    Identity,
)
from pageferry.kvtransfer.handoff_client import ClientOptions, Handoff, HandoffClient
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.memory import PageStore
from pageferry.kvtransfer.wire import WorkerRecord
from pageferry.prefill_worker.job import Job

log = logging.getLogger(__name__)

REFRESH_S = 0.25
RETRY_S = 0.03
"""Pause after every candidate denied; pages come back once per decode step at the earliest."""

MAX_REFUSALS = 16
MAX_AFFINITIES = 4096


@dataclass
class Peer:
    """One decode worker: its latest record and our connection to it."""

    record: WorkerRecord
    client: HandoffClient

    @property
    def is_usable(self) -> bool:
        return self.client.alive and self.record.state == "ready"


class Ferry:
    """Chooses decode workers and books pages there. Event loop only."""

    def __init__(
        self, identity: Identity, memory: PageStore, keys: Keys, options: ClientOptions
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.refusals: collections.deque[str] = collections.deque(maxlen=MAX_REFUSALS)
        self._identity = identity
        self._memory = memory
        self._keys = keys
        self._options = options
        self._refused: set[str] = set()
        self._unreachable: set[str] = set()
        """Said so in the log already."""
        self._affinity: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._turn = asyncio.Lock()

    async def refresh(self, client: Client) -> None:
        """Follow the registry: connect to new decode workers, leave those that are gone."""
        records = {r.id: r for r in await list_workers(client, self._keys) if r.role == "decode"}
        self._refused &= records.keys()
        self._unreachable &= records.keys()
        for worker_id in list(self.peers):
            if worker_id not in records or not self.peers[worker_id].client.alive:
                gone = self.peers.pop(worker_id)
                await asyncio.to_thread(gone.client.close)
        for record in records.values():
            if record.id in self.peers:
                self.peers[record.id].record = record
            elif record.id not in self._refused:
                await self._connect(record)
        await asyncio.sleep(REFRESH_S)

    async def _connect(self, record: WorkerRecord) -> None:
        client = HandoffClient(self._identity, record, self._memory, self._options)
        try:
            await asyncio.to_thread(client.connect)
        except HandoffRefused as error:
            self._refused.add(record.id)
            self.refusals.append(f"{record.id}: {error}")
            log.error("%s refused: %s", record.id, error)
        except (HandoffFailed, OSError) as error:
            if record.id not in self._unreachable:
                log.warning("cannot reach %s, still trying: %s", record.id, error)
            self._unreachable.add(record.id)
        else:
            self._unreachable.discard(record.id)
            self.peers[record.id] = Peer(record, client)
            log.info("connected to %s over %s", record.id, client.transport)

    @property
    def has_room(self) -> bool:
        """Whether some usable decode worker's ledger shows room; a hint, its answer decides."""
        return any(p.is_usable and p.record.ledger.available > 1 for p in self.peers.values())

    async def book(self, job: Job) -> None:
        """Set `job.handoff`, asking candidates in turn until one grants; waits while they are full.

        Jobs book one after another, in order of arrival, so a large one is not overtaken for ever.
        `HandoffFailed` when waiting is in vain: every candidate says so, or the time to live ends.
        """
        async with _time_to_live(job), self._turn:
            while True:
                candidates, hopeless = self._candidates(job), 0
                for peer in candidates:
                    try:
                        handoff = await self._reserve(peer, job)
                    except HandoffDenied as denial:
                        log.debug("%s denied: %s", peer.record.id, denial)
                        if denial.reason.startswith(STALE_EPOCH):
                            raise HandoffFailed(denial.reason) from denial
                        hopeless += denial.reason.startswith(NEVER)
                        continue
                    except HandoffFailed as error:
                        log.warning("reserving on %s failed: %s", peer.record.id, error)
                        continue
                    job.handoff, job.decode_worker = handoff, peer.record.id
                    self._remember(job)
                    return
                if candidates and hopeless == len(candidates):
                    raise HandoffFailed("no decode worker is large enough")
                await asyncio.sleep(RETRY_S)

    async def _reserve(self, peer: Peer, job: Job) -> Handoff:
        """RESERVE on one peer. When cancelled, a grant that still comes is given back."""
        answer = peer.client.reserve(job.request, job.hashes)
        waiting = asyncio.wrap_future(answer)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(_return_grant)
            raise

    def _candidates(self, job: Job) -> list[Peer]:
        """Usable peers: those that hold more of the prefix first, then those with more room."""
        held: collections.Counter[str] = collections.Counter()
        for page_hash in job.hashes:
            worker_id = self._affinity.get(page_hash)
            if worker_id is None:
                break
            held[worker_id] += 1
        usable = [p for p in self.peers.values() if p.is_usable]
        return sorted(
            usable, key=lambda p: (-held[p.record.id], -p.record.ledger.available, p.record.id)
        )

    def _remember(self, job: Job) -> None:
        for page_hash in job.hashes:
            self._affinity.pop(page_hash, None)
            self._affinity[page_hash] = job.decode_worker
        while len(self._affinity) > MAX_AFFINITIES:
            self._affinity.popitem(last=False)

    async def close(self) -> None:
        for peer in self.peers.values():
            await asyncio.to_thread(peer.client.close)

    def stats(self) -> dict[str, float]:
        """Counters of all connections, summed; ratios are averaged."""
        each = [p.client.stats() for p in self.peers.values()]
        names = {name for stats in each for name in stats}
        total = {}
        for name in names:
            values = [stats[name] for stats in each if name in stats]
            is_ratio = "ratio" in name or "gb_per_s" in name
            total[name] = sum(values) / len(values) if is_ratio else sum(values)
        return total


@contextlib.asynccontextmanager
async def _time_to_live(job: Job) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(job.request.ttl_ms / 1000):
            yield
    except TimeoutError as error:
        raise HandoffFailed("the request's time to live ended") from error


def _return_grant(answer: asyncio.Future[Handoff]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        answer.result().cancel("no longer wanted")
