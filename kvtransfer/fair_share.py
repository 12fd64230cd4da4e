"""Whose turn it is: in a step for prompts of different length, in the queues for classes.

First come, first served alone makes every prompt behind one of 3,000 tokens wait for all of it.
Here the oldest prompt is sure of half the budget, so it takes at most twice as long as alone and
none waits for ever; the other half goes to prompts that need less than it, shortest first. What
they leave goes by age.

Elsewhere: vLLM serves in order of arrival and can cap the chunk of a long prompt
(`long_prefill_token_threshold`, off by default); its Ascend plugin lets prompts below a threshold
go first until a long one has waited a given time. Sharing needs no threshold and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens to compute of each prompt in the next step; adds up to the lesser of both sums.

    `remaining` holds the uncomputed tokens of each prompt, the oldest prompt first.
    """
    if sum(remaining) <= budget:
        return list(remaining)
    grants = [0] * len(remaining)

    def grant(index: int, most: int) -> None:
        nonlocal budget
        tokens = min(remaining[index] - grants[index], most)
        grants[index] += tokens
        budget -= tokens

    grant(0, budget - budget // 2)
    for index in sorted(range(1, len(remaining)), key=remaining.__getitem__):
        if remaining[index] >= remaining[0]:
            break
        grant(index, budget)
    for index in range(len(remaining)):
        grant(index, budget)
    return grants


MAX_PASSES = 8
"""Requests of higher classes that may go ahead of a waiting one."""


class Turns:
    """In which order queues are asked for work, so that none waits for ever.

    They are given in order of priority. One that `MAX_PASSES` requests of higher ones have passed
    over is asked first, for one request: under any load the lowest gets a ninth of the claims.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._passed = dict.fromkeys(queues, 0)

    def order(self, room: int) -> list[tuple[str, int]]:
        """(queue, how many requests to ask for at the most), the next to be asked first."""
        overdue = [(queue, 1) for queue, count in self._passed.items() if count >= MAX_PASSES]
        return overdue + [(queue, min(room, MAX_PASSES)) for queue in self._passed]

    def took(self, queue: str, count: int) -> None:
        """`queue` gave `count` requests; when that is none, nobody waited there."""
        self._passed[queue] = 0
        lower = list(self._passed)
        for other in lower[lower.index(queue) + 1 :]:
            self._passed[other] += count
