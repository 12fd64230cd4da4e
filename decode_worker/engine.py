"""The decode loop, in a thread of its own: take in, schedule, execute, report.

Other threads talk to it through `inbox` only; it talks back through `emit` (events for gateways).
"""

from __future__ import annotations

import logging
import queue
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from pageferry.decode_worker.scheduler import Limits, Scheduler, StepPlan, Work, release_pages
from pageferry.decode_worker.sequence import Sequence
from pageferry.kernels.runner import BadChunk, Chunk, ModelRunner, Sampled
from pageferry.kvtransfer.engine_thread import IDLE_WAIT_S, StepClock, StepWatch
from pageferry.kvtransfer.handoff import Intake
from pageferry.kvtransfer.outcome import token_event
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.recent_cancels import RecentCancels
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Request

log = logging.getLogger(__name__)

Emit = Callable[[Iterable[tuple[str, Event]]], None]


@dataclass(frozen=True)
class LocalRequest:
    """Inbox: prefill this one here."""

    request: Request


@dataclass(frozen=True)
class GatewayLost:
    """Inbox: nobody waits for this gateway's requests any more."""

    gateway: str


@dataclass(frozen=True)
class GiveBack:
    """Inbox: return every request to its gateway (the end of draining)."""

    code: str


@dataclass(frozen=True)
class Depart:
    """Inbox: let go of up to `limit` sequences between two tokens; their pages stay filled."""

    limit: int
    taken: Future[list[Sequence]]


@dataclass(frozen=True)
class Rejoin:
    """Inbox: a sequence that could not leave goes on here."""

    sequence: Sequence


@dataclass(frozen=True)
class Stop:
    """Inbox: end the thread."""


Message = Intake | LocalRequest | Cancel | GatewayLost | GiveBack | Depart | Rejoin | Stop


