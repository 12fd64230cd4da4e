"""The gateway as one object: its parts, its background tasks, its HTTP server, its shutdown.

`start` connects the parts and opens the port. Three tasks then run until the end: the outbox (all
writes), the token reader, the watcher. `stop` is the way out of SIGTERM:

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
import ssl
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from pageferry.gateway.access import CrossOrigin, authenticate
from pageferry.gateway.admission import Admission
from pageferry.gateway.api_keys import KeyRing
from pageferry.gateway.calls import CallContext, Calls
from pageferry.gateway.dispatch import Dispatcher
from pageferry.gateway.encoding import num_lanes
from pageferry.gateway.errors import unavailable
from pageferry.gateway.fleet import Fleet
from pageferry.gateway.metrics import GatewayMetrics, LiveGauges
from pageferry.gateway.operations import Operations
from pageferry.gateway.outbox import Outbox, RedisHealth
from pageferry.gateway.text import Tokenizer
from pageferry.gateway.tokens import BLOCK_S, TokenReader
from pageferry.gateway.watch import Watcher
from pageferry.gateway.web_errors import JsonRunner, add_request_id, errors_as_json
from pageferry.kvtransfer.bus import TRANSIENT, connect, control_command
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.tasks import end_tasks

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Seconds without a request after which a client's idle connection is closed."""
FAREWELL_S = 2.0
"""For error events, last cancels and the lease, after the drain time."""
MAX_THREADS = 4
LOOPBACK = ("127.", "::1", "localhost")


class Gateway:
    def __init__(self, settings: GatewaySettings, model: str, tokenizer: Tokenizer) -> None:
        """`ValueError` when keys, certificate, origins or the Redis URL cannot be used."""
        self.settings = settings
        self._access = KeyRing(
            settings.api_key, Path(settings.api_keys_file) if settings.api_keys_file else None
        )
        self._cross_origin = CrossOrigin(settings.cors_origins)
        self._tls = tls_context(settings)
        self.id = f"gw-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.keys = Keys(model)
        self.fleet = Fleet()
        self.health = RedisHealth()
        self.metrics = GatewayMetrics(model)
        self.admission = Admission(settings, self.fleet, tokenizer.context_len)
        self._client = connect(settings.redis_url, self.keys, max_block_s=BLOCK_S)
        self._outbox_client = connect(settings.redis_url, self.keys, max_block_s=BLOCK_S)
        self._reader_client = connect(settings.redis_url, self.keys, max_block_s=BLOCK_S)
        self.outbox = Outbox(self._outbox_client, self.health)
        self.dispatcher = Dispatcher(self.outbox, self.keys, settings, self.fleet, self.metrics)
        self.watcher = Watcher(
            self._client,
            self.keys,
            self.id,
            settings,
            (self.dispatcher, self.fleet, self.metrics, self.health),
        )
        self.reader = TokenReader(
            self._reader_client,
            self.keys.tokens(self.id),
            self.dispatcher.on_event,
            lambda: self.watcher.losses,
            self.health,
        )
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "prepare")
        self._long_threads = ThreadPoolExecutor(num_lanes(), "prepare-long")
        self._context = CallContext(
            settings,
            model,
            self.id,
            tokenizer,
            self.admission,
            self.dispatcher,
            self.metrics,
            self._threads,
            self._long_threads,
        )
        self.metrics.registry.register(
            LiveGauges(
                model,
                self.fleet,
                lambda: list(self.dispatcher.generations.values()),
                lambda: self.health.up,
            )
        )
        self._operations = Operations(
            model,
            (self.fleet, self.health, self.admission, self.metrics),
            lambda message: self.outbox.sent(control_command(self.keys, message)),
        )
        self._runner: JsonRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception of a background task that ended: a bug, the process must go."""
        self.port = 0

    def _application(self) -> web.Application:
        limit = int(self.settings.max_body_mib * 2**20)
        middlewares = [
            errors_as_json(self.metrics),
            self._cross_origin.preflight,
            authenticate(self._access, self._cross_origin, self.metrics),
        ]
        app = web.Application(middlewares=middlewares, client_max_size=limit)
        app.on_response_prepare.append(add_request_id)
        app.on_response_prepare.append(self._cross_origin.add_headers)
        calls, operations = Calls(self._context), self._operations
        app.router.add_post("/v1/completions", calls.completions)
        app.router.add_post("/v1/chat/completions", calls.chat)
        app.router.add_get("/v1/models", operations.models)
        app.router.add_get("/v1/models/{model:.+}", operations.one_model)
        app.router.add_get("/v1/workers", operations.workers)
        app.router.add_post("/v1/workers/{worker}/drain", operations.drain)
        app.router.add_get("/health", operations.health)
        app.router.add_get("/ready", operations.ready)
        app.router.add_get("/metrics", operations.metrics)
        app.router.add_get("/version", operations.version)
        return app

    async def start(self) -> None:
        """Open the port and start the tasks. `OSError` when the address cannot be had.

        A missing Redis is no error: the gateway answers 503 until it is there.
        """
        self._runner = JsonRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=FAREWELL_S,
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        host, port = self.settings.host, self.settings.port
        site = web.TCPSite(self._runner, host, port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            await self._close_clients()
            raise
        self.port = self._runner.addresses[0][1]
        for name, task in (
            ("outbox", self.outbox.run()),
            ("tokens", self.reader.run()),
            ("watcher", self.watcher.run()),
        ):
            self._tasks.append(asyncio.create_task(task, name=name))
            self._tasks[-1].add_done_callback(self._task_ended)
        scheme = "http" if self._tls is None else "https"
        log.info("gateway %s listens on %s://%s:%d", self.id, scheme, host, self.port)
        if not self._access.required and not host.startswith(LOOPBACK):
            log.warning(
                "no API keys: everybody who can reach %s:%d may call (see --api-keys-file)",
                host,
                self.port,
            )

    @property
    def can_reload(self) -> bool:
        """There are files that `reload` reads."""
        return bool(self.settings.api_keys_file) or self._tls is not None

    def reload(self) -> None:
        """Read API keys and certificate again; what cannot be used leaves the old ones valid."""
        try:
            self._access.load()
            log.info("API keys read: %d", len(self._access))
            if self._tls is not None:
                load_certificate(self._tls, self.settings)
                log.info("certificate read")
        except (ValueError, OSError) as error:
            log.error("reload failed, the old state stays: %s", error)

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
        if self._runner is not None:
            await self._runner.cleanup()
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


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured certificate; None without one.

    `ValueError` or `OSError` (which `ssl.SSLError` is) when it cannot be used.
    """
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ValueError("--tls-cert and --tls-key are needed together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: GatewaySettings) -> None:
    """Also into a context that is in use: new connections get the new certificate."""
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password=no_password)


def no_password() -> str:
    raise ValueError("--tls-key is encrypted; it must not be")
