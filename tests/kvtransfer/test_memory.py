"""Shared pool memory: zeroed, bounded, attachable, closable in any order."""

from __future__ import annotations

import os
import random

import pytest

from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory, adjacent_runs, shared_runs

LAYOUT = KVLayout(dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=1, head_dim=8)


@pytest.fixture
def memory():
    memory = PoolMemory.create(LAYOUT, 5)
    yield memory
    memory.close()


def test_it_starts_zeroed_and_views_follow_the_layout(memory):
    assert len(memory.buffer) == LAYOUT.pool_bytes(5) == 2 * 5 * 128
    assert not any(memory.buffer)
    memory.view(1, 2, 2)[:] = b"\x07" * 256
    start = LAYOUT.offset(5, 1, 2)
    assert bytes(memory.buffer[start : start + 256]) == b"\x07" * 256
    assert sum(memory.buffer) == 7 * 256


@pytest.mark.parametrize(
    "where", [(2, 0, 1), (-1, 0, 1), (0, 5, 1), (0, 4, 2), (0, -1, 1), (0, 0, 6), (0, 3, -1)]
)
def test_views_do_not_leave_the_pool(memory, where):
    with pytest.raises(IndexError):
        memory.view(*where)


def test_an_attached_pool_is_the_same_memory_and_outlives_its_creator(memory):
    other = PoolMemory.attach(memory.fd, LAYOUT, 5)
    memory.view(0, 1, 1)[:] = b"\x05" * 128
    memory.close()
    assert bytes(other.view(0, 1, 1)) == b"\x05" * 128
    other.close()
    other.close()


def test_attaching_with_another_size_is_an_error(memory):
    with pytest.raises(ValueError, match="has 1280 bytes, 6 pages need 1536"):
        PoolMemory.attach(memory.fd, LAYOUT, 6)


def test_no_peer_can_shrink_the_memory_under_us(memory):
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1 << 20)


def test_closing_leaves_views_that_others_hold_alone(memory):
    view = memory.view(0, 0, 1)
    memory.close()
    view[:] = b"\x01" * 128
    assert view[5] == 1


def test_closing_frees_the_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    memory = PoolMemory.create(LAYOUT, 5)
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_runs_merge_only_ascending_neighbours():
    assert adjacent_runs([]) == []
    assert adjacent_runs([3, 4, 5, 9, 8, 8, 0]) == [(3, 3), (9, 1), (8, 1), (8, 1), (0, 1)]


def test_shared_runs_merge_what_is_adjacent_on_both_sides():
    assert shared_runs([], []) == []
    assert shared_runs([3, 4, 5, 6, 9], [0, 1, 7, 8, 9]) == [(3, 0, 2), (5, 7, 2), (9, 9, 1)]
    with pytest.raises(ValueError, match="argument 2 is"):
        shared_runs([1], [1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_writing_puts_every_page_of_a_row_where_it_belongs_and_nothing_else(memory, seed):
    rng = random.Random(seed)
    row = rng.randbytes(9 * LAYOUT.page_bytes)
    pages, positions = rng.sample(range(5), 4), rng.sample(range(9), 4)
    memory.write(1, shared_runs(pages, positions), memoryview(bytearray(row)))
    for page in range(5):
        expected = bytes(LAYOUT.page_bytes)
        if page in pages:
            at = positions[pages.index(page)] * LAYOUT.page_bytes
            expected = row[at : at + LAYOUT.page_bytes]
        assert bytes(memory.view(1, page, 1)) == expected
    assert not any(memory.view(0, 0, 5))


OUTSIDE = [(5, 0, 1), (-1, 0, 1), (4, 0, 2), (0, 3, 1), (0, 2, 2), (0, -1, 1)]


@pytest.mark.parametrize("run", OUTSIDE)
def test_writing_stays_within_the_pool_and_the_row(memory, run):
    with pytest.raises(IndexError):
        memory.write(0, [(0, 0, 1), run], memoryview(bytearray(3 * LAYOUT.page_bytes)))
    assert not any(memory.buffer)


@pytest.mark.parametrize("pages", [[0, 5], [-1], [3, 4, 5]])
def test_gathering_stays_within_the_pool(memory, pages):
    with pytest.raises(IndexError, match="are not within 5"):
        memory.gather(0, pages)
