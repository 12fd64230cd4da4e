"""A prefill worker stops taking requests while memory is short, and goes on when it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pageferry.kvtransfer.bus import connect, ensure_groups
from pageferry.kvtransfer.device_health import HealthMonitor, host_memory
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.settings import PrefillSettings
from pageferry.kvtransfer.wire import Request, SamplingParams, pack
from pageferry.kvtransfer.worker_setup import WorkerParts
from pageferry.prefill_worker.worker import PrefillWorker

GIB = 1 << 30


class Cgroup:
    """The files of a container with a limit of 8 GiB, on a host with 64 GiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meminfo = path / "meminfo"
        kib = 64 * GIB // 1024
        self.meminfo.write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
        (path / "memory.max").write_text(f"{8 * GIB}\n")
        self.use(1 * GIB)

    def use(self, num_bytes: float, cache: float = 0) -> None:
        (self.path / "memory.current").write_text(f"{int(num_bytes)}\n")
        (self.path / "memory.stat").write_text(f"anon 1\ninactive_file {int(cache)}\n")


async def test_intake_stops_near_the_limit_and_resumes(redis_url: str, tmp_path: Path) -> None:
    cgroup = Cgroup(tmp_path)
    health = HealthMonitor.create("cpu", read_host=lambda: host_memory(cgroup.meminfo, tmp_path))
    keys = Keys("m")
    fake: Any = SimpleNamespace
    parts = WorkerParts(
        worker_id="prefill-1",
        role="prefill",
        settings=PrefillSettings(transport="tcp"),
        keys=keys,
        model=fake(fingerprint="f"),
        pool=PagePool(16, 4),
        memory=fake(layout=fake(num_layers=1), num_pages=16, mark_ready=None),
        runner=fake(),
        max_model_len=8,
        health=health,
        core_flag=None,
        tls=None,
    )
    worker = PrefillWorker(parts, PrefillSettings(redis_url=redis_url))
    roomy: Any = fake(is_usable=True, record=fake(ledger=fake(available=9)))
    worker._ferry.peers["decode-1"] = roomy
    client = connect(redis_url, keys)
    await ensure_groups(client, keys)
    await client.set(keys.gateway("gw"), b"1")
    queue = keys.prefill_queue("interactive")

    async def taken(name: str) -> bool:
        """Whether the worker takes a request now; its time is over, so it comes back at once."""
        request = Request(name, 0, "gw", (1, 2), 2, SamplingParams(), ttl_ms=0)
        await client.xadd(queue, {FIELD: pack(request.to_dict())})
        health.poll()
        await worker._claim()
        await asyncio.gather(*worker._background)
        return bool(await client.xlen(queue) == 0)

    try:
        assert await taken("a")
        cgroup.use(7.9 * GIB)
        assert not await taken("b")
        assert "cgroup memory is short" in parts.blocked
        assert (await client.xpending(queue, PREFILL_GROUP))["pending"] == 0, "left to others"
        cgroup.use(7.7 * GIB)
        assert not await taken("c"), "it must not flutter around the threshold"
        cgroup.use(7.9 * GIB, cache=4 * GIB)
        assert await taken("d"), "file cache can be had back"
    finally:
        await worker._bus.close("prefill-1")
        await client.aclose()
