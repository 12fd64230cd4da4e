"""A small receiver and its writers: real sockets, threads and shared memory, pages of 256 bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pageferry.kvtransfer.frames import Message, Reserve
from pageferry.kvtransfer.handoff import Identity, Intake, host_id
from pageferry.kvtransfer.handoff_client import ClientOptions, Handoff, HandoffClient
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.handshake import introduce
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.sockets import FrameSocket, dial_abstract, dial_tcp, recv_fd
from pageferry.kvtransfer.wire import Event, Kind, Ledger, Request, SamplingParams, WorkerRecord

for _name in (
    "proxy",
    "mutations",
    "fuzz_frames",
    "protocol_links",
    "protocol_workers",
    "protocol_world",
):
    # Test modules import these as `tests.kvtransfer.<name>`; pytest puts no folder on the path.
    _path = Path(__file__).with_name(f"{_name}.py")
    _spec = importlib.util.spec_from_file_location(f"tests.kvtransfer.{_name}", _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

LAYOUT = KVLayout(dtype="float32", page_size=4, num_layers=3, num_kv_heads=2, head_dim=4)
NAMESPACE = b"tests"
POISON = 0xA5


@dataclass
class Inbox:
    """A listener that remembers."""

    intakes: list[Intake] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    deny: str = ""
    explode: bool = False

    def admit(self, request: Request, num_pages: int) -> str:
        self.admitted.append(num_pages)
        return self.deny

    def sealed(self, intake: Intake) -> None:
        if self.explode:
            raise RuntimeError("no")
        self.intakes.append(intake)


@dataclass
class Receiver:
    """A decode worker's pool, memory and handoff server."""

    pool: PagePool
    memory: PoolMemory
    inbox: Inbox
    server: HandoffServer
    identity: Identity
    record: WorkerRecord

    def page(self, layer: int, page: int) -> bytes:
        return bytes(self.memory.view(layer, page, 1))

    def is_poisoned(self, page: int) -> bool:
        blank = bytes([POISON]) * LAYOUT.page_bytes
        return all(self.page(layer, page) == blank for layer in range(LAYOUT.num_layers))

    def check(self) -> None:
        """Every reference has a holder: an open handoff or a delivered sequence."""
        holders = self.server.holders()
        for intake in self.inbox.intakes:
            holders.update(intake.page_ids)
        self.pool.check_integrity(holders)

    def check_idle(self) -> None:
        """Nobody is connected any more: no page is reserved or quarantined."""
        self.check()
        ledger = self.pool.ledger()
        assert ledger.reserved == ledger.quarantined == 0, ledger
        assert self.server.open_handoffs() == 0

    def finish(self) -> None:
        """Let the delivered sequences end; then every page must be free or cached."""
        for intake in self.inbox.intakes:
            self.pool.release(intake.page_ids)
        self.inbox.intakes.clear()
        self.pool.check_integrity({})
        ledger = self.pool.ledger()
        assert ledger.free + ledger.cached == ledger.total, ledger


@dataclass
class Writer:
    """A prefill worker's memory and client. Page p of layer l is filled with a pattern of both."""

    memory: PoolMemory
    client: HandoffClient

    def page(self, layer: int, page: int) -> bytes:
        return bytes(self.memory.view(layer, page, 1))

    def hand_over(
        self, receiver: Receiver, request: Request, local: list[int], *, seal: bool = True
    ) -> Handoff:
        """RESERVE, push everything layer by layer and, unless told otherwise, SEAL and wait."""
        hashes = receiver.pool.hash_prefix(request.token_ids, request.salt)
        handoff = self.client.reserve(request, hashes).result(5)
        for layer in range(LAYOUT.num_layers):
            handoff.push(layer, 0, local)
        if seal:
            handoff.seal(first_token(request)).result(5)
        return handoff


def first_token(request: Request) -> Event:
    return Event(request.request_id, request.epoch, Kind.TOKENS, "p", token_ids=(7,))


def make_request(
    request_id: str = "r", tokens: int = 10, epoch: int = 1, salt: str = ""
) -> Request:
    ids = tuple(range(1, tokens + 1))
    return Request(request_id, epoch, "g", ids, len(ids), SamplingParams(), salt=salt)


