"""Bits, not tolerances: a token's logits and K/V depend on its sequence alone.

Each case computes sequences in a random schedule (ragged steps of several sequences, chunks of any
length, single tokens) and compares with each sequence alone in one pass.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels import native
from pageferry.kernels.devices import DeviceError
from pageferry.kernels.model import Model, load_model
from pageferry.kernels.runner import Chunk, ModelRunner, Sampled, SampleSpec
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.wire import SamplingParams

LIBRARY = native.library()
BEST = LIBRARY.pf_best_level() if LIBRARY is not None else -1
CPU = torch.device("cpu")
LENGTHS = (250, 3, 131, 64, 17)

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels were not built")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiles": ("qwen3", {}),
    "wide_groups": ("qwen3", {"num_key_value_heads": 1}),
    "windows": ("mistral", {"head_dim": 64, "sliding_window": 40}),
    "odd_heads": ("llama", {}),
}
"""A head_dim of 32 and one that is no multiple of 32; three and six query heads per KV head."""


@pytest.fixture(params=native.LEVELS[: BEST + 1])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    assert LIBRARY is not None
    LIBRARY.pf_use_level(native.LEVELS.index(request.param))
    yield request.param
    LIBRARY.pf_use_level(BEST)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value


@pytest.fixture
def load(make_model: Any) -> Any:
    def load(name: str, dtype: torch.dtype, deterministic: bool = True, limit: int = 256) -> Model:
        family, overrides = MODELS[name]
        path = make_model(family, **overrides).path
        return load_model(path, CPU, dtype, limit, deterministic)

    return load


def schedule(lengths: tuple[int, ...], seed: int) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, start, tokens), until each sequence is done."""
    draw, done = random.Random(seed), [0] * len(lengths)
    steps = []
    while waiting := [i for i, n in enumerate(lengths) if done[i] < n]:
        step = []
        for i in draw.sample(waiting, draw.randint(1, len(waiting))):
            count = min(draw.choice((1, 1, 2, 3, 4, 5, 16, 33, 90)), lengths[i] - done[i])
            step.append((i, done[i], count))
            done[i] += count
        steps.append(step)
    return steps


