"""The runner: steps as data in, tokens out, over pools that hold garbage elsewhere."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pageferry.kernels.runner import BadChunk, Chunk, ModelRunner, SampleSpec
from pageferry.kvtransfer.wire import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def model(make_model: Any) -> Any:
    return make_model("smollm2")


def new_runner(model: Any, poison: float = float("nan"), pages: int = 32) -> ModelRunner:
    decoder = model.load()
    c = decoder.config
    kv = torch.full((c.num_layers, pages, 2, c.num_kv_heads, 16, c.head_dim), poison)
    return ModelRunner(decoder, kv, 16)


def whole(ids: list[int], table: list[int], params: SamplingParams = GREEDY) -> Chunk:
    return Chunk(ids, 0, table, SampleSpec(params, ids, len(ids)))


def last(ids: list[int], prompt_len: int, table: list[int], params: Any = GREEDY) -> Chunk:
    return Chunk(ids[-1:], len(ids) - 1, table, SampleSpec(params, ids, prompt_len))


def generate(
    runner: ModelRunner, prompt: list[int], table: list[int], count: int, params: Any
) -> Any:
    ids = list(prompt)
    chunk = whole(ids, table, params)
    for _ in range(count):
        [sampled] = runner.execute([chunk])
        assert sampled is not None
        assert not sampled.error
        ids.append(sampled.token_id)
        chunk = last(list(ids), len(prompt), table, params)
    return ids[len(prompt) :]


@pytest.mark.parametrize("poison", [float("nan"), 1e38])
def test_greedy_text_equals_transformers(model: Any, tokens: Any, poison: float) -> None:
    prompt = tokens(21)
    got = generate(new_runner(model, poison), prompt, [30, 4, 17, 9], 30, GREEDY)
    expected = model.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 21:]
    assert got == expected.tolist()


def test_a_mixed_step_gives_each_chunk_what_it_gets_alone(model: Any, tokens: Any) -> None:
    a, b, c = tokens(40, 1), tokens(20, 2), tokens(5, 3)
    alone = new_runner(model)
    expected = [alone.execute([whole(ids, t)])[0] for ids, t in ((a, [1, 2, 3]), (b, [4, 5]))]
    runner = new_runner(model)
    assert runner.execute([Chunk(a[:39], 0, [7, 3, 20], None)]) == [None]
    got = runner.execute(
        [
            Chunk(c, 0, [11], None),
            last(a, 40, [7, 3, 20]),
            whole(b, [0, 31]),
        ]
    )
    assert got[0] is None
    assert got[1:] == expected


def test_integer_buffers_and_lists_of_ids_are_alike(model: Any, tokens: Any) -> None:
    a, b = tokens(40, 1), tokens(20, 2)
    tables = [[7, 3, 20], [0, 31]]
    expected = new_runner(model).execute([whole(a, tables[0]), whole(b, tables[1])])
    ids = [array("i", a), array("i", b)]
    pages = [array("i", tables[0]), np.array(tables[1], dtype=np.int32)]
    chunks = [
        Chunk(i, 0, t, SampleSpec(GREEDY, i, len(i))) for i, t in zip(ids, pages, strict=True)
    ]
    assert new_runner(model).execute(chunks) == expected
    ids[0].append(1)  # nothing holds on to the buffer


def test_sampling_continues_alike_after_a_move(model: Any, tokens: Any) -> None:
    """Prompt + output so far, prefilled elsewhere, goes on with the same text."""
    params = SamplingParams(seed=42, temperature=0.8, top_p=0.95)
    prompt = tokens(13)
    text = generate(new_runner(model), prompt, [2, 9, 4], 20, params)
    moved = generate(new_runner(model), prompt + text[:8], [5, 1, 30], 12, params)
    assert text[8:] == moved


def test_only_the_owned_slots_change(model: Any, tokens: Any) -> None:
    runner = new_runner(model, poison=7.0)
    runner.execute([whole(tokens(20), [9, 2])])
    changed = (runner.kv != 7.0).any(-1)  # [layers, pages, 2, heads, page_size]
    assert changed.any(0).flatten(1).any(1).nonzero().flatten().tolist() == [2, 9]
    assert changed[:, 9].all()
    assert changed[:, 2, :, :, :4].all()
    assert not changed[:, 2, :, :, 4:].any()


def test_padding_ids_are_never_sampled(make_model: Any, tokens: Any) -> None:
    runner = new_runner(make_model("smollm2"))
    runner.model = replace(
        runner.model, config=replace(runner.model.config, tokenizer_vocab_size=20)
    )
    params = [SamplingParams(seed=i, temperature=50.0, logprobs=20) for i in range(30)]
    chunks = [whole(tokens(3, i), [i], p) for i, p in enumerate(params)]
    for sampled in runner.execute(chunks):
        assert sampled is not None
        assert sampled.token_id < 20
        assert {i for i, _ in sampled.top} == set(range(20))


def test_a_poisoned_sequence_fails_alone(model: Any, tokens: Any) -> None:
    a, b = tokens(20, 1), tokens(20, 2)
    expected = new_runner(model).execute([whole(b, [3, 4])])[0]
    runner = new_runner(model)
    runner.execute([Chunk(a[:19], 0, [1, 2], None), Chunk(b[:19], 0, [3, 4], None)])
    runner.kv[0, 1, 1, 0, 3] = float("nan")
    bad, good = runner.execute([last(a, 20, [1, 2]), last(b, 20, [3, 4])])
    assert bad is not None
    assert bad.error == "non_finite_logits"
    assert good == expected


def test_layers_are_reported_in_order(model: Any, tokens: Any) -> None:
    seen: list[int] = []
    new_runner(model).execute([whole(tokens(5), [1])], seen.append)
    assert seen == [0, 1]


def test_an_empty_step_does_nothing(model: Any) -> None:
    assert new_runner(model).execute([]) == []


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (Chunk([], 0, [1], None), "0 tokens"),
        (Chunk([1], -1, [1], None), "position -1"),
        (Chunk([1] * 17, 0, [1], None), "needs 2 pages, has 1"),
        (Chunk([1], 16, [1], None), "needs 2 pages, has 1"),
        (Chunk([1], 0, [32], None), "page 32"),
        (Chunk([1], 0, [-1], None), "page -1"),
        (Chunk([5, 199], 0, [1], None), "token id 199"),
        (Chunk([-5], 0, [1], None), "token id -5"),
        (Chunk([1], 256, list(range(17)), None), "ends at 257"),
    ],
)
def test_impossible_chunks_are_named_and_nothing_runs(
    model: Any, tokens: Any, chunk: Chunk, reason: str
) -> None:
    runner = new_runner(model, poison=7.0)
    with pytest.raises(BadChunk, match=reason) as caught:
        runner.execute([whole(tokens(5), [3]), chunk])
    assert caught.value.index == 1
    assert (runner.kv == 7.0).all()
    assert runner.kernel_seconds == 0


def test_a_pool_of_another_shape_is_refused(model: Any) -> None:
    decoder = model.load()
    good = torch.zeros(2, 4, 2, 3, 16, 16)
    for kv, said in (
        (good[..., :8], "contiguous"),
        (good[:1], "contiguous"),
        (good.bfloat16(), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            ModelRunner(decoder, kv, 16)
