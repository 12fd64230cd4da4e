"""The completions endpoint against fake workers: text, counts, choices, stop strings, logprobs."""

from __future__ import annotations

import json
from typing import Any

import pytest

Cluster = Any


async def test_text_usage_and_reason(service: Cluster) -> None:
    status, body = await service.post(prompt=" abc", max_tokens=6)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": " abc a", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_eos_counts_but_does_not_show(service: Cluster) -> None:
    _, body = await service.post(prompt="ab", max_tokens=100)
    assert body["choices"][0]["text"] == "ababab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 7


async def test_own_stop_token_counts_but_does_not_show(service: Cluster) -> None:
    (stop,) = service.tokenizer.encode("c")
    for shown, text in ((False, "ab"), (True, "abc")):
        _, body = await service.post(
            prompt="abcd", stop_token_ids=[stop], include_stop_str_in_output=shown
        )
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on(service: Cluster) -> None:
    _, body = await service.post(prompt="ab", max_tokens=9, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 9
    assert body["choices"][0]["finish_reason"] == "length"


async def test_default_is_16_tokens(service: Cluster) -> None:
    _, body = await service.post(prompt="0123456789")
    assert body["usage"]["completion_tokens"] == 16


async def test_stop_string_ends_it_and_recalls_it(service: Cluster) -> None:
    _, body = await service.post(prompt="abcdefgh", max_tokens=24, stop=["fg"])
    assert body["choices"][0]["text"] == "abcde"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 7
    await service.until(lambda: not any(w.active for w in service.workers))
    assert service.workers[0].cancelled


async def test_stop_string_can_be_shown(service: Cluster) -> None:
    _, body = await service.post(
        prompt="abcdefgh", max_tokens=24, stop="fg", include_stop_str_in_output=True
    )
    assert body["choices"][0]["text"] == "abcdefg"


async def test_choices_are_ordered_by_prompt_then_n(service: Cluster) -> None:
    _, body = await service.post(prompt=["xy", "pqr"], n=2, max_tokens=4)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["xyxy", "xyxy", "pqrp", "pqrp"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 16


async def test_each_choice_has_its_own_seed(service: Cluster) -> None:
    await service.post(prompt=["xy", "pq"], n=2, max_tokens=1, seed=40)
    seeds = sorted(r.sampling.seed for r in service.workers[1].claimed)
    assert seeds == [40, 41, 42, 43]


async def test_missing_seed_is_random(service: Cluster) -> None:
    for _ in range(2):
        await service.post(prompt="xy", max_tokens=1)
    first, second = (r.sampling.seed for r in service.workers[1].claimed)
    assert first != second


async def test_token_ids_as_prompt(service: Cluster) -> None:
    ids = service.tokenizer.encode("hello")
    _, body = await service.post(prompt=ids, max_tokens=5)
    assert body["choices"][0]["text"] == "hello"


async def test_echo_puts_the_prompt_first(service: Cluster) -> None:
    _, body = await service.post(prompt="abc", max_tokens=3, echo=True)
    assert body["choices"][0]["text"] == "abcabc"


async def test_echo_alone_needs_no_worker(service: Cluster) -> None:
    _, body = await service.post(prompt="abc", max_tokens=0, echo=True)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert not service.workers[1].claimed


async def test_logprobs_as_lists(service: Cluster) -> None:
    _, body = await service.post(prompt="abc", max_tokens=2, logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }


async def test_multibyte_characters_come_whole(service: Cluster) -> None:
    """One token per byte: every character is split, and the last one is cut (STR-03)."""
    fields = {"prompt": "日本", "max_tokens": 8}
    _, body = await service.post(**fields)
    events = await service.events(**fields)
    joined = "".join(e["choices"][0]["text"] for e in events[:-1])
    assert body["choices"][0]["text"] == joined == "日本\ufffd"


@pytest.mark.parametrize("prompt_tokens", [4095, 4096, 5000])
async def test_context_limit(service: Cluster, prompt_tokens: int) -> None:
    status, body = await service.post(prompt=[65] * prompt_tokens, max_tokens=1)
    if prompt_tokens == 4095:
        assert status == 200
        return
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "prompt"
    assert "maximum context length is 4096 tokens" in body["error"]["message"]
    assert str(prompt_tokens) in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_in_every_form(service: Cluster, stream: bool) -> None:
    """API-06 and API-07: an HTTP error that clients recognise, streamed or not."""
    message = {"role": "user", "content": "a" * 4096}
    forms: tuple[Any, ...] = (
        ("/v1/completions", "prompt", "a" * 4096),
        ("/v1/completions", "prompt", [[65] * 4096]),
        ("/v1/chat/completions", "messages", [message]),
    )
    for path, param, value in forms:
        fields = {param: value, "max_tokens": 1, "stream": stream}
        status, body = await service.post(path, **fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in body["error"]["message"]


async def test_answers_of_megabytes(service: Cluster) -> None:
    """STR-10: whole in one body, and in events that are short lines."""
    text = "é" * 2000
    fields = {"prompt": [text] * 8, "n": 16, "echo": True, "max_tokens": 0}
    status, body = await service.post(**fields)
    assert (status, len(json.dumps(body)) > 10**6) == (200, True)
    assert [choice["text"] for choice in body["choices"]] == [text] * 128
    *chunks, done = await service.events(**fields)
    assert done == "[DONE]"
    texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in chunks}
    assert texts == dict.fromkeys(range(128), text)


async def test_limit_is_what_the_workers_can_hold(service: Cluster) -> None:
    service.workers[0].num_pages = 10
    await service.workers[0].publish()
    await service.until(lambda: service.gateways[0].fleet.longest_sequence == 160)
    status, body = await service.post(prompt="a" * 160, max_tokens=1)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert (await service.post(prompt="a" * 159, max_tokens=1))[0] == 200


async def test_max_tokens_is_clamped(service: Cluster) -> None:
    status, body = await service.post(prompt="a" * 4090, max_tokens=10**8)
    assert status == 200
    assert body["usage"]["completion_tokens"] == 6
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
    ],
)
async def test_refused_fields_are_named(service: Cluster, fields: Any, param: str) -> None:
    status, body = await service.post(**{"prompt": "a", **fields})
    assert (status, body["error"]["param"]) == (400, param)


async def test_best_of_equal_to_n_is_accepted(service: Cluster) -> None:
    status, body = await service.post(prompt="a", n=2, best_of=2, max_tokens=1)
    assert (status, len(body["choices"])) == (200, 2)


@pytest.mark.parametrize("model", ["no-such", "\ttiny", "TINY", ""])
async def test_wrong_model_is_404(service: Cluster, model: str) -> None:
    status, body = await service.post(model=model, prompt="a")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert repr(model) in body["error"]["message"]
