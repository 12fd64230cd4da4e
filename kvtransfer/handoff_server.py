"""The receiving end of handoffs: listens, checks, and lets pages into the decode worker's pool.

Threads: one acceptor per transport, one thread per connection, one housekeeper (deadlines, and
messages that do not answer the connection thread's own peer). What may happen to which page is
decided by `intake.IntakeTable`; this module moves bytes.

Life of a connection:

1. accept; `handshake.welcome`, or the refusal goes into `refusals`. Over shm: pass the memory.
2. Messages are read and answered in order. A PAGES message is allowed by the table first; then its
   payload is received into the pool (tcp) or the bytes that the writer put there are read (shm),
   and the digest decides.
3. At the end of the stream every handoff of the connection is over. If it is we who end it, over
   shm, the thread stays until the writer has hung up too: only then are its pages free.

An error on one connection ends that connection's handoffs and no others.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import xxhash

from pageferry.kvtransfer import metric_names
from pageferry.kvtransfer.frames import (
    MAX_REASON,
    Cancel,
    FrameError,
    Message,
    Pages,
    Ping,
    Refuse,
    Renew,
    Reserve,
    Seal,
    Stopped,
)
from pageferry.kvtransfer.handoff import (
    TRANSPORTS,
    HandoffRefused,
    Identity,
    IntakeListener,
    State,
)
from pageferry.kvtransfer.handshake import shown, welcome
from pageferry.kvtransfer.incoming import Incoming, Outgoing, Peer
from pageferry.kvtransfer.intake import IntakeTable
from pageferry.kvtransfer.memory import PageStore, PoolMemory, adjacent_runs
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.sockets import (
    POLL_S,
    ConnectionLost,
    FrameSocket,
    listen_abstract,
    listen_tcp,
    send_fd,
    tune_tcp,
)
from pageferry.kvtransfer.tls import SCHEME
from pageferry.kvtransfer.transfer_stats import Tally, figures

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_REFUSALS = 16
ANSWER_STALL_S = 2.0
"""Seconds for which a writer may leave an answer unread before its connection is given up."""
HANG_UP_S = 1.0
"""Seconds that `close` gives writers to hang up."""


@dataclass(frozen=True)
class ServerOptions:
    bind: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    """Host that writers should dial. Default: `bind`, or this host's name if that is a wildcard."""
    transports: tuple[str, ...] = TRANSPORTS
    timeout_s: float = 30.0
    """Seconds without progress after which a handoff is broken."""


