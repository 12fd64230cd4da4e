"""Sharing a step's tokens between prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageferry.kvtransfer.fair_share import share_budget


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
