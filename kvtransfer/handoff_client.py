"""The sending end of handoffs: one connection from a writer to one decode worker.

Writers are prefill workers, and decode workers that drain.

Two threads per connection: the sender takes items from `outgoing.OutgoingTable` and is the only one
that reads local pages or writes remote ones; the receiver reports answers and watches deadlines.
`connect` blocks for at most the timeout; everything else returns at once.

Over tcp a PAGES frame is followed by the pages' bytes, gathered from the pool by the kernel. Over
shm the sender copies the bytes into the decode worker's pool first and says so after, with all that
is to be said at the end of a batch.

The connection is lost when either thread ends. Then all handoffs fail, the sender stops, and only
after its last write is the socket closed: over shm that is what tells the receiver that it may use
the pages again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import xxhash

from pageferry.kvtransfer import metric_names
from pageferry.kvtransfer.frames import (
    Cancel,
    Commit,
    Deny,
    FrameError,
    Grant,
    Hello,
    Message,
    Nack,
    Pages,
    Ping,
    Refuse,
    Seal,
    Stopped,
    encode,
)
from pageferry.kvtransfer.handoff import (
    TRANSPORTS,
    HandoffFailed,
    HandoffRefused,
    Identity,
    State,
    host_id,
)
from pageferry.kvtransfer.handshake import HANDSHAKE_S, introduce
from pageferry.kvtransfer.memory import PageStore, PoolMemory, shared_runs
from pageferry.kvtransfer.outgoing import OutgoingTable
from pageferry.kvtransfer.sending import Announce, Close, End, Handoff, Item, Push
from pageferry.kvtransfer.sockets import (
    POLL_S,
    ConnectionLost,
    FrameSocket,
    dial_abstract,
    dial_tcp,
    recv_fd,
)
from pageferry.kvtransfer.tls import SCHEME
from pageferry.kvtransfer.transfer_stats import Tally
from pageferry.kvtransfer.wire import Request, WorkerRecord

__all__ = ["ClientOptions", "Handoff", "HandoffClient"]

log = logging.getLogger(__name__)

BATCH_BYTES = 2**21
"""Of pages that wake the sender, and of one PAGES message, so that a cancel does not wait behind
more. Each wake-up costs the compute on the same core 0.2 ms."""


PING_SHARE = 1 / 3
"""Of the connection's patience: silence after which we send a PING. The rest is for its answer."""


@dataclass(frozen=True)
class ClientOptions:
    transport: str = "auto"
    """`auto`: shm where both ends share a host and the peer offers it, else tcp."""
    timeout_s: float = 30.0
    """Seconds without an answer after which a handoff, or without progress a connection, fails."""


def choose_transport(wanted: str, peer: WorkerRecord) -> str:
    """`HandoffRefused` if the named transport cannot be had; there is no silent fallback."""
    if wanted not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport {wanted!r} must be auto or one of {TRANSPORTS}")
    shared = bool(peer.host_id) and peer.host_id == host_id()
    if wanted == "auto":
        wanted = "shm" if shared and "shm" in peer.addresses else "tcp"
    if wanted not in peer.addresses:
        offered = ", ".join(sorted(peer.addresses)) or "none"
        raise HandoffRefused(f"transport: {peer.id} offers {offered}, not {wanted}")
    if wanted == "shm" and not shared:
        raise HandoffRefused(
            f"transport: shm needs one host, mine is {host_id()!r}, theirs {peer.host_id!r}"
        )
    return wanted


