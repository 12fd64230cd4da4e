"""Sharing a step's tokens between prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageferry.kvtransfer.fair_share import MAX_PASSES, Turns, share_budget


def test_what_fits_is_all_computed() -> None:
    assert share_budget([5, 7, 4], 16) == [5, 7, 4]
    assert share_budget([], 16) == []


def test_the_oldest_gets_half_and_shorter_ones_the_rest_shortest_first() -> None:
    assert share_budget([3000, 200, 40], 512) == [272, 200, 40]
    assert share_budget([3000, 300, 100], 512) == [256, 156, 100]
    assert share_budget([3000, 100, 2000, 50], 400) == [200, 100, 50, 50]


def test_a_prompt_that_is_as_long_waits_its_turn() -> None:
    assert share_budget([3000, 3000, 3000], 512) == [512, 0, 0]
    assert share_budget([100, 3000, 3000], 512) == [100, 412, 0]


@given(st.lists(st.integers(1, 50), max_size=9), st.integers(1, 64))
def test_the_budget_is_used_up_and_nobody_gets_more_than_remains(
    remaining: list[int], budget: int
) -> None:
    grants = share_budget(remaining, budget)
    assert sum(grants) == min(budget, sum(remaining))
    assert all(0 <= g <= r for g, r in zip(grants, remaining, strict=True))
    if remaining:
        assert grants[0] >= min(remaining[0], -(-budget // 2))


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.integers(1, 20)), max_size=60))
def test_no_queue_is_passed_over_for_long(rounds: list[tuple[set[str], int]]) -> None:
    """Whatever comes and goes: a queue that waits all the time gets one request in so many."""
    turns = Turns("abc")
    passed = dict.fromkeys("abc", 0)
    for waiting, room in rounds:
        for queue, most in turns.order(room):
            took = most if queue in waiting else 0
            turns.took(queue, took)
            if took:
                break
        passed = {q: passed[q] + took if q in waiting else 0 for q in "abc"}
        passed[queue] = 0
        # Each of the two others may go first once more, and a read takes up to MAX_PASSES.
        assert max(passed.values()) <= 3 * MAX_PASSES


def test_queues_are_asked_in_order_of_priority() -> None:
    assert Turns("abc").order(5) == [("a", 5), ("b", 5), ("c", 5)]