class HandoffServer:
    """Accepts handoffs into `pool` and `memory`; verified ones go to `listener`."""

    def __init__(
        self,
        identity: Identity,
        pool: PagePool,
        memory: PageStore,
        listener: IntakeListener,
        options: ServerOptions,
    ) -> None:
        unknown = set(options.transports) - set(TRANSPORTS)
        if unknown or not options.transports:
            raise ValueError(f"transports {options.transports} must be some of {TRANSPORTS}")
        if "shm" in options.transports and not isinstance(memory, PoolMemory):
            raise ValueError("transport shm needs a PoolMemory; offer tcp only")
        if identity.num_pages != pool.num_pages or identity.layout != memory.layout:
            raise ValueError("identity and memory differ in num_pages or layout")
        if memory.num_pages != pool.num_pages or memory.layout.page_size != pool.page_size:
            raise ValueError("pool and memory differ in num_pages or page_size")
        self.addresses: dict[str, str] = {}
        """Endpoints by transport, for `WorkerRecord.addresses`; filled by `start`."""
        self.refusals: deque[str] = deque(maxlen=MAX_REFUSALS)
        self._identity = identity
        self._memory = memory
        self._options = options
        self._table = IntakeTable(pool, memory.layout, listener, options.timeout_s)
        self._lock = threading.Lock()
        self._connections: dict[Peer, FrameSocket] = {}
        self._sockets: set[FrameSocket] = set()
        self._threads: set[threading.Thread] = set()
        self._fixed_threads: list[threading.Thread] = []
        self._notices: deque[tuple[Peer, Message]] = deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._counts: Counter[str] = Counter()
        self._tallies = {transport: Tally() for transport in options.transports}

    # --- worker's side

    def start(self) -> None:
        """Bind and serve. `OSError` if the address cannot be had."""
        options = self._options
        if "tcp" in options.transports:
            listener = listen_tcp(options.bind, options.port)
            host = options.advertise or options.bind
            if not options.advertise and options.bind in ("0.0.0.0", "::", ""):
                host = socket.gethostname()
            host = f"[{host}]" if ":" in host else host
            scheme = SCHEME if self._identity.tls else ""
            self.addresses["tcp"] = f"{scheme}{host}:{listener.getsockname()[1]}"
            self._listen("tcp", listener)
        if "shm" in options.transports:
            listener, self.addresses["shm"] = listen_abstract()
            self._listen("shm", listener)
        self._fixed_threads.append(self._spawn("handoff-housekeeper", self._housekeep))

    def cancel(self, request_id: str, epoch: int) -> None:
        """End that request's handoffs at `epoch` and below. Any thread; does no I/O.

        When this has returned, no `Intake` of that age will be delivered any more, so the caller
        drops the request from its own books after this call, not before.
        """
        self._notify(self._table.cancel_request(request_id, epoch, "cancelled by the receiver"))

    def holders(self) -> Counter[int]:
        """References by page that open handoffs hold, for `PagePool.check_integrity`."""
        return self._table.holders()

    def open_handoffs(self) -> int:
        return self._table.open_handoffs()

    def close(self) -> None:
        """Stop accepting, break what is under way, join all threads (within about 2 s).

        Pages that a one-sided writer did not let go of in time stay in quarantine.
        """
        self._stopping.set()
        self._wake.set()
        for thread in self._fixed_threads:  # after this no connection is added
            thread.join(1.0)
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        for conn in sockets:
            conn.end_sending()
        deadline = time.monotonic() + HANG_UP_S
        while self._open_sockets() and time.monotonic() < deadline:
            time.sleep(0.01)
        for conn in sockets:
            conn.closing = True
        for thread in threads:
            thread.join(1.0)
            if thread.is_alive():
                log.error("thread %s did not end", thread.name)

    def stats(self) -> dict[str, float]:
        """Counters since start."""
        # Copied first: other threads add keys meanwhile.
        counts = Counter(dict(self._table.counts)) + Counter(dict(self._counts))
        stats = {
            metric_names.HANDOFFS: float(counts["committed"]),
            metric_names.HANDOFFS_DENIED: float(counts["denied"]),
            metric_names.HANDOFFS_FAILED: float(counts["broken"]),
            **figures(self._tallies),
            metric_names.DECODE_TRANSFER_QUEUE: float(self._table.open_handoffs()),
        }
        for name in ("late_messages", "digest_failures", "timeouts", "refused", "protocol_errors"):
            stats[name] = float(counts[name])
        with self._lock:
            stats["socket_calls"] = float(sum(conn.calls for conn in self._sockets))
        return stats

    # --- threads

    def _listen(self, transport: str, listener: socket.socket) -> None:
        accept = self._spawn(
            f"handoff-accept-{transport}", lambda: self._accept(transport, listener)
        )
        self._fixed_threads.append(accept)

    def _spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except Exception:
                log.exception("thread %s failed", name)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for us
            with self._lock:
                self._threads.discard(thread)
            raise
        return thread

    def _accept(self, transport: str, listener: socket.socket) -> None:
        with listener:
            while not self._stopping.is_set():
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    # Out of descriptors, or the dialler was gone already. Others may still come.
                    log.warning("accept on %s failed: %s", transport, error)
                    self._stopping.wait(POLL_S)
                    continue
                if self._open_sockets() >= MAX_CONNECTIONS:
                    log.warning("more than %d handoff connections; one closed", MAX_CONNECTIONS)
                    sock.close()
                    continue
                conn = FrameSocket(sock, self._options.timeout_s)
                with self._lock:
                    self._sockets.add(conn)
                try:
                    self._spawn(f"handoff-{transport}", partial(self._serve, transport, conn))
                except RuntimeError:
                    log.exception("no thread for a handoff connection; it is closed")
                    with self._lock:
                        self._sockets.discard(conn)
                    conn.close()

    def _housekeep(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(POLL_S)
            self._wake.clear()
            try:
                self._notify(self._table.expire())
                while self._notices:
                    peer, message = self._notices.popleft()
                    if conn := self._connections.get(peer):
                        with contextlib.suppress(ConnectionLost):
                            conn.send(message, stall_s=ANSWER_STALL_S)
            except Exception:
                log.exception("handoff housekeeping failed; going on")

    def _serve(self, transport: str, conn: FrameSocket) -> None:
        """One connection from accept to its end."""
        try:
            if transport == "tcp":
                tune_tcp(conn.sock, self._options.timeout_s)
            hello = welcome(conn, self._identity, transport)
            if isinstance(self._memory, PoolMemory) and transport == "shm":
                with contextlib.suppress(ConnectionLost):  # why it hung up is still to be read
                    send_fd(conn, self._memory.fd)
            peer = Peer(hello.worker_id, transport)
        except HandoffRefused as refusal:
            self._note_refusal(refusal.reason)
        except (ConnectionLost, FrameError, OSError) as error:
            log.info("a %s connection ended in its handshake: %s", transport, error)
        else:
            self._serve_peer(peer, conn)
        finally:
            with self._lock:
                self._sockets.discard(conn)
            conn.close()

    def _note_refusal(self, reason: str) -> None:
        self._counts["refused"] += 1
        self.refusals.append(reason)

    def _serve_peer(self, peer: Peer, conn: FrameSocket) -> None:
        with self._lock:
            self._connections[peer] = conn
        conn.read_ahead()
        peer_gone = False
        try:
            while True:
                message = conn.recv_message(lambda: conn.require_sound(conn.heard_at))
                self._handle(peer, conn, message)
        except ConnectionLost as lost:
            peer_gone = lost.peer_gone
            log.info("handoff connection from %s: %s", peer.worker_id, lost)
        except FrameError as error:
            self._counts["protocol_errors"] += 1
            log.warning("handoff connection from %s broke the protocol: %s", peer.worker_id, error)
            with contextlib.suppress(ConnectionLost):
                conn.send(Refuse(f"protocol error: {error}"), stall_s=ANSWER_STALL_S)
        except Exception:
            log.exception("handoff connection from %s failed", peer.worker_id)
        finally:
            self._table.break_peer(peer, "connection lost")
            conn.end_sending()
            if peer_gone or not peer.one_sided or conn.drain_to_end():
                self._table.lost(peer)
            with self._lock:
                del self._connections[peer]

    # --- messages

    def _handle(self, peer: Peer, conn: FrameSocket, message: Message) -> None:
        match message:
            case Pages():
                self._pages(peer, conn, message)
            case Reserve():
                self._answer(peer, conn, self._table.reserve(peer, message))
            case Seal():
                self._answer(peer, conn, self._table.seal(peer, message))
            case Cancel():
                self._answer(peer, conn, self._table.cancel(peer, message))
            case Stopped():
                self._answer(peer, conn, self._table.stopped(peer, message))
            case Renew():
                self._answer(peer, conn, self._table.renew(peer, message))
            case Ping():
                conn.send(message, stall_s=ANSWER_STALL_S)
            case Refuse():  # the last word of its handshake
                reason = f"{shown(peer.worker_id)!r} refused: {shown(message.reason, MAX_REASON)}"
                self._note_refusal(reason)
                raise ConnectionLost(reason)
            case _:
                raise FrameError(f"{type(message).__name__} is not for a receiver")

    def _pages(self, peer: Peer, conn: FrameSocket, message: Pages) -> None:
        layout = self._memory.layout
        size = message.layers * message.count * layout.page_bytes
        payload = 0 if peer.one_sided else size
        too_many = message.count > self._memory.num_pages or message.layers > layout.num_layers
        if message.size != payload or too_many:
            raise FrameError(
                f"PAGES of {message.layers} x {message.count} pages with {message.size} payload "
                f"bytes, not {payload}"
            )
        handoff, outgoing = self._table.begin_pages(peer, message)
        if handoff is None:
            conn.discard(payload)
            self._answer(peer, conn, outgoing)
            return
        begun, before, digest, digest_s = time.monotonic(), conn.bytes_received, None, 0.0
        try:
            digest, digest_s = self._take_in(conn, handoff, message)
        finally:
            outgoing = self._table.end_pages(handoff, message, digest)
        if not peer.one_sided:
            conn.discard(before + payload - conn.bytes_received)
        with self._lock:
            tally = self._tallies[peer.transport]
            tally.bytes += size
            tally.seconds += time.monotonic() - begun
            tally.digest_seconds += digest_s
        self._answer(peer, conn, outgoing)

    def _take_in(
        self, conn: FrameSocket, handoff: Incoming, message: Pages
    ) -> tuple[bytes | None, float]:
        """Digest of the pages as they are in memory now, None if the handoff broke meanwhile; and
        the seconds that the digest took."""

        def keep() -> bool:
            return handoff.state is State.OPEN

        pages = handoff.pages(message.first, message.count)
        hasher, digest_s, memory = xxhash.xxh3_128(), 0.0, self._memory
        runs = adjacent_runs(pages)
        for layer in range(message.layer, message.layer + message.layers):
            if isinstance(memory, PoolMemory):
                views = memory.runs(layer, runs)
            else:
                views = memory.landing(layer, pages)
            if not handoff.peer.one_sided and not conn.recv_payload(views, keep):
                return None, digest_s
            begun = time.monotonic()
            for view in views:
                hasher.update(view)
            digest_s += time.monotonic() - begun
            if not handoff.peer.one_sided:
                memory.land(layer, pages)
        return hasher.digest(), digest_s

    def _answer(self, peer: Peer, conn: FrameSocket, outgoing: Outgoing) -> None:
        """Answer our own peer from this thread, everyone else from the housekeeper's."""
        self._notify([item for item in outgoing if item[0] is not peer])
        for to, message in outgoing:
            if to is peer:
                conn.send(message, stall_s=ANSWER_STALL_S)

    def _notify(self, outgoing: Outgoing) -> None:
        if outgoing:
            self._notices.extend(outgoing)
            self._wake.set()

    def _open_sockets(self) -> int:
        with self._lock:
            return len(self._sockets)
