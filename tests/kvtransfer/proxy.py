"""A TCP proxy between a writer and a receiver that understands frames and does harm on request.

Every frame (with the payload of a PAGES) becomes a `Unit`; the proxy's rule answers what to do
instead of passing it on: bytes are sent, a number is a pause in seconds, `CUT` ends both
connections, `RESET` does so without goodbye, `FREEZE` passes nothing on any more in either
direction while both ends' kernels still see a healthy connection. Of a stream that is not in frames
(`framed=False`: TLS), what comes with one call is a `Unit` without a tag.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

from pageferry.kvtransfer.frames import HEADER, Pages, Tag, decode

STEP_S = 0.05


class Act(enum.Enum):
    CUT = "cut"
    RESET = "reset"
    FREEZE = "freeze"


CUT, RESET, FREEZE = Act.CUT, Act.RESET, Act.FREEZE


@dataclass(frozen=True)
class Unit:
    """One frame on its way."""

    up: bool
    """From the writer to the receiver."""
    number: int
    """How many frames of this tag came before it, in this direction and on all connections."""
    tag: Tag | None
    head: bytes
    """Header and body."""
    payload: bytes

    @property
    def data(self) -> bytes:
        return self.head + self.payload


Rule = Callable[[Unit], Iterable[bytes | float | Act]]


def forward(unit: Unit) -> Iterable[bytes]:
    return [unit.data]


@dataclass(eq=False)
class Link:
    writer: socket.socket
    receiver: socket.socket
    is_frozen: bool = False
    is_over: bool = False
    """Both pumps are to end; who does so last closes."""
    pumps_left: int = 2
    pumps: list[threading.Thread] = field(default_factory=list)

    def end(self, reset: bool = False) -> None:
        for sock in (self.writer, self.receiver):
            with contextlib.suppress(OSError):  # closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        self.is_over = True

    def read(self, sock: socket.socket, size: int) -> bytes:
        """`EOFError` at the end of the stream or of this link."""
        data = bytearray()
        while len(data) < size:
            if self.is_over:
                raise EOFError
            with contextlib.suppress(TimeoutError):
                if not (part := sock.recv(min(size - len(data), 65_536))):
                    raise EOFError
                data += part
        return bytes(data)

    def read_some(self, sock: socket.socket) -> tuple[None, bytes, bytes]:
        first = self.read(sock, 1)
        with contextlib.suppress(BlockingIOError):
            first += sock.recv(65_536, socket.MSG_DONTWAIT)
        return None, first, b""

    def read_frame(self, sock: socket.socket) -> tuple[Tag, bytes, bytes]:
        header = self.read(sock, HEADER.size)
        length, number = HEADER.unpack(header)
        body = self.read(sock, length)
        message = decode(Tag(number), body)
        size = message.size if isinstance(message, Pages) else 0
        return Tag(number), header + body, self.read(sock, size)


class Proxy:
    """`address` stands for `target`. Use as a context manager."""

    def __init__(self, target: str, rule: Rule = forward, *, framed: bool = True) -> None:
        self.rule = rule
        self._framed = framed
        self.units: list[Unit] = []
        """All that came, in order of arrival."""
        self._target = target
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(STEP_S)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="proxy-accept")
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._acceptor.join()
        for link in self._links:
            link.end()
            for pump in link.pumps:
                pump.join()

    def freeze(self) -> None:
        """Every connection there is."""
        for link in self._links:
            link.is_frozen = True

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closing:
                try:
                    writer, _ = self._listener.accept()
                except TimeoutError:
                    continue
                host, _, port = self._target.rpartition(":")
                link = Link(writer, socket.create_connection((host, int(port))))
                writer.settimeout(STEP_S)
                link.receiver.settimeout(STEP_S)
                self._links.append(link)
                ways = [(writer, link.receiver, True), (link.receiver, writer, False)]
                link.pumps = [
                    threading.Thread(target=self._pump, args=(link, *way), name="proxy-pump")
                    for way in ways
                ]
                for pump in link.pumps:
                    pump.start()

    def _pump(self, link: Link, source: socket.socket, target: socket.socket, up: bool) -> None:
        read = link.read_frame if self._framed else link.read_some
        with contextlib.suppress(OSError, EOFError):
            while True:
                unit = self._unit(up, *read(source))
                for action in self.rule(unit):
                    if link.is_frozen or action is FREEZE:
                        link.is_frozen = True
                    elif isinstance(action, Act):
                        link.end(reset=action is RESET)
                    elif isinstance(action, bytes):
                        target.sendall(action)
                    else:
                        time.sleep(action)
        while link.is_frozen and not link.is_over:
            time.sleep(STEP_S)
        if not link.is_over:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        with self._lock:
            link.pumps_left -= 1
            if not link.pumps_left:
                link.writer.close()
                link.receiver.close()

    def _unit(self, up: bool, tag: Tag | None, head: bytes, payload: bytes) -> Unit:
        with self._lock:
            number = sum(u.tag is tag and u.up is up for u in self.units)
            unit = Unit(up, number, tag, head, payload)
            self.units.append(unit)
            return unit
