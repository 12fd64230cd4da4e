"""Tokens in live pages against counting slot by slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageferry.kvtransfer.page_use import live_tokens

PAGE = 4


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6, unique=True), st.integers(0, 30)))
)
def test_every_filled_slot_counts_once(tables: list[tuple[list[int], int]]) -> None:
    filled = {
        (page, slot)
        for pages, tokens in tables
        for index, page in enumerate(pages)
        for slot in range(min(PAGE, max(0, tokens - index * PAGE)))
    }
    assert live_tokens(tables, PAGE) == len(filled)


def test_two_sequences_with_a_common_prefix() -> None:
    assert live_tokens([([7, 8, 1], 10), ([7, 8, 2], 9)], PAGE) == 8 + 2 + 1
