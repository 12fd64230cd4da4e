"""The page pool against a naive model, and its promises one by one."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pageferry.kvtransfer.pool import OutOfPages, PagePool, PageState, PoolCorrupted

NUM_PAGES = 8
PAGE_SIZE = 2


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: a state and a reference count per page, and the tokens that each page was given.

    It does not know hashes; a match must return pages whose remembered tokens are the prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE, b"ns")
        self.reserved: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.sequences: list[list[int]] = []  # each holds one reference on each of its pages
        self.contents: dict[int, tuple[tuple[int, ...], str]] = {}  # registered: whole prefix, salt
        self.cached_order: list[int] = []

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.sequences for page in pages)

    def taken(self) -> set[int]:
        aside = {p for group in self.reserved + self.quarantined for p in group}
        return aside | set(self.held())

    def took(self, pages: list[int], before: set[int], available_free: int) -> None:
        assert len(set(pages)) == len(pages)
        assert not set(pages) & before
        evicted = [page for page in pages if page in self.cached_order]
        assert evicted == self.cached_order[: max(0, len(pages) - available_free)]
        for page in evicted:
            self.cached_order.remove(page)
            del self.contents[page]

    @rule(count=st.integers(0, NUM_PAGES + 1), live=st.booleans())
    def take(self, count: int, live: bool) -> None:
        before = self.taken()
        free = NUM_PAGES - len(before) - len(self.cached_order)
        take = self.pool.allocate if live else self.pool.reserve
        if count > NUM_PAGES - len(before):
            with pytest.raises(OutOfPages):
                take(count)
            return
        pages = take(count)
        self.took(pages, before, free)
        (self.sequences if live else self.reserved).append(pages)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), what=st.sampled_from(["commit", "cancel", "quarantine"]))
    def settle(self, data: st.DataObject, what: str) -> None:
        pages = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        getattr(self.pool, what)(pages)
        if what == "commit":
            self.sequences.append(pages)
        elif what == "quarantine":
            self.quarantined.append(pages)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def absolve(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.quarantined) - 1))
        self.pool.absolve(self.quarantined.pop(which))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        pages = list(data.draw(st.sampled_from(self.sequences)))
        self.pool.retain(pages)
        self.sequences.append(pages)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(pages)
        held = self.held()
        for page in reversed(pages):
            if not held[page] and page in self.contents:
                self.cached_order.append(page)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), seed=st.integers(0, 3), salt=st.sampled_from(["", "a"]))
    def register(self, data: st.DataObject, seed: int, salt: str) -> None:
        pages = data.draw(st.sampled_from(self.sequences))
        tokens = prompt(seed, len(pages))
        if any(page in self.contents for page in pages):
            return  # a page is written once; registering it as something else is a caller's bug
        self.pool.register(pages, self.pool.hash_prefix(tokens, salt))
        known = set(self.contents.values())
        for index, page in enumerate(pages):
            content = (tuple(tokens[: (index + 1) * PAGE_SIZE]), salt)
            if content not in known:
                self.contents[page] = content

    @rule(seed=st.integers(0, 3), length=st.integers(0, 4), salt=st.sampled_from(["", "a"]))
    def match(self, seed: int, length: int, salt: str) -> None:
        tokens = prompt(seed, length)
        hashes = self.pool.hash_prefix(tokens, salt)
        by_content = {content: page for page, content in self.contents.items()}
        expected = []
        for index in range(length):
            page = by_content.get((tuple(tokens[: (index + 1) * PAGE_SIZE]), salt))
            if page is None:
                break
            expected.append(page)
        assert self.pool.peek(hashes) == len(expected)
        assert self.pool.match(hashes) == expected
        self.cached_order = [page for page in self.cached_order if page not in expected]
        self.sequences.append(expected)

    @invariant()
    def sound(self) -> None:
        held = self.held()
        self.pool.check_integrity(held)
        ledger = self.pool.ledger()
        assert ledger.reserved == sum(map(len, self.reserved))
        assert ledger.quarantined == sum(map(len, self.quarantined))
        assert ledger.live == len(held)
        assert ledger.cached == len(self.cached_order)
        assert ledger.total == NUM_PAGES


def prompt(seed: int, pages: int) -> list[int]:
    """Prompts of different seeds share their first page at most."""
    return [0, 0, *(seed * 100 + i for i in range(2, pages * PAGE_SIZE))][: pages * PAGE_SIZE]


PoolAgainstModel.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_a_wrong_transition_names_page_and_state_and_changes_nothing():
    pool = PagePool(4, 2)
    (live,), (reserved,) = pool.allocate(1), pool.reserve(1)
    before = pool.ledger()
    for call, page, words in [
        (pool.commit, live, f"commit: page {live} is live, not reserved"),
        (pool.cancel, live, f"cancel: page {live} is live, not reserved"),
        (pool.quarantine, live, f"quarantine: page {live} is live, not reserved"),
        (pool.absolve, reserved, f"absolve: page {reserved} is reserved, not quarantined"),
        (pool.release, reserved, f"release: page {reserved} is reserved, not live"),
        (pool.retain, 3, "retain: page 3 is free, not live"),
        (pool.release, 99, "release: page 99 is not one of 4"),
        (pool.release, -1, "release: page -1 is not one of 4"),
    ]:
        with pytest.raises(PoolCorrupted, match=words):
            call([page])
    with pytest.raises(PoolCorrupted, match=f"release: page {live} has 1 references, not 2"):
        pool.release([live, live])
    with pytest.raises(PoolCorrupted, match=f"page {reserved} .* named twice"):
        pool.cancel([reserved, reserved])
    assert pool.ledger() == before
    pool.release([live])
    with pytest.raises(PoolCorrupted, match=f"release: page {live} is free"):
        pool.release([live])


def test_reserving_is_all_or_nothing():
    pool = PagePool(4, 2)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 4 available"):
        pool.reserve(3)
    assert pool.ledger().free == 2


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_start():
    pool = PagePool(6, 2)
    hashes = {}
    for name in "abc":
        tokens = [ord(name)] * 4
        hashes[name] = pool.hash_prefix(tokens)
        pages = pool.allocate(2)
        pool.register(pages, hashes[name])
        pool.release(pages)
    pool.release(pool.match(hashes["a"]))  # a is now the youngest
    pool.reserve(1)
    assert [pool.peek(hashes[name]) for name in "abc"] == [2, 1, 2]
    pool.reserve(1)
    assert [pool.peek(hashes[name]) for name in "abc"] == [2, 0, 2]
    pool.reserve(2)
    assert [pool.peek(hashes[name]) for name in "abc"] == [2, 0, 0]
    assert pool.evictions == 4


def test_a_recycled_page_is_not_found_under_its_old_hash():
    pool = PagePool(1, 2)
    hashes = pool.hash_prefix([1, 2])
    pages = pool.allocate(1)
    pool.register(pages, hashes)
    pool.release(pages)
    again = pool.reserve(1)
    assert again == pages
    assert pool.match(hashes) == []
    pool.cancel(again)
    assert pool.ledger().free == 1


def test_the_first_page_for_a_hash_stays_the_one():
    pool = PagePool(4, 2)
    hashes = pool.hash_prefix([1, 2])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first, hashes)
    pool.register(second, hashes)
    pool.register(first, hashes)
    assert pool.match(hashes) == first
    pool.release(second)
    assert pool.state(second[0]) is PageState.FREE
    with pytest.raises(PoolCorrupted, match=f"page {first[0]} already holds"):
        pool.register(first, pool.hash_prefix([3, 4]))


def test_only_full_pages_have_hashes():
    pool = PagePool(4, 4)
    assert [len(pool.hash_prefix(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert pool.hash_prefix(range(8))[:1] == pool.hash_prefix(range(7))


def test_hashes_are_long_and_cover_namespace_salt_size_and_history():
    pool = PagePool(4, 2, b"ns")
    digest = pool.hash_prefix([1, 23, 1, 23], "salt")
    assert all(len(part) == 32 for part in digest)
    others = [
        pool.hash_prefix([1, 23, 1, 23]),
        pool.hash_prefix([12, 3, 1, 23], "salt"),
        pool.hash_prefix([1, 23, 1, 23], "sal"),
        PagePool(4, 2, b"n").hash_prefix([1, 23, 1, 23], "ssalt"),  # n + ssalt == ns + salt
        PagePool(4, 2, b"nssa").hash_prefix([1, 23, 1, 23], "lt"),
        PagePool(4, 1, b"ns").hash_prefix([1, 23, 1, 23], "salt")[1::2],
    ]
    seen = {part for other in others for part in other}
    assert not seen & set(digest)
    assert digest[0] != digest[1]  # same tokens, other history
    assert PagePool(9, 2, b"ns").hash_prefix([1, 23, 1, 23], "salt") == digest


def test_ids_beyond_one_byte_are_not_folded():
    pool = PagePool(4, 1)
    assert pool.hash_prefix([256]) != pool.hash_prefix([1])
    with pytest.raises(OverflowError):
        pool.hash_prefix([2**31])


def test_without_prefix_cache_nothing_is_registered():
    pool = PagePool(2, 2, prefix_cache=False)
    hashes = pool.hash_prefix([1, 2])
    pages = pool.allocate(1)
    pool.register(pages, hashes)
    assert pool.match(hashes) == []
    pool.release(pages)
    assert pool.ledger().free == 2


def test_grants_are_runs_of_neighbours_where_possible():
    pool = PagePool(8, 2)
    pages = pool.allocate(8)
    random.Random(1).shuffle(pages)
    pool.release(pages)
    assert pool.reserve(8) == list(range(8))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p._refs.__setitem__(0, 5), "page 0 is live with 5 references, its holders"),
        (lambda p: p._refs.__setitem__(3, 1), "page 3 is free with 1 references"),
        (lambda p: p._free.append(3), "free list disagrees with the states of pages"),
        (lambda p: p._free.remove(3), r"free list disagrees with the states of pages \[3\]"),
        (lambda p: p._page_of.__setitem__(b"x" * 32, 3), "names page 3, not back"),
        (lambda p: p._hash_of.__setitem__(3, b"x" * 32), "page 3 is free but registered"),
        (lambda p: p._state.__setitem__(3, PageState.RESERVED), "free, counted"),
    ],
)
def test_the_check_notices_damage(damage, words):
    pool = PagePool(4, 2)
    held = pool.allocate(1)
    pool.check_integrity({held[0]: 1})
    damage(pool)
    with pytest.raises(PoolCorrupted, match=words):
        pool.check_integrity({held[0]: 1})


def test_threads_never_share_a_page():
    pool = PagePool(16, 2)
    owners = [0] * 16
    clashes = []

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                pages = pool.allocate(rng.randint(1, 5))
            except OutOfPages:
                continue
            for page in pages:
                owners[page] += 1
                if owners[page] != 1:
                    clashes.append(page)
            for page in pages:
                owners[page] -= 1
            pool.release(pages)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    pool.check_integrity({})
    assert pool.ledger().free == 16
