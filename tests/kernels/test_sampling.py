"""Sampling: distributions, filters, penalties, determinism, and errors that stay in their row."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels.sampling import (
    GUMBEL_SPAN,
    UNIFORM_BITS,
    Sampled,
    SampleSpec,
    gumbel,
    sample,
)
from pageferry.kvtransfer.wire import SamplingParams

VOCAB = 49152


def spec(prompt: int = 3, output: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    """A sequence of `prompt` tokens (ids 0, 1, …) and this output."""
    return SampleSpec(SamplingParams(**params), [*range(prompt), *output], prompt)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: Tensor, *specs: SampleSpec) -> list[Sampled]:
    return sample(logits.clone(), specs)


def draws(row: list[float], count: int = 1500, **params: Any) -> Counter[int]:
    """How often each token is drawn from these logits over many positions."""
    logits = torch.tensor(row).expand(count, -1)
    specs = [spec(1 + i, **params) for i in range(count)]
    return Counter(s.token_id for s in choose(logits, *specs))


def assert_distribution(got: Counter[int], probs: list[float]) -> None:
    """Chi-square with a bound six standard deviations above its mean."""
    total = got.total()
    expected = {i: p * total for i, p in enumerate(probs) if p > 0}
    assert set(got) <= set(expected)
    statistic = sum((got[i] - e) ** 2 / e for i, e in expected.items())
    freedom = len(expected) - 1
    assert statistic <= freedom + 6 * math.sqrt(2 * freedom)


# --- greedy


def test_temperature_zero_is_argmax_whatever_else_is_set() -> None:
    logits = random_logits(4)
    specs = [spec(temperature=0.0, seed=i, top_p=0.5, top_k=40, min_p=0.2) for i in range(4)]
    assert [s.token_id for s in choose(logits, *specs)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [5, 64, 199, 4096])
def test_argmax_takes_the_first_of_equals(vocab: int) -> None:
    logits = torch.zeros(3, vocab)
    logits[0, [3, 4]] = 1.0
    logits[1, -1] = 1.0
    results = choose(logits, *[spec(temperature=0.0)] * 3)
    assert [s.token_id for s in results] == [3, vocab - 1, 0]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.9999999}])
def test_narrow_filters_equal_greedy(params: dict[str, Any]) -> None:
    logits = random_logits(6)
    specs = [spec(seed=i, temperature=1.0, **params) for i in range(6)]
    assert [s.token_id for s in choose(logits, *specs)] == logits.argmax(-1).tolist()


# --- the distribution

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.5, 0.2]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    probs = (torch.tensor(LOGITS) / temperature).softmax(-1).tolist()
    assert_distribution(draws(LOGITS, temperature=temperature, seed=17), probs)


def test_draws_over_seeds_follow_the_softmax_too() -> None:
    logits = torch.tensor(LOGITS).expand(1500, -1)
    got = Counter(s.token_id for s in choose(logits, *(spec(seed=i) for i in range(1500))))
    assert_distribution(got, torch.tensor(LOGITS).softmax(-1).tolist())


def test_a_large_flat_vocabulary_is_drawn_from_evenly() -> None:
    got = choose(torch.zeros(512, VOCAB), *(spec(1 + i, seed=3) for i in range(512)))
    assert_distribution(Counter(s.token_id * 16 // VOCAB for s in got), [1 / 16] * 16)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {0, 6, 1}),
        ({"top_k": 10**9}, set(range(8))),
        ({"top_p": 0.6}, {0, 6}),  # probabilities 0.40, 0.24, 0.15, …
        ({"top_p": 0.65}, {0, 6, 1}),
        ({"min_p": 0.3}, {0, 6, 1}),  # e^-1.2 < 0.3: ids 0, 6 and 1 (e^-1 = 0.37)
        ({"top_k": 2, "top_p": 0.62}, {0}),  # of two, the first holds 0.622
        ({"top_k": 2, "top_p": 0.63}, {0, 6}),
    ],
)
def test_filters_keep_and_renormalise(params: dict[str, Any], kept: set[int]) -> None:
    probs = torch.tensor(LOGITS).softmax(-1)
    probs = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(probs.tolist())])
    assert_distribution(draws(LOGITS, seed=5, **params), (probs / probs.sum()).tolist())


def test_filters_cut_ties_at_the_lower_id() -> None:
    assert set(draws([1.0, 1.0, 1.0, 1.0], 50, top_k=2)) == {0, 1}
    assert set(draws([0.0, 1.0, 1.0, 1.0], 50, top_p=1e-9)) == {1}


def test_noise_stays_within_the_span_that_the_draw_relies_on() -> None:
    edge = 0.5 * 2.0**-UNIFORM_BITS
    span = math.log(-math.log(edge)) - math.log(-math.log1p(-edge))
    assert span < GUMBEL_SPAN
    noise = gumbel(9, 4, torch.arange(1_000_000))
    assert noise.max() - noise.min() < GUMBEL_SPAN
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


# --- determinism


def test_noise_depends_on_seed_position_and_id_only() -> None:
    ids = torch.arange(1000)
    assert torch.equal(gumbel(1, 2, ids), gumbel(1, 2, ids))
    assert torch.equal(gumbel(1, 2, ids)[500:], gumbel(1, 2, ids[500:]))
    for seed, position in ((2, 2), (1, 3), (2, 1), (2**63 - 1, 2)):
        assert (gumbel(seed, position, ids) == gumbel(1, 2, ids)).sum() == 0


def test_noise_is_the_documented_hash() -> None:
    """Written out in Python integers: during an upgrade old and new workers must agree."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def finalise(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    for seed, position in ((0, 0), (1234567890123456789, 77), (2**63 - 1, 131071)):
        inner = finalise((position + 1 + golden) & mask)
        key = finalise((seed + inner + golden) & mask)
        for token in (0, 1, 49151, 200_000):
            uniform = ((finalise((key + token * golden) & mask) >> 32) + 0.5) / 2**32
            got = gumbel(seed, position, torch.tensor([token])).item()
            assert got == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_a_row_is_sampled_alike_alone_and_in_any_batch() -> None:
    logits = random_logits(12)
    specs = [
        spec(seed=i, output=(5, 5, 9), **p)
        for i, p in enumerate(
            [
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"top_p": 0.9},
                {"top_k": 50, "logprobs": 3},
                {"repetition_penalty": 1.3},
                {"presence_penalty": 1.5, "frequency_penalty": -0.5},
            ]
            * 2
        )
    ]
    together = choose(logits, *specs)
    alone = [choose(logits[i : i + 1], s)[0] for i, s in enumerate(specs)]
    backwards = choose(logits.flip(0), *reversed(specs))[::-1]
    assert together == alone == backwards


