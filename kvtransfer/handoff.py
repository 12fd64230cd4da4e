"""Handing a sequence's KV pages to a decode worker: terms shared by both ends.

Life of a handoff (W: writer, a prefill worker or a decode worker that drains, `handoff_client`;
R: receiver, a decode worker, `handoff_server`, its decisions in `intake`):

1. RESERVING  W asked for pages. R matches the prefix it already holds, asks its listener, reserves.
2. OPEN       granted. W sends pages while it computes the next layers; R checks each message before
              a byte is written and its digest after. RENEW keeps the lease meanwhile.
3. SEALING    W sent the manifest and the first token; R verifies that every page of every layer
              arrived exactly once.
4. COMMITTED  R's pages are live and the listener has the sequence.
5. BROKEN     cancelled by either side, late, corrupt, or the connection is gone. Where R cannot
              stand between W and the memory (shm), the pages stay in quarantine until W said
              STOPPED or its connection has ended; otherwise they are free at once.

Errors:

    HandoffError
    ├── HandoffRefused   the two workers do not fit together, or cannot prove the cluster key
    ├── HandoffDenied    R has no room for this request now; ask another worker
    └── HandoffFailed    this handoff is over; nothing of it will be decoded
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from pageferry.kvtransfer.frames import PROTOCOL_VERSION, Hello, Pages, encode
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.tls import Tls
from pageferry.kvtransfer.wire import Event, Request

TRANSPORTS = ("shm", "tcp")
"""In order of preference."""


NEVER = "never: "
"""Begins a DENY reason that waiting does not change on that worker."""

STALE_EPOCH = "stale_epoch"
"""DENY reason: this epoch was committed, cancelled or superseded there; only a higher one goes."""


class HandoffError(Exception):
    """`reason` is fit for logs: ids and numbers, never prompt text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandoffRefused(HandoffError):
    """No connection between these two workers."""


class HandoffDenied(HandoffError):
    """The decode worker does not take this request now."""


class HandoffFailed(HandoffError):
    """The handoff ended without COMMIT."""

    def __init__(self, reason: str, *, uncertain: bool = False) -> None:
        super().__init__(reason)
        self.uncertain = uncertain
        """SEAL was sent and not answered: the receiver may have committed all the same."""


class State(enum.Enum):
    RESERVING = "reserving"
    OPEN = "open"
    SEALING = "sealing"
    COMMITTED = "committed"
    BROKEN = "broken"


@dataclass(frozen=True)
class Identity:
    """What a worker says of itself in HELLO, and the secret that it never sends."""

    worker_id: str
    role: str
    fingerprint: str
    layout: KVLayout
    num_pages: int
    cluster_key: str = ""
    tls: Tls | None = None
    """For transport tcp; None: plain."""

    def hello(self, transport: str, patience_s: float) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            nonce=os.urandom(32),
            worker_id=self.worker_id,
            role=self.role,
            fingerprint=self.fingerprint,
            layout=self.layout.to_dict(),
            num_pages=self.num_pages,
            transport=transport,
            patience_ms=int(patience_s * 1000),
        )

    def differences(self, theirs: Hello) -> list[str]:
        """One `field: mine M, theirs T` for each reason why no page may flow between us."""
        found = []
        if theirs.fingerprint != self.fingerprint:
            found.append(f"fingerprint: mine {self.fingerprint!r}, theirs {theirs.fingerprint!r}")
        found += [f"layout.{line}" for line in self.layout.differences(theirs.layout)]
        return found


def prove(cluster_key: str, prover: str, own: Hello, peer: Hello, channel: bytes = b"") -> bytes:
    """HMAC-SHA256 of the cluster key over both HELLOs, nonces and all, and over `channel`.

    `prover` ("writer" or "receiver") keeps a proof from being sent back to who made it. `channel`
    names the TLS connection, so that a proof is of no use on another one.
    """
    parts = (prover.encode(), encode(peer), encode(own), channel)
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(cluster_key.encode(), b"pageferry.handoff.2" + text, hashlib.sha256).digest()


@dataclass(frozen=True)
class Intake:
    """A sealed, verified handoff."""

    request: Request
    """With the time to live that is left."""
    page_ids: list[int]
    """Every page of the sequence in order, matched prefix pages included, then the growth page if
    the next token needs one. All live; one reference on each now belongs to the listener."""
    first_token: Event
    prefix_hashes: list[bytes]
    """Of the full prompt pages, which are registered under them."""
    peer: str
    """Worker id of the writer."""
    skip_pages: int = 0
    """Leading pages that were here already."""


class IntakeListener(Protocol):
    """The decode worker's side of the handoff server. Called on connection threads."""

    def admit(self, request: Request, num_pages: int) -> str:
        """ "" to welcome the request, else the reason for DENY.

        Called after the matched prefix pages are held and before `num_pages` more, growth page
        included, are reserved: so `ledger().available - num_pages` is what would be left.
        """
        ...

    def sealed(self, intake: Intake) -> None:
        """Take over a sequence. Called before COMMIT is sent, with the server's lock held:
        enqueue and return; take no lock that is held while calling into the server. If this
        raises, the handoff is NACKed and its references are dropped."""
        ...


def pages_needed(page_size: int, n_tokens: int) -> tuple[int, int]:
    """Pages that hold `n_tokens`, and pages including the next token's."""
    return -(-n_tokens // page_size), -(-(n_tokens + 1) // page_size)


class Manifest:
    """SHA-256 over the ordered (layer, layers, first, count, digest) of every PAGES message."""

    _ENTRY = struct.Struct("<QQQQ")

    def __init__(self) -> None:
        self._sha = hashlib.sha256(b"pageferry.manifest.2")

    def add(self, message: Pages) -> None:
        place = (message.layer, message.layers, message.first, message.count)
        self._sha.update(self._ENTRY.pack(*place) + message.digest)

    def digest(self) -> bytes:
        return self._sha.digest()


def digest_of(views: list[memoryview]) -> bytes:
    """xxh3-128 over the views' bytes in order: against accidents, not against attackers."""
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(view)
    digest: bytes = hasher.digest()
    return digest


def host_id() -> str:
    """Equal for processes that can share memory: boot id and network namespace.

    Abstract unix sockets, over which the memory is passed, are scoped by network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
