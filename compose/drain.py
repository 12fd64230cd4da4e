"""`pageferry drain WORKER [WORKER ...]`: workers finish or hand over what they have, then leave.

1. Asks a gateway to drain the first one (POST /v1/workers/{id}/drain).
2. Waits until it is out of the registry.
3. Waits until as many workers of its role are ready as before the first drain: under
   `pageferry up` and in containers that restart, a fresh worker takes its place.
4. Goes on with the next one. After the last one there is no step 3 without --replaced.

So the workers that are named are replaced one after another, without a request noticing.
Exit code 0: all have left; 1: refused, or a worker did not leave or was not replaced within
--timeout-s: the workers after it were not drained.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote

import aiohttp

from pageferry.kvtransfer.settings import env_name, from_args, setting

PROG = "pageferry drain"
USAGE = f"{PROG} WORKER [WORKER ...]"
POLL_S = 0.25
REPLY_S = 10.0


@dataclass(frozen=True)
class DrainSettings:
    url: str = setting("http://127.0.0.1:8000", "A gateway of the workers.")
    api_key: str = setting("", "Key for the gateway, if it wants one.")
    timeout_s: float = setting(
        60.0, "Seconds to wait for a worker to leave, and again for its replacement to be ready."
    )
    replaced: bool = setting(
        False, "Also wait until the last one has been replaced: use it in scripts."
    )


class Stopped(Exception):
    """The gateway refused, or a wait was in vain; the text is for the operator."""


class Registry:
    """A gateway's list of workers, as /v1/workers shows it."""

    def __init__(self, session: aiohttp.ClientSession, settings: DrainSettings) -> None:
        if not settings.url.startswith(("http://", "https://")):
            raise Stopped(f"--url {settings.url} has no scheme: write http://{settings.url}")
        self._session = session
        self._timeout_s = settings.timeout_s
        self.url = f"{settings.url.rstrip('/')}/v1/workers"

    async def records(self) -> list[dict[str, Any]]:
        return list((await self._json("GET", self.url))["data"])

    async def drain(self, worker: str) -> None:
        await self._json("POST", f"{self.url}/{quote(worker, safe='')}/drain")

    async def wait(self, done: Callable[[list[dict[str, Any]]], bool]) -> bool:
        """Whether the list became so in time."""
        deadline = time.monotonic() + self._timeout_s
        while not done(await self.records()):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _json(self, method: str, url: str) -> Any:
        async with self._session.request(method, url) as reply:
            try:
                body = await reply.json()
            except (aiohttp.ContentTypeError, ValueError):
                raise Stopped(f"{url} answers {reply.status}, and not with JSON") from None
            if reply.status >= 400:
                try:
                    raise Stopped(body["error"]["message"])
                except (KeyError, TypeError):
                    text = f"{url} answers {reply.status} in another form than ours"
                    raise Stopped(text) from None
            return body


async def drain(pending: list[str], settings: DrainSettings) -> None:
    """Drain all, one after another. A worker is taken off the list when it has been told.

    `Stopped`, `TimeoutError` or `aiohttp.ClientError`: those still in the list were not drained.
    """
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    timeout = aiohttp.ClientTimeout(total=REPLY_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        registry = Registry(session, settings)
        records = await registry.records()
        roles = {record["id"]: record["role"] for record in records}
        if unknown := [worker for worker in pending if worker not in roles]:
            raise Stopped(f"no worker has the id {unknown[0]!r}; GET {registry.url} lists them")
        # One that an earlier call has told already is no longer ready, and still to be replaced.
        wanted = collections.Counter(
            r["role"] for r in records if r["state"] == "ready" or r["id"] in pending
        )
        while pending:
            worker = pending[0]
            await registry.drain(worker)
            del pending[0]
            print(f"{worker} is draining", flush=True)
            if not await registry.wait(functools.partial(_without, worker)):
                raise Stopped(f"{worker} is still there after {settings.timeout_s:g} s")
            print(f"{worker} has left", flush=True)
            if pending or settings.replaced:
                await _replaced(registry, worker, roles[worker], wanted[roles[worker]])


async def _replaced(registry: Registry, worker: str, role: str, wanted: int) -> None:
    """Until `wanted` workers of the role are ready."""
    ready = -1

    def enough(records: list[dict[str, Any]]) -> bool:
        nonlocal ready
        before, ready = ready, sum(r["role"] == role and r["state"] == "ready" for r in records)
        if ready < wanted and ready != before:
            print(f"waiting for a replacement: {_count(ready, wanted, role)}", flush=True)
        return ready >= wanted

    started = time.monotonic()
    if not await registry.wait(enough):
        waited = time.monotonic() - started
        raise Stopped(
            f"nothing has replaced {worker} after {waited:.0f} s: {_count(ready, wanted, role)}"
        )
    print(f"{worker} has been replaced: {_count(ready, wanted, role)}", flush=True)


def _count(ready: int, wanted: int, role: str) -> str:
    return f"{ready} of {wanted} {role} workers ready"


def _without(worker: str, records: list[dict[str, Any]]) -> bool:
    return all(record["id"] != worker for record in records)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    pending = list(dict.fromkeys(argv[:flags]))
    if not pending and not {"-h", "--help"} & set(argv):
        print(f"usage: {USAGE} [options] (see --help)", file=sys.stderr)
        return 2
    settings = from_args(DrainSettings, USAGE, __doc__ or "", argv[flags:], _env())
    several = len(pending) > 1
    try:
        asyncio.run(drain(pending, settings))
        return 0
    except (Stopped, aiohttp.ClientError, TimeoutError) as error:
        code, reason = 1, str(error) or type(error).__name__
    except KeyboardInterrupt:
        code, reason = 130, "interrupted"
    rest = f"; not drained: {', '.join(pending)}" if several and pending else ""
    print(f"{PROG}: {reason}{rest}", file=sys.stderr)
    return code


def _env() -> dict[str, str]:
    """Our own variables only: one of `pageferry up` in the same shell is no mistake."""
    names = {env_name(f.name) for f in fields(DrainSettings)}
    return {name: os.environ[name] for name in names & os.environ.keys()}


if __name__ == "__main__":
    sys.exit(main())
