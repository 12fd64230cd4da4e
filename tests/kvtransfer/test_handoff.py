"""Handoffs between real sockets and threads in one process, over both transports."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from pageferry.kvtransfer.handoff import (
    HandoffDenied,
    HandoffFailed,
)
from pageferry.kvtransfer.handoff_client import ClientOptions, HandoffClient


def test_bytes_arrive_exactly_at_permuted_pages(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    taken = receiver.pool.allocate(5)
    receiver.pool.release(taken[::2])  # holes: the grant is scattered
    request = world.make_request(tokens=30)
    local = [23, 3, 4, 5, 9, 8, 0, 17]
    writer.hand_over(receiver, request, local)
    (intake,) = receiver.inbox.intakes
    assert intake.request == replace(request, ttl_ms=intake.request.ttl_ms)
    assert 0 < intake.request.ttl_ms < request.ttl_ms
    assert intake.first_token == world.first_token(request)
    assert intake.peer == "p-1"
    assert len(intake.page_ids) == 8
    for layer in range(world.layout.num_layers):
        for mine, theirs in zip(local, intake.page_ids, strict=True):
            assert receiver.page(layer, theirs) == world.pattern(layer, mine)
    others = set(range(16)) - set(intake.page_ids)
    assert all(receiver.is_poisoned(page) for page in others)
    assert writer.client.transport == transport
    receiver.pool.release(taken[1::2])


def test_layers_that_wait_together_travel_in_one_message(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    taken = receiver.pool.allocate(16)
    receiver.pool.release(taken[::2])  # every second page: nothing is adjacent
    request = world.make_request(tokens=20)
    before = writer.client.counts()["frames_sent"]
    writer.hand_over(receiver, request, [9, 8, 3, 4, 20])
    (intake,) = receiver.inbox.intakes
    for layer in range(world.layout.num_layers):
        for mine, theirs in zip([9, 8, 3, 4, 20], intake.page_ids, strict=False):
            assert receiver.page(layer, theirs) == world.pattern(layer, mine)
    assert writer.client.counts()["frames_sent"] - before <= 3  # RESERVE, PAGES, SEAL
    tally = writer.client.tally()
    assert (tally.pages, tally.bytes, tally.sealed) == (15, 15 * 256, 1)
    assert 0 < tally.exposed_seconds <= tally.seconds
    assert tally.digest_seconds > 0
    received = receiver.server.stats()
    assert received[f"kv_transfer_bytes_{transport}_total"] == 15 * 256
    receiver.pool.release(taken[1::2])


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (3, 1), (4, 2), (5, 2), (8, 3), (12, 4)])
def test_a_growth_page_comes_with_the_grant_when_the_next_token_needs_it(
    world, transport, tokens, pages
):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    prompt_pages = world.layout.pages_for(tokens)
    writer.hand_over(receiver, world.make_request(tokens=tokens), list(range(prompt_pages)))
    (intake,) = receiver.inbox.intakes
    assert len(intake.page_ids) == pages
    assert receiver.inbox.admitted == [pages]
    assert receiver.pool.ledger().live == pages
    receiver.check()
    receiver.finish()


def test_held_prefix_pages_are_shared_and_not_sent_again(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    writer.hand_over(receiver, world.make_request("a", 10), [0, 1, 2])
    first = receiver.inbox.intakes[0]
    handoff = writer.hand_over(receiver, world.make_request("b", 14), [20, 21, 2, 3])
    second = receiver.inbox.intakes[1]
    assert handoff.skip_pages == second.skip_pages == 2
    assert second.page_ids[:2] == first.page_ids[:2]
    assert set(second.page_ids[2:]).isdisjoint(first.page_ids)
    assert receiver.page(0, second.page_ids[0]) == world.pattern(0, 0)
    assert receiver.page(2, second.page_ids[3]) == world.pattern(2, 3)
    receiver.check()
    receiver.finish()
    assert receiver.pool.ledger().cached == 3


def test_a_full_prefix_hit_sends_nothing_and_still_commits(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    writer.hand_over(receiver, world.make_request("a", 8), [0, 1])
    sent = writer.client.counts()["pages_sent"]
    handoff = writer.hand_over(receiver, world.make_request("b", 8), [0, 1])
    assert handoff.skip_pages == 2
    assert writer.client.counts()["pages_sent"] == sent
    assert len(receiver.inbox.intakes[1].page_ids) == 3
    receiver.check()


def test_another_salt_shares_nothing(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    writer.hand_over(receiver, world.make_request("a", 8, salt="x"), [0, 1])
    handoff = writer.hand_over(receiver, world.make_request("b", 8, salt="y"), [0, 1])
    assert handoff.skip_pages == 0


def test_hashes_that_are_not_of_the_tokens_are_denied(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    foreign = receiver.pool.hash_prefix(range(100, 108))
    with pytest.raises(HandoffDenied, match="prefix_hashes"):
        writer.client.reserve(world.make_request(tokens=8), foreign).result(5)
    receiver.finish()


def test_denials_say_why_and_keep_nothing(world, transport):
    receiver = world.receiver(num_pages=4)
    writer = world.writer(receiver, transport)
    with pytest.raises(HandoffDenied, match="needs 5 pages, the pool has 4"):
        writer.client.reserve(world.make_request(tokens=17), []).result(5)
    taken = receiver.pool.allocate(3)
    with pytest.raises(HandoffDenied, match="out_of_pages: 2 pages wanted, 1 of 4"):
        writer.client.reserve(world.make_request(tokens=5), []).result(5)
    receiver.pool.release(taken)
    receiver.inbox.deny = "draining"
    with pytest.raises(HandoffDenied, match="draining"):
        writer.client.reserve(world.make_request(tokens=5), []).result(5)
    assert receiver.server.stats()["kv_handoffs_denied_total"] == 3
    receiver.finish()


def test_sealing_without_every_page_is_nacked(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.client.reserve(request, []).result(5)
    handoff.push(0, 0, [0, 1, 2])
    handoff.push(2, 0, [0, 1, 2])
    handoff.push(1, 1, [1, 2])
    with pytest.raises(HandoffFailed, match="layer 1 lacks 1 of 3 pages"):
        handoff.seal(world.first_token(request)).result(5)
    handoff.detached.result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    assert not receiver.inbox.intakes


def test_a_page_pushed_twice_breaks_the_handoff(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.client.reserve(request, []).result(5)
    handoff.push(0, 0, [0, 1, 2])
    handoff.push(0, 2, [2])
    with pytest.raises(HandoffFailed, match="written before"):
        handoff.seal(world.first_token(request)).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


def test_the_first_token_must_be_of_this_request_and_epoch(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=3)
    handoff = writer.hand_over(receiver, request, [0], seal=False)
    with pytest.raises(HandoffFailed, match="first token is of r epoch 9"):
        handoff.seal(world.first_token(replace(request, epoch=9))).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index": 1}, "index 1, not 0"),
        ({"finish": "stop"}, "first token"),
        ({"token_ids": ()}, "one token id"),
        ({"token_ids": (1, 2)}, "one token id"),
        ({"token_ids": (-1,)}, "one token id"),
        ({"token_ids": (2**31,)}, "one token id"),
    ],
)
def test_a_first_token_that_no_step_could_go_on_from_is_refused(world, change, named):
    receiver = world.receiver()
    writer = world.writer(receiver, "shm")
    request = world.make_request(tokens=3)
    handoff = writer.hand_over(receiver, request, [0], seal=False)
    with pytest.raises(HandoffFailed, match=named):
        handoff.seal(replace(world.first_token(request), **change)).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


def test_decode_workers_hand_sequences_to_each_other_at_once(world, transport):
    """Each is a writer towards the other, under the epoch that it has itself, with the tokens so
    far; the last one, whose KV is not computed yet, travels as the first token."""
    workers = [world.receiver(num_pages=32, worker_id=f"d-{i}") for i in (1, 2)]
    for number, receiver in enumerate(workers):
        prefill = world.writer(receiver, transport, worker_id=f"p-{number}")
        request = replace(world.make_request(f"r{number}", 10, salt=f"{number}"), prompt_len=8)
        token = replace(world.first_token(request), index=2)
        handoff = prefill.hand_over(receiver, request, [number, 5, 9], seal=False)
        handoff.seal(token).result(5)
    clients = []
    for mine, other in (workers, reversed(workers)):
        identity = replace(mine.identity, num_pages=mine.memory.num_pages)
        clients.append(HandoffClient(identity, other.record, mine.memory, ClientOptions(transport)))
        world.stack.callback(clients[-1].close)
        clients[-1].connect()
    going = []
    for mine, client in zip(workers, clients, strict=True):
        (intake,) = mine.inbox.intakes
        request = replace(intake.request, token_ids=(*intake.request.token_ids, 7))
        hashes = mine.pool.hash_prefix(request.token_ids, request.salt)
        handoff = client.reserve(request, hashes).result(5)
        for layer in range(world.layout.num_layers):
            handoff.push(layer, 0, intake.page_ids)
        going.append(handoff.seal(replace(intake.first_token, index=3, token_ids=(8,))))
    for committed in going:
        committed.result(5)
    before = [receiver.inbox.intakes.pop(0) for receiver in workers]
    for number, (mine, other) in enumerate(zip(workers, reversed(workers), strict=True)):
        (arrived,) = other.inbox.intakes
        assert (arrived.peer, arrived.request.epoch) == (mine.identity.worker_id, 1)
        assert arrived.request.num_output_tokens == arrived.first_token.index == 3
        for layer in range(world.layout.num_layers):
            for index, local in enumerate((number, 5, 9)):
                assert other.page(layer, arrived.page_ids[index]) == world.pattern(layer, local)
    for receiver, left in zip(workers, before, strict=True):
        receiver.pool.release(left.page_ids)
        receiver.check()
        receiver.finish()


def test_a_listener_that_fails_costs_one_handoff(world, transport, caplog):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    receiver.inbox.explode = True
    with pytest.raises(HandoffFailed, match="RuntimeError"):
        writer.hand_over(receiver, world.make_request("a", 10), [0, 1, 2])
    receiver.inbox.explode = False
    writer.hand_over(receiver, world.make_request("a", 10), [0, 1, 2])  # not stale
    receiver.check()
    receiver.finish()


def test_cancel_by_the_writer_gives_every_page_back(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.hand_over(receiver, request, [0, 1, 2], seal=False)
    handoff.cancel("client left").result(5)
    with pytest.raises(HandoffFailed, match="cancelled: client left"):
        handoff.seal(world.first_token(request)).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    handoff.push(0, 0, [0])  # without effect
    handoff.cancel("again").result(5)
    writer.hand_over(receiver, world.make_request("b"), [0, 1, 2])  # the connection goes on


def test_cancel_by_the_receiver_reaches_the_writer(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10, epoch=3)
    handoff = writer.hand_over(receiver, request, [0, 1, 2], seal=False)
    receiver.server.cancel("r", 2)  # an older epoch: not this one
    assert receiver.pool.ledger().reserved == 3
    receiver.server.cancel("r", 3)
    with pytest.raises(HandoffFailed, match="cancelled by the receiver"):
        handoff.seal(world.first_token(request)).result(5)
    handoff.detached.result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    with pytest.raises(HandoffDenied, match="stale_epoch"):
        writer.client.reserve(request, []).result(5)
    assert not receiver.inbox.intakes


def test_a_higher_epoch_supersedes_and_a_lower_one_is_stale(world, transport):
    receiver = world.receiver()
    writer, other = world.writer(receiver, transport), world.writer(receiver, "tcp")
    old = world.make_request(tokens=10, epoch=1)
    new = replace(old, epoch=2)
    frozen = writer.hand_over(receiver, old, [0, 1, 2], seal=False)
    with pytest.raises(HandoffDenied, match="duplicate"):
        other.client.reserve(old, []).result(5)
    other.hand_over(receiver, new, [5, 6, 7])
    with pytest.raises(HandoffFailed, match="superseded"):
        frozen.seal(world.first_token(old)).result(5)
    with pytest.raises(HandoffDenied, match="stale_epoch"):
        writer.client.reserve(old, []).result(5)
    with pytest.raises(HandoffDenied, match="stale_epoch"):  # sealed: cannot come twice
        other.client.reserve(new, []).result(5)
    assert [intake.request.epoch for intake in receiver.inbox.intakes] == [2]
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    world.wait_until(lambda: receiver.pool.ledger().quarantined == 0)
    receiver.check()


def test_no_progress_breaks_the_handoff_but_renewals_keep_it(world, transport):
    receiver = world.receiver(timeout_s=0.4)
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.client.reserve(request, []).result(5)
    threading.Event().wait(1.0)  # computing: the client renews by itself
    assert receiver.pool.ledger().reserved == 3
    for layer in range(3):
        handoff.push(layer, 0, [0, 1, 2])
    handoff.seal(world.first_token(request)).result(5)


def test_the_requests_ttl_ends_even_a_renewed_handoff(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = replace(world.make_request(tokens=10), ttl_ms=200)
    handoff = writer.client.reserve(request, []).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    with pytest.raises(HandoffFailed, match="ttl"):
        handoff.seal(world.first_token(request)).result(5)


def test_a_lost_connection_fails_everything_and_frees_the_pages(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.hand_over(receiver, request, [0, 1, 2], seal=False)
    writer.client.close()
    assert not writer.client.alive
    handoff.detached.result(0)
    with pytest.raises(HandoffFailed):
        handoff.seal(world.first_token(request)).result(0)
    with pytest.raises(HandoffFailed):
        writer.client.reserve(request, []).result(0)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


def test_a_receiver_that_closes_fails_the_writers_futures(world, transport):
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request(tokens=10)
    handoff = writer.hand_over(receiver, request, [0, 1, 2], seal=False)
    receiver.server.close()
    world.wait_until(lambda: not writer.client.alive)
    with pytest.raises(HandoffFailed, match="connection lost"):
        handoff.seal(world.first_token(request)).result(5)
    handoff.detached.result(5)
    assert receiver.pool.ledger().free == 16
    world.wait_until(lambda: not any(t.name.startswith("handoff") for t in threading.enumerate()))


def test_many_handoffs_at_once_keep_their_bytes_apart(world, transport):
    receiver = world.receiver(num_pages=64)
    writers = [world.writer(receiver, transport) for _ in range(3)]

    def work(number, writer):
        for turn in range(5):
            request = world.make_request(f"{number}-{turn}", 10, salt=f"{number}-{turn}")
            start = (number * 5 + turn) % 20
            writer.hand_over(receiver, request, [start, start + 1, start + 2])

    threads = [threading.Thread(target=work, args=item) for item in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.inbox.intakes) == 15
    for intake in receiver.inbox.intakes:
        number, turn = map(int, intake.request.request_id.split("-"))
        for index, page in enumerate(intake.page_ids):
            wanted = world.pattern(1, (number * 5 + turn) % 20 + index)
            assert receiver.page(1, page) == wanted
    receiver.check()
    receiver.finish()


def test_a_bad_local_page_costs_one_handoff(world, transport, caplog):
    caplog.set_level("INFO")
    receiver = world.receiver()
    writer = world.writer(receiver, transport)
    request = world.make_request("a", 10)
    handoff = writer.client.reserve(request, []).result(5)
    handoff.push(0, 0, [0, 99, 2])
    with pytest.raises(HandoffFailed, match="cannot send: IndexError"):
        handoff.seal(world.first_token(request)).result(5)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    assert "cancelled by the writer" in caplog.text
    assert "bad SEAL" not in caplog.text  # what is broken is not sealed
    writer.hand_over(receiver, world.make_request("b", 10), [0, 1, 2])
