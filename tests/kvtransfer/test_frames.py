"""Frames: what is encoded comes back, nothing else is understood. Also against a live server."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
import time

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageferry.kvtransfer.frames import (
    CHECK_BYTES,
    HEADER,
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Deny,
    FrameError,
    Grant,
    Hello,
    Nack,
    Pages,
    Ping,
    Proof,
    Refuse,
    Renew,
    Reserve,
    Seal,
    Stopped,
    Tag,
    checksum,
    decode,
    encode,
    parse_header,
)
from pageferry.kvtransfer.handoff import digest_of
from pageferry.kvtransfer.sockets import ConnectionLost

EXAMPLES = [
    Hello(PROTOCOL_VERSION, b"n" * 32, "w", "prefill", "f", {"page_size": 4}, 9, "tcp", 500),
    Proof(b"m" * 32),
    Refuse("no"),
    Reserve(3, {"request_id": "r"}, 5, [b"h" * 32, b"i" * 32]),
    Grant(3, [4, 5, 0], 2, 30_000),
    Deny(3, "full"),
    Pages(3, 1, 2, 3, b"d" * 16, 768, 2),
    Seal(3, b"m" * 32, ["r", 1, 1]),
    Commit(3),
    Nack(3, "bad"),
    Cancel(3, "left"),
    Stopped(3),
    Renew(3),
    Ping(),
]


def checked(tag: int, packed: bytes) -> bytes:
    return packed + checksum(tag, packed)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_flipped_bit_is_noticed(message):
    whole = encode(message)
    for spot in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[spot // 8] ^= 1 << (spot % 8)
        following = bytes(flipped[HEADER.size :]) + encode(Ping()) * 20
        with pytest.raises(FrameError):  # noqa: PT012 - one place or the other notices
            tag, length = parse_header(flipped[: HEADER.size])
            if length > len(following):
                raise FrameError("the reader waits for bytes that never come")
            decode(tag, following[:length])


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    data = encode(message)
    tag, length = parse_header(data[: HEADER.size])
    assert len(data) == HEADER.size + length
    assert decode(tag, data[HEADER.size :]) == message


def test_every_tag_has_an_example():
    assert {parse_header(encode(m)[: HEADER.size])[0] for m in EXAMPLES} == set(Tag)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_field_must_have_its_type(message):
    tag = parse_header(encode(message)[: HEADER.size])[0]
    values = msgpack.unpackb(encode(message)[HEADER.size : -CHECK_BYTES])
    wrong = [
        None,
        True,
        -1,
        2**63,
        1.5,
        "x",
        b"x",
        [None],
        [-1],
        ["x"],
        {1: 2},
        msgpack.ExtType(1, b""),
    ]
    for index, value in enumerate(values):
        for other in wrong:
            if type(other) is type(value) and not (isinstance(value, int) and other != "x"):
                continue
            if type(message) is Seal and index == 2 and type(other) is list:
                continue  # the event inside is checked by its own type
            broken = [*values[:index], other, *values[index + 1 :]]
            with pytest.raises(FrameError, match=tag.name):
                decode(tag, checked(tag, msgpack.packb(broken)))
    for shape in (values[:-1] or 0, [*values, 1], {"a": 1}, 7, None, [] if values else 0):
        with pytest.raises(FrameError, match=f"{tag.name} must be a list"):
            decode(tag, checked(tag, msgpack.packb(shape)))


@pytest.mark.parametrize("tag", list(Tag))
def test_lengths_above_the_cap_and_unknown_tags_are_refused_from_the_header_alone(tag):
    with pytest.raises(FrameError, match=r"exceeds"):
        parse_header(HEADER.pack(2**32 - 1, tag))
    for number in (0, 15, 128, 255):
        with pytest.raises(FrameError, match=f"unknown tag {number}"):
            parse_header(HEADER.pack(1, number))


def test_long_reasons_are_cut_so_that_they_can_always_be_sent():
    assert len(encode(Deny(1, "x" * 10**6))) < 3000
    assert len(encode(Refuse("\N{SNOWMAN}" * 10**6))) < 10_000


def test_a_message_above_its_cap_is_not_sent():
    with pytest.raises(FrameError, match=r"PAGES of .* exceeds 256"):
        encode(Pages(1, 1, 1, 1, b"x" * 300, 0))


@given(tag=st.sampled_from(list(Tag)), body=st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_random_bodies_are_messages_or_frame_errors(tag, body):
    try:
        message = decode(tag, checked(tag, body))
    except FrameError:
        return
    assert decode(tag, encode(message)[HEADER.size :]) == message


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\x91\x01\x02",  # a map whose key is a list
        b"\xdd\xff\xff\xff\xff",  # an array of four billion values
        b"\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x91" * 5000,  # nested beyond any stack
        b"\xa2\xff\xfe",  # not UTF-8
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x91\x03\x03",  # trailing bytes
        pickle.dumps([3, "reason"]),
    ],
)
def test_hostile_msgpack(body):
    for tag in Tag:
        with pytest.raises(FrameError, match=r"msgpack|must be"):
            decode(tag, checked(tag, body))


# --- against a live server


def connect(receiver, transport):
    if transport == "tcp":
        host, port = receiver.record.addresses["tcp"].split(":")
        return socket.create_connection((host, int(port)), timeout=5)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect("\0" + receiver.record.addresses["shm"])
    return sock


def junk(rng: random.Random) -> bytes:
    example = encode(rng.choice(EXAMPLES))
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 300))
    if kind == 1:
        return example[: rng.randint(1, len(example))]
    if kind == 2:
        return HEADER.pack(rng.choice([2**32 - 1, 2**31, 9 * 2**20]), rng.randrange(256))
    if kind == 3:
        return bytes([*example[:4], rng.randrange(256)]) + example[5:]
    if kind == 4:
        spot = rng.randrange(len(example))
        return example[:spot] + rng.randbytes(1) + example[spot + 1 :]
    if kind == 5:
        return pickle.dumps({"cmd": "x"}) + rng.randbytes(20)
    return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_strangers_that_talk_nonsense_disturb_nobody(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    handoff = writer.hand_over(receiver, world.make_request("calm"), [0, 1, 2], seal=False)
    rng = random.Random(7)
    for _ in range(60):
        with connect(receiver, transport) as sock:
            sock.sendall(junk(rng))
            if rng.random() < 0.5:
                with contextlib.suppress(OSError):  # it may have hung up on us already
                    sock.shutdown(socket.SHUT_WR)
    request = world.make_request("calm")
    handoff.seal(world.first_token(request)).result(5)
    granted = set(receiver.inbox.intakes[0].page_ids)
    assert all(receiver.is_poisoned(page) for page in set(range(16)) - granted)
    receiver.check()


def test_members_that_talk_nonsense_lose_their_own_handoffs_only(world, transport, caplog):
    receiver = world.receiver(num_pages=32)
    writer = world.writer(receiver, transport)
    calm = writer.hand_over(receiver, world.make_request("calm"), [0, 1, 2], seal=False)
    rng = random.Random(11)
    for number in range(40):
        raw = world.raw(receiver, transport)
        grant = raw.reserve(world.make_request(f"r{number}", 6))
        assert isinstance(grant, Grant)
        raw.conn.sock.sendall(junk(rng))
        raw.close()
    world.wait_until(lambda: receiver.pool.ledger().free == 32 - 3)
    calm.seal(world.first_token(world.make_request("calm"))).result(5)
    granted = set(receiver.inbox.intakes[0].page_ids)
    assert all(receiver.is_poisoned(page) for page in set(range(32)) - granted)
    receiver.check()


@pytest.mark.parametrize(
    "message", [m for m in EXAMPLES if type(m) in (Hello, Proof, Grant, Commit)]
)
def test_messages_that_a_writer_never_sends_end_its_connection(world, transport, message, caplog):
    receiver = world.receiver()
    raw = world.raw(receiver, transport)
    raw.reserve(world.make_request())
    raw.say(message)
    answer = raw.hear()
    assert isinstance(answer, Refuse)
    assert "is not for a receiver" in answer.reason
    raw.close()
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


def page_message(raw, world, **changes):
    payload = bytes(range(256)) * 2
    values = {
        "handoff_id": raw.next_id,
        "layer": 0,
        "first": 0,
        "count": 2,
        "digest": digest_of([memoryview(payload)]),
        "size": len(payload),
        **changes,
    }
    return Pages(**values), payload


@pytest.mark.parametrize(
    "change",
    [
        {"size": 511},
        {"size": 0},
        {"size": 2**62},
        {"count": 0, "size": 512},
        {"count": 2**40},
        {"layers": 0},
        {"layers": 2},
        {"layers": 4, "size": 2048},
        {"layers": 2**40},
        {"count": 2**40, "layers": 2**20},
    ],
)
def test_a_payload_length_that_does_not_fit_closes_the_connection(world, change, caplog):
    receiver = world.receiver()
    raw = world.raw(receiver, "tcp")
    raw.reserve(world.make_request())
    message, _ = page_message(raw, world, **change)
    raw.conn.send(message)
    assert isinstance(raw.hear(), Refuse)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    assert all(receiver.is_poisoned(page) for page in range(16))


@pytest.mark.parametrize(
    "change",
    [
        {"handoff_id": 77},
        {"layer": 3},
        {"layer": 2**40},
        {"layer": 2, "layers": 2, "count": 1},
        {"first": 2},
        {"first": 2**40},
        {"digest": b"wrong"},
    ],
)
def test_payloads_without_a_grant_are_discarded_and_the_framing_survives(world, change):
    receiver = world.receiver()
    raw = world.raw(receiver, "tcp")
    grant = raw.reserve(world.make_request())
    message, payload = page_message(raw, world, **change)
    raw.say(message, payload)
    if "handoff_id" not in change:
        assert isinstance(raw.hear(), Nack)
    else:
        raw.say(Cancel(raw.next_id, "enough"))
    assert isinstance(raw.reserve(world.make_request("b", 3)), Grant)
    untouched = set(range(16)) - (set(grant.page_ids) if "digest" in change else set())
    assert all(receiver.is_poisoned(page) for page in untouched)
    ledger = receiver.pool.ledger()
    assert (ledger.reserved, ledger.free) == (1, 15)


def test_a_frame_that_never_ends_costs_its_connection(world, transport):
    receiver = world.receiver(timeout_s=0.3)
    raw = world.raw(receiver, transport)
    raw.conn.sock.sendall(struct.pack(">I", 10))
    with pytest.raises(ConnectionLost, match="closed by the peer"):
        raw.hear()


def test_idle_connections_stay_and_silent_ones_do_not(world, transport, monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.handshake.MIN_PATIENCE_S", 0.9)
    receiver = world.receiver(timeout_s=0.3)
    writer, silent = world.writer(receiver, transport), world.raw(receiver, transport)
    silent.reserve(world.make_request("silent"))
    assert isinstance(silent.hear(), Cancel)  # no progress
    with pytest.raises(ConnectionLost, match="closed by the peer"):
        silent.hear()
    silent.close()
    time.sleep(0.6)
    writer.hand_over(receiver, world.make_request(), [0, 1, 2])
    assert writer.client.counts()["frames_sent"] > 3


def test_over_shm_a_thrown_out_writers_pages_wait_until_it_has_hung_up(world, caplog):
    receiver = world.receiver()
    raw = world.raw(receiver, "shm")
    raw.reserve(world.make_request())
    raw.say(Commit(1))
    assert isinstance(raw.hear(), Refuse)
    with pytest.raises(ConnectionLost, match="closed by the peer"):
        raw.hear()
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    raw.conn.sock.sendall(b"still talking")
    time.sleep(0.3)
    assert receiver.pool.ledger().quarantined == 3
    raw.close()
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
