"""Part of `protocol_world`: one connection between two workers, and what its threads do."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pageferry.kvtransfer.frames import (
    Cancel,
    Commit,
    Deny,
    Grant,
    Message,
    Nack,
    Pages,
    Renew,
    Reserve,
    Seal,
    Stopped,
)
from pageferry.kvtransfer.handoff import State
from pageferry.kvtransfer.incoming import Incoming, Peer
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.outgoing import OutgoingTable
from pageferry.kvtransfer.pool import PageState
from pageferry.kvtransfer.sending import Announce, Close, End, Item, Push

if TYPE_CHECKING:
    from tests.kvtransfer.protocol_workers import Receiver, Worker
    from tests.kvtransfer.protocol_world import World

LAYOUT = KVLayout(dtype="float32", page_size=2, num_layers=2, num_kv_heads=1, head_dim=1)
NUM_PAGES = 10
TIMEOUT_S = 4.0
LEASE_S = 3.0
MAX_TOKENS = 8
SEEN: Counter[str] = Counter()
"""What the schedules went through, over all worlds: a model that gets nowhere proves nothing."""

Slot = tuple[int, ...]
"""The token ids up to and including this slot's."""


def token_of(request_id: str, index: int) -> int:
    return 1000 * (1 + ord(request_id[-1])) + index


def slots_of(token_ids: tuple[int, ...], page: int) -> list[Slot]:
    start = page * LAYOUT.page_size
    end = min(len(token_ids), start + LAYOUT.page_size)
    return [tuple(token_ids[: position + 1]) for position in range(start, end)]


