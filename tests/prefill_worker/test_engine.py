"""The prefill engine's loop over runners that compute nothing, or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pageferry.kernels.sampling import Sampled
from pageferry.kvtransfer.core_flag import CoreFlag
from pageferry.kvtransfer.engine_thread import start_thread
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams
from pageferry.prefill_worker.engine import Engine, Limits, StepFailed
from pageferry.prefill_worker.job import Job


class WatchingRunner:
    """Notes what the flag says during each step."""

    def __init__(self, flag: CoreFlag) -> None:
        self.seen: list[bool] = []
        self._flag = flag

    def execute(
        self, chunks: Sequence[Any], on_layer: Callable[[int], None] | None = None
    ) -> list[Sampled | None]:
        self.seen.append(self._flag.busy)
        return [Sampled(1) if c.sample else None for c in chunks]


def test_cores_are_lent_between_prompts_and_not_during_them(tmp_path: Path) -> None:
    flag = CoreFlag(str(tmp_path / "cores"))
    flag.busy = True  # as a predecessor that died at work leaves it
    runner: Any = WatchingRunner(flag)
    pool = PagePool(100, 4)
    limits = Limits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=100, num_layers=1)
    engine = Engine("w", pool, runner, limits, lambda layer: None, flag)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        for name in ("a", "b"):
            deadline = time.monotonic() + 30
            while flag.busy:
                assert time.monotonic() < deadline, "the cores of an idle engine are not lent"
                time.sleep(0.005)
            request = Request(name, 0, "gw", tuple(range(20)), 20, SamplingParams())
            handoff: Any = SimpleNamespace(skip_pages=0, push=lambda *place: None)
            job = Job(request, "queue", b"1-0", [], handoff)
            engine.compute(job).result(timeout=30)
            pool.release(job.page_ids)
    finally:
        engine.stop()
        thread.join(30)
    assert runner.seen == [True] * 6


class FaultyRunner:
    """Samples token 1; with `error`, raises it instead of one step or of all that follow."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.bad_rows: set[int] = set()
        """Rows whose logits are not finite."""
        self.in_step = threading.Event()
        self.go_on = threading.Event()

    def execute(
        self, chunks: Sequence[Any], on_layer: Callable[[int], None] | None = None
    ) -> list[Sampled | None]:
        self.in_step.set()
        assert self.go_on.wait(30)
        if (error := self.error) is not None:
            raise error
        bad = Sampled(-1, error="non_finite_logits")
        return [bad if i in self.bad_rows else Sampled(1) for i in range(len(chunks))]


class Harness:
    def __init__(self) -> None:
        self.runner = FaultyRunner()
        self.pool = PagePool(100, 4)
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=100, num_layers=1)
        runner: Any = self.runner
        self.engine = Engine("w", self.pool, runner, limits, lambda layer: None)
        self.failures: list[BaseException] = []
        self.thread = start_thread(self.engine, self.failures.append)
        self.num_jobs = 0

    def compute_together(self, count: int) -> list[tuple[Job, Future[Event]]]:
        """Prompts that share a step: they come while an earlier one is computed."""
        self.runner.in_step.clear()
        self.runner.go_on.clear()
        jobs = []
        for _ in range(count + 1):
            self.num_jobs += 1
            prompt = tuple(range(100 * self.num_jobs, 100 * self.num_jobs + 9))
            request = Request(str(self.num_jobs), 0, "gw", prompt, 9, SamplingParams())
            handoff: Any = SimpleNamespace(skip_pages=0, push=lambda *place: None)
            job = Job(request, "queue", b"1-0", self.pool.hash_prefix(prompt), handoff)
            jobs.append((job, self.engine.compute(job)))
            if len(jobs) == 1:
                assert self.runner.in_step.wait(30)
        self.runner.go_on.set()
        jobs[0][1].exception(timeout=30)
        return jobs[1:]

    def release(self, job: Job) -> None:
        """As the worker does it when a job ends."""
        full = job.num_computed_tokens // self.pool.page_size
        self.pool.register(job.page_ids[:full], job.hashes[:full])
        self.pool.release(job.page_ids)


@pytest.fixture
def harness() -> Iterator[Harness]:
    h = Harness()
    yield h
    h.engine.stop()
    h.thread.join(30)
    assert not h.thread.is_alive()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_failed_step_fails_its_prompts_only(harness: Harness, kind: type[Exception]) -> None:
    """Out of memory, or another of torch's errors: the next step is as good as ever."""
    harness.runner.error = kind("CUDA out of memory. Tried to allocate 20.00 GiB.")
    failed = harness.compute_together(3)
    for job, result in failed:
        assert isinstance(result.exception(timeout=30), StepFailed)
        harness.release(job)
    assert harness.pool.ledger().cached == 0, "what a failed step wrote is no cache"
    harness.runner.error = None
    for job, result in harness.compute_together(3):
        assert result.result(timeout=30).token_ids == (1,)
        harness.release(job)
    assert not harness.failures


def test_a_row_with_bad_logits_fails_alone_and_is_not_cached(harness: Harness) -> None:
    harness.runner.bad_rows = {1}
    jobs = harness.compute_together(3)
    events = [result.result(timeout=30) for _, result in jobs]
    assert [event.kind for event in events] == [Kind.TOKENS, Kind.ERROR, Kind.TOKENS]
    assert events[1].code == "non_finite_logits"
    for job, _ in jobs:
        harness.release(job)
    assert harness.pool.match(jobs[1][0].hashes) == []
    assert len(harness.pool.match(jobs[2][0].hashes)) == 2


def test_a_lost_device_ends_the_engine(harness: Harness) -> None:
    harness.runner.error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    harness.runner.go_on.set()
    handoff: Any = SimpleNamespace(skip_pages=0, push=lambda *place: None)
    request = Request("a", 0, "gw", (1, 2), 2, SamplingParams())
    harness.engine.compute(Job(request, "queue", b"1-0", [], handoff))
    harness.thread.join(30)
    assert isinstance(harness.failures[0], torch.AcceleratorError)
