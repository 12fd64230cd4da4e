"""Everything that a network can do to a handoff, done by a proxy between the two workers.

Whatever it was: the request is delivered whole or not at all, a retry under the next epoch
succeeds, a handoff on another connection notices nothing, no page outside a grant is touched, both
ledgers balance, and no thread stays.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pageferry.kvtransfer.frames import CHECK_BYTES, HEADER, Refuse, Tag, checksum
from pageferry.kvtransfer.handoff import HandoffError, HandoffFailed, HandoffRefused
from pageferry.kvtransfer.sockets import FrameSocket, dial_tcp
from pageferry.kvtransfer.wire import pack, unpack
from tests.kvtransfer.proxy import CUT, FREEZE, RESET, Proxy, Unit, forward

NUM_PAGES = 160
TIMEOUT_S = 1.5
LOCAL = [23, 3, 4, 5, 9, 8]
PROMPT = 22  # tokens: 6 pages, with room for the next token


class Scene:
    """A receiver, a bystander that is connected directly, and writers behind proxies."""

    def __init__(self, world) -> None:
        self.world = world
        self.receiver = world.receiver(num_pages=NUM_PAGES, timeout_s=TIMEOUT_S)
        self.receiver.pool.prefix_cache = False  # pages are used again at once
        self.granted: set[int] = set()
        self._note_grants()
        self.bystander = world.writer(self.receiver, "tcp", worker_id="p-calm")
        self.calm = world.make_request("calm", PROMPT, salt="calm")
        self.open = self.bystander.hand_over(self.receiver, self.calm, LOCAL, seal=False)

    def _note_grants(self) -> None:
        reserve = self.receiver.pool.reserve

        def noted(count):
            pages = reserve(count)
            self.granted.update(pages)
            return pages

        self.receiver.pool.reserve = noted

    def proxy(self, rule=forward) -> Proxy:
        address = self.receiver.record.addresses["tcp"]
        return self.world.stack.enter_context(Proxy(address, rule))

    def writer(self, proxy: Proxy, **changes):
        """A client that dials the proxy."""
        record = replace(self.receiver.record, addresses={"tcp": proxy.address})
        behind = replace(self.receiver, record=record)
        return self.world.writer(behind, "tcp", timeout_s=TIMEOUT_S, **changes)

    def attempt(self, writer, request) -> str:
        """ "" if it was committed, else why not; layer by layer, so that there are many frames."""
        try:
            handoff = writer.client.reserve(request, []).result(20)
            for layer in range(self.world.layout.num_layers):
                handoff.push(layer, 0, LOCAL[:3])
                handoff.push(layer, 3, LOCAL[3:])
                time.sleep(0.002)
            handoff.seal(self.world.first_token(request)).result(20)
        except HandoffFailed as error:
            return error.reason
        return ""

    def suffer(self, name: str) -> None:
        """One kind of harm; what the writer is told of it; and the next epoch, which succeeds."""
        rule, said = HARM[name]
        writer = self.writer(self.proxy(rule))
        request = self.world.make_request(name, PROMPT, salt=name)
        reason = self.attempt(writer, request)
        assert any(word in reason if word else not reason for word in said.split("|")), reason
        writer.client.close()
        again = replace(request, epoch=2)
        self.receiver.server.cancel(name, 1)  # as the gateway tells all
        self.world.wait_until(lambda: self.receiver.pool.ledger().available >= len(LOCAL), 20)
        self.bystander.hand_over(self.receiver, again, LOCAL)
        self.check_delivered(name)

    def check_delivered(self, name: str) -> None:
        """And let it end, so that there is room for more."""
        intakes = [i for i in self.receiver.inbox.intakes if i.request.request_id == name]
        assert [i.request.epoch for i in intakes] in ([2], [1, 2])
        for intake in intakes:
            assert intake.request.token_ids == self.calm.token_ids
            assert intake.first_token.token_ids == (7,)
            for layer in range(self.world.layout.num_layers):
                for mine, theirs in zip(LOCAL, intake.page_ids, strict=True):
                    assert self.receiver.page(layer, theirs) == self.world.pattern(layer, mine)
            self.receiver.inbox.intakes.remove(intake)
            self.receiver.pool.release(intake.page_ids)

    def finish(self) -> None:
        """The bystander noticed nothing; nobody else's pages were touched; everything adds up."""
        self.open.seal(self.world.first_token(self.calm)).result(20)
        (intake,) = self.receiver.inbox.intakes
        for layer in range(self.world.layout.num_layers):
            for mine, theirs in zip(LOCAL, intake.page_ids, strict=True):
                assert self.receiver.page(layer, theirs) == self.world.pattern(layer, mine)
        untouched = set(range(NUM_PAGES)) - self.granted
        assert len(untouched) >= NUM_PAGES // 4
        assert all(self.receiver.is_poisoned(page) for page in untouched)
        self.world.wait_until(lambda: self.receiver.server.open_handoffs() == 0, 20)
        self.receiver.finish()
        self.world.stack.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith(("handoff", "proxy"))]
        assert not left


