"""`python -m pageferry.gateway.main`: the gateway process.

SIGTERM and SIGINT end it. SIGHUP reads API keys and certificate again; without either it ends too.

Exit codes: 0 after SIGTERM or SIGINT, 1 when it broke, 2 with one sentence when it cannot start.
Nothing goes to stdout; logs go to stderr.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from pageferry.gateway import log_lines
from pageferry.gateway.app import Gateway
from pageferry.gateway.text import Tokenizer
from pageferry.kvtransfer.model_files import ModelNotFound, resolve_model_dir, served_name
from pageferry.kvtransfer.settings import GatewaySettings, from_args

PROG = "pageferry gateway"
POSITIVE = (
    "max_body_mib",
    "request_timeout_s",
    "keepalive_s",
    "slow_client_s",
    "max_queued_requests",
    "max_n",
    "max_prompts",
)
"""Settings that must be above 0."""

YOUNG_OBJECTS = 50_000
SWITCH_INTERVAL_S = 0.001

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    settings = from_args(
        GatewaySettings,
        PROG,
        "HTTP front door: the OpenAI API over prefill and decode workers.",
        argv,
    )
    check(settings)
    log_lines.configure(settings.log_level)
    try:
        tokenizer = Tokenizer.from_dir(resolve_model_dir(settings.model))
        tokenizer.warm_up()
    except (ModelNotFound, OSError) as error:
        fail(f"--model {settings.model!r}: {error}")
    model = served_name(settings.model, settings.served_model_name)
    tune_interpreter()
    return uvloop.run(serve(settings, model, tokenizer))


def tune_interpreter() -> None:
    """Two defaults that would stop all streams for moments.

    Garbage collections look at every stream's objects: make them few. Modules and tokenizer are
    left out for good. A token message makes thousands of objects that go by reference counts; at
    Python's default of 700 each message would be several collections.

    A thread that parses keeps the event loop waiting for 5 ms at each turn: 1 ms will do.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 50)


def check(settings: GatewaySettings) -> None:
    """Exit with 2 and one sentence when the settings cannot work."""
    if not 0 <= settings.port <= 65535:
        fail(f"--port {settings.port} is not a TCP port (0 to 65535)")
    if not 0.5 <= settings.lease_s <= 60:
        fail(f"--lease-s {settings.lease_s:g} is outside 0.5 to 60")
    for name in ("drain_s", "worker_wait_s", "local_prefill_tokens"):
        if getattr(settings, name) < 0:
            fail(f"--{name.replace('_', '-')} {getattr(settings, name):g} must not be below 0")
    for name in POSITIVE:
        if getattr(settings, name) <= 0:
            fail(f"--{name.replace('_', '-')} {getattr(settings, name):g} must be above 0")


def fail(sentence: str) -> NoReturn:
    print(f"{PROG}: {sentence}", file=sys.stderr)
    raise SystemExit(2)


async def serve(settings: GatewaySettings, model: str, tokenizer: Tokenizer) -> int:
    """Run until a signal; returns the exit code."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_lines.contain)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        gateway = Gateway(settings, model, tokenizer)
    except (OSError, ValueError) as error:
        fail(f"cannot start: {error}")
    try:
        await gateway.start()
    except OSError as error:
        fail(f"cannot listen on {settings.host}:{settings.port}: {error}")
    front = gateway.front
    loop.add_signal_handler(signal.SIGHUP, front.reload if front.can_reload else stop.set)
    gateway.failed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    broken = gateway.failed.exception() if gateway.failed.done() else None
    if broken is not None:
        log.error("a background task broke: %s", type(broken).__name__, exc_info=broken)
    await gateway.stop()
    return 1 if broken is not None else 0


if __name__ == "__main__":
    sys.exit(main())
