"""Sampling in Triton picks the tokens that the torch reference picks from the same logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this platform")

from pageferry.kernels import sampling, triton_sampler
from pageferry.kernels.sample_spec import NON_FINITE, SampleSpec
from pageferry.kernels.triton_sampling import PART, row_maxima

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


def check_rows(
    rows: list[Params], make: Callable[[int], Tensor], rounds: int = 2, history: int = 0
) -> None:
    """Each round: new logits, and sequences of other lengths, so other noise."""
    for start in range(rounds):
        torch.manual_seed(start)
        logits = torch.stack([make(i) for i in range(len(rows))])
        size = logits.shape[1]
        texts = [
            torch.randint(0, size, (history + start * 7 + i,)).tolist() for i in range(len(rows))
        ]
        specs = [SampleSpec(p, text, len(text) // 2) for p, text in zip(rows, texts, strict=True)]
        want = sampling.sample_reference(logits.clone(), specs)
        got = triton_sampler.sample(logits.to(DEVICE), specs)
        for i, (one, other) in enumerate(zip(want, got, strict=True)):
            assert (one.token_id, one.error) == (other.token_id, other.error), rows[i]
            assert (one.logprob is None) == (other.logprob is None)
            assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]
            assert [v for _, v in other.top] == pytest.approx([v for _, v in one.top], abs=1e-5)


def normal(size: int, spread: float, _row: int) -> Tensor:
    return torch.randn(size) * spread


def coarse(size: int, _row: int) -> Tensor:
    """Few distinct values, so that every cut falls among equal logits; some excluded."""
    x = torch.randint(-2, 3, (size,)).float()
    x[torch.rand(size) < 0.1] = -math.inf
    x[3] = 2.0
    return x


def equal(_row: int) -> Tensor:
    """Cuts fall among equals: the lower ids stay, exactly as many as are asked for."""
    return torch.tensor([0.0, -0.0] * 4)


def check_maxima(size: int) -> None:
    torch.manual_seed(2)
    room = torch.full((4, size + 3), math.nan)
    room[:, :size] = torch.randn(4, size) * 20
    room[1, :size] = -1e30
    room[2, [0, size - 1, size // 2]] = 100.0
    room[3, :size] = -math.inf
    room[3, size // 3] = -7.0
    logits = room.to(DEVICE)[:, :size]
    found = row_maxima(logits)
    assert found.best.tolist() == [*logits[:3].amax(1).tolist(), -7.0]
    first = [logits[0].argmax().item(), 0, 0, size // 3]
    assert found.token.tolist() == first
    torch.testing.assert_close(
        found.logsumexp.double(), logits.double().logsumexp(1), rtol=1e-6, atol=1e-6
    )


def check_unusable_rows() -> None:
    logits = torch.zeros(4, 70, device=DEVICE)
    logits[0, 69], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    best = row_maxima(logits).best.tolist()
    assert best == [math.inf, math.inf, -math.inf, 0.0]
    specs = [SampleSpec(Params(top_k=3, top_p=0.5, logprobs=2), [1, 2], 2) for _ in range(4)]
    errors = [sampled.error for sampled in triton_sampler.sample(logits.clone(), specs)]
    assert errors == [
        NON_FINITE,
        NON_FINITE,
        NON_FINITE,
        "",
    ]  # neighbours do not disturb each other


MIXED = [
    Params(seed=0),
    Params(seed=2**64 - 1, temperature=0.3),
    Params(top_k=1),
    Params(top_k=5, seed=9),
    Params(top_p=0.9, seed=10),
    Params(top_p=0.0),
    Params(top_k=40, top_p=0.5, temperature=1.7),
    Params(min_p=0.2, seed=77),
    Params(min_p=0.01, top_p=0.7, top_k=100),
    Params(top_k=100_000, top_p=0.999),
    Params(temperature=1e-3, top_p=0.3),
]
ADJUSTED = [
    Params(temperature=0, logprobs=0),
    Params(temperature=0, repetition_penalty=1.8, logprobs=3),
    Params(presence_penalty=0.5, frequency_penalty=0.3, logprobs=5),
    Params(repetition_penalty=0.7, top_k=20, logit_bias={3: 4.0, 7: -100.0}),
    Params(temperature=0, logit_bias={5: 100.0}, logprobs=1),
    Params(logit_bias={99_999: 1.0}),
    Params(temperature=0, min_tokens=1000, stop_token_ids=(3, 4, 5, 6, 99_999)),
    Params(temperature=1e38),
]
CASES: dict[str, Callable[[], Any]] = {
    "adjusted": partial(check_rows, ADJUSTED, partial(normal, 100, 2.0), 3, 30),
    "adjusted-ties": partial(check_rows, ADJUSTED, partial(coarse, 60), 2, 5),
    "unusable-rows": check_unusable_rows,
    "mixed": partial(check_rows, MIXED, partial(normal, 1000, 3.0), 1),
    "mixed-flat": partial(check_rows, MIXED, partial(normal, 300, 0.05), 1),
    "mixed-ties": partial(check_rows, MIXED, partial(coarse, 200), 1),
    "no-cut": partial(check_rows, [Params(seed=s) for s in range(9)], partial(normal, 700, 5.0)),
    "equals": partial(
        check_rows,
        [Params(seed=s, **cut) for s in range(8) for cut in ({"top_k": 2}, {"top_p": 0.5})],
        equal,
        1,
    ),
    "min_p": partial(
        check_rows, [Params(min_p=0.3, seed=s) for s in range(8)], partial(normal, 60, 1.0), 1
    ),
    "several-parts": partial(
        check_rows, [Params(), Params(top_k=9)], partial(normal, 2 * PART + 77, 2.0), 1
    ),
}
for _size in (1, 70, PART, PART + 1, 3 * PART + 5):
    CASES[f"maxima-{_size}"] = partial(check_maxima, _size)


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_refused_logits() -> None:
    with pytest.raises(ValueError, match="float32"):
        row_maxima(torch.zeros(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous last axis"):
        row_maxima(torch.zeros(8, 2).t())
    with pytest.raises(ValueError, match="no columns"):
        row_maxima(torch.zeros(2, 0))
