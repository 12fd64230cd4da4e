"""The memory that a process may still take, from made-up /proc and cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageferry.kvtransfer.device_health import host_memory
from pageferry.kvtransfer.host_memory import available_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.mkdir()
    return path


def limit(cgroup: Path, maximum: int | str, current: int, inactive_file: int) -> None:
    (cgroup / "memory.max").write_text(f"{maximum}\n")
    (cgroup / "memory.current").write_text(f"{current}\n")
    (cgroup / "memory.stat").write_text(f"anon {current}\ninactive_file {inactive_file}\n")


@pytest.mark.parametrize(
    ("maximum", "current", "inactive_file", "available", "total", "source"),
    [
        pytest.param("max", 3 * GIB, 0, 8 * GIB, 16 * GIB, "host", id="no limit"),
        pytest.param(4 * GIB, 1 * GIB, 0, 3 * GIB, 4 * GIB, "cgroup", id="limit below the host"),
        pytest.param(4 * GIB, 3 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, "cgroup", id="file cache"),
        pytest.param(64 * GIB, 1 * GIB, 0, 8 * GIB, 16 * GIB, "host", id="limit above the host"),
        pytest.param(2 * GIB, 3 * GIB, 0, 0, 2 * GIB, "cgroup", id="limit lowered below the use"),
    ],
)
def test_the_smaller_of_host_and_cgroup(
    meminfo: Path,
    cgroup: Path,
    maximum: int | str,
    current: int,
    inactive_file: int,
    available: int,
    total: int,
    source: str,
) -> None:
    limit(cgroup, maximum, current, inactive_file)
    assert available_bytes(meminfo, cgroup) == (available, source)
    memory = host_memory(meminfo, cgroup)
    assert (memory.free_bytes, memory.total_bytes, memory.source) == (available, total, source)


def test_no_cgroup_files_means_the_host(meminfo: Path, cgroup: Path) -> None:
    assert available_bytes(meminfo, cgroup) == (8 * GIB, "host")


@pytest.mark.parametrize("line", ["MemAvailable", "MemTotal"])
def test_a_figure_that_is_missing_is_an_error_and_not_zero(
    meminfo: Path, cgroup: Path, line: str
) -> None:
    meminfo.write_text(MEMINFO.replace(line, "Other"))
    with pytest.raises((OSError, ValueError), match=line):
        host_memory(meminfo, cgroup)


def test_this_machine() -> None:
    memory = host_memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.source in ("host", "cgroup")
