"""Replayed decode steps equal eager ones; what is captured, and which steps use it.

On a CPU a "graph" is the pass itself, run again over the memory that it was captured with: padding,
static inputs and choice of graph are the real ones. `benchmarks/gpu.py` checks real graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels import cuda_graphs
from pageferry.kernels.config import ModelConfig, RopeConfig
from pageferry.kernels.cuda_graphs import (
    GraphedDecoder,
    GraphLimits,
    StaticInputs,
    at_least,
    context_limits,
    graph_sizes,
    graphed,
)
from pageferry.kernels.model import Decoder, Layer
from pageferry.kernels.rope import cos_sin_table

LIMITS = GraphLimits(max_num_seqs=4, max_model_len=200, page_size=16)


class Recorder:
    """A `Capture` that runs the pass again into the same output."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.captured: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        output = run().clone()
        self.captured.append(output.shape[0])

        def replay() -> None:
            self.replayed.append(output.shape[0])
            output.copy_(run())

        return replay, output


@pytest.fixture
def small_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "FIRST_CONTEXT", 32)


CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=80,
    vocab_size=199,
    max_position_embeddings=256,
    rms_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=True,
    windows=(None, 24),
    attention_scale=8**-0.5,
)


def random_decoder() -> Decoder:
    """The torch decoder, whatever else this machine's CPU could run."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * 1.5 * columns**-0.5

    def layer() -> Layer:
        c = CONFIG
        width = c.num_heads * c.head_dim
        return Layer(
            input_norm=torch.ones(c.hidden_size),
            qkv=matrix(width + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=matrix(c.hidden_size, width),
            o_bias=None,
            post_norm=torch.ones(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            gate_up_bias=None,
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=None,
        )

    embedding = matrix(CONFIG.vocab_size, CONFIG.hidden_size)
    return Decoder(
        config=CONFIG,
        fingerprint="random",
        embedding=embedding,
        layers=(layer(), layer()),
        final_norm=torch.ones(CONFIG.hidden_size),
        lm_head=embedding,
        rope_table=cos_sin_table(CONFIG.rope, CONFIG.head_dim, CONFIG.max_position_embeddings),
    )


@pytest.fixture
def pair(paged: Any, small_contexts: None) -> tuple[Any, Any, Any]:
    """(eager, graphed) over pools of their own with equal pages, and the recorder."""
    model = random_decoder()
    eager, replayed = paged(model), paged(model)
    recorder = Recorder()
    replayed.model = GraphedDecoder(model, replayed.kv, LIMITS, recorder)
    return eager, replayed, recorder


def test_sizes_and_contexts() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert graph_sizes(4096)[-2:] == (192, 256)
    assert context_limits(900) == (900,)
    assert context_limits(8192) == (1024, 8192)
    assert context_limits(131072) == (1024, 8192, 65536, 131072)
    assert [at_least(n, (1, 2, 4)) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]


def test_every_size_is_captured_once_per_context_largest_first(pair: Any) -> None:
    _, _, recorder = pair
    assert recorder.captured == [4, 4, 2, 2, 1, 1]  # contexts 32 and 200


def test_decode_steps_replay_and_equal_eager_ones(pair: Any, tokens: Any) -> None:
    """Prompts run eagerly, then sequences come and go: 3, 4, 1, 2 of them at a time."""
    eager, replayed, recorder = pair
    prompts = {0: tokens(5, 0), 1: tokens(29, 1), 2: tokens(40, 2), 3: tokens(1, 3)}
    for side in pair[:2]:
        side.logits([(i, 0, ids) for i, ids in prompts.items()])
    assert recorder.replayed == []
    lengths = {i: len(ids) for i, ids in prompts.items()}
    for step, rows in enumerate([[0, 1, 2], [3, 1, 2, 0], [1], [2, 0], [0, 1, 3]]):
        parts = [(i, lengths[i], tokens(1, 10 * step + i)) for i in rows]
        want, got = eager.logits(parts), replayed.logits(parts)
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
        for i in rows:
            lengths[i] += 1
    assert recorder.replayed == [4, 4, 1, 2, 4]
    # Nothing but the sequences' own slots was written: the pools hold the same, poison included.
    torch.testing.assert_close(replayed.kv, eager.kv, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_other_steps_run_eagerly(pair: Any, tokens: Any) -> None:
    _, replayed, recorder = pair
    five = replayed.batch([(i, 0, tokens(1, i)) for i in range(5)])
    two_tokens = replayed.batch([(0, 1, tokens(2)), (1, 1, tokens(1))])
    one = replayed.batch([(0, 3, tokens(1))])
    called: list[int] = []
    with torch.inference_mode():
        replayed.model.forward(*five, replayed.kv)
        replayed.model.forward(*two_tokens, replayed.kv)
        replayed.model.forward(*one, replayed.kv, called.append)
        replayed.model.forward(*one, replayed.kv.clone())
        assert recorder.replayed == []
        assert called == [0, 1]
        replayed.model.forward(*one, replayed.kv)
    assert recorder.replayed == [1]
    model, batch = replayed.model, one[1]
    assert model.graph_for(batch) == (1, 32)
    assert model.graph_for(replace(batch, max_seq_len=33)) == (1, 200)
    assert model.graph_for(replace(batch, max_seq_len=201)) is None
    wide = torch.zeros(1, LIMITS.max_pages + 1, dtype=torch.int32)
    assert model.graph_for(replace(batch, block_tables=wide)) is None
    # One row in the middle of others' padding: rows and sequences must agree.
    assert model.graph_for(replace(batch, positions=torch.zeros(2, dtype=torch.int64))) is None


def test_rows_that_left_become_padding() -> None:
    inputs = StaticInputs(4, 3, torch.device("cpu"))
    full = inputs.batch(3, 50)
    three = replace(
        full,
        positions=torch.tensor([7, 8, 9]),
        slot_mapping=torch.tensor([1, 2, 3]),
        seq_lens=torch.tensor([8, 9, 10], dtype=torch.int32),
        block_tables=torch.ones(3, 2, dtype=torch.int32),
    )
    inputs.fill(torch.tensor([5, 6, 7]), three)
    one = replace(
        three,
        positions=three.positions[:1],
        slot_mapping=three.slot_mapping[:1],
        seq_lens=three.seq_lens[:1],
        block_tables=three.block_tables[:1],
    )
    inputs.fill(torch.tensor([4]), one)
    batch = inputs.batch(4, 50)
    assert batch.slot_mapping.tolist() == [1, -1, -1, -1]
    assert batch.seq_lens.tolist() == [8, 0, 0, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert inputs.input_ids.tolist()[0] == 4


def test_a_cpu_model_stays_as_it_is(paged: Any) -> None:
    model = random_decoder()
    assert graphed(model, paged(model).kv, LIMITS) is model
