"""Pools far below the demand: all finish, after few preemptions, in about the serial time."""

from __future__ import annotations

import collections

from pageferry.decode_worker.scheduler import Limits, Scheduler
from pageferry.decode_worker.sequence import Sequence
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Request, SamplingParams

PAGE = 4


def finish_all(
    num_pages: int, prompts: list[int], output: int
) -> tuple[int, collections.Counter[str]]:
    """(steps until all are done, preemptions by request). All come at once; what is preempted is
    queued again with its tokens so far, as the gateway does it."""
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, watermark_pages=1
    )
    s = Scheduler(PagePool(num_pages, PAGE), limits)
    for i, prompt in enumerate(prompts):
        ids = tuple(range(1000 * i, 1000 * i + prompt))
        s.add_local(Sequence.of(Request(str(i), 0, "gw", ids, prompt, SamplingParams())))
    preempted: collections.Counter[str] = collections.Counter()
    for step in range(1, 100_000):
        plan = s.schedule()
        assert plan.work, "nothing can run, and nobody is done"
        for work in plan.work:
            s.advance(work)
            if work.samples:
                work.sequence.token_ids.append(7)
            if work.sequence.num_output_tokens == output:
                s.remove(work.sequence)
        for sequence in plan.preempted:
            preempted[sequence.request_id] += 1
            request = sequence.request
            again = Request(
                request.request_id,
                1,
                "gw",
                tuple(sequence.token_ids),
                request.prompt_len,
                request.sampling,
                "resume",
            )
            s.add_local(Sequence.of(again))
        if not s.running and not s.waiting:
            assert s.pool.ledger().live == 0
            s.pool.check_integrity()
            return step, preempted
    raise AssertionError("a livelock")


def test_a_pool_of_little_more_than_one_request_serves_eight() -> None:
    """Each needs 0.8 of the pool: prompt 20, output 76 of 120 slots."""
    serial = 8 * (76 + 1)
    steps, preempted = finish_all(30, [20] * 8, 76)
    assert steps <= 3 * serial
    assert max(preempted.values(), default=0) <= 8


def test_two_long_prompts_and_their_growth_in_a_pool_of_both() -> None:
    """2.4 times the prompt: both are admitted, both cannot grow to their ends."""
    steps, preempted = finish_all(24, [40, 40], 40)
    assert steps <= 2 * (40 + 2)
    assert sum(preempted.values()) >= 1, "the pool is too large for this test"


def test_many_middling_prompts_in_a_pool_of_two() -> None:
    steps, _ = finish_all(32, [60] * 20, 12)
    assert steps <= 3 * 20 * (12 + 1)
