"""HELLO on both sides of a new connection, before anything else may be said.

1. Both send HELLO. 2. The writer proves the cluster key over the receiver's nonce. 3. The receiver
checks the proof, then every field on which the byte layout and the model depend, and answers with
its own proof, or with REFUSE naming each differing field and both values. 4. The writer checks the
same. 5. Over shm the receiver passes its pool memory.

A mismatch is logged by both ends and raised as `HandoffRefused` by both.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import time
from typing import TypeVar

from pageferry.kvtransfer.frames import FrameError, Hello, Proof, Refuse
from pageferry.kvtransfer.handoff import HandoffRefused, Identity, prove
from pageferry.kvtransfer.sockets import ConnectionLost, FrameSocket, peer_uid

log = logging.getLogger(__name__)

MAX_SHOWN = 64
"""Characters of a name from the other side that go into our log."""

HANDSHAKE_S = 5.0
"""Seconds to wait for each message; a frozen peer costs a connection attempt no more."""

MAX_BODY = 16 * 2**10
"""Bytes of a message from somebody who has proved nothing yet."""

M = TypeVar("M", Hello, Proof)


def welcome(conn: FrameSocket, identity: Identity, transport: str) -> Hello:
    """Receiver's side. Returns the writer's HELLO; `HandoffRefused` after telling the writer."""
    mine = identity.hello(transport)
    theirs = _expect(conn, Hello)
    shown = f"{theirs.role[:MAX_SHOWN]} {theirs.worker_id[:MAX_SHOWN]!r}"
    if theirs.version != mine.version:
        raise _refuse(conn, shown, identity.differences(theirs)[:1])
    conn.send(mine)
    proof = _expect(conn, Proof)
    if not _proven(identity, "writer", proof, theirs, mine):
        raise _refuse(conn, shown, [_key_mismatch(identity)])
    reasons = identity.differences(theirs)
    if theirs.transport != transport:
        reasons.append(f"transport: mine {transport!r}, theirs {theirs.transport!r}")
    if transport == "shm" and not identity.cluster_key and peer_uid(conn.sock) != os.getuid():
        reasons.append(f"uid: mine {os.getuid()}, theirs {peer_uid(conn.sock)} (no cluster key)")
    if reasons:
        raise _refuse(conn, shown, reasons)
    conn.send(Proof(prove(identity.cluster_key, "receiver", mine, theirs)))
    return theirs


def introduce(conn: FrameSocket, identity: Identity, transport: str, expected_id: str) -> Hello:
    """Writer's side. Returns the receiver's HELLO; `HandoffRefused` says which end refused."""
    mine = identity.hello(transport)
    conn.send(mine)
    theirs = _expect(conn, Hello)
    conn.send(Proof(prove(identity.cluster_key, "writer", mine, theirs)))
    proof = _expect(conn, Proof)
    shown = f"{theirs.role[:MAX_SHOWN]} {theirs.worker_id[:MAX_SHOWN]!r}"
    if not _proven(identity, "receiver", proof, theirs, mine):
        raise _refuse(conn, shown, [_key_mismatch(identity)])
    reasons = identity.differences(theirs)
    if theirs.worker_id != expected_id:
        reasons.append(f"worker_id: expected {expected_id!r}, theirs {theirs.worker_id!r}")
    if reasons:
        raise _refuse(conn, shown, reasons)
    return theirs


def _proven(identity: Identity, prover: str, proof: Proof, theirs: Hello, mine: Hello) -> bool:
    return hmac.compare_digest(prove(identity.cluster_key, prover, theirs, mine), proof.mac)


def _key_mismatch(identity: Identity) -> str:
    have = "set" if identity.cluster_key else "empty"
    return f"cluster_key: mine ({have}), theirs differs (values are not shown)"


def _refuse(conn: FrameSocket, shown: str, reasons: list[str]) -> HandoffRefused:
    text = "; ".join(reasons)
    log.warning("refused %s: %s", shown, text)
    with contextlib.suppress(ConnectionLost):
        conn.send(Refuse(text), stall_s=1.0)
    return HandoffRefused(f"{shown} refused: {text}")


def _expect(conn: FrameSocket, cls: type[M]) -> M:
    patience_s = min(conn.stall_s, HANDSHAKE_S)
    deadline = time.monotonic() + patience_s

    def still_waiting() -> None:
        if time.monotonic() > deadline:
            raise ConnectionLost(f"no {cls.__name__.upper()} within {patience_s:g} s")

    message = conn.recv_message(still_waiting, MAX_BODY)
    if isinstance(message, Refuse):
        log.warning("refused by the peer: %s", message.reason)
        raise HandoffRefused(f"refused by the peer: {message.reason}")
    if not isinstance(message, cls):
        raise FrameError(f"expected {cls.__name__}, got {type(message).__name__}")
    return message
