"""`pageferry bench --url URL`: load any OpenAI-compatible server and say what its users would feel.

Closed loop (`--concurrency N`, the default): N streams, each sends its next request when the last
one has ended. Open loop (`--rate R`: Poisson arrivals; `--trace FILE --replay`: the trace's own
times): requests go out when they are due, even if earlier ones are still waiting.

Lengths: see `bench_workload`. The table goes to stdout, progress to stderr (a bar on a terminal,
else a line every 10 s), everything as JSON to `--json`. SIGINT cuts what is running and shows the
figures so far; a second one ends at once. Exit codes: 0 all requests were answered in full; 1 some
were not; 2 the server or a flag cannot be used; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from pageferry.compose.bench_client import (
    Load,
    Outcome,
    Result,
    Server,
    Unusable,
    Watch,
    discover,
    run,
)
from pageferry.compose.bench_figures import Figures, Slo, report, summarise
from pageferry.compose.bench_workload import (
    SHAPES,
    Request,
    WorkloadError,
    draw,
    fit_context,
    poisson,
    read_trace,
    scaled,
)

PROG = "pageferry bench"
ASSUMED_CONTEXT = 4096
"""For servers that do not tell theirs."""
PROGRESS_S = 10.0
DEFAULT_REQUESTS = 64
DEFAULT_CONCURRENCY = 8


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").splitlines()[0])
    p.add_argument("--url", "--base-url", required=True, help="base URL of the server, without /v1")
    p.add_argument("--model", default="", help="model id; default: the first of /v1/models")
    p.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY", ""),
        help="sent as a bearer token [default: OPENAI_API_KEY]",
    )
    p.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    load = p.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=count,
        help=f"closed loop with this many streams [default: {DEFAULT_CONCURRENCY}]",
    )
    how.add_argument(
        "--rate", "--request-rate", type=positive, help="open loop: Poisson arrivals a second"
    )
    how.add_argument(
        "--replay", action="store_true", help="open loop at the arrival times of --trace"
    )
    load.add_argument(
        "--speed", type=positive, default=1.0, help="with --replay: 2 halves the times between"
    )
    load.add_argument(
        "--requests",
        "--num-prompts",
        type=count,
        help=f"number of requests [default: {DEFAULT_REQUESTS}]",
    )
    load.add_argument(
        "--trace",
        type=Path,
        help="take lengths from this file: a .csv with the columns TIMESTAMP, ContextTokens, "
        "GeneratedTokens, or a .jsonl with timestamp (ms), input_length, output_length",
    )
    load.add_argument(
        "--shape", choices=sorted(SHAPES), default="conversation", help="built-in lengths"
    )
    load.add_argument("--prompt-scale", type=positive, default=1.0, help="multiplies prompts")
    load.add_argument("--output-scale", type=positive, default=1.0, help="multiplies outputs")
    load.add_argument("--max-model-len", type=count, help="context, tokens, if the server hides it")
    load.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and prompts")
    load.add_argument("--timeout-s", type=positive, default=600.0, help="silence that is a failure")
    slo = p.add_argument_group("service level objective, for goodput")
    slo.add_argument("--slo-ttft-ms", type=positive, help="bound for TTFT")
    slo.add_argument("--slo-tpot-ms", type=positive, help="bound for a request's mean gap")
    slo.add_argument("--slo-itl-ms", type=positive, help="bound for the p99 of a request's gaps")
    p.add_argument("--json", type=Path, help="write everything here")
    return p


def workload(args: argparse.Namespace) -> list[Request]:
    """The requests that the flags ask for, before they are fitted to the server's context."""
    if args.replay and args.trace is None:
        raise WorkloadError("--replay needs --trace")
    if args.trace is not None:
        requests = read_trace(args.trace, args.requests or 0)
    else:
        requests = draw(args.shape, args.requests or DEFAULT_REQUESTS, args.seed)
    requests = scaled(requests, args.prompt_scale, args.output_scale)
    if args.replay:
        return [Request(r.prompt, r.output, r.arrival_s / args.speed) for r in requests]
    return poisson(requests, args.rate, args.seed) if args.rate else requests


