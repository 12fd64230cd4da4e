"""How much memory this process may still take: the host's or a control group's figure.

Every group that it is in limits it: its own and all above. Where they lie below /sys/fs/cgroup:

- version 2: at the root, or in `unified` beside version 1 (hybrid);
- version 1: in `memory`.

In a container with a namespace of its own the own group is the root of what is mounted. Elsewhere
(a systemd unit, the host's names in version 1) it lies below, by the path in /proc/self/cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
MAX_DEFAULT_POOL_BYTES = 4096 << 20

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with the limit and the use; name of the reclaimable file cache in memory.stat. Use counts
the groups below, and so must the cache."""
MOUNTS = (("", V2), ("unified", V2), ("memory", V1))


class HostMemory(NamedTuple):
    """All in bytes."""

    available: int
    total: int
    source: str
    """What limits first: "host" or "cgroup"."""


def default_pool_bytes(available: int) -> int:
    """KV pool of a CPU worker that was told no size: a tenth of the memory, at most 4 GiB."""
    return min(available // 10, MAX_DEFAULT_POOL_BYTES)


def available_bytes() -> tuple[int, str]:
    """(bytes, source) as in `HostMemory`."""
    found = read_memory()
    return found.available, found.source


def read_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_GROUPS
) -> HostMemory:
    """The host's or a group's, whichever has least available. `OSError` or `ValueError`."""
    limits = [HostMemory(*limit, "cgroup") for limit in _limits(cgroup, own)]
    return min((_host(meminfo), *limits), key=lambda found: found.available)


def _host(meminfo: Path) -> HostMemory:
    lines = (line.partition(":") for line in meminfo.read_text().splitlines())
    fields = {name: text.split() for name, _, text in lines}
    for name in ("MemAvailable", "MemTotal"):
        if name not in fields:
            raise OSError(f"{meminfo} has no {name} line")
    available, total = (int(fields[name][0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return HostMemory(available, total, "host")


def _limits(cgroup: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Bytes available and in all, by each group that has a limit."""
    groups = {V2: {PurePosixPath()}, V1: {PurePosixPath()}}
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            groups[V1 if controllers else V2].update((group, *group.parents))
    for mount, names in MOUNTS:
        for group in groups[names]:
            limit = _limit(cgroup / mount / group, *names)
            if limit is not None:
                yield limit


def _limit(group: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    """Limit minus use, where reclaimable file cache does not count as use, and the limit.

    None: no limit, or no such group. Version 1 says "no limit" with more bytes than any host has.
    """
    try:
        text = (group / limit).read_text().strip()
        if text == "max":
            return None
        in_use = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    return max(0, int(text) - in_use + int(stat.get(cache, 0))), int(text)
