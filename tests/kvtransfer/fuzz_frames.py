"""Malformed, mutated and misplaced frames against a real receiver and real writers.

    python -m tests.kvtransfer.fuzz_frames COUNT SEED

sends COUNT frames, some of them to writers, and prints what became of them as JSON. Sessions are
valid ones with some frames changed: single fields, tags, lengths, order, payloads, bits, or cut
short; some peers never get past the handshake. All the while two well-behaved writers hand over
requests. `run` raises `AssertionError` if a page outside a grant was written, a thread, descriptor
or page was not given back, a good handoff failed, or anything was caught that nobody expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pageferry.kvtransfer import handshake
from pageferry.kvtransfer.frames import (
    Cancel,
    FrameError,
    Grant,
    Message,
    Pages,
    Ping,
    Renew,
    Reserve,
    Seal,
    Stopped,
    encode,
)
from pageferry.kvtransfer.handoff import (
    HandoffDenied,
    HandoffError,
    Identity,
    Intake,
    Manifest,
    digest_of,
    host_id,
)
from pageferry.kvtransfer.handoff_client import ClientOptions, HandoffClient
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.sockets import (
    ConnectionLost,
    FrameSocket,
    dial_abstract,
    dial_tcp,
    listen_abstract,
    recv_fd,
    send_fd,
)
from pageferry.kvtransfer.wire import (
    Event,
    Kind,
    Ledger,
    Request,
    SamplingParams,
    WorkerRecord,
)
from tests.kvtransfer.mutations import Mutator, answers_to, pages_in

LAYOUT = KVLayout(dtype="float32", page_size=4, num_layers=3, num_kv_heads=2, head_dim=4)
NUM_PAGES = 128
GUARD = 0xA5
TIMEOUT_S = 1.0
ANSWER_S = 30.0
FRAMES_PER_SESSION = 8


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def make_request(name: str, epoch: int, tokens: int) -> Request:
    ids = tuple(range(1, tokens + 1))
    return Request(name, epoch, "g", ids, tokens, SamplingParams(), salt=name)


def first_token(request: Request) -> Event:
    return Event(request.request_id, request.epoch, Kind.TOKENS, "p", token_ids=(7,))


@dataclass
class Caught(logging.Handler):
    """Exceptions that were logged: nothing malformed may come as far as that."""

    tracebacks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.tracebacks.append(logging.Formatter().format(record))

    __hash__ = logging.Handler.__hash__


class Target:
    """The receiver under fire. Every second page of its pool is held for good: a guard."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES, LAYOUT.page_size, b"fuzz")
        self.memory = PoolMemory.create(LAYOUT, NUM_PAGES)
        self.memory.buffer[:] = bytes([GUARD]) * len(self.memory.buffer)
        pages = self.pool.allocate(NUM_PAGES)
        self.guards = pages[::2]
        self.pool.release(pages[1::2])
        self.good: Counter[str] = Counter()
        identity = Identity("d", "decode", "f", LAYOUT, NUM_PAGES, "key")
        options = ServerOptions(timeout_s=TIMEOUT_S)
        self.server = HandoffServer(identity, self.pool, self.memory, self, options)
        self.server.start()
        self.record = make_record("d", self.server.addresses)

    def admit(self, request: Request, num_pages: int) -> str:
        return ""

    def sealed(self, intake: Intake) -> None:
        """Looks at what good writers sent, and lets the sequence end."""
        if intake.request.request_id.startswith("good"):
            wanted = bytes([0x33]) * LAYOUT.page_bytes
            for layer in range(LAYOUT.num_layers):
                for page in intake.page_ids[: LAYOUT.pages_for(len(intake.request.token_ids))]:
                    assert self.memory.view(layer, page, 1) == wanted
            self.good[intake.peer] += 1
        self.pool.release(intake.page_ids)

    def check(self) -> None:
        blank = bytes([GUARD]) * LAYOUT.page_bytes
        for layer in range(LAYOUT.num_layers):
            for page in self.guards:
                assert self.memory.view(layer, page, 1) == blank, f"guard page {page} was written"
        holders = self.server.holders()
        holders.update(self.guards)
        self.pool.check_integrity(holders)

    def close(self) -> None:
        deadline = time.monotonic() + ANSWER_S
        while self.server.open_handoffs() and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            self.check()
        finally:
            self.server.close()
        ledger = self.pool.ledger()
        assert ledger.reserved == ledger.quarantined == 0, ledger
        assert ledger.live == len(self.guards), ledger
        self.memory.close()


