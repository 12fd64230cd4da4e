"""Clients: a few that ask one request after another, bursts, and some that behave badly."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp
from catalogue import STALL, STALL_ONE, Case
from client import Answer, ask, body_of, parse_events

MAX_RETRY_S = 1.0
MAX_LINE_BYTES = 1 << 20
STALLED_RCVBUF = 4096


class Load:
    """Sends requests and keeps every answer."""

    def __init__(self, gateways: Mapping[str, str], cases: Sequence[Case], seed: int) -> None:
        self.answers: list[Answer] = []
        self.open: dict[asyncio.Task[Answer], Answer] = {}
        self._gateways = list(gateways.items())
        """(program name, URL)"""
        self._cases = list(cases)
        self._seed = seed
        self._stopping = False
        self._clients: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=MAX_LINE_BYTES,
        )

    def start(self, clients: int) -> None:
        self._clients = [asyncio.create_task(self._client(i)) for i in range(clients)]

    async def stop(self) -> None:
        """No new requests; wait for those that run (each has a deadline of its own)."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        await asyncio.gather(*self.open)
        await self._session.close()

    async def one(self, case: Case, stream: bool, gateway: int = 0) -> Answer:
        """One request from start to end; `open` has it meanwhile."""
        name, url = self._gateways[gateway]
        answer = Answer(case, stream, name, asyncio.get_running_loop().time())
        task = asyncio.create_task(ask(self._session, url, answer))
        self.open[task] = answer
        try:
            await task
        finally:
            del self.open[task]
            self.answers.append(answer)
        return answer

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        while not self._stopping:
            case = rng.choice(self._cases)
            stream, gateway = rng.random() < 0.75, rng.randrange(len(self._gateways))
            answer = await self.one(case, stream, gateway)
            if not answer.complete and not answer.cut:
                await asyncio.sleep(min(MAX_RETRY_S, float(answer.retry_after or 0.5)))

    async def burst(self, count: int, rng: random.Random) -> list[Answer]:
        short = [case for case in self._cases if case.short]
        gateways = range(len(self._gateways))
        return await asyncio.gather(
            *(
                self.one(rng.choice(short), rng.random() < 0.5, rng.choice(gateways))
                for _ in range(count)
            )
        )

    def cut(self, count: int, rng: random.Random) -> int:
        """Hang up on so many open requests, those in mid-stream first; returns how many."""
        order = sorted(self.open.items(), key=lambda item: item[1].first_event is None)
        pool = order[: 2 * count]
        for task, _ in rng.sample(pool, min(count, len(pool))):
            task.cancel()
        return min(count, len(pool))

    async def stall(self, gateway: int, quiet_s: float) -> tuple[Answer, int]:
        """A client that reads nothing for `quiet_s`, then whatever is left; and the bytes read.

        It asks for one choice in good manners first, so that the prompt is cached for the others.
        """
        loop = asyncio.get_running_loop()
        await self.one(STALL_ONE, True, gateway)
        name, url = self._gateways[gateway]
        answer = Answer(STALL, True, name, loop.time(), cut=True)
        head, body = b"", b""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALLED_RCVBUF)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(quiet_s + 30):
                await loop.sock_connect(sock, (urlsplit(url).hostname, urlsplit(url).port))
                payload = json.dumps(body_of(STALL, True)).encode()
                await loop.sock_sendall(
                    sock,
                    b"POST %s HTTP/1.0\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % (STALL.path.encode(), len(payload)) + payload,
                )
                await asyncio.sleep(quiet_s)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_LINE_BYTES)
                while data := await loop.sock_recv(sock, 1 << 16):
                    body += data
        except (OSError, TimeoutError) as error:
            answer.broken = type(error).__name__
        finally:
            sock.close()
        head, _, events = body.partition(b"\r\n\r\n")
        if head.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")):
            answer.status = 200
            parse_events(answer, events)
        answer.ended = loop.time()
        self.answers.append(answer)
        return answer, len(body)