@pytest.fixture
def scene(world, monkeypatch, caplog):
    caplog.set_level("CRITICAL", "pageferry")
    monkeypatch.setattr("pageferry.kvtransfer.handshake.MIN_PATIENCE_S", 1.0)
    return Scene(world)


def flip(data: bytes, spot: int, bit: int = 0) -> bytes:
    return data[:spot] + bytes([data[spot] ^ 1 << bit]) + data[spot + 1 :]


def the(tag: Tag, number: int, harm):
    """A rule that does `harm` to one frame of the writer and passes the rest on."""
    wanted = (True, tag, number)
    return lambda unit: harm(unit) if (unit.up, unit.tag, unit.number) == wanted else [unit.data]


def answers(tag: Tag, harm):
    return lambda unit: harm(unit) if (unit.up, unit.tag) == (False, tag) else [unit.data]


def rewritten(unit: Unit, index: int, value: object) -> bytes:
    """The frame with one field changed, its checksum right again."""
    values = unpack(unit.head[HEADER.size : -CHECK_BYTES])
    values[index] = value
    packed = pack(values)
    body = packed + checksum(unit.tag, packed)
    return HEADER.pack(len(body), unit.tag) + body + unit.payload


class Swap:
    """Passes one frame on after the frame that follows it."""

    def __init__(self, tag: Tag, number: int) -> None:
        self.tag, self.number, self.held = tag, number, b""

    def __call__(self, unit: Unit):
        if (unit.up, unit.tag, unit.number) == (True, self.tag, self.number):
            self.held = unit.data
            return []
        if unit.up and self.held:
            late, self.held = self.held, b""
            return [unit.data, late]
        return [unit.data]


def trickle(unit: Unit):
    """A slow link: 64 bytes at a time."""
    for start in range(0, len(unit.data), 64):
        yield unit.data[start : start + 64]
        yield 0.001


PAYLOAD, BODY = -100, HEADER.size + 2

