"""The decode workers as a writer sees them: connections, ledgers, who gets a request.

Writers are prefill workers, and decode workers that drain. Every other decode worker in the
registry is connected to once per incarnation. One that refuses (other model, layout, key) is named
in the log and the registry and left alone for a while. Dialling and hanging up go on beside
following the registry: a worker that does not answer delays nobody else.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

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
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.transfer_stats import Tally, figures
from pageferry.kvtransfer.wire import Request, WorkerRecord

log = logging.getLogger(__name__)

REFRESH_S = 0.25
RETRY_S = 0.03
"""Pause after every candidate denied; pages come back once per decode step at the earliest."""

MAX_REFUSALS = 16
REFUSED_S = 30.0
"""Then it is tried again: bytes may have been damaged on the way, or a certificate been renewed."""
MAX_DIALLERS = 16
"""Threads for connecting and closing; each may have to wait for a worker that does not answer."""
MAX_AFFINITIES = 4096


class Cargo(Protocol):
    """What is booked for. `handoff` and `decode_worker` are set by booking."""

    request: Request
    hashes: list[bytes]
    """Prefix hashes of the request's full pages."""
    handoff: Handoff | None
    decode_worker: str


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
        self.dialling: set[str] = set()
        """Ids of workers that are being connected to."""
        self.refusals: collections.deque[str] = collections.deque(maxlen=MAX_REFUSALS)
        self._identity = identity
        self._memory = memory
        self._keys = keys
        self._options = options
        self._refused: dict[str, float] = {}
        """Ids of workers that were refused, or refused us, and the time until which that stands."""
        self._unreachable: set[str] = set()
        """Said so in the log already."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(MAX_DIALLERS, "ferry")
        self._past_counts: collections.Counter[str] = collections.Counter()
        self._past_tallies: dict[str, Tally] = {}
        """Of connections that have ended: counters never go back."""
        self._affinity: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._turn = asyncio.Lock()
        self._is_closed = False

    async def refresh(self, client: Client) -> None:
        """Follow the registry: connect to new decode workers, leave those that are gone."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        own = self._identity.worker_id
        workers = await list_workers(client, self._keys)
        records = {r.id: r for r in workers if r.role == "decode" and r.id != own}
        now = asyncio.get_running_loop().time()
        self._refused = {i: t for i, t in self._refused.items() if i in records and now < t}
        self._unreachable &= records.keys()
        for worker_id in list(self.peers):
            if worker_id not in records or not self.peers[worker_id].client.alive:
                gone = self.peers.pop(worker_id).client
                self._add(gone, self._past_counts, self._past_tallies)
                self._start(self._in_thread(gone.close))
        for record in records.values():
            if record.id in self.peers:
                self.peers[record.id].record = record
            elif record.id not in self._refused and record.id not in self.dialling:
                self.dialling.add(record.id)
                self._start(self._connect(record))
        await asyncio.sleep(REFRESH_S)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _connect(self, record: WorkerRecord) -> None:
        client = HandoffClient(self._identity, record, self._memory, self._options)
        try:
            await self._in_thread(lambda: self._dial(client))
        except HandoffRefused as error:
            self._refused[record.id] = asyncio.get_running_loop().time() + REFUSED_S
            if (line := f"{record.id}: {error}") not in self.refusals:
                self.refusals.append(line)
                log.error("%s refused: %s", record.id, error)
        except (HandoffFailed, OSError) as error:
            if record.id not in self._unreachable:
                log.warning("cannot reach %s, still trying: %s", record.id, error)
            self._unreachable.add(record.id)
        else:
            self._unreachable.discard(record.id)
            self.peers[record.id] = Peer(record, client)
            log.info("connected to %s over %s", record.id, client.transport)
        finally:
            self.dialling.discard(record.id)

    def _dial(self, client: HandoffClient) -> None:
        client.connect()
        if self._is_closed:  # nobody waits for it any more
            client.close()

    @property
    def is_connected(self) -> bool:
        """Whether there is any decode worker that pages could be sent to."""
        return any(peer.client.alive for peer in self.peers.values())

    @property
    def has_room(self) -> bool:
        """Whether some usable decode worker's ledger shows room; a hint, its answer decides."""
        return any(p.is_usable and p.record.ledger.available > 1 for p in self.peers.values())

    async def book(self, cargo: Cargo) -> None:
        """Set `cargo.handoff`, asking candidates in turn; waits while all are full.

        Bookings go one after another, in order of arrival: a large one is not overtaken for ever.
        `HandoffFailed` when waiting is in vain: every candidate says so, or the time to live ends.
        """
        async with _time_to_live(cargo), self._turn:
            while not await self._ask_all(cargo):  # noqa: ASYNC110 - pages come back over there
                await asyncio.sleep(RETRY_S)

    async def book_now(self, cargo: Cargo) -> bool:
        """`book` without waiting: False when no candidate has room at this moment."""
        async with _time_to_live(cargo), self._turn:
            return await self._ask_all(cargo)

    async def _ask_all(self, cargo: Cargo) -> bool:
        candidates, hopeless = self._candidates(cargo), 0
        for peer in candidates:
            try:
                handoff = await self._reserve(peer, cargo)
            except HandoffDenied as denial:
                log.debug("%s denied: %s", peer.record.id, denial)
                if denial.reason.startswith(STALE_EPOCH):
                    raise HandoffFailed(denial.reason) from denial
                hopeless += denial.reason.startswith(NEVER)
                continue
            except HandoffFailed as error:
                log.warning("reserving on %s failed: %s", peer.record.id, error)
                continue
            cargo.handoff, cargo.decode_worker = handoff, peer.record.id
            self._remember(cargo)
            return True
        if candidates and hopeless == len(candidates):
            raise HandoffFailed("no decode worker is large enough")
        return False

    async def _reserve(self, peer: Peer, cargo: Cargo) -> Handoff:
        """RESERVE on one peer. When cancelled, a grant that still comes is given back."""
        answer = peer.client.reserve(cargo.request, cargo.hashes)
        waiting = asyncio.wrap_future(answer)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(_return_grant)
            raise

    def _candidates(self, cargo: Cargo) -> list[Peer]:
        """Usable peers: those that hold more of the prefix first, then those with more room."""
        held: collections.Counter[str] = collections.Counter()
        for page_hash in cargo.hashes:
            worker_id = self._affinity.get(page_hash)
            if worker_id is None:
                break
            held[worker_id] += 1
        usable = [p for p in self.peers.values() if p.is_usable]
        return sorted(
            usable, key=lambda p: (-held[p.record.id], -p.record.ledger.available, p.record.id)
        )

    def _remember(self, cargo: Cargo) -> None:
        for page_hash in cargo.hashes:
            self._affinity.pop(page_hash, None)
            self._affinity[page_hash] = cargo.decode_worker
        while len(self._affinity) > MAX_AFFINITIES:
            self._affinity.popitem(last=False)

    async def close(self) -> None:
        """Hang up. Attempts to connect are left to their threads, which end with the handshake's
        deadline."""
        self._is_closed = True
        await end_tasks(self._tasks)
        await asyncio.gather(*(self._in_thread(p.client.close) for p in self.peers.values()))
        self._threads.shutdown(wait=False)

    def stats(self) -> dict[str, float]:
        """Counters of all connections so far, and what follows from their sums."""
        counts, tallies = self._past_counts.copy(), copy.deepcopy(self._past_tallies)
        for peer in self.peers.values():
            self._add(peer.client, counts, tallies)
        return {**counts, **figures(tallies)}

    @staticmethod
    def _add(
        client: HandoffClient, counts: collections.Counter[str], tallies: dict[str, Tally]
    ) -> None:
        counts.update(client.counts())
        tallies.setdefault(client.transport, Tally()).add(client.tally())


@contextlib.asynccontextmanager
async def _time_to_live(cargo: Cargo) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(cargo.request.ttl_ms / 1000):
            yield
    except TimeoutError as error:
        raise HandoffFailed("the request's time to live ended") from error


def _return_grant(answer: asyncio.Future[Handoff]) -> None:
    if not answer.cancelled() and answer.exception() is None:
        answer.result().cancel("no longer wanted")
