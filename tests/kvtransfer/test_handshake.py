"""Who may connect: misfits are refused by name, strangers learn and get nothing."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from pageferry.kvtransfer.frames import Refuse
from pageferry.kvtransfer.handoff import HandoffFailed, HandoffRefused, host_id, prove
from pageferry.kvtransfer.handoff_client import choose_transport
from pageferry.kvtransfer.handshake import introduce
from pageferry.kvtransfer.sockets import FrameSocket, dial_abstract, send_fd


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "other"}, "fingerprint: mine 'ffffffff', theirs 'other'"),
        ({"cluster_key": "wrong"}, "cluster_key: mine (set)"),
        ({"cluster_key": ""}, "cluster_key: mine (set)"),
        ({"dtype": "bfloat16"}, "layout.dtype: mine 'float32', theirs 'bfloat16'"),
        ({"page_size": 8}, "layout.page_size: mine 4, theirs 8"),
        ({"head_dim": 8}, "layout.head_dim: mine 4, theirs 8"),
        ({"num_layers": 9}, "layout.num_layers: mine 3, theirs 9"),
        ({"num_kv_heads": 1}, "layout.num_kv_heads: mine 2, theirs 1"),
        ({"tp_size": 2}, "layout.tp_size: mine 1, theirs 2"),
        ({"version": 7}, "layout.version: mine 1, theirs 7"),
    ],
)
def test_misfits_are_refused_by_name_on_both_sides(world, transport, change, named, caplog):
    receiver = world.receiver()
    identity = dict(change)
    if not set(change) & {"fingerprint", "cluster_key"}:
        identity = {"layout": replace(world.layout, **change)}
    writer = world.writer(receiver, transport, connect=False, **identity)
    with pytest.raises(HandoffRefused) as refusal:
        writer.client.connect()
    assert named in refusal.value.reason
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    assert named in receiver.server.refusals[0]
    assert "'p-1'" in receiver.server.refusals[0]
    assert "wrong" not in receiver.server.refusals[0]
    assert receiver.server.stats()["refused"] == 1
    assert not writer.client.alive
    logged = [record.message for record in caplog.records if named in record.message]
    assert any(text.startswith("refused prefill 'p-1'") for text in logged)  # the receiver's
    assert any(text.startswith("refused by the peer") for text in logged)  # the writer's


def test_a_hello_for_another_transport_is_refused_by_name(world):
    """What a forwarder between the unix socket and a TCP port would do."""
    receiver = world.receiver()
    conn = FrameSocket(dial_abstract(receiver.record.addresses["shm"], 5.0), 5.0)
    identity = replace(receiver.identity, worker_id="p-1", role="prefill")
    with pytest.raises(HandoffRefused, match="transport: mine 'shm', theirs 'tcp'"):
        introduce(conn, identity, "tcp", receiver.record.id)
    conn.close()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    assert "transport: mine 'shm', theirs 'tcp'" in receiver.server.refusals[0]


def test_what_strangers_say_cannot_forge_lines_of_the_log(world, caplog):
    receiver = world.receiver()
    identity = replace(receiver.identity, role="x\nroot: ok", worker_id="y\r", cluster_key="")
    conn = FrameSocket(dial_abstract(receiver.record.addresses["shm"], 5.0), 5.0)
    with pytest.raises(HandoffRefused, match="cluster_key"):
        introduce(conn, identity, "shm", receiver.record.id)
    conn.close()
    conn = FrameSocket(dial_abstract(receiver.record.addresses["shm"], 5.0), 5.0)
    conn.send(Refuse("because\nroot: ok"))
    conn.close()
    world.wait_until(lambda: len(receiver.server.refusals) == 2)
    texts = [*receiver.server.refusals, *(record.message for record in caplog.records)]
    assert not any(character in text for text in texts for character in "\r\n")


def test_a_restarted_worker_on_the_same_address_is_not_taken_for_the_old_one(world, transport):
    receiver = world.receiver()
    receiver.record = replace(receiver.record, id="d-0")
    writer = world.writer(receiver, transport, connect=False)
    with pytest.raises(HandoffRefused, match="worker_id: expected 'd-0', theirs 'd-1'"):
        writer.client.connect()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    assert "'p-1' refused: worker_id: expected 'd-0'" in receiver.server.refusals[0]


def test_a_refusal_is_heard_also_when_the_writer_has_hung_up_meanwhile(world, monkeypatch):
    receiver = world.receiver()
    receiver.record = replace(receiver.record, id="d-0")
    writer = world.writer(receiver, "shm", connect=False)
    hung_up = threading.Event()

    def late(conn, fd):
        assert hung_up.wait(30)
        send_fd(conn, fd)

    monkeypatch.setattr("pageferry.kvtransfer.handoff_server.send_fd", late)
    with pytest.raises(HandoffRefused, match="worker_id"):
        writer.client.connect()
    hung_up.set()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)


def test_an_impostor_that_listens_without_the_key_gets_no_request(world, transport):
    receiver = world.receiver(cluster_key="guessed")
    writer = world.writer(receiver, transport, connect=False)
    with pytest.raises(HandoffRefused, match="cluster_key"):
        writer.client.connect()


def test_a_listener_that_accepts_anyone_but_proves_nothing_gets_no_request(world):
    """It has the right HELLO and does not check ours; all it lacks is the key."""
    receiver = world.receiver()
    impostor = receiver.identity.hello("tcp", 5.0)

    def serve(listener):
        sock, _ = listener.accept()
        conn = FrameSocket(sock, 5.0)
        conn.recv_message()
        conn.send(impostor)
        proof = conn.recv_message()
        conn.send(proof)  # the writer's own, sent back
        answers.append(conn.recv_message())
        conn.close()

    answers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        receiver.record = replace(receiver.record, addresses={"tcp": f"127.0.0.1:{port}"})
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        writer = world.writer(receiver, "tcp", connect=False)
        with pytest.raises(HandoffRefused, match="cluster_key"):
            writer.client.connect()
        thread.join(5)
    assert isinstance(answers[0], Refuse)


def test_a_proof_is_good_for_one_direction_nonce_and_worker_only(world):
    identity = world.receiver().identity
    mine, theirs = identity.hello("tcp", 5.0), identity.hello("tcp", 5.0)
    proof = prove("key", "writer", mine, theirs)
    assert proof == prove("key", "writer", mine, theirs)
    others = [
        prove("key", "receiver", mine, theirs),
        prove("key", "writer", theirs, mine),
        prove("key", "writer", mine, identity.hello("tcp", 5.0)),
        prove("key", "writer", mine, theirs, b"another channel"),
        prove("key", "writer", replace(mine, num_pages=99), theirs),
        prove("key", "writer", replace(mine, worker_id="d-2"), theirs),
        prove("key", "writer", replace(mine, transport="shm"), theirs),
        prove("kez", "writer", mine, theirs),
    ]
    assert proof not in others


def test_a_named_transport_is_not_replaced(world):
    record = world.receiver().record
    assert choose_transport("auto", record) == "shm"
    elsewhere = replace(record, host_id="another host")
    assert choose_transport("auto", elsewhere) == "tcp"
    with pytest.raises(HandoffRefused, match="shm needs one host"):
        choose_transport("shm", elsewhere)
    only_tcp = replace(record, addresses={"tcp": "h:1"})
    with pytest.raises(HandoffRefused, match="offers tcp, not shm"):
        choose_transport("shm", only_tcp)
    with pytest.raises(ValueError, match="carrier"):
        choose_transport("carrier pigeon", record)
    assert host_id() == record.host_id


def test_nobody_listening_is_a_failure_to_retry(world):
    receiver = world.receiver()
    receiver.server.close()
    for transport in ("tcp", "shm"):
        writer = world.writer(receiver, transport, connect=False)
        with pytest.raises(HandoffFailed, match="cannot connect to d-1"):
            writer.client.connect()
