"""A worker's side of Redis: heartbeat, control messages, token emission, liveness of gateways.

Everything here runs on the worker's event loop, but the beats themselves (`heartbeat`). The engine
thread only calls `emit`, which never blocks and wakes the loop once for all that the loop has not
yet looked at. Tasks survive Redis outages: they wait, reconnect and go on; what is unsent meanwhile
stays in a bounded buffer.

A beat's answer tells when Redis may have lost what it had accepted: the lease was not there, or
another server process answered (restart, failover). Then every connection is made anew, because
some may still lead to the former server, and the control stream is read again from its beginning.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pageferry.kvtransfer import alive_file
from pageferry.kvtransfer.bus import (
    DENIED,
    TOKENS_LIFETIME_LEASES,
    TRANSIENT,
    Client,
    connect,
    publish_worker,
    retire_worker,
)
from pageferry.kvtransfer.heartbeat import BEATS_PER_LEASE, Heartbeat, Patient, never_stuck
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.retries import Outage
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import (
    Cancel,
    Drain,
    Event,
    WireError,
    WorkerRecord,
    pack_events,
    unpack_control,
)

log = logging.getLogger(__name__)

MAX_UNSENT_EVENTS = 200_000
"""Events kept during an outage; beyond that the oldest go, and their gateways
see a gap and resubmit."""

MAX_TOKEN_ENTRIES = 100_000
"""Bound of a `tokens:<gateway>` stream whose gateway does not read."""

BLOCK_S = 2.0
ARRIVE_S = 1.0


@dataclass(frozen=True)
class BusCallbacks:
    """What the bus asks of its worker; all are called on the event loop."""

    record: Callable[[], WorkerRecord]
    cancelled: Callable[[list[Cancel]], None]
    drain: Callable[[], None]
    """An operator wants this worker to finish or hand over what it has, and to leave."""
    active_gateways: Callable[[], set[str]]
    """Gateways that this worker holds requests of."""
    gateway_lost: Callable[[str], None]
    failed: Callable[[BaseException], None]
    """The worker cannot go on: a task or the engine is broken, or Redis does not let it in."""
    stuck: Callable[[], str] = never_stuck
    """Why the engine does not count as alive, else empty; called in another thread."""


async def forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Repeat `step`; when Redis fails it, try again with growing pauses."""
    outage = Outage(name)
    while True:
        try:
            await step()
            outage.over()
        except TRANSIENT as error:
            await outage.wait(error)


