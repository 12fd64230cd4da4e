"""Chat and SSE: chunks, when headers go out, keepalives, errors, slow and lost clients."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from pageferry.gateway.choices import Piece
from pageferry.gateway.responses import ChatShape, CompletionShape
from pageferry.gateway.text import Tokenizer

Cluster = Any
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say hi."}]


async def test_whole_answer(service: Cluster) -> None:
    status, body = await service.post(CHAT, messages=MESSAGES, max_tokens=5)
    assert status == 200
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert isinstance(body["created"], int)


async def test_chat_fills_the_context_by_default(service: Cluster) -> None:
    status, body = await service.post(CHAT, messages=MESSAGES)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "stop"
    room = 4096 - body["usage"]["prompt_tokens"]
    assert service.workers[1].claimed[0].sampling.max_tokens == room


async def test_chunks(service: Cluster) -> None:
    events = await service.events(CHAT, messages=MESSAGES, max_tokens=9)
    *chunks, done = events
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["content"], "a role without content would pass for the first token"
    assert all("role" not in d for d in deltas[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert not any("usage" in c for c in chunks)


async def test_joined_chunks_equal_the_whole_answer(service: Cluster) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 40, "stop": ["user"]}
    _, body = await service.post(CHAT, **fields)
    events = await service.events(CHAT, **fields)
    joined = "".join(e["choices"][0]["delta"]["content"] for e in events[:-1])
    assert joined == body["choices"][0]["message"]["content"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_chunk(service: Cluster, n: int) -> None:
    fields = {"prompt": "abc", "max_tokens": 5, "n": n}
    _, body = await service.post(**fields)
    events = await service.events(**fields, stream_options={"include_usage": True})
    *chunks, last, done = events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == body["usage"]
    assert all(c["choices"] and c["usage"] is None for c in chunks)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
async def test_usage_so_far_in_every_chunk(service: Cluster, path: str, n: int) -> None:
    """The counts of a chunk are those of its choice alone; the last one's, of the whole call."""
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "日本"}
    fields = {**prompt, "max_tokens": 8, "n": n}
    _, body = await service.post(path, **fields)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await service.events(path, **fields, stream_options=options)
    *chunks, last, done = events
    assert (last["choices"], done) == ([], "[DONE]")
    assert last["usage"] == body["usage"]
    for index in range(n):
        usages = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        # What is not shown at once (a special token, parts of a character) counts with what is.
        assert set(counts) <= ({2, 3, 4, 5, 6, 7, 8} if path == CHAT else {3, 6, 8})
        assert counts == sorted(set(counts))
        assert counts[-1] == 8
        for usage, count in zip(usages, counts, strict=True):
            assert usage == {
                "prompt_tokens": body["usage"]["prompt_tokens"],
                "completion_tokens": count,
                "total_tokens": body["usage"]["prompt_tokens"] + count,
            }


async def test_usage_in_chunks_is_of_their_own_prompt(service: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": ["ab", "cdefg"], "max_tokens": 3, "stream_options": options}
    *chunks, last, _ = await service.events(**fields)
    for index, length in enumerate((2, 5)):
        usages = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert {usage["prompt_tokens"] for usage in usages} == {length}
        assert usages[-1]["total_tokens"] == length + 3
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 6)


async def test_usage_in_chunks_needs_the_usage_chunk(service: Cluster) -> None:
    """As in vLLM, the flag alone asks for nothing."""
    options = {"continuous_usage_stats": True}
    events = await service.events(prompt="abc", max_tokens=3, stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in events[:-1])


async def test_n_choices_in_one_stream(service: Cluster) -> None:
    events = await service.events(CHAT, messages=MESSAGES, n=3, max_tokens=4)
    by_index: dict[int, list[Any]] = {}
    for event in events[:-1]:
        choice = event["choices"][0]
        by_index.setdefault(choice["index"], []).append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for chunks in by_index.values():
        assert chunks[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]


async def test_chat_logprobs(service: Cluster) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    _, body = await service.post(CHAT, **fields)
    items = body["choices"][0]["logprobs"]["content"]
    assert len(items) == 3
    assert bytes(items[1]["bytes"]).decode() == items[1]["token"] == "u"
    assert [len(i["top_logprobs"]) for i in items] == [2, 2, 2]
    events = await service.events(CHAT, **fields)
    streamed = [i for e in events[:-1] for i in e["choices"][0]["logprobs"]["content"]]
    assert streamed == items


async def test_long_text_is_split_over_events(tokenizer: Tokenizer, make_generation: Any) -> None:
    """STR-10: some clients cannot read lines above 64 KiB."""
    shape = ChatShape("tiny", tokenizer, logprobs=-1, usage_chunk=False)
    text = "x" * 40_000
    piece = Piece(0, text, [1], [], "stop", True)
    events = shape.chunk(piece, make_generation()).split("\n\n")[:-1]
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert "".join(c["delta"]["content"] for c in choices) == text
    assert max(map(len, events)) < 20_000
    assert ["role" in c["delta"] for c in choices] == [True, False, False]
    assert [c["finish_reason"] for c in choices] == [None, None, "stop"]


