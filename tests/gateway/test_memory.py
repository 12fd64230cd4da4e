"""What clients can make a gateway hold is bounded: bodies, waiting calls, answers nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pageferry.gateway import bodies, dispatch
from pageferry.gateway.choices import Choice
from pageferry.gateway.errors import ApiError
from pageferry.gateway.requests import Generation
from pageferry.kvtransfer.wire import Event, Kind

Cluster = Any
MIB = 1 << 20
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"


class RawClient:
    """A connection that sends what it likes and reads when it likes."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def send(cls, cluster: Cluster, data: bytes) -> RawClient:
        client = cls()
        address = ("127.0.0.1", cluster.gateways[0].port)
        await client._loop.sock_connect(client.socket, address)
        async with asyncio.timeout(10):
            await client._loop.sock_sendall(client.socket, data)
        return client

    async def read(self) -> bytes:
        async with asyncio.timeout(10):
            return await self._loop.sock_recv(self.socket, 65536)

    def close(self) -> None:
        self.socket.close()


def call(size: int = 0, **fields: Any) -> bytes:
    """A whole call, padded to `size` bytes of body."""
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 3, **fields}).encode()
    body = body.ljust(size)
    return HEAD.format(len(body)).encode() + body


async def test_bodies_that_arrive_together_are_bounded(cluster: Cluster) -> None:
    await cluster.gateway(max_body_mib=1)
    await cluster.worker("decode")
    announced = await RawClient.send(cluster, HEAD.format(MIB).encode())
    unfinished = call(size=MIB)[:-1]
    clients = [await RawClient.send(cluster, unfinished) for _ in range(bodies.BODIES_AT_ONCE)]
    room = bodies.BODIES_AT_ONCE
    held = cluster.gateways[0].admission.bodies
    await cluster.until(lambda: held.held == room * (MIB - 1))
    refused = await RawClient.send(cluster, unfinished)
    answer = await refused.read()
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After" in answer
    assert b"bytes of requests are being read" in answer
    for client in clients[1:]:
        client.close()
    await clients[0]._loop.sock_sendall(clients[0].socket, b" ")
    assert (await clients[0].read()).startswith(b"HTTP/1.1 200 ")
    for client in (announced, refused, clients[0]):
        client.close()
    await cluster.until(lambda: not held.held)
    assert (await cluster.post(prompt="abc", max_tokens=3))[0] == 200


async def test_a_body_that_never_ends_is_given_up(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.3)
    client = await RawClient.send(service, call()[:-1])
    answer = await client.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer
    assert service.gateways[0].admission.preparing == 0
    client.close()


async def test_whole_answers_that_nobody_reads_are_dropped(cluster: Cluster) -> None:
    await cluster.gateway(slow_client_s=0.4)
    await cluster.worker("decode")
    # Six megabytes: the escaped prompts, without a token computed.
    size = {"prompt": ["é" * 2000] * 32, "n": 16, "echo": True, "max_tokens": 0}
    client = await RawClient.send(cluster, call(**size))
    neighbour, body = await cluster.post(prompt="abc", max_tokens=9)
    assert (neighbour, body["choices"][0]["text"]) == (200, "abcabcabc")
    await asyncio.sleep(1)
    got = 0
    with contextlib.suppress(ConnectionResetError):
        while part := await client.read():
            got += len(part)
    assert 0 < got < 6 * 10**6 < len(json.dumps(["é" * 2000] * 512)), "it was not cut off"
    client.close()


ENDINGS = {
    "refused": call(temperature="hot"),
    "too long": call(prompt="a" * 5000),
    "failed": call(seed=1),
    "failed stream": call(seed=2, stream=True),
    "unexpected": call(seed=8),
    "unexpected stream": call(seed=9, stream=True),
    "not taken": call(),
    "404": call().replace(b"completions", b"nothing"),
    "405": call().replace(b"POST", b"PUT"),
    "malformed": call().replace(b"Host", b"no header\r\nHost"),
    "given up": call()[:-1],
    "malformed behind": call() + b"\0" * 60_000,
    "pipelined": call() * 9 + b"POST",
}


async def test_nothing_of_a_call_waits_for_the_garbage_collector(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rare (`main.tune_interpreter`): in cycles, what clients send would add up for long."""

    def fail(event: Event) -> list[Event]:
        seed = next(w for w in worker.claimed if w.request_id == event.request_id).sampling.seed
        late = event.kind is Kind.TOKENS and event.index == seed - 1
        return [dataclasses.replace(event, kind=Kind.ERROR, code="broken") if late else event]

    take = Choice.take

    def break_late(choice: Choice) -> Any:
        if choice.generation.delivered and choice.generation.sampling.seed in (8, 9):
            raise KeyError("unexpected")
        return take(choice)

    monkeypatch.setattr(Choice, "take", break_late)
    worker = service.workers[1]
    for each in service.workers:
        each.mangle = fail
    kinds = (web.Request, RequestHandler, ApiError, Generation)
    gc.collect()
    gc.freeze()  # else each collection looks at everything that was imported
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for name, data in ENDINGS.items():
            limit = -1.0 if name == "not taken" else 8.0
            monkeypatch.setattr(dispatch, "SUBMIT_TIMEOUT_S", limit)
            client = await RawClient.send(service, data)
            await asyncio.sleep(0.1)
            client.close()
            await service.until(lambda: not service.generations())
            await asyncio.sleep(0.05)
            gc.collect()
            assert not [kept for kept in gc.garbage if isinstance(kept, kinds)], name
            gc.garbage.clear()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert await service.metric("request_success_total", finished_reason="error") == 5
    assert await service.metric("internal_errors_total") == 2


async def test_a_burst_gets_answers_or_honest_refusals(cluster: Cluster) -> None:
    """A thousand calls, a hundred at a time, room for fifty of them."""
    limit = 50
    gateway = await cluster.gateway(max_queued_requests=limit)
    await cluster.worker("decode")
    await cluster.worker("prefill")
    most = 0

    async def one(i: int) -> int:
        nonlocal most
        body = {"model": "tiny", "prompt": f"{i:04}", "max_tokens": 4, "n": 1 + i % 2}
        async with cluster.http.post(f"{cluster.base}/v1/completions", json=body) as reply:
            most = max(most, gateway.dispatcher.num_waiting)
            answer = await reply.json()
            if reply.status == 200:
                assert [c["text"] for c in answer["choices"]] == [f"{i:04}"] * (1 + i % 2)
            else:
                assert int(reply.headers["Retry-After"]) >= 1
                # The workers of this test share its thread; some may miss a heartbeat.
                assert answer["error"]["code"] in ("overloaded", "no_decode_worker")
            return reply.status

    statuses = await asyncio.gather(*map(one, range(1000)))
    assert {200, 429} <= set(statuses) <= {200, 429, 503}
    assert most <= limit
    assert statuses.count(200) >= limit // 2
    assert not gateway.dispatcher.generations
    assert gateway.admission.preparing == 0
    reasons = ("stop", "length", "abort", "error")
    ended = [await cluster.metric("request_success_total", finished_reason=r) for r in reasons]
    assert sum(ended) == await cluster.metric("requests_accepted_total")