def test_resuming_at_a_position_draws_the_same() -> None:
    """Output that has become prompt (a resubmitted request) leaves the draw as it was."""
    logits = random_logits(1)
    whole = SampleSpec(SamplingParams(seed=8), [1, 2, 3, 4, 5], 2)
    assert choose(logits, whole) == choose(logits, replace(whole, prompt_len=4))


def test_seeds_and_positions_matter() -> None:
    logits = random_logits(1)
    assert len({choose(logits, spec(seed=i))[0].token_id for i in range(20)}) > 5
    assert len({choose(logits, spec(prompt=i))[0].token_id for i in range(1, 20)}) > 5


# --- penalties, bias, minimum length


def adjusted(row: list[float], **kwargs: Any) -> list[float]:
    """The logits after adjustment, up to a constant: all logprobs, put in id order."""
    [result] = choose(torch.tensor([row]), spec(temperature=0.0, logprobs=len(row), **kwargs))
    values = dict(result.top)
    return [values.get(i, -math.inf) for i in range(len(row))]


def expected_logprobs(row: list[float]) -> list[float]:
    logprobs: list[float] = torch.tensor(row).log_softmax(-1).tolist()
    return logprobs


def test_repetition_penalty_covers_prompt_and_output() -> None:
    got = adjusted([2.0, -2.0, 1.0, 3.0, 0.5], prompt=2, output=(3, 3), repetition_penalty=2.0)
    assert got == pytest.approx(expected_logprobs([1.0, -4.0, 1.0, 1.5, 0.5]))


