"""The frame around a worker process: settings, logs, exit codes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import uvloop
from redis.exceptions import RedisError

from pageferry.kernels.config import UnsupportedModel
from pageferry.kernels.devices import DeviceError
from pageferry.kernels.weights import BadCheckpoint
from pageferry.kvtransfer.logs import configure
from pageferry.kvtransfer.model_files import ModelNotFound
from pageferry.kvtransfer.settings import SettingsError, WorkerSettings, from_args
from pageferry.kvtransfer.worker_setup import WorkerParts, build

S = TypeVar("S", bound=WorkerSettings)

MISTAKES = (SettingsError, DeviceError, ModelNotFound, UnsupportedModel, BadCheckpoint)
"""What the operator can mend: one sentence and exit code 2, no traceback."""


class Worker(Protocol):
    async def run(self) -> None: ...


def main(role: str, settings_class: type[S], create: Callable[[WorkerParts, S], Worker]) -> None:
    """Parse settings, build the parts, run until a signal. Exits 0, 1 (failed) or 2 (mistake)."""
    prog = f"pageferry {role}"
    settings = from_args(settings_class, prog, f"Run one {role} worker.")
    configure(settings.log_level, role)
    try:
        parts = build(role, settings)
    except MISTAKES as error:
        sys.exit(_say(prog, str(error), 2))
    configure(settings.log_level, parts.worker_id)
    logging.getLogger(__name__).info(
        "%s: model %s, %s, %d pages of %d tokens, max_model_len %d, memory source %s",
        parts.worker_id,
        parts.keys.model,
        parts.memory.layout.dtype,
        parts.memory.num_pages,
        parts.memory.layout.page_size,
        parts.max_model_len,
        parts.health.source,
    )

    async def life() -> None:
        # Created inside the loop: workers keep a reference to it.
        await create(parts, settings).run()

    live(prog, life)


def live(prog: str, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a worker to its end. What one sentence explains ends the process, the rest is raised.

    Only what redis-py raises is about Redis: it makes its own errors of the connection's.
    """
    try:
        uvloop.run(life())
    except MISTAKES as error:
        sys.exit(_say(prog, str(error), 2))
    except RedisError as error:
        sys.exit(_say(prog, f"Redis at --redis-url cannot be used: {error}", 1))


def _say(prog: str, sentence: str, code: int) -> int:
    print(f"{prog}: {sentence}", file=sys.stderr)
    return code
