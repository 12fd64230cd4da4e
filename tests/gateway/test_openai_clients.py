"""The official client, sync and async, against the gateway with fake workers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

Cluster = Any
MESSAGES: Any = [{"role": "user", "content": "Say hi."}]


async def test_async_chat(service: Cluster) -> None:
    client = service.openai()
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content


async def test_async_stream_with_usage(service: Cluster) -> None:
    client = service.openai()
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_async_stream_helper(service: Cluster) -> None:
    """The helper checks chunks against its own accumulated model."""
    client = service.openai()
    async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"


async def test_sync_client(service: Cluster) -> None:
    def work() -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=f"{service.base}/v1", api_key="none") as client:
            whole = client.completions.create(model="tiny", prompt="abc", max_tokens=5)
            stream = client.completions.create(
                model="tiny", prompt="abc", max_tokens=5, stream=True
            )
            assert [model.id for model in client.models.list()] == ["tiny"]
            return whole.choices[0].text, [chunk.choices[0].text for chunk in stream]

    whole, pieces = await asyncio.to_thread(work)
    assert whole == "".join(pieces) == "abcab"


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "no"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": [65] * 5000}, openai.BadRequestError, "context_length_exceeded"),
        ({"n": 100}, openai.BadRequestError, None),
    ],
)
async def test_permanent_errors_are_not_retried(
    service: Cluster, fields: Any, kind: type[openai.APIStatusError], code: str | None
) -> None:
    client = service.openai(max_retries=2)
    with pytest.raises(kind) as raised:
        await client.completions.create(**{"model": "tiny", "prompt": "a", **fields})
    assert raised.value.code == code
    status = str(raised.value.status_code)
    assert await service.metric("requests_refused_total", status=status) == 1


async def test_error_in_a_stream_raises(service: Cluster) -> None:
    service.workers[0].step_s = 0.05
    client = service.openai()
    stream = await client.completions.create(
        model="tiny", prompt="abc" * 20, max_tokens=50, stream=True
    )
    with pytest.raises(openai.APIError):  # noqa: PT012
        async for _ in stream:
            service.generations()[0].deadline = 0


async def test_keepalive_comments_are_no_chunks(cluster: Cluster) -> None:
    await cluster.gateway(keepalive_s=0.1)
    await cluster.worker("decode")
    await cluster.worker("prefill", prefill_s=0.6)
    stream = await cluster.openai().completions.create(
        model="tiny", prompt="abc", max_tokens=3, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"
