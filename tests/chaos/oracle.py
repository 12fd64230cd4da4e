"""Was an answer right, or honestly refused? The judge of every request of a chaos run.

1. A complete answer must equal the recorded one: texts, finish reasons, usage, logprobs.
2. What ended early must be a beginning of it.
3. Why it ended early must be said (429 or 503 with Retry-After, or a typed error event), and a
   fault that was injected at the time must explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from client import Answer

AFTERMATH_S = 25.0
"""For so long after its end a fault explains refusals: a worker needs that long to come back when
several start on two busy cores."""
SHOWN = 40
"""Characters or tokens shown on each side of a difference."""
MAX_DEATHS = 3
"""After so many deaths a request is given up (gateway/dispatch.py)."""

WORKER_KINDS = frozenset(
    {
        *("prefill_kill", "decode_kill", "both_decode_kill", "worker_term", "worker_drain"),
        *("prefill_freeze", "decode_freeze"),
    }
)
REDIS_KINDS = frozenset({"redis_pause", "redis_drop", "redis_restart", "redis_flush", "redis_full"})
GATEWAY_KINDS = frozenset({"gateway_kill", "gateway_term"})
LINK_KINDS = frozenset({"link_cut", "link_stall", "link_delay", "link_flip"})

EXPLANATIONS = {
    "no_decode_worker": WORKER_KINDS | REDIS_KINDS | GATEWAY_KINDS,
    "unavailable": WORKER_KINDS | REDIS_KINDS | GATEWAY_KINDS,
    "redis_unavailable": REDIS_KINDS | GATEWAY_KINDS,
    "shutting_down": GATEWAY_KINDS,
    "draining": WORKER_KINDS,
}
"""Error code -> kinds of faults that explain it. A gateway that has just started knows no workers
and no Redis yet."""


@dataclass
class Fault:
    """One injected fault. Times are seconds of the event loop's clock."""

    kind: str
    target: str
    at: float
    until: float
    note: str = ""


@dataclass(frozen=True)
class Expected:
    """What the undisturbed stack answered."""

    texts: dict[int, str]
    finishes: dict[int, str]
    tokens: dict[int, list[Any]]
    usage: dict[str, int]

    @classmethod
    def of(cls, answer: Answer) -> Expected:
        return cls(answer.texts, answer.finishes, answer.tokens, answer.usage)

    def times(self, prompts: int, n: int) -> Expected:
        """The answer to so many of the same prompt with `n` choices each; greedy, no logprobs."""
        indexes = range(prompts * n)
        usage = {
            "prompt_tokens": prompts * self.usage["prompt_tokens"],
            "completion_tokens": len(indexes) * self.usage["completion_tokens"],
        }
        return Expected(
            dict.fromkeys(indexes, self.texts[0]),
            dict.fromkeys(indexes, self.finishes[0]),
            {i: [] for i in indexes},
            usage,
        )


def judge(answer: Answer, expected: Expected, faults: Sequence[Fault]) -> tuple[str, str]:
    """(outcome, problem); the problem is empty when all is well."""
    if answer.hung:
        sizes = {index: len(text) for index, text in answer.texts.items()}
        return "hung", f"no progress after so many characters by choice: {sizes}"
    wrong = _wrong_beginning(answer, expected)
    if answer.complete:
        return ("wrong", wrong) if wrong else _judge_whole(answer, expected)
    if wrong:
        return "wrong", wrong
    if answer.cut:
        return "cut", ""
    if answer.broken:
        told = _near(answer, faults, GATEWAY_KINDS, answer.gateway)
        return "broken", "" if told else f"connection ended: {answer.broken}"
    if answer.error is None:
        told = _near(answer, faults, GATEWAY_KINDS, answer.gateway)
        return "broken", "" if told else "the stream ended without [DONE] or an error event"
    return _judge_error(answer, faults)


def _wrong_beginning(answer: Answer, expected: Expected) -> str:
    for index, text in answer.texts.items():
        if not expected.texts.get(index, "").startswith(text):
            return f"choice {index}: {_difference(expected.texts.get(index, ''), text)}"
    for index, tokens in answer.tokens.items():
        wanted = expected.tokens.get(index, [])
        if wanted[: len(tokens)] != tokens:
            return f"choice {index}: logprobs: {_difference(wanted, tokens)}"
    return ""


def _difference(wanted: Sequence[Any], got: Sequence[Any]) -> str:
    """Where two texts or lists part, with what surrounds it."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    at = min(len(wanted), len(got)) if at is None else at
    shown = slice(max(0, at - SHOWN), at + SHOWN)
    return f"from {at} of {len(wanted)} on: expected {wanted[shown]!r}, got {got[shown]!r}"


def _judge_whole(answer: Answer, expected: Expected) -> tuple[str, str]:
    for name in ("texts", "finishes", "tokens", "usage"):
        got, wanted = getattr(answer, name), getattr(expected, name)
        if got != wanted:
            return "wrong", f"{name}: expected {wanted!r}, got {got!r}"
    return ("wrong", "data came after [DONE]") if answer.after_end else ("right", "")


def _judge_error(answer: Answer, faults: Sequence[Fault]) -> tuple[str, str]:
    error = answer.error or {}
    code, shown = str(error.get("code")), f"{answer.status} {error}"
    streaming = answer.stream and answer.status == 200
    outcome = "error event" if streaming else f"{answer.status}"
    if answer.after_end:
        return outcome, f"data came after the error event: {shown}"
    if not error.get("message") or not error.get("type"):
        return outcome, f"an error without text or type: {shown}"
    if answer.status in (429, 503) and not (answer.retry_after or "").isdigit():
        return outcome, f"no Retry-After with {shown}"
    if answer.status == 429:
        return outcome, ""
    if code == "request_failed":
        lived = [f for f in faults if answer.started - 2 < f.at < answer.ended]
        deaths = [f for f in lived if f.kind in WORKER_KINDS | LINK_KINDS]
        return outcome, "" if len(deaths) >= MAX_DEATHS else f"after {len(deaths)} faults: {shown}"
    if _near(answer, faults, EXPLANATIONS.get(code, frozenset())):
        return outcome, ""
    return outcome, f"unexplained: {shown}"


def _near(answer: Answer, faults: Sequence[Fault], kinds: frozenset[str], target: str = "") -> bool:
    return any(
        fault.kind in kinds
        and fault.at <= answer.ended
        and fault.until + AFTERMATH_S >= answer.started
        and target in (fault.target, "")
        for fault in faults
    )
