"""The writer's decisions, without sockets: what is queued for sending, and what became of it.

`OutgoingTable` belongs to one connection. Callers on any thread put work in (`reserve`, and `push`,
`seal`, `cancel` of a `Handoff`); the sender thread takes it out with `next_item`; the receiver
thread reports answers. For the states see `handoff`. What holds here:

- Nobody waits: every call returns at once, and futures tell the rest. They are settled outside the
  lock, so their callbacks may call back in.
- Only the sender thread reads local pages, and only for items it took from the queue. `detached` is
  settled by that thread, or when it has ended, or when nothing was ever granted.
- A broken handoff's items leave the queue and an `End` goes to its front: the next thing that the
  receiver hears of it is that we stopped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pageferry.kvtransfer.frames import Grant, Renew, Reserve
from pageferry.kvtransfer.handoff import (
    HandoffDenied,
    HandoffFailed,
    Manifest,
    State,
    pages_needed,
)
from pageferry.kvtransfer.wire import Event, Request

MAX_QUEUED = 65_536
"""Items that may wait for the sender; a handoff that wants more breaks."""

Settlement = Callable[[], None]


def _running_future() -> Future[Any]:
    """A future that its holder cannot cancel: only the handoff itself can be."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Handoff:
    """The caller's end of a granted handoff. Thread-safe; nothing here blocks."""

    def __init__(self, table: OutgoingTable, handoff_id: int, request: Request) -> None:
        self.handoff_id = handoff_id
        self.request = request
        self.state = State.RESERVING
        self.skip_pages = 0
        """Leading pages that the receiver holds already; pushing them has no effect."""
        self.remote_pages: list[int] = []
        self.num_pages = 0
        """Pages of the prompt, skipped ones included."""
        self.reason = ""
        self.manifest = Manifest()
        self.announced = False
        self.heard_at = self.said_at = table.clock()
        self.lease_s = 0.0
        self.granted: Future[Handoff] = _running_future()
        self.committed: Future[None] | None = None
        self._detached: Future[None] = _running_future()
        self._table = table

    @property
    def detached(self) -> Future[None]:
        """Done, without error, when the sender reads the local pages no more, however it ended."""
        return self._detached

    def push(self, layer: int, first: int, local_pages: Sequence[int]) -> None:
        """Logical pages `first...` of the sequence lie in `local_pages`, this layer's KV complete.

        Enqueues and returns. The pages must stay as they are until `detached`. Without effect if
        the handoff is over; `seal` tells.
        """
        end = first + len(local_pages)
        if first < 0 or end > self.num_pages:
            raise ValueError(f"pages {first}..{end} are not within the prompt's {self.num_pages}")
        skipped = max(0, self.skip_pages - first)
        if pages := tuple(local_pages[skipped:]):
            self._table.put_push(Push(self, layer, first + skipped, pages))

    def seal(self, first_token: Event) -> Future[None]:
        """All pages are pushed. Done at COMMIT; `HandoffFailed` otherwise."""
        return self._table.seal(self, first_token)

    def cancel(self, reason: str) -> Future[None]:
        """Give up, in whatever state; without effect once it is over. Returns `detached`."""
        self._table.fail(self, f"cancelled: {reason}", tell=reason)
        return self.detached


@dataclass(frozen=True)
class Announce:
    handoff: Handoff
    message: Reserve


@dataclass(frozen=True)
class Push:
    handoff: Handoff
    layer: int
    first: int
    local_pages: tuple[int, ...]

    @property
    def remote_pages(self) -> list[int]:
        start = self.first - self.handoff.skip_pages
        return self.handoff.remote_pages[start : start + len(self.local_pages)]


@dataclass(frozen=True)
class Close:
    """SEAL; everything before it in the queue was this handoff's pages."""

    handoff: Handoff
    first_token: Event
    asked_at: float


@dataclass(frozen=True)
class End:
    """STOPPED, after CANCEL if the receiver does not know yet that it is over."""

    handoff: Handoff
    tell: str | None


Item = Announce | Push | Close | End


