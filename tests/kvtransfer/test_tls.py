"""Page transfers under TLS: the same protocol, and nobody without a certificate of the CA."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pageferry.kvtransfer.frames import Hello
from pageferry.kvtransfer.handoff import HandoffFailed, HandoffRefused
from pageferry.kvtransfer.handshake import introduce
from pageferry.kvtransfer.settings import SettingsError
from pageferry.kvtransfer.sockets import FrameSocket, dial_tcp
from pageferry.kvtransfer.tls import Tls
from tests.kvtransfer.proxy import Proxy, forward


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)


def make_ca(folder: Path, name: str) -> None:
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem",
        "-days", "2", "-subj", f"/CN={name}",
    )  # fmt: skip


def make_member(folder: Path, name: str, ca: str) -> Tls:
    request = folder / f"{name}.csr"
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", folder / f"{name}.key", "-out", request, "-subj", f"/CN={name}",
    )  # fmt: skip
    openssl(
        "x509", "-req", "-in", request, "-CA", folder / f"{ca}.pem", "-CAkey",
        folder / f"{ca}.key", "-CAcreateserial", "-days", "2", "-out", folder / f"{name}.pem",
    )  # fmt: skip
    return Tls(*paths(folder, name, ca))


def paths(folder: Path, name: str, ca: str) -> tuple[str, str, str]:
    return str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / f"{ca}.pem")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with the openssl command")
    made = tmp_path_factory.mktemp("tls")
    for ca in ("cluster", "stranger"):
        make_ca(made, ca)
    return made


@pytest.fixture(scope="module")
def members(folder: Path) -> dict[str, Tls]:
    signed = {"decode": "cluster", "prefill": "cluster", "other": "cluster", "evil": "stranger"}
    return {name: make_member(folder, name, ca) for name, ca in signed.items()}


@pytest.fixture
def proxied(world, members):
    """A receiver, a proxy before it, and a way to make writers that dial the proxy."""
    receiver = world.receiver(num_pages=32, tls=members["decode"])
    target = receiver.record.addresses["tcp"].removeprefix("tls://")
    proxy = world.stack.enter_context(Proxy(target, framed=False))
    record = replace(receiver.record, addresses={"tcp": f"tls://{proxy.address}"})
    behind = replace(receiver, record=record)
    return receiver, proxy, lambda: world.writer(behind, "tcp", tls=members["prefill"])


def test_pages_arrive_exactly_and_no_byte_travels_in_the_clear(world, proxied):
    receiver, proxy, make_writer = proxied
    writer = make_writer()
    for number in range(3):
        request = world.make_request(f"r{number}", 30, salt=str(number))
        writer.hand_over(receiver, request, [23, 3, 4, 5, 9, 8, 0, 17])
    for intake in receiver.inbox.intakes:
        for layer in range(world.layout.num_layers):
            for mine, theirs in zip([23, 3, 4, 5, 9, 8, 0, 17], intake.page_ids, strict=True):
                assert receiver.page(layer, theirs) == world.pattern(layer, mine)
    assert writer.client.transport == "tcp"
    travelled = b"".join(unit.data for unit in proxy.units)
    assert len(travelled) > 3 * 8 * world.layout.bytes_per_page
    for secret in (world.pattern(0, 23)[:32], b"prefill", b"float32", b"salt"):
        assert secret not in travelled
    writer.client.close()
    receiver.finish()


def test_a_flipped_byte_ends_the_connection_and_the_next_one_works(world, proxied, caplog):
    receiver, proxy, make_writer = proxied
    writer = make_writer()
    writer.hand_over(receiver, world.make_request("a"), [0, 1, 2])
    proxy.rule = lambda u: [u.data[:-9] + bytes([u.data[-9] ^ 4]) + u.data[-8:]]
    with pytest.raises(HandoffFailed, match="connection lost"):
        writer.hand_over(receiver, world.make_request("b"), [0, 1, 2])
    proxy.rule = forward
    make_writer().hand_over(receiver, world.make_request("b"), [0, 1, 2])
    world.wait_until(lambda: receiver.server.open_handoffs() == 0)
    receiver.finish()


def test_large_batches_and_both_directions_at_once(world, members):
    """Two threads in one TLS connection: renewals and pages go while answers come."""
    receiver = world.receiver(num_pages=64, tls=members["decode"])
    writers = [world.writer(receiver, "tcp", tls=members[name]) for name in ("prefill", "other")]

    def work(number, writer):
        for turn in range(10):
            request = world.make_request(f"{number}-{turn}", 10, salt=f"{number}-{turn}")
            writer.hand_over(receiver, request, [turn, turn + 1, turn + 2])

    threads = [threading.Thread(target=work, args=item) for item in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(receiver.inbox.intakes) == 20
    for writer in writers:
        writer.client.close()
    receiver.finish()


def test_shm_needs_no_tls(world, members):
    receiver = world.receiver(tls=members["decode"])
    writer = world.writer(receiver, "shm", tls=members["prefill"])
    writer.hand_over(receiver, world.make_request(), [0, 1, 2])


@pytest.mark.parametrize("which", ["writer", "receiver"])
def test_a_certificate_of_another_ca_is_refused(world, members, which):
    names = {"writer": "prefill", "receiver": "decode", which: "evil"}
    receiver = world.receiver(tls=members[names["receiver"]])
    writer = world.writer(receiver, "tcp", connect=False, tls=members[names["writer"]])
    with pytest.raises(HandoffRefused, match="tls: "):
        writer.client.connect()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    assert "tls: " in receiver.server.refusals[0]
    assert not writer.client.alive


def test_one_end_without_tls_is_refused_by_name(world, members):
    ciphered, plain = world.receiver(tls=members["decode"]), world.receiver()
    writer = world.writer(ciphered, "tcp", connect=False)
    with pytest.raises(HandoffRefused, match="tls: mine off, d-1's on"):
        writer.client.connect()
    writer = world.writer(plain, "tcp", connect=False, tls=members["prefill"])
    with pytest.raises(HandoffRefused, match="tls: mine on, d-1's off"):
        writer.client.connect()


def test_plain_text_on_a_tls_port_is_refused_and_disturbs_nobody(world, members):
    receiver = world.receiver(tls=members["decode"])
    address = receiver.record.addresses["tcp"].removeprefix("tls://")
    conn = FrameSocket(dial_tcp(address, 5.0), 5.0)
    conn.send(Hello(3, b"n" * 32, "w", "prefill", "f", {}, 1, "tcp", 5))
    assert conn.drain_to_end()
    conn.close()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))):
        pass  # gone before the handshake
    writer = world.writer(receiver, "tcp", tls=members["prefill"])
    writer.hand_over(receiver, world.make_request(), [0, 1, 2])


def test_a_member_in_the_middle_cannot_pass_the_proof_on(world, members):
    """It has a certificate of the CA, but not the key, and relays every message as it is."""
    receiver = world.receiver(tls=members["decode"])
    address = receiver.record.addresses["tcp"].removeprefix("tls://")
    listener = socket.create_server(("127.0.0.1", 0))

    def relay():
        accepted, _ = listener.accept()
        inward, outward = FrameSocket(accepted, 5.0), FrameSocket(dial_tcp(address, 5.0), 5.0)
        members["other"].secure(inward, server_side=True, timeout_s=5.0)
        members["other"].secure(outward, server_side=False, timeout_s=5.0)
        for source, target in [(inward, outward), (outward, inward), (inward, outward)]:
            target.send(source.recv_message())
        inward.send(outward.recv_message())  # what became of it
        outward.close()
        inward.close()

    thread = threading.Thread(target=relay)
    thread.start()
    port = listener.getsockname()[1]
    conn = FrameSocket(dial_tcp(f"127.0.0.1:{port}", 5.0), 5.0)
    writer = world.writer(receiver, "tcp", connect=False, tls=members["prefill"])
    with pytest.raises(HandoffRefused, match="cluster_key"):
        introduce(conn, writer.client._identity, "tcp", receiver.record.id)
    conn.close()
    thread.join(10)
    listener.close()
    world.wait_until(lambda: len(receiver.server.refusals) == 1)
    assert "cluster_key" in receiver.server.refusals[0]


def test_a_receiver_that_says_nothing_costs_one_attempt(world, members, monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.handshake.HANDSHAKE_S", 0.3)
    receiver = world.receiver(tls=members["decode"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        receiver.record.addresses["tcp"] = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        writer = world.writer(receiver, "tcp", connect=False, tls=members["prefill"])
        with pytest.raises(HandoffFailed, match=r"no TLS within 0\.3 s"):
            writer.client.connect()


def test_settings_say_what_is_missing_or_wrong(folder, members):
    cert, key, ca = paths(folder, "decode", "cluster")
    assert Tls.from_settings("", "", "") is None
    assert isinstance(Tls.from_settings(cert, key, ca), Tls)
    with pytest.raises(SettingsError, match="needs --handoff-tls-key and --handoff-tls-ca"):
        Tls.from_settings(cert, "", "")
    with pytest.raises(SettingsError, match="nowhere: cannot be used"):
        Tls.from_settings(cert, key, "nowhere")
    other = paths(folder, "prefill", "cluster")[1]
    with pytest.raises(SettingsError, match=r"cannot be used .*(?i:mismatch)"):
        Tls.from_settings(cert, other, ca)
    assert issubclass(ssl.SSLError, OSError)
