"""How much memory this process may still take: the host's or the cgroup's figure, the smaller."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
MAX_DEFAULT_POOL_BYTES = 4096 << 20


def default_pool_bytes(available: int) -> int:
    """KV pool of a CPU worker that was told no size: a tenth of the memory, at most 4 GiB."""
    return min(available // 10, MAX_DEFAULT_POOL_BYTES)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> tuple[int, str]:
    """(bytes, source), where source is "host" or "cgroup", whichever limits first."""
    host = _host_available(meminfo)
    limited = _cgroup_available(cgroup)
    if limited is not None and limited < host:
        return limited, "cgroup"
    return host, "host"


def _host_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no MemAvailable line")


def _cgroup_available(cgroup: Path) -> int | None:
    """Limit minus use, where reclaimable file cache does not count as use; None: no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
