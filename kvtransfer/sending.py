"""What a writer asks for and what its sender thread does about it, one item at a time.

A caller holds a `Handoff`; its calls become items in `outgoing.OutgoingTable`, which the sender of
`handoff_client` takes out in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pageferry.kvtransfer.frames import Reserve
from pageferry.kvtransfer.handoff import Manifest, State
from pageferry.kvtransfer.wire import Event, Request


class Desk(Protocol):
    """Where a handoff hands its wishes in: the table of its connection."""

    def clock(self) -> float: ...

    def put_push(self, push: Push) -> None: ...

    def seal(self, handoff: Handoff, first_token: Event) -> Future[None]: ...

    def fail(self, handoff: Handoff, reason: str, tell: str | None) -> None: ...


def running_future() -> Future[Any]:
    """A future that its holder cannot cancel: only the handoff itself can be."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Handoff:
    """The caller's end of a granted handoff. Thread-safe; nothing here blocks."""

    def __init__(self, table: Desk, handoff_id: int, request: Request) -> None:
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
        self.sealed_at = 0.0
        self.lease_s = 0.0
        self.granted: Future[Handoff] = running_future()
        self.committed: Future[None] | None = None
        self._detached: Future[None] = running_future()
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
    """The same pages of adjacent layers."""

    handoff: Handoff
    layer: int
    first: int
    local_pages: tuple[int, ...]
    layers: int = 1

    @property
    def num_pages(self) -> int:
        """Pages to send, each layer's counted by itself."""
        return self.layers * len(self.local_pages)

    def followed_by(self, later: Push) -> Push | None:
        """Both in one, if `later` is the next layer of the same pages."""
        if (later.first, later.layer) != (self.first, self.layer + self.layers):
            return None
        if later.local_pages != self.local_pages:
            return None
        layers = self.layers + later.layers
        return Push(self.handoff, self.layer, self.first, self.local_pages, layers)

    def parts(self, max_pages: int, max_layers: int) -> Iterator[Push]:
        """The same in pieces of at most so many layers, and `max_pages` of `num_pages` or as much
        more as makes the last layer whole."""
        count = len(self.local_pages)
        step = min(max_layers, -(-max_pages // count))
        for layer in range(self.layer, self.layer + self.layers, step):
            layers = min(step, self.layer + self.layers - layer)
            for start in range(0, count, max_pages):
                pages = self.local_pages[start : start + max_pages]
                yield Push(self.handoff, layer, self.first + start, pages, layers)

    @property
    def remote_pages(self) -> list[int]:
        start = self.first - self.handoff.skip_pages
        return self.handoff.remote_pages[start : start + len(self.local_pages)]


@dataclass(frozen=True)
class Close:
    """SEAL; everything before it in the queue was this handoff's pages."""

    handoff: Handoff
    first_token: Event


@dataclass(frozen=True)
class End:
    """STOPPED, after CANCEL if the receiver does not know yet that it is over."""

    handoff: Handoff
    tell: str | None


Item = Announce | Push | Close | End


def merged(items: list[Item]) -> list[Item]:
    """`items` with each handoff's pushes of adjacent layers joined; its own order stays."""
    merged: list[Item] = []
    last_push: dict[Handoff, int] = {}
    for item in items:
        if not isinstance(item, Push):
            last_push.pop(item.handoff, None)
        elif (index := last_push.get(item.handoff)) is not None:
            before = merged[index]
            assert isinstance(before, Push)
            if joined := before.followed_by(item):
                merged[index] = joined
                continue
        if isinstance(item, Push):
            last_push[item.handoff] = len(merged)
        merged.append(item)
    return merged
