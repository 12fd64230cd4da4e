"""Part of `protocol_world`: the two kinds of workers, and how a request leaves one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pageferry.kvtransfer.handoff import STALE_EPOCH, HandoffDenied, HandoffFailed, Intake
from pageferry.kvtransfer.intake import IntakeTable
from pageferry.kvtransfer.pool import OutOfPages, PagePool, PageState
from pageferry.kvtransfer.recent_cancels import RecentCancels
from pageferry.kvtransfer.sending import Handoff
from pageferry.kvtransfer.wire import Cancel as CancelOrder
from pageferry.kvtransfer.wire import Event, Kind, Request
from tests.kvtransfer.protocol_links import (
    LAYOUT,
    LEASE_S,
    MAX_TOKENS,
    NUM_PAGES,
    SEEN,
    TIMEOUT_S,
    Link,
    Slot,
    token_of,
)

if TYPE_CHECKING:
    from tests.kvtransfer.protocol_world import World

MAX_HANDOVERS = 3


@dataclass(eq=False)
class Worker:
    world: World
    name: str
    incarnation: int = 0
    is_dead: bool = False
    is_frozen: bool = False
    awake_at: float = 0.0
    """When it was last known to be awake, once it is not."""
    lease_until: float = LEASE_S
    outbox: deque[Event] = field(default_factory=deque)
    control_read: int = 0
    cancels: RecentCancels = field(default_factory=RecentCancels)

    @property
    def id(self) -> str:
        return f"{self.name}.{self.incarnation}"

    @property
    def is_awake(self) -> bool:
        return not self.is_dead and not self.is_frozen

    def freeze(self) -> None:
        if self.is_awake:
            self.is_frozen, self.awake_at = True, self.world.now

    def thaw(self) -> None:
        self.is_frozen = False

    def die(self) -> None:
        if self.is_dead:
            return
        self.is_dead, self.is_frozen, self.awake_at = True, False, self.world.now
        self.outbox.clear()
        for link in self.world.links:
            if self in (link.writer, link.receiver):
                link.process_died(self)

    def restart(self) -> None:
        if not self.is_dead:
            return
        self.is_dead = False
        self.incarnation += 1
        self.cancels = RecentCancels()
        self.lease_until = self.world.now + LEASE_S
        self.control_read = len(self.world.gateway.control)

    def say(self, request: Request, kind: Kind, worker: str = "", code: str = "") -> None:
        event = Event(request.request_id, request.epoch, kind, worker or self.id, code=code)
        self.outbox.append(event)

    def say_token(self, request: Request, index: int) -> Event:
        token = token_of(request.request_id, index)
        finish = "length" if index + 1 == MAX_TOKENS else None
        event = Event(
            request.request_id, request.epoch, Kind.TOKENS, self.id,
            index=index, token_ids=(token,), finish=finish,
        )  # fmt: skip
        self.outbox.append(event)
        return event

    def step(self) -> None:
        """What its event loop and its engine do next."""
        raise NotImplementedError

    def read_control(self) -> None:
        control = self.world.gateway.control
        if self.is_awake and self.control_read < len(control):
            order = control[self.control_read]
            self.control_read += 1
            self.cancels.add(order)
            self.cancelled(order)

    def cancelled(self, order: CancelOrder) -> None:
        raise NotImplementedError

    def links(self) -> list[Link]:
        return [link for link in self.world.links if link.writer is self and link.is_open]


@dataclass(eq=False)
class Job:
    """A request on its way out of a worker: `carry` is resumed until it ends."""

    worker: Worker
    request: Request
    pages: list[int]
    hashes: list[bytes]
    is_dropped: bool = False
    handoff: Handoff | None = None
    target: Receiver | None = None
    steps: Iterator[None] = field(default_factory=lambda: iter(()))

    def to_its_end(self, steps: Iterator[None]) -> Iterator[None]:
        """However it went, nothing of a handoff stays behind."""
        yield from steps
        if self.handoff is not None:
            self.handoff.cancel("finished or dropped")
            while not self.handoff.detached.done():
                yield

    def book(self) -> Iterator[bool | None]:
        """Ask every connected receiver once: yields None while it waits, at last the answer."""
        for link in self.worker.links():
            if link.receiver is self.worker or self.is_dropped:
                continue
            answer = link.table.reserve(self.request, self.hashes)
            while not answer.done():
                if self.is_dropped:
                    answer.add_done_callback(give_back)
                    yield False
                    return
                yield None
            try:
                self.handoff, self.target = answer.result(), link.receiver
            except HandoffDenied as denial:
                if denial.reason.startswith(STALE_EPOCH):
                    break
            except HandoffFailed:
                pass
            else:
                yield True
                return
        yield False

    def is_covered_by(self, order: CancelOrder) -> bool:
        same = self.request.request_id == order.request_id
        return same and self.request.epoch <= order.epoch

    def cancel(self) -> None:
        if self.handoff is not None:
            self.handoff.cancel("cancelled")

    def push_all(self) -> None:
        assert self.handoff is not None
        for layer in range(LAYOUT.num_layers):
            self.handoff.push(layer, 0, self.pages[: self.handoff.num_pages])


def give_back(answer: Future[Handoff]) -> None:
    if answer.exception() is None:
        answer.result().cancel("no longer wanted")


class Writer(Worker):
    """A prefill worker: its own pages are left out, its jobs are not."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.jobs: list[Job] = []

    def die(self) -> None:
        super().die()
        self.jobs.clear()

    def cancelled(self, order: CancelOrder) -> None:
        for job in self.jobs:
            if job.is_covered_by(order):
                job.is_dropped = True
                job.cancel()

    def claim(self) -> None:
        if len(self.jobs) < 2 and (entry := self.world.gateway.claim(self)):
            pages = list(range(LAYOUT.pages_for(len(entry.token_ids))))
            hashes = self.world.receivers[0].pool.hash_prefix(entry.token_ids)
            job = Job(self, entry, pages, hashes)
            job.steps = job.to_its_end(self._carry(job))
            self.jobs.append(job)

    def step(self) -> None:
        if self.is_awake:
            self.claim()
            for job in list(self.jobs):
                # The entry goes last: until then the gateway sees by it who had the request.
                if next(job.steps, self) is self and not self.outbox:
                    self.jobs.remove(job)
                    self.world.gateway.settle(job.request)

    def _carry(self, job: Job) -> Iterator[None]:
        request = job.request
        if self.cancels.covers(request):
            return
        self.say(request, Kind.OWNED)
        token = None
        for _ in range(MAX_HANDOVERS):
            for booked in job.book():
                if booked is None:
                    yield
            if job.is_dropped or job.handoff is None or job.target is None:
                break
            if token is None:
                token = self.say_token(request, request.num_output_tokens)
            if token.finish:
                job.handoff.cancel("finished")
                return
            job.push_all()
            yield
            committed = job.handoff.seal(token)
            while not committed.done() or not job.handoff.detached.done():
                yield
            error = committed.exception()
            if error is None:
                self.say(request, Kind.OWNED, worker=job.target.id)
                return
            assert isinstance(error, HandoffFailed)
            job.handoff = None
            if error.uncertain:
                SEEN["uncertain handover"] += 1
                break
        if not job.is_dropped:
            self.say(request, Kind.REQUEUE, code="handoff_failed")


