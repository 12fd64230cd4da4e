"""Devices, data types and cores: the choice, and errors that say what is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pageferry.kernels import devices
from pageferry.kernels.devices import DeviceError, parse_cores, pick_device, pick_dtype, pin_cores

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@no_gpu
def test_auto_is_the_cpu_without_a_gpu() -> None:
    assert pick_device("auto") == pick_device("cpu") == CPU


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_missing_gpu_is_an_error_and_not_a_fallback(name: str) -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        pick_device(name)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "", "CPU", "cuda:-1"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(DeviceError, match="is not"):
        pick_device(name)


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16\n", torch.bfloat16),
        ("flags : fpu amx_bf16\n", torch.bfloat16),
        ("Features : fp asimd bf16\n", torch.bfloat16),
        ("flags : fpu avx2 avx512f\n", torch.float32),
        ("", torch.float32),
    ],
)
def test_auto_dtype_follows_the_cpu(tmp_path: Path, cpuinfo: str, dtype: torch.dtype) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert pick_dtype("auto", CPU, path) == dtype


def test_no_cpuinfo_means_no_flags(tmp_path: Path) -> None:
    assert devices.cpu_flags(tmp_path / "none") == frozenset()


def test_named_dtypes() -> None:
    assert pick_dtype("float16", CPU) == torch.float16
    with pytest.raises(DeviceError, match="int8"):
        pick_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("1000 100000\n", 1), ("max 100000\n", None)],
)
def test_container_quota(tmp_path: Path, text: str, cores: int | None) -> None:
    path = tmp_path / "cpu.max"
    assert devices.quota_cores(path) is None
    path.write_text(text)
    assert devices.quota_cores(path) == cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("5, 0,2-3,2", [0, 2, 3, 5])],
)
def test_core_lists(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["a", "0-", "3-1", "0,,1", "-1", "0-99999"])
def test_bad_core_lists(text: str) -> None:
    with pytest.raises(DeviceError, match="cores"):
        parse_cores(text)


def test_cores_that_are_not_there() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(DeviceError, match="4000 not available; this process may use"):
        pin_cores("0,4000")
    assert os.sched_getaffinity(0) == before


def test_pinning_binds_the_process_and_sets_the_threads() -> None:
    core = max(os.sched_getaffinity(0))
    code = (
        "import os, torch; from pageferry.kernels.devices import pin_cores\n"
        f"print(pin_cores('{core}'), os.sched_getaffinity(0), torch.get_num_threads(),"
        " torch.get_num_interop_threads())\n"
        f"print(pin_cores(''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"[{core}] {{{core}}} 1 1\n[{core}]\n"
