"""Lengths, arrivals and figures of load tests: drawn from a seed, read from traces, summed up."""

from __future__ import annotations

import itertools
import statistics

import pytest

from pageferry.compose.bench_client import Outcome, Result
from pageferry.compose.bench_figures import (
    Slo,
    concurrent,
    percentile,
    summarise,
    token_gaps,
)
from pageferry.compose.bench_workload import (
    QUANTILE_LEVELS,
    SHAPES,
    Request,
    WorkloadError,
    draw,
    fit_context,
    interpolate,
    poisson,
    prompt_ids,
    prompt_text,
    read_trace,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_have_the_quantiles_of_their_shape(shape):
    requests = draw(shape, 2000, seed=3)
    for lengths, quantiles in zip(
        ([r.prompt for r in requests], [r.output for r in requests]), SHAPES[shape], strict=True
    ):
        for level, expected in zip(QUANTILE_LEVELS[1:-2], quantiles[1:-2], strict=True):
            assert percentile(lengths, level) == pytest.approx(expected, rel=0.05, abs=1)
    pairs = [r.prompt for r in requests], [r.output for r in requests]
    assert abs(statistics.correlation(*pairs)) < 0.1


def test_draws_depend_on_the_seed_only_and_few_have_the_mean_of_many():
    assert draw("conversation", 50, 1) == draw("conversation", 50, 1) != draw("conversation", 50, 2)
    many = statistics.mean(r.prompt for r in draw("conversation", 5000, 0))
    for seed in range(5):
        few = statistics.mean(r.prompt for r in draw("conversation", 32, seed))
        assert few == pytest.approx(many, rel=0.15)


def test_interpolation_meets_the_quantiles():
    quantiles = SHAPES["code"][0]
    for level, value in zip(QUANTILE_LEVELS, quantiles, strict=True):
        assert interpolate(quantiles, level) == pytest.approx(value)
    assert interpolate(quantiles, 0.375) == pytest.approx((493 + 1339) / 2)


def test_traces_of_both_formats_start_at_zero(tmp_path):
    csv, jsonl = tmp_path / "t.csv", tmp_path / "t.jsonl"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0299600,0,8\n"
    )
    first, second = read_trace(csv, 0)
    assert (first, second.prompt, second.output) == (Request(4808, 10), 1, 8)
    assert second.arrival_s == pytest.approx(1.05)
    jsonl.write_text('{"timestamp": 500, "input_length": 7, "output_length": 3}\n' * 3)
    assert read_trace(jsonl, 2) == [Request(7, 3)] * 2


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"]
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, text):
    path = tmp_path / "odd.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=r"odd\.csv"):
        read_trace(path, 0)


def test_too_long_requests_scale_all_of_them():
    requests = [Request(1000, 1000), Request(100, 10)]
    same, factor = fit_context(requests, 2000)
    assert (same, factor) == (requests, 1.0)
    fitted, factor = fit_context(requests, 1000)
    assert factor == pytest.approx(0.499)
    assert fitted == [Request(499, 499), Request(50, 5)]
    assert all(r.prompt + r.output <= 1000 for r in fitted)
    with pytest.raises(WorkloadError):
        fit_context(requests, 3)


def test_poisson_arrivals_have_the_rate_and_start_at_once():
    timed = poisson([Request(1, 1)] * 4000, 10.0, 0)
    assert timed[0].arrival_s == 0
    assert timed[-1].arrival_s == pytest.approx(400, rel=0.1)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(timed)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


def test_prompts_of_other_keys_differ_from_the_first_token_on():
    assert prompt_ids(5, "a") == prompt_ids(5, "a")
    assert len({prompt_ids(1, f"k{i}")[0] for i in range(50)}) > 45
    assert len(prompt_text(7, "a").split()) == 7


def outcome(chunks, asked=None, due=0.0, **more):
    tokens = sum(n for _, n in chunks)
    end = chunks[-1][0] if chunks else due
    seen = Outcome(Request(4, asked or tokens), due, due, list(chunks), end, 4, tokens)
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


def test_gaps_of_chunks_with_several_tokens():
    assert token_gaps(outcome([(1.0, 2), (1.5, 1), (3.0, 3)])) == [0.0, 0.5, 1.5, 0.0, 0.0]
    assert token_gaps(outcome([(1.0, 1)])) == []


def test_percentiles_interpolate():
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([1, 2, 3, 4], 1.0) == 4
    assert percentile([7], 0.99) == 7


def test_concurrency_counts_what_overlaps_and_not_what_follows():
    a, b, c = (outcome([(end, 1)], due=start) for start, end in ((0, 2), (1, 3), (2, 4)))
    assert concurrent([a, b, c]) == 2


def test_slo_and_what_counts():
    good = outcome([(0.1, 1), (0.2, 1), (0.3, 1)])
    late = outcome([(0.9, 1), (1.0, 1)])
    stalls = outcome([(0.1, 1), (0.11, 1), (0.9, 1)])
    failed = outcome([(0.1, 1)], error="HTTP 500")
    cut = outcome([(0.05, 1), (0.4, 1)], asked=9, cut=True)
    short = outcome([(0.1, 1)], asked=2)
    result = Result([good, late, stalls, failed, cut, short], 2.0)
    figures = summarise(result, Slo(ttft_ms=500, itl_ms=200))
    assert (figures.completed, figures.failed, figures.cut, figures.short) == (4, 1, 1, 1)
    assert figures.request_goodput == pytest.approx(2 / 2.0)  # good and short
    assert figures.good_share == pytest.approx(2 / 5)
    assert figures.output_throughput == pytest.approx((3 + 2 + 3 + 1 + 2 + 1) / 2.0)
    assert figures.itl_ms.max == pytest.approx(790)
    assert figures.ttft_ms.max == pytest.approx(900)
    assert figures.ttft_ms.p50 == pytest.approx(100)  # of 50 (cut), 100, 100, 100, 900
    assert figures.ttft_ms.mean == pytest.approx(250)
    only_tpot = summarise(result, Slo(tpot_ms=150))
    assert only_tpot.request_goodput == pytest.approx(3 / 2.0)  # all but the one that stalls
    assert str(Slo(ttft_ms=500, itl_ms=200)) == "TTFT <= 500 ms, ITL p99 <= 200 ms"
