"""Workers freeze and die at chosen moments of many kinds of requests: the answers stay the same.

One stack serves the same calls again and again, each time with other faults. Weights are float32,
so that rounding cannot change a text with the batch it is computed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

MODEL = "SmolLM2-135M-Instruct"
COUNT = "1, 2, 3, 4, 5,"
LEASE_S = 1.0
SETTINGS = {"dtype": "float32", "kv_memory_mib": 256, "lease_s": LEASE_S, "drain_s": 2}
CHAT = [{"role": "user", "content": "Name three rivers."}]
STORY = "The ferry left the harbour at six, and nobody on board"

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": COUNT, "temperature": 0, "max_tokens": 24, "stream": True},
    "sampled": {"prompt": STORY, "seed": 7, "top_p": 0.9, "top_k": 50, "max_tokens": 20},
    "penalties": {
        "prompt": STORY,
        "seed": 3,
        "stream": True,
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.9,
        "max_tokens": 20,
    },
    "stop": {
        "prompt": COUNT,
        "temperature": 0,
        "stop": [" 10, 1"],
        "max_tokens": 60,
        "stream": True,
    },
    "stop-shown": {
        "prompt": COUNT,
        "temperature": 0,
        "stop": ["8, 9, 10"],
        "include_stop_str_in_output": True,
        "max_tokens": 60,
    },
    "logprobs": {"prompt": STORY, "temperature": 0, "logprobs": 3, "max_tokens": 16},
    "chat": {
        "messages": CHAT,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 16,
        "stream": True,
    },
    "choices": {"prompt": [STORY, COUNT], "n": 2, "seed": 11, "max_tokens": 14, "stream": True},
    "echo": {"prompt": COUNT, "echo": True, "temperature": 0, "max_tokens": 16},
    "least": {
        "messages": [{"role": "user", "content": "Say hi."}],
        "seed": 5,
        "min_tokens": 12,
        "max_tokens": 24,
    },
    "long": {"prompt": [504, 28, 351] * 200, "temperature": 0, "max_tokens": 10, "stream": True},
}


class Client:
    """Makes all calls at once, and knows how many events their streams have brought."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.num_events = 0
        self._session = session

    async def round(self) -> dict[str, Any]:
        """Every call's answer by name, in one shape for streams and whole bodies."""
        self.num_events = 0
        answers = await asyncio.gather(*map(self.call, CALLS.values()))
        return dict(zip(CALLS, answers, strict=True))

    async def call(self, body: dict[str, Any]) -> dict[str, Any]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"model": MODEL, **body}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        async with self._session.post(self.url + path, json=body) as reply:
            if reply.status != 200:
                return {"status": reply.status, "error": (await reply.json())["error"]["code"]}
            if not body.get("stream"):
                whole = await reply.json()
                return joined([whole], whole["usage"])
            events = [event async for event in self._events(reply)]
        if "error" in events[-1]:
            return {"status": 200, "error": events[-1]["error"]["code"]}
        assert events.pop() == {"done": True}
        return joined(events, events[-1]["usage"])

    async def _events(self, reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        async for line in reply.content:
            if line.startswith(b"data: "):
                self.num_events += 1
                done = line.strip() == b"data: [DONE]"
                yield {"done": True} if done else json.loads(line[6:])

    async def events(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.num_events < count:
                await asyncio.sleep(0.002)


def joined(parts: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """Text, reasons and logprobs per choice; logprobs as (token, value) with room for rounding."""
    choices: dict[int, dict[str, Any]] = {}
    for part in parts:
        for piece in part["choices"]:
            new = {"text": "", "finish": [], "tokens": [], "values": []}
            choice = choices.setdefault(piece["index"], new)
            said = piece.get("message") or piece.get("delta")
            choice["text"] += piece["text"] if said is None else said.get("content") or ""
            if piece["finish_reason"]:
                choice["finish"].append(piece["finish_reason"])
            add_logprobs(choice, piece["logprobs"])
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": [choices[i] for i in sorted(choices)], **counts}


def add_logprobs(choice: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    if logprobs is None:
        return
    if "content" in logprobs:
        chosen = [(item["token"], item["logprob"]) for item in logprobs["content"]]
        tops = [[t["logprob"] for t in item["top_logprobs"]] for item in logprobs["content"]]
    else:
        chosen = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
    choice["tokens"] += [token for token, _ in chosen]
    choice["values"] += [value for _, value in chosen]
    choice["values"] += [value for top in tops for value in top]


def without_values(answer: dict[str, Any]) -> dict[str, Any]:
    choices = [{k: v for k, v in c.items() if k != "values"} for c in answer["choices"]]
    return {**answer, "choices": choices}


def check(answer: dict[str, Any], right: dict[str, Any], name: str) -> None:
    assert "choices" in answer, (name, answer)
    assert without_values(answer) == without_values(right), name
    for choice, other in zip(answer["choices"], right["choices"], strict=True):
        assert choice["values"] == pytest.approx(other["values"], abs=2e-3), name


@contextlib.contextmanager
def frozen(*services: Any) -> Any:
    for service in services:
        service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for service in services:
            service.process.send_signal(signal.SIGCONT)


def check_sanity(right: dict[str, Any]) -> None:
    """The undisturbed answers are what the calls are meant to bring about."""
    for name, answer in right.items():
        assert all(len(c["finish"]) == 1 for c in answer["choices"]), name
    reason = {name: answer["choices"][0]["finish"][0] for name, answer in right.items()}
    assert (reason["greedy"], reason["stop"], reason["stop-shown"]) == ("length", "stop", "stop")
    assert right["stop"]["choices"][0]["text"].endswith(" 9,")
    assert right["stop-shown"]["choices"][0]["text"].endswith("8, 9, 10")
    assert right["echo"]["choices"][0]["text"].startswith(COUNT + " 6, 7,")
    assert len(right["logprobs"]["choices"][0]["values"]) == 16 * 4
    assert len({c["text"] for c in right["choices"]["choices"]}) == 4
    assert right["least"]["completion_tokens"] >= 12


@pytest.mark.timeout(300)
async def test_answers_survive_whatever_happens_to_workers(make_stack: Any) -> None:
    stack = make_stack(
        prefill=2,
        decode=2,
        worker_settings=SETTINGS,
        prefill_settings={"max_num_batched_tokens": 128},
        gateway_settings={"lease_s": LEASE_S, "worker_wait_s": 2},
    )
    (p0, p1), (d0, d1) = stack.of("prefill"), stack.of("decode")
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(stack.url, session)
        right = await client.round()
        check_sanity(right)
        num_events = client.num_events
        assert (len(stack.of("prefill")), len(stack.of("decode"))) == (2, 2)

        async def again(*faults: Callable[[], Any]) -> None:
            answers, *_ = await asyncio.gather(client.round(), *(fault() for fault in faults))
            for name, answer in answers.items():
                check(answer, right[name], name)

        async def queued() -> None:
            """Nobody prefills: what lies in the queue goes to the decode workers."""
            with frozen(p0, p1):
                await client.events(1)

        async def mid_decode() -> None:
            await client.events(num_events // 2)
            with frozen(d0):
                await asyncio.sleep(2 * LEASE_S)

        await again(queued, mid_decode)
        assert (len(stack.of("prefill")), len(stack.of("decode"))) == (2, 2)

        async def prefilling() -> None:
            await asyncio.sleep(0.3)
            p0.kill()

        async def first_token() -> None:
            await client.events(1)
            with frozen(d1):
                await client.events(num_events // 2)

        async def last_tokens() -> None:
            await client.events(num_events * 9 // 10)
            d0.kill()

        await again(prefilling, first_token, last_tokens)
        await asyncio.to_thread(stack.wait_idle)

        async def nobody_left() -> None:
            await client.events(num_events // 4)
            d1.kill()

        answers, _ = await asyncio.gather(client.round(), nobody_left())
        failed = {n: a for n, a in answers.items() if "error" in a}
        for name in answers.keys() - failed.keys():
            check(answers[name], right[name], name)
        assert {a["error"] for a in failed.values()} == {"no_decode_worker"}
        assert {a["status"] for a in failed.values()} == {200, 503}