def test_presence_and_frequency_penalties_cover_output_only() -> None:
    got = adjusted(
        [2.0, 2.0, 2.0, 2.0], prompt=2, output=(3, 3, 2), presence_penalty=0.5, frequency_penalty=1
    )
    assert got == pytest.approx(expected_logprobs([2.0, 2.0, 0.5, -0.5]))


def test_tokens_are_counted_once_each_as_a_sequence_grows() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(12) for _ in range(30)]
    watched = SampleSpec(SamplingParams(), ids, 20)
    for _ in range(60):
        counts = watched.counts
        of_output = Counter(ids[20:])
        assert sorted(counts.ids) == sorted(set(ids))
        got = dict(zip(counts.ids, counts.output_counts, strict=True))
        assert got == {i: of_output[i] for i in set(ids)}
        ids += [rng.randrange(15) for _ in range(rng.randrange(3))]


def test_logit_bias_adds_after_penalties() -> None:
    got = adjusted([1.0, 1.0, 1.0], prompt=1, repetition_penalty=2.0, logit_bias={0: 3.0, 2: -1.0})
    assert got == pytest.approx(expected_logprobs([3.5, 1.0, 0.0]))


def test_logit_bias_forbids_and_forces() -> None:
    logits = random_logits(2)
    best = int(logits[0].argmax())
    forbid, force = choose(
        logits, spec(seed=1, logit_bias={best: -100.0}), spec(seed=1, logit_bias={49151: 100.0})
    )
    assert forbid.token_id != best
    assert force.token_id == 49151


def test_min_tokens_masks_the_stop_ids_until_reached() -> None:
    row = [5.0, 0.0, 4.0, 1.0]
    params: dict[str, Any] = {"stop_token_ids": (0, 2, 7), "min_tokens": 2, "temperature": 0.0}
    for output, expected in (((), 3), ((3,), 3), ((3, 3), 0)):
        for bias in ({}, {1: 0.5}):
            [got] = choose(torch.tensor([row]), spec(output=output, logit_bias=bias, **params))
            assert got.token_id == expected


# --- logprobs


def test_logprobs_are_taken_before_temperature_and_filters() -> None:
    [got] = choose(torch.tensor([LOGITS]), spec(temperature=0.5, top_k=1, logprobs=3))
    expected = expected_logprobs(LOGITS)
    assert got.token_id == 0
    assert got.logprob == pytest.approx(expected[0])
    assert [i for i, _ in got.top] == [0, 6, 1]
    assert [p for _, p in got.top] == pytest.approx([expected[0], expected[6], expected[1]])


def test_logprobs_only_when_asked() -> None:
    none, chosen, all_of_them = choose(
        torch.tensor([LOGITS] * 3), spec(), spec(logprobs=0), spec(logprobs=20)
    )
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()
    assert len(all_of_them.top) == len(LOGITS)


def test_masked_tokens_are_not_listed_as_likely() -> None:
    [got] = choose(torch.tensor([[1.0, -math.inf, 0.0]]), spec(logprobs=3))
    assert [i for i, _ in got.top] == [0, 2]


# --- errors


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    healthy = choose(logits, *[spec(**params)] * 3)
    logits[1, 777] = bad
    results = choose(logits, *[spec(**params)] * 3)
    assert results[1] == Sampled(-1, error="non_finite_logits")
    assert [results[0], results[2]] == [healthy[0], healthy[2]]


def test_a_row_without_any_possible_token_fails_alone() -> None:
    logits = torch.full((2, 64), -math.inf)
    logits[1, 5] = 0.0
    got = choose(logits, spec(), spec())
    assert [s.error for s in got] == ["non_finite_logits", ""]


def test_a_bias_beyond_the_vocabulary_fails_alone() -> None:
    got = choose(random_logits(2), spec(logit_bias={VOCAB: 1.0}), spec(logit_bias={-1: 1.0}))
    assert [s.error for s in got] == ["logit_bias_out_of_range"] * 2