async def test_error_before_the_first_token_is_an_http_error(service: Cluster) -> None:
    status, body = await service.post(CHAT, messages=MESSAGES, stream=True, model="other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    service.workers[1].prefill_s = 30
    call = asyncio.create_task(service.post(CHAT, messages=MESSAGES, stream=True))
    await service.until(service.generations)
    service.generations()[0].deadline = 0
    status, body = await call
    assert (status, body["error"]["code"]) == (504, "request_timeout")
    await service.until(lambda: not service.workers[1].active)


async def test_headers_wait_for_the_first_token(cluster: Cluster) -> None:
    await cluster.gateway(keepalive_s=0.3)
    await cluster.worker("decode")
    await cluster.worker("prefill", prefill_s=1.0)
    body = {"model": "tiny", "stream": True, "prompt": "abc", "max_tokens": 3}
    async with cluster.http.post(f"{cluster.base}/v1/completions", json=body) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert reply.headers["Cache-Control"] == "no-cache"
        assert reply.headers["X-Accel-Buffering"] == "no"
        text = (await reply.read()).decode()
    comments = [part for part in text.split("\n\n") if part.startswith(":")]
    assert 2 <= len(comments) <= 4
    assert text.index("data:") > text.rindex(": keepalive")


async def test_deadline_after_keepalives_ends_in_an_error_event(cluster: Cluster) -> None:
    await cluster.gateway(keepalive_s=0.1, request_timeout_s=0.5)
    await cluster.worker("decode")
    await cluster.worker("prefill", prefill_s=20)
    events = await cluster.events(prompt="abc", max_tokens=3)
    assert [e["error"]["code"] for e in events] == ["request_timeout"]


async def test_error_after_the_first_token(service: Cluster) -> None:
    service.workers[0].step_s = 0.05
    call = asyncio.create_task(service.events(prompt="abc" * 20, max_tokens=50))
    await service.until(lambda: [g for g in service.generations() if len(g.tokens) > 3])
    service.generations()[0].deadline = 0
    events = await call
    assert events[-1]["error"]["code"] == "request_timeout"
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])


async def test_an_unexpected_error_in_a_stream_is_an_error_event(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = CompletionShape._choice
    left = [1, 1, 1]

    def fail(shape: CompletionShape, piece: Piece) -> str:
        left.pop()
        return render(shape, piece)

    monkeypatch.setattr(CompletionShape, "_choice", fail)
    service.workers[0].step_s = 0.05
    events = await service.events(prompt="abc" * 20, max_tokens=50)
    assert events[-1]["error"]["code"] == "internal_error"
    assert len(events) == 4
    await service.until(lambda: not service.workers[0].active)
    assert await service.metric("internal_errors_total") == 1
    assert await service.metric("request_success_total", finished_reason="error") == 1


async def open_stream(service: Cluster, **fields: Any) -> socket.socket:
    """A raw client with a tiny receive buffer that has sent a streamed call."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", service.gateways[0].port))
    body = json.dumps({"model": "tiny", "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(raw, head.encode() + body)
    return raw


@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
async def test_leaving_frees_the_worker_in_every_state(service: Cluster, moment: str) -> None:
    prefill, decode = service.workers[1], service.workers[0]
    decode.step_s = 0.05
    prefill.claims = moment != "queued"
    prefill.prefill_s = 30 if moment == "prefill" else 0
    await asyncio.sleep(0.1)
    raw = await open_stream(service, prompt="abc" * 100, max_tokens=300)
    reached = {
        "queued": lambda: [g for g in service.generations() if g.entry],
        "prefill": lambda: prefill.active,
        "decode": lambda: decode.active,
    }
    await service.until(reached[moment])
    raw.close()
    await service.until(
        lambda: not prefill.active and not decode.active and not service.generations(), 1.0
    )
    queue = prefill.keys.prefill_queue("interactive")
    await service.until(lambda: prefill.cancelled)
    assert await prefill.client.xlen(queue) == 0
    pending = await prefill.client.xpending(queue, "prefill")
    assert pending["pending"] == 0
    assert await service.metric("request_success_total", finished_reason="abort") == 1


async def test_a_client_that_does_not_read_is_cut_off(cluster: Cluster) -> None:
    await cluster.gateway(slow_client_s=0.4)
    decode = await cluster.worker("decode", step_s=0)
    await cluster.worker("prefill")
    fields = {"prompt": "abc" * 1000, "max_tokens": 1000, "n": 16, "logprobs": 20}
    raw = await open_stream(cluster, **fields)
    await cluster.until(lambda: decode.active)
    neighbour = await cluster.events(prompt="abc", max_tokens=9)
    assert "".join(e["choices"][0]["text"] for e in neighbour[:-1]) == "abcabcabc"
    await cluster.until(lambda: not cluster.generations() and not decode.active, 40)
    aborted = await cluster.metric("request_success_total", finished_reason="abort")
    assert aborted > 0
    raw.close()
