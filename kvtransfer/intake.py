"""The receiver's decisions, without sockets: which message may do what to which page.

`IntakeTable` holds every handoff that has pages on this side. Its methods are called by connection
threads, the housekeeper and the worker; each returns the messages to send, as (peer, message).
For the states see `handoff`. What holds here:

- A reserved page belongs to exactly one handoff of the table, as granted or as quarantined.
- `begin_pages` is asked before a byte is written. Only an OPEN handoff's own, not yet written
  (layer, page) pairs get an answer that allows it.
- A handoff that breaks while its connection thread is inside a write, or whose writer is
  one-sided, leaves its pages in quarantine until `end_pages`, STOPPED or the end of the connection.
- An epoch at or below `fence[request_id]` is over: sealed, cancelled or superseded.
- After `cancel_request` has returned, no intake of that request and epoch will be delivered.

Lock order: the table's, then the pool's. The listener's `sealed` runs under the table's lock.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from pageferry.kvtransfer.frames import (
    Cancel,
    Commit,
    Deny,
    Grant,
    Nack,
    Pages,
    Renew,
    Reserve,
    Seal,
    Stopped,
)
from pageferry.kvtransfer.handoff import (
    NEVER,
    STALE_EPOCH,
    Intake,
    IntakeListener,
    State,
    pages_needed,
)
from pageferry.kvtransfer.incoming import Incoming, Outgoing, Peer
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.pool import OutOfPages, PagePool
from pageferry.kvtransfer.wire import Event, Kind, Request, WireError, ttl_left_ms

log = logging.getLogger(__name__)

MAX_FENCES = 65_536
"""Request ids whose last epoch is remembered; the oldest are forgotten."""

MAX_ID = 256
"""Characters of a request id."""

MAX_TOKEN_ID = 2**31 - 1


class IntakeTable:
    """All handoffs of one receiver. Thread-safe."""

    def __init__(
        self,
        pool: PagePool,
        layout: KVLayout,
        listener: IntakeListener,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._layout = layout
        self._listener = listener
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.RLock()
        self._table: dict[tuple[Peer, int], Incoming] = {}
        self._fence: OrderedDict[str, int] = OrderedDict()

    # --- from the writer

    def reserve(self, peer: Peer, message: Reserve) -> Outgoing:
        """GRANT or DENY; nothing for a replay."""
        if message.handoff_id <= peer.last_handoff_id:
            return self._late()
        peer.last_handoff_id = message.handoff_id
        deny, request = self._examine(message)
        if request is None or deny:
            return self._deny(peer, message, deny)
        with self._lock:
            deny, outgoing = self._make_way(request)
        if deny:
            return self._deny(peer, message, deny)
        matched, reserved, deny = self._take_pages(request, message)
        if deny:
            return outgoing + self._deny(peer, message, deny)
        handoff = self._incoming(peer, message, request, matched, reserved)
        with self._lock:
            # Somebody may have cancelled or overtaken this request while the listener was asked.
            deny, more = self._make_way(request)
            outgoing += more
            if deny:
                self._pool.cancel(reserved)
                self._pool.release(matched)
                return outgoing + self._deny(peer, message, deny)
            self._table[handoff.key] = handoff
        return [*outgoing, (peer, self._grant(handoff))]

    def begin_pages(self, peer: Peer, message: Pages) -> tuple[Incoming | None, Outgoing]:
        """The handoff whose pages may be written now, or None: then the payload is discarded."""
        with self._lock:
            handoff = self._open(peer, message.handoff_id)
            if handoff is None:
                return None, []
            if fault := handoff.fault(message):
                return None, self._break(handoff, f"bad PAGES: {fault}", Nack)
            handoff.mark_seen(message)
            handoff.writing = True
            handoff.progress_at = self._clock()
            return handoff, []

    def end_pages(self, handoff: Incoming, message: Pages, digest: bytes | None) -> Outgoing:
        """The write that `begin_pages` allowed is over; `digest` None: it was not completed."""
        with self._lock:
            handoff.writing = False
            if handoff.state is State.BROKEN:
                if not handoff.peer.one_sided:
                    self._absolve(handoff)
                return []
            handoff.progress_at = self._clock()
            layers = f"layers {message.layer}+{message.layers}"
            where = f"{layers}, pages {message.first}+{message.count}"
            if digest is None:
                return self._break(handoff, f"{where} did not arrive whole", Nack)
            if digest != message.digest:
                self.counts["digest_failures"] += 1
                return self._break(handoff, f"digest mismatch in {where}", Nack)
            handoff.manifest.add(message)
            return []

    def seal(self, peer: Peer, message: Seal) -> Outgoing:
        """COMMIT after the listener has the sequence, else NACK."""
        with self._lock:
            handoff = self._open(peer, message.handoff_id)
            if handoff is None:
                return []
            try:
                first_token = Event.from_list(message.first_token)
            except WireError as error:
                return self._break(handoff, f"bad SEAL: {error}", Nack)
            if fault := self._seal_fault(handoff, message, first_token):
                return self._break(handoff, f"bad SEAL: {fault}", Nack)
            return self._deliver(handoff, first_token)

    def cancel(self, peer: Peer, message: Cancel) -> Outgoing:
        """The writer gives up. It needs no answer."""
        with self._lock:
            if handoff := self._open(peer, message.handoff_id):
                self._break(handoff, f"cancelled by the writer: {message.reason}", Cancel)
            return []

    def stopped(self, peer: Peer, message: Stopped) -> Outgoing:
        """The writer no longer writes to that handoff's pages."""
        with self._lock:
            handoff = self._table.get((peer, message.handoff_id))
            if handoff is None:
                return []  # over tcp nothing waited for this
            if handoff.state is not State.BROKEN:
                self._break(handoff, "the writer stopped", Cancel)
            if handoff.state is State.BROKEN and not handoff.writing:
                self._absolve(handoff)
            return []

    def renew(self, peer: Peer, message: Renew) -> Outgoing:
        with self._lock:
            if handoff := self._open(peer, message.handoff_id):
                handoff.progress_at = self._clock()
            return []

    # --- from our own side

    def cancel_request(self, request_id: str, epoch: int, reason: str = "cancelled") -> Outgoing:
        """End that request's handoffs at `epoch` and below, and refuse later ones of that age."""
        with self._lock:
            self._raise_fence(request_id, epoch)
            return self._break_request(request_id, epoch, reason)

    def expire(self) -> Outgoing:
        """Break handoffs without progress, or whose request has outlived its time."""
        now, outgoing = self._clock(), []
        with self._lock:
            for handoff in list(self._table.values()):
                if handoff.state is State.BROKEN:
                    continue
                if now > handoff.ends_at:
                    outgoing += self._break(handoff, "timeout: the request's ttl is over", Cancel)
                elif now - handoff.progress_at > self._timeout_s:
                    reason = f"timeout: no progress for {self._timeout_s:g} s"
                    self.counts["timeouts"] += 1
                    outgoing += self._break(handoff, reason, Cancel)
        return outgoing

    def break_peer(self, peer: Peer, reason: str) -> Outgoing:
        """We end this connection; the writer may not know it yet."""
        with self._lock:
            outgoing: Outgoing = []
            for handoff in self._of(peer):
                if handoff.state is not State.BROKEN:
                    outgoing += self._break(handoff, reason, Cancel)
            return outgoing

    def lost(self, peer: Peer) -> None:
        """The writer's end of the connection is closed: it cannot write any more."""
        with self._lock:
            self.break_peer(peer, "connection lost")
            for handoff in self._of(peer):
                handoff.writing = False
                self._absolve(handoff)

    def holders(self) -> Counter[int]:
        """References by page that the table holds (matched prefix pages)."""
        with self._lock:
            return Counter(
                page
                for handoff in self._table.values()
                if handoff.state is not State.BROKEN
                for page in handoff.matched
            )

    def open_handoffs(self) -> int:
        """Handoffs with pages on this side, quarantined ones included."""
        with self._lock:
            return len(self._table)

    # --- decisions

    def _examine(self, message: Reserve) -> tuple[str, Request | None]:
        """What is wrong with a RESERVE in itself, or the request that it is for."""
        try:
            request = Request.from_dict(message.request)
        except (WireError, TypeError, ValueError, OverflowError) as error:
            return f"malformed request: {error}", None
        if len(request.request_id) > MAX_ID:
            return f"malformed request: its id has more than {MAX_ID} characters", None
        if message.n_tokens != len(request.token_ids):
            return f"n_tokens is {message.n_tokens}, request has {len(request.token_ids)}", None
        _, total = pages_needed(self._pool.page_size, message.n_tokens)
        if total > self._pool.num_pages:
            return f"{NEVER}needs {total} pages, the pool has {self._pool.num_pages}", None
        if message.prefix_hashes:
            own = self._pool.hash_prefix(request.token_ids, request.salt)
            if message.prefix_hashes != own[: len(message.prefix_hashes)]:
                return "prefix_hashes are not those of the tokens (do namespaces differ?)", None
        return "", request

    def _take_pages(self, request: Request, message: Reserve) -> tuple[list[int], list[int], str]:
        """Pages of the prefix that are here already, new ones for the rest, or why not."""
        matched = self._pool.match(message.prefix_hashes)
        _, total = pages_needed(self._pool.page_size, message.n_tokens)
        needed = total - len(matched)
        deny = self._ask(request, needed)
        if not deny:
            try:
                return matched, self._pool.reserve(needed), ""
            except OutOfPages as error:
                deny = f"out_of_pages: {error}"
        self._pool.release(matched)
        return [], [], deny

    def _incoming(
        self,
        peer: Peer,
        message: Reserve,
        request: Request,
        matched: list[int],
        reserved: list[int],
    ) -> Incoming:
        prompt_pages, _ = pages_needed(self._pool.page_size, message.n_tokens)
        now = self._clock()
        return Incoming(
            peer=peer,
            handoff_id=message.handoff_id,
            request=request,
            n_tokens=message.n_tokens,
            hashes=message.prefix_hashes,
            matched=matched,
            reserved=reserved,
            num_prompt_pages=prompt_pages,
            ends_at=now + request.ttl_ms / 1000,
            progress_at=now,
            seen=[0] * self._layout.num_layers,
        )

    def _grant(self, handoff: Incoming) -> Grant:
        skip = handoff.skip_pages
        writable = handoff.pages(skip, handoff.num_prompt_pages - skip)
        return Grant(handoff.handoff_id, writable, skip, int(self._timeout_s * 1000))

    def _ask(self, request: Request, needed: int) -> str:
        try:
            return self._listener.admit(request, needed)
        except Exception as error:
            log.exception("the listener failed to judge request %s", request.request_id)
            return f"the decode worker could not judge it: {type(error).__name__}"

    def _make_way(self, request: Request) -> tuple[str, Outgoing]:
        """Why this epoch may not start, or: older epochs of the request are now broken."""
        over = self._fence.get(request.request_id)
        if over is not None and request.epoch <= over:
            return f"{STALE_EPOCH}: {request.epoch} of {request.request_id}, {over} is over", []
        for handoff in self._table.values():
            other = handoff.request
            if other.request_id != request.request_id or handoff.state is State.BROKEN:
                continue
            if other.epoch > request.epoch:
                return f"{STALE_EPOCH}: {request.epoch}, {other.epoch} is under way", []
            if other.epoch == request.epoch:
                return f"duplicate: epoch {request.epoch} comes from {handoff.peer.worker_id}", []
        below = request.epoch - 1
        if below >= 0:
            self._raise_fence(request.request_id, below)
        return "", self._break_request(request.request_id, below, f"superseded by {request.epoch}")

    def _seal_fault(self, handoff: Incoming, message: Seal, first_token: Event) -> str:
        wanted = (1 << handoff.num_prompt_pages) - (1 << handoff.skip_pages)
        for layer, seen in enumerate(handoff.seen):
            if seen != wanted:
                missing = (wanted & ~seen).bit_count()
                return f"layer {layer} lacks {missing} of {wanted.bit_count()} pages"
        if message.manifest != handoff.manifest.digest():
            self.counts["digest_failures"] += 1
            return "manifest digest mismatch"
        request = handoff.request
        named = (first_token.request_id, first_token.epoch, first_token.kind)
        if named != (request.request_id, request.epoch, Kind.TOKENS):
            return f"first token is of {named[0]} epoch {named[1]} ({named[2].name})"
        if first_token.index != request.num_output_tokens or first_token.finish is not None:
            return f"first token has index {first_token.index}, not {request.num_output_tokens}"
        token_ids = first_token.token_ids
        if len(token_ids) != 1 or not 0 <= token_ids[0] <= MAX_TOKEN_ID:
            return f"first token must be one token id, not {len(token_ids)} or a negative one"
        return ""

    def _deliver(self, handoff: Incoming, first_token: Event) -> Outgoing:
        pages = handoff.matched + handoff.reserved
        self._pool.commit(handoff.reserved)
        self._pool.register(pages[: len(handoff.hashes)], handoff.hashes)
        del self._table[handoff.key]
        left_ms = ttl_left_ms(handoff.ends_at, self._clock())
        intake = Intake(
            request=dataclasses.replace(handoff.request, ttl_ms=left_ms),
            page_ids=pages,
            first_token=first_token,
            prefix_hashes=handoff.hashes,
            peer=handoff.peer.worker_id,
            skip_pages=handoff.skip_pages,
        )
        try:
            self._listener.sealed(intake)
        except Exception as error:
            log.exception("the listener failed on request %s", handoff.request.request_id)
            self._pool.release(pages)
            handoff.state = State.BROKEN
            reason = f"the decode worker could not take it: {type(error).__name__}"
            return [(handoff.peer, Nack(handoff.handoff_id, reason))]
        handoff.state = State.COMMITTED
        self._raise_fence(handoff.request.request_id, handoff.request.epoch)
        self.counts["committed"] += 1
        return [(handoff.peer, Commit(handoff.handoff_id))]

    def _break(self, handoff: Incoming, reason: str, how: type[Nack] | type[Cancel]) -> Outgoing:
        """End a handoff without COMMIT: free its pages, or set aside those still writable."""
        log.info(
            "handoff of %s epoch %d from %s broken: %s",
            handoff.request.request_id,
            handoff.request.epoch,
            handoff.peer.worker_id,
            reason,
        )
        self.counts["broken"] += 1
        handoff.state = State.BROKEN
        self._pool.release(handoff.matched)
        if handoff.peer.one_sided or handoff.writing:
            self._pool.quarantine(handoff.reserved)
        else:
            self._pool.cancel(handoff.reserved)
            del self._table[handoff.key]
        return [(handoff.peer, how(handoff.handoff_id, reason))]

    def _absolve(self, handoff: Incoming) -> None:
        if self._table.pop(handoff.key, None) is not None:
            self._pool.absolve(handoff.reserved)

    def _break_request(self, request_id: str, epoch: int, reason: str) -> Outgoing:
        outgoing: Outgoing = []
        for handoff in list(self._table.values()):
            request = handoff.request
            over = request.request_id == request_id and request.epoch <= epoch
            if over and handoff.state is not State.BROKEN:
                outgoing += self._break(handoff, reason, Cancel)
        return outgoing

    def _raise_fence(self, request_id: str, epoch: int) -> None:
        self._fence[request_id] = max(epoch, self._fence.get(request_id, epoch))
        self._fence.move_to_end(request_id)
        while len(self._fence) > MAX_FENCES:
            self._fence.popitem(last=False)

    def _open(self, peer: Peer, handoff_id: int) -> Incoming | None:
        """That handoff if it still goes on; a message for any other one is late, and counted."""
        handoff = self._table.get((peer, handoff_id))
        if handoff is None or handoff.state is not State.OPEN:
            self._late()
            return None
        return handoff

    def _of(self, peer: Peer) -> list[Incoming]:
        return [handoff for handoff in self._table.values() if handoff.peer is peer]

    def _late(self) -> Outgoing:
        self.counts["late_messages"] += 1
        return []

    def _deny(self, peer: Peer, message: Reserve, reason: str) -> Outgoing:
        self.counts["denied"] += 1
        log.debug("handoff %d from %s denied: %s", message.handoff_id, peer.worker_id, reason)
        return [(peer, Deny(message.handoff_id, reason))]