# What is done, and what the writer is told; "" where the handoff is to succeed all the same.
HARM = {
    "payload flipped": (the(Tag.PAGES, 1, lambda u: [flip(u.data, PAYLOAD)]), "digest mismatch"),
    "last byte flipped": (the(Tag.PAGES, 2, lambda u: [flip(u.data, -1, 7)]), "digest mismatch"),
    "pages header flipped": (the(Tag.PAGES, 1, lambda u: [flip(u.data, BODY)]), "checksum"),
    "pages length flipped": (the(Tag.PAGES, 0, lambda u: [flip(u.data, 3)]), "connection lost"),
    "pages tag flipped": (the(Tag.PAGES, 0, lambda u: [flip(u.data, 4, 6)]), "unknown tag"),
    "reserve flipped": (the(Tag.RESERVE, 0, lambda u: [flip(u.data, 90)]), "checksum"),
    "seal flipped": (the(Tag.SEAL, 0, lambda u: [flip(u.data, -12)]), "checksum"),
    "grant flipped": (answers(Tag.GRANT, lambda u: [flip(u.data, BODY)]), "checksum"),
    "commit flipped": (answers(Tag.COMMIT, lambda u: [flip(u.data, BODY)]), "checksum"),
    "wrong layer": (the(Tag.PAGES, 1, lambda u: [rewritten(u, 1, 2)]), "manifest|written before"),
    "layer that is not": (the(Tag.PAGES, 1, lambda u: [rewritten(u, 1, 9)]), "bad PAGES: layers"),
    "page outside": (the(Tag.PAGES, 1, lambda u: [rewritten(u, 2, 5)]), "not within the grant"),
    "another's handoff": (the(Tag.PAGES, 1, lambda u: [rewritten(u, 0, 77)]), "lacks 3 of 6"),
    "another's token": (the(Tag.SEAL, 0, lambda u: [rewritten(u, 2, ["x"])]), "bad SEAL"),
    "wrong manifest": (the(Tag.SEAL, 0, lambda u: [rewritten(u, 1, b"m")]), "manifest digest"),
    "cut before pages": (the(Tag.PAGES, 0, lambda u: [CUT]), "connection lost"),
    "cut in a header": (the(Tag.PAGES, 1, lambda u: [u.data[:3], CUT]), "connection lost"),
    "cut in a payload": (the(Tag.PAGES, 1, lambda u: [u.data[:-99], CUT]), "connection lost"),
    "reset in a payload": (the(Tag.PAGES, 1, lambda u: [u.data[:-99], RESET]), "connection lost"),
    "cut before seal": (the(Tag.SEAL, 0, lambda u: [CUT]), "connection lost"),
    "cut before commit": (answers(Tag.COMMIT, lambda u: [CUT]), "connection lost"),
    "cut after commit": (answers(Tag.COMMIT, lambda u: [u.data, CUT]), "|connection lost"),
    "cut before grant": (answers(Tag.GRANT, lambda u: [CUT]), "connection lost"),
    "payload cut short": (the(Tag.PAGES, 1, lambda u: [u.data[:-99]]), "digest|lost|tag|check"),
    "payload too long": (the(Tag.PAGES, 1, lambda u: [u.data + b"x" * 50]), "tag|exceeds|check"),
    "pages lost": (the(Tag.PAGES, 2, lambda u: []), "lacks 3 of 6"),
    "seal lost": (the(Tag.SEAL, 0, lambda u: []), "timeout: no"),
    "grant lost": (answers(Tag.GRANT, lambda u: []), "timeout: no"),
    "commit lost": (answers(Tag.COMMIT, lambda u: []), "timeout: no answer while sealing"),
    "reserve twice": (the(Tag.RESERVE, 0, lambda u: [u.data, u.data]), ""),
    "pages twice": (the(Tag.PAGES, 1, lambda u: [u.data, u.data]), "written before"),
    "seal twice": (the(Tag.SEAL, 0, lambda u: [u.data, u.data]), ""),
    "grant twice": (answers(Tag.GRANT, lambda u: [u.data, u.data]), "GRANT for a handoff that is"),
    "commit twice": (answers(Tag.COMMIT, lambda u: [u.data, u.data]), ""),
    "pages swapped": (Swap(Tag.PAGES, 0), "manifest digest mismatch"),
    "seal before pages": (Swap(Tag.PAGES, 5), "lacks 3 of 6"),
    "slow link": (trickle, ""),
    "late frames": (lambda u: [0.1, u.data], ""),
    "frozen before pages": (the(Tag.PAGES, 0, lambda u: [FREEZE]), "heard nothing|timeout"),
    "frozen in a payload": (the(Tag.PAGES, 1, lambda u: [u.data[:-99], FREEZE]), "nothing|timeout"),
    "frozen before grant": (answers(Tag.GRANT, lambda u: [FREEZE]), "heard nothing|timeout"),
    "frozen before commit": (answers(Tag.COMMIT, lambda u: [FREEZE]), "heard nothing|timeout"),
}


