"""The receiver's decisions under arbitrary interleavings, without sockets.

A simulated writer per peer sends right, wrong, late and replayed messages. The schedule knows from
the GRANTs alone which page may be written when, and checks every answer of the table against that.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

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
from pageferry.kvtransfer.handoff import Manifest
from pageferry.kvtransfer.incoming import Incoming, Peer
from pageferry.kvtransfer.intake import IntakeTable
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.pool import PagePool, PageState
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams

LAYOUT = KVLayout(dtype="float32", page_size=2, num_layers=2, num_kv_heads=1, head_dim=1)
NUM_PAGES = 14
TIMEOUT_S = 10.0
NAMES = "opqrstuvwxyz"


class Listener:
    def __init__(self) -> None:
        self.intakes = []
        self.mood = ""

    def admit(self, request, num_pages):
        if self.mood == "explode":
            raise RuntimeError("admit")
        return "full" if self.mood == "deny" else ""

    def sealed(self, intake):
        if self.mood == "explode":
            raise RuntimeError("sealed")
        self.intakes.append(intake)


@dataclass(eq=False)
class Granted:
    """What the writer knows of one handoff."""

    peer: Peer
    request: Request
    grant: Grant
    manifest: Manifest = field(default_factory=Manifest)
    arrived: set[tuple[int, int]] = field(default_factory=set)
    over: bool = False
    stopped: bool = False


@dataclass
class Write:
    granted: Granted
    incoming: Incoming
    message: Pages


def make_request(name: str, epoch: int, tokens: int) -> Request:
    ids = tuple([0, 0, *range(1, 20)][:tokens])  # all prompts share their prefix
    return Request(name, epoch, "g", ids, tokens, SamplingParams(), ttl_ms=60_000)


class Schedule:
    """One random schedule. Every answer of the table is checked on the spot."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.pool = PagePool(NUM_PAGES, LAYOUT.page_size)
        self.listener = Listener()
        self.table = IntakeTable(
            self.pool, LAYOUT, self.listener, TIMEOUT_S, clock=lambda: self.now
        )
        self.peers = [Peer("a", "tcp"), Peer("b", "tcp"), Peer("c", "shm"), Peer("d", "shm")]
        self.granted: dict[tuple[Peer, int], Granted] = {}
        self.writes: dict[Peer, Write] = {}
        self.next_id = 0
        self.cancelled: dict[str, int] = {}

    def step(self) -> None:
        actions = list(WEIGHTS)
        if not self.writes:
            actions.remove("pages_end")
        if len(self.writes) == len(self.peers):
            actions = ["pages_end", "time_passes", "cancel_by_receiver"]
        (action,) = self.rng.choices(actions, [WEIGHTS[action] for action in actions])
        getattr(self, action)()
        self.every_page_has_one_owner()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def idle_peer(self) -> Peer:
        """A peer whose connection thread is not inside a write."""
        return self.rng.choice([p for p in self.peers if p not in self.writes])

    def some_handoff(self, peer: Peer) -> int:
        """Usually one of this peer's that goes on, sometimes a past or another's or none."""
        own = [hid for (owner, hid), found in self.granted.items() if owner is peer]
        going_on = [hid for hid in own if not self.granted[peer, hid].over]
        if going_on and self.chance(0.8):
            return self.rng.choice(going_on)
        return self.rng.choice([*own, self.rng.randrange(self.next_id + 1)])

    def heed(self, outgoing) -> None:
        """Take note of what the writers are told."""
        for peer, message in outgoing:
            self.seen[type(message).__name__] += 1
            if isinstance(message, Nack | Cancel):
                if found := self.granted.get((peer, message.handoff_id)):
                    assert not found.over, "told twice"
                    found.over = True
                    if not peer.one_sided:
                        found.stopped = True
            else:
                assert isinstance(message, Grant | Deny | Commit)

    def reserve(self) -> None:
        name, epoch = self.rng.choice(NAMES), self.rng.randint(1, 20)
        tokens, share, replay = self.rng.randint(1, 9), self.chance(0.7), self.chance(0.1)
        peer = self.idle_peer()
        request = make_request(name, epoch, tokens)
        hashes = self.pool.hash_prefix(request.token_ids) if share else []
        if replay and peer.last_handoff_id >= 0:
            late = self.table.counts["late_messages"]
            message = Reserve(peer.last_handoff_id, request.to_dict(), tokens, hashes)
            assert self.table.reserve(peer, message) == []
            assert self.table.counts["late_messages"] == late + 1
            return
        handoff_id = self.next_id
        self.next_id += 1
        outgoing = self.table.reserve(peer, Reserve(handoff_id, request.to_dict(), tokens, hashes))
        self.heed(outgoing)
        (answer,) = [m for to, m in outgoing if to is peer and m.handoff_id == handoff_id]
        if isinstance(answer, Grant):
            assert epoch > self.cancelled.get(name, 0)
            assert answer.skip_pages + len(answer.page_ids) == LAYOUT.pages_for(tokens)
            assert all(self.pool.state(p) is PageState.RESERVED for p in answer.page_ids)
            self.seen["shared prefix"] += bool(answer.skip_pages)
            self.granted[peer, handoff_id] = Granted(peer, request, answer)

    def pages_begin(self) -> None:
        peer = self.idle_peer()
        handoff_id = self.some_handoff(peer)
        layer, count = self.rng.choice([0, 0, 0, 1, 1, 1, 2]), self.rng.choice([0, 1, 1, 1, 2, 3])
        first, corrupt = self.rng.randrange(5), self.chance(0.1)
        depth = self.rng.choice([0, 2, 3]) if self.chance(0.03) else 1
        if layer == 0 and self.chance(0.25):
            depth = 2
        layers = range(layer, layer + depth)
        digest = b"bad" if corrupt else b"good"
        message = Pages(handoff_id, layer, first, count, digest, 0, len(layers))
        found = self.granted.get((peer, handoff_id))
        wanted = {(each, page) for each in layers for page in range(first, first + count)}
        allowed = bool(
            found is not None
            and not found.over
            and layers.stop <= LAYOUT.num_layers
            and wanted
            and first >= found.grant.skip_pages
            and first + count <= found.grant.skip_pages + len(found.grant.page_ids)
            and not wanted & found.arrived
        )
        incoming, outgoing = self.table.begin_pages(peer, message)
        self.heed(outgoing)
        assert (incoming is not None) == allowed
        if incoming is None or found is None:
            return
        physical = incoming.pages(first, count)
        start = first - found.grant.skip_pages
        assert physical == found.grant.page_ids[start : start + count]
        found.arrived |= wanted
        self.writes[peer] = Write(found, incoming, message)

    def pages_end(self) -> None:
        peer, whole = self.rng.choice(list(self.writes)), self.chance(0.9)
        write = self.writes.pop(peer)
        self.heed(self.table.end_pages(write.incoming, write.message, b"good" if whole else None))
        if write.message.digest == b"good" and whole:
            message = write.message
            write.granted.manifest.add(message)
        else:
            assert write.granted.over

    def push_all_that_is_missing(self) -> None:
        peer = self.idle_peer()
        found = self.granted.get((peer, self.some_handoff(peer)))
        if found is None or found.over:
            return
        skip, end = found.grant.skip_pages, LAYOUT.pages_for(len(found.request.token_ids))
        for layer in range(LAYOUT.num_layers):
            for page in range(skip, end):
                if (layer, page) in found.arrived:
                    continue
                message = Pages(found.grant.handoff_id, layer, page, 1, b"good", 0)
                incoming, _ = self.table.begin_pages(peer, message)
                assert incoming is not None
                assert self.table.end_pages(incoming, message, b"good") == []
                found.arrived.add((layer, page))
                found.manifest.add(message)

    def seal(self) -> None:
        peer, lie = self.idle_peer(), self.chance(0.1)
        self.listener.mood = "explode" if self.chance(0.15) else ""
        handoff_id = self.some_handoff(peer)
        found = self.granted.get((peer, handoff_id))
        request = found.request if found else make_request("x", 1, 1)
        manifest = b"lie" if lie else (found.manifest.digest() if found else b"")
        token = Event(request.request_id, request.epoch, Kind.TOKENS, "p", token_ids=(1,))
        before = len(self.listener.intakes)
        outgoing = self.table.seal(peer, Seal(handoff_id, manifest, token.to_list()))
        committed = any(isinstance(m, Commit) for _, m in outgoing)
        wanted = len(found.grant.page_ids) * LAYOUT.num_layers if found else -1
        whole = found is not None and not found.over and len(found.arrived) == wanted
        assert committed == (whole and not lie and self.listener.mood != "explode")
        assert committed == (len(self.listener.intakes) == before + 1)
        if committed:
            assert found is not None
            pages = len(found.grant.page_ids)
            assert request.epoch > self.cancelled.get(request.request_id, 0)
            intake = self.listener.intakes[-1]
            start = found.grant.skip_pages
            assert intake.page_ids[start : start + pages] == found.grant.page_ids
            found.over = found.stopped = True
        self.heed(outgoing)
        if whole and not lie:  # taken or not: a writer that sealed has stopped
            self.seen["listener failed"] += not committed
            found.stopped = True

    def cancel_by_writer(self) -> None:
        peer, stop = self.idle_peer(), self.chance(0.5)
        handoff_id = self.some_handoff(peer)
        self.heed(self.table.cancel(peer, Cancel(handoff_id, "no")))
        if found := self.granted.get((peer, handoff_id)):
            found.over = True
            found.stopped = found.stopped or not peer.one_sided
        if stop:
            self.confirm(peer, handoff_id)

    def stopped(self) -> None:
        peer = self.idle_peer()
        waited_for = [
            hid
            for (owner, hid), found in self.granted.items()
            if owner is peer and found.over and not found.stopped
        ]
        unsure = self.chance(0.2) or not waited_for
        self.confirm(peer, self.some_handoff(peer) if unsure else self.rng.choice(waited_for))

    def confirm(self, peer: Peer, handoff_id: int) -> None:
        self.heed(self.table.stopped(peer, Stopped(handoff_id)))
        if found := self.granted.get((peer, handoff_id)):
            found.over = found.stopped = True

    def renew(self) -> None:
        peer = self.idle_peer()
        assert self.table.renew(peer, Renew(self.some_handoff(peer))) == []

    def cancel_by_receiver(self) -> None:
        name, epoch = self.rng.choice(NAMES), self.rng.randint(1, 5)
        self.heed(self.table.cancel_request(name, epoch))
        self.cancelled[name] = max(epoch, self.cancelled.get(name, 0))
        for found in self.granted.values():
            if found.request.request_id == name and found.request.epoch <= epoch:
                assert found.over

    def time_passes(self) -> None:
        seconds = self.rng.choice([1.0, 3.0, 6.0, 6.0, 11.0, 61.0])
        self.now += seconds
        self.heed(self.table.expire())
        if seconds > TIMEOUT_S:
            assert all(found.over for found in self.granted.values())

    def listener_changes_its_mind(self) -> None:
        self.listener.mood = self.rng.choice(["", "", "", "", "deny", "explode"])

    def connection_lost(self) -> None:
        peer = self.idle_peer()
        self.table.lost(peer)
        for found in self.granted.values():
            if found.peer is peer:
                found.over = found.stopped = True
        self.peers[self.peers.index(peer)] = Peer(peer.worker_id, peer.transport)

    def a_sequence_ends(self) -> None:
        if self.listener.intakes:
            self.pool.release(self.listener.intakes.pop(0).page_ids)

    def every_page_has_one_owner(self) -> None:
        holders = Counter(self.table.holders())
        for intake in self.listener.intakes:
            holders.update(intake.page_ids)
        self.pool.check_integrity(holders)
        owners: Counter[int] = Counter()
        for found in self.granted.values():
            pages = found.grant.page_ids
            if not found.over:
                owners.update(pages)
                assert all(self.pool.state(page) is PageState.RESERVED for page in pages)
            elif not found.stopped:  # one-sided, may still write
                owners.update(pages)
                self.seen["quarantine"] += 1
                assert all(self.pool.state(page) is PageState.QUARANTINED for page in pages)
        for write in self.writes.values():
            if write.granted.over and write.granted.stopped:
                pages = write.granted.grant.page_ids
                owners.update(pages)
                self.seen["broken in mid-write"] += 1
                assert all(self.pool.state(page) is PageState.QUARANTINED for page in pages)
        assert all(count == 1 for count in owners.values()), "a page was granted twice"

    def finish(self) -> None:
        for write in self.writes.values():
            self.table.end_pages(write.incoming, write.message, None)
        for peer in self.peers:
            self.table.lost(peer)
        for intake in self.listener.intakes:
            self.pool.release(intake.page_ids)
        self.pool.check_integrity({})
        ledger = self.pool.ledger()
        assert ledger.free + ledger.cached == NUM_PAGES
        assert self.table.open_handoffs() == 0


