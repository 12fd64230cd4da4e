"""What `--deterministic` costs: tokens/s with the mode over tokens/s without it.

Both are computed in turns in one process, the fastest of several turns each, so that the ratio
holds although the machine's speed changes. With pages of 16 the mode changes no instruction, and
what differs from 1.00 is the noise of the measurement. Pages of 8 show its price for the shapes
that the tiles of decode attention do not fit.

    taskset -c 1 python benchmarks/deterministic.py --model DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import report
import torch

from pageferry.kernels import native
from pageferry.kernels.model import load_model
from pageferry.kernels.native_model import NativeDecoder
from pageferry.kernels.runner import Chunk, build_batch

CONTEXT = 300
CASES = {f"decode, {n} x {CONTEXT}": (n, 1, CONTEXT - 1) for n in (1, 8, 32)}
CASES["prefill, 512 tokens"] = (1, 512, 0)
"""Sequences, new tokens of each, earlier tokens of each."""


@dataclass(frozen=True)
class Figure:
    page_size: int
    case: str
    tokens_per_s: float
    tokens_per_s_deterministic: float

    @property
    def ratio(self) -> float:
        return self.tokens_per_s_deterministic / self.tokens_per_s


def measure(model: NativeDecoder, page_size: int, case: str, turns: int) -> Figure:
    sequences, new, old = CASES[case]
    pages = -(-(new + old) // page_size)
    order = torch.randperm(sequences * pages).tolist()
    chunks = [
        Chunk([7] * new, old, order[i * pages : (i + 1) * pages], None) for i in range(sequences)
    ]
    ids, batch = build_batch(chunks, page_size, model.device)
    c = model.config
    shape = (c.num_layers, sequences * pages, 2, c.num_kv_heads, page_size, c.head_dim)
    kv = torch.randn(shape, dtype=torch.float32).to(model.dtype)
    last = batch.cu_seqlens_q[1:].long() - 1
    best = [math.inf, math.inf]
    for _ in range(turns):
        for mode in (0, 1):
            model.weights.deterministic = mode
            begun = time.thread_time()  # of the processor: other programs take turns with us
            model.logits(model.forward(ids, batch, kv)[last])
            best[mode] = min(best[mode], time.thread_time() - begun)
    tokens = sequences * new
    return Figure(page_size, case, tokens / best[0], tokens / best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    core = sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    model = load_model(arguments.model, torch.device("cpu"), torch.bfloat16, 1024)
    if not isinstance(model, NativeDecoder):
        raise SystemExit("the CPU kernels were not built here: nothing to measure")
    figures = [
        measure(model, page_size, case, arguments.turns) for page_size in (16, 8) for case in CASES
    ]
    rows = [[f"pages of {f.page_size}: {f.case}", f"{f.ratio:.2f}"] for f in figures]
    level = native.LEVELS[model.lib.pf_current_level()]
    print(f"kernels: {level}")
    print(report.grid(["tokens/s with the mode / without", "ratio"], rows))
    if arguments.json is not None:
        result = {
            "date": report.today(),
            "machine": report.machine([core]),
            "level": level,
            "figures": [asdict(f) | {"ratio": f.ratio} for f in figures],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
