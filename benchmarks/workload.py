"""The requests of a comparison: one list for all systems, kept in a file.

    {"seed": 0, "source": "conversation x 0.25 / 0.5", "requests": [[prompt, output], …]}

A level of n streams sends the first `4 n` of them, at least 8 and at most all. Prompts are drawn
from (seed, level, index), so all systems get the same ones and no level finds another's in a prefix
cache.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pageferry.compose.bench_client import Load
from pageferry.compose.bench_workload import Request, draw, fit_context, read_trace, scaled

PER_STREAM = 4
LEAST = 8


@dataclasses.dataclass(frozen=True)
class Workload:
    seed: int
    source: str
    requests: tuple[Request, ...]

    def level(self, streams: int) -> Load:
        """What `streams` closed loops send."""
        count = max(LEAST, PER_STREAM * streams)
        return Load(self.requests[:count], streams, key=f"{self.seed}-{streams}")

    @property
    def max_len(self) -> int:
        return max(r.prompt + r.output for r in self.requests)

    def save(self, path: Path) -> None:
        rows = [[r.prompt, r.output] for r in self.requests]
        data = {"seed": self.seed, "source": self.source, "requests": rows}
        path.write_text(json.dumps(data) + "\n")

    @classmethod
    def load(cls, path: Path) -> Workload:
        data = json.loads(path.read_text())
        requests = tuple(Request(prompt, output) for prompt, output in data["requests"])
        return cls(data["seed"], data["source"], requests)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where lengths come from; see `pageferry.compose.bench_workload`."""

    shape: str
    trace: Path | None
    prompt_scale: float
    output_scale: float
    seed: int
    max_model_len: int

    def build(self, largest_level: int) -> Workload:
        """Each level's part is drawn by itself, so that each has the shape's mean and tail."""
        count = max(LEAST, PER_STREAM * largest_level)
        if self.trace is not None:
            requests = read_trace(self.trace, count)
        else:
            requests, block = [], 0
            while len(requests) < count:
                size = LEAST if not requests else len(requests)  # 8, 8, 16, 32, ...
                requests += draw(self.shape, size, self.seed + 1000 * block)
                block += 1
        name = self.trace.name if self.trace else self.shape
        requests = scaled(requests[:count], self.prompt_scale, self.output_scale)
        fitted, factor = fit_context(requests, self.max_model_len)
        source = f"{name}, prompts x {self.prompt_scale:g}, outputs x {self.output_scale:g}"
        if factor < 1:
            source += f", all x {factor:.3g} to fit {self.max_model_len} tokens"
        return Workload(self.seed, source, tuple(fitted))