class OutgoingTable:
    """All handoffs of one connection on the writing side."""

    def __init__(
        self,
        page_size: int,
        remote_num_pages: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._page_size = page_size
        self._remote_num_pages = remote_num_pages
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._handoffs: dict[int, Handoff] = {}
        self._attached: set[Handoff] = set()
        self._next_id = 0
        self._over = ""
        """Why no new handoff can begin; "" while the connection lives."""

    @property
    def alive(self) -> bool:
        return not self._over

    # --- callers

    def reserve(self, request: Request, prefix_hashes: list[bytes]) -> Future[Handoff]:
        with self._changed:
            handoff = Handoff(self, self._next_id, request)
            if self._over:
                handoff.granted.set_exception(HandoffFailed(self._over))
                return handoff.granted
            self._next_id += 1
            handoff.num_pages, _ = pages_needed(self._page_size, len(request.token_ids))
            message = Reserve(
                handoff.handoff_id, request.to_dict(), len(request.token_ids), prefix_hashes
            )
            self._handoffs[handoff.handoff_id] = handoff
            self._attached.add(handoff)
            self._put(Announce(handoff, message))
            return handoff.granted

    def put_push(self, push: Push) -> None:
        with self._changed:
            if push.handoff.state is not State.OPEN:
                return
            if len(self._queue) < MAX_QUEUED:
                self._put(push)
                return
        self.fail(push.handoff, f"more than {MAX_QUEUED} messages wait", tell="queue full")

    def seal(self, handoff: Handoff, first_token: Event) -> Future[None]:
        with self._changed:
            if handoff.committed is not None:
                raise ValueError(f"handoff {handoff.handoff_id} was sealed before")
            committed: Future[None] = _running_future()
            handoff.committed = committed
            if handoff.state is State.OPEN:
                handoff.state = State.SEALING
                self._put(Close(handoff, first_token, self.clock()))
                return committed
        committed.set_exception(HandoffFailed(handoff.reason))
        return committed

    def fail(self, handoff: Handoff, reason: str, tell: str | None) -> None:
        """End a handoff without COMMIT. `tell`: the reason for the receiver, None if it knows."""
        with self._changed:
            settlements = self._fail(handoff, reason, tell)
        _settle(settlements)

    def cancel_request(self, request_id: str, epoch: int, reason: str) -> None:
        """`Handoff.cancel` for every handoff of that request at `epoch` and below."""
        with self._changed:
            found = [
                handoff
                for handoff in self._handoffs.values()
                if handoff.request.request_id == request_id and handoff.request.epoch <= epoch
            ]
        for handoff in found:
            handoff.cancel(reason)

    # --- answers

    def answer(self, handoff_id: int) -> Handoff | None:
        """The handoff that an answer is for; None, and counted, if it is over."""
        with self._changed:
            handoff = self._handoffs.get(handoff_id)
            if handoff is None:
                self.counts["late_messages"] += 1
            else:
                handoff.heard_at = self.clock()
            return handoff

    def grant(self, message: Grant) -> str:
        """Open the handoff. Returns what is wrong with the grant: then nothing can be trusted."""
        if (handoff := self.answer(message.handoff_id)) is None:
            return ""
        with self._changed:
            if handoff.state is State.BROKEN:
                return ""
            pages = message.page_ids
            if handoff.state is not State.RESERVING:
                return f"GRANT for a handoff that is {handoff.state.value}"
            if len(pages) + message.skip_pages != handoff.num_pages:
                return f"GRANT of {message.skip_pages}+{len(pages)} pages, not {handoff.num_pages}"
            if len(set(pages)) != len(pages) or any(p >= self._remote_num_pages for p in pages):
                return "GRANT names a page twice or one that the pool does not have"
            handoff.remote_pages, handoff.skip_pages = pages, message.skip_pages
            handoff.lease_s = message.lease_ms / 1000
            handoff.state = State.OPEN
        handoff.granted.set_result(handoff)
        return ""

    def deny(self, handoff_id: int, reason: str) -> None:
        if (handoff := self.answer(handoff_id)) is None:
            return
        with self._changed:
            if handoff.state is not State.RESERVING:
                return
            handoff.state, handoff.reason = State.BROKEN, f"denied: {reason}"
            self.counts["denied"] += 1
            del self._handoffs[handoff_id]
        handoff.granted.set_exception(HandoffDenied(reason))
        self.detach(handoff)

    def commit(self, handoff_id: int) -> None:
        if (handoff := self.answer(handoff_id)) is None:
            return
        with self._changed:
            if handoff.state is not State.SEALING or handoff.committed is None:
                return
            handoff.state = State.COMMITTED
            self.counts["committed"] += 1
            del self._handoffs[handoff_id]
        handoff.committed.set_result(None)

    # --- time and connection

    def expire(self) -> None:
        """Break handoffs whose RESERVE or SEAL was not answered in time."""
        settlements: list[Settlement] = []
        with self._changed:
            now = self.clock()
            for handoff in list(self._handoffs.values()):
                waits = handoff.state in (State.RESERVING, State.SEALING)
                since = max(handoff.heard_at, handoff.said_at)
                if waits and now - since > self._timeout_s:
                    reason = f"timeout: no answer while {handoff.state.value}"
                    self.counts["timeouts"] += 1
                    settlements += self._fail(handoff, reason, tell=reason)
        _settle(settlements)

    def due_renewals(self) -> list[Renew]:
        """RENEW for every open handoff of which the receiver has not heard for a third of its
        lease; they count as said."""
        with self._changed:
            now, due = self.clock(), []
            for handoff in self._handoffs.values():
                if handoff.state is State.OPEN and now - handoff.said_at > handoff.lease_s / 3:
                    handoff.said_at = now
                    due.append(Renew(handoff.handoff_id))
            return due

    def lost(self, reason: str) -> None:
        """No further message will be sent or heard; everything open fails."""
        settlements: list[Settlement] = []
        with self._changed:
            self._over = self._over or reason
            for handoff in list(self._handoffs.values()):
                settlements += self._fail(handoff, reason, tell=reason)
            self._changed.notify_all()
        _settle(settlements)

    # --- the sender thread

    def next_item(self, timeout_s: float) -> Item | None:
        """The next thing to send, or None after `timeout_s` without one."""
        with self._changed:
            if not self._queue:
                self._changed.wait(timeout_s)
            if not self._queue:
                return None
            item = self._queue.popleft()
            item.handoff.said_at = self.clock()
            if isinstance(item, Announce):
                item.handoff.announced = True
            return item

    def detach(self, handoff: Handoff) -> None:
        """The sender reads this handoff's local pages no more."""
        with self._changed:
            if handoff not in self._attached:
                return
            self._attached.remove(handoff)
        handoff.detached.set_result(None)

    def detach_all(self) -> None:
        """The sender thread has ended."""
        for handoff in list(self._attached):
            self.detach(handoff)

    # --- under the lock

    def _put(self, item: Item) -> None:
        self._queue.append(item)
        self._changed.notify()

    def _fail(self, handoff: Handoff, reason: str, tell: str | None) -> list[Settlement]:
        if handoff.state in (State.COMMITTED, State.BROKEN):
            return []
        before, handoff.state, handoff.reason = handoff.state, State.BROKEN, reason
        self.counts["failed"] += 1
        self._handoffs.pop(handoff.handoff_id, None)
        self._queue = deque(item for item in self._queue if item.handoff is not handoff)
        self._queue.appendleft(End(handoff, tell))
        self._changed.notify()
        # A future is settled by whoever moved the state away from where it is awaited.
        if before is State.RESERVING:
            return [lambda: handoff.granted.set_exception(HandoffFailed(reason))]
        if before is State.SEALING and (committed := handoff.committed) is not None:
            error = HandoffFailed(reason, uncertain=tell is not None)
            return [lambda: committed.set_exception(error)]
        return []


def _settle(settlements: list[Settlement]) -> None:
    for settlement in settlements:
        settlement()
