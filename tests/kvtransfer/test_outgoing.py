"""The writer's decisions, without sockets: a test plays sender and receiver thread."""

from __future__ import annotations

import pytest

from pageferry.kvtransfer.frames import Grant, Renew
from pageferry.kvtransfer.handoff import HandoffDenied, HandoffFailed
from pageferry.kvtransfer.outgoing import OutgoingTable
from pageferry.kvtransfer.sending import Announce, Close, End, Push
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return OutgoingTable(page_size=4, remote_num_pages=8, timeout_s=10.0, clock=clock)


REQUEST = Request("r", 1, "g", tuple(range(10)), 10, SamplingParams())
TOKEN = Event("r", 1, Kind.TOKENS, "p", token_ids=(5,))


def items(table):
    """Everything that the sender would do now."""
    found = []
    while batch := table.next_batch(0):
        found += batch
    return found


def granted(table, skip=0):
    future = table.reserve(REQUEST, [])
    (announce,) = items(table)
    assert isinstance(announce, Announce)
    pages = [5, 6, 2][skip:]
    assert table.grant(Grant(announce.message.handoff_id, pages, skip, 9000)) == ""
    return future.result(0)


def test_pushes_leave_in_order_without_the_skipped_pages(table):
    handoff = granted(table, skip=1)
    handoff.push(0, 0, [10, 11, 12])
    handoff.push(1, 0, [10])
    handoff.push(1, 2, [12])
    handoff.seal(TOKEN)
    first, second, close = items(table)
    assert (first.layer, first.first, first.local_pages) == (0, 1, (11, 12))
    assert first.remote_pages == [6, 2]
    assert (second.layer, second.first, second.remote_pages) == (1, 2, [2])
    assert isinstance(close, Close)


def test_pages_outside_the_prompt_are_the_callers_mistake(table):
    handoff = granted(table)
    for first, pages in [(-1, [1]), (0, [1, 2, 3, 4]), (3, [1])]:
        with pytest.raises(ValueError, match="not within the prompt's 3"):
            handoff.push(0, first, pages)


def test_sealing_twice_is_the_callers_mistake(table):
    handoff = granted(table)
    handoff.seal(TOKEN)
    with pytest.raises(ValueError, match="sealed before"):
        handoff.seal(TOKEN)


def test_a_cancel_overtakes_what_is_queued_and_detaches_only_when_the_sender_says_so(table):
    other = granted(table)
    handoff = granted(table)
    other.push(0, 0, [1])
    handoff.push(0, 0, [1])
    sealed = handoff.seal(TOKEN)
    detached = handoff.cancel("left")
    with pytest.raises(HandoffFailed, match="cancelled: left"):
        sealed.result(0)
    assert not detached.done()
    end, push = items(table)
    assert isinstance(end, End)
    assert end.tell == "left"
    assert isinstance(push, Push)
    assert push.handoff is other
    table.detach(handoff)
    assert detached.done()
    assert handoff.cancel("again").done()
    assert items(table) == []


def test_a_cancel_before_the_reserve_left_says_nothing_to_the_receiver(table):
    future = table.reserve(REQUEST, [])
    table.cancel_request("r", 1, "left")
    with pytest.raises(HandoffFailed, match="cancelled: left"):
        future.result(0)
    (end,) = items(table)
    assert not end.handoff.announced


def test_cancelling_a_request_spares_newer_epochs_and_others(table):
    future = table.reserve(REQUEST, [])
    table.cancel_request("r", 0, "old")
    table.cancel_request("other", 5, "other")
    assert not future.done()


def test_a_grant_after_the_cancel_is_late(table):
    future = table.reserve(REQUEST, [])
    (announce,) = items(table)
    table.cancel_request("r", 1, "left")
    assert table.grant(Grant(announce.message.handoff_id, [1, 2, 3], 0, 9000)) == ""
    assert table.counts["late_messages"] == 1
    with pytest.raises(HandoffFailed):
        future.result(0)


