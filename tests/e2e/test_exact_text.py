"""Through HTTP and the real path, greedy text is what `transformers` gives, token for token."""

from __future__ import annotations

from typing import Any

import pytest

FP32 = {"dtype": "float32", "kv_memory_mib": 1024}


def _check(oracles: list[Any], answers: list[dict[str, Any]]) -> None:
    wrong = []
    for oracle, answer in zip(oracles, answers, strict=True):
        assert "choices" in answer, answer
        text = answer["choices"][0]["text"].rstrip("\ufffd")
        if text != oracle.text.rstrip("\ufffd"):
            wrong.append((oracle.name, oracle.text, text))
        assert answer["usage"]["prompt_tokens"] == len(oracle.prompt)
        assert answer["usage"]["completion_tokens"] == oracle.num_tokens
    assert not wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_forty_prompts_alone_and_sixteen_at_a_time(
    transport: str, oracles: list[Any], make_stack: Any, complete: Any, gather_limited: Any
) -> None:
    stack = make_stack(worker_settings={**FP32, "transport": transport})

    def calls(stream: bool) -> list[Any]:
        return [complete(stack.url, prompt=o.prompt, max_tokens=16, stream=stream) for o in oracles]

    # Cold alone and then from the caches in company over shm, cold in company over tcp.
    for limit in (1, 16) if transport == "shm" else (16,):
        _check(oracles, await gather_limited(calls(stream=limit == 16), limit))
    stack.wait_idle()
    used = {t for w in stack.workers() for t in w["stats"] if t.startswith("gb_per_s_")}
    assert used == {f"gb_per_s_{transport}"}


async def test_several_workers_of_each_role_give_the_same_text(
    oracles: list[Any], make_stack: Any, complete: Any, gather_limited: Any
) -> None:
    stack = make_stack(prefill=2, decode=2, worker_settings=FP32)
    some = [o for o in oracles if len(o.prompt) <= 333]
    answers = await gather_limited(
        [complete(stack.url, prompt=o.prompt, max_tokens=16) for o in some], 16
    )
    _check(some, answers)
    stack.wait_idle()
    work = {w["id"]: w["stats"]["steps_total"] for w in stack.workers()}
    assert all(steps > 0 for steps in work.values()), work