def make_record(name: str, addresses: dict[str, str]) -> WorkerRecord:
    return WorkerRecord(
        id=name, role="decode", pid=0, host="h", state="ready", model="m", fingerprint="f",
        layout=LAYOUT.to_dict(), ledger=Ledger(NUM_PAGES, 0, 0, 0, 0, 0, 4), max_model_len=64,
        addresses=addresses, host_id=host_id(),
    )  # fmt: skip


class Fuzz:
    def __init__(self, seed: int, count: int) -> None:
        self.seed = seed
        self.count = count
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.epochs = iter(range(1, 10**9))
        self._lock = threading.Lock()

    def note(self, side: str, text: str) -> None:
        kind = re.sub(r"'[^']*'|[0-9][0-9.,]*", "N", text)[:48]
        with self._lock:
            self.outcomes[f"{side}: {kind}"] += 1

    def say(self, sock: socket.socket, data: bytes, side: str) -> None:
        with self._lock:
            self.sent[side] += 1
        sock.sendall(data)

    # --- a bad writer

    def attack_receiver(self, target: Target, number: int) -> None:
        rng = random.Random(self.seed * 1_000_003 + number)
        mutator, transport = Mutator(rng), rng.choice(["tcp", "shm"])
        dial = dial_tcp if transport == "tcp" else dial_abstract
        conn = FrameSocket(dial(target.record.addresses[transport], 5.0), TIMEOUT_S)
        remote = None
        identity = Identity(f"bad-{number % 7}", "prefill", "f", LAYOUT, 1, "key")
        try:
            if rng.random() < 0.15:
                hello = identity.hello(transport, 1.0)
                self.say(conn.sock, mutator.frame(hello), "receiver")
                conn.end_sending()
                self.listen(conn, "receiver")
                return
            handshake.introduce(conn, identity, transport, "d")
            if transport == "shm":
                fd = recv_fd(conn)
                remote = PoolMemory.attach(fd, LAYOUT, NUM_PAGES)
                os.close(fd)
            frames = self.valid_session(rng, conn, remote)
            for data in mutator.session(frames):
                self.say(conn.sock, data, "receiver")
            conn.end_sending()
            self.listen(conn, "receiver")
        except (ConnectionLost, FrameError, OSError, HandoffError) as error:
            self.note("receiver", f"{type(error).__name__}")
        finally:
            conn.close()
            if remote is not None:
                remote.close()

    def valid_session(
        self, rng: random.Random, conn: FrameSocket, remote: PoolMemory | None
    ) -> list[tuple[Message, bytes]]:
        """RESERVE sent and granted; what would complete that handoff, and begin another one."""
        request = make_request(f"bad{rng.randrange(300)}", next(self.epochs), rng.randint(1, 12))
        self.say(conn.sock, encode(reserve(1, request)), "receiver")
        answer = conn.recv_message(max_body=2**20)
        other = make_request(f"bad{rng.randrange(300)}", next(self.epochs), rng.randint(1, 12))
        if not isinstance(answer, Grant):
            return [(reserve(2, other), b"")]
        manifest, frames = Manifest(), list[tuple[Message, bytes]]()
        for layer in range(LAYOUT.num_layers):
            payload = bytes([0xBB]) * LAYOUT.page_bytes * len(answer.page_ids)
            if remote is not None:
                for page in answer.page_ids:
                    remote.view(layer, page, 1)[:] = payload[: LAYOUT.page_bytes]
            digest = digest_of([memoryview(payload)])
            body = b"" if remote is not None else payload
            count = len(answer.page_ids)
            message = Pages(1, layer, answer.skip_pages, count, digest, len(body))
            manifest.add(message)
            frames.append((message, body))
        seal = Seal(1, manifest.digest(), first_token(request).to_list())
        tail: list[Message] = [
            seal,
            reserve(2, other),
            Renew(2),
            Cancel(2, "x"),
            Stopped(2),
            Ping(),
        ]
        return frames + [(message, b"") for message in tail]

    def listen(self, conn: FrameSocket, side: str) -> None:
        """Until the other end is done with us; its answers are what is counted."""
        deadline = time.monotonic() + ANSWER_S

        def patience() -> None:
            assert time.monotonic() < deadline, "the connection was not ended"

        try:
            while True:
                message = conn.recv_message(patience)
                reason = getattr(message, "reason", "")
                self.note(side, f"{type(message).__name__} {reason}".strip())
        except ConnectionLost as lost:
            self.note(side, f"ended ({'closed' if lost.peer_gone else lost})")

    # --- a bad receiver

    def attack_writer(self, memory: PoolMemory, number: int) -> None:
        """A fake receiver answers a real client with nonsense. All its futures must be settled."""
        rng = random.Random(self.seed * 1_000_033 + number)
        mine = PoolMemory.create(LAYOUT, 32)
        mine.buffer[:] = bytes([GUARD]) * len(mine.buffer)
        granted: set[int] = set()
        listener, name = listen_abstract()
        record = replace(make_record("evil", {"shm": name}), layout=LAYOUT.to_dict())
        identity = Identity("p", "prefill", "f", LAYOUT, 1, "key")
        client = HandoffClient(identity, record, memory, ClientOptions("shm", TIMEOUT_S))
        thread = threading.Thread(target=self._answer, args=(listener, mine, granted, rng))
        thread.start()
        try:
            client.connect()
            self._use(client, rng)
        except HandoffError as error:
            self.note("writer", f"{type(error).__name__} {error.reason}")
        finally:
            client.close()
            thread.join(ANSWER_S)
            assert not thread.is_alive()
        blank = bytes([GUARD]) * LAYOUT.page_bytes
        for page in set(range(32)) - granted:
            for layer in range(LAYOUT.num_layers):
                assert mine.view(layer, page, 1) == blank, f"page {page} was never granted"
        mine.close()

    def _use(self, client: HandoffClient, rng: random.Random) -> None:
        for number in range(3):
            request = make_request(f"w{number}", 1, rng.randint(1, 20))
            answer = client.reserve(request, [])
            try:
                handoff = answer.result(ANSWER_S)
                for layer in range(LAYOUT.num_layers):
                    handoff.push(layer, 0, range(handoff.num_pages))
                try:
                    handoff.seal(first_token(request)).result(ANSWER_S)
                    self.note("writer", "committed")
                finally:
                    handoff.detached.result(ANSWER_S)
            except HandoffError as error:
                self.note("writer", f"{type(error).__name__} {error.reason}")

    def _answer(
        self, listener: socket.socket, mine: PoolMemory, granted: set[int], rng: random.Random
    ) -> None:
        mutator = Mutator(rng)
        with listener:
            sock, _ = listener.accept()
        conn = FrameSocket(sock, TIMEOUT_S)
        identity = Identity("evil", "decode", "f", LAYOUT, 32, "key")
        try:
            handshake.welcome(conn, identity, "shm")
            send_fd(conn, mine.fd)
            wrong_at = rng.randrange(FRAMES_PER_SESSION)
            for turn in range(4 * FRAMES_PER_SESSION):
                message = conn.recv_message()
                for answer in answers_to(message, LAYOUT.page_size, rng):
                    wrong = turn >= wrong_at and rng.random() < 0.5
                    data = mutator.frame(answer) if wrong else encode(answer)
                    granted.update(pages_in(data))
                    self.say(conn.sock, data, "writer")
        except (ConnectionLost, FrameError, OSError, HandoffError):
            pass  # the client has had enough
        finally:
            conn.end_sending()
            with contextlib.suppress(OSError):
                conn.drain_to_end()
            conn.close()


