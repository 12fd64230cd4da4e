"""The memory that a process may still take, from made-up /proc and cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageferry.kvtransfer.device_health import host_memory
from pageferry.kvtransfer.host_memory import available_bytes, read_memory

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
    assert read_memory(meminfo, cgroup, cgroup / "none") == (available, total, source)
    memory = host_memory(meminfo, cgroup)
    assert (memory.free_bytes, memory.total_bytes, memory.source) == (available, total, source)


V1_NO_LIMIT = 9223372036854771712


def limit_v1(group: Path, maximum: int, current: int, inactive_file: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{maximum}\n")
    (group / "memory.usage_in_bytes").write_text(f"{current}\n")
    stat = f"inactive_file 4096\nrss {current}\ntotal_inactive_file {inactive_file}\n"
    (group / "memory.stat").write_text(stat)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """/proc/self/cgroup of a host with version 1, and with version 2 beside it."""
    path = tmp_path / "own"
    path.write_text("9:name=systemd:/x\n4:hugetlb,memory:/a/b\n1:cpu:/c\n0::/d/e\n")
    return path


@pytest.mark.parametrize(
    ("limits", "available", "total"),
    [
        pytest.param({"a/b": (4, 3, 2)}, 3, 4, id="own group, file cache"),
        pytest.param({"a": (4, 1, 0)}, 3, 4, id="the group above"),
        pytest.param({"": (4, 1, 0)}, 3, 4, id="a container's root, known by the host's name"),
        pytest.param({"a/b": (4, 1, 0), "a": (6, 5, 0)}, 1, 6, id="the tightest of two"),
        pytest.param({"a/b": (2, 3, 0)}, 0, 2, id="limit lowered below the use"),
    ],
)
def test_version_1_and_the_groups_above(
    meminfo: Path,
    cgroup: Path,
    own: Path,
    limits: dict[str, tuple[int, int, int]],
    available: int,
    total: int,
) -> None:
    for group in ("", "a", "a/b"):
        limit_v1(cgroup / "memory" / group, V1_NO_LIMIT, 3 * GIB, GIB)
    for group, (maximum, current, cache) in limits.items():
        limit_v1(cgroup / "memory" / group, maximum * GIB, current * GIB, cache * GIB)
    assert read_memory(meminfo, cgroup, own) == (available * GIB, total * GIB, "cgroup")


def test_groups_of_others_and_of_other_controllers_do_not_count(
    meminfo: Path, cgroup: Path, own: Path
) -> None:
    for group in ("", "a", "a/b"):
        limit_v1(cgroup / "memory" / group, V1_NO_LIMIT, 3 * GIB, 0)
    for group in ("a/b/below", "a/other", "c", "x", "d/e"):
        limit_v1(cgroup / "memory" / group, GIB, 0, 0)
    assert read_memory(meminfo, cgroup, own) == (8 * GIB, 16 * GIB, "host")


@pytest.mark.parametrize("mount", ["", "unified"])
@pytest.mark.parametrize("group", ["d/e", "d"])
def test_version_2_below_the_root_and_beside_version_1(
    meminfo: Path, cgroup: Path, own: Path, mount: str, group: str
) -> None:
    limit_v1(cgroup / "memory", V1_NO_LIMIT, 3 * GIB, 0)
    (cgroup / mount / "d/e").mkdir(parents=True)
    limit(cgroup / mount / "d", "max", 3 * GIB, 0)
    limit(cgroup / mount / "d/e", "max", 3 * GIB, 0)
    limit(cgroup / mount / group, 4 * GIB, 3 * GIB, GIB)
    assert read_memory(meminfo, cgroup, own) == (2 * GIB, 4 * GIB, "cgroup")


def test_no_cgroup_files_means_the_host(meminfo: Path, cgroup: Path) -> None:
    assert read_memory(meminfo, cgroup, cgroup / "none") == (8 * GIB, 16 * GIB, "host")


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
    assert available_bytes()[1] in ("host", "cgroup")
