"""`make bench`: Pageferry and `transformers` on the same requests, one after the other.

Prints one table and writes the same figures with date and machine to `benchmarks/results/`. The
peer generates one request at a time in bfloat16 with its KV cache, on all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from load import Figures, Shape, Trace, prompt_ids, run, shapes, summarise
from transformers import AutoModelForCausalLM

MODEL = "SmolLM2-135M-Instruct"
RESULTS = Path(__file__).parent / "results"


def pageferry(work: list[Shape], concurrency: int, seed: int) -> Figures:
    """Over HTTP, through `pageferry up` with one worker of each kind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pageferry.compose.cli", "up", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stack:
        assert stack.stdout is not None
        try:
            if not stack.stdout.readline():
                raise RuntimeError("pageferry up ended before it was ready")
            url = f"http://127.0.0.1:{port}"
            asyncio.run(run(url, MODEL, [Shape(64, 16)] * 2, 2, seed + 1))  # warm up
            return asyncio.run(run(url, MODEL, work, concurrency, seed))
        finally:
            stack.send_signal(signal.SIGINT)
            stack.wait(15)


def transformers_one_by_one(model_dir: str, work: list[Shape], seed: int) -> Figures:
    """`generate` in this process; its first token's time is not measured apart."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    traces = []
    started = time.perf_counter()
    for index, shape in enumerate(work):
        ids = torch.tensor([prompt_ids(shape, index, seed)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=shape.output,
                max_new_tokens=shape.output,
                do_sample=False,
                pad_token_id=0,
            )
        tokens = output.shape[1] - shape.prompt
        traces.append(Trace([time.perf_counter() - started], tokens))
    return summarise(traces, work, time.perf_counter() - started)


def machine() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0] if names else platform.processor()}"


def table(figures: dict[str, Figures]) -> str:
    base = figures.get("transformers, one by one")
    lines = [
        "| system | output tok/s | ratio | TTFT p50 / p99, s | ITL p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    for name, f in figures.items():
        ratio = f"{f.output_tokens_per_s / base.output_tokens_per_s:.1f}" if base else ""
        served = name != "transformers, one by one"
        ttft = f"{f.ttft_p50_s:.2f} / {f.ttft_p99_s:.2f}" if served else ""
        itl = f"{f.itl_p50_s * 1e3:.0f} / {f.itl_p99_s * 1e3:.0f}" if served else ""
        lines.append(f"| {name} | {f.output_tokens_per_s:.1f} | {ratio} | {ttft} | {itl} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16, help="number of requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and prompts")
    parser.add_argument("--trace", type=Path, help="CSV file to take lengths from")
    parser.add_argument("--no-peer", action="store_true", help="measure Pageferry only")
    args = parser.parse_args()
    prepared = subprocess.run(
        [sys.executable, "-m", "pageferry.kernels.prepare"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    model_dir = prepared.stdout.strip().splitlines()[-1]
    work = shapes(args.requests, args.seed, args.trace)
    figures = {f"pageferry, {n} streams": pageferry(work, n, args.seed) for n in (1, 8)}
    if not args.no_peer:
        torch.set_num_threads(os.cpu_count() or 1)
        figures["transformers, one by one"] = transformers_one_by_one(model_dir, work, args.seed)
    report = table(figures)
    print(report)
    now = datetime.datetime.now(datetime.UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"compare-{now:%Y-%m-%d}.json"
    result = {
        "date": f"{now:%Y-%m-%d}",
        "machine": machine(),
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "figures": {name: dataclasses.asdict(f) for name, f in figures.items()},
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
