"""The decode scheduler: data in, data out; a real page pool, no model."""

from __future__ import annotations

import random

import pytest

from pageferry.decode_worker.scheduler import Limits, Scheduler, StepPlan
from pageferry.decode_worker.sequence import Sequence
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Request, SamplingParams

PAGE = 4


def sequence(name: str, prompt: int, queue_class: str = "interactive", first: int = 0) -> Sequence:
    ids = tuple(range(first, first + prompt))
    request = Request(name, 0, "gw", ids, prompt, SamplingParams(), queue_class)
    return Sequence.of(request)


def scheduler(pages: int, **limits: int) -> Scheduler:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 1000,
        "watermark_pages": 1,
    }
    return Scheduler(PagePool(pages, PAGE), Limits(**{**defaults, **limits}))


def execute(s: Scheduler, plan: StepPlan) -> list[str]:
    """What the engine does, with token 7 for every sample; the ids that got a token."""
    sampled = []
    for work in plan.work:
        samples = work.samples
        s.advance(work)
        if samples:
            work.sequence.token_ids.append(7)
            sampled.append(work.sequence.request_id)
    held = [page for q in s.running for page in q.page_ids]
    assert all(not q.page_ids for q in s.waiting)
    s.pool.check_integrity({page: held.count(page) for page in held})
    return sampled


def test_a_prompt_is_cut_into_chunks_within_the_token_budget() -> None:
    s = scheduler(100)
    s.add_local(sequence("a", 40))
    chunks = []
    for _ in range(3):
        plan = s.schedule()
        chunks += [w.num_tokens for w in plan.work]
        execute(s, plan)
    assert chunks == [16, 16, 8]
    assert [w.num_tokens for w in s.schedule().work] == [1]


def test_a_short_prompt_passes_a_long_one_that_waits_and_one_that_runs() -> None:
    s = scheduler(200)
    s.add_local(sequence("long", 100))
    execute(s, s.schedule())
    s.add_local(sequence("as-long", 100, first=200))
    s.add_local(sequence("short", 6, first=400))
    plan = s.schedule()
    assert [(w.sequence.request_id, w.num_tokens) for w in plan.work] == [
        ("long", 10),
        ("short", 6),
    ]
    assert [q.request_id for q in s.waiting] == ["as-long"]
    assert execute(s, plan) == ["short"]


def test_under_a_flood_of_short_prompts_each_long_one_still_gets_its_first_token() -> None:
    s = scheduler(400, max_num_seqs=64)
    for i in range(3):
        s.add_local(sequence(f"long-{i}", 80, first=1000 * i))
    ended: list[str] = []
    for step in range(60):
        s.add_local(sequence("short", 8, first=10_000 + 100 * step))
        s.add_local(sequence("short", 8, first=20_000 + 100 * step))
        for name in execute(s, s.schedule()):
            ended.append(name)
            s.remove(next(q for q in s.running if q.request_id == name and q.num_output_tokens))
        if ended.count("short") < len(ended) - 2:
            break
    assert [name for name in ended if name != "short"] == ["long-0", "long-1", "long-2"]


def test_a_prompt_that_lacks_pages_is_not_passed() -> None:
    s = scheduler(10)
    s.add_local(sequence("a", 19))
    execute(s, s.schedule())
    s.add_local(sequence("large", 30, first=100))
    s.add_local(sequence("small", 2, first=200))
    for _ in range(3):
        assert {w.sequence.request_id for w in s.schedule().work} == {"a"}
        execute(s, s.schedule())
    s.remove(s.running[0])
    assert {w.sequence.request_id for w in s.schedule().work} == {"large", "small"}


def test_running_sequences_go_before_prompt_chunks() -> None:
    s = scheduler(100)
    s.add_local(sequence("a", 3))
    execute(s, s.schedule())
    s.add_local(sequence("b", 40, first=100))
    plan = s.schedule()
    assert [(w.sequence.request_id, w.num_tokens) for w in plan.work] == [("a", 1), ("b", 15)]
    assert execute(s, plan) == ["a"]


