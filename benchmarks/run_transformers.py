"""Runner for `transformers`' `generate` in batches of a fixed size, in bfloat16.

    python run_transformers.py MODEL_DIR THREADS BATCH

Protocol: see `InProcess` in `systems.py`. Only closed loops: requests are taken in order, `BATCH`
at a time, and the next batch begins when the longest of the last one has ended. A row's tokens
count up to its own length.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

PAD = 0


class Clock(LogitsProcessor):
    """Notes when the logits of each step are there: the time of that step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def generate(model: Any, items: list[dict[str, Any]]) -> list[float]:
    """Times of the steps; one token for every row in each. Rows are padded on the left."""
    longest = max(len(item["ids"]) for item in items)
    pads = [longest - len(item["ids"]) for item in items]
    rows = [[PAD] * pad + item["ids"] for pad, item in zip(pads, items, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    steps = max(item["output"] for item in items)
    clock = Clock()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            min_new_tokens=steps,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=PAD,
            logits_processor=LogitsProcessorList([clock]),
        )
    assert output.shape[1] - longest == steps == len(clock.times)
    return clock.times


def run(model: Any, job: dict[str, Any], batch: int) -> dict[str, Any]:
    if job["open"] or job["seconds"] is not None:
        raise ValueError("only closed loops without a time limit can be run in static batches")
    outcomes = []
    started = time.perf_counter()
    for first in range(0, len(job["closed"]), batch):
        items = job["closed"][first : first + batch]
        due = time.perf_counter()
        times = generate(model, items)
        for row, item in enumerate(items):
            chunks = [(at - started, 1) for at in times[: item["output"]]]
            outcomes.append(
                {
                    "kind": "closed",
                    "index": first + row,
                    "due_s": due - started,
                    "chunks": chunks,
                    "end_s": chunks[-1][0],
                    "cut": False,
                }
            )
    return {"wall_s": time.perf_counter() - started, "outcomes": outcomes}


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line), int(sys.argv[3]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