class HandoffClient:
    """Hands pages of `memory` to the decode worker `peer`."""

    def __init__(
        self, identity: Identity, peer: WorkerRecord, memory: PageStore, options: ClientOptions
    ) -> None:
        self.transport = ""
        """"shm" or "tcp", once connected."""
        self._identity = identity
        self._peer = peer
        self._memory = memory
        self._options = options
        self._table: OutgoingTable | None = None
        self._remote: PoolMemory | None = None
        self._threads: list[threading.Thread] = []
        self._draining = threading.Event()
        self._conn: FrameSocket | None = None
        self._tally = Tally()
        self._pinged_at = 0.0
        """When a PING was sent after which nothing has been heard; 0 if there is none."""
        self._outbox: list[bytes] = []
        """Frames to send at the end of a batch; the sender thread's."""
        self._refused = 0

    # --- callers

    @property
    def alive(self) -> bool:
        return self._table is not None and self._table.alive

    def connect(self) -> None:
        """Dial and shake hands. `HandoffRefused`: do not try again; `HandoffFailed`: try later."""
        if self._threads:
            raise RuntimeError("already connected; make a new client for a new connection")
        try:
            self.transport = choose_transport(self._options.transport, self._peer)
            conn, hello = self._dial()
        except HandoffRefused:
            self._refused += 1
            raise
        except (ConnectionLost, FrameError, OSError) as error:
            raise HandoffFailed(f"cannot connect to {self._peer.id}: {error}") from error
        layout = self._memory.layout
        self._conn = conn
        self._table = OutgoingTable(
            layout.page_size,
            hello.num_pages,
            self._options.timeout_s,
            num_layers=layout.num_layers,
            batch_pages=max(1, BATCH_BYTES // layout.page_bytes),
        )
        receiver = self._thread("receiver", conn, lambda: self._receive(conn))
        sender = self._thread("sender", conn, lambda: self._send(conn, receiver))
        self._threads = [receiver, sender]
        receiver.start()
        sender.start()

    def reserve(self, request: Request, prefix_hashes: list[bytes]) -> Future[Handoff]:
        """Ask for pages. `HandoffDenied`: ask another worker; `HandoffFailed`: this one is gone.

        `prefix_hashes`: of the prompt's full pages, or fewer; empty to share nothing.
        """
        return self._live_table().reserve(request, prefix_hashes)

    def cancel_request(self, request_id: str, epoch: int, reason: str) -> None:
        """Cancel that request's handoffs at `epoch` and below, granted or not."""
        if self._table is not None:
            self._table.cancel_request(request_id, epoch, reason)

    def close(self) -> None:
        """Cancel what is open, say so, join the threads (within about 2 s). May be repeated."""
        if self._table is None:
            return
        self._table.lost("closed")
        self._draining.set()
        for thread in self._threads:
            thread.join(2.0)
            if thread.is_alive():
                log.error("thread %s did not end", thread.name)

    def tally(self) -> Tally:
        """What was sent since connect."""
        table, tally = self._table, replace(self._tally)
        if table is not None:
            tally.sealed = table.counts["committed"]
            tally.exposed_seconds = table.exposed_s
            tally.seconds += table.exposed_s
        return tally

    def counts(self) -> dict[str, float]:
        """Counters since connect, for sums over connections."""
        table, conn = self._table, self._conn
        counts = table.counts if table is not None else Counter[str]()
        return {
            metric_names.HANDOFFS: float(counts["committed"]),
            metric_names.HANDOFFS_DENIED: float(counts["denied"]),
            metric_names.HANDOFFS_FAILED: float(counts["failed"]),
            "late_messages": float(counts["late_messages"]),
            "refused": float(self._refused),
            "pages_sent": float(self._tally.pages),
            "frames_sent": float(conn.frames_sent if conn is not None else 0),
            "socket_calls": float(conn.calls if conn is not None else 0),
        }

    # --- connecting

    def _dial(self) -> tuple[FrameSocket, Hello]:
        address, timeout_s = self._peer.addresses[self.transport], self._options.timeout_s
        if self.transport == "tcp":
            address = self._without_scheme(address)
        dial: Callable[[str, float], socket.socket]
        dial = dial_tcp if self.transport == "tcp" else dial_abstract
        conn = FrameSocket(dial(address, min(timeout_s, HANDSHAKE_S)), timeout_s)
        try:
            hello = introduce(conn, self._identity, self.transport, self._peer.id)
            if self.transport == "shm":
                fd = recv_fd(conn)
                try:
                    self._remote = PoolMemory.attach(fd, self._memory.layout, hello.num_pages)
                except ValueError as error:
                    raise HandoffRefused(str(error)) from error
                finally:
                    os.close(fd)
        except BaseException:
            conn.close()
            raise
        return conn, hello

    def _without_scheme(self, address: str) -> str:
        """The tcp address for dialling. Whether it is one for TLS must suit us: there is no silent
        downgrade, neither here nor by whoever can write to the registry."""
        offered, wanted = address.startswith(SCHEME), self._identity.tls is not None
        if offered != wanted:
            mine, theirs = ("on" if wanted else "off"), ("on" if offered else "off")
            raise HandoffRefused(
                f"tls: mine {mine}, {self._peer.id}'s {theirs}; give all workers --handoff-tls-*"
            )
        return address.removeprefix(SCHEME)

    def _live_table(self) -> OutgoingTable:
        if self._table is None:
            raise RuntimeError("connect first")
        return self._table

    def _thread(self, role: str, conn: FrameSocket, target: Callable[[], str]) -> threading.Thread:
        """A thread that, however it ends, ends the connection with the reason it returns."""

        def run() -> None:
            reason = f"{role} failed"
            try:
                reason = target()
            except Exception:
                log.exception("handoff %s to %s failed", role, self._peer.id)
            finally:
                self._live_table().lost(f"connection lost: {reason}")
                conn.closing = True  # ends the other thread

        return threading.Thread(target=run, name=f"handoff-{role}", daemon=True)

    # --- receiver thread

    def _receive(self, conn: FrameSocket) -> str:
        table = self._live_table()

        def idle() -> None:
            table.expire()
            if self._pinged_at:
                conn.require_sound(self._pinged_at - conn.patience_s * PING_SHARE)

        try:
            while True:
                message = conn.recv_message(on_idle=idle)
                self._pinged_at = 0.0
                fault = self._hear(table, message)
                if fault:
                    log.error("%s broke the handoff protocol: %s", self._peer.id, fault)
                    return fault
                table.expire()
        except (ConnectionLost, FrameError) as error:
            return str(error)

    def _hear(self, table: OutgoingTable, message: Message) -> str:
        """Act on an answer; a reason if the connection cannot go on."""
        match message:
            case Grant():
                return table.grant(message)
            case Deny():
                table.deny(message.handoff_id, message.reason)
            case Commit():
                table.commit(message.handoff_id)
            case Nack() | Cancel():
                if handoff := table.answer(message.handoff_id):
                    table.fail(handoff, message.reason, tell=None)
            case Ping():
                pass
            case Refuse():
                return f"refused: {message.reason}"
            case _:
                return f"{type(message).__name__} is not for a writer"
        return ""

    # --- sender thread

    def _send(self, conn: FrameSocket, receiver: threading.Thread) -> str:
        table = self._live_table()
        reason = "closed"
        try:
            while not conn.closing:
                items = table.next_batch(POLL_S)
                self._outbox += map(encode, table.due_renewals())
                for item in items:
                    self._execute(table, conn, item)
                self._ask_for_a_sign(conn)
                self._flush(conn)
                if not items and self._draining.is_set():
                    break
        except ConnectionLost as lost:
            reason = str(lost)
        finally:
            table.lost(f"connection lost: {reason}")
            conn.closing = True
            receiver.join()
            conn.close()  # our last write is done
            table.detach_all()
            if self._remote is not None:
                self._remote.close()
        return reason

    def _ask_for_a_sign(self, conn: FrameSocket) -> None:
        now = time.monotonic()
        if not self._pinged_at and now - conn.heard_at > conn.patience_s * PING_SHARE:
            self._pinged_at = now
            self._outbox.append(encode(Ping()))

    def _execute(self, table: OutgoingTable, conn: FrameSocket, item: Item) -> None:
        """Do one item. What is wrong with it alone (a page that does not exist, a message above
        its cap) breaks its handoff, not the connection."""
        try:
            self._perform(table, conn, item)
        except ConnectionLost:
            raise
        except Exception as error:
            log.exception("cannot send for request %s", item.handoff.request.request_id)
            reason = f"cannot send: {type(error).__name__}: {error}"
            table.fail(item.handoff, reason, tell=reason)

    def _perform(self, table: OutgoingTable, conn: FrameSocket, item: Item) -> None:
        handoff = item.handoff
        match item:
            case Announce():
                self._outbox.append(encode(item.message))
            case Push():
                self._push(conn, item)
            case Close() if handoff.state is not State.SEALING:
                pass  # broken since it was taken: its End comes next
            case Close():
                table.detach(handoff)
                token = item.first_token.to_list()
                seal = Seal(handoff.handoff_id, handoff.manifest.digest(), token)
                self._outbox.append(encode(seal))
            case End():
                table.detach(handoff)
                if handoff.announced:
                    if item.tell is not None:
                        self._outbox.append(encode(Cancel(handoff.handoff_id, item.tell)))
                    self._outbox.append(encode(Stopped(handoff.handoff_id)))

    def _flush(self, conn: FrameSocket) -> None:
        if self._outbox:
            frames, self._outbox = self._outbox, []
            conn.send_frames(frames)

    def _push(self, conn: FrameSocket, push: Push) -> None:
        """Send or copy pages, in messages of bounded size."""
        page_bytes = self._memory.layout.page_bytes
        # A store that gathers into a buffer has room for one layer at a time.
        max_layers = push.layers if isinstance(self._memory, PoolMemory) else 1
        parts = list(push.parts(max(1, BATCH_BYTES // page_bytes), max_layers))
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if push.handoff.state is State.BROKEN:
                break
            begun = time.monotonic()
            digest, payload = self._read(part, following)
            count = len(part.local_pages)
            size = sum(map(len, payload))
            message = Pages(
                part.handoff.handoff_id, part.layer, part.first, count, digest, size, part.layers
            )
            if payload:
                self._flush(conn)
                conn.send(message, payload)
            else:
                self._outbox.append(encode(message))
            part.handoff.manifest.add(message)
            self._tally.pages += part.num_pages
            self._tally.bytes += part.num_pages * page_bytes
            if part.handoff.state is State.OPEN:  # once sealed, it is exposed time
                self._tally.seconds += time.monotonic() - begun

    def _read(self, part: Push, following: Push | None) -> tuple[bytes, list[memoryview]]:
        """Digest of the pages, and their bytes for sending; over shm, none: they are copied."""
        hasher, payload = xxhash.xxh3_128(), []
        pages, memory = part.local_pages, self._memory
        positions = pages if isinstance(memory, PoolMemory) else range(len(pages))
        targets = part.remote_pages if self._remote is not None else positions
        runs = shared_runs(targets, positions)
        local_runs = [(at, count) for _, at, count in runs]
        for layer in range(part.layer, part.layer + part.layers):
            if isinstance(memory, PoolMemory):
                row = memory.view(layer, 0, memory.num_pages)
                views = memory.runs(layer, local_runs)
            else:
                views = memory.gather(layer, pages)
                (row,) = views
                if following is not None:
                    memory.prepare(following.layer, following.local_pages)
            begun = time.monotonic()
            for view in views:
                hasher.update(view)
            self._tally.digest_seconds += time.monotonic() - begun
            if self._remote is None:
                payload += views
            else:
                self._remote.write(layer, runs, row)
        return hasher.digest(), payload
