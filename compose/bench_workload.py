"""What a load test sends: request lengths, arrival times and prompts, all from one seed.

Lengths come from one of three built-in shapes, or from a trace file:

- `conversation`, `code`: the two services of the Azure LLM inference trace 2023 (Splitwise, ISCA
  2024); `long-conversation`: the Mooncake conversation trace (FAST 2025). Each is kept as quantiles
  of its first 1,500 to 3,000 requests and drawn by interpolating between them. Prompt and output
  lengths are drawn independently: in the Azure conversations the logarithms correlate by 0.16.
- A CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's format), or a
  JSONL file with timestamp (ms), input_length and output_length (Mooncake's).

Draws are stratified: of n requests one falls into each n-th of the distribution, so that even 32
requests have the shape's mean and tail. Requests longer than the server's context scale the whole
workload down, which keeps its shape, instead of being cut.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import datetime
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class WorkloadError(ValueError):
    """A trace file or a length that cannot be used; the text is for the operator."""


@dataclass(frozen=True)
class Request:
    """One request to send."""

    prompt: int
    """Tokens of the prompt, at least 1."""
    output: int
    """Tokens to generate, at least 1."""
    arrival_s: float = 0.0
    """Seconds after the start at which it is due; only open loops look at it."""


QUANTILE_LEVELS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "conversation": (
        (2, 181, 245, 409, 1041, 1165, 2236, 4080, 4107, 7930),
        (10, 41, 56, 91, 217, 405, 432, 498, 622, 1000),
    ),
    "code": (
        (6, 59, 135, 493, 1339, 2748, 4947, 6607, 7436, 7437),
        (6, 6, 7, 9, 13, 23, 55, 91, 294, 1899),
    ),
    "long-conversation": (
        (891, 902, 1008, 2648, 8208, 17401, 30644, 47816, 99934, 123192),
        (1, 11, 26, 164, 363, 493, 599, 683, 1032, 2000),
    ),
}
"""Name -> (prompt tokens, output tokens) at `QUANTILE_LEVELS`."""

FIRST_ID, LAST_ID = 1000, 20_000
"""Prompts are ids from this range: ordinary tokens in every tokenizer of 20,000 tokens or more."""

_COMMON_WORDS = (
    "the of and to in is that for it with as was on are by this be from or have an which one you "
    "had not but what all were when we there can your said use each she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two "
    "more write go see number no way could people my than first water been call who oil its now "
    "find long down day did get come made may part river stone light garden window letter paper"
)
WORDS = _COMMON_WORDS.split()


def interpolate(quantiles: Sequence[int], share: float) -> float:
    """The value at `share` (0 to 1) of a distribution given at `QUANTILE_LEVELS`."""
    right = min(bisect.bisect_right(QUANTILE_LEVELS, share), len(QUANTILE_LEVELS) - 1)
    low, high = QUANTILE_LEVELS[right - 1], QUANTILE_LEVELS[right]
    weight = (share - low) / (high - low)
    return quantiles[right - 1] * (1 - weight) + quantiles[right] * weight


def draw(shape: str, count: int, seed: int) -> list[Request]:
    """`count` requests of a built-in shape; equal seeds give equal requests."""
    rng = random.Random(f"{shape}-{seed}")
    columns = []
    for quantiles in SHAPES[shape]:
        shares = [(i + rng.random()) / count for i in range(count)]
        rng.shuffle(shares)
        columns.append([max(1, round(interpolate(quantiles, share))) for share in shares])
    return [Request(prompt, output) for prompt, output in zip(*columns, strict=True)]


def read_trace(path: Path, count: int) -> list[Request]:
    """The first `count` requests of a trace (0: all), the first one due at 0 s."""
    try:
        with path.open(newline="") as file:
            rows = _jsonl(file.readlines()) if path.suffix == ".jsonl" else _csv(file.readlines())
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise WorkloadError(
            f"{path}: {error!r}; expected a CSV with TIMESTAMP, ContextTokens, GeneratedTokens or "
            "a .jsonl with timestamp, input_length, output_length"
        ) from error
    rows = rows[: count or None]
    if not rows:
        raise WorkloadError(f"{path}: no requests in it")
    start = min(r.arrival_s for r in rows)
    return [dataclasses.replace(r, arrival_s=r.arrival_s - start) for r in rows]


def _csv(lines: list[str]) -> list[Request]:
    def seconds(text: str) -> float:
        moment, _, fraction = text.partition(".")
        whole = datetime.datetime.fromisoformat(moment).replace(tzinfo=datetime.UTC)
        return whole.timestamp() + float(f"0.{fraction or 0}")

    return [
        Request(
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
            seconds(row["TIMESTAMP"]),
        )
        for row in csv.DictReader(lines)
    ]


def _jsonl(lines: list[str]) -> list[Request]:
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        Request(
            max(1, int(row["input_length"])),
            max(1, int(row["output_length"])),
            float(row["timestamp"]) / 1000,
        )
        for row in rows
    ]


def scaled(requests: Sequence[Request], prompt: float, output: float) -> list[Request]:
    """Every length multiplied, and at least 1."""
    return [
        dataclasses.replace(
            r, prompt=max(1, round(r.prompt * prompt)), output=max(1, round(r.output * output))
        )
        for r in requests
    ]


def fit_context(requests: Sequence[Request], max_model_len: int) -> tuple[list[Request], float]:
    """The requests scaled so that the longest fits, and the factor (1.0: nothing was changed)."""
    longest = max(r.prompt + r.output for r in requests)
    if longest <= max_model_len:
        return list(requests), 1.0
    factor = (max_model_len - 2) / longest  # each of the two lengths may be rounded up
    if factor * longest < 2:
        raise WorkloadError(f"a context of {max_model_len} tokens holds no prompt and output")
    return scaled(requests, factor, factor), factor


def poisson(requests: Sequence[Request], rate: float, seed: int) -> list[Request]:
    """The requests with arrivals at random, `rate` a second on average, the first at 0 s."""
    rng = random.Random(f"arrivals-{seed}")
    now, timed = 0.0, []
    for request in requests:
        timed.append(dataclasses.replace(request, arrival_s=now))
        now += rng.expovariate(rate)
    return timed


def prompt_ids(count: int, key: str) -> list[int]:
    """`count` random ordinary token ids; other keys have no prefix in common."""
    rng = random.Random(key)
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def prompt_text(words: int, key: str) -> str:
    """`words` random common English words."""
    return " ".join(random.Random(key).choices(WORDS, k=max(1, words)))
