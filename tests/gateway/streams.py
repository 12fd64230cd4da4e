"""A stream that tests follow, and faults in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pageferry.kvtransfer.wire import Event, Kind

Cluster = Any
PROMPT = "abcdefghij" * 4
FIELDS = {"prompt": PROMPT, "max_tokens": 60}
TEXT = (PROMPT * 2)[:60]


async def text_of(call: asyncio.Task[list[Any]]) -> str:
    events = await call
    assert events[-1] == "[DONE]", events[-1]
    return "".join(e["choices"][0]["text"] for e in events[:-1])


def once(fault: Callable[[Event], list[Event]], at: int) -> Callable[[Event], list[Event]]:
    """Apply a fault to the first TOKENS event with index `at`, and to no other."""
    left = [True]

    def mangle(event: Event) -> list[Event]:
        if event.kind is Kind.TOKENS and event.index == at and left:
            left.clear()
            return fault(event)
        return [event]

    return mangle


async def started(cluster: Cluster, tokens: int) -> None:
    await cluster.until(lambda: [g for g in cluster.generations() if len(g.tokens) >= tokens])
