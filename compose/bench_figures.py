"""From what the client saw to figures: latencies, throughput, goodput.

Names are those of `vllm bench serve`. TTFT: from due (open loop) or sent (closed loop) to the first
token. ITL: time between successive tokens of a stream as they reach the client; of a chunk with
several tokens the first has the gap, the others 0. TPOT: (end of tokens - first token) / (tokens
- 1). E2EL: to the last token. Percentiles interpolate linearly. Requests that failed count in no
latency. Of requests that were cut off at the end the tokens count in the throughput, the gaps in
ITL and, if the first token came, TTFT.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pageferry.compose.bench_client import Outcome, Result


@dataclass(frozen=True)
class Slo:
    """What a request has to keep to count as good; None: no bound. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    """Bound for the p99 of the request's own gaps."""

    def __str__(self) -> str:
        bounds = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "ITL p99": self.itl_ms}
        return ", ".join(f"{k} <= {v:g} ms" for k, v in bounds.items() if v is not None) or "none"

    def kept_by(self, seen: Outcome) -> bool:
        if seen.error or seen.cut:
            return False
        gaps = token_gaps(seen)
        return (
            (self.ttft_ms is None or ttft_s(seen) * 1e3 <= self.ttft_ms)
            and (self.tpot_ms is None or tpot_s(seen) * 1e3 <= self.tpot_ms)
            and (self.itl_ms is None or not gaps or percentile(gaps, 0.99) * 1e3 <= self.itl_ms)
        )


@dataclass(frozen=True)
class Spread:
    """One latency over all requests or tokens, ms."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        ms = sorted(value * 1e3 for value in seconds)
        if not ms:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (percentile(ms, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ms) / len(ms), p50, p90, p99, ms[-1])


@dataclass(frozen=True)
class Figures:
    completed: int
    failed: int
    errors: dict[str, int]
    """Reason -> how often."""
    cut: int
    short: int
    """Completed, but with another number of tokens than asked for."""
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float
    """Requests a second that kept the SLO."""
    good_share: float
    """Of all requests that were sent and not cut, those that kept the SLO."""
    max_concurrent_requests: int
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2el_ms: Spread

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values of a non-empty sequence."""
    values = sorted(ordered)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def ttft_s(seen: Outcome) -> float:
    return seen.chunks[0][0] - seen.due_s


def tpot_s(seen: Outcome) -> float:
    """0 for a single token."""
    later = seen.output_tokens - 1
    return (seen.chunks[-1][0] - seen.chunks[0][0]) / later if later > 0 else 0.0


def token_gaps(seen: Outcome) -> list[float]:
    """Seconds before each token after the first."""
    gaps: list[float] = []
    for (before, _), (now, tokens) in itertools.pairwise(seen.chunks):
        gaps += [now - before, *[0.0] * (tokens - 1)]
    return [*[0.0] * (seen.chunks[0][1] - 1), *gaps] if seen.chunks else []


def concurrent(outcomes: Iterable[Outcome]) -> int:
    """Most requests that were under way at the same time."""
    edges = [edge for o in outcomes for edge in ((o.sent_s, 1), (o.end_s, -1))]
    return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)


def summarise(result: Result, slo: Slo) -> Figures:
    """Figures of a load, or of a part of one (`Result` with some of its outcomes)."""
    outcomes, wall_s = result.outcomes, result.wall_s
    whole = [o for o in outcomes if not o.error and not o.cut]
    cut = [o for o in outcomes if o.cut]
    failed = [o for o in outcomes if o.error]
    good = sum(slo.kept_by(o) for o in whole)
    prompts = sum(o.prompt_tokens or o.request.prompt for o in whole)
    tokens = sum(o.output_tokens for o in outcomes)
    return Figures(
        completed=len(whole),
        failed=len(failed),
        errors=dict(collections.Counter(o.error for o in failed)),
        cut=len(cut),
        short=sum(o.output_tokens != o.request.output for o in whole),
        duration_s=wall_s,
        total_input_tokens=prompts,
        total_output_tokens=tokens,
        request_throughput=len(whole) / wall_s,
        output_throughput=tokens / wall_s,
        total_token_throughput=(prompts + tokens) / wall_s,
        request_goodput=good / wall_s,
        good_share=good / max(1, len(whole) + len(failed)),
        max_concurrent_requests=concurrent(outcomes),
        ttft_ms=Spread.of(ttft_s(o) for o in [*whole, *cut] if o.chunks),
        tpot_ms=Spread.of(tpot_s(o) for o in whole if o.output_tokens > 1),
        itl_ms=Spread.of(gap for o in [*whole, *cut] for gap in token_gaps(o)),
        e2el_ms=Spread.of(o.chunks[-1][0] - o.due_s for o in whole),
    )


def report(figures: Figures, slo: Slo) -> str:
    """The table that `pageferry bench` prints."""
    f = figures
    lines = [
        f"requests             {f.completed} ok, {f.failed} failed"
        + (f", {f.cut} cut off at the end" if f.cut else ""),
        *(f"  failed {count} x       {reason}" for reason, count in f.errors.items()),
        f"duration             {f.duration_s:.1f} s, at most {f.max_concurrent_requests} at a time",
        f"tokens               {f.total_input_tokens} in, {f.total_output_tokens} out",
        f"request throughput   {f.request_throughput:.2f} requests/s",
        f"output throughput    {f.output_throughput:.1f} tokens/s",
        f"total throughput     {f.total_token_throughput:.1f} tokens/s",
    ]
    if f.short:
        lines.append(f"output length        {f.short} requests got fewer or more tokens than asked")
    if slo != Slo():
        lines.append(
            f"goodput              {f.request_goodput:.2f} requests/s, {f.good_share:.0%} of all "
            f"({slo})"
        )
    lines.append(f"{'':20}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}")
    for name, s in (
        ("TTFT, ms", f.ttft_ms),
        ("TPOT, ms", f.tpot_ms),
        ("ITL, ms", f.itl_ms),
        ("E2E latency, ms", f.e2el_ms),
    ):
        cells = "".join(f"{value:9.1f}" for value in (s.mean, s.p50, s.p90, s.p99, s.max))
        lines.append(f"{name:20}{cells}")
    return "\n".join(lines)