SLOW = [name for name in HARM if name.startswith(("frozen", "late", "slow")) or "lost" in name]


def test_harm_is_refused_by_name_and_costs_one_handoff(scene):
    with ThreadPoolExecutor(6) as threads:
        for outcome in [threads.submit(scene.suffer, n) for n in HARM if n not in SLOW]:
            outcome.result(60)
    scene.finish()


def test_silence_ends_by_a_deadline(scene):
    """All at once: each takes as long as a timeout."""
    with ThreadPoolExecutor(len(SLOW)) as threads:
        for outcome in [threads.submit(scene.suffer, name) for name in SLOW]:
            outcome.result(60)
    scene.finish()


def test_a_half_open_connection_is_found_by_both_ends_while_idle(scene):
    """Nothing is under way and both kernels see a healthy connection."""
    proxy = scene.proxy()
    writer = scene.writer(proxy)
    assert scene.attempt(writer, scene.world.make_request("before", PROMPT)) == ""
    sockets = scene.receiver.server._open_sockets()
    proxy.freeze()
    scene.world.wait_until(lambda: not writer.client.alive, 20)
    scene.world.wait_until(lambda: scene.receiver.server._open_sockets() == sockets - 1, 20)
    with pytest.raises(HandoffFailed, match="heard nothing for 1"):
        writer.client.reserve(scene.world.make_request("after"), []).result(20)
    scene.receiver.pool.release(scene.receiver.inbox.intakes.pop().page_ids)
    scene.finish()


def test_a_recorded_session_is_of_no_use_to_anybody_else(scene):
    """Every byte of a writer once more: the receiver's nonce is another one."""
    proxy = scene.proxy()
    writer = scene.writer(proxy)
    assert scene.attempt(writer, scene.world.make_request("once", PROMPT)) == ""
    writer.client.close()
    recorded = b"".join(unit.data for unit in proxy.units if unit.up)
    conn = FrameSocket(dial_tcp(scene.receiver.record.addresses["tcp"], 5.0), 5.0)
    conn.sock.sendall(recorded)
    conn.recv_message()
    answer = conn.recv_message()
    assert isinstance(answer, Refuse)
    assert "cluster_key" in answer.reason
    conn.close()
    assert len(scene.receiver.inbox.intakes) == 1
    scene.receiver.pool.release(scene.receiver.inbox.intakes.pop().page_ids)
    scene.finish()


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (the(Tag.HELLO, 0, lambda u: [rewritten(u, 0, 2)]), "version: mine 3, theirs 2"),
        (answers(Tag.HELLO, lambda u: [rewritten(u, 0, 4)]), "version: mine 3, theirs 4"),
        (the(Tag.HELLO, 0, lambda u: [rewritten(u, 6, 99)]), "cluster_key"),
        (answers(Tag.HELLO, lambda u: [rewritten(u, 6, 9999)]), "cluster_key"),
        (answers(Tag.PROOF, lambda u: [rewritten(u, 0, b"x" * 32)]), "cluster_key"),
        (answers(Tag.HELLO, lambda u: [flip(u.data, 40)]), "cannot connect"),
        (the(Tag.PROOF, 0, lambda u: [CUT]), "cannot connect"),
        (answers(Tag.HELLO, lambda u: [FREEZE]), "cannot connect"),
    ],
)
def test_a_handshake_that_is_tampered_with_ends_there(scene, harm, named, monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.handshake.HANDSHAKE_S", 0.5)
    writer = scene.writer(scene.proxy(harm), connect=False)
    with pytest.raises(HandoffError, match=named) as refusal:
        writer.client.connect()
    assert isinstance(refusal.value, HandoffFailed if "connect" in named else HandoffRefused)
    assert not writer.client.alive
    if isinstance(refusal.value, HandoffRefused):
        scene.world.wait_until(lambda: named in "".join(scene.receiver.server.refusals), 20)
    scene.finish()
