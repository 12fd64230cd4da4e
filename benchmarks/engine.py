"""What a decode step costs beside its kernels, by batch size, context length and sampling.

The decode engine's own loop runs over a model whose `forward` and `logits` only hand out prepared
tensors; their time is subtracted. What is left is sampling, which is shown apart, and the engine
itself: scheduling, building the batch, reporting. Prints JSON: milliseconds of CPU time per step
(one thread does it all), median of `--steps` steps.

    python benchmarks/engine.py [--steps 200] [--output FILE] [--sampler LIBRARY]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pageferry.decode_worker.engine import Engine
from pageferry.decode_worker.scheduler import Limits
from pageferry.kernels import runner as runner_module
from pageferry.kernels import sampling, sampling_native
from pageferry.kernels.runner import ModelRunner
from pageferry.kernels.sample_spec import Sampled, SampleSpec
from pageferry.kvtransfer.handoff import Intake
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams

VOCAB = 49152
PAGE_SIZE = 16
WARM_UP_STEPS = 10

STOPS = (0, 2)
MIXES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0, stop_token_ids=STOPS)],
    "sampled": [SamplingParams(temperature=0.8, seed=7, stop_token_ids=STOPS)],
    "mixed": [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.95, seed=2),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=3, logprobs=5),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.2, seed=4),
        SamplingParams(temperature=1.0, min_p=0.05, seed=5, logit_bias={11: 2.0}),
        SamplingParams(temperature=0.0, logprobs=0),
    ],
}
"""Sampling parameters, dealt out to the sequences in turn."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What the runner asks a model's configuration for."""

    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    vocab_size: int = VOCAB
    sampled_vocab_size: int = VOCAB


class PreparedModel:
    """Stands in for `Decoder`: random logits, spread as a language model's are."""

    config = Config()
    dtype = torch.float32
    device = torch.device("cpu")
    max_positions = 8192

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.zeros(4096, 8)
        self._logits = torch.randn(rows, VOCAB, generator=generator) * 3 - 15
        for row in self._logits:
            peak = torch.randint(3, VOCAB, (40,), generator=generator)
            row[peak] = torch.linspace(0, -8, 40)
        self.seconds = 0.0

    def forward(self, input_ids: Tensor, batch: object, kv: Tensor, on_layer: object) -> Tensor:
        return self._timed(lambda: self._hidden[: input_ids.shape[0]])

    def logits(self, hidden: Tensor) -> Tensor:
        return self._timed(lambda: self._logits[: hidden.shape[0]].clone())

    def _timed(self, work: Callable[[], Tensor]) -> Tensor:
        begun = time.thread_time()
        result = work()
        self.seconds += time.thread_time() - begun
        return result


class TimedSampler:
    """`sampling.sample`, and the seconds spent in it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        begun = time.thread_time()
        result = sampling.sample(logits, specs)
        self.seconds += time.thread_time() - begun
        return result


def measure(num_seqs: int, context: int, mix: str, steps: int) -> dict[str, float]:
    """Median milliseconds of a step outside the model; `RuntimeError` when a sequence ended."""
    total_tokens = context + WARM_UP_STEPS + steps + 1
    pages_each = -(-total_tokens // PAGE_SIZE)
    pool = PagePool(num_seqs * pages_each, PAGE_SIZE)
    kv = torch.zeros(1, pool.num_pages, 2, 1, PAGE_SIZE, 8)
    model = PreparedModel(num_seqs)
    runner = ModelRunner(model, kv, PAGE_SIZE)  # type: ignore[arg-type]
    events: list[tuple[str, Event]] = []

    def emit(new: Iterable[tuple[str, Event]]) -> None:
        events.extend(new)

    engine = Engine("w", pool, runner, Limits(num_seqs, 512, 8192, 0), emit)
    for index in range(num_seqs):
        engine.inbox.put(_sealed(pool, index, context, mix))
    sampler = TimedSampler()
    runner_module.sample = sampler
    own, in_sampling = [], []
    for _ in range(WARM_UP_STEPS + steps):
        model.seconds = sampler.seconds = 0.0
        begun = time.thread_time()
        engine.step()
        own.append(time.thread_time() - begun - model.seconds - sampler.seconds)
        in_sampling.append(sampler.seconds)
    if engine.num_running != num_seqs or len(events) < num_seqs * steps:
        raise RuntimeError(f"only {engine.num_running} of {num_seqs} sequences still run")
    return {
        "engine_ms": round(statistics.median(own[WARM_UP_STEPS:]) * 1e3, 3),
        "sampling_ms": round(statistics.median(in_sampling[WARM_UP_STEPS:]) * 1e3, 3),
    }


def _sealed(pool: PagePool, index: int, context: int, mix: str) -> Intake:
    params = dataclasses.replace(
        MIXES[mix][index % len(MIXES[mix])], max_tokens=100_000, stop_token_ids=STOPS
    )
    ids = torch.randint(3, 2000, (context,), generator=torch.Generator().manual_seed(index))
    request = Request(f"r{index}", 0, "gw", tuple(ids.tolist()), context, params)
    pages = pool.allocate(-(-context // PAGE_SIZE))
    first = Event(request.request_id, 0, Kind.TOKENS, "p", 0, (5,))
    return Intake(request, pages, first, [], "p")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=200, help="steps per case")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--sampler", type=Path, help="library with pf_sample; default: ours")
    args = parser.parse_args()
    if args.sampler:
        own = sampling_native.NativeSampler(ctypes.CDLL(str(args.sampler)))
        sampling.native_sampler = lambda: own
    torch.set_num_threads(1)
    cases = [
        {
            "sampling": mix,
            "sequences": num_seqs,
            "context": context,
            **measure(num_seqs, context, mix, args.steps),
        }
        for mix in MIXES
        for num_seqs in (8, 32)
        for context in (100, 3000)
    ]
    result = {
        "benchmark": "decode step outside forward and logits, CPU milliseconds",
        "sampler": "torch" if sampling.native_sampler() is None else "native",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}",
        "cases": cases,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