class WorkerBus:
    """Connects one worker to its registry entry, the control stream and the gateways."""

    def __init__(
        self, url: str, keys: Keys, lease_s: float, callbacks: BusCallbacks, alive_file: str = ""
    ) -> None:
        """`alive_file`: see the module of that name; empty for none."""
        self.keys = keys
        self.client: Client = connect(url, keys, max_block_s=BLOCK_S)
        # A connection of its own for tokens: 75 us of CPU a step instead of 125 through the pool.
        self._token_client: Client = self.client.client()
        self._lease_s = lease_s
        self._callbacks = callbacks
        self._alive_file = alive_file
        self._alive_fails = False
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[tuple[str, Event]] = collections.deque(
            maxlen=MAX_UNSENT_EVENTS
        )
        self._sending = False
        self._wake = asyncio.Event()
        self._is_waking = False
        self._control_id = b""
        self._arrived = asyncio.Event()
        self._missed: dict[str, int] = {}
        self._sent_to: set[str] = set()
        """Gateways whose token stream needs a new expiry."""
        self._server = ""
        self._doubt = asyncio.Event()
        self._record: WorkerRecord | None = None
        """What the next beat publishes."""
        patient = Patient(self._beat, callbacks.failed, callbacks.stuck)
        self._heartbeat = Heartbeat(url, keys, lease_s, patient)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the background tasks: they arrive when Redis is there, now or later.

        Returns after the arrival, or after `ARRIVE_S` without.
        """
        steps = {
            "control": self._read_control,
            "record": self._say_record,
            "emit": self._send,
            "gateways": self._check_gateways,
            "server": self._begin_anew,
        }
        for name, step in steps.items():
            self._tasks.append(self.spawn(name, step))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVE_S):
                await self._arrived.wait()

    def spawn(self, name: str, step: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `step` for ever in a task whose unexpected end ends the worker."""
        task = self._loop.create_task(forever(name, step), name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task %s ended", task.get_name(), exc_info=error)
            self._callbacks.failed(error)

    def emit(self, events: Iterable[tuple[str, Event]]) -> None:
        """Queue (gateway, event) pairs for sending, in order. Any thread; never blocks."""
        self._unsent.extend(events)
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def publish(self) -> None:
        """Renew the lease and publish the record now."""
        self._record = self._callbacks.record()
        await publish_worker(self.client, self.keys, self._record, self._lease_s)

    async def flushed(self) -> None:
        """Return when Redis has everything that was emitted before; the caller sets a bound."""
        while self._unsent or self._sending:
            self._wake.set()
            await asyncio.sleep(0.005)

    async def close(self, worker_id: str, flush_s: float = 2.0) -> None:
        """Send what is unsent (within `flush_s` seconds), leave the registry, disconnect."""
        try:
            async with asyncio.timeout(flush_s):
                await self.flushed()
                await end_tasks(self._tasks)
                await asyncio.to_thread(self._heartbeat.stop)
                on_purpose = self._callbacks.record().state == "draining"
                await retire_worker(self.client, self.keys, worker_id, on_purpose=on_purpose)
        except TRANSIENT as error:
            log.warning("leaving the registry failed: %s: %s", type(error).__name__, error)
        await end_tasks(self._tasks)
        await asyncio.to_thread(self._heartbeat.stop)
        await self._token_client.aclose()
        await self.client.aclose()

    async def _say_record(self) -> None:
        await self._arrived.wait()
        self._record = self._callbacks.record()
        self._heartbeat.say()
        await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)

    async def _beat(self, client: Client) -> None:
        """Runs in the heartbeat's thread."""
        assert self._record is not None, "the heartbeat began before the worker had a record"
        record, until = self._record, time.monotonic() + self._lease_s
        renewal = await publish_worker(client, self.keys, record, self._lease_s)
        if self._server and (renewal.lapsed or renewal.server != self._server):
            log.warning("Redis is another server, or our lease had lapsed: all is read again")
            self._loop.call_soon_threadsafe(self._doubt.set)
        self._server = renewal.server
        if self._alive_file:
            self._write_alive_file(until, record.state)

    def _write_alive_file(self, until: float, state: str) -> None:
        """Whoever looks at the file sees that it is old; no reason to call Redis away."""
        try:
            alive_file.write(self._alive_file, until, state)
            self._alive_fails = False
        except OSError as error:
            if not self._alive_fails:
                log.warning("--alive-file %s: %s", self._alive_file, error)
            self._alive_fails = True

    async def _begin_anew(self) -> None:
        await self._doubt.wait()
        self._doubt.clear()
        self._control_id = b"0-0"
        await self.client.connection_pool.disconnect()

    async def _arrive(self) -> None:
        """Note where the control stream ends.

        This comes before the worker registers, so no cancel for a request that it may be given can
        be missed. A server that refuses us now is a mistake to be mended, not an outage.
        """
        try:
            last = await self.client.xrevrange(self.keys.control, count=1)
        except DENIED as error:
            self._callbacks.failed(error)
            raise
        self._control_id = last[0][0] if last else b"0-0"
        self._arrived.set()

    async def _read_control(self) -> None:
        if not self._control_id:
            await self._arrive()
        reply = await self.client.xread(
            {self.keys.control: self._control_id}, count=1000, block=int(BLOCK_S * 1000)
        )
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self._control_id = entry_id
                try:
                    messages = unpack_control(fields[FIELD])
                except (WireError, KeyError) as error:
                    log.warning("control entry %s ignored: %s", entry_id.decode(), error)
                    continue
                if cancels := [m for m in messages if isinstance(m, Cancel)]:
                    self._callbacks.cancelled(cancels)
                drains = [m for m in messages if isinstance(m, Drain)]
                if drains and Drain(self._callbacks.record().id) in drains:
                    self._callbacks.drain()

    async def _send(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._is_waking = False  # before the queue is read: what comes later wakes us again
        by_gateway: dict[str, list[Event]] = {}
        self._sending = True
        batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), 4096))]
        for gateway, event in batch:
            by_gateway.setdefault(gateway, []).append(event)
        self._sent_to.update(by_gateway)
        try:
            if len(by_gateway) == 1:
                ((gateway, events),) = by_gateway.items()
                await self._add(self._token_client, gateway, events)
            elif by_gateway:
                async with self.client.pipeline(transaction=False) as pipe:
                    for gateway, events in by_gateway.items():
                        self._add(pipe, gateway, events)
                    await pipe.execute()
        except TRANSIENT:
            # Some may have arrived; the gateway drops duplicates by index.
            room = MAX_UNSENT_EVENTS - len(self._unsent)
            self._unsent.extendleft(reversed(batch[len(batch) - min(room, len(batch)) :]))
            self._wake.set()
            raise
        finally:
            self._sending = False
        if self._unsent:
            self._wake.set()

    def _add(self, client: Client, gateway: str, events: list[Event]) -> Awaitable[None]:
        """One entry to a gateway's token stream; to be awaited unless `client` is a pipeline."""
        added: Awaitable[None] = client.execute_command(
            *("XADD", self.keys.tokens(gateway), "MAXLEN", "~", MAX_TOKEN_ENTRIES, "*"),
            *(FIELD, pack_events(events)),
        )
        return added

    async def _check_gateways(self) -> None:
        await asyncio.sleep(self._lease_s / 2)
        await self._let_streams_expire()
        gateways = sorted(self._callbacks.active_gateways())
        self._missed = {g: n for g, n in self._missed.items() if g in gateways}
        if not gateways:
            return
        values = await self.client.mget([self.keys.gateway(g) for g in gateways])
        for gateway, value in zip(gateways, values, strict=True):
            self._missed[gateway] = 0 if value is not None else self._missed.get(gateway, 0) + 1
            # Twice, because the key also lapses when Redis itself was away for a lease.
            if self._missed[gateway] == 2:
                log.warning("gateway %s is gone: its requests are dropped", gateway)
            if self._missed[gateway] >= 2:
                self._callbacks.gateway_lost(gateway)

    async def _let_streams_expire(self) -> None:
        """A token stream that we made after its gateway's end must not stay for ever."""
        if not self._sent_to:
            return
        lifetime_ms = int(TOKENS_LIFETIME_LEASES * self._lease_s * 1000)
        async with self.client.pipeline(transaction=False) as pipe:
            for gateway in self._sent_to:
                pipe.pexpire(self.keys.tokens(gateway), lifetime_ms)
            await pipe.execute()
        self._sent_to.clear()
