"""The prefill scheduler: data in, data out; a real page pool, no model."""

from __future__ import annotations

from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Request, SamplingParams
from pageferry.prefill_worker.job import Job
from pageferry.prefill_worker.scheduler import Scheduler

PAGE = 4


def job(pool: PagePool, name: str, length: int, first: int = 0) -> Job:
    ids = tuple(range(first, first + length))
    request = Request(name, 0, "gw", ids, length, SamplingParams())
    return Job(request, "queue", b"1-0", pool.hash_prefix(ids))


def run_step(s: Scheduler) -> list[tuple[str, int, bool]]:
    done = []
    for work in s.schedule():
        done.append((work.job.request.request_id, work.num_tokens, work.is_last))
        s.advance(work)
    return done


def finish(pool: PagePool, j: Job) -> None:
    full = j.num_computed_tokens // PAGE
    pool.register(j.page_ids[:full], j.hashes[:full])
    pool.release(j.page_ids)


def test_several_prompts_share_one_pass() -> None:
    pool = PagePool(100, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=16, max_num_seqs=8)
    for name, length, first in (("a", 5, 0), ("b", 7, 20), ("c", 9, 40)):
        s.add(job(pool, name, length, first))
    assert run_step(s) == [("a", 5, True), ("b", 7, True), ("c", 4, False)]
    assert run_step(s) == [("c", 5, True)]
    assert run_step(s) == []


def test_short_prompts_need_not_wait_for_a_long_one_nor_it_for_all_of_them() -> None:
    pool = PagePool(4000, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=512, max_num_seqs=32)
    long = job(pool, "long", 3000)
    s.add(long)
    run_step(s)
    steps = 1
    while long.num_uncomputed_tokens:
        names = [f"short-{steps}-{i}" for i in range(4)]
        for i, name in enumerate(names):
            s.add(job(pool, name, 60, 10_000 + 1000 * (4 * steps + i)))
        done = run_step(s)
        assert sorted(name for name, _, last in done if last and name != "long") == names
        assert sum(tokens for _, tokens, _ in done) == min(512, 240 + done[0][1])
        steps += 1
    assert steps <= 2 * -(-3000 // 512)


def test_under_a_flood_of_short_prompts_each_long_one_still_ends() -> None:
    pool = PagePool(4000, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=64, max_num_seqs=64)
    ended: list[str] = []
    for i in range(3):
        s.add(job(pool, f"long-{i}", 320, 1000 * i))
    for step in range(40):
        for i in range(4):
            s.add(job(pool, "short", 16, 10_000 + 100 * (4 * step + i)))
        ended += [name for name, _, last in run_step(s) if last and name != "short"]
    assert ended == ["long-0", "long-1", "long-2"]


def test_a_prompt_waits_until_all_its_pages_can_be_had_and_is_not_overtaken() -> None:
    pool = PagePool(4, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=64, max_num_seqs=8)
    first, second = job(pool, "a", 12), job(pool, "b", 8, 50)
    third = job(pool, "c", 2, 90)
    for j in (first, second, third):
        s.add(j)
    assert run_step(s) == [("a", 12, True)]
    assert run_step(s) == []
    assert not second.page_ids
    finish(pool, first)
    assert run_step(s) == [("b", 8, True), ("c", 2, True)]
    pool.check_integrity(dict.fromkeys((*second.page_ids, *third.page_ids), 1))


def test_cached_pages_are_not_computed_again_but_the_last_token_is() -> None:
    pool = PagePool(20, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=64, max_num_seqs=8)
    first = job(pool, "a", 8)
    s.add(first)
    run_step(s)
    finish(pool, first)
    again = job(pool, "b", 8)
    s.add(again)
    assert run_step(s) == [("b", 4, True)]
    assert again.num_cached_tokens == 4


def test_a_removed_job_keeps_its_pages_for_its_owner_to_release() -> None:
    pool = PagePool(20, PAGE)
    s = Scheduler(pool, max_num_batched_tokens=4, max_num_seqs=8)
    j = job(pool, "a", 10)
    s.add(j)
    run_step(s)
    s.remove(j)
    assert run_step(s) == []
    assert len(j.page_ids) == 3
    finish(pool, j)
    assert pool.ledger().live == 0
    assert pool.ledger().cached == 1