EXPECTED = (
    "Grant",
    "Deny",
    "Commit",
    "Nack",
    "Cancel",
    "shared prefix",
    "quarantine",
    "broken in mid-write",
    "listener failed",
)

WEIGHTS = {
    "reserve": 12,
    "pages_begin": 6,
    "pages_end": 8,
    "push_all_that_is_missing": 14,
    "seal": 10,
    "cancel_by_writer": 1,
    "stopped": 8,
    "renew": 2,
    "cancel_by_receiver": 1,
    "time_passes": 2,
    "listener_changes_its_mind": 1,
    "connection_lost": 1,
    "a_sequence_ends": 4,
}


def test_every_interleaving_keeps_the_promises(caplog):
    caplog.set_level("CRITICAL")
    seen: Counter[str] = Counter()
    for seed in range(250):
        schedule = Schedule(seed)
        try:
            for _ in range(120):
                schedule.step()
            schedule.finish()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen += schedule.seen
    # What the schedules went through; without this the test could pass by never getting anywhere.
    assert all(seen[what] > 30 for what in EXPECTED), seen


def test_fences_are_bounded_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.intake.MAX_FENCES", 3)
    table = IntakeTable(PagePool(4, 2), LAYOUT, Listener(), TIMEOUT_S)
    for name in "abcd":
        table.cancel_request(name, 1)
    peer = Peer("p", "tcp")
    answers = []
    for handoff_id, name in enumerate("ad"):
        request = make_request(name, 1, 1)
        ((_, answer),) = table.reserve(peer, Reserve(handoff_id, request.to_dict(), 1, []))
        answers.append(type(answer))
    assert answers == [Grant, Deny]