@pytest.mark.parametrize(
    ("pages", "skip"), [([1, 2], 0), ([1, 2, 3], 1), ([1, 1, 2], 0), ([1, 2, 8], 0), ([], 4)]
)
def test_an_impossible_grant_is_not_believed(table, pages, skip):
    table.reserve(REQUEST, [])
    (announce,) = items(table)
    assert table.grant(Grant(announce.message.handoff_id, pages, skip, 9000)) != ""


def test_a_denial_ends_the_handoff_and_detaches_it(table):
    future = table.reserve(REQUEST, [])
    (announce,) = items(table)
    table.deny(announce.message.handoff_id, "full")
    with pytest.raises(HandoffDenied, match="full"):
        future.result(0)
    assert announce.handoff.detached.done()
    assert items(table) == []


def test_unanswered_reserves_and_seals_end_and_open_handoffs_do_not(table, clock):
    handoff = granted(table)
    waiting = table.reserve(REQUEST, [])
    items(table)
    clock.now = 11
    table.expire()
    with pytest.raises(HandoffFailed, match="timeout: no answer while reserving"):
        waiting.result(0)
    sealed = handoff.seal(TOKEN)
    items(table)
    table.expire()
    assert not sealed.done()
    clock.now = 22
    table.expire()
    with pytest.raises(HandoffFailed, match="timeout: no answer while sealing"):
        sealed.result(0)


def test_silent_handoffs_are_renewed_every_third_of_the_lease(table, clock):
    handoff = granted(table)
    clock.now = 2.9
    assert table.due_renewals() == []
    clock.now = 3.1
    assert table.due_renewals() == [Renew(handoff.handoff_id)]
    assert table.due_renewals() == []
    clock.now = 5
    handoff.push(0, 0, [1])
    items(table)
    clock.now = 7
    assert table.due_renewals() == []


def test_commit_settles_once_and_a_lost_connection_does_not_undo_it(table):
    handoff = granted(table)
    sealed = handoff.seal(TOKEN)
    table.commit(handoff.handoff_id)
    table.lost("connection lost: x")
    assert sealed.result(0) is None
    assert not table.alive
    with pytest.raises(HandoffFailed, match="connection lost: x"):
        table.reserve(REQUEST, []).result(0)


def test_a_lost_connection_fails_every_future_and_detaches_in_the_end(table):
    open_handoff, sealing = granted(table), granted(table)
    sealed = sealing.seal(TOKEN)
    waiting = table.reserve(REQUEST, [])
    table.lost("connection lost: closed by the peer")
    for future in (sealed, waiting, open_handoff.seal(TOKEN)):
        with pytest.raises(HandoffFailed, match="connection lost: closed by the peer"):
            future.result(0)
    assert not open_handoff.detached.done()
    table.detach_all()
    assert open_handoff.detached.done()
    assert sealing.detached.done()


def test_callbacks_may_call_back_in(table):
    handoff = granted(table)
    seen = []
    handoff.seal(TOKEN).add_done_callback(lambda f: seen.append(table.reserve(REQUEST, [])))
    table.fail(handoff, "nack", tell=None)
    assert len(seen) == 1
    assert not seen[0].done()


def test_nobody_can_cancel_the_futures(table):
    future = table.reserve(REQUEST, [])
    assert not future.cancel()
    assert not granted_detached_cancel(table)


def granted_detached_cancel(table):
    items(table)
    return granted(table).detached.cancel()


