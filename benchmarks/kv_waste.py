"""How much of the allocated KV memory holds nothing: 1 - live / allocated token slots over time.

Pageferry: the pages that its decode workers' ledgers call live (sampled from `/v1/workers` twice a
second; a worker publishes once a third of its lease) against the tokens that the clients' running
requests have at that moment. Both are summed over the whole load and `SETTLE_S` after it, and then
divided: a ledger that is a second old has both ends of a request late, which cancels out. Workers
that publish `kv_live_tokens` are taken at their word instead.

For comparison, what two ways of reserving contiguous memory would have wasted on the same requests:
the model's whole context for each, or exactly its prompt and output, known in advance.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from pageferry.compose.bench_client import Outcome, Result

LIVE_TOKENS = "kv_live_tokens"
SETTLE_S = 3.0
"""After the last request: until every published ledger is one from after it."""


@dataclasses.dataclass(frozen=True)
class Waste:
    """Shares of allocated slots, 0 to 1."""

    paged: float | None
    """Measured; None where a system tells nothing."""
    reserved_context: float
    reserved_exactly: float
    samples: int = 0


def tokens_at(seen: Outcome, now: float) -> int:
    """Prompt and output tokens in a decode worker's pages; 0 unless it is decoding at `now`."""
    if not seen.chunks or not seen.chunks[0][0] <= now <= seen.end_s:
        return 0
    arrived = bisect.bisect_right([at for at, _ in seen.chunks], now)
    return seen.request.prompt + sum(tokens for _, tokens in seen.chunks[:arrived])


def _live_slots(workers: Sequence[dict[str, Any]]) -> tuple[int, int | None]:
    """(slots in live pages, live tokens or None) over the decode workers."""
    ledgers = [(w["ledger"], w["stats"]) for w in workers if w["role"] == "decode"]
    slots = sum(ledger["live"] * ledger["page_size"] for ledger, _ in ledgers)
    told = [stats[LIVE_TOKENS] for _, stats in ledgers if LIVE_TOKENS in stats]
    return slots, round(sum(told)) if len(told) == len(ledgers) else None


def measure(result: Result, samples: Sequence[tuple[float, Any]], max_model_len: int) -> Waste:
    """`samples`: (seconds on the result's clock, the `data` of `/v1/workers`, or None)."""
    return Waste(*_paged(result, samples), *_reserved(result, max_model_len), len(samples))


def _paged(result: Result, samples: Sequence[tuple[float, Any]]) -> tuple[float | None]:
    live = slots = 0
    for now, workers in samples:
        if workers is None:
            continue
        allocated, told = _live_slots(workers)
        slots += allocated
        live += sum(tokens_at(o, now) for o in result.outcomes) if told is None else told
    return (1 - live / slots if slots else None,)


def _reserved(result: Result, max_model_len: int) -> tuple[float, float]:
    """Token-seconds of each request, exactly, against what a reservation holds for as long."""
    live = whole = exact = 0.0
    for seen in result.outcomes:
        if not seen.chunks:
            continue
        tokens = seen.request.prompt
        edges = [*seen.chunks, (seen.end_s, 0)]
        for (at, count), (until, _) in itertools.pairwise(edges):
            tokens += count
            live += tokens * (until - at)
        held_s = seen.end_s - seen.chunks[0][0]
        whole += max_model_len * held_s
        exact += (seen.request.prompt + seen.request.output) * held_s
    return (1 - live / whole, 1 - live / exact) if whole else (0.0, 0.0)