def compute(
    paged: Any, model: Model, prompts: list[list[int]], steps: Any, page_size: int = 16
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of all tokens of each prompt, and its keys and values by position."""
    runs = paged(model, num_pages=80, page_size=page_size)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        results = runs.logits([(i, at, prompts[i][at : at + n]) for i, at, n in step])
        for (i, _, _), logits in zip(step, results, strict=True):
            parts[i].append(logits)
    kv = [by_position(runs.kv, runs.tables[i], len(p)) for i, p in enumerate(prompts)]
    return [torch.cat(p) for p in parts], kv


def by_position(kv: Tensor, table: list[int], length: int) -> Tensor:
    """[layers, 2, kv_heads, length, head_dim] of one sequence."""
    return kv[:, table].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length]


def alone(paged: Any, model: Model, prompts: list[list[int]]) -> Any:
    """Each prompt in one pass of its own."""
    return compute(paged, model, prompts, [[(i, 0, len(p))] for i, p in enumerate(prompts)])


def same_bits(first: Any, second: Any) -> bool:
    return all(
        torch.equal(a, b)
        for ones, others in zip(first, second, strict=True)
        for a, b in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_any_batch_and_any_chunks(
    level: str, dtype: torch.dtype, name: str, load: Any, paged: Any, tokens: Any
) -> None:
    model = load(name, dtype)
    prompts = [tokens(n, n) for n in LENGTHS]
    expected = alone(paged, model, prompts)
    for seed in (1, 2):
        assert same_bits(compute(paged, model, prompts, schedule(LENGTHS, seed)), expected)


@pytest.mark.parametrize("name", ["tiles", "windows", "odd_heads"])
def test_token_by_token(
    level: str, dtype: torch.dtype, name: str, load: Any, paged: Any, tokens: Any
) -> None:
    model, prompts = load(name, dtype), [tokens(250)]
    decoded = compute(paged, model, prompts, [[(0, at, 1)] for at in range(250)])
    assert same_bits(decoded, alone(paged, model, prompts))


@pytest.mark.parametrize("page_size", [8, 24, 64])
def test_any_page_size(level: str, page_size: int, load: Any, paged: Any, tokens: Any) -> None:
    model, prompts = load("tiles", torch.bfloat16), [tokens(n, n) for n in LENGTHS]
    got = compute(paged, model, prompts, schedule(LENGTHS, 3), page_size)
    assert same_bits(got, alone(paged, model, prompts))


def test_any_number_of_threads(level: str, load: Any, paged: Any, tokens: Any) -> None:
    assert LIBRARY is not None
    model, prompts = load("tiles", torch.bfloat16), [tokens(n, n) for n in LENGTHS]
    expected = alone(paged, model, prompts)
    busy, core = ctypes.c_int64(0), min(os.sched_getaffinity(0))
    LIBRARY.pf_set_threads(2)
    try:
        assert same_bits(compute(paged, model, prompts, schedule(LENGTHS, 4)), expected)
        assert native.borrow_cores(ctypes.addressof(busy), [core])
        assert same_bits(compute(paged, model, prompts, schedule(LENGTHS, 5)), expected)
    finally:
        native.borrow_cores(0, [])
        LIBRARY.pf_set_threads(1)


def test_a_shorter_rotation_table_gives_the_same_bits(load: Any, paged: Any, tokens: Any) -> None:
    for name in MODELS:
        short, whole = (load(name, torch.bfloat16, limit=limit) for limit in (131, 256))
        prompts = [tokens(131)]
        assert same_bits(alone(paged, short, prompts), alone(paged, whole, prompts)), name


@pytest.mark.skipif(native.LEVELS.index("amx") > BEST, reason="all levels below are alike in both")
def test_without_the_mode_decoding_and_prefill_differ(load: Any, paged: Any, tokens: Any) -> None:
    """What the mode is for; and that the comparisons above can fail."""
    prompts = [tokens(60)]
    for deterministic in (True, False):
        model = load("odd_heads", torch.bfloat16, deterministic)
        decoded = compute(paged, model, prompts, [[(0, at, 1)] for at in range(60)])
        assert same_bits(decoded, alone(paged, model, prompts)) is deterministic


class Engine:
    """A runner over a page pool with prefix cache, as the workers have it."""

    def __init__(self, model: Model) -> None:
        c = model.config
        shape = (c.num_layers, 64, 2, c.num_kv_heads, 16, c.head_dim)
        self.pool = PagePool(64, 16)
        self.runner = ModelRunner(model, torch.full(shape, float("nan"), dtype=model.dtype), 16)

    def admit(self, ids: list[int]) -> tuple[list[int], int]:
        """Pages for 32 more tokens, and how many tokens the cache has."""
        cached = self.pool.match(self.pool.hash_prefix(ids[:-1]))
        fresh = self.pool.allocate(-(-(len(ids) + 32) // 16) - len(cached))
        return cached + fresh, len(cached) * 16

    def leave(self, ids: list[int], pages: list[int]) -> None:
        hashes = self.pool.hash_prefix(ids[:-1])
        self.pool.register(pages[: len(hashes)], hashes)
        self.pool.release(pages)


def generate(
    engine: Engine, prompts: list[list[int]], count: int, preempt: int, chunk: int
) -> list[list[Sampled]]:
    """`count` tokens for each prompt, all in one batch, prompts in chunks of `chunk`. Every
    `preempt` tokens (0: never) a sequence loses its pages and starts again with all its tokens."""
    texts = [list(p) for p in prompts]
    specs = [SampleSpec(PARAMS, ids, len(p)) for ids, p in zip(texts, prompts, strict=True)]
    results: list[list[Sampled]] = [[] for _ in prompts]
    held = [engine.admit(ids) for ids in texts]
    while running := [i for i in range(len(prompts)) if len(results[i]) < count]:
        step = []
        for i in running:
            pages, done = held[i]
            ids = texts[i][done : done + chunk]
            complete = done + len(ids) == len(texts[i])
            step.append(Chunk(ids, done, pages, specs[i] if complete else None))
        for i, part, sampled in zip(running, step, engine.runner.execute(step), strict=True):
            held[i] = (held[i][0], part.end)
            if sampled is None:
                continue
            assert not sampled.error
            texts[i].append(sampled.token_id)
            results[i].append(sampled)
            if preempt and len(results[i]) % preempt == 0 and len(results[i]) < count:
                engine.leave(texts[i], held[i][0])
                held[i] = engine.admit(texts[i])
    for ids, (pages, _) in zip(texts, held, strict=True):
        engine.leave(ids, pages)
    engine.pool.check_integrity({})
    return results


PARAMS = SamplingParams(
    temperature=1.1,
    top_p=0.9,
    top_k=40,
    seed=7,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    logprobs=5,
)


@pytest.mark.parametrize("name", ["tiles", "odd_heads"])
def test_seeded_text_and_logprobs_in_any_company(
    level: str, name: str, load: Any, tokens: Any
) -> None:
    """Alone and undisturbed; together, in chunks, preempted; and with the prompts in the cache."""
    model = load(name, torch.bfloat16)
    prompts = [tokens(n, n) for n in (130, 40, 7, 90)]
    expected = [generate(Engine(model), [p], 24, 0, 256)[0] for p in prompts]
    engine = Engine(model)
    assert generate(engine, prompts, 24, 7, 11) == expected
    assert engine.pool.peek(engine.pool.hash_prefix(prompts[0]))
    assert generate(engine, prompts, 24, 5, 64) == expected


def test_mode_and_level_are_part_of_the_identity(level: str, load: Any) -> None:
    plain = load("tiles", torch.bfloat16, deterministic=False).fingerprint
    assert load("tiles", torch.bfloat16).fingerprint == f"{plain}+deterministic-{level}"


def test_refused_where_torch_would_compute(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="float16 on cpu"):
        load("tiles", torch.float16)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(DeviceError, match="C\\+\\+ compiler"):
        load("tiles", torch.float32)
