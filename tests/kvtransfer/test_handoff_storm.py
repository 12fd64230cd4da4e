"""Random schedules over real connections: everything that can end a handoff, all at once.

Afterwards every page is free or cached, what was delivered is whole, and pages that were never
granted still hold their poison.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pageferry.kvtransfer.frames import Cancel, Commit, Grant, Pages, Seal, Stopped
from pageferry.kvtransfer.handoff import HandoffDenied, HandoffFailed, Manifest, digest_of

NUM_PAGES = 64


def good_writer(world, receiver, transport, seed):
    """Clients that play by the rules: seal, cancel, hang up, or be cancelled."""
    rng = random.Random(seed)
    writer = world.writer(receiver, transport, worker_id=f"good-{seed}")
    for _ in range(12):
        if not writer.client.alive:
            writer = world.writer(receiver, transport, worker_id=f"good-{seed}")
        request = world.make_request(f"q{rng.randrange(6)}", rng.randint(1, 24), rng.randint(1, 40))
        pages = world.layout.pages_for(len(request.token_ids))
        hashes = receiver.pool.hash_prefix(request.token_ids)
        try:
            handoff = writer.client.reserve(request, hashes).result(5)
            for layer in range(world.layout.num_layers):
                handoff.push(layer, 0, range(pages))
                if rng.random() < 0.08:
                    handoff.cancel("changed my mind").result(5)
                if rng.random() < 0.08:
                    receiver.server.cancel(request.request_id, request.epoch)
                if rng.random() < 0.03:
                    writer.client.close()
            handoff.seal(world.first_token(request)).result(5)
        except (HandoffDenied, HandoffFailed):
            continue


def bad_writer(world, receiver, transport, seed):
    """An authenticated peer that replays, corrupts, addresses others' handoffs and vanishes."""
    rng = random.Random(seed)
    raw = world.raw(receiver, transport)
    payload = bytes([0xEE]) * world.layout.page_bytes
    for _ in range(25):
        if rng.random() < 0.1:
            raw.close()
            raw = world.raw(receiver, transport)
        request = world.make_request(f"q{rng.randrange(6)}", rng.randint(1, 24), rng.randint(1, 40))
        raw.next_id += rng.choice([0, 1])
        raw.say_reserve(request)
        for _ in range(rng.randint(0, 6)):
            hid = rng.choice([raw.next_id, raw.next_id, max(0, raw.next_id - 1), 10**6])
            kind = rng.randrange(4)
            if kind == 0:
                raw.say(Cancel(hid, "x"))
            elif kind == 1:
                raw.say(Stopped(hid))
            elif kind == 2:
                raw.say(Seal(hid, b"m", world.first_token(request).to_list()))
            else:
                layer, first = rng.randrange(5), rng.randrange(8)
                digest = rng.choice([b"wrong", digest_of([memoryview(payload)])])
                size = len(payload) if transport == "tcp" else 0
                raw.say(Pages(hid, layer, first, 1, digest, size), payload if size else b"")
    raw.close()


@pytest.mark.parametrize("seed", range(4))
def test_storm(world, transport, seed):
    receiver = world.receiver(num_pages=NUM_PAGES, timeout_s=3.0)
    never_granted = set(range(NUM_PAGES))
    reserve = receiver.pool.reserve
    lock = threading.Lock()

    def noted(count):
        pages = reserve(count)
        with lock:
            never_granted.difference_update(pages)
        return pages

    receiver.pool.reserve = noted
    with ThreadPoolExecutor(5) as threads:
        work = [
            threads.submit(good_writer, world, receiver, transport, seed * 10 + 1),
            threads.submit(good_writer, world, receiver, transport, seed * 10 + 2),
            threads.submit(good_writer, world, receiver, "tcp", seed * 10 + 3),
            threads.submit(bad_writer, world, receiver, transport, seed * 10 + 4),
            threads.submit(bad_writer, world, receiver, "tcp", seed * 10 + 5),
        ]
        for future in work:
            future.result(60)
    for intake in receiver.inbox.intakes:
        if not intake.peer.startswith("good"):
            continue
        prompt_pages = world.layout.pages_for(len(intake.request.token_ids))
        for layer in range(world.layout.num_layers):
            for local, page in enumerate(intake.page_ids[:prompt_pages]):
                assert receiver.page(layer, page) == world.pattern(layer, local)
    assert all(receiver.is_poisoned(page) for page in never_granted)
    world.wait_until(lambda: receiver.server.open_handoffs() == 0)
    receiver.finish()


def test_a_replayed_handoff_does_not_write_again(world, transport):
    """Every message of a finished handoff once more: nothing changes, all is counted as late."""
    receiver = world.receiver()
    raw = world.raw(receiver, transport)
    request = world.make_request(tokens=4)
    grant = raw.reserve(request)
    assert isinstance(grant, Grant)
    payload = bytes([0x33]) * world.layout.page_bytes
    digest, manifest, said = digest_of([memoryview(payload)]), Manifest(), []
    size = len(payload) if transport == "tcp" else 0
    for layer in range(world.layout.num_layers):
        if raw.remote is not None:
            raw.remote.view(layer, grant.page_ids[0], 1)[:] = payload
        said.append(Pages(raw.next_id, layer, 0, 1, digest, size))
        manifest.add(said[-1])
    said.append(Seal(raw.next_id, manifest.digest(), world.first_token(request).to_list()))
    for message in said:
        raw.say(message, payload if isinstance(message, Pages) and size else b"")
    assert isinstance(raw.hear(), Commit)
    other = bytes([0x44]) * world.layout.page_bytes
    for message in said:
        raw.say(message, other if isinstance(message, Pages) and size else b"")
    assert isinstance(raw.reserve(world.make_request("b", 3)), Grant)
    assert receiver.page(0, grant.page_ids[0]) == payload
    assert receiver.server.stats()["late_messages"] == 4
    assert len(receiver.inbox.intakes) == 1
    raw.say(Cancel(raw.next_id, "done"))
    raw.say(Stopped(raw.next_id))
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    receiver.check()