def test_cancel_overtakes_the_reservation_that_is_being_judged():
    """The listener is asked without the lock; a cancel that arrives meanwhile must win."""
    pool = PagePool(4, 2)
    listener = Listener()
    table = IntakeTable(pool, LAYOUT, listener, TIMEOUT_S)

    def admit(request, num_pages):
        table.cancel_request(request.request_id, request.epoch)
        return ""

    listener.admit = admit
    request = make_request("x", 1, 3)
    ((_, answer),) = table.reserve(Peer("p", "shm"), Reserve(0, request.to_dict(), 3, []))
    assert isinstance(answer, Deny)
    assert "stale_epoch" in answer.reason
    assert pool.ledger().free == 4


def test_malformed_requests_are_denied_without_touching_a_page():
    pool = PagePool(4, 2)
    table = IntakeTable(pool, LAYOUT, Listener(), TIMEOUT_S)
    peer = Peer("p", "tcp")
    good = make_request("x", 1, 3).to_dict()
    for number, change in enumerate(
        [
            {"token_ids": b"abc"},
            {"token_ids": None},
            {"prompt_len": 0},
            {"prompt_len": "3"},
            {"sampling": []},
            {"sampling": {"stop_token_ids": 5}},
            {"request_id": 7},
            {"request_id": "x" * 300},
            {"epoch": "1"},
            {"ttl_ms": "soon"},
            {"salt": b"bytes"},
            {"token_ids": b""},
        ]
    ):
        ((_, answer),) = table.reserve(peer, Reserve(number, {**good, **change}, 3, []))
        assert isinstance(answer, Deny), change
    ((_, answer),) = table.reserve(peer, Reserve(99, good, 4, []))
    assert answer == Deny(99, "n_tokens is 4, request has 3")
    assert pool.ledger().free == 4
