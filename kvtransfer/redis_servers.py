"""Connections that find their server when they connect, and leave it when it is the wrong one.

All keys of one model lie in one hash slot, so a Redis Cluster is for us what Sentinel's servers
are: a single server that may be another one tomorrow. A client is therefore always redis-py's
plain one; only its connections differ:

1. connect: ask the sentinels for the service's primary, or a cluster node for the slot's owner
   (each time another one first: one may be frozen or know only the past);
2. use: a server that says that it is not, or no more, the one to write to (READONLY, MOVED,
   CLUSTERDOWN, MASTERDOWN) loses the connection, and the command fails as it does when a
   connection breaks. Whoever tries again finds the new server by 1.

Sources: Redis documentation, "Guidelines for Redis clients with support for Redis Sentinel" and
"Redis cluster specification".
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable
from typing import Any, Protocol

from redis.asyncio import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from pageferry.kvtransfer.redis_url import RedisUrl

ASK_S = 2.0
"""How long one sentinel or cluster node may take to say where the server is."""
MAX_KNOWN_NODES = 64
MAX_ASKED = 3
"""In one attempt to connect; the next attempt begins with another one."""

Address = tuple[str, int]


class WrongServer(ConnectionError):
    """The server answered that it does not, or no longer, take our commands."""


class _Guarded(AbstractConnection):
    """Says ConnectionError, not RuntimeError or AttributeError, when it was closed meanwhile.

    uvloop raises RuntimeError for a write to a transport whose server hung up; redis-py has no
    writer any more when another task has disconnected the pool.
    """

    async def _send_packed_command(self, command: Iterable[bytes]) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionResetError("the connection was closed")
        await super()._send_packed_command(command)


class UnixConnection(_Guarded, UnixDomainSocketConnection):
    pass


class _Leaving(_Guarded, Connection):
    """Disconnects from a wrong server."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except (ReadOnlyError, MovedError, ClusterDownError) as error:
            await self.disconnect(nowait=True)
            raise WrongServer(self._why(error)) from error

    def _why(self, error: ResponseError) -> str:
        where = f"{self.host}:{self.port}"
        if isinstance(error, MovedError):
            return f"{where} is a cluster node without our keys (redis+cluster:// follows them)"
        return f"{where}: {error}"


class ServerConnection(_Leaving):
    pass


class TlsServerConnection(_Leaving, SSLConnection):
    pass


class Finder(Protocol):
    async def find(self) -> Address: ...

    async def check(self, connection: Connection) -> None:
        """`RedisError` if the found server is not what it should be."""


class FoundConnection(_Leaving):
    """Asks `finder` for its address, every time that it connects."""

    def __init__(self, *, finder: Finder, **kwargs: Any) -> None:
        super().__init__(host="", port=0, **kwargs)
        self._finder = finder

    async def _connect(self) -> None:
        self.host, self.port = await self._finder.find()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health=check_health)
        await self._finder.check(self)


class TlsFoundConnection(FoundConnection, SSLConnection):
    pass


class _Asking:
    """Asks the known processes one after another, beginning with another one each time."""

    def __init__(self, url: RedisUrl, options: dict[str, Any]) -> None:
        self._given = url.hosts
        self._known = collections.deque(url.hosts)
        self._options = {
            **options,
            "ssl": url.tls,
            "protocol": 2,
            "socket_timeout": ASK_S,
            "socket_connect_timeout": ASK_S,
            "retry": Retry(NoBackoff(), 0),
        }

    async def find(self) -> Address:
        """The server's address; `redis.ConnectionError` if nobody knows it."""
        failures = []
        in_order = list(self._known)  # Several connections may be looking at the same time.
        self._known.rotate(-1)
        for host, port in in_order[:MAX_ASKED]:
            try:
                async with (
                    asyncio.timeout(ASK_S),
                    Redis(host=host, port=port, **self._options) as r,
                ):
                    return await self._ask(r, host)
            except (RedisError, OSError, TimeoutError) as error:
                failures.append(f"{host}:{port}: {str(error) or type(error).__name__}")
        raise ConnectionError("; ".join(failures))

    async def _ask(self, asked: Any, host: str) -> Address:
        raise NotImplementedError

    async def check(self, connection: Connection) -> None:
        del connection


class SentinelFinder(_Asking):
    def __init__(self, url: RedisUrl) -> None:
        super().__init__(url, url.sentinel_options)
        self._service = url.service

    async def _ask(self, asked: Any, host: str) -> Address:
        found = await asked.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if found is None:
            raise ConnectionError(f"this sentinel knows no service {self._service!r}")
        return found[0].decode(), int(found[1])

    async def check(self, connection: Connection) -> None:
        """A sentinel's word may be old: the server must agree that it is the primary."""
        await connection.send_command("ROLE")
        role = (await connection.read_response())[0]
        if role != b"master":
            raise WrongServer(f"{connection.host}:{connection.port} is no primary now")


class ClusterFinder(_Asking):
    """Finds the primary that serves the slot of `key`; without a key any node will do."""

    def __init__(self, url: RedisUrl, key: str) -> None:
        super().__init__(url, {n: v for n, v in url.options.items() if n != "db"})
        self._slot = key_slot(key.encode()) if key else -1

    async def _ask(self, asked: Any, host: str) -> Address:
        owner = None
        nodes: list[Address] = []
        for first, last, *serving in await asked.execute_command("CLUSTER", "SLOTS"):
            # A node that does not know its own name leaves it out.
            those = [(name.decode() if name else host, port) for name, port, *_ in serving]
            nodes += those
            if first <= self._slot <= last or self._slot < 0:
                owner = those[0]
        self._remember(nodes)
        if owner is None:
            raise ConnectionError(f"no node of the cluster serves slot {self._slot} now")
        return owner

    def _remember(self, nodes: Iterable[Address]) -> None:
        """Those of the URL may all have been replaced one day."""
        for node in nodes:
            if node not in self._known and len(self._known) < MAX_KNOWN_NODES:
                self._known.append(node)
        for node in [n for n in self._known if n not in nodes and n not in self._given]:
            self._known.remove(node)


def connection_arguments(url: RedisUrl, key: str) -> dict[str, Any]:
    """What a connection pool needs to reach the server that holds `key`."""
    if url.kind == "unix":
        return {
            **url.options, "connection_class": UnixConnection, "path": url.path
        }  # fmt: skip
    if url.kind == "server":
        host, port = url.hosts[0]
        kind = TlsServerConnection if url.tls else ServerConnection
        return {**url.options, "connection_class": kind, "host": host, "port": port}
    finder = SentinelFinder(url) if url.kind == "sentinel" else ClusterFinder(url, key)
    found = TlsFoundConnection if url.tls else FoundConnection
    return {**url.options, "connection_class": found, "finder": finder}
