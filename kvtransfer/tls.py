"""TLS between workers, for transport `tcp`: both ends show a certificate that one CA has signed.

The CA is the cluster's own: whom it signs may connect; names in certificates are not looked at. The
proof of the cluster key covers both certificates (`channel`), so nobody in between, not even with a
certificate of that CA, can pass it on. A worker with TLS talks to workers with TLS only.

Bytes are copied and ciphered one record (16 KiB) at a time: there is no scatter-gather in TLS.
"""

from __future__ import annotations

import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pageferry.kvtransfer.settings import SettingsError
from pageferry.kvtransfer.sockets import POLL_S, ConnectionLost, FrameSocket

SCHEME = "tls://"
"""Begins the address of a worker that wants TLS."""


class Tls:
    """One worker's certificate and whom it trusts; read once, at the start."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        """Paths of PEM files. `OSError` (of which `ssl.SSLError` is one) or `ValueError`."""
        self._contexts = {}
        for server_side in (False, True):
            purpose = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
            context = ssl.SSLContext(purpose)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            if server_side:
                context.num_tickets = 0  # every connection shows its certificate
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key)
            self._contexts[server_side] = context
        pem = Path(cert).read_text()
        begin = pem.index("-----BEGIN CERTIFICATE-----")
        end = pem.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        self._own = ssl.PEM_cert_to_DER_cert(pem[begin:end])

    @classmethod
    def from_settings(cls, cert: str, key: str, ca: str) -> Self | None:
        """None without any of them. `SettingsError` if one is missing or cannot be used."""
        if not (cert or key or ca):
            return None
        flags = {"--handoff-tls-cert": cert, "--handoff-tls-key": key, "--handoff-tls-ca": ca}
        if missing := [flag for flag, value in flags.items() if not value]:
            raise SettingsError(f"TLS between workers also needs {' and '.join(missing)}")
        try:
            return cls(cert, key, ca)
        except (OSError, ValueError) as error:
            shown = " ".join(f"{flag} {value}" for flag, value in flags.items())
            raise SettingsError(f"{shown}: cannot be used ({error})") from error

    def secure(self, conn: FrameSocket, *, server_side: bool, timeout_s: float) -> None:
        """Shake hands; from then on `conn` is ciphered. `OSError` if the other end does not fit.

        Over TLS 1.3 a client learns only from its first read that its certificate was refused.
        """
        secured = self._contexts[server_side].wrap_socket(
            conn.sock, server_side=server_side, do_handshake_on_connect=False
        )
        secured.setblocking(False)
        conn.sock = secured  # the old object has given its descriptor away
        conn.stream = TlsStream(secured)
        deadline = time.monotonic() + timeout_s
        while event := _shake_hands(secured):
            if conn.closing or time.monotonic() > deadline:
                raise ConnectionLost(f"no TLS within {timeout_s:g} s")
            _is_ready(secured, event)
        certificates = [self._own, secured.getpeercert(binary_form=True) or b""]
        if not server_side:
            certificates.reverse()
        conn.channel = b"".join(hashlib.sha256(c).digest() for c in certificates)


def _shake_hands(sock: ssl.SSLSocket) -> int:
    """What the handshake waits for; 0 when it is done."""
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    return 0


def _is_ready(sock: ssl.SSLSocket, event: int) -> bool:
    """Wait for it, `POLL_S` at most."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(POLL_S * 1000))


class TlsStream:
    """What a `FrameSocket` asks of a socket, for a ciphered one.

    OpenSSL does not take two threads in one connection at once, so nothing waits under the lock:
    the socket does not block, and whoever would wait polls for `POLL_S` and says `BlockingIOError`.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._is_closed = False

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Bytes of at most one record; 0 at the end of the stream."""
        while True:
            with self._lock:
                self._require_open()
                try:
                    return self._sock.recv_into(buffer)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait_for(event)

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[object], int, object]:
        """Into the first buffer only."""
        return self.recv_into(buffers[0]), [], 0, None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Of the first buffer, at most one record. Call again with the same after an error."""
        while True:
            with self._lock:
                self._require_open()
                try:
                    return self._sock.send(buffers[0])
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                except ssl.SSLWantReadError:
                    event = select.POLLIN
            self._wait_for(event)

    def shutdown(self, how: int) -> None:
        # SSLSocket's own would go on in plain text after it.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._sock.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise OSError("the connection is closed")

    def _wait_for(self, event: int) -> None:
        try:
            ready = _is_ready(self._sock, event)
        except ValueError:  # closed meanwhile, by the thread that owns it
            raise OSError("the connection is closed") from None
        if not ready:
            raise BlockingIOError
