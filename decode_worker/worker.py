"""A decode worker: takes sequences in over the handoff protocol, decodes them, emits their tokens.

Threads: the event loop (Redis, signals), the engine (compute), the handoff server's threads (page
transfer). Requests come in two ways:

1. handed over: HandoffServer -> `admit` -> pages filled -> `sealed` -> engine inbox -> running;
2. local prefill: stream `decode:<worker>` -> engine inbox -> waiting -> running.

Ends: finished, cancelled, preempted (REQUEUE), gateway lost. SIGTERM drains: nothing new is taken,
running sequences move to other decode workers (`departures`) or finish within `drain_s`, the rest
go back to their gateways, exit 0. POST /v1/workers/{id}/drain is the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Iterator, Sequence

from pageferry.decode_worker.departures import Departures
from pageferry.decode_worker.engine import (
    Engine,
    GatewayLost,
    GiveBack,
    LocalRequest,
    Stop,
)
from pageferry.decode_worker.scheduler import Limits
from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.bus import TRANSIENT
from pageferry.kvtransfer.engine_thread import JOIN_S, start_thread
from pageferry.kvtransfer.handoff import NEVER, Intake
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.heartbeat import EngineStuck
from pageferry.kvtransfer.keys import FIELD
from pageferry.kvtransfer.page_use import live_tokens
from pageferry.kvtransfer.settings import DecodeSettings, SettingsError
from pageferry.kvtransfer.sockets import LOOPBACK
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Request, WireError, WorkerRecord, unpack
from pageferry.kvtransfer.worker_bus import BLOCK_S, BusCallbacks, WorkerBus
from pageferry.kvtransfer.worker_setup import WorkerParts

log = logging.getLogger(__name__)


class DecodeWorker:
    """Wires bus, handoff server and engine together. `run` is the worker's whole life."""

    def __init__(self, parts: WorkerParts, settings: DecodeSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._state = "ready"
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
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
        limits = Limits(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            parts.max_model_len,
            settings.watermark_pages,
        )
        self._engine = Engine(parts.worker_id, parts.pool, parts.runner, limits, self._bus.emit)
        self._departures = Departures(parts, parts.ferry(), self._engine, self._bus)
        self._server = HandoffServer(
            parts.identity,
            parts.pool,
            parts.memory,
            self,
            ServerOptions(
                bind=settings.bind,
                port=settings.handoff_port,
                advertise=settings.advertise,
                transports=parts.transports,
                timeout_s=settings.handoff_timeout_s,
            ),
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises what ended the engine, if anything."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stop.set)
        self._listen()
        thread = start_thread(self._engine, self._failed)
        await self._bus.start()
        intake = self._bus.spawn("local prefill queue", self._take_local)
        health = self._bus.spawn("device health", self._parts.watch_health)
        await self._stop.wait()
        await self._drain()
        await end_tasks([intake, health])
        self._engine.inbox.put(Stop())
        # A stuck one will not end, and its sequences go on elsewhere once this worker has left.
        if not isinstance(self._failure, EngineStuck):
            await asyncio.to_thread(thread.join, JOIN_S)
        await asyncio.to_thread(self._server.close)
        await self._bus.close(self._parts.worker_id)
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> None:
        try:
            self._server.start()
        except OSError as error:
            where = f"--bind {self._settings.bind} --handoff-port {self._settings.handoff_port}"
            raise SettingsError(
                f"{where}: cannot listen there: {error}; name another port (0 for any) or address"
            ) from error
        if not self._settings.cluster_key and not self._settings.bind.startswith(LOOPBACK):
            log.warning(
                "no --cluster-key: whoever reaches %s may hand pages over", self._settings.bind
            )

    async def _drain(self) -> None:
        self._state = "failed" if self._failure else "draining"
        log.info("draining: %d sequences left", self._engine.num_running)
        try:
            await self._bus.publish()
        except TRANSIENT as error:
            log.warning("could not announce draining: %s", error)
        if self._failure is None:
            await self._departures.run(self._loop.time() + self._settings.drain_s)
            log.info("%d sequences moved to other decode workers", self._departures.num_moved)
        self._engine.inbox.put(GiveBack("draining"))

    def _failed(self, error: BaseException) -> None:
        """Engine thread or a task: the worker leaves and exits with an error."""
        self._failure = error
        self._departures.stop()
        self._loop.call_soon_threadsafe(self._stop.set)

    # -- handoff listener (connection threads)

    def admit(self, request: Request, num_pages: int) -> str:
        if self._state != "ready":
            return self._state
        if len(request.token_ids) >= self._parts.max_model_len:
            longest = self._parts.max_model_len
            return f"{NEVER}{len(request.token_ids)} tokens, max_model_len is {longest}"
        if self._parts.blocked:
            return self._parts.blocked
        if self._engine.num_running + self._engine.num_waiting >= self._settings.max_num_seqs:
            return "max_num_seqs reached"
        ledger = self._parts.pool.ledger()
        busy = ledger.live or ledger.reserved
        reserve = self._settings.watermark_pages if busy else 0
        if ledger.available < num_pages + reserve:
            return f"needs {num_pages} pages, {ledger.available} are available"
        return ""

    def sealed(self, intake: Intake) -> None:
        self._engine.inbox.put(intake)

    # -- bus callbacks (event loop)

    def _cancelled(self, cancels: list[Cancel]) -> None:
        for cancel in cancels:
            self._server.cancel(cancel.request_id, cancel.epoch)
            self._engine.inbox.put(cancel)
            self._departures.cancel(cancel)

    def _gateways(self) -> set[str]:
        moving = {departure.request.gateway for departure in self._departures.moving}
        return self._engine.gateways() | moving

    def _gateway_lost(self, gateway: str) -> None:
        self._departures.gateway_lost(gateway)
        self._engine.inbox.put(GatewayLost(gateway))

    def _record(self) -> WorkerRecord:
        engine, server = self._engine, self._server
        stats = {
            **server.stats(),
            **self._parts.health.last.figures,
            names.WORKER_GENERATION_TOKENS: engine.num_generated_tokens,
            names.WORKER_PROMPT_TOKENS: engine.num_prefilled_tokens,
            names.WORKER_CACHED_TOKENS: engine.num_cached_tokens,
            names.SEQUENCES_HANDED_OVER: self._departures.num_moved,
            names.KV_LIVE_TOKENS: live_tokens(self._live(), self._parts.pool.page_size),
            names.NUM_PREEMPTIONS: engine.scheduler.num_preemptions,
            **engine.clock.stats(),
            names.STEP_KERNEL_SECONDS: self._parts.runner.kernel_seconds,
        }
        return dataclasses.replace(
            self._parts.record(self._state),
            addresses=server.addresses,
            num_running=engine.num_running + len(self._departures.moving),
            num_waiting=engine.num_waiting,
            refusals=tuple(server.refusals),
            stats=stats,
        )

    def _live(self) -> Iterator[tuple[Sequence[int], int]]:
        """Pages and computed tokens of every sequence, as they are at this moment."""
        moving = (departure.sequence for departure in self._departures.moving)
        for sequence in (*self._engine.scheduler.running, *moving):
            yield sequence.page_ids[:], sequence.num_computed_tokens

    # -- local prefill

    async def _take_local(self) -> None:
        queue = self._parts.keys.decode_queue(self._parts.worker_id)
        reply = await self._bus.client.xread({queue: b"0"}, count=64, block=int(BLOCK_S * 1000))
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self._local_entry(fields)
                await self._bus.client.xdel(queue, entry_id)

    def _local_entry(self, fields: dict[bytes, bytes]) -> None:
        try:
            request = Request.from_dict(unpack(fields[FIELD]))
        except (WireError, KeyError) as error:
            log.warning("local prefill entry ignored: %s", error)
            return
        worker = self._parts.worker_id
        if self._state == "ready":
            event = Event(request.request_id, request.epoch, Kind.OWNED, worker)
            self._engine.inbox.put(LocalRequest(request))
        else:
            event = Event(request.request_id, request.epoch, Kind.REQUEUE, worker, code=self._state)
        self._bus.emit([(request.gateway, event)])