def reserve(handoff_id: int, request: Request) -> Reserve:
    return Reserve(handoff_id, request.to_dict(), len(request.token_ids), [])


def good_writer(target: Target, memory: PoolMemory, transport: str, stop: threading.Event) -> float:
    """Hands over one request after another; the longest time that one took, seconds."""
    name = f"good-{transport}"
    identity = Identity(name, "prefill", "f", LAYOUT, memory.num_pages, "key")
    client = HandoffClient(identity, target.record, memory, ClientOptions(transport, ANSWER_S))
    client.connect()
    longest, epoch = 0.0, 0
    try:
        while not stop.is_set():
            epoch += 1
            request, begun = make_request(name, epoch, 10), time.monotonic()
            while True:
                try:
                    handoff = client.reserve(request, []).result(ANSWER_S)
                    break
                except HandoffDenied as denial:
                    busy = "out_of_pages" in denial.reason  # the bad ones have all pages
                    if not busy or time.monotonic() - begun > ANSWER_S:
                        raise
                    time.sleep(0.01)
            for layer in range(LAYOUT.num_layers):
                handoff.push(layer, 0, [0, 1, 2])
            handoff.seal(first_token(request)).result(ANSWER_S)
            longest = max(longest, time.monotonic() - begun)
            stop.wait(0.005)
    finally:
        client.close()
    return longest


