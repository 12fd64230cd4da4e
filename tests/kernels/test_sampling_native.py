"""The C++ sampler chooses what the torch reference chooses, row by row, over what rows may hold."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels.sampling import Sampled, SampleSpec, sample_reference
from pageferry.kernels.sampling_native import NativeSampler
from pageferry.kvtransfer.wire import SamplingParams

SOURCE = Path(__file__).parents[2] / "kernels" / "native" / "sampling.cpp"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeSampler:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("native") / "sampling.so"
    flags = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, SOURCE, "-o", library], check=True, timeout=120)
    return NativeSampler(ctypes.CDLL(str(library)))


def spec(prompt: int, output: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), [*range(prompt), *output], prompt)


def both(
    native: NativeSampler, logits: Tensor, specs: list[SampleSpec]
) -> tuple[list[Sampled], list[Sampled]]:
    return native.sample(logits.clone(), specs), sample_reference(logits.clone(), specs)


def assert_alike(got: Sampled, expected: Sampled, about: object) -> None:
    assert (got.token_id, got.error) == (expected.token_id, expected.error), about
    assert (got.logprob is None) == (expected.logprob is None), about
    if got.logprob is not None and expected.logprob is not None:
        assert got.logprob == pytest.approx(expected.logprob, abs=2e-5, rel=1e-5), about
    values = [p for _, p in got.top]
    assert values == pytest.approx([p for _, p in expected.top], abs=2e-5, rel=1e-5), about
    # The reference sorts float32 logprobs, which may be equal where the logits are not.
    assert sorted(values, reverse=True) == values, about
    assert len({i for i, _ in got.top}) == len(values), about


def logits_of(kind: str, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocab, generator=generator) * 4
    match kind:
        case "peaked":
            row[torch.randint(vocab, (min(vocab, 6),), generator=generator)] += 15
        case "ties":
            row = row.round()
        case "flat":
            row.zero_()
        case "holes":
            row[torch.rand(vocab, generator=generator) < 0.6] = -math.inf
            row[vocab // 2] = 0.5
        case "signed zeros":
            row = torch.where(row > 0, 0.0, -0.0)
        case "negative":
            row -= 1000
    return row


KINDS = ("normal", "peaked", "ties", "flat", "holes", "signed zeros", "negative")
VOCABS = (1, 2, 65, 127, 128, 129, 1000, 49152, 50021)


def random_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Each kind of parameter on in a third of the rows, independently."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 1 / 3 else off

    return {
        "temperature": rng.choice([0.0, 1e-30, 1e-3, 0.5, 0.8, 1.0, 1.0, 2.0, 100.0, 1e30]),
        "seed": rng.getrandbits(63),
        "top_k": maybe(rng.choice([1, 2, 5, 50, 1000, 10**12]), 0),
        "top_p": maybe(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 0.999999]), 1.0),
        "min_p": maybe(rng.choice([1e-6, 0.01, 0.3, 0.999]), 0.0),
        "repetition_penalty": maybe(rng.choice([0.7, 1.1, 2.0]), 1.0),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "logit_bias": maybe({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(4)}, {}),
        "logprobs": maybe(rng.choice([0, 1, 5, 20]), -1),
        "min_tokens": maybe(9, 0),
        "stop_token_ids": maybe((0, vocab - 1, vocab + 7), ()),
    }


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_mixed_batch_is_chosen_as_by_the_reference(
    native: NativeSampler, vocab: int, kind: str
) -> None:
    rng = random.Random(f"{vocab} {kind}")
    count = 24 if vocab < 10_000 else 12
    logits = torch.stack([logits_of(kind, vocab, seed) for seed in range(count)])
    specs = []
    for _ in range(count):
        output = tuple(rng.randrange(vocab) for _ in range(rng.randrange(12)))
        specs.append(spec(min(vocab, 1 + rng.randrange(20)), output, **random_params(rng, vocab)))
    for got, expected, about in zip(*both(native, logits, specs), specs, strict=True):
        assert_alike(got, expected, about.params)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 64, 198])
def test_a_row_that_is_not_finite_fails_alone(
    native: NativeSampler, bad: float, place: int
) -> None:
    logits = torch.stack([logits_of("normal", 199, seed) for seed in range(3)])
    logits[1, place] = bad
    masked = {"stop_token_ids": (place,), "min_tokens": 5}
    for params in ({"temperature": 0.0}, {"logprobs": 2}, masked, {"logit_bias": {-1: 1.0}}):
        specs = [spec(3, seed=i, **params) for i in range(3)]
        got, expected = both(native, logits, specs)
        assert got[1] == Sampled(-1, error="non_finite_logits")
        for a, b in zip(got, expected, strict=True):
            assert_alike(a, b, params)


def test_rows_without_a_possible_token_and_impossible_biases_fail_alone(
    native: NativeSampler,
) -> None:
    logits = torch.zeros(5, 70)
    logits[0] = -math.inf
    specs = [
        spec(3),
        spec(3, logit_bias={70: 1.0}),
        spec(3, logit_bias={2**40: 1.0}),
        spec(3, logit_bias={-1: 1.0}),
        spec(3, stop_token_ids=tuple(range(70)), min_tokens=1),
    ]
    got, expected = both(native, logits, specs)
    assert got == expected
    bias, broken = "logit_bias_out_of_range", "non_finite_logits"
    assert [s.error for s in got] == [broken, bias, bias, bias, broken]


def test_rows_may_lie_apart(native: NativeSampler) -> None:
    wide = torch.full((4, 120), 50.0)
    wide[:, :100] = torch.stack([logits_of("normal", 100, seed) for seed in range(4)])
    specs = [spec(2, seed=i, logprobs=3) for i in range(4)]
    expected = sample_reference(wide[:, :100].clone(), specs)
    for got, wanted in zip(native.sample(wide[:, :100], specs), expected, strict=True):
        assert_alike(got, wanted, "strided")
    with pytest.raises(ValueError, match="float32 rows"):
        native.sample(torch.zeros(100, 4).T, specs)
    with pytest.raises(ValueError, match="2 rows of logits but 4 specs"):
        native.sample(torch.zeros(2, 8), specs)


def test_tokens_are_counted_as_they_come(native: NativeSampler) -> None:
    """A spec kept for a whole sequence equals one made anew, as after a preemption."""
    params = SamplingParams(
        temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    )
    ids = [5, 6, 5, 7]
    kept = SampleSpec(params, ids, 3)
    for step in range(40):
        row = logits_of("ties", 30, step)[None]
        anew = SampleSpec(params, list(ids), 3)
        chosen = {
            native.sample(row.clone(), [kept])[0].token_id,
            native.sample(row.clone(), [anew])[0].token_id,
            sample_reference(row.clone(), [kept])[0].token_id,
            sample_reference(row.clone(), [replace(anew, token_ids=tuple(ids))])[0].token_id,
        }
        assert len(chosen) == 1
        ids.append(chosen.pop())


def test_draws_follow_the_documented_rule(native: NativeSampler) -> None:
    """argmax(logit / T + noise), worked out in Python integers and floats for every token."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def finalise(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    def noise(seed: int, position: int, token: int) -> float:
        key = finalise((seed + finalise((position + 1 + golden) & mask) + golden) & mask)
        uniform = ((finalise((key + token * golden) & mask) >> 32) + 0.5) / 2**32
        return -math.log(-math.log(uniform))

    for seed in range(12):
        row = logits_of("normal", 700, seed)
        for temperature in (0.5, 1.0, 3.0):
            values = [x / temperature + noise(seed, 4, i) for i, x in enumerate(row.tolist())]
            [got] = native.sample(row[None].clone(), [spec(4, temperature=temperature, seed=seed)])
            assert got.token_id == values.index(max(values))