def test_the_queue_is_bounded(table, monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.outgoing.MAX_QUEUED", 5)
    handoff = granted(table)
    for _ in range(6):
        handoff.push(0, 0, [1])
    with pytest.raises(HandoffFailed, match="more than 5 messages wait"):
        handoff.seal(TOKEN).result(0)
    assert len(items(table)) == 1


@pytest.fixture
def patient(clock):
    """A table whose sender is worth waking for six pages."""
    return OutgoingTable(4, 8, timeout_s=10.0, num_layers=9, batch_pages=6, clock=clock)


def is_woken(table):
    """Whether a sender that waits would go on: it may not wait itself in a test."""
    return table._is_due()


def test_the_sender_sleeps_until_a_batch_has_come_together(patient):
    handoff = granted(patient)
    handoff.push(0, 0, [1, 2, 3])
    assert not is_woken(patient)
    handoff.push(1, 0, [1, 2, 3])
    assert is_woken(patient)
    handoff.push(2, 0, [1, 2, 3])
    (batch,) = patient.next_batch(0)
    assert (batch.layer, batch.layers, batch.num_pages) == (0, 2, 6)
    assert not is_woken(patient)
    (rest,) = patient.next_batch(0)  # its patience has ended
    assert (rest.layer, rest.layers) == (2, 1)


@pytest.mark.parametrize("urgent", ["seal", "cancel", "reserve", "last pages"])
def test_what_is_urgent_does_not_wait_for_more_pages(patient, urgent):
    handoff = granted(patient)
    handoff.push(4, 0, [1, 2, 3])
    assert not is_woken(patient)
    if urgent == "seal":
        handoff.seal(TOKEN)
    elif urgent == "cancel":
        handoff.cancel("left")
    elif urgent == "reserve":
        patient.reserve(REQUEST, [])
    else:
        handoff.push(8, 0, [1])
        assert not is_woken(patient)  # the prompt goes on
        handoff.push(8, 1, [2, 3])
    assert is_woken(patient)
    items(patient)
    assert not is_woken(patient)


def test_towards_the_end_of_a_prompt_batches_shrink_to_one_layer(patient):
    handoff = granted(patient, skip=1)
    batches = []
    for layer in range(9):
        handoff.push(layer, 1, [1, 2])
        if is_woken(patient):
            batches.append([push.layers for push in patient.next_batch(0)])
    assert batches == [[3], [3], [2], [1]]
    handoff.push(0, 1, [1, 2])
    assert not is_woken(patient)  # and the next prompt begins anew


def test_a_broken_handoffs_pages_are_no_reason_to_wake(patient):
    other, handoff = granted(patient), granted(patient)
    other.push(0, 0, [1, 2, 3])
    handoff.push(0, 0, [1, 2])
    handoff.cancel("left")
    assert [type(item) for item in patient.next_batch(0)] == [End, Push]
    other.push(1, 0, [1, 2, 3])
    assert not is_woken(patient)


def test_layers_are_joined_across_other_handoffs_but_never_out_of_their_own_order(patient):
    one, two = granted(patient), granted(patient)
    for layer in (0, 1):
        one.push(layer, 0, [1])
        two.push(layer, 0, [4])
    one.push(3, 0, [1])
    found = [(p.handoff, p.layer, p.layers) for p in items(patient)]
    assert found == [(one, 0, 2), (two, 0, 2), (one, 3, 1)]
    one.push(4, 0, [1])
    one.seal(TOKEN)
    two.push(2, 0, [4])
    assert [type(item) for item in items(patient)] == [Push, Close, Push]


@pytest.mark.parametrize("max_pages", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("max_layers", [1, 2, 9])
def test_parts_cover_every_page_once_in_order(patient, max_pages, max_layers):
    push = Push(granted(patient), 2, 1, (7, 8, 9), layers=5)
    covered = []
    for part in push.parts(max_pages, max_layers):
        assert part.layers <= max_layers
        assert part.num_pages < max_pages + len(part.local_pages)
        for layer in range(part.layer, part.layer + part.layers):
            covered += [(layer, part.first + i, page) for i, page in enumerate(part.local_pages)]
    assert sorted(covered) == [(la, 1 + i, 7 + i) for la in range(2, 7) for i in range(3)]


def test_exposed_time_runs_from_seal_to_commit(patient, clock):
    handoff = granted(patient)
    clock.now = 1.0
    handoff.seal(TOKEN)
    clock.now = 1.5
    items(patient)
    clock.now = 3.5
    patient.commit(handoff.handoff_id)
    assert patient.exposed_s == 2.5