def pattern(layer: int, page: int) -> bytes:
    return bytes((layer * 71 + page * 13 + i) % 251 for i in range(LAYOUT.page_bytes))


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.005)


@dataclass
class RawWriter:
    """An authenticated connection on which a test says what it likes."""

    conn: FrameSocket
    remote: PoolMemory | None
    next_id: int = 0

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.conn.send(message, [memoryview(payload)])

    def hear(self, timeout_s: float = 5.0) -> Message:
        deadline = time.monotonic() + timeout_s

        def patience() -> None:
            assert time.monotonic() < deadline, "no answer"

        return self.conn.recv_message(patience)

    def say_reserve(self, request: Request) -> None:
        self.say(Reserve(self.next_id, request.to_dict(), len(request.token_ids), []))

    def reserve(self, request: Request) -> Message:
        self.next_id += 1
        self.say_reserve(request)
        return self.hear()

    def close(self) -> None:
        self.conn.close()
        if self.remote is not None:
            self.remote.close()


@dataclass
class World:
    """Makes receivers and writers, and closes them in the end."""

    stack: contextlib.ExitStack
    layout: KVLayout = LAYOUT

    make_request = staticmethod(make_request)
    first_token = staticmethod(first_token)
    pattern = staticmethod(pattern)
    wait_until = staticmethod(wait_until)
    Inbox = Inbox

    def receiver(self, num_pages: int = 16, timeout_s: float = 5.0, **changes: object) -> Receiver:
        """`changes`: of the identity."""
        identity = Identity("d-1", "decode", "f" * 8, LAYOUT, num_pages, "key")
        identity = replace(identity, **changes)  # type: ignore[arg-type]
        pool = PagePool(num_pages, LAYOUT.page_size, NAMESPACE)
        memory = PoolMemory.create(identity.layout, num_pages)
        memory.buffer[:] = bytes([POISON]) * len(memory.buffer)
        inbox = Inbox()
        server = HandoffServer(identity, pool, memory, inbox, ServerOptions(timeout_s=timeout_s))
        server.start()
        record = WorkerRecord(
            id=identity.worker_id, role="decode", pid=0, host="h", state="ready", model="m",
            fingerprint=identity.fingerprint, layout=identity.layout.to_dict(),
            ledger=Ledger(num_pages, num_pages, 0, 0, 0, 0, LAYOUT.page_size), max_model_len=64,
            addresses=server.addresses, host_id=host_id(),
        )  # fmt: skip
        receiver = Receiver(pool, memory, inbox, server, identity, record)
        self.stack.callback(memory.close)
        self.stack.callback(receiver.check_idle)
        self.stack.callback(server.close)
        return receiver

    def writer(
        self,
        receiver: Receiver,
        transport: str,
        *,
        num_pages: int = 24,
        timeout_s: float = 5.0,
        connect: bool = True,
        **changes: object,
    ) -> Writer:
        identity = Identity("p-1", "prefill", "f" * 8, LAYOUT, num_pages, "key")
        identity = replace(identity, **changes)  # type: ignore[arg-type]
        memory = PoolMemory.create(identity.layout, num_pages)
        if identity.layout == LAYOUT:
            for layer in range(LAYOUT.num_layers):
                for page in range(num_pages):
                    memory.view(layer, page, 1)[:] = pattern(layer, page)
        options = ClientOptions(transport, timeout_s)
        client = HandoffClient(identity, receiver.record, memory, options)
        self.stack.callback(memory.close)
        self.stack.callback(client.close)
        if connect:
            client.connect()
        return Writer(memory, client)

    def raw(self, receiver: Receiver, transport: str) -> RawWriter:
        dial = dial_tcp if transport == "tcp" else dial_abstract
        conn = FrameSocket(dial(receiver.record.addresses[transport], 5.0), 5.0)
        identity = Identity("raw", "prefill", "f" * 8, LAYOUT, 1, "key")
        hello = introduce(conn, identity, transport, receiver.record.id)
        remote = None
        if transport == "shm":
            fd = recv_fd(conn)
            remote = PoolMemory.attach(fd, LAYOUT, hello.num_pages)
            os.close(fd)
        raw = RawWriter(conn, remote)
        self.stack.callback(raw.close)
        return raw


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(stack)


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen
