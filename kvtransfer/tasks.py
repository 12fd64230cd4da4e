"""Ending background tasks for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; their exceptions stay in them.

    One `cancel` is not enough: redis-py sends through `asyncio.wait_for`, which before Python 3.12
    loses a cancellation that arrives when the write has just been done. A loop around a command
    then goes on as if nothing had been asked of it.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
