"""The gateway as one object: its parts, its background tasks, its shutdown.

`start` opens the port (`front`). Three tasks then run until the end: the outbox (all writes), the
token reader, the watcher. `stop` is the way out of SIGTERM:

1. not ready, new calls get 503; running ones go on, up to `drain_s`;
2. what still runs then ends with an error (an error event where a stream had begun);
3. the server closes, what the outbox still holds (cancels) is sent, the lease is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor

from pageferry.gateway.admission import Admission
from pageferry.gateway.calls import CallContext, Calls
from pageferry.gateway.dispatch import Dispatcher
from pageferry.gateway.encoding import num_lanes
from pageferry.gateway.errors import unavailable
from pageferry.gateway.fleet import Fleet
from pageferry.gateway.front import Front
from pageferry.gateway.metrics import GatewayMetrics, LiveGauges
from pageferry.gateway.operations import Operations
from pageferry.gateway.outbox import Outbox, RedisHealth
from pageferry.gateway.text import Tokenizer
from pageferry.gateway.tokens import BLOCK_S, TokenReader
from pageferry.gateway.watch import Watcher
from pageferry.kvtransfer.bus import TRANSIENT, connect, control_command
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.tasks import end_tasks

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""For the last cancels and the lease, after the drain time."""
MAX_THREADS = 4


class Gateway:
    def __init__(self, settings: GatewaySettings, model: str, tokenizer: Tokenizer) -> None:
        """`ValueError` or `OSError` if keys, certificate, origins or Redis URL cannot be used."""
        self.settings = settings
        self.id = f"gw-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.keys = Keys(model)
        self.front = Front(settings)
        self.fleet, self.health, self.metrics = Fleet(), RedisHealth(), GatewayMetrics(model)
        self.admission = Admission(settings, self.fleet, tokenizer.context_len)
        self._client, self._outbox_client, self._reader_client = (
            connect(settings.redis_url, self.keys, max_block_s=BLOCK_S) for _ in range(3)
        )
        self.outbox = Outbox(self._outbox_client, self.health)
        self.dispatcher = Dispatcher(self.outbox, self.keys, settings, self.fleet, self.metrics)
        parts = (self.dispatcher, self.fleet, self.metrics, self.health)
        self.watcher = Watcher(self._client, self.keys, self.id, settings, parts)
        self.reader = TokenReader(
            self._reader_client,
            self.keys.tokens(self.id),
            self.dispatcher.on_event,
            lambda: self.watcher.losses,
            self.health,
        )
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "prepare")
        self._long_threads = ThreadPoolExecutor(num_lanes(), "prepare-long")
        self._calls = self._make_calls(model, tokenizer)
        self._operations = self._make_operations(model)
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception of a background task that ended: a bug, the process must go."""

    def _make_calls(self, model: str, tokenizer: Tokenizer) -> Calls:
        context = CallContext(
            self.settings,
            model,
            self.id,
            tokenizer,
            self.admission,
            self.dispatcher,
            self.metrics,
            self._threads,
            self._long_threads,
        )
        return Calls(context)

    def _make_operations(self, model: str) -> Operations:
        gauges = LiveGauges(
            model,
            self.fleet,
            lambda: list(self.dispatcher.generations.values()),
            lambda: self.health.up,
        )
        self.metrics.registry.register(gauges)
        return Operations(
            model,
            (self.fleet, self.health, self.admission, self.metrics),
            lambda message: self.outbox.sent(control_command(self.keys, message)),
        )

    async def start(self) -> None:
        """Open the port and start the tasks. `OSError` when the address cannot be had.

        A missing Redis is no error: the gateway answers 503 until it is there.
        """
        try:
            await self.front.open(self._calls, self._operations, self.metrics)
        except OSError:
            await self._close_clients()
            raise
        for name, task in (
            ("outbox", self.outbox.run()),
            ("tokens", self.reader.run()),
            ("watcher", self.watcher.run()),
        ):
            self._tasks.append(asyncio.create_task(task, name=name))
            self._tasks[-1].add_done_callback(self._task_ended)
        log.info("gateway %s listens on %s", self.id, self.front.url)

    @property
    def port(self) -> int:
        """Where it listens; 0 before `start`."""
        return self.front.port

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self.failed.done():
            error = task.exception() or RuntimeError(f"task {task.get_name()} ended")
            self.failed.set_exception(error)

    async def stop(self) -> None:
        """Drain, then close everything. Takes at most `drain_s` and a few seconds."""
        self.admission.draining = True
        count = len(self.dispatcher.generations)
        if count:
            log.info("draining: %d sequences, at most %g s", count, self.settings.drain_s)
        patience = 0.0 if self.failed.done() else self.settings.drain_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.dispatcher.idle.wait(), patience)
        error = unavailable("This gateway is shutting down; try again.", "shutting_down", 1)
        for generation in list(self.dispatcher.generations.values()):
            self.dispatcher.end(generation, "error", error)
        await self.front.close()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.outbox.flushed()
        except TimeoutError:
            log.warning("Redis did not take the last cancels")
        await end_tasks(self._tasks)
        await self._leave()
        await self._close_clients()
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._client.delete(self.keys.gateway(self.id), self.keys.tokens(self.id))
        except TRANSIENT as error:
            log.warning("the lease was left to lapse: %s", type(error).__name__)

    async def _close_clients(self) -> None:
        for client in (self._client, self._outbox_client, self._reader_client):
            await client.aclose()
