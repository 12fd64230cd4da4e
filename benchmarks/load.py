"""Load an OpenAI-compatible server with streamed completions and measure what its users feel.

    python benchmarks/load.py --url http://127.0.0.1:8000 --requests 32 --concurrency 8

Prompts are random token ids whose lengths come from a seeded log-normal, or from a trace file with
the columns TIMESTAMP,ContextTokens,GeneratedTokens (arrival times are not replayed). Output lengths
are forced with `ignore_eos`. TTFT: from sending to the first chunk with choices. ITL: the gap
between two such chunks of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import json
import random
import time
from pathlib import Path

import aiohttp

MAX_PROMPT = 1500
MAX_OUTPUT = 300


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths of one request, tokens."""

    prompt: int
    output: int


@dataclasses.dataclass
class Trace:
    """What one stream's client saw; times are seconds since its request was sent."""

    chunk_times: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Figures:
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    wall_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int


def shapes(count: int, seed: int, trace: Path | None = None) -> list[Shape]:
    """`count` request shapes: the first rows of a trace, or about 260 + 120 tokens on average."""
    if trace is not None:
        with trace.open(newline="") as file:
            rows = list(csv.DictReader(file))[:count]
        pairs = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows]
    else:
        rng = random.Random(seed)
        pairs = [
            (round(rng.lognormvariate(5.2, 0.8)), round(rng.lognormvariate(4.6, 0.6)))
            for _ in range(count)
        ]
    return [Shape(min(MAX_PROMPT, max(1, p)), min(MAX_OUTPUT, max(2, o))) for p, o in pairs]


def prompt_ids(shape: Shape, index: int, seed: int) -> list[int]:
    """Random ordinary token ids; no two requests share a prefix."""
    rng = random.Random(f"{seed}-{index}")
    return [rng.randrange(1000, 20000) for _ in range(shape.prompt)]


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; 0 when there are no values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summarise(traces: list[Trace], work: list[Shape], wall_s: float) -> Figures:
    gaps = [
        later - earlier
        for t in traces
        for earlier, later in zip(t.chunk_times, t.chunk_times[1:], strict=False)
    ]
    first = [t.chunk_times[0] for t in traces]
    output = sum(t.tokens for t in traces)
    return Figures(
        output_tokens_per_s=output / wall_s,
        ttft_p50_s=percentile(first, 0.5),
        ttft_p99_s=percentile(first, 0.99),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p99_s=percentile(gaps, 0.99),
        wall_s=wall_s,
        requests=len(traces),
        prompt_tokens=sum(s.prompt for s in work),
        output_tokens=output,
    )


async def one(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Trace:
    """One streamed completion; `RuntimeError` for anything but a full stream."""
    trace, started = Trace(), time.perf_counter()
    async with session.post(url + "/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"the stream ended with {chunk['error']}")
            if chunk["choices"]:
                trace.chunk_times.append(time.perf_counter() - started)
            if chunk.get("usage"):
                trace.tokens = chunk["usage"]["completion_tokens"]
    if trace.tokens != body["max_tokens"]:
        raise RuntimeError(f"asked for {body['max_tokens']} tokens, got {trace.tokens}")
    return trace


async def run(url: str, model: str, work: list[Shape], concurrency: int, seed: int) -> Figures:
    """All of `work`, at most `concurrency` streams at a time."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def limited(index: int, shape: Shape) -> Trace:
            body = {
                "model": model,
                "prompt": prompt_ids(shape, index, seed),
                "max_tokens": shape.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with gate:
                return await one(session, url, body)

        started = time.perf_counter()
        traces = await asyncio.gather(*(limited(i, s) for i, s in enumerate(work)))
        return summarise(list(traces), work, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="base URL, without /v1")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="model id")
    parser.add_argument("--requests", type=int, default=32, help="number of requests")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and prompts")
    parser.add_argument("--trace", type=Path, help="CSV file to take lengths from")
    args = parser.parse_args()
    work = shapes(args.requests, args.seed, args.trace)
    figures = asyncio.run(run(args.url, args.model, work, args.concurrency, args.seed))
    print(json.dumps(dataclasses.asdict(figures), indent=2))


if __name__ == "__main__":
    main()
