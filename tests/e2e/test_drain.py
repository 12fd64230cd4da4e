"""Workers that are told to leave while they serve: nothing is lost, repeated or computed again."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import Any

import aiohttp

from pageferry.compose.drain import main as drain_main

COUNT = "1, 2, 3, 4, 5,"


async def _metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum over all labels."""
    async with http.get(url + "/metrics") as reply:
        text = await reply.text()
    found = re.findall(rf"^pageferry:{name}(?:_total)?(?:{{.*}})? (.+)$", text, re.M)
    return sum(float(value) for value in found)


async def _wait_for(condition: Any) -> Any:
    async with asyncio.timeout(60):
        while not (found := await asyncio.to_thread(condition)):
            await asyncio.sleep(0.02)
        return found


def _running(stack: Any, worker_id: str) -> int:
    return sum(w["num_running"] for w in stack.workers() if w["id"] == worker_id)


async def test_a_drained_decode_workers_streams_move_on_without_a_resubmission(
    make_stack: Any, complete: Any, http: aiohttp.ClientSession
) -> None:
    stack = make_stack(decode=2)
    options: dict[str, Any] = {"prompt": COUNT, "max_tokens": 250, "ignore_eos": True}
    expected = await complete(stack.url, **options)
    calls = [asyncio.create_task(complete(stack.url, stream=True, **options)) for _ in range(6)]
    decoders = [w for w in await asyncio.to_thread(stack.workers) if w["role"] == "decode"]
    await _wait_for(lambda: sum(_running(stack, w["id"]) for w in decoders) == 6)
    busiest = max(decoders, key=lambda w: _running(stack, w["id"]))["id"]
    leaving = _running(stack, busiest)
    assert leaving

    code = await asyncio.to_thread(drain_main, [busiest, "--url", stack.url])
    assert code == 0
    assert busiest not in {w["id"] for w in await asyncio.to_thread(stack.workers)}
    assert not all(call.done() for call in calls)

    for answer in await asyncio.wait_for(asyncio.gather(*calls), 120):
        assert answer["choices"] == [
            {k: expected["choices"][0][k] for k in ("text", "finish_reason")}
        ]
        assert answer["usage"]["completion_tokens"] == 250
    assert await _metric(http, stack.url, "request_resubmissions") == 0
    assert await _metric(http, stack.url, "worker_deaths") == 0
    gone = await _wait_for(lambda: [s for s in stack.services if s.process.poll() is not None])
    assert f"{leaving} sequences moved" in gone[0].tail()
    await asyncio.to_thread(stack.wait_idle)


async def test_without_another_worker_sequences_finish_before_the_drained_one_leaves(
    make_stack: Any, complete: Any, http: aiohttp.ClientSession
) -> None:
    stack = make_stack()
    call = asyncio.create_task(complete(stack.url, prompt=COUNT, max_tokens=100, ignore_eos=True))
    [decode] = [w for w in await asyncio.to_thread(stack.workers) if w["role"] == "decode"]
    await _wait_for(lambda: _running(stack, decode["id"]))
    for role in ("prefill", "decode"):
        [service] = stack.of(role)
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, 60) == 0
    answer = await asyncio.wait_for(call, 60)
    assert answer["usage"]["completion_tokens"] == 100
    assert await _metric(http, stack.url, "request_resubmissions") == 0


async def test_the_next_worker_is_drained_when_the_last_one_has_been_replaced(
    make_stack: Any, http: aiohttp.ClientSession, capsys: Any
) -> None:
    """And an unknown one is refused."""
    stack = make_stack()
    async with http.post(stack.url + "/v1/workers/nobody/drain") as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["code"] == "worker_not_found"
    assert await asyncio.to_thread(drain_main, ["nobody", "--url", stack.url]) == 1
    assert "nobody" in capsys.readouterr().err

    old = {w["role"]: w["id"] for w in await asyncio.to_thread(stack.workers)}
    roll = [old["decode"], old["prefill"], "--url", stack.url]
    draining = asyncio.create_task(asyncio.to_thread(drain_main, roll))
    await _wait_for(lambda: old["decode"] not in {w["id"] for w in stack.workers()})
    assert [w["state"] for w in stack.workers() if w["id"] == old["prefill"]] != ["draining"]
    stack.start("decode", kv_memory_mib=512)
    assert await draining == 0
    [left] = await asyncio.to_thread(stack.workers)
    assert (left["role"], left["state"]) == ("decode", "ready")
    assert capsys.readouterr().out.splitlines() == [
        f"{old['decode']} is draining",
        f"{old['decode']} has left",
        "waiting for a replacement: 0 of 1 decode workers ready",
        f"{old['decode']} has been replaced: 1 of 1 decode workers ready",
        f"{old['prefill']} is draining",
        f"{old['prefill']} has left",
    ]
    await _wait_for(lambda: not stack.of("prefill"))  # out of the registry, then it exits
