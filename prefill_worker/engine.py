"""The prefill loop, in a thread of its own: take in, schedule, execute, push, report.

While layer i+1 computes, the handoff's sender thread carries layer i's finished pages away.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import torch

from pageferry.kernels.runner import BadChunk, Chunk, ModelRunner, SampleSpec
from pageferry.kvtransfer.core_flag import CoreFlag
from pageferry.kvtransfer.engine_thread import IDLE_WAIT_S, StepClock, StepWatch
from pageferry.kvtransfer.outcome import token_event
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Event, Kind
from pageferry.prefill_worker.job import Job
from pageferry.prefill_worker.scheduler import Scheduler, Work

log = logging.getLogger(__name__)


class StepFailed(RuntimeError):
    """The step that computed this job failed; nothing of it may be used."""


@dataclass(frozen=True)
class Limits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_layers: int


class Engine:
    """Computes prompts into pages. `compute` and `withdraw` are its interface, from any thread."""

    def __init__(
        self,
        worker_id: str,
        pool: PagePool,
        runner: ModelRunner,
        limits: Limits,
        mark_ready: Callable[[int], None],
        core_flag: CoreFlag | None = None,
    ) -> None:
        self.scheduler = Scheduler(pool, limits.max_num_batched_tokens, limits.max_num_seqs)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.clock = StepClock()
        self._worker_id = worker_id
        self._runner = runner
        self._limits = limits
        self._mark_ready = mark_ready
        self._core_flag = core_flag
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._results: dict[Job, Future[Event]] = {}
        self._stopping = False
        self._watch = StepWatch(pool)

    def compute(self, job: Job) -> Future[Event]:
        """The event of the job's first token; `StepFailed` when its step went wrong."""
        result: Future[Event] = Future()

        def start() -> None:
            self._results[job] = result
            self.scheduler.add(job)

        self._inbox.put(start)
        return result

    def withdraw(self, job: Job) -> Future[None]:
        """Done when the engine no longer touches the job's pages."""
        done: Future[None] = Future()

        def remove() -> None:
            self.scheduler.remove(job)
            self._results.pop(job, None)
            done.set_result(None)

        self._inbox.put(remove)
        return done

    def stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)

    # -- the loop

    def run(self) -> None:
        while not self._stopping:
            self._take_in()
            work = self.scheduler.schedule()
            if work:
                self._lend_cores(False)
                self._step(work)
                continue
            self.clock.pause()
            if not self._stopping and self._inbox.empty():
                self._lend_cores(True)
                self._idle()

    def _lend_cores(self, lent: bool) -> None:
        """Between prompts a decode worker may compute here."""
        if self._core_flag is not None:
            self._core_flag.busy = not lent

    def _step(self, work: list[Work]) -> None:
        self.clock.begin()
        for item in work:
            if item.job.num_pushed_pages == 0 and item.job.num_cached_tokens:
                self._push_cached(item.job)
        ready = [(item, self._finished_pages(item)) for item in work]

        def push_layer(layer: int) -> None:
            self._mark_ready(layer)
            for item, (first, end) in ready:
                if end > first and item.job.handoff is not None:
                    item.job.handoff.push(layer, first, item.job.page_ids[first:end])

        try:
            sampled = self._runner.execute([_chunk(item) for item in work], on_layer=push_layer)
        except BadChunk as error:
            # Nothing of the step ran: the others are scheduled again.
            self.clock.pause()
            job = work[error.index].job
            self.scheduler.remove(job)
            job.num_computed_tokens = 0
            _resolve(self._results.pop(job, None), StepFailed(str(error)))
            return
        except torch.AcceleratorError:
            raise  # the device context is gone: only a new process helps
        except RuntimeError as error:  # torch's other errors, out of memory included
            self._failed(work, error)
            return
        self.clock.end()
        self._watch.succeeded()
        for (item, (_, end)), token in zip(ready, sampled, strict=True):
            self.num_prompt_tokens += item.num_tokens
            item.job.num_pushed_pages = max(end, item.job.num_pushed_pages)
            self.scheduler.advance(item)
            if item.is_last:
                assert token is not None
                self._finish(item.job, token)

    def _finish(self, job: Job, token: object) -> None:
        request = job.request
        event = token_event(
            request,
            token,  # type: ignore[arg-type]
            request.num_output_tokens,
            self._limits.max_model_len,
            self._worker_id,
        )
        if event.kind is Kind.ERROR:
            job.num_computed_tokens = 0  # its pages must not become cache
        _resolve(self._results.pop(job, None), event)

    def _push_cached(self, job: Job) -> None:
        """Send the pages that the prefix cache supplied, as far as the other side lacks them."""
        self.num_cached_tokens += job.num_cached_tokens
        assert job.handoff is not None
        first = job.handoff.skip_pages
        end = job.num_cached_tokens // self.scheduler.pool.page_size
        if end > first:
            push_all_layers(job, first, end, self._limits.num_layers)
        job.num_pushed_pages = max(first, end)

    def _finished_pages(self, item: Work) -> tuple[int, int]:
        """Logical pages [first, end) that this chunk completes, or the rest with the last chunk."""
        page_size = self.scheduler.pool.page_size
        assert item.job.handoff is not None
        first = max(item.job.num_pushed_pages, item.job.handoff.skip_pages)
        end = -(-item.end // page_size) if item.is_last else item.end // page_size
        return first, max(first, end)

    def _failed(self, work: list[Work], error: RuntimeError) -> None:
        log.exception("step with %d prompts failed", len(work))
        self.clock.pause()
        self._watch.failed(item.job.request.request_id for item in work)
        for item in work:
            self.scheduler.remove(item.job)
            # What the failed step left in its pages must not become cache.
            item.job.num_computed_tokens = 0
            _resolve(self._results.pop(item.job, None), StepFailed(str(error)))

    def _take_in(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _idle(self) -> None:
        try:
            self._inbox.get(timeout=IDLE_WAIT_S)()
        except queue.Empty:
            self._watch.idle()


def push_all_layers(job: Job, first: int, end: int, num_layers: int) -> None:
    """Queue logical pages [first, end) of every layer for sending."""
    assert job.handoff is not None
    for layer in range(num_layers):
        job.handoff.push(layer, first, job.page_ids[first:end])


def _chunk(item: Work) -> Chunk:
    request, start = item.job.request, item.start
    spec = None
    if item.is_last:
        spec = SampleSpec(request.sampling, request.token_ids, request.prompt_len)
    return Chunk(
        token_ids=request.token_ids[start : item.end],
        start=start,
        block_table=item.job.page_ids,
        sample=spec,
    )


def _resolve(future: Future[Event] | None, outcome: Event | Exception) -> None:
    """Set the outcome unless the waiting task was cancelled meanwhile."""
    if future is None:
        return
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        log.debug("result of a cancelled job dropped")
