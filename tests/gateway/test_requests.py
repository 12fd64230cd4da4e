"""A generation's bookkeeping, event by event, without any network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pageferry.gateway.requests import Generation, Verdict
from pageferry.kvtransfer.wire import Event, Kind, SamplingParams, TokenLogprob

MakeGeneration = Callable[..., Generation]


def tokens(index: int, *ids: int, epoch: int = 0, **fields: Any) -> Event:
    return Event("r", epoch, Kind.TOKENS, "w", index=index, token_ids=ids, **fields)


async def test_tokens_in_order(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    assert generation.apply(tokens(0, 7), 1.0) is Verdict.TOKENS
    assert generation.apply(tokens(1, 8, 9), 1.1) is Verdict.TOKENS
    assert generation.tokens == [7, 8, 9]
    assert generation.owner == "w"


@pytest.mark.parametrize("index", [0, 1])
async def test_duplicates_are_dropped(make_generation: MakeGeneration, index: int) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7, 8), 1.0)
    assert generation.apply(tokens(index, *(7, 8)[index:]), 1.1) is Verdict.STALE
    assert generation.tokens == [7, 8]


async def test_overlap_gives_only_the_new_part(make_generation: MakeGeneration) -> None:
    generation = make_generation(sampling=SamplingParams(logprobs=0))
    lps = tuple(TokenLogprob(-float(i)) for i in range(3))
    generation.apply(tokens(0, 7, 8, logprobs=lps[:2]), 1.0)
    assert generation.apply(tokens(1, 8, 9, logprobs=lps[1:]), 1.1) is Verdict.TOKENS
    assert generation.tokens == [7, 8, 9]
    assert [lp.logprob for lp in generation.logprobs] == [0.0, -1.0, -2.0]


async def test_gap_changes_nothing(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7), 1.0)
    assert generation.apply(tokens(2, 9), 1.1) is Verdict.GAP
    assert generation.tokens == [7]


@pytest.mark.parametrize("kind", list(Kind))
async def test_other_epochs_are_stale(make_generation: MakeGeneration, kind: Kind) -> None:
    generation = make_generation()
    generation.next_epoch()
    for epoch in (0, 2):
        event = Event("r", epoch, kind, "w", token_ids=(1,), finish="stop")
        assert generation.apply(event, 1.0) is Verdict.STALE
    assert not generation.tokens
    assert not generation.owner


async def test_finish_may_come_without_tokens(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7), 1.0)
    assert generation.apply(tokens(1, finish="length"), 1.1) is Verdict.FINISHED
    assert generation.finish == "length"


async def test_old_finish_is_no_finish(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7, 8, 9), 1.0)
    assert generation.apply(tokens(0, 7, finish="stop"), 1.1) is Verdict.STALE
    assert generation.finish is None


async def test_nothing_after_the_end(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7, finish="stop", stop_token_id=7), 1.0)
    assert generation.apply(tokens(1, 8), 1.1) is Verdict.STALE
    assert generation.tokens == [7]


async def test_first_ending_stands(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.close("stop")
    generation.close("error")
    assert generation.outcome == "stop"


async def test_resubmission_carries_the_tokens_so_far(make_generation: MakeGeneration) -> None:
    generation = make_generation()
    generation.apply(tokens(0, 7, 8), 1.0)
    generation.next_epoch()
    request = generation.request(60.0)
    assert list(request.token_ids) == [1, 2, 3, 7, 8]
    assert (request.prompt_len, request.num_output_tokens, request.epoch) == (3, 2, 1)
    assert request.ttl_ms == 40_000


@pytest.mark.parametrize(
    ("ids", "min_tokens", "expected"),
    [((), 0, None), ((7,), 0, None), ((5,), 0, "stop"), ((5,), 2, None), ((7,) * 3, 0, "length")],
)
async def test_spent_by_its_tokens_alone(
    make_generation: MakeGeneration, ids: tuple[int, ...], min_tokens: int, expected: str | None
) -> None:
    sampling = SamplingParams(max_tokens=3, min_tokens=min_tokens, stop_token_ids=(5,))
    generation = make_generation(sampling=sampling)
    generation.tokens.extend(ids)
    assert generation.spent == expected


async def test_progress_clears_earlier_deaths_whatever_ends_the_epoch(
    make_generation: MakeGeneration,
) -> None:
    generation = make_generation()
    for _ in range(2):
        generation.next_epoch()
        generation.blame(for_handoff=False)
    assert generation.is_suspect
    generation.apply(tokens(0, 7, 8, epoch=2), 1.0)
    generation.next_epoch()  # preempted, say
    assert not generation.is_suspect
    assert generation.blame(for_handoff=False) == 1
