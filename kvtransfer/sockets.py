"""Blocking sockets that carry handoff frames: exact reads, scatter-gather sends, bounded waits.

A `FrameSocket` wakes every `POLL_S` while it waits, so that its thread can notice that it should
end (`closing`); a transfer that has begun and then sees no byte for `stall_s` is a lost connection.
A writer that has heard nothing for a while sends a PING, and the receiver answers it: either end
that hears nothing for the patience agreed in HELLO gives the connection up, so one whose other end
vanished without a word is found whatever lies in between.
Only the thread that owns a socket closes it. The waits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO):
with a timeout of its own, Python would poll before each call.

Nothing here shuts the reading direction down: the end of the peer's stream is the proof that a
one-sided writer is gone, and must not be faked. A writer in turn ends its stream only after its
last write.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pageferry.kvtransfer.frames import HEADER, FrameError, Message, decode, encode, parse_header

LOOPBACK = ("127.", "::1", "localhost")
"""How addresses begin that only this host reaches."""
POLL_S = 0.1
IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one sendmsg or recvmsg takes."""

_SCRATCH_BYTES = 256 * 1024
_AHEAD_BYTES = 2048
"""What one call may read beyond what was asked for: the rest of a frame, and frames after it."""

_NO_BYTES = memoryview(b"")


class ConnectionLost(Exception):
    """The connection is of no more use: the peer went or is stuck, or we are closing.

    `peer_gone`: the peer has ended its stream or its process is dead.
    """

    def __init__(self, reason: str, *, peer_gone: bool = False) -> None:
        super().__init__(reason)
        self.peer_gone = peer_gone


def _nothing() -> None:
    pass


def _always() -> bool:
    return True


