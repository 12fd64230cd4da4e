"""The decode engine with a runner of ten lines: intake, epochs, cancels, failed steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import pytest
import torch

from pageferry.decode_worker.engine import (
    Depart,
    Engine,
    GatewayLost,
    GiveBack,
    LocalRequest,
    Rejoin,
    Stop,
)
from pageferry.decode_worker.scheduler import Limits
from pageferry.decode_worker.sequence import Sequence
from pageferry.kernels.runner import Chunk, Sampled
from pageferry.kvtransfer.engine_thread import start_thread
from pageferry.kvtransfer.handoff import Intake
from pageferry.kvtransfer.metric_names import WORKER_STATS
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Request, SamplingParams

PAGE = 4


class CountingRunner:
    """Answers each wanted row with its position; `trouble` may raise or spoil rows first."""

    def __init__(self) -> None:
        self.trouble: Callable[[Seq[Chunk]], None] = lambda chunks: None
        self.pause_s = 0.0
        self.spoiled: set[int] = set()

    def execute(self, chunks: Seq[Chunk]) -> list[Sampled | None]:
        time.sleep(self.pause_s)
        self.trouble(chunks)
        rows: list[Sampled | None] = []
        for chunk in chunks:
            error = "non_finite_logits" if chunk.token_ids[0] in self.spoiled else ""
            position = chunk.start + len(chunk.token_ids)
            rows.append(Sampled(position, None, (), error) if chunk.sample else None)
        return rows


class Harness:
    def __init__(self, pages: int = 64) -> None:
        self.pool = PagePool(pages, PAGE)
        self.runner = CountingRunner()
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        limits = Limits(8, 16, 1000, 1)
        self.engine = Engine("w", self.pool, self.runner, limits, self._emit)  # type: ignore[arg-type]
        self.thread: threading.Thread = start_thread(self.engine, self.failures.append)

    def _emit(self, events: Iterable[tuple[str, Event]]) -> None:
        self.events.extend(event for _, event in events)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, self.events
            time.sleep(0.002)

    def ended(self, request_id: str) -> bool:
        return any(e.request_id == request_id and e.finish for e in self.events)

    def tokens(self, request_id: str, epoch: int = 0) -> list[int]:
        mine = [e for e in self.events if (e.request_id, e.epoch) == (request_id, epoch)]
        return [t for e in mine for t in e.token_ids]

    @property
    def is_empty(self) -> bool:
        return not self.engine.num_running and not self.engine.num_waiting


@pytest.fixture
def harness() -> Iterator[Harness]:
    h = Harness()
    yield h
    h.engine.inbox.put(Stop())
    h.thread.join(5)
    assert not h.thread.is_alive()
    ledger = h.pool.ledger()
    assert ledger.live == ledger.reserved == 0
    h.pool.check_integrity()


def request(name: str, max_tokens: int = 5, epoch: int = 0, first: int = 500) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(name, epoch, "gw-" + name, tuple(range(first, first + 6)), 6, sampling)


def test_a_local_request_is_prefilled_and_decoded(harness: Harness) -> None:
    harness.engine.inbox.put(LocalRequest(request("a")))
    harness.until(lambda: harness.ended("a"))
    assert harness.tokens("a") == [6, 7, 8, 9, 10]
    assert [e.index for e in harness.events] == [0, 1, 2, 3, 4]
    assert harness.events[-1].finish == "length"


def test_gaps_are_counted_between_steps_but_not_while_idle(harness: Harness) -> None:
    harness.engine.inbox.put(LocalRequest(request("a")))
    harness.until(lambda: harness.ended("a"))
    harness.until(lambda: harness.is_empty)
    time.sleep(0.2)
    harness.engine.inbox.put(LocalRequest(request("b", first=700)))
    harness.until(lambda: harness.ended("b"))
    clock = harness.engine.clock
    assert (clock.num_steps, clock.num_gaps) == (10, 8)
    assert 0 < clock.longest_gap_seconds <= clock.gap_seconds < 0.2
    assert clock.stats()["steps_total"] == 10
    assert set(clock.stats()) <= set(WORKER_STATS)  # others would not be exposed


def test_tokens_of_a_step_go_out_in_one_call_and_an_empty_one_is_not_made() -> None:
    pool, runner, calls = PagePool(64, PAGE), CountingRunner(), list[list[tuple[str, Event]]]()
    limits = Limits(8, 64, 1000, 1)
    engine = Engine("w", pool, runner, limits, lambda events: calls.append(list(events)))  # type: ignore[arg-type]
    for name in ("a", "b", "c"):
        engine.inbox.put(LocalRequest(request(name, max_tokens=2, first=100 * ord(name))))
    assert engine.step()
    assert engine.step()
    assert not engine.step()
    assert [[gateway for gateway, _ in events] for events in calls] == [
        ["gw-a", "gw-b", "gw-c"]
    ] * 2
    pool.check_integrity()


def test_a_sealed_sequence_goes_on_after_its_first_token(harness: Harness) -> None:
    req = request("a")
    pages = harness.pool.allocate(2)
    first = Event("a", 0, Kind.TOKENS, "p", 0, (99,))
    harness.engine.inbox.put(Intake(req, pages, first, [], "p"))
    harness.until(lambda: harness.ended("a"))
    assert harness.tokens("a") == [7, 8, 9, 10]
    assert harness.events[0].index == 1


def test_a_higher_epoch_replaces_a_request_and_a_late_one_is_dropped(harness: Harness) -> None:
    harness.runner.pause_s = 0.01
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=500, epoch=1)))
    harness.until(lambda: harness.tokens("a", 1))
    harness.engine.inbox.put(LocalRequest(request("a", epoch=0)))
    harness.engine.inbox.put(LocalRequest(request("a", epoch=2)))
    harness.until(lambda: harness.ended("a"))
    assert harness.tokens("a", 0) == []
    assert harness.tokens("a", 2) == [6, 7, 8, 9, 10]
    assert harness.is_empty


def test_a_cancel_works_before_and_after_the_request_arrives(harness: Harness) -> None:
    harness.runner.pause_s = 0.01
    harness.engine.inbox.put(Cancel("early", 0))
    harness.engine.inbox.put(LocalRequest(request("early", max_tokens=500)))
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=500)))
    harness.until(lambda: harness.tokens("a"))
    harness.engine.inbox.put(Cancel("a", 0))
    harness.until(lambda: harness.is_empty)
    assert harness.tokens("early") == []


def test_lost_gateways_requests_are_dropped_and_others_go_on(harness: Harness) -> None:
    harness.runner.pause_s = 0.005
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=900)))
    harness.engine.inbox.put(LocalRequest(request("b", max_tokens=50, first=700)))
    harness.until(lambda: harness.tokens("b"))
    harness.engine.inbox.put(GatewayLost("gw-a"))
    harness.until(lambda: harness.ended("b"))
    assert harness.is_empty


def test_draining_gives_everything_back(harness: Harness) -> None:
    harness.runner.pause_s = 0.005
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=900)))
    harness.until(lambda: harness.tokens("a"))
    harness.engine.inbox.put(GiveBack("draining"))
    harness.until(lambda: harness.is_empty)
    assert (harness.events[-1].kind, harness.events[-1].code) == (Kind.REQUEUE, "draining")


def depart(h: Harness, limit: int = 10) -> list[Sequence]:
    taken: Future[list[Sequence]] = Future()
    h.engine.inbox.put(Depart(limit, taken))
    return taken.result(10)


def test_a_sequence_that_departs_keeps_its_pages_and_goes_on_after_coming_back(
    harness: Harness,
) -> None:
    harness.runner.pause_s = 0.005
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=60)))
    harness.until(lambda: len(harness.tokens("a")) > 3)
    [sequence] = depart(harness)
    assert harness.is_empty
    assert sequence.num_uncomputed_tokens == 1
    assert harness.pool.ledger().live == len(sequence.page_ids) > 0
    assert harness.tokens("a") == list(range(6, 6 + sequence.num_output_tokens))
    harness.engine.inbox.put(Rejoin(sequence))
    harness.until(lambda: harness.ended("a"))
    assert harness.tokens("a") == list(range(6, 66))


def test_a_departed_sequence_that_was_cancelled_meanwhile_does_not_come_back(
    harness: Harness,
) -> None:
    harness.runner.pause_s = 0.005
    harness.engine.inbox.put(LocalRequest(request("a", max_tokens=500)))
    harness.until(lambda: harness.tokens("a"))
    [sequence] = depart(harness)
    harness.engine.inbox.put(Cancel("a", 0))
    harness.engine.inbox.put(Rejoin(sequence))
    harness.until(lambda: not harness.pool.ledger().live)
    assert harness.is_empty


def test_only_so_many_depart_and_an_order_that_nobody_waits_for_has_no_effect(
    harness: Harness,
) -> None:
    harness.runner.pause_s = 0.005
    for name in ("a", "b", "c"):
        harness.engine.inbox.put(LocalRequest(request(name, max_tokens=30, first=ord(name))))
    harness.until(lambda: all(harness.tokens(name) for name in ("a", "b", "c")))
    given_up: Future[list[Sequence]] = Future()
    given_up.cancel()
    harness.engine.inbox.put(Depart(10, given_up))
    left = depart(harness, 2)
    assert [s.request_id for s in left] == ["a", "b"]
    assert harness.engine.num_running == 1
    for sequence in left:
        harness.engine.inbox.put(Rejoin(sequence))
    harness.until(lambda: all(harness.ended(name) for name in ("a", "b", "c")))


def test_a_failed_step_returns_its_requests_and_caches_nothing(harness: Harness) -> None:
    def once(chunks: Seq[Chunk]) -> None:
        harness.runner.trouble = lambda chunks: None
        raise RuntimeError("out of memory")

    harness.runner.trouble = once
    harness.engine.inbox.put(LocalRequest(request("a")))
    harness.until(lambda: harness.events)
    assert (harness.events[0].kind, harness.events[0].code) == (Kind.REQUEUE, "step_failed")
    assert harness.pool.ledger().cached == 0
    harness.engine.inbox.put(LocalRequest(request("a", epoch=1)))
    harness.until(lambda: harness.ended("a"))


def test_steps_that_keep_failing_end_the_worker() -> None:
    h = Harness()

    def always(chunks: Seq[Chunk]) -> None:
        raise RuntimeError("broken")

    h.runner.trouble = always
    for i, name in enumerate("abc"):
        h.engine.inbox.put(LocalRequest(request(name)))
        h.until(lambda: len(h.events) > i or h.failures)  # noqa: B023
    h.thread.join(5)
    assert [str(f) for f in h.failures] == ["3 steps failed in a row: the worker gives up"]


def test_a_lost_device_ends_the_engine_at_once() -> None:
    """It is a `RuntimeError` too, but no other step on that device can do better."""
    h = Harness()

    def lost(chunks: Seq[Chunk]) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    h.runner.trouble = lost
    h.engine.inbox.put(LocalRequest(request("a")))
    h.thread.join(30)
    assert [type(f) for f in h.failures] == [torch.AcceleratorError]
    assert h.events == []


def test_a_request_that_fails_every_step_does_not_end_the_worker(harness: Harness) -> None:
    def poison(chunks: Seq[Chunk]) -> None:
        if any(chunk.token_ids[0] == 500 for chunk in chunks):
            raise RuntimeError("poison")

    harness.runner.trouble = poison
    for epoch in range(5):
        harness.engine.inbox.put(LocalRequest(request("bad", epoch=epoch)))
        harness.until(lambda: len(harness.events) > epoch)  # noqa: B023
    harness.engine.inbox.put(LocalRequest(request("good", first=900)))
    harness.until(lambda: harness.ended("good"))
    assert not harness.failures


def test_a_row_with_bad_logits_fails_alone_and_is_not_cached(harness: Harness) -> None:
    harness.runner.spoiled = {500}
    harness.engine.inbox.put(LocalRequest(request("bad", first=500)))
    harness.engine.inbox.put(LocalRequest(request("good", first=700)))
    harness.until(lambda: harness.ended("good"))
    errors = [e for e in harness.events if e.kind is Kind.ERROR]
    assert [(e.request_id, e.code) for e in errors] == [("bad", "non_finite_logits")]
    bad = request("bad", first=500)
    assert harness.pool.peek(harness.pool.hash_prefix(bad.token_ids)) == 0
