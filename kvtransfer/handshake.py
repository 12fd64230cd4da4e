"""HELLO on both sides of a new connection, before anything else may be said.

1. Both send HELLO. 2. The writer proves the cluster key over the receiver's nonce. 3. The receiver
checks the proof, then every field on which the byte layout and the model depend, and answers with
its own proof, or with REFUSE naming each differing field and both values. 4. The writer checks the
same. 5. Over shm the receiver passes its pool memory.

Roles are not checked: a decode worker that drains is a writer towards another.

A mismatch is logged by both ends and raised as `HandoffRefused` by both.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import ssl
import time
from typing import TypeVar

from pageferry.kvtransfer.frames import MAX_REASON, FrameError, Hello, Proof, Refuse, VersionError
from pageferry.kvtransfer.handoff import HandoffRefused, Identity, prove
from pageferry.kvtransfer.sockets import ConnectionLost, FrameSocket, peer_uid

log = logging.getLogger(__name__)

MAX_SHOWN = 64
"""Characters of a name from the other side that go into our log."""

HANDSHAKE_S = 5.0
"""Seconds to wait for each message; a frozen peer costs a connection attempt no more."""

MIN_PATIENCE_S, MAX_PATIENCE_S = 2.0, 10.0
"""Bounds of a connection's patience, which else follows the handoffs' deadlines. A busy machine may
keep a thread waiting; a frozen or unreachable peer should not keep bookings waiting."""

MAX_BODY = 16 * 2**10
"""Bytes of a message from somebody who has proved nothing yet."""

M = TypeVar("M", Hello, Proof)


def welcome(conn: FrameSocket, identity: Identity, transport: str) -> Hello:
    """Receiver's side. Returns the writer's HELLO; `HandoffRefused` after telling the writer."""
    if transport == "tcp" and identity.tls is not None:
        try:
            identity.tls.secure(conn, server_side=True, timeout_s=HANDSHAKE_S)
        except ssl.SSLError as error:
            raise _refused_tls(conn, error) from error
    mine = identity.hello(transport, _patience_s(conn))
    theirs = _expect_hello(conn)
    name = _name(theirs)
    conn.send(mine)
    proof = _expect(conn, Proof)
    if not _proven(conn, identity, "writer", proof, theirs, mine):
        raise _refuse(conn, name, [_key_mismatch(identity)])
    reasons = identity.differences(theirs)
    if theirs.transport != transport:
        reasons.append(f"transport: mine {transport!r}, theirs {theirs.transport!r}")
    if transport == "shm" and not identity.cluster_key and peer_uid(conn.sock) != os.getuid():
        reasons.append(f"uid: mine {os.getuid()}, theirs {peer_uid(conn.sock)} (no cluster key)")
    if reasons:
        raise _refuse(conn, name, reasons)
    conn.send(Proof(prove(identity.cluster_key, "receiver", mine, theirs, conn.channel)))
    _agree_on_patience(conn, theirs)
    return theirs


def introduce(conn: FrameSocket, identity: Identity, transport: str, expected_id: str) -> Hello:
    """Writer's side. Returns the receiver's HELLO; `HandoffRefused` says which end refused."""
    try:
        if transport == "tcp" and identity.tls is not None:
            identity.tls.secure(conn, server_side=False, timeout_s=HANDSHAKE_S)
        return _introduce(conn, identity, transport, expected_id)
    except ssl.SSLError as error:
        raise _refused_tls(conn, error) from error
    except ConnectionLost as lost:
        if isinstance(lost.__cause__, ssl.SSLError):
            raise _refused_tls(conn, lost.__cause__) from lost
        raise


def _refused_tls(conn: FrameSocket, error: ssl.SSLError) -> HandoffRefused:
    log.warning("no TLS with the peer: %s", error)
    return HandoffRefused(f"tls: {error}")


def _introduce(conn: FrameSocket, identity: Identity, transport: str, expected_id: str) -> Hello:
    mine = identity.hello(transport, _patience_s(conn))
    conn.send(mine)
    theirs = _expect_hello(conn)
    conn.send(Proof(prove(identity.cluster_key, "writer", mine, theirs, conn.channel)))
    proof = _expect(conn, Proof)
    name = _name(theirs)
    if not _proven(conn, identity, "receiver", proof, theirs, mine):
        raise _refuse(conn, name, [_key_mismatch(identity)])
    reasons = identity.differences(theirs)
    if theirs.worker_id != expected_id:
        reasons.append(f"worker_id: expected {expected_id!r}, theirs {theirs.worker_id!r}")
    if reasons:
        raise _refuse(conn, name, reasons)
    _agree_on_patience(conn, theirs)
    return theirs


def _patience_s(conn: FrameSocket) -> float:
    return min(conn.stall_s, MAX_PATIENCE_S)


def _agree_on_patience(conn: FrameSocket, theirs: Hello) -> None:
    conn.patience_s = max(MIN_PATIENCE_S, min(_patience_s(conn), theirs.patience_ms / 1000))


def shown(text: str, limit: int = MAX_SHOWN) -> str:
    """Fit for our log, whoever wrote it."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def _name(theirs: Hello) -> str:
    return f"{shown(theirs.role)} {shown(theirs.worker_id)!r}"


def _proven(
    conn: FrameSocket, identity: Identity, prover: str, proof: Proof, theirs: Hello, mine: Hello
) -> bool:
    expected = prove(identity.cluster_key, prover, theirs, mine, conn.channel)
    return hmac.compare_digest(expected, proof.mac)


def _key_mismatch(identity: Identity) -> str:
    have = "set" if identity.cluster_key else "empty"
    return f"cluster_key: mine ({have}), theirs differs (values are not shown)"


def _refuse(conn: FrameSocket, name: str, reasons: list[str]) -> HandoffRefused:
    text = "; ".join(reasons)
    log.warning("refused %s: %s", name, text)
    with contextlib.suppress(ConnectionLost):
        conn.send(Refuse(text), stall_s=1.0)
    return HandoffRefused(f"{name} refused: {text}")


def _expect_hello(conn: FrameSocket) -> Hello:
    try:
        return _expect(conn, Hello)
    except VersionError as error:
        raise _refuse(conn, "the peer", [str(error)]) from error


def _expect(conn: FrameSocket, cls: type[M]) -> M:
    patience_s = min(conn.stall_s, HANDSHAKE_S)
    deadline = time.monotonic() + patience_s

    def still_waiting() -> None:
        if time.monotonic() > deadline:
            raise ConnectionLost(f"no {cls.__name__.upper()} within {patience_s:g} s")

    message = conn.recv_message(still_waiting, MAX_BODY)
    if isinstance(message, Refuse):
        reason = shown(message.reason, MAX_REASON)
        log.warning("refused by the peer: %s", reason)
        raise HandoffRefused(f"refused by the peer: {reason}")
    if not isinstance(message, cls):
        raise FrameError(f"expected {cls.__name__}, got {type(message).__name__}")
    return message
