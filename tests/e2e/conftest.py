"""Prompts in several languages and lengths, and what `transformers` makes of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT_TOKENS = 16

LENGTHS = (
    *(1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200),
    *(255, 256, 257, 300, 333, 400, 500, 511, 512, 513, 600, 700, 800, 1025),
    *(21, 23, 25, 1200, 2100),
)

SENTENCES = {
    "english": [
        "The ferry leaves the harbour at six in the morning and returns after dark.",
        "Nobody on the island remembers who built the lighthouse, or why it faces the hills.",
        "She counted the boxes twice: forty-one on the quay, three still in the hold.",
        "Rain had washed the chalk marks from the stones, so the children drew new ones.",
        "The price of coal rose by a third that winter, while wages stayed where they were.",
    ],
    "japanese": [
        "朝の船は六時に港を出て、夕方に戻ってきます。",
        "島の灯台を誰が建てたのか、覚えている人はいません。",
        "箱を二回数えたら、岸に四十一個、船にまだ三個ありました。",
        "昨日の雨で石の上の絵が消えたので、子供たちはまた描きました。",
    ],
    "russian": [
        "Паром выходит из гавани в шесть утра и возвращается после заката.",
        "Никто на острове не помнит, кто построил маяк и почему он смотрит на холмы.",
        "Она дважды пересчитала ящики: сорок один на причале, три ещё в трюме.",
        "Дождь смыл рисунки с камней, и дети нарисовали новые.",
    ],
    "code": [
        "def pages_for(tokens: int, size: int = 16) -> int:\n    return -(-tokens // size)\n",
        "for (size_t i = 0; i < count; ++i) {\n    total += values[i] * weights[i];\n}\n",
        "SELECT port, COUNT(*) AS n FROM sailings WHERE day > '2021-03-04' GROUP BY port;\n",
        "class Ledger:\n    def __init__(self):\n        self.free = []\n        self.live = {}\n",
    ],
}


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One prompt with the greedy continuation that `transformers` gives in fp32."""

    name: str
    prompt: list[int]
    text: str
    num_tokens: int


def _prompt(tokenizer: Any, language: str, length: int) -> list[int]:
    """About `length` token ids of text that ends on a whole character."""
    rng = random.Random(f"{language}{length}")
    text = ""
    while len(ids := tokenizer(text)["input_ids"]) < length:
        text += rng.choice(SENTENCES[language]) + " "
    ids = ids[:length]
    while len(ids) > 1 and tokenizer.decode(ids).endswith("\ufffd"):
        ids = ids[:-1]
    return list(ids)


@pytest.fixture(scope="session")
def oracles(demo_model: Path) -> list[Oracle]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    languages = list(SENTENCES)
    found = []
    for i, length in enumerate(LENGTHS):
        language = languages[i % len(languages)]
        prompt = _prompt(tokenizer, language, length)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        new = output[0, len(prompt) :].tolist()
        text = tokenizer.decode(new, skip_special_tokens=True)
        found.append(Oracle(f"{language}-{length}", prompt, text, len(new)))
    assert len(found) >= 40
    return found


Complete = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
async def http() -> Any:
    timeout = aiohttp.ClientTimeout(total=240)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


async def _stream(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """Collect an SSE completion into the shape of an unstreamed one."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    events = []
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        events.append(data)
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    assert events[-1] == b"[DONE]"
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


@pytest.fixture
def complete(http: aiohttp.ClientSession) -> Complete:
    """POST /v1/completions; the parsed answer, streamed ones joined."""

    async def call(url: str, **body: Any) -> dict[str, Any]:
        body = {"model": "SmolLM2-135M-Instruct", "temperature": 0, **body}
        if body.get("stream"):
            body.setdefault("stream_options", {"include_usage": True})
        async with http.post(url + "/v1/completions", json=body) as reply:
            if reply.status != 200:
                return {"status": reply.status, **await reply.json()}
            return await (_stream(reply) if body.get("stream") else reply.json())

    return call


@pytest.fixture
def gather_limited() -> Callable[..., Awaitable[list[Any]]]:
    """Run coroutines, `limit` at a time, results in order."""

    async def run(coroutines: list[Awaitable[Any]], limit: int) -> list[Any]:
        gate = asyncio.Semaphore(limit)

        async def one(coroutine: Awaitable[Any]) -> Any:
            async with gate:
                return await coroutine

        return await asyncio.gather(*(one(c) for c in coroutines))

    return run
