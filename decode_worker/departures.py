"""What a draining decode worker does with its running sequences: they move to other decode workers.

Life of one departure: the engine lets go of a sequence between two tokens -> pages are booked on
another worker -> all pages are pushed, every token so far is with the gateway -> SEAL, COMMIT ->
the gateway hears who answers now, our pages become cache. Nothing is recomputed: the other worker
goes on with the next token, under the same epoch.

Without room there, the sequence goes on here and is tried again, as long as the worker may drain.
If it is uncertain whether the other worker has it, the gateway gets it back: under the next epoch
it is sure to run once. What cannot move (a prompt being prefilled here) finishes that first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass

from pageferry.decode_worker.engine import Depart, Engine, Rejoin
from pageferry.decode_worker.scheduler import release_pages
from pageferry.decode_worker.sequence import Sequence
from pageferry.kvtransfer.ferry import Ferry
from pageferry.kvtransfer.handoff import HandoffFailed
from pageferry.kvtransfer.handoff_client import Handoff
from pageferry.kvtransfer.retries import growing_pause
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Request, ttl_left_ms
from pageferry.kvtransfer.worker_bus import WorkerBus
from pageferry.kvtransfer.worker_setup import WorkerParts

log = logging.getLogger(__name__)

MAX_MOVING = 4
"""Sequences between two workers at a time; each of their streams pauses for it."""
LOOK_S = 0.02
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 2.0
"""Before the next try after one in vain, doubling: each try costs a stream a step or two."""
ENGINE_S = 5.0
"""For the engine to come to the end of its step; then it is asked again."""
FLUSH_S = 1.0
"""For our tokens to reach Redis before the next worker's; if they do not, the gateway sees a gap
and resubmits."""


@dataclass(eq=False)
class Departure:
    """A `ferry.Cargo`: the sequence as the next worker gets it."""

    sequence: Sequence
    request: Request
    hashes: list[bytes]
    handoff: Handoff | None = None
    decode_worker: str = ""


class Departures:
    """Event loop only, but for the engine's inbox."""

    def __init__(self, parts: WorkerParts, ferry: Ferry, engine: Engine, bus: WorkerBus) -> None:
        self.num_moved = 0
        self._parts = parts
        self._engine = engine
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._ferry = ferry
        self._moving: dict[Departure, asyncio.Task[None]] = {}
        self._next_try = 0.0
        self._in_vain = 0
        """Tries without success since the last one with."""
        self._is_over = False

    @property
    def moving(self) -> list[Departure]:
        """What is between two workers now."""
        return list(self._moving)

    async def run(self, until: float) -> None:
        """Move sequences away until none is left here, `stop` or the loop's time `until`."""
        follow = self._bus.spawn("other decode workers", self._follow)
        try:
            while self._is_needed and not self._is_over and self._loop.time() < until:
                if self._ferry.has_room and self._loop.time() >= self._next_try:
                    await self._start(MAX_MOVING - len(self._moving))
                await asyncio.sleep(LOOK_S)
        finally:
            await end_tasks([follow])
            await self._settle()
            await self._ferry.close()

    def stop(self) -> None:
        """The engine is broken. Any thread."""
        self._is_over = True

    @property
    def _is_needed(self) -> bool:
        """Something is here, or a handoff from a prefill worker is still arriving."""
        engine = self._engine
        here = engine.num_running or engine.num_waiting or not engine.inbox.empty()
        return bool(here or self._moving or self._parts.pool.ledger().reserved)

    async def _follow(self) -> None:
        await self._ferry.refresh(self._bus.client)

    async def _start(self, limit: int) -> None:
        if limit <= 0:
            return
        taken: Future[list[Sequence]] = Future()
        self._engine.inbox.put(Depart(limit, taken))
        waiting = asyncio.wrap_future(taken)
        await asyncio.wait([waiting], timeout=ENGINE_S)
        if taken.cancel():  # else the engine has begun: what it lets go of is ours
            return
        for sequence in await waiting:
            departure = self._departure(sequence)
            self._moving[departure] = self._loop.create_task(self._move(departure))

    def _departure(self, sequence: Sequence) -> Departure:
        """The last token is known but not computed: it travels as the handoff's first token."""
        computed = sequence.token_ids[: sequence.num_computed_tokens]
        left_ms = ttl_left_ms(sequence.ends_at, time.monotonic())
        request = dataclasses.replace(sequence.request, token_ids=computed, ttl_ms=left_ms)
        hashes = self._parts.pool.hash_prefix(computed, request.salt)
        return Departure(sequence, request, hashes)

    async def _move(self, departure: Departure) -> None:
        """One departure, top to bottom; whatever happens, the sequence is somewhere afterwards."""
        sequence, moved, uncertain = departure.sequence, False, False
        try:
            moved = await self._hand_over(departure)
        except HandoffFailed as error:
            log.info("%s does not move: %s", sequence.request_id, error)
            uncertain = error.uncertain
        except Exception:
            log.exception("%s does not move", sequence.request_id)
        finally:
            if departure.handoff is not None:
                departure.handoff.cancel("not moving")  # without effect on what was committed
                await asyncio.wrap_future(departure.handoff.detached)
            del self._moving[departure]
            if moved or uncertain:
                self._say(departure, Kind.OWNED if moved else Kind.REQUEUE)
                release_pages(self._parts.pool, sequence)
            else:
                self._engine.inbox.put(Rejoin(sequence))
            self._note(moved)

    def _note(self, moved: bool) -> None:
        self.num_moved += moved
        self._in_vain = 0 if moved else self._in_vain + 1
        if not moved:
            pause_s = growing_pause(self._in_vain, FIRST_PAUSE_S, MAX_PAUSE_S)
            self._next_try = self._loop.time() + pause_s

    async def _hand_over(self, departure: Departure) -> bool:
        """False when nobody has room. `HandoffFailed` when it broke on the way."""
        if not await self._ferry.book_now(departure):
            return False
        handoff, sequence = departure.handoff, departure.sequence
        assert handoff is not None
        skip, pages = handoff.skip_pages, sequence.page_ids[: handoff.num_pages]
        for layer in range(self._parts.memory.layout.num_layers):
            handoff.push(layer, skip, pages[skip:])
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._bus.flushed()
        except TimeoutError:
            log.warning("%s moves before its tokens reached Redis", sequence.request_id)
        request, index = departure.request, departure.request.num_output_tokens
        known = Event(
            request.request_id,
            request.epoch,
            Kind.TOKENS,
            self._parts.worker_id,
            index=index,
            token_ids=tuple(sequence.token_ids[sequence.num_computed_tokens :]),
        )
        await asyncio.wrap_future(handoff.seal(known))
        return True

    def _say(self, departure: Departure, kind: Kind) -> None:
        request = departure.request
        worker = departure.decode_worker if kind is Kind.OWNED else self._parts.worker_id
        code = "" if kind is Kind.OWNED else "handoff_failed"
        event = Event(request.request_id, request.epoch, kind, worker, code=code)
        self._bus.emit([(request.gateway, event)])

    # -- endings from outside

    def cancel(self, cancel: Cancel) -> None:
        """The gateway wants it no more; if it rejoins, the engine drops it."""
        for departure in self._moving:
            request = departure.request
            if request.request_id == cancel.request_id and request.epoch <= cancel.epoch:
                self._break_off(departure, "cancelled")

    def gateway_lost(self, gateway: str) -> None:
        for departure in self._moving:
            if departure.request.gateway == gateway:
                self._break_off(departure, "its gateway is gone")

    async def _settle(self) -> None:
        """Time is up: what is still on its way comes back."""
        await asyncio.sleep(0)  # A task that is cancelled before its first step cleans up nothing.
        for departure, task in self._moving.items():
            if departure.handoff is None:
                task.cancel()
            self._break_off(departure, "the drain time is over")
        if self._moving:
            await asyncio.wait(list(self._moving.values()))

    @staticmethod
    def _break_off(departure: Departure, reason: str) -> None:
        if departure.handoff is not None:
            departure.handoff.cancel(reason)
