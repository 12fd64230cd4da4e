"""One request of a chaos run and everything that came back, with times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from catalogue import Case

MODEL = "SmolLM2-135M-Instruct"
GAP_S = 0.1
"""Shorter pauses between events are not noted."""
SILENCE_S = 60.0
"""A request without progress for so long counts as hung. Not the promised pause: one request may be
hit by several faults in a row, each time while workers start again and a burst waits before it."""
WHOLE_S = 120.0
"""The same for an answer that is not streamed."""


@dataclass
class Answer:
    """What a client got. Times are seconds of the event loop's clock."""

    case: Case
    stream: bool
    gateway: str
    """Program name."""
    started: float
    ended: float = 0.0
    status: int = 0
    retry_after: str | None = None
    error: dict[str, Any] | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[Any]] = field(default_factory=dict)
    """Per choice, what `logprobs` says of each token."""
    usage: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    """[DONE], or a whole JSON body."""
    after_end: bool = False
    """Something came after an error event or after [DONE]."""
    broken: str = ""
    """How the connection ended, if not by itself."""
    cut: bool = False
    """We hung up."""
    hung: bool = False
    first_event: float | None = None
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Pauses between events, from the request on, longer than `GAP_S`."""

    def take(self, payload: dict[str, Any]) -> None:
        """One body or chunk."""
        if "error" in payload:
            self.error = payload["error"]
            return
        if usage := payload.get("usage"):
            self.usage = {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}
        for choice in payload["choices"]:
            index = choice["index"]
            part = choice.get("message") or choice.get("delta") or choice
            text = part.get("content" if self.case.chat else "text") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"]:
                self.finishes[index] = choice["finish_reason"]
            self.tokens.setdefault(index, []).extend(_token_list(choice.get("logprobs")))


def _token_list(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [[t["token"], t["logprob"]] for t in logprobs["content"] or []]
    return [list(p) for p in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]


def body_of(case: Case, stream: bool) -> dict[str, Any]:
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": MODEL, **case.body, **extra}


async def ask(session: aiohttp.ClientSession, url: str, answer: Answer) -> Answer:
    """Send the request and fill in `answer`, whatever happens. Cancel it to hang up."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENCE_S if answer.stream else WHOLE_S) as patience:
            await _talk(session, url, answer, patience)
    except TimeoutError:
        answer.hung = True
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        answer.cut = True
    answer.ended = loop.time()
    return answer


async def _talk(
    session: aiohttp.ClientSession, url: str, answer: Answer, patience: asyncio.Timeout
) -> None:
    loop = asyncio.get_running_loop()
    body = body_of(answer.case, answer.stream)
    async with session.post(url + answer.case.path, json=body) as reply:
        answer.status = reply.status
        answer.retry_after = reply.headers.get("Retry-After")
        if reply.status != 200 or not answer.stream:
            answer.take(await reply.json())
            answer.complete = reply.status == 200
            return
        latest = answer.started
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            now = loop.time()
            if answer.first_event is None:
                answer.first_event = now
            if now - latest > GAP_S:
                answer.gaps.append((latest, now))
            latest = now
            patience.reschedule(now + SILENCE_S)
            answer.after_end = answer.complete or answer.error is not None
            if line[6:].strip() == b"[DONE]":
                answer.complete = True
            else:
                answer.take(json.loads(line[6:]))


def parse_events(answer: Answer, data: bytes) -> None:
    """Take in what a raw socket received of an SSE body; a last incomplete line is left out."""
    for line in data.split(b"\n")[:-1]:
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            answer.take(json.loads(line[6:]))
        answer.complete = answer.complete or line == b"data: [DONE]"
