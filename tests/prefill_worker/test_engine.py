"""The prefill engine's loop over a runner that computes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pageferry.kernels.sampling import Sampled
from pageferry.kvtransfer.core_flag import CoreFlag
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Request, SamplingParams
from pageferry.prefill_worker.engine import Engine, Limits
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
