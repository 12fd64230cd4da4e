"""The real processes under use: streams, cancels, deaths, mismatches."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import openai

COUNT = "1, 2, 3, 4, 5,"
COUNT_TEXT = " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,"
MODEL = "SmolLM2-135M-Instruct"


async def test_sixty_four_streams_each_get_their_own_text(
    make_stack: Any, complete: Any, gather_limited: Any
) -> None:
    stack = make_stack()
    starts = [100 + 7 * i for i in range(64)]
    prompts = [f"{s}, {s + 1}, {s + 2}, {s + 3}, {s + 4}," for s in starts]
    options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "stream": True}
    alone = [
        await complete(stack.url, prompt=p, **{**options, "max_tokens": 10}) for p in prompts[:8]
    ]
    together = await gather_limited([complete(stack.url, prompt=p, **options) for p in prompts], 64)
    for answer in together:
        assert answer["usage"]["completion_tokens"] == 100
        assert answer["choices"][0]["finish_reason"] == "length"
    for start, answer in zip(starts, together, strict=True):
        assert answer["choices"][0]["text"].startswith(f" {start + 5}, {start + 6},")
    for one, many in zip(alone, together, strict=False):
        assert many["choices"][0]["text"].startswith(one["choices"][0]["text"])
    await asyncio.to_thread(stack.wait_idle)


async def test_the_openai_client_works_unmodified(make_stack: Any) -> None:
    stack = make_stack()
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none") as client:
        done = await client.completions.create(
            model=MODEL, prompt=COUNT, max_tokens=64, temperature=0
        )
        assert done.choices[0].text == COUNT_TEXT
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (14, 64)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Say hi."}],
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, finish, usage = "", None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert text
        assert finish == "stop"
        assert usage is not None
        assert usage.prompt_tokens == 33


async def test_prefill_samples_one_token_whatever_the_budget(make_stack: Any) -> None:
    stack = make_stack()
    budgets: list[dict[str, Any]] = [
        {"max_completion_tokens": 12},
        {"max_tokens": 20, "extra_body": {"min_tokens": 10}},
        {"max_tokens": 30, "max_completion_tokens": 15},
    ]
    prompted = sampled = 0
    async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="none") as client:
        for i, budget in enumerate(budgets):
            done = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"{i}: count to a thousand, {COUNT} 6, 7"}],
                temperature=0,
                **budget,
            )
            assert done.usage is not None
            assert done.usage.completion_tokens == (12, 20, 15)[i]
            details = done.usage.prompt_tokens_details
            prompted += done.usage.prompt_tokens - ((details and details.cached_tokens) or 0)
            sampled += done.usage.completion_tokens

    def counted() -> tuple[int, int]:
        stats = {w["role"]: w["stats"] for w in stack.workers()}
        return (
            stats["prefill"]["worker_prompt_tokens_total"],
            stats["decode"]["worker_generation_tokens_total"],
        )

    # A worker publishes its statistics with each heartbeat.
    async with asyncio.timeout(20):
        while await asyncio.to_thread(counted) != (prompted, sampled - len(budgets)):
            await asyncio.sleep(0.1)


async def test_a_disconnect_gives_pages_back_in_every_state(make_stack: Any) -> None:
    stack = make_stack()
    body = {
        "model": MODEL,
        "prompt": [504] * 3000,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    for wait_s in (0.02, 0.3, 1.0, 4.0):
        async with aiohttp.ClientSession() as session:
            calls = [
                asyncio.create_task(session.post(stack.url + "/v1/completions", json=body))
                for _ in range(4)
            ]
            await asyncio.sleep(wait_s)
            for call in calls:
                call.cancel()
            for reply in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(reply, aiohttp.ClientResponse):
                    reply.close()
    await asyncio.to_thread(stack.wait_idle, 5)


async def test_killing_prefill_in_mid_prompt_ends_in_a_retried_request(
    make_stack: Any, complete: Any
) -> None:
    stack = make_stack(prefill=2, worker_settings={"max_num_batched_tokens": 64})
    call = asyncio.create_task(complete(stack.url, prompt=[504, 28] * 1400, max_tokens=4))
    victim = await asyncio.to_thread(_wait_for_busy, stack, "prefill")
    victim.kill()
    answer = await asyncio.wait_for(call, 120)
    expected = await complete(stack.url, prompt=[504, 28] * 1400, max_tokens=4)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    await asyncio.to_thread(stack.wait_idle)


async def test_killing_decode_in_mid_stream_continues_the_text(
    make_stack: Any, complete: Any
) -> None:
    stack = make_stack(decode=2)
    call = asyncio.create_task(complete(stack.url, prompt=COUNT, max_tokens=64, stream=True))
    victim = await asyncio.to_thread(_wait_for_busy, stack, "decode")
    victim.kill()
    answer = await asyncio.wait_for(call, 60)
    assert answer["choices"][0]["text"] == COUNT_TEXT
    assert answer["usage"]["completion_tokens"] == 64


async def test_without_a_prefill_worker_decode_prefills_itself(
    make_stack: Any, complete: Any
) -> None:
    stack = make_stack()
    stack.of("prefill")[0].kill()
    answer = await asyncio.wait_for(complete(stack.url, prompt=COUNT, max_tokens=64), 60)
    assert answer["choices"][0]["text"] == COUNT_TEXT
    # One that cannot reach the decode worker is as good as none.
    stack.start("prefill", cluster_key="another")
    deadline = time.monotonic() + 60
    while not any(w["state"] == "unconnected" for w in await asyncio.to_thread(stack.workers)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    answer = await asyncio.wait_for(complete(stack.url, prompt=COUNT, max_tokens=64), 60)
    assert answer["choices"][0]["text"] == COUNT_TEXT


async def test_without_any_worker_the_refusal_is_honest(make_stack: Any, complete: Any) -> None:
    stack = make_stack(gateway_settings={"worker_wait_s": 2})
    for service in (*stack.of("prefill"), *stack.of("decode")):
        service.kill()
    # The first is accepted before the deaths are noticed, the second after.
    for _ in range(2):
        answer = await asyncio.wait_for(complete(stack.url, prompt=COUNT), 30)
        assert answer["status"] == 503
        assert answer["error"]["code"] == "no_decode_worker"


async def test_a_worker_with_another_layout_is_refused_by_name(
    make_stack: Any, complete: Any
) -> None:
    stack = make_stack()
    stack.start("decode", page_size=32, kv_memory_mib=64)
    deadline = time.monotonic() + 60
    while not (found := [r for w in stack.workers() for r in w["refusals"]]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert "page_size" in found[0]
    assert "16" in found[0]
    assert "32" in found[0]
    answer = await complete(stack.url, prompt=COUNT, max_tokens=64)
    assert answer["choices"][0]["text"] == COUNT_TEXT


async def test_a_small_pool_preempts_and_every_request_finishes(
    make_stack: Any, complete: Any, gather_limited: Any
) -> None:
    stack = make_stack(decode_settings={"num_pages": 24})
    calls = [complete(stack.url, prompt=COUNT, max_tokens=200, ignore_eos=True) for _ in range(8)]
    answers = await asyncio.wait_for(gather_limited(calls, 8), 200)
    texts = {a["choices"][0]["text"] for a in answers}
    assert len(texts) == 1
    assert texts.pop().startswith(COUNT_TEXT)
    await asyncio.to_thread(stack.wait_idle)


async def test_any_prompt_length_around_chunk_and_page(make_stack: Any, complete: Any) -> None:
    stack = make_stack()
    for length in (255, 256, 257, 511, 512, 513, 514, 1023, 1025, 2047, 2049):
        answer = await complete(stack.url, prompt=[504] * length, max_tokens=2)
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["completion_tokens"] == 2


def _wait_for_busy(stack: Any, role: str) -> Any:
    """The service of that role whose ledger shows live pages."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for worker in stack.workers():
            if worker["role"] == role and worker["ledger"]["live"]:
                return next(s for s in stack.of(role) if s.process.pid == worker["pid"])
        time.sleep(0.05)
    raise AssertionError(f"no {role} worker became busy")
