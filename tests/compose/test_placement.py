"""Cores and memory shared among workers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageferry.compose.placement import (
    allowed_cores,
    check_memory,
    count_gpus,
    divide_cores,
    divide_gpus,
    parse_cores,
    pool_bytes,
    siblings_together,
)
from pageferry.kvtransfer.settings import SettingsError, WorkerSettings

MIB = 2**20


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 2, ["0", "1"]),
        ([0, 1], 1, ["0,1"]),
        ([0, 1], 4, ["0", "1", "0", "1"]),
        ([0, 1, 2, 3, 4], 2, ["0,1", "2,3,4"]),
        ([0, 4, 1, 5], 2, ["0,4", "1,5"]),
    ],
)
def test_divide_cores(cores, workers, shares):
    assert divide_cores(cores, workers) == shares


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 64))
def test_no_core_is_idle_and_none_is_shared_without_need(cores, workers):
    shares = [parse_cores(share) for share in divide_cores(sorted(cores), workers)]
    assert len(shares) == workers
    assert all(shares)
    used = [core for share in shares for core in share]
    if workers <= len(cores):
        assert sorted(used) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        counts = [used.count(core) for core in cores]
        assert max(counts) - min(counts) <= 1


def test_hardware_threads_of_one_core_go_to_one_worker(tmp_path):
    for core in range(4):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core % 2}\n")
    assert siblings_together(range(4), tmp_path) == [0, 2, 1, 3]
    assert siblings_together(range(4), tmp_path / "none") == [0, 1, 2, 3]


def test_cores_that_are_not_there_are_refused():
    with pytest.raises(SettingsError, match="core 4095 is not available"):
        allowed_cores("4095")
    with pytest.raises(SettingsError, match="expected a list such as"):
        allowed_cores("a-b")


@pytest.fixture
def model_dir(tmp_path):
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(10 * MIB))
    return tmp_path


def test_pool_size_follows_the_setting_that_wins(model_dir):
    assert pool_bytes(model_dir, WorkerSettings(), 1000 * MIB) == 100 * MIB
    assert pool_bytes(model_dir, WorkerSettings(), 10**15) == 4096 * MIB
    assert pool_bytes(model_dir, WorkerSettings(kv_memory_mib=7), 10**9) == 7 * MIB
    # 2 (K, V) * 3 heads * 64 values * 16 tokens * 2 bytes * 30 layers
    assert pool_bytes(model_dir, WorkerSettings(num_pages=5), 10**9) == 5 * 368_640


def test_too_little_memory_is_one_sentence_with_the_figures(model_dir):
    settings = WorkerSettings(kv_memory_mib=100)
    fits = 2 * (10 + 100 + 400) * MIB
    check_memory(model_dir, settings, 2, fits, "cgroup")
    with pytest.raises(SettingsError) as caught:
        check_memory(model_dir, settings, 2, fits - 1, "cgroup")
    assert str(caught.value) == (
        "2 workers need about 1.0 GiB (each 10 MiB of weights, 100 MiB of KV pages and 400 MiB for "
        "the process), but only 1.0 GiB are available (cgroup); take fewer workers, a smaller "
        "model or a lower --kv-memory-mib"
    )
    with pytest.raises(SettingsError, match="each 20 MiB of weights"):
        check_memory(model_dir, WorkerSettings(dtype="float32"), 2, MIB, "host")


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        (2, 2, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        (1, 2, [("cuda:0", 0.45), ("cuda:0", 0.45)]),
        (2, 3, [("cuda:0", 0.45), ("cuda:1", 0.9), ("cuda:0", 0.45)]),
        (4, 2, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
    ],
)
def test_divide_gpus(gpus, workers, expected):
    assert divide_gpus(gpus, workers, 0.9) == expected


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("GPU-1a,MIG-2b", 2)],
)
def test_count_gpus(visible, count, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    assert count_gpus(visible, tmp_path) == count
    assert count_gpus(visible, tmp_path / "none") == 0
