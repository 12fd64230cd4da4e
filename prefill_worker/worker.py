"""A prefill worker: claims prompts, computes their KV pages, ferries them to decode workers.

Threads: the event loop (Redis, signals, one task per job), the engine (compute), two threads per
connected decode worker (page transfer). A job's life is `_carry`, top to bottom:

1. claim (`claims`): read from the queues when the engine is short of work and some decode worker
   has room;
2. book: a decode worker grants pages (RESERVE/GRANT), asked in order of affinity and room;
3. compute: chunks in the engine, pages pushed layer by layer;
4. first token to the gateway at once; a request that it ends stops here;
5. hand over: SEAL, COMMIT; then the decode worker answers for the request;
6. ack: the queue entry is deleted, the pages stay as cache.

If a decode worker fails after step 3, the pages are pushed to another one: nothing is recomputed.
A cancel ends `_carry` wherever it stands. If this process dies, the gateway resubmits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from typing import Any

from redis.exceptions import ResponseError

from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.bus import TRANSIENT, ensure_groups
from pageferry.kvtransfer.engine_thread import JOIN_S, start_thread
from pageferry.kvtransfer.handoff import HandoffFailed
from pageferry.kvtransfer.heartbeat import EngineStuck
from pageferry.kvtransfer.page_use import live_tokens
from pageferry.kvtransfer.recent_cancels import RecentCancels
from pageferry.kvtransfer.settings import PrefillSettings
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import Cancel, Event, Kind, WorkerRecord
from pageferry.kvtransfer.worker_bus import BusCallbacks, WorkerBus
from pageferry.kvtransfer.worker_setup import WorkerParts
from pageferry.prefill_worker.claims import Claim, Claims
from pageferry.prefill_worker.engine import (
    Engine,
    Limits,
    StepFailed,
    push_all_layers,
)
from pageferry.prefill_worker.job import Job

log = logging.getLogger(__name__)

MAX_HANDOVERS = 3
NO_ROOM_PAUSE_S = 0.02
CLEAN_UP_S = 3.0
"""What jobs get to clean up at the end; a dead engine or Redis would hold them for ever."""


class PrefillWorker:
    """Wires bus, engine and ferry together. `run` is the worker's whole life."""

    def __init__(self, parts: WorkerParts, settings: PrefillSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._state = "ready"
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[Job, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._cancels = RecentCancels()
        self._bus = WorkerBus(
            settings.redis_url,
            parts.keys,
            settings.lease_s,
            BusCallbacks(
                self._record,
                self._cancelled,
                self._stop.set,
                self._gateways,
                self._gateway_lost,
                self._failed,
                lambda: self._engine.clock.stuck(settings.engine_timeout_s),
            ),
            settings.alive_file,
        )
        self._claims = Claims(self._bus.client, parts.keys, parts.worker_id, settings.lease_s)
        limits = Limits(
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            parts.max_model_len,
            parts.memory.layout.num_layers,
        )
        self._engine = Engine(
            parts.worker_id,
            parts.pool,
            parts.runner,
            limits,
            parts.memory.mark_ready,
            parts.core_flag,
        )
        self._ferry = parts.ferry()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises what ended the engine, if anything."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stop.set)
        thread = start_thread(self._engine, self._failed)
        await self._bus.start()
        follow = self._bus.spawn("registry", self._follow)
        claim = self._bus.spawn("prefill queues", self._claim)
        health = self._bus.spawn("device health", self._parts.watch_health)
        await self._stop.wait()
        await end_tasks([claim, health])
        await self._drain()
        await end_tasks([follow])
        self._engine.stop()
        if not isinstance(self._failure, EngineStuck):
            await asyncio.to_thread(thread.join, JOIN_S)
        await self._ferry.close()
        await self._bus.close(self._parts.worker_id)
        if self._failure is not None:
            raise self._failure

    async def _follow(self) -> None:
        was_connected = self._ferry.is_connected
        await self._ferry.refresh(self._bus.client)
        if self._ferry.is_connected != was_connected:
            await self._bus.publish()  # the gateways need not wait for the next heartbeat

    async def _drain(self) -> None:
        self._state = "failed" if self._failure else "draining"
        log.info("draining: %d jobs left", len(self._jobs))
        try:
            await self._bus.publish()
        except TRANSIENT as error:
            log.warning("could not announce draining: %s", error)
        tasks = list(self._jobs.values())
        if tasks and self._failure is None:
            await asyncio.wait(tasks, timeout=self._settings.drain_s)
        for job in list(self._jobs):
            if not job.is_ending:
                self._give_back(job, "internal_error" if self._failure else "draining")
                self._drop(job)
        if left := list(self._jobs.values()):
            await asyncio.wait(left, timeout=CLEAN_UP_S)

    def _failed(self, error: BaseException) -> None:
        """Engine thread or a task: the worker leaves and exits with an error."""
        self._failure = error
        self._loop.call_soon_threadsafe(self._stop.set)

    # -- claiming

    @property
    def _room(self) -> int:
        """How many more requests to claim: enough to fill the next step, no more.

        What is not claimed stays open to other prefill workers.
        """
        budget = self._settings.max_num_batched_tokens
        # A long prompt takes half of a step when there are others: it must not keep these away.
        backlog = sum(min(job.num_uncomputed_tokens, budget // 2) for job in self._jobs)
        if backlog >= budget:
            return 0
        return self._settings.max_inflight_handoffs - len(self._jobs)

    async def _claim(self) -> None:
        if self._room <= 0 or not self._ferry.has_room or self._parts.blocked:
            await asyncio.sleep(NO_ROOM_PAUSE_S)
            return
        try:
            for claim in await self._claims.recover({(j.queue, j.entry_id) for j in self._jobs}):
                self._start(claim)
            for claim in await self._claims.read(self._room):
                self._start(claim)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await ensure_groups(self._bus.client, self._parts.keys)

    def _start(self, claim: Claim) -> None:
        request = claim.request
        if claim.expired:
            event = Event(
                request.request_id,
                request.epoch,
                Kind.REQUEUE,
                self._parts.worker_id,
                code="expired",
            )
            self._bus.emit([(request.gateway, event)])
            self._spawn(self._claims.settle(claim.queue, claim.entry_id))
            return
        hashes = self._parts.pool.hash_prefix(request.token_ids, request.salt)
        job = Job(request, claim.queue, claim.entry_id, hashes)
        self._jobs[job] = self._spawn(self._carry(job))

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job's cleaning up failed", exc_info=error)
            self._failed(error)

    # -- one job

    async def _carry(self, job: Job) -> None:
        job.is_started = True
        try:
            if self._cancels.covers(job.request):
                return
            self._say(job, Kind.OWNED)
            if job.num_tokens >= self._parts.max_model_len:
                # Decode workers may hold more; the gateway knows how much we do.
                self._give_back(job, "prefill_too_small")
                return
            await self._ferry.book(job)
            event = await asyncio.wrap_future(self._engine.compute(job))
            job.first_token = dataclasses.replace(event, num_cached_tokens=job.num_cached_tokens)
            self._bus.emit([(job.request.gateway, job.first_token)])
            if event.kind is Kind.TOKENS and not event.finish:
                await self._hand_over(job)
        except StepFailed:
            self._give_back(job, "step_failed")
        except HandoffFailed as error:
            log.warning("%s: %s", job.request.request_id, error)
            self._give_back(job, "handoff_failed")
        except Exception:
            log.exception("%s: job ended", job.request.request_id)
            self._give_back(job, "internal_error")
        finally:
            job.is_ending = True
            await self._clean_up(job)

    async def _hand_over(self, job: Job) -> None:
        """SEAL until some decode worker commits; after that it answers for the request."""
        assert job.first_token is not None
        for attempt in range(1, MAX_HANDOVERS + 1):
            assert job.handoff is not None
            try:
                await asyncio.wrap_future(job.handoff.seal(job.first_token))
            except HandoffFailed as error:
                log.warning(
                    "%s: handoff to %s failed (%d of %d): %s",
                    job.request.request_id,
                    job.decode_worker,
                    attempt,
                    MAX_HANDOVERS,
                    error,
                )
                await asyncio.wrap_future(job.handoff.detached)
                if error.uncertain:
                    break  # it may have committed: only another epoch is sure to run once
                if attempt < MAX_HANDOVERS:
                    await self._ferry.book(job)
                    layout = self._parts.memory.layout
                    push_all_layers(
                        job, job.handoff.skip_pages, len(job.page_ids), layout.num_layers
                    )
                continue
            self._say(job, Kind.OWNED, worker=job.decode_worker)
            return
        self._give_back(job, "handoff_failed")

    async def _clean_up(self, job: Job) -> None:
        """Whatever happened: let go of the handoff, the pages and the queue entry."""
        await asyncio.wrap_future(self._engine.withdraw(job))
        if job.handoff is not None:
            job.handoff.cancel("finished or dropped")
            await asyncio.wrap_future(job.handoff.detached)
        self._release_pages(job)
        try:
            # What was said of it must be in Redis first: should we die now, the entry that is still
            # pending tells the gateway.
            await self._bus.flushed()
            await self._claims.settle(job.queue, job.entry_id)
        finally:
            del self._jobs[job]

    def _release_pages(self, job: Job) -> None:
        pool, pages = self._parts.pool, job.page_ids
        job.page_ids = []
        if pages:
            full = job.num_computed_tokens // pool.page_size
            pool.register(pages[:full], job.hashes[:full])
            pool.release(pages)

    def _give_back(self, job: Job, code: str) -> None:
        self._say(job, Kind.REQUEUE, code=code)

    def _say(
        self, job: Job, kind: Kind, worker: str = "", code: str = "", message: str = ""
    ) -> None:
        event = Event(
            job.request.request_id,
            job.request.epoch,
            kind,
            worker or self._parts.worker_id,
            code=code,
            message=message,
        )
        self._bus.emit([(job.request.gateway, event)])

    # -- bus callbacks

    def _cancelled(self, cancels: list[Cancel]) -> None:
        epochs = {c.request_id: c.epoch for c in cancels}
        for cancel in cancels:
            self._cancels.add(cancel)
        for job in list(self._jobs):
            if job.request.epoch <= epochs.get(job.request.request_id, -1):
                self._drop(job)

    def _gateways(self) -> set[str]:
        return {job.request.gateway for job in self._jobs}

    def _gateway_lost(self, gateway: str) -> None:
        for job in list(self._jobs):
            if job.request.gateway == gateway:
                self._drop(job)

    def _drop(self, job: Job) -> None:
        """End a job wherever it stands; once only, since cleaning up must not be interrupted.

        One that has not started is left to `_cancels` and the next look at the gateways: a task
        cancelled before its first step would never clean up.
        """
        if job.is_started and not job.is_ending:
            job.is_ending = True
            self._jobs[job].cancel()

    def _record(self) -> WorkerRecord:
        engine = self._engine
        scheduler = engine.scheduler
        unconnected = self._state == "ready" and not self._ferry.is_connected
        state = "unconnected" if unconnected else self._state
        return dataclasses.replace(
            self._parts.record(state),
            num_running=len(scheduler.running),
            num_waiting=len(self._jobs) - len(scheduler.running),
            refusals=tuple(self._ferry.refusals),
            stats={
                **self._ferry.stats(),
                **self._parts.health.last.figures,
                names.WORKER_PROMPT_TOKENS: engine.num_prompt_tokens,
                names.WORKER_CACHED_TOKENS: engine.num_cached_tokens,
                **engine.clock.stats(),
                names.STEP_KERNEL_SECONDS: self._parts.runner.kernel_seconds,
                names.PREFILL_INFLIGHT: len(self._jobs),
                names.KV_LIVE_TOKENS: live_tokens(
                    ((list(j.page_ids), j.num_computed_tokens) for j in self._jobs),
                    self._parts.pool.page_size,
                ),
            },
        )
