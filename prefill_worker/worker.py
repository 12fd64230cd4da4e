"""A prefill worker: claims prompts, computes their KV pages, ferries them to decode workers.

Threads: the event loop (Redis, signals, one task per job), the engine (compute), two threads per
connected decode worker (page transfer). A job's life is `_carry`, top to bottom:

1. claim: read from the queues when the engine is short of work and some decode worker has room;
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
from pageferry.kvtransfer.engine_thread import start_thread
from pageferry.kvtransfer.handoff import HandoffFailed
from pageferry.kvtransfer.handoff_client import ClientOptions
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP
from pageferry.kvtransfer.recent_cancels import RecentCancels
from pageferry.kvtransfer.settings import PrefillSettings
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Request, WireError, WorkerRecord, unpack
from pageferry.kvtransfer.worker_bus import BLOCK_S, BusCallbacks, WorkerBus
from pageferry.kvtransfer.worker_setup import WorkerParts
from pageferry.prefill_worker.engine import (
    Engine,
    Limits,
    StepFailed,
    push_all_layers,
)
from pageferry.prefill_worker.ferry import Ferry
from pageferry.prefill_worker.job import Job

log = logging.getLogger(__name__)

MAX_HANDOVERS = 3
NO_ROOM_PAUSE_S = 0.02
CLEAN_UP_S = 3.0
"""What jobs get to clean up at the end; a dead engine or Redis would hold them for ever."""
RECOVER_S = 5.0
"""How often our own pending entries are compared with our jobs."""


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
        self._recover_at = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._cancels = RecentCancels()
        self._bus = WorkerBus(
            settings.redis_url,
            parts.keys,
            settings.lease_s,
            BusCallbacks(
                self._record, self._cancelled, self._gateways, self._gateway_lost, self._failed
            ),
        )
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
        transport = settings.transport if len(parts.transports) > 1 else parts.transports[0]
        self._ferry = Ferry(
            parts.identity,
            parts.memory,
            parts.keys,
            ClientOptions(transport=transport, timeout_s=settings.handoff_timeout_s),
        )

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
        await asyncio.to_thread(thread.join, 5)
        await self._ferry.close()
        await self._bus.close(self._parts.worker_id)
        if self._failure is not None:
            raise self._failure

    async def _follow(self) -> None:
        await self._ferry.refresh(self._bus.client)

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
            await self._recover()
            entries = await self._read_queues()
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await ensure_groups(self._bus.client, self._parts.keys)
            return
        for queue, entry_id, fields in entries:
            self._start(queue, entry_id, fields)

    async def _recover(self) -> None:
        """Start what was delivered to us in a reply that got lost."""
        if self._loop.time() < self._recover_at:
            return
        self._recover_at = self._loop.time() + RECOVER_S
        known = {(job.queue, job.entry_id) for job in self._jobs}
        for queue in self._parts.keys.prefill_queues:
            for name, entry_id, fields in await self._read({queue: "0"}, 1000, None):
                if (name, entry_id) not in known:
                    self._start(name, entry_id, fields)

    async def _read_queues(self) -> list[tuple[str, bytes, Any]]:
        """New entries of the first class that has some; waits when none has."""
        for queue in self._parts.keys.prefill_queues:
            if found := await self._read({queue: ">"}, self._room, None):
                return found
        everything = dict.fromkeys(self._parts.keys.prefill_queues, ">")
        return await self._read(everything, 1, int(BLOCK_S * 1000))

    async def _read(
        self, streams: dict[str, str], count: int, block_ms: int | None
    ) -> list[tuple[str, bytes, Any]]:
        reply = await self._bus.client.xreadgroup(
            PREFILL_GROUP, self._parts.worker_id, streams, count=max(1, count), block=block_ms
        )
        return [
            (queue.decode(), entry_id, fields)
            for queue, entries in reply or ()
            for entry_id, fields in entries
        ]

    def _start(self, queue: str, entry_id: bytes, fields: Any) -> None:
        try:
            request = Request.from_dict(unpack(fields[FIELD]))
        except (WireError, KeyError, TypeError) as error:
            log.warning("queue entry %s ignored: %s", entry_id.decode(), error)
            self._spawn(self._ack(queue, entry_id))
            return
        hashes = self._parts.pool.hash_prefix(request.token_ids, request.salt)
        job = Job(request, queue, entry_id, hashes)
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
            if not self._fits(job):
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

    def _fits(self, job: Job) -> bool:
        longest = self._parts.max_model_len
        if job.num_tokens < longest:
            return True
        self._say(
            job,
            Kind.ERROR,
            code="context_length_exceeded",
            message=f"The prompt has {job.num_tokens} tokens; sequences on this worker have at "
            f"most {longest}.",
        )
        return False

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
            await self._ack(job.queue, job.entry_id)
        finally:
            del self._jobs[job]

    def _release_pages(self, job: Job) -> None:
        pool, pages = self._parts.pool, job.page_ids
        job.page_ids = []
        if pages:
            full = job.num_computed_tokens // pool.page_size
            pool.register(pages[:full], job.hashes[:full])
            pool.release(pages)

    async def _ack(self, queue: str, entry_id: bytes) -> None:
        """Delete an entry, however long Redis is away; deleting twice is harmless."""
        while True:
            try:
                async with self._bus.client.pipeline(transaction=True) as pipe:
                    pipe.xack(queue, PREFILL_GROUP, entry_id)
                    pipe.xdel(queue, entry_id)
                    await pipe.execute()
                return
            except TRANSIENT as error:
                log.warning("ack waits for Redis: %s", error)
                await asyncio.sleep(0.5)

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
        return dataclasses.replace(
            self._parts.record(self._state),
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
            },
        )
