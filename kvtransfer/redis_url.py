"""Where Redis is: the forms of `--redis-url`, with every mistake found before anything starts.

    redis://[user:password@]host[:port][/db]                         one server
    unix://[user:password@]/path/to.sock[?db=N]                      one server, same host
    redis+cluster://[user:password@]host[:port][,host[:port]…]       Redis Cluster, some nodes
    redis+sentinel://[user:password@]host[:port][,…]/service[/db]    Sentinel, some sentinels

`rediss` instead of `redis` is TLS, to sentinels too. User and password are those of the Redis
servers. After `?` may stand `ssl_ca_certs`, `ssl_ca_path`, `ssl_certfile`, `ssl_keyfile`,
`ssl_password`, `ssl_cert_reqs` (none, optional, required), `ssl_check_hostname`,
`sentinel_username`, `sentinel_password`, `client_name` and `db`.

Messages never repeat a part of the URL that could be a password.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

FORMS = (
    "redis:// or rediss:// (one server), unix:// (a socket), redis+cluster:// or "
    "rediss+cluster://, redis+sentinel:// or rediss+sentinel://"
)
ENCODE = "in user and password / ? # @ : % must be percent-encoded"
PORTS = {"sentinel": 26379}
DEFAULT_PORT = 6379

FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = (*FILES, "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
CERT_REQS = ("none", "optional", "required")


@dataclass(frozen=True)
class RedisUrl:
    """A URL that was found to be right."""

    kind: str
    """"server", "unix", "cluster" or "sentinel"."""
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """The server, or whom to ask for it; empty for "unix"."""
    path: str = ""
    """Of the socket."""
    service: str = ""
    """The name under which sentinels know the servers."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of a connection to a Redis server: credentials, TLS, db."""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of a connection to a sentinel."""


def parse(url: str) -> RedisUrl:
    """Read a URL; `ValueError` with one sentence, which shows no secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"is malformed; {ENCODE}") from None
    base, _, form = parts.scheme.partition("+")
    if parts.scheme == "unix":
        kind = "unix"
    elif base in ("redis", "rediss") and form in ("", "cluster", "sentinel"):
        kind = form or "server"
    else:
        raise ValueError(f"must begin with {FORMS}")
    if parts.fragment or "@" in parts.query or (kind != "unix" and "@" in parts.path):
        raise ValueError(f"has # or @ where none can be; {ENCODE}")
    options = _credentials(parts)
    query = _query(parts, tls=base == "rediss", sentinel=kind == "sentinel")
    sentinel = {
        name.removeprefix("sentinel_"): query.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in query
    }
    db = query.pop("db", None)
    options |= query
    tls = {name: value for name, value in query.items() if name in TLS_OPTIONS}
    if kind == "unix":
        path = unquote(parts.path)
        if not path or parts.netloc.rpartition("@")[2]:
            raise ValueError("must name a socket by its absolute path: unix:///path/to.sock")
        return RedisUrl(kind, False, (), path, options=options | _db(db or ""))
    hosts = tuple(_host(text, kind) for text in parts.netloc.rpartition("@")[2].split(","))
    if kind == "server" and len(hosts) != 1:
        raise ValueError("names several hosts; that needs redis+cluster:// or redis+sentinel://")
    service, path = "", parts.path.strip("/")
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if not service:
            raise ValueError("must end with the service's name: redis+sentinel://host:26379/name")
    options |= _db(db or path)
    if kind == "cluster" and options.get("db"):
        raise ValueError("names a database; a Redis Cluster has only number 0")
    return RedisUrl(
        kind, base == "rediss", hosts, "", unquote(service), options, sentinel | tls
    )  # fmt: skip


def _credentials(parts: SplitResult) -> dict[str, Any]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in found.items() if value}


def _query(parts: SplitResult, *, tls: bool, sentinel: bool) -> dict[str, Any]:
    allowed: tuple[str, ...] = ("db", "client_name")
    allowed += TLS_OPTIONS if tls else ()
    allowed += ("sentinel_username", "sentinel_password") if sentinel else ()
    found: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed:
            hint = " (needs rediss)" if name in TLS_OPTIONS else ""
            raise ValueError(
                f"has an unknown option after ?: {name!r}{hint}; known are {', '.join(allowed)}"
            )
        if name in FILES and not os.path.exists(value):
            raise ValueError(f"names a file that does not exist: {name}={value!r}")
        found[name] = value
    if (reqs := found.get("ssl_cert_reqs")) and reqs not in CERT_REQS:
        raise ValueError(f"has ssl_cert_reqs={reqs!r}; expected one of {', '.join(CERT_REQS)}")
    if (check := found.get("ssl_check_hostname")) is not None:
        if check.lower() not in ("true", "false"):
            raise ValueError(f"has ssl_check_hostname={check!r}; expected true or false")
        found["ssl_check_hostname"] = check.lower() == "true"
    return found


def _host(text: str, kind: str) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]` or `[v6]:port`."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError(f"names no host; {ENCODE}")
    if not port:
        return unquote(host), PORTS.get(kind, DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"has a port that is not a number from 1 to 65535; {ENCODE}")
    return unquote(host), int(port)


def _db(text: str) -> dict[str, int]:
    if not text:
        return {}
    if not text.isdecimal():
        raise ValueError(f"has a database that is not a number; {ENCODE}")
    return {"db": int(text)}
