"""The writer's decisions, without sockets: what is queued for sending, and what became of it.

`OutgoingTable` belongs to one connection. Callers on any thread put work in (`reserve`, and `push`,
`seal`, `cancel` of a `Handoff`); the sender thread takes it out with `next_batch`; the receiver
thread reports answers. For the states see `handoff`. What holds here:

- Nobody waits: every call returns at once, and futures tell the rest. They are settled outside the
  lock, so their callbacks may call back in.
- Only the sender thread reads local pages, and only for items it took from the queue. `detached` is
  settled by that thread, or when it has ended, or when nothing was ever granted.
- A broken handoff's items leave the queue and an `End` goes to its front: the next thing that the
  receiver hears of it, but for what the sender has just taken, is that we stopped.
- Pages do not wake the sender one layer at a time: a wake-up costs the compute more than sending a
  layer does. It sleeps until a batch has come together or something else is to be said; towards a
  prompt's end until as much waits as is still to come, so that one layer is left for the end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from pageferry.kvtransfer.frames import Grant, Renew, Reserve
from pageferry.kvtransfer.handoff import (
    HandoffDenied,
    HandoffFailed,
    State,
    pages_needed,
)
from pageferry.kvtransfer.sending import (
    Announce,
    Close,
    End,
    Handoff,
    Item,
    Push,
    merged,
    running_future,
)
from pageferry.kvtransfer.wire import Event, Request

MAX_QUEUED = 65_536
"""Items that may wait for the sender; a handoff that wants more breaks."""

Settlement = Callable[[], None]


class OutgoingTable:
    """All handoffs of one connection on the writing side."""

    def __init__(
        self,
        page_size: int,
        remote_num_pages: int,
        timeout_s: float,
        num_layers: int = 1,
        batch_pages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`batch_pages`: pages that are worth waking the sender, each layer's counted by itself."""
        self.clock = clock
        self.exposed_s = 0.0
        """Seconds from the call of `seal` to COMMIT, over `counts["committed"]` handoffs."""
        self.counts: Counter[str] = Counter()
        self._page_size = page_size
        self._remote_num_pages = remote_num_pages
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._num_layers = num_layers
        self._batch_pages = self._enough = batch_pages
        self._queue: deque[Item] = deque()
        self._queued_pages = self._urgent = 0
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
            committed: Future[None] = running_future()
            handoff.committed = committed
            if handoff.state is State.OPEN:
                handoff.state, handoff.sealed_at = State.SEALING, self.clock()
                self._put(Close(handoff, first_token))
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
            self.exposed_s += self.clock() - handoff.sealed_at
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

    def next_batch(self, timeout_s: float) -> list[Item]:
        """What to send now, in order; after `timeout_s` also what is less than a batch, or nothing.

        Of one handoff, pages of adjacent layers come as one `Push`.
        """
        with self._changed:
            if not self._is_due():
                self._changed.wait(timeout_s)
            taken: list[Item] = []
            pages, now = 0, self.clock()
            while self._queue and pages < self._batch_pages:
                item = self._queue.popleft()
                item.handoff.said_at = now
                if isinstance(item, Announce):
                    item.handoff.announced = True
                if isinstance(item, Push):
                    pages += item.num_pages
                taken.append(item)
            self._count(taken, -1)
            if not self._queue:
                self._enough = self._batch_pages
            return merged(taken)

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
        self._count([item], 1)
        if isinstance(item, Push):
            self._enough = min(self._enough, self._pages_to_come(item))
        if self._is_due():
            self._changed.notify()

    def _count(self, items: Iterable[Item], sign: int) -> None:
        for item in items:
            if isinstance(item, Push):
                self._queued_pages += sign * item.num_pages
            else:
                self._urgent += sign

    def _pages_to_come(self, push: Push) -> int:
        """Of its prompt, if this is the last chunk of it; else more than a batch."""
        if push.first + len(push.local_pages) < push.handoff.num_pages:
            return self._batch_pages
        return (self._num_layers - push.layer - push.layers) * len(push.local_pages)

    def _is_due(self) -> bool:
        """Whether the sender should work: enough pages wait, or anything that is not pages."""
        return self._urgent > 0 or (bool(self._queue) and self._queued_pages >= self._enough)

    def _fail(self, handoff: Handoff, reason: str, tell: str | None) -> list[Settlement]:
        if handoff.state in (State.COMMITTED, State.BROKEN):
            return []
        before, handoff.state, handoff.reason = handoff.state, State.BROKEN, reason
        self.counts["failed"] += 1
        self._handoffs.pop(handoff.handoff_id, None)
        self._queue = deque(item for item in self._queue if item.handoff is not handoff)
        self._queue.appendleft(End(handoff, tell))
        self._queued_pages = self._urgent = 0
        self._count(self._queue, 1)
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
