"""Writers in processes of their own: killed, frozen and woken in the middle of a handoff."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from pageferry.kvtransfer.handoff import HandoffDenied
from pageferry.kvtransfer.wire import WorkerRecord

WRITER = textwrap.dedent(
    """
    import os, signal, sys, time
    from pageferry.kvtransfer.frames import Pages, encode
    from pageferry.kvtransfer.handoff import HandoffError, Identity
    from pageferry.kvtransfer.handoff_client import ClientOptions, HandoffClient
    from pageferry.kvtransfer.layout import KVLayout
    from pageferry.kvtransfer.memory import PoolMemory
    from pageferry.kvtransfer.sockets import FrameSocket
    from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams, WorkerRecord

    mode, transport, record = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
    record = WorkerRecord.from_bytes(record)
    layout = KVLayout(**record.layout)
    memory = PoolMemory.create(layout, 8)
    memory.buffer[:] = b"\\x11" * len(memory.buffer)
    identity = Identity("p-child", "prefill", record.fingerprint, layout, 8, "key")
    client = HandoffClient(identity, record, memory, ClientOptions(transport, 20.0))
    client.connect()

    def request(name):
        return Request(name, 1, "g", tuple(range(20)), 20, SamplingParams(), salt=name)

    def token(name):
        return Event(name, 1, Kind.TOKENS, "p", token_ids=(1,))

    if mode == "pause":
        handoff = client.reserve(request("child"), []).result(10)
        handoff.push(0, 0, [0, 1, 2])
        while client.counts()["pages_sent"] < 3:
            time.sleep(0.005)
        print("paused", flush=True)
        sys.stdin.readline()
        handoff.push(0, 3, [3, 4])
        try:
            handoff.seal(token("child")).result(10)
            print("committed", flush=True)
        except HandoffError as error:
            print(error.reason, flush=True)
        handoff.detached.result(10)
        sys.stdin.readline()
    elif mode == "inside":
        # Frozen where nothing can be checked any more: in the copy, or between two calls of send.
        def stop_once():
            if not stopped:
                stopped.append(True)
                print("inside", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)

        stopped = []
        if transport == "shm":
            write = PoolMemory.write

            def frozen_write(memory, layer, runs, source):
                stop_once()
                write(memory, layer, runs, source)

            PoolMemory.write = frozen_write
        else:
            send = FrameSocket.send

            def frozen_send(conn, message, payload=(), stall_s=None):
                if isinstance(message, Pages):
                    conn.sock.sendall(encode(message) + bytes(payload[0])[:100])
                    stop_once()
                    conn.sock.sendall(bytes(payload[0])[100:])
                else:
                    send(conn, message, payload, stall_s)

            FrameSocket.send = frozen_send
        handoff = client.reserve(request("child"), []).result(10)
        handoff.push(0, 0, [0, 1, 2, 3, 4])
        try:
            handoff.seal(token("child")).result(10)
            print("committed", flush=True)
        except HandoffError as error:
            print(error.reason, flush=True)
        handoff.detached.result(10)
        client.close()
    else:
        print("running", flush=True)
        number = 0
        while True:
            number += 1
            name = f"child-{number}"
            handoff = client.reserve(request(name), []).result(10)
            for layer in range(layout.num_layers):
                handoff.push(layer, 0, [0, 1, 2, 3, 4])
            handoff.seal(token(name)).result(10)
    """
)


@pytest.fixture
def spawn(world, transport):
    with contextlib.ExitStack() as stack:

        def start(mode: str, record: WorkerRecord) -> subprocess.Popen[str]:
            child = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WRITER, mode, transport, record.to_bytes().hex()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline().strip() in ("paused", "running", "inside")
            return child

        yield start


def tell(child, line="go"):
    child.stdin.write(line + "\n")
    child.stdin.flush()


def test_a_killed_writers_pages_come_back_with_the_end_of_its_connection(world, transport, spawn):
    receiver = world.receiver(timeout_s=20)
    child = spawn("pause", receiver.record)
    assert receiver.pool.ledger().reserved == 6
    child.kill()
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    assert not receiver.inbox.intakes


def test_a_frozen_writers_pages_are_not_reused_while_it_could_still_write(world, transport, spawn):
    receiver = world.receiver(timeout_s=0.4)
    child = spawn("pause", receiver.record)
    os.kill(child.pid, signal.SIGSTOP)
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    ledger = receiver.pool.ledger()
    expected = 6 if transport == "shm" else 0
    assert (ledger.quarantined, ledger.free) == (expected, 16 - expected)
    if transport == "shm":  # everything else may be used, those pages may not
        other = world.writer(receiver, "tcp").client.reserve(world.make_request("big", 43), [])
        with pytest.raises(HandoffDenied, match="11 pages wanted, 10 of 16"):
            other.result(5)
    child.kill()
    world.wait_until(lambda: receiver.pool.ledger().free == 16)


def test_a_writer_that_wakes_up_confirms_that_it_stopped(world, transport, spawn):
    receiver = world.receiver(timeout_s=0.4)
    child = spawn("pause", receiver.record)
    os.kill(child.pid, signal.SIGSTOP)
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    before = bytes(receiver.memory.buffer)
    os.kill(child.pid, signal.SIGCONT)
    world.wait_until(lambda: receiver.pool.ledger().free == 16)
    tell(child)
    assert "timeout: no progress for 0.4 s" in child.stdout.readline()
    assert bytes(receiver.memory.buffer) == before
    assert not receiver.inbox.intakes
    tell(child)
    assert child.wait(10) == 0


def test_the_late_write_of_a_thawed_writer_lands_in_nobodys_page(world, transport, spawn):
    """Its lease lapses, the next epoch is handed over by another writer, then it goes on."""
    receiver = world.receiver(timeout_s=0.4)
    child = spawn("inside", receiver.record)
    world.wait_until(lambda: receiver.pool.ledger().reserved == 0)
    ledger = receiver.pool.ledger()
    assert (ledger.quarantined, ledger.free) == ((6, 10) if transport == "shm" else (0, 16))
    other = world.writer(receiver, transport)
    request = replace(world.make_request("child", 20, epoch=2), token_ids=tuple(range(20)))
    other.hand_over(receiver, request, [5, 6, 7, 8, 9])
    (intake,) = receiver.inbox.intakes
    before = [receiver.page(layer, page) for layer in range(3) for page in intake.page_ids]
    late = b"\x11" * world.layout.page_bytes

    os.kill(child.pid, signal.SIGCONT)
    world.wait_until(lambda: receiver.server.open_handoffs() == 0)
    assert "committed" not in child.stdout.readline()
    assert child.wait(10) == 0
    now = [receiver.page(layer, page) for layer in range(3) for page in intake.page_ids]
    assert now == before
    written = [page for page in range(16) if receiver.page(0, page) == late]
    # Over shm it did write, into pages that were still kept for it.
    assert written == ([0, 1, 2, 3, 4] if transport == "shm" else [])
    assert receiver.pool.ledger().free == 16 - 6
    receiver.check()
    receiver.finish()


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.11])
def test_what_was_delivered_before_the_kill_is_whole(world, transport, spawn, delay):
    receiver = world.receiver(num_pages=40, timeout_s=20)
    child = spawn("run", receiver.record)
    world.wait_until(lambda: len(receiver.inbox.intakes) >= 2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(delay)
    child.kill()
    world.wait_until(lambda: receiver.server.open_handoffs() == 0)
    whole = b"\x11" * world.layout.page_bytes
    for intake in receiver.inbox.intakes:
        for layer in range(world.layout.num_layers):
            for page in intake.page_ids[:5]:
                assert receiver.page(layer, page) == whole
    receiver.check()
    receiver.finish()
