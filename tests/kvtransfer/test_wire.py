"""Messages survive the trip; malformed ones are refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.wire import (
    Cancel,
    Event,
    Kind,
    Ledger,
    Request,
    SamplingParams,
    TokenLogprob,
    WireError,
    WorkerRecord,
    pack,
    pack_control,
    pack_events,
    unpack,
    unpack_control,
    unpack_events,
)

SAMPLING = SamplingParams(temperature=0.5, logit_bias={5: -1.5}, stop_token_ids=(2, 7), seed=2**62)
REQUEST = Request("r1", 3, "gw", (1, 2, 49151, 4), 3, SAMPLING, "batch", "salt", 1000)


def test_a_request_arrives_as_it_was_sent() -> None:
    assert Request.from_dict(unpack(pack(REQUEST.to_dict()))) == REQUEST
    assert REQUEST.num_output_tokens == 1


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_len": 0},
        {"prompt_len": 5},
        {"prompt_len": "3"},
        {"epoch": None},
        {"request_id": 7},
        {"token_ids": b"abc"},
        {"token_ids": [1, 2]},
        {"sampling": 5},
        {"sampling": None},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"top_p": float("nan")}},
        {"sampling": {"min_p": 10**400}},
        {"sampling": {"top_k": 1.5}},
        {"sampling": {"seed": 2**63}},
        {"sampling": {"max_tokens": True}},
        {"sampling": {"logit_bias": [1]}},
        {"sampling": {"logit_bias": {"1": 1.0}}},
        {"sampling": {"logit_bias": {1: None}}},
        {"sampling": {"stop_token_ids": ["x"]}},
        {"epoch": -1},
        {"epoch": True},
        {"salt": 5},
        {"ttl_ms": "60"},
        {"queue_class": "first"},
    ],
)
def test_a_malformed_request_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        Request.from_dict({**REQUEST.to_dict(), **change})


def test_a_request_without_a_field_is_refused_and_an_unknown_field_is_not() -> None:
    value = REQUEST.to_dict()
    assert Request.from_dict({**value, "from_a_later_version": 1}) == REQUEST
    del value["gateway"]
    with pytest.raises(WireError):
        Request.from_dict(value)


def test_events_arrive_as_they_were_sent() -> None:
    events = [
        Event("r", 1, Kind.TOKENS, "w", 4, (5, 6), (TokenLogprob(-0.5, ((5, -0.5), (9, -1.0))),)),
        Event("r", 1, Kind.TOKENS, "w", 6, (2,), finish="stop", stop_token_id=2),
        Event("r", 1, Kind.ERROR, "w", code="non_finite_logits", message="text"),
        Event("r", 1, Kind.OWNED, "other"),
    ]
    assert unpack_events(pack_events(events)) == events


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_raise_wire_error(data: bytes) -> None:
    for read in (unpack_events, unpack_control, WorkerRecord.from_bytes):
        try:
            read(data)
        except WireError:
            continue


def test_a_map_with_an_unhashable_key_is_malformed_like_anything_else() -> None:
    with pytest.raises(WireError):
        unpack(b"\x81\x91\x01\x02")


def test_cancels_and_records_arrive_as_they_were_sent() -> None:
    cancels = [Cancel("a", 0), Cancel("b", 7)]
    assert unpack_control(pack_control(cancels)) == cancels
    ledger = Ledger(10, 1, 2, 3, 4, 0, 16)
    layout = KVLayout("bfloat16", 16, 30, 3, 64)
    record = WorkerRecord(
        "w", "decode", 1, "h", "ready", "m", "f", layout.to_dict(), ledger, 100, refusals=("x",)
    )
    assert WorkerRecord.from_bytes(record.to_bytes()) == record
    assert layout.differences(record.layout) == []
    other = dataclasses.replace(layout, page_size=32)
    assert layout.differences(other.to_dict()) == ["page_size: mine 16, theirs 32"]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, 1), (1, "1"), (1, True), (2, 99), (2, []), (3, None), (4, 1.0), (5, None), (5, ["1"]),
        (5, [1, True]), (6, [1]), (7, 1), (8, "1"), (9, None), (10, 3), (11, None),
    ],
)  # fmt: skip
def test_an_event_with_a_field_of_a_wrong_type_is_refused(place: int, wrong: object) -> None:
    value = Event("r", 1, Kind.TOKENS, "w", 4, (5, 6), finish="stop", stop_token_id=2).to_list()
    assert unpack_events(pack([value]))
    value[place] = wrong
    with pytest.raises(WireError):
        unpack_events(pack([value]))