def test_waiting_holds_no_pages_and_is_admitted_with_room_to_grow() -> None:
    s = scheduler(4)
    s.add_local(sequence("a", 8))  # 8 tokens and the next one: 3 pages
    s.add_local(sequence("b", 4, first=50))
    execute(s, s.schedule())
    assert [q.request_id for q in s.running] == ["a"]
    assert [q.request_id for q in s.waiting] == ["b"]
    s.remove(s.running[0])
    s.schedule()
    assert [q.request_id for q in s.running] == ["b"]


def test_the_youngest_of_the_lowest_class_is_preempted_and_the_oldest_never() -> None:
    s = scheduler(6, watermark_pages=0)
    s.add_local(sequence("batch-old", 3, "batch"))
    s.add_local(sequence("batch-young", 3, "batch", first=20))
    s.add_local(sequence("inter", 3, first=40))
    preempted: list[str] = []
    for _ in range(40):
        plan = s.schedule()
        preempted += [q.request_id for q in plan.preempted]
        execute(s, plan)
        if len(s.running) == 1:
            break
    assert preempted == ["batch-young", "inter"]
    assert [q.request_id for q in s.running] == ["batch-old"]


def test_a_sequence_alone_may_use_the_whole_pool() -> None:
    s = scheduler(4, watermark_pages=1)
    s.add_local(sequence("a", 3))
    for _ in range(13):
        assert execute(s, s.schedule()) == ["a"]
    assert len(s.running[0].page_ids) == 4


def test_alone_and_blocked_by_a_reservation_it_waits_instead_of_failing() -> None:
    s = scheduler(3, watermark_pages=0)
    s.add_local(sequence("a", 3))
    execute(s, s.schedule())
    reserved = s.pool.reserve(2)
    execute(s, s.schedule())
    plan = s.schedule()
    assert plan.work == []
    assert plan.preempted == []
    s.pool.cancel(reserved)
    assert execute(s, s.schedule()) == ["a"]


def test_a_full_prefix_hit_still_computes_the_last_token() -> None:
    s = scheduler(20)
    s.add_local(sequence("a", 8))
    execute(s, s.schedule())
    s.remove(s.running[0])
    s.add_local(sequence("b", 8))
    plan = s.schedule()
    assert [(w.sequence.num_computed_tokens, w.num_tokens) for w in plan.work] == [(4, 4)]


def test_a_removed_sequence_leaves_only_cache_behind() -> None:
    s = scheduler(20)
    s.add_local(sequence("a", 11))
    execute(s, s.schedule())
    s.remove(s.running[0])
    ledger = s.pool.ledger()
    assert (ledger.live, ledger.cached, ledger.free) == (0, 2, 18)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_ends_with_every_sequence_served_or_given_back(seed: int) -> None:
    """Random arrivals and lengths on a small pool: progress each step, nothing leaked."""
    rng = random.Random(seed)
    s = scheduler(12, watermark_pages=rng.randrange(3), max_num_seqs=rng.randrange(1, 6))
    todo = [
        sequence(str(i), rng.randrange(1, 30), rng.choice(["interactive", "batch"]), 100 * i)
        for i in range(12)
    ]
    goal = {q.request_id: len(q.token_ids) + rng.randrange(1, 12) for q in todo}
    done: list[str] = []
    for _ in range(2000):
        if todo and rng.random() < 0.3:
            s.add_local(todo.pop())
        plan = s.schedule()
        assert plan.work or not s.running
        execute(s, plan)
        todo += [Sequence(q.request, q.token_ids[:]) for q in plan.preempted]
        for q in list(s.running):
            if len(q.token_ids) >= goal[q.request_id]:
                s.remove(q)
                done.append(q.request_id)
        if len(done) == len(goal):
            break
    assert sorted(done) == sorted(goal)
    assert s.pool.ledger().live == 0