def run(count: int, seed: int, workers: int = 6) -> dict[str, Any]:
    """Send `count` frames; the figures. `AssertionError` if anything gave way."""
    logger, caught = logging.getLogger("pageferry"), Caught()
    logger.addHandler(caught)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    fuzz, target, begun = Fuzz(seed, count), Target(), time.monotonic()
    memory = PoolMemory.create(LAYOUT, 32)
    memory.buffer[:] = b"\x33" * len(memory.buffer)
    stop, rss = threading.Event(), list[float]()
    try:
        with ThreadPoolExecutor(2) as good, ThreadPoolExecutor(workers) as bad:
            calm = [good.submit(good_writer, target, memory, t, stop) for t in ("tcp", "shm")]
            try:
                for number in range(10**9):
                    if sum(fuzz.sent.values()) >= count:
                        break
                    if number % 4 == 1:
                        work = [
                            bad.submit(fuzz.attack_writer, memory, number + i)
                            for i in range(workers)
                        ]
                    else:
                        work = [
                            bad.submit(fuzz.attack_receiver, target, number * 100 + i)
                            for i in range(2 * workers)
                        ]
                    for one in work:
                        one.result(2 * ANSWER_S)
                    assert not any(writer.done() for writer in calm), "a good writer gave up"
                    target.check()
                    rss.append(rss_mib())
            finally:
                stop.set()
            longest = max(writer.result(2 * ANSWER_S) for writer in calm)
    finally:
        stats = target.server.stats()
        try:
            target.close()
        finally:
            memory.close()
            logger.removeHandler(caught)
            logger.setLevel(level)
            logger.propagate = propagate
    assert not caught.tracebacks, caught.tracebacks[0]
    assert threading.active_count() == threads, [t.name for t in threading.enumerate()]
    assert len(os.listdir("/proc/self/fd")) == files
    assert min(target.good[f"good-{transport}"] for transport in ("tcp", "shm")) > 0
    return {
        "frames": dict(fuzz.sent),
        "seconds": round(time.monotonic() - begun, 1),
        "good_handoffs": dict(target.good),
        "longest_good_handoff_s": round(longest, 3),
        "rss_mib": {"first": rss[0], "after_a_tenth": rss[len(rss) // 10], "last": rss[-1]},
        "receiver": {k: v for k, v in stats.items() if not k.startswith(("gb_", "overlap"))},
        "outcomes": dict(fuzz.outcomes.most_common()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=2_000)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.count, arguments.seed), indent=1))