@dataclass(eq=False)
class Link:
    """One connection: what is on its way up (to the receiver) and down."""

    world: World
    writer: Worker
    receiver: Receiver
    transport: str

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.table = OutgoingTable(
            LAYOUT.page_size, NUM_PAGES, TIMEOUT_S, num_layers=2, clock=self.world.clock
        )
        self.peer = Peer(self.writer.id, self.transport)
        self.up: deque[Message] = deque()
        self.down: deque[Message] = deque()
        self.in_hand: deque[Item] = deque()
        """What the sender thread took and has not done yet; it does not look again."""
        self.arriving: tuple[Incoming, Pages] | None = None
        self.is_cut = self.has_hung_up = self.writer_closed = self.receiver_closed = False
        self.generation = (self.writer.incarnation, self.receiver.incarnation)
        self.memory = self.receiver.memory
        self.pool = self.receiver.pool

    @property
    def is_open(self) -> bool:
        return self.table.alive and not self.writer_closed

    def reconnect(self) -> None:
        is_over = self.writer_closed and self.receiver_closed
        if is_over and self.writer.is_awake and self.receiver.is_awake:
            self.open()

    # --- the sender thread

    def take(self) -> None:
        if self.writer.is_awake and not self.writer_closed and not self.in_hand:
            self.in_hand += self.table.next_batch(0.0)

    def execute(self) -> None:
        """Do one thing of those in hand."""
        if not self.writer.is_awake or self.writer_closed or not self.in_hand:
            return
        item = self.in_hand.popleft()
        handoff = item.handoff
        match item:
            case Announce():
                self.up.append(item.message)
            case Push():
                self._push(item)
            case Close() if handoff.state is State.SEALING:
                self.table.detach(handoff)
                token = item.first_token.to_list()
                self.up.append(Seal(handoff.handoff_id, handoff.manifest.digest(), token))
            case Close():
                pass
            case End():
                self.table.detach(handoff)
                if handoff.announced and item.tell is not None:
                    self.up.append(Cancel(handoff.handoff_id, item.tell))
                if handoff.announced:
                    self.up.append(Stopped(handoff.handoff_id))

    def _push(self, push: Push) -> None:
        """Over shm the bytes go into the receiver's memory now, whatever has happened there."""
        contents = [slots_of(tuple(push.handoff.request.token_ids), page)
                    for page in range(push.first, push.first + len(push.local_pages))]  # fmt: skip
        if self.transport == "shm":
            for page, slots in zip(push.remote_pages, contents, strict=True):
                self.write(page, slots)
        digest = repr(contents).encode()
        count = len(push.local_pages)
        message = Pages(
            push.handoff.handoff_id, push.layer, push.first, count, digest, 0, push.layers
        )
        push.handoff.manifest.add(message)
        self.up.append(message)

    def write(self, page: int, slots: list[Slot]) -> None:
        state = self.pool.state(page)
        assert state in (PageState.RESERVED, PageState.QUARANTINED), f"wrote to a {state} page"
        SEEN["written in quarantine"] += state is PageState.QUARANTINED
        self.memory[page] = [*slots, *[()] * (LAYOUT.page_size - len(slots))]

    # --- the other threads

    def hear(self) -> None:
        """The writer takes one answer."""
        if not self.writer.is_awake or self.writer_closed or not self.down:
            return
        message = self.down.popleft()
        way = "decode to decode" if self.writer.name.startswith("D") else self.transport
        SEEN[f"{type(message).__name__}, {way}"] += 1
        match message:
            case Grant():
                assert self.table.grant(message) == ""
            case Deny():
                self.table.deny(message.handoff_id, message.reason)
            case Commit():
                self.table.commit(message.handoff_id)
            case Nack() | Cancel():
                if handoff := self.table.answer(message.handoff_id):
                    self.table.fail(handoff, message.reason, tell=None)

    def arrive(self) -> None:
        """The receiver's connection thread: begin with a message, or finish taking pages in."""
        if not self.receiver.is_awake or self.receiver_closed or self.has_hung_up:
            return
        table = self.receiver.table
        if self.arriving is not None:
            incoming, pages = self.arriving
            self.arriving = None
            self._take_in(incoming, pages)
            return
        if not self.up:
            return
        message = self.up.popleft()
        match message:
            case Pages():
                allowed, outgoing = table.begin_pages(self.peer, message)
                self.world.send_down(outgoing)
                if allowed is not None:
                    self.arriving = allowed, message
            case Reserve():
                self.world.send_down(table.reserve(self.peer, message))
            case Seal():
                self.world.send_down(table.seal(self.peer, message))
            case Cancel():
                self.world.send_down(table.cancel(self.peer, message))
            case Stopped():
                self.world.send_down(table.stopped(self.peer, message))
            case Renew():
                self.world.send_down(table.renew(self.peer, message))

    def _take_in(self, incoming: Incoming, message: Pages) -> None:
        pages = incoming.pages(message.first, message.count)
        logical = range(message.first, message.first + message.count)
        if self.transport == "tcp":
            for page, where in zip(pages, logical, strict=True):
                self.write(page, slots_of(tuple(incoming.request.token_ids), where))
        contents = [[slot for slot in self.memory[page] if slot] for page in pages]
        outgoing = self.receiver.table.end_pages(incoming, message, repr(contents).encode())
        self.world.send_down(outgoing)

    # --- ends

    def cut(self) -> None:
        """A lost network: what was on its way is gone. Unix sockets do not have that."""
        if self.transport == "tcp":
            self.is_cut = True
            self.up.clear()
            self.down.clear()

    def process_died(self, worker: Worker) -> None:
        self.is_cut = True
        self.down.clear()
        if worker is self.writer:
            self.in_hand.clear()
            self.table.lost("died")
            self.table.detach_all()
            self.writer_closed = True
        if worker is self.receiver:
            self.up.clear()
            self.receiver_closed = True

    def notice(self) -> None:
        """Each end that is awake sees what became of the other."""
        if self.writer.is_awake and (self.is_cut or self.has_hung_up or self.receiver_closed):
            self.writer_ends("the connection is gone")
        if self.receiver.is_awake and not self.up and (self.is_cut or self.writer_closed):
            self.receiver_hangs_up()
        if self.receiver.is_awake and self.has_hung_up and self.writer_closed:
            self._receiver_lost()

    def writer_ends(self, reason: str) -> None:
        if not self.writer_closed:
            self.table.lost(reason)
            if self.in_hand and isinstance(self.in_hand[0], Push):
                self._push(self.in_hand[0])  # the thread is in the middle of that
            self.in_hand.clear()
            self.table.detach_all()
            self.writer_closed = True

    def receiver_hangs_up(self) -> None:
        if self.receiver_closed or self.has_hung_up:
            return
        if self.arriving is not None:  # the thread leaves the write first
            incoming, pages = self.arriving
            self.arriving = None
            self.world.send_down(self.receiver.table.end_pages(incoming, pages, None))
        self.has_hung_up = True
        self.receiver.table.break_peer(self.peer, "connection lost")
        if self.transport == "tcp" or self.writer_closed:
            self._receiver_lost()

    def _receiver_lost(self) -> None:
        if not self.receiver_closed:
            self.receiver.table.lost(self.peer)
            self.receiver_closed = True
