"""Shared pool memory: zeroed, bounded, attachable, closable in any order."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory, adjacent_runs, copy_views

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


@pytest.mark.parametrize("seed", range(20))
def test_copying_between_differently_cut_views(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 60)
    source, target = bytearray(rng.randbytes(size)), bytearray(size)

    def cut(data: bytearray) -> list[memoryview]:
        marks = sorted({0, size, *(rng.randint(0, size) for _ in range(4))})
        return [memoryview(data)[a:b] for a, b in itertools.pairwise(marks)]

    copy_views(cut(target), cut(source))
    assert target == source


def test_copying_between_sizes_that_differ_is_an_error():
    with pytest.raises(ValueError, match="different sizes"):
        copy_views([memoryview(bytearray(3))], [memoryview(bytearray(4))])
