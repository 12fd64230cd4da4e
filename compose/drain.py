"""`pageferry drain WORKER`: a worker finishes or hands over what it has, then leaves.

Asks a gateway (POST /v1/workers/{id}/drain) and waits until the worker is out of the registry.
Under `pageferry up` and in containers that restart, a fresh worker takes its place: drain the
workers one after another to restart them all without a request noticing.
Exit code 0: gone; 1: refused, or still there after --timeout-s.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from pageferry.kvtransfer.settings import from_args, setting

POLL_S = 0.25
REPLY_S = 10.0


@dataclass(frozen=True)
class DrainSettings:
    url: str = setting("http://127.0.0.1:8000", "A gateway of the workers.")
    api_key: str = setting("", "Key for the gateway, if it wants one.")
    timeout_s: float = setting(60.0, "Seconds to wait for the worker to leave.")


class Refused(Exception):
    """The gateway did not do it; the text is its reason."""


async def drain(worker: str, settings: DrainSettings) -> bool:
    """Whether the worker left in time. `Refused` or `aiohttp.ClientError` when nobody told it."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    timeout = aiohttp.ClientTimeout(total=REPLY_S)
    workers = f"{settings.url.rstrip('/')}/v1/workers"
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        await _json(session, "POST", f"{workers}/{quote(worker, safe='')}/drain")
        print(f"{worker} is draining", flush=True)
        deadline = time.monotonic() + settings.timeout_s
        while worker in await _ids(session, workers):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True


async def _ids(session: aiohttp.ClientSession, workers: str) -> set[str]:
    return {record["id"] for record in (await _json(session, "GET", workers))["data"]}


async def _json(session: aiohttp.ClientSession, method: str, url: str) -> Any:
    async with session.request(method, url) as reply:
        try:
            body = await reply.json()
        except (aiohttp.ContentTypeError, ValueError):
            raise Refused(f"{url} answers {reply.status}, and not with JSON") from None
        if reply.status >= 400:
            try:
                raise Refused(body["error"]["message"])
            except (KeyError, TypeError):
                raise Refused(f"{url} answers {reply.status} in another form than ours") from None
        return body


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    help_wanted = any(flag in argv for flag in ("-h", "--help"))
    if not help_wanted and (not argv or argv[0].startswith("-")):
        print("usage: pageferry drain WORKER [options] (see --help)", file=sys.stderr)
        return 2
    worker = "" if help_wanted else argv.pop(0)
    settings = from_args(DrainSettings, "pageferry drain WORKER", __doc__ or "", argv, _env())
    try:
        left = asyncio.run(drain(worker, settings))
    except (Refused, aiohttp.ClientError, TimeoutError) as error:
        print(f"pageferry drain: {error or type(error).__name__}", file=sys.stderr)
        return 1
    if not left:
        print(f"{worker} is still there after {settings.timeout_s:g} s", file=sys.stderr)
        return 1
    print(f"{worker} has left")
    return 0


def _env() -> dict[str, str]:
    """Only our own variable: those of the services mean other things here."""
    name = "PAGEFERRY_API_KEY"
    return {name: os.environ[name]} if name in os.environ else {}


if __name__ == "__main__":
    sys.exit(main())