@dataclass(eq=False)
class Sequence:
    request: Request
    tokens: list[int]
    pages: list[int]

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - 1

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.request.epoch


class Receiver(Worker):
    """A decode worker."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.unwelcome = ""
        self._begin()

    def _begin(self) -> None:
        self.pool = PagePool(NUM_PAGES, LAYOUT.page_size)
        self.memory: list[list[Slot]] = [[()] * LAYOUT.page_size for _ in range(NUM_PAGES)]
        self.table = IntakeTable(self.pool, LAYOUT, self, TIMEOUT_S, clock=self.world.clock)
        self.inbox: deque[Intake | CancelOrder | Sequence] = deque()
        self.running: list[Sequence] = []
        self.leaving: dict[Job, Sequence] = {}

    def restart(self) -> None:
        if self.is_dead:
            self._begin()
        super().restart()

    # --- listener

    def admit(self, request: Request, num_pages: int) -> str:
        return "not here" if request.request_id in self.unwelcome else ""

    def sealed(self, intake: Intake) -> None:
        self.inbox.append(intake)

    # --- engine

    def cancelled(self, order: CancelOrder) -> None:
        self.world.send_down(self.table.cancel_request(order.request_id, order.epoch))
        self.inbox.append(order)
        for job in self.leaving:
            if job.is_covered_by(order):
                job.cancel()

    def step(self) -> None:
        if not self.is_awake:
            return
        while self.inbox:
            self._take(self.inbox.popleft())
        for job in list(self.leaving):
            if next(job.steps, self) is self:
                del self.leaving[job]
        for sequence in list(self.running):
            self._decode(sequence)

    def _take(self, message: Intake | CancelOrder | Sequence) -> None:
        match message:
            case Intake():
                tokens = [*message.request.token_ids, *message.first_token.token_ids]
                self._enter(Sequence(message.request, tokens, list(message.page_ids)))
            case Sequence():
                self._enter(message)
            case CancelOrder():
                for sequence in list(self.running):
                    if sequence.key[0] == message.request_id and sequence.key[1] <= message.epoch:
                        self._remove(sequence)

    def _enter(self, sequence: Sequence) -> None:
        present = next((s for s in self.running if s.key[0] == sequence.key[0]), None)
        stale = present is not None and present.key[1] >= sequence.key[1]
        if self.cancels.covers(sequence.request) or stale:
            SEEN["arrived stale"] += 1
            self.pool.release(sequence.pages)
            return
        if present is not None:
            self._remove(present)
        self._read(sequence)
        self.running.append(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        full = sequence.num_computed // LAYOUT.page_size
        hashes = self.pool.hash_prefix(sequence.tokens[: full * LAYOUT.page_size])
        self.pool.register(sequence.pages[:full], hashes)
        self.pool.release(sequence.pages)

    def _read(self, sequence: Sequence) -> None:
        """Attention: every slot that was computed holds what it should."""
        for position in range(sequence.num_computed):
            page, offset = divmod(position, LAYOUT.page_size)
            held = self.memory[sequence.pages[page]][offset]
            assert held == tuple(sequence.tokens[: position + 1]), "decoded foreign or torn pages"

    def _decode(self, sequence: Sequence) -> None:
        position = sequence.num_computed
        if position // LAYOUT.page_size >= len(sequence.pages):
            try:
                sequence.pages += self.pool.allocate(1)
            except OutOfPages:
                self.say(sequence.request, Kind.REQUEUE, code="preempted")
                self._remove(sequence)
                return
        page, offset = divmod(position, LAYOUT.page_size)
        physical = sequence.pages[page]
        assert self.pool.state(physical) is PageState.LIVE
        slots = list(self.memory[physical])
        slots[offset] = tuple(sequence.tokens)
        self.memory[physical] = slots
        self._read(sequence)
        index = len(sequence.tokens) - sequence.request.prompt_len
        token = self.say_token(sequence.request, index)
        sequence.tokens += token.token_ids
        if token.finish:
            self._remove(sequence)

    # --- leaving for another decode worker

    def depart(self) -> None:
        if not self.is_awake or self.leaving or not self.running:
            return
        sequence = self.running.pop(0)
        computed = tuple(sequence.tokens[:-1])
        request = replace(sequence.request, token_ids=computed)
        job = Job(self, request, sequence.pages, self.pool.hash_prefix(computed))
        self.leaving[job] = sequence
        job.steps = job.to_its_end(self._move(job, sequence))

    def _move(self, job: Job, sequence: Sequence) -> Iterator[None]:
        for booked in job.book():
            if booked is None:
                yield
        if job.handoff is None or job.target is None:
            self.inbox.append(sequence)
            return
        job.push_all()
        yield
        last = sequence.tokens[-1]
        index = job.request.num_output_tokens
        known = Event(*sequence.key, Kind.TOKENS, self.id, index=index, token_ids=(last,))
        committed = job.handoff.seal(known)
        while not committed.done() or not job.handoff.detached.done():
            yield
        error = committed.exception()
        assert error is None or isinstance(error, HandoffFailed)
        if error is None:
            self.say(job.request, Kind.OWNED, worker=job.target.id)
        elif error.uncertain:
            SEEN["uncertain departure"] += 1
            self.say(job.request, Kind.REQUEUE, code="handoff_failed")
        if error is None or error.uncertain:
            self._release(sequence)
        else:
            SEEN["came back"] += 1
            self.inbox.append(sequence)

    # --- promises

    def decoding(self) -> list[tuple[str, int]]:
        arrived = [
            (m.request.request_id, m.request.epoch) for m in self.inbox if isinstance(m, Intake)
        ]
        returned = [m.key for m in self.inbox if isinstance(m, Sequence)]
        return [s.key for s in self.running] + arrived + returned

    def check(self) -> None:
        holders = Counter(self.table.holders())
        for sequence in [*self.running, *self.leaving.values()]:
            holders.update(sequence.pages)
        for message in self.inbox:
            if isinstance(message, Intake):
                holders.update(message.page_ids)
            elif isinstance(message, Sequence):
                holders.update(message.pages)
        self.pool.check_integrity(holders)
