"""The receiver's record of one writer and of one handoff; `intake` moves them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageferry.kvtransfer.frames import Message, Pages
from pageferry.kvtransfer.handoff import Manifest, State
from pageferry.kvtransfer.wire import Request


@dataclass(eq=False)
class Peer:
    """One authenticated connection of a writer."""

    worker_id: str
    transport: str
    last_handoff_id: int = -1

    @property
    def one_sided(self) -> bool:
        """The writer puts bytes into our memory itself."""
        return self.transport == "shm"


Outgoing = list[tuple[Peer, Message]]


@dataclass(eq=False)
class Incoming:
    """One handoff on the receiving side."""

    peer: Peer
    handoff_id: int
    request: Request
    n_tokens: int
    hashes: list[bytes]
    matched: list[int]
    """Prefix pages found here; one reference on each is ours until the handoff ends."""
    reserved: list[int]
    """Granted prompt pages, then the growth page if there is one."""
    num_prompt_pages: int
    ends_at: float
    """When the request's time to live is over, whatever progress there is."""
    progress_at: float
    seen: list[int]
    """Per layer, a bit per logical page that arrived verified or is arriving."""
    manifest: Manifest = field(default_factory=Manifest)
    state: State = State.OPEN
    writing: bool = False
    """The connection thread is putting bytes into granted pages."""

    @property
    def skip_pages(self) -> int:
        return len(self.matched)

    @property
    def key(self) -> tuple[Peer, int]:
        return self.peer, self.handoff_id

    def pages(self, first: int, count: int) -> list[int]:
        """Physical pages of a run of logical pages, all of them granted."""
        start = first - self.skip_pages
        return self.reserved[start : start + count]

    def fault(self, message: Pages) -> str:
        """Why this PAGES message may not be written; "" if it may."""
        layers = range(message.layer, message.layer + message.layers)
        if message.layers < 1 or layers.stop > len(self.seen):
            return f"layers {layers.start}..{layers.stop} are not all of the {len(self.seen)}"
        end = message.first + message.count
        if message.count < 1 or message.first < self.skip_pages or end > self.num_prompt_pages:
            granted = f"{self.skip_pages}..{self.num_prompt_pages}"
            return f"pages {message.first}..{end} are not within the grant {granted}"
        bits = _bits_of(message)
        for layer in layers:
            if self.seen[layer] & bits:
                return f"layer {layer}, pages {message.first}..{end} were written before"
        return ""

    def mark_seen(self, message: Pages) -> None:
        bits = _bits_of(message)
        for layer in range(message.layer, message.layer + message.layers):
            self.seen[layer] |= bits


def _bits_of(message: Pages) -> int:
    """The bits of a PAGES message in each layer of `Incoming.seen`."""
    return ((1 << message.count) - 1) << message.first
