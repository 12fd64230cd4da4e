"""Two prefill workers, two decode workers and a gateway, one message at a time.

Real: `OutgoingTable`, `IntakeTable`, `PagePool` and the gateway's `Generation`. Modelled: threads
(each method is one step of one of them), connections (`Link`), the queue, the control stream, and
memory: every slot of a page holds the token ids that its K and V would depend on, so that a page of
another request, or half a page, is noticed by whoever reads it.

Every assertion in here is a promise: a page is written under a grant or by its one holder; what is
read is what was meant; one worker decodes a (request, epoch); the gateway's tokens are the right
ones, in order.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Container
from dataclasses import replace

from pageferry.gateway.requests import Generation, Verdict
from pageferry.kvtransfer.frames import Message
from pageferry.kvtransfer.incoming import Peer
from pageferry.kvtransfer.wire import Cancel as CancelOrder
from pageferry.kvtransfer.wire import Event, Request, SamplingParams
from tests.kvtransfer.protocol_links import (
    LEASE_S,
    MAX_TOKENS,
    NUM_PAGES,
    SEEN,
    TIMEOUT_S,
    Link,
    token_of,
)
from tests.kvtransfer.protocol_workers import Receiver, Worker, Writer


class World:
    """Everything, and time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.writers = [Writer(self, f"W{i}") for i in range(2)]
        self.receivers = [Receiver(self, f"D{i}") for i in range(2)]
        self.gateway = Gateway(self)
        self.links: list[Link] = []
        d0, d1 = self.receivers
        for writer, transport in zip(self.writers, ("shm", "tcp"), strict=True):
            self.links += [Link(self, writer, d, transport) for d in self.receivers]
        self.links += [Link(self, d0, d1, "shm"), Link(self, d1, d0, "tcp")]

    @property
    def workers(self) -> list[Worker]:
        return [*self.writers, *self.receivers]

    def clock(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Time passes; whoever is awake looks at its deadlines."""
        self.now += seconds
        for worker in self.workers:
            if worker.is_awake:
                worker.lease_until = self.now + LEASE_S
        for receiver in self.receivers:
            if receiver.is_awake:
                self.send_down(receiver.table.expire())
        for link in self.links:
            if link.writer.is_awake:
                link.table.expire()
                link.up += link.table.due_renewals()
                if self.now - link.receiver.awake_at > TIMEOUT_S and not link.receiver.is_awake:
                    link.writer_ends("heard nothing")
            if link.receiver.is_awake:
                silent = not link.writer.is_awake
                if silent and self.now - link.writer.awake_at > TIMEOUT_S:
                    link.receiver_hangs_up()

    def round(self, slow: object = None, deaf: Container[Link] = ()) -> None:
        """Every thread of every worker does something, but for those of `slow`; the writers of
        `deaf` do not hear the answers."""
        for link in self.links:
            if slow is not link:
                link.notice()
                link.reconnect()
                link.take()
                for _ in range(4):
                    link.execute()
                for _ in range(4):
                    link.arrive()
                if slow is not link.writer and link not in deaf:
                    link.hear()
                    link.hear()
        for worker in self.workers:
            if slow is not worker:
                worker.read_control()
                worker.step()
            if slow is not self.gateway:
                self.gateway.flush(worker)
                self.gateway.read()

    @property
    def is_quiet(self) -> bool:
        busy = [r for r in self.receivers if r.table.open_handoffs() or r.leaving or r.running]
        return not busy and all(g.done for g in self.gateway.generations.values())

    def send_down(self, outgoing: list[tuple[Peer, Message]]) -> None:
        for peer, message in outgoing:
            for link in self.links:
                if link.peer is peer and not link.is_cut:
                    link.down.append(message)

    def check(self) -> None:
        decoders: Counter[tuple[str, int]] = Counter()
        for receiver in self.receivers:
            if receiver.is_dead:
                continue
            receiver.check()
            decoders.update(receiver.decoding())
        for key, count in decoders.items():
            assert count == 1, f"{key} is decoded {count} times"


class Gateway:
    """Owns the requests: the real `Generation`, and what the dispatcher does about its verdicts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: list[Request] = []
        self.claimed: list[tuple[Request, str]] = []
        self.control: list[CancelOrder] = []
        self.stream: deque[Event] = deque()
        self.generations = {
            name: self._generation(name, size) for name, size in (("a", 3), ("b", 4))
        }
        for generation in self.generations.values():
            self._push(generation)

    def _generation(self, name: str, size: int) -> Generation:
        prompt = array("i", [1, 2, 100 + ord(name), 4][:size])  # the first page is shared
        params = SamplingParams(max_tokens=MAX_TOKENS)
        return Generation(name, prompt, params, "g", "interactive", 0.0, 1e9, asyncio.Event())

    def flush(self, worker: Worker) -> None:
        """One of its events reaches Redis."""
        if worker.is_awake and worker.outbox:
            self.stream.append(worker.outbox.popleft())

    def read(self) -> None:
        if not self.stream:
            return
        event = self.stream.popleft()
        generation = self.generations[event.request_id]
        verdict = generation.apply(event, self.world.now)
        expected = [token_of(generation.id, index) for index in range(len(generation.tokens))]
        assert generation.tokens == expected, "a token was lost, doubled or another's"
        if verdict is Verdict.FINISHED:
            assert len(generation.tokens) == MAX_TOKENS
            SEEN[f"finished under epoch {min(generation.epoch, 3)}"] += 1
            self._recall(generation)
            generation.close("length")
        elif verdict in (Verdict.GAP, Verdict.REQUEUE):
            SEEN[verdict.name] += 1
            self.resubmit(generation)

    def look(self) -> None:
        """At the registry: who is gone, and what had they?"""
        live = {
            w.id for w in self.world.workers if w.lease_until >= self.world.now and not w.is_dead
        }
        for generation in self.generations.values():
            holder = generation.holder
            if generation.active and holder and holder not in live:
                SEEN["lapsed lease"] += 1
                self.resubmit(generation)
        for request, worker in list(self.claimed):
            if worker not in live:
                self.claimed.remove((request, worker))
                generation = self.generations[request.request_id]
                if generation.active and generation.epoch == request.epoch:
                    self.resubmit(generation)

    def resubmit(self, generation: Generation) -> None:
        self._recall(generation)
        generation.next_epoch()
        if generation.spent:
            generation.close("length")
        else:
            self._push(generation)

    def end(self, name: str) -> None:
        """The client leaves."""
        generation = self.generations[name]
        if not generation.done:
            self._recall(generation)
            generation.close("abort")

    def _recall(self, generation: Generation) -> None:
        self.control.append(CancelOrder(generation.id, generation.epoch))
        self.queue = [r for r in self.queue if r.request_id != generation.id]
        self.claimed = [c for c in self.claimed if c[0].request_id != generation.id]

    def _push(self, generation: Generation) -> None:
        generation.parked = False
        self.queue.append(generation.request(self.world.now))

    def claim(self, writer: Worker) -> Request | None:
        if not self.queue:
            return None
        request = self.queue.pop(0)
        self.claimed.append((request, writer.id))
        return replace(request, token_ids=tuple(request.token_ids))

    def settle(self, request: Request) -> None:
        key = request.request_id, request.epoch
        self.claimed = [c for c in self.claimed if (c[0].request_id, c[0].epoch) != key]


def settle_down(world: World, rounds: int = 400) -> None:
    """No further fault: everything must end, and every page come back."""
    for worker in world.workers:
        worker.thaw()
        worker.restart()
    for number in range(rounds):
        world.round()
        world.gateway.look()
        world.check()
        world.advance(0.2)
        if number > 40 and world.is_quiet:
            break
    for generation in world.gateway.generations.values():
        assert generation.done, f"{generation.id} never ended: epoch {generation.epoch}"
        assert generation.outcome == "abort" or len(generation.tokens) == MAX_TOKENS
    for receiver in world.receivers:
        ledger = receiver.pool.ledger()
        assert ledger.free + ledger.cached == NUM_PAGES, f"{receiver.id}: {ledger}"
        assert receiver.table.open_handoffs() == 0