def load_of(args: argparse.Namespace, requests: Sequence[Request]) -> tuple[Load, str]:
    """What to send, and how to call it."""
    key = f"seed{args.seed}"
    if args.replay:
        return Load(open=tuple(requests), key=key), f"{args.trace.name} at {args.speed:g} x speed"
    if args.rate:
        return Load(open=tuple(requests), key=key), f"Poisson arrivals, {args.rate:g} requests/s"
    streams = args.concurrency or DEFAULT_CONCURRENCY
    return Load(tuple(requests), streams, key=key), f"closed loop, {streams} streams"


@dataclass(frozen=True)
class Measured:
    server: Server
    load: str
    """What was sent, in words."""
    requests: int
    """How many were to be sent."""
    result: Result
    interrupted: bool


async def measure(args: argparse.Namespace, requests: list[Request]) -> Measured:
    """Discover the server, send the requests."""
    server = Server(
        args.url.rstrip("/").removesuffix("/v1"),
        args.model,
        args.chat,
        args.api_key,
        args.timeout_s,
        args.max_model_len or 0,
    )
    server = await discover(server)
    limit = server.max_model_len or ASSUMED_CONTEXT
    fitted, factor = fit_context(requests, limit)
    load, name = load_of(args, fitted)
    if factor < 1:
        name += f"; lengths scaled by {factor:.2g} to fit {limit} tokens"
    if not server.exact:
        name += "; the server ends outputs where it likes (no ignore_eos)"
    say(f"{server.path}, {server.model}: {name}")
    result, interrupted = await shown(server, load, len(fitted))
    return Measured(server, name, len(fitted), result, interrupted)


async def shown(server: Server, load: Load, total: int) -> tuple[Result, bool]:
    """Run with progress on stderr; (what the client saw, whether SIGINT ended it early).

    The first SIGINT comes as a cancellation, a second one as KeyboardInterrupt (asyncio.Runner).
    """
    with tqdm(total=total, unit="request", disable=None, file=sys.stderr) as bar:

        def ended(seen: Outcome) -> None:
            bar.update()

        watch = Watch(ended=ended)
        lines = asyncio.create_task(progress(watch.sent, total)) if bar.disable else None
        running = asyncio.create_task(run(server, load, watch))
        try:
            return await asyncio.shield(running), False
        except asyncio.CancelledError:
            watch.stop.set()
            return await running, True
        finally:
            if lines:
                lines.cancel()


async def progress(sent: Sequence[Outcome], total: int) -> None:
    """A line now and then, until it is cancelled."""
    started = time.perf_counter()
    while True:
        await asyncio.sleep(PROGRESS_S)
        seconds = time.perf_counter() - started
        done = sum(o.end_s > 0 for o in sent)
        # A running request of a server that does not count counts a token for each chunk.
        tokens = sum(o.output_tokens or len(o.chunks) for o in sent)
        say(
            f"{seconds:.0f} s: {done} of {total} requests done, "
            f"{tokens / seconds:.1f} tokens/s so far"
        )


def as_json(args: argparse.Namespace, measured: Measured, figures: Figures) -> dict[str, Any]:
    """Everything that was measured, the raw outcomes too, without the key."""
    flags = {k: v for k, v in vars(args).items() if k not in ("api_key", "json")}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": importlib.metadata.version("pageferry"),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()},
        "server": {k: v for k, v in asdict(measured.server).items() if k != "api_key"},
        "load": measured.load,
        "interrupted": measured.interrupted,
        "figures": figures.as_json(),
        "requests": [asdict(o) for o in measured.result.outcomes],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked(args: argparse.Namespace) -> argparse.Namespace:
    if not args.url.startswith(("http://", "https://")):
        raise WorkloadError(f"--url {args.url} has no scheme: write http://{args.url}")
    if args.json and not args.json.parent.is_dir():
        raise WorkloadError(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms, args.slo_itl_ms)
    try:
        requests = workload(checked(args))
        measured = uvloop.run(measure(args, requests))
        figures = summarise(measured.result, slo)
        if measured.interrupted:
            sent = len(measured.result.outcomes)
            print(f"INTERRUPTED          {sent} of {measured.requests} requests had been sent")
        print(report(figures, slo))
        if args.json:
            args.json.write_text(json.dumps(as_json(args, measured, figures)) + "\n")
    except (Unusable, WorkloadError) as error:
        say(f"{PROG}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"{PROG}: interrupted")
        return 130
    if measured.interrupted:
        return 130
    return 1 if figures.failed or not figures.completed else 0


if __name__ == "__main__":
    sys.exit(main())