class Stream(Protocol):
    """How bytes move: a socket itself, or what ciphers them on the way."""

    def recv_into(self, buffer: bytearray, /) -> int: ...

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int, flags: int, /
    ) -> tuple[int, Any, int, Any]: ...

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class FrameSocket:
    """A connected stream socket. One thread reads; several may send, one frame at a time."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self.sock = sock
        self.stream: Stream = sock
        self.stall_s = stall_s
        self.patience_s = stall_s
        """Silence after which the connection counts as lost; both ends agree on it in HELLO."""
        self.heard_at = time.monotonic()
        """When a byte last came in."""
        self.channel = b""
        """Names this TLS connection, equally at both ends; empty without TLS."""
        self.bytes_received = 0
        self.frames_sent = 0
        self.calls = 0
        """System calls that moved bytes, both directions."""
        self.closing = False
        self._send_lock = threading.Lock()
        self._ahead = _NO_BYTES
        self._spare: list[memoryview] = []
        sock.settimeout(None)
        period = struct.pack("ll", 0, int(POLL_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, period)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, period)

    # --- reading

    def read_ahead(self) -> None:
        """From now on take in what has come in few calls. Not before `recv_fd`: a descriptor comes
        with the very call that reads its byte."""
        self._spare = [memoryview(bytearray(_AHEAD_BYTES))]

    def recv_message(
        self, on_idle: Callable[[], None] | None = None, max_body: int = 2**32
    ) -> Message:
        """The next message. Waits without limit for its first byte, calling `on_idle` meanwhile.

        `FrameError` if it is malformed or its body is longer than `max_body` or its tag's cap.
        """
        header = bytearray(HEADER.size)
        self._fill([memoryview(header)], idle=on_idle or _nothing)
        tag, length = parse_header(bytes(header))
        if length > max_body:
            raise FrameError(f"{tag.name} of {length} bytes where at most {max_body} are allowed")
        body = bytearray(length)
        self._fill([memoryview(body)])
        return decode(tag, bytes(body))

    def require_sound(self, since: float) -> None:
        """`ConnectionLost` if nothing has been heard since then, and that is too long ago."""
        if time.monotonic() - since > self.patience_s:
            raise ConnectionLost(f"heard nothing for {self.patience_s:g} s")

    def recv_payload(self, views: Sequence[memoryview], keep: Callable[[], bool] = _always) -> bool:
        """Read exactly the views' bytes into them. False: `keep` said no on the way.

        From then on the rest of the payload is still to be read; `discard` it, so that the next
        frame is found where it begins.
        """
        return self._fill(views, keep=keep)

    def discard(self, size: int) -> None:
        """Read `size` bytes and forget them."""
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._fill([part])
            size -= len(part)

    def drain_to_end(self) -> bool:
        """Discard whatever comes until the peer has ended its stream (True) or we are closing."""
        scratch = bytearray(_SCRATCH_BYTES)
        while not self.closing:
            try:
                if not self.stream.recv_into(scratch):
                    return True
            except BlockingIOError:
                continue
            except OSError:
                return True
        return False

    def _fill(
        self,
        views: Sequence[memoryview],
        idle: Callable[[], None] | None = None,
        keep: Callable[[], bool] | None = None,
    ) -> bool:
        """Fill the views. `keep` marks a payload, of which nothing but its bytes is asked for."""
        pending = [view for view in views if len(view)]
        silent_since = time.monotonic()
        while pending:
            if self.closing:
                raise ConnectionLost("closing")
            if keep is not None and not keep():
                return False
            try:
                got = self._recv(pending, whole=keep is not None)
            except BlockingIOError:
                if idle is not None:
                    idle()
                elif time.monotonic() - silent_since > self.stall_s:
                    raise ConnectionLost(f"silent in mid-message for {self.stall_s:g} s") from None
                continue
            except OSError as error:
                raise ConnectionLost(f"{type(error).__name__}: {error}", peer_gone=True) from error
            if not got:
                raise ConnectionLost("closed by the peer", peer_gone=True)
            idle = None  # a message has begun
            self.heard_at = silent_since = time.monotonic()
            pending = _advance(pending, got)
        return True

    def _recv(self, views: list[memoryview], whole: bool) -> int:
        """Bytes put into the views; 0 at the end of the stream."""
        if self._ahead:
            got = min(len(views[0]), len(self._ahead))
            views[0][:got] = self._ahead[:got]
            self._ahead = self._ahead[got:]
        else:
            self.calls += 1
            views = views[: IOV_MAX - 1]
            spare = [] if whole else self._spare
            flags = socket.MSG_WAITALL if whole else 0
            got = self.stream.recvmsg_into([*views, *spare], 0, flags)[0]
            if spare:
                wanted = sum(map(len, views))
                self._ahead = spare[0][: max(0, got - wanted)]
                got = min(got, wanted)
        self.bytes_received += got
        return got

    # --- sending

    def send(
        self,
        message: Message,
        payload: Sequence[memoryview] = (),
        stall_s: float | None = None,
    ) -> None:
        """Send one frame and its payload whole. `ConnectionLost` if no byte goes for `stall_s`."""
        self._send([memoryview(encode(message)), *payload], 1, stall_s)

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send what `encode` made of messages without payload, in one call if possible."""
        self._send([memoryview(b"".join(frames))], len(frames), None)

    def _send(self, views: list[memoryview], frames: int, stall_s: float | None) -> None:
        pending = [view for view in views if len(view)]
        limit = self.stall_s if stall_s is None else stall_s
        with self._send_lock:
            stuck_since = time.monotonic()
            self.frames_sent += frames
            while pending:
                try:
                    self.calls += 1
                    sent = self.stream.sendmsg(pending[:IOV_MAX])
                except BlockingIOError:
                    if self.closing or time.monotonic() - stuck_since > limit:
                        self.end_sending()  # a frame was cut short; nothing can follow it
                        raise ConnectionLost(f"takes no data for {limit:g} s") from None
                    continue
                except OSError as error:
                    raise ConnectionLost(f"{type(error).__name__}: {error}") from error
                stuck_since = time.monotonic()
                pending = _advance(pending, sent)

    def end_sending(self) -> None:
        """No more from us; the peer sees the end of the stream, and we still see its end."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closing = True
        self.stream.close()
        self.sock.close()


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    """`views` (flat bytes) without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def tune_tcp(sock: socket.socket, stall_s: float) -> None:
    """No Nagle delay; a peer that vanished without FIN is noticed within about `stall_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 3)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))


def listen_tcp(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    sock = socket.create_server((bind, port), family=family, backlog=128)
    sock.settimeout(POLL_S)
    return sock


def listen_abstract() -> tuple[socket.socket, str]:
    """A unix socket in the abstract namespace, and its name without the leading NUL."""
    name = f"pageferry-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(128)
        sock.settimeout(POLL_S)
    except BaseException:
        sock.close()
        raise
    return sock, name


def dial_tcp(address: str, timeout_s: float) -> socket.socket:
    """Connect to `host:port` (IPv6 hosts in brackets or not)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConnectionLost(f"tcp address {address!r} is not host:port")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except OSError as error:
        raise ConnectionLost(f"cannot reach {address}: {error}") from error
    tune_tcp(sock, timeout_s)
    return sock


def dial_abstract(name: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect("\0" + name)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"cannot reach unix socket @{name}: {error}") from error
    return sock


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a unix socket."""
    credentials = struct.Struct("iii")
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    uid: int = credentials.unpack(data)[1]
    return uid


def send_fd(conn: FrameSocket, fd: int) -> None:
    """Pass a file descriptor along with one byte."""
    try:
        socket.send_fds(conn.sock, [b"M"], [fd])
    except OSError as error:
        raise ConnectionLost(f"could not pass the pool memory: {error}") from error


def recv_fd(conn: FrameSocket) -> int:
    """The descriptor that `send_fd` passed; the caller closes it."""
    deadline = time.monotonic() + conn.stall_s
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(conn.sock, 1, 1)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConnectionLost("the pool memory was not passed") from None
            continue
        except OSError as error:
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        if data == b"M" and len(fds) == 1:
            return fds[0]
        for fd in fds:
            os.close(fd)
        raise ConnectionLost("the pool memory was not passed")
