"""A worker's side of Redis: heartbeat, control messages, token emission, liveness of gateways.

Everything here runs on the worker's event loop. The engine thread only calls `emit`, which never
blocks and wakes the loop once for all that the loop has not yet looked at. Tasks survive Redis
outages: they wait, reconnect and go on; what is unsent meanwhile stays in a bounded buffer.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pageferry.kvtransfer.bus import TRANSIENT, Client, connect, publish_worker, retire_worker
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import (
    Cancel,
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


@dataclass(frozen=True)
class BusCallbacks:
    """What the bus asks of its worker; all are called on the event loop."""

    record: Callable[[], WorkerRecord]
    cancelled: Callable[[list[Cancel]], None]
    active_gateways: Callable[[], set[str]]
    """Gateways that this worker holds requests of."""
    gateway_lost: Callable[[str], None]
    failed: Callable[[BaseException], None]
    """A task ended with this exception, which is a bug: a worker must not go on half dead."""


async def forever(
    name: str, step: Callable[[], Awaitable[None]], *, max_pause_s: float = 1.0
) -> None:
    """Repeat `step`; on a Redis failure say so once, then retry with growing pauses."""
    failures = 0
    while True:
        try:
            await step()
            if failures:
                log.info("%s: Redis is back", name)
            failures = 0
        except TRANSIENT as error:
            failures += 1
            if failures == 1:
                log.warning("%s: Redis: %s: %s", name, type(error).__name__, error)
            await asyncio.sleep(min(max_pause_s, 0.05 * 2 ** min(failures, 10)))


class WorkerBus:
    """Connects one worker to its registry entry, the control stream and the gateways."""

    def __init__(self, url: str, keys: Keys, lease_s: float, callbacks: BusCallbacks) -> None:
        self.keys = keys
        self.client: Client = connect(url, max_block_s=BLOCK_S)
        # A connection of its own for tokens: 75 us of CPU a step instead of 125 through the pool.
        self._token_client: Client = self.client.client()
        self._lease_s = lease_s
        self._callbacks = callbacks
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[tuple[str, Event]] = collections.deque(
            maxlen=MAX_UNSENT_EVENTS
        )
        self._sending = False
        self._wake = asyncio.Event()
        self._is_waking = False
        self._control_id = b"$"
        self._missed: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Note where the control stream ends, then run the background tasks.

        The control position is taken before the worker registers, so no cancel for a request that
        it may be given can be missed. `RedisError` or `OSError` when Redis is not there.
        """
        last = await self.client.xrevrange(self.keys.control, count=1)
        self._control_id = last[0][0] if last else b"0-0"
        steps = {
            "heartbeat": self._heartbeat,
            "control": self._read_control,
            "emit": self._send,
            "gateways": self._check_gateways,
        }
        for name, step in steps.items():
            self._tasks.append(self.spawn(name, step))

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
        await publish_worker(self.client, self.keys, self._callbacks.record(), self._lease_s)

    async def close(self, worker_id: str, flush_s: float = 2.0) -> None:
        """Send what is unsent (within `flush_s` seconds), leave the registry, disconnect."""
        try:
            async with asyncio.timeout(flush_s):
                while self._unsent or self._sending:
                    self._wake.set()
                    await asyncio.sleep(0.01)
                await end_tasks(self._tasks)
                await retire_worker(self.client, self.keys, worker_id)
        except TRANSIENT as error:
            log.warning("leaving the registry failed: %s: %s", type(error).__name__, error)
        for task in self._tasks:
            task.cancel()
        await self._token_client.aclose()
        await self.client.aclose()

    async def _heartbeat(self) -> None:
        await self.publish()
        await asyncio.sleep(self._lease_s / 3)

    async def _read_control(self) -> None:
        reply = await self.client.xread(
            {self.keys.control: self._control_id}, count=1000, block=int(BLOCK_S * 1000)
        )
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self._control_id = entry_id
                try:
                    self._callbacks.cancelled(unpack_control(fields[FIELD]))
                except (WireError, KeyError) as error:
                    log.warning("control entry %s ignored: %s", entry_id.decode(), error)

    async def _send(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._is_waking = False  # before the queue is read: what comes later wakes us again
        by_gateway: dict[str, list[Event]] = {}
        self._sending = True
        batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), 4096))]
        for gateway, event in batch:
            by_gateway.setdefault(gateway, []).append(event)
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