class Engine:
    """Continuous batching over one page pool."""

    def __init__(
        self, worker_id: str, pool: PagePool, runner: ModelRunner, limits: Limits, emit: Emit
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.scheduler = Scheduler(pool, limits)
        self.num_generated_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_cached_tokens = 0
        self.clock = StepClock()
        self._worker_id = worker_id
        self._runner = runner
        self._emit = emit
        self._stopping = False
        self._watch = StepWatch(pool)
        self._cancelled = RecentCancels()

    # -- what other threads may read; plain attributes, momentary values

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def gateways(self) -> set[str]:
        sequences = (*self.scheduler.running, *self.scheduler.waiting)
        return {s.request.gateway for s in sequences}

    # -- the loop

    def run(self) -> None:
        while not self._stopping:
            if not self.step() and not self._stopping and self.inbox.empty():
                self._idle()

    def step(self) -> bool:
        """One round of the loop; False when there was nothing to compute."""
        self._take_in()
        plan = self.scheduler.schedule()
        self._requeue(plan.preempted, "preempted")
        if plan.work:
            self._execute(plan)
        else:
            self.clock.pause()
        return bool(plan.work)

    def _execute(self, plan: StepPlan) -> None:
        self.clock.begin()
        try:
            sampled = self._runner.execute([_chunk(work) for work in plan.work])
        except BadChunk as error:
            # Nothing of the step ran: the others are scheduled again.
            self._drop_bad(plan.work[error.index].sequence, error)
            return
        except torch.AcceleratorError:
            raise  # the device context is gone: only a new process helps
        except RuntimeError:  # torch's other errors, out of memory included
            self._failed(plan)
            return
        self.clock.end()
        self._watch.succeeded()
        self._report(plan.work, sampled)

    def _report(self, work: Seq[Work], sampled: Seq[Sampled | None]) -> None:
        """Append the new tokens and tell the gateways; then end the sequences that are done."""
        events, ended = [], []
        for item, token in zip(work, sampled, strict=True):
            sequence, request = item.sequence, item.sequence.request
            index = sequence.num_output_tokens
            self.scheduler.advance(item)
            if index == 0:
                self.num_prefilled_tokens += item.num_tokens
            if token is None:
                continue
            num_cached_tokens = 0
            if index == request.num_output_tokens:
                num_cached_tokens = sequence.num_cached_tokens
                self.num_cached_tokens += num_cached_tokens
            max_model_len = self.scheduler.limits.max_model_len
            event = token_event(
                request, token, index, max_model_len, self._worker_id, num_cached_tokens
            )
            events.append((request.gateway, event))
            if event.kind is Kind.ERROR:
                sequence.num_computed_tokens = 0  # its pages must not become cache
                ended.append(sequence)
                continue
            self.num_generated_tokens += 1
            if event.finish:
                ended.append(sequence)
            else:
                sequence.token_ids.append(token.token_id)
        if events:
            self._emit(events)
        for sequence in ended:
            self.scheduler.remove(sequence)

    def _failed(self, plan: StepPlan) -> None:
        """Nothing of the step counts. Its requests go back; a broken device ends the worker."""
        log.exception("step with %d sequences failed", len(plan.work))
        self.clock.pause()
        self._watch.failed(work.sequence.request_id for work in plan.work)
        victims = [work.sequence for work in plan.work]
        for sequence in victims:
            self._drop_poisoned(sequence)
        self._requeue(victims, "step_failed")

    def _drop_bad(self, sequence: Sequence, error: BadChunk) -> None:
        log.error("%s cannot be computed: %s", sequence.request_id, error)
        self.clock.pause()
        self._drop_poisoned(sequence)
        self._requeue([sequence], "step_failed")

    def _drop_poisoned(self, sequence: Sequence) -> None:
        """Remove a sequence whose last pages may hold anything: they must not become cache."""
        sequence.num_computed_tokens = 0
        self.scheduler.remove(sequence)

    # -- intake

    def _take_in(self) -> None:
        while not self.inbox.empty():
            self._handle(self.inbox.get())

    def _idle(self) -> None:
        try:
            self._handle(self.inbox.get(timeout=IDLE_WAIT_S))
        except queue.Empty:
            self._watch.idle()

    def _handle(self, message: Message) -> None:
        match message:
            case Intake():
                self._sealed(message)
            case LocalRequest(request):
                if self._is_news(request):
                    self.scheduler.add_local(Sequence.of(request))
            case Cancel(request_id, epoch):
                self._cancelled.add(message)
                sequence = self.scheduler.find(request_id)
                if sequence and sequence.request.epoch <= epoch:
                    self.scheduler.remove(sequence)
            case GatewayLost(gateway):
                for sequence in self._all():
                    if sequence.request.gateway == gateway:
                        self.scheduler.remove(sequence)
            case GiveBack(code):
                sequences = self._all()
                for sequence in sequences:
                    self.scheduler.remove(sequence)
                self._requeue(sequences, code)
            case Depart(limit, taken):
                if taken.set_running_or_notify_cancel():
                    taken.set_result(self.scheduler.let_go(limit))
            case Rejoin(sequence):
                if self._is_news(sequence.request):
                    self.scheduler.rejoin(sequence)
                else:
                    release_pages(self.scheduler.pool, sequence)
            case Stop():
                self._stopping = True

    def _sealed(self, intake: Intake) -> None:
        request = intake.request
        sequence = Sequence(
            request,
            array("i", (*request.token_ids, *intake.first_token.token_ids)),
            page_ids=array("i", intake.page_ids),
            num_computed_tokens=len(request.token_ids),
        )
        if self._is_news(request):
            self.scheduler.add_sealed(sequence)
        else:
            self.scheduler.remove(sequence)

    def _is_news(self, request: Request) -> bool:
        """Whether to take the request: a higher epoch replaces what is here, others are late."""
        if self._cancelled.covers(request):
            return False
        present = self.scheduler.find(request.request_id)
        if present is None:
            return True
        if present.request.epoch >= request.epoch:
            return False
        self.scheduler.remove(present)
        return True

    def _all(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _requeue(self, sequences: Iterable[Sequence], code: str) -> None:
        events = [
            (
                s.request.gateway,
                Event(s.request_id, s.request.epoch, Kind.REQUEUE, self._worker_id, code=code),
            )
            for s in sequences
        ]
        if events:
            self._emit(events)


def _chunk(work: Work) -> Chunk:
    sequence, start = work.sequence, work.start
    return Chunk(
        token_ids=sequence.token_ids[start : start + work.num_tokens],
        start=start,
        block_table=sequence.page_ids,
        sample=sequence.sample_spec if work.samples else None,
    )
