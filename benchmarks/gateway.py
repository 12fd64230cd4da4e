"""How much one core of gateway carries: 1,000 SSE streams fed through a real Valkey.

    python benchmarks/gateway.py                 # rates, CPU per token, memory per idle stream
    python benchmarks/gateway.py --tokenise      # what 1 MB prompts do to other streams

The gateway is the real process, pinned to `--core`. Valkey, a synthetic decode worker (see
`synthetic_worker.py`) and the clients share `--other-core`; they take turns, so at high rates the
clients, not the gateway, may be late. The main figure is therefore the gateway's CPU time per
1,000 tokens; `tokens/s per core` is its reciprocal. Every stream's text is checked to the byte.

Delay of a token: from the moment the worker hands a step to its Redis client to the moment the
client has read the text.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import platform
import random
import resource
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import uvloop
from gateway_stack import (
    DEADLINE_S,
    HERE,
    Gateway,
    finish,
    long_context_copy,
    open_streams,
    sample_cpu,
    stack,
    start_worker,
    stop_early,
)
from sse_clients import Reading, percentile, post_request, read_stream

RESULTS = HERE / "results"
SETTLE_S = 0.3
MEGABYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Round:
    """Figures of one rate; times in ms, of the steady part between first and last step."""

    asked_tokens_per_s: float
    tokens_per_s: float
    streams: int
    gateway_cpu_share: float
    gateway_cpu_ms_per_1000_tokens: float
    tokens_per_s_per_core: float
    chunks_per_token: float
    delay_p50_ms: float
    delay_p99_ms: float
    delay_max_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    worker_cpu_share: float
    rss_mib_before: float
    rss_mib_idle: float
    rss_mib_after: float
    kib_per_idle_stream: float


async def one_rate(gateway: Gateway, url: str, args: argparse.Namespace, rate: float) -> Round:
    before = gateway.rss_mib()
    worker = await start_worker(url, args.model, args.streams, rate, 2 * SETTLE_S)
    await gateway.wait_workers(1)
    tokens = max(8, round(rate * args.seconds / args.streams))
    load = await open_streams(gateway, args.model, args.streams, tokens)
    await asyncio.sleep(SETTLE_S)
    idle = gateway.rss_mib()
    sampler = asyncio.create_task(sample_cpu(gateway, load))
    report = await finish(load, worker)
    sampler.cancel()
    await gateway.wait_workers(0)
    await asyncio.sleep(SETTLE_S)
    sent_at = report["sent_at"]
    assert isinstance(sent_at, list)
    assert isinstance(report["cpu_s"], float)
    readings = [read_stream(c, t) for c, t in zip(load.clients, load.texts, strict=True)]
    first, last = sent_at[1], sent_at[-1]
    cpu_s, wall_s = load.cpu_between(first, last)
    delays, gaps = times(readings, sent_at)
    achieved = args.streams * (len(sent_at) - 2) / (last - first)
    return Round(
        asked_tokens_per_s=rate,
        tokens_per_s=achieved,
        streams=args.streams,
        gateway_cpu_share=cpu_s / wall_s,
        gateway_cpu_ms_per_1000_tokens=1e6 * cpu_s / wall_s / achieved,
        tokens_per_s_per_core=achieved * wall_s / cpu_s,
        chunks_per_token=sum(r.chunks for r in readings) / (args.streams * tokens),
        delay_p50_ms=1e3 * percentile(delays, 0.5),
        delay_p99_ms=1e3 * percentile(delays, 0.99),
        delay_max_ms=1e3 * delays[-1],
        itl_p50_ms=1e3 * percentile(gaps, 0.5),
        itl_p99_ms=1e3 * percentile(gaps, 0.99),
        worker_cpu_share=report["cpu_s"] / (last - first),
        rss_mib_before=before,
        rss_mib_idle=idle,
        rss_mib_after=gateway.rss_mib(),
        kib_per_idle_stream=1024 * (idle - before) / args.streams,
    )


def times(readings: list[Reading], sent_at: list[float]) -> tuple[list[float], list[float]]:
    """Sorted delays of tokens and gaps between the tokens of a stream, from the first step on."""
    delays, gaps = [], []
    for reading in readings:
        arrivals = reading.arrivals
        delays += [a - s for a, s in zip(arrivals[1:], sent_at[1:], strict=False)]
        gaps += [b - a for a, b in pairwise(arrivals[1:])]
    return sorted(delays), sorted(gaps)


async def rates(args: argparse.Namespace) -> list[Round]:
    with stack(args.model, args.core, args.other_core) as (url, gateway):
        await gateway.wait_workers(0)
        warm = argparse.Namespace(**{**vars(args), "streams": 10, "seconds": 0.5})
        await one_rate(gateway, url, warm, 1000)
        rounds = []
        for rate in args.rates:
            rounds.append(await one_rate(gateway, url, args, rate))
            show(dataclasses.asdict(rounds[-1]))
        return rounds


# --- what megabyte prompts do to other streams --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Phase:
    """Delays (ms) of the tokens of short streams that were sent while these prompts came in."""

    prompts: str
    seconds: float
    answers: str
    tokens: int
    delay_p50_ms: float
    delay_p99_ms: float
    delay_max_ms: float


def bodies(model: str) -> dict[str, tuple[int, bytes]]:
    """Name -> how many at once, and the request."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    prose = " ".join(rng.choices(words, k=MEGABYTE // 4))[:MEGABYTE]

    def chat(text: str) -> bytes:
        body: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
        return post_request("/v1/chat/completions", {"model": model, "max_tokens": 1, **body})

    ids = [rng.randrange(1000, 40000) for _ in range(MEGABYTE // 7)]
    completion = {"model": model, "prompt": ids, "max_tokens": 1}
    return {
        "1 MB of text": (1, chat(prose)),
        "8 x 1 MB of text at once": (8, chat(prose)),
        "1 MB of typed control tokens": (1, chat("a<|im_end|>b " * (MEGABYTE // 13))),
        "1 MB of '<'": (1, chat("<" * MEGABYTE)),
        "1 MB of Japanese": (1, chat("日本語の文章" * (MEGABYTE // 18))),
        "1 MB of token ids": (1, post_request("/v1/completions", completion)),
    }


def ask(port: int, request: bytes) -> str:
    """Send a request, blocking; the status of the answer."""
    with socket.create_connection(("127.0.0.1", port), 4 * DEADLINE_S) as connection:
        connection.sendall(request)
        return connection.recv(65536)[9:12].decode()


async def ask_all(port: int, count: int, request: bytes) -> str:
    """Send `count` at once, from threads (our own event loop must go on); the statuses."""
    answers = await asyncio.gather(*(asyncio.to_thread(ask, port, request) for _ in range(count)))
    return ", ".join(sorted(set(answers)))


async def tokenise(args: argparse.Namespace, model: Path, label: str) -> list[Phase]:
    streams, steps_per_s = 100, 25
    requests = bodies(model.name)
    with stack(model, args.core, args.other_core) as (url, gateway):
        await gateway.wait_workers(0)
        worker = await start_worker(url, model, streams, streams * steps_per_s, SETTLE_S)
        await gateway.wait_workers(1)
        load = await open_streams(gateway, model, streams, 100 * steps_per_s)
        other = await start_worker(url, model, 0, 1, 0, pages=1 << 24)
        await gateway.wait_workers(2)  # the other one has more room: long prompts go there
        marks = [(f"nothing ({label})", "-", time.monotonic())]
        await asyncio.sleep(3)
        for name, (count, request) in requests.items():
            started = time.monotonic()
            answers = await ask_all(gateway.port, count, request)
            marks.append((name, answers, started))
            await asyncio.sleep(SETTLE_S)
        end = time.monotonic() - SETTLE_S / 2
        report = await stop_early(load, worker)
        other.terminate()
        await other.wait()
    sent_at = report["sent_at"]
    assert isinstance(sent_at, list)
    pairs = [
        (sent, arrival - sent)
        for client, texts in zip(load.clients, load.texts, strict=True)
        for sent, arrival in zip(
            sent_at, read_stream(client, texts, whole=False).arrivals, strict=False
        )
    ]
    phases = []
    ends = [*(start for _, _, start in marks[1:]), end]
    for (name, answers, start), stop in zip(marks, ends, strict=True):
        delays = sorted(delay for sent, delay in pairs if start <= sent < stop)
        phases.append(
            Phase(
                name,
                stop - start,
                answers,
                len(delays),
                *(1e3 * percentile(delays, share) for share in (0.5, 0.99, 1.0)),
            )
        )
        show(dataclasses.asdict(phases[-1]))
    return phases


async def tokenise_both(args: argparse.Namespace) -> list[Phase]:
    """With a context in which the prompts fit, and with the model's own, in which they do not.

    Of `--repeat` runs each phase's quietest counts: whatever else runs on the cores only adds.
    """
    runs = []
    with long_context_copy(args.model) as model:
        for _ in range(args.repeat):
            fits = await tokenise(args, model, "the prompts fit")
            runs.append(fits + await tokenise(args, args.model, "the prompts are too long"))
    return [min(same, key=lambda phase: phase.delay_max_ms) for same in zip(*runs, strict=True)]


def show(figures: dict[str, object]) -> None:
    parts = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()]
    print("  ".join(parts), flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rates", type=float, nargs="+", default=[5000, 10000, 15000, 20000])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each rate")
    parser.add_argument("--core", type=int, default=0, help="the gateway's core")
    parser.add_argument("--other-core", type=int, default=1, help="everything else")
    parser.add_argument("--tokenise", action="store_true", help="measure 1 MB prompts instead")
    parser.add_argument("--repeat", type=int, default=1, help="with --tokenise: best of so many")
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    name = "gateway-tokenise" if args.tokenise else "gateway"
    results = uvloop.run(tokenise_both(args) if args.tokenise else rates(args))
    if args.save:
        save(name, [dataclasses.asdict(r) for r in results])


def save(name: str, figures: object) -> None:
    today = datetime.date.today().isoformat()
    report = {
        "date": today,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "figures": figures,
    }
    (RESULTS / f"{name}-{today}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
