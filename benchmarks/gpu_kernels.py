"""Each Triton kernel against its oracle (torch, fp32) and against its ceiling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu_measure import Bench
from torch import Tensor

from pageferry.kernels import (
    reference,
    sampling,
    triton_attention,
    triton_fused,
    triton_ops,
    triton_pages,
    triton_sampler,
    triton_sampling,
)
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.head_norms import HeadNorms
from pageferry.kernels.sample_spec import SampleSpec

TOLERANCE = 2e-2
"""Relative, bf16 results against fp32 oracles; and twice that of the oracle's root mean square:
averages over long contexts are small, and an absolute bound would let zeros pass."""


@dataclass(frozen=True)
class Greedy:
    """Sampling parameters; as `kernels.sample_spec.Sampling` wants them."""

    temperature: float = 0.0
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


Outcome = Tensor | tuple[Tensor, ...]


def check_and_time(
    bench: Bench,
    name: str,
    run: Callable[[], Outcome],
    want: Callable[[], Outcome] | None,
    **work: float,
) -> None:
    """One case: equal to the oracle (None: checked at another size), then timed."""
    with bench.case("kernels", name):
        got = run()
        if want is not None:
            pairs = zip(_several(got), _several(want()), strict=True)
            for one, other in pairs:
                assert not one.isnan().any(), "the result holds NaN"
                size = float(other.double().square().mean().sqrt())
                torch.testing.assert_close(
                    one.float(), other.float(), rtol=TOLERANCE, atol=2 * TOLERANCE * size
                )
        bench.add("kernels", name, bench.seconds(run), work)


def _several(outcome: Outcome) -> tuple[Tensor, ...]:
    return outcome if isinstance(outcome, tuple) else (outcome,)


def measure_kernels(bench: Bench) -> None:
    torch.manual_seed(1)
    for tokens in bench.scale.tokens:
        _rows(bench, tokens)
        _heads(bench, tokens)
    for sequences, context in bench.scale.decode:
        chunks = [(context - 1, 1)] * sequences
        _attention(bench, f"decode attention, {sequences} x {context}", chunks)
    for chunks in bench.scale.prefill:
        shape = ", ".join(f"{start}+{new}" for start, new in chunks)
        _attention(bench, f"prefill attention, {shape}", chunks)
    _neighbours(bench)
    _pages(bench)
    _sampling(bench)


def _normal(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(shape, device=bench.device).to(bench.dtype)


def _rows(bench: Bench, tokens: int) -> None:
    s, size = bench.scale, bench.dtype.itemsize
    x, residual = _normal(bench, tokens, s.hidden), _normal(bench, tokens, s.hidden)
    weight = 1 + _normal(bench, s.hidden) / 8
    gate_up = _normal(bench, tokens, 2 * s.inner)
    wide = x.float(), residual.float(), weight.float()
    check_and_time(
        bench,
        f"rms_norm, {tokens} x {s.hidden}",
        lambda: triton_ops.rms_norm(x, weight, 1e-5),
        lambda: reference.rms_norm(wide[0], wide[2], 1e-5),
        bytes=2 * x.numel() * size,
    )
    check_and_time(
        bench,
        f"fused_add_rms_norm, {tokens} x {s.hidden}",
        lambda: triton_ops.fused_add_rms_norm(x, residual, weight, 1e-5),
        lambda: reference.fused_add_rms_norm(*wide, 1e-5),
        bytes=4 * x.numel() * size,
    )
    check_and_time(
        bench,
        f"silu_mul, {tokens} x {s.inner}",
        lambda: triton_ops.silu_mul(gate_up),
        lambda: reference.silu_mul(gate_up.float()),
        bytes=3 * tokens * s.inner * size,
    )


def _heads(bench: Bench, tokens: int) -> None:
    s, size = bench.scale, bench.dtype.itemsize
    qkv = _normal(bench, tokens, s.heads + 2 * s.kv_heads, s.head_dim)
    q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, s.head_dim // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float().to(bench.device)
    positions = torch.arange(tokens, device=bench.device)
    pages = -(-tokens // s.page_size) + 1
    kv = _normal(bench, pages, 2, s.kv_heads, s.page_size, s.head_dim)
    before = kv.float()
    slots = torch.randperm(pages * s.page_size, device=bench.device)[:tokens]
    weights = 1 + _normal(bench, 2, s.head_dim) / 8
    norms = HeadNorms(weights[0], weights[1], 1e-5)
    moved = qkv.numel() * size
    check_and_time(
        bench,
        f"rope, {tokens} tokens",
        lambda: triton_ops.rope(q, k, table, positions),
        lambda: reference.rope(q.float(), k.float(), table, positions),
        bytes=2 * (q.numel() + k.numel()) * size,
    )

    def stored() -> Tensor:
        triton_attention.store_kv(k, v, kv, slots)
        return kv

    def stored_by_oracle() -> Tensor:
        target = before.clone()
        reference.store_kv(k.float(), v.float(), target, slots)
        return target

    check_and_time(
        bench,
        f"store_kv, {tokens} tokens",
        stored,
        stored_by_oracle,
        bytes=2 * (k.numel() + v.numel()) * size,
    )

    def apart(norm: bool) -> tuple[Tensor, Tensor]:
        wide_q, wide_k = q.float(), k.float()
        if norm:
            wide_q = reference.rms_norm(wide_q, weights[0].float(), 1e-5)
            wide_k = reference.rms_norm(wide_k, weights[1].float(), 1e-5)
        wide_q, wide_k = reference.rope(wide_q, wide_k, table, positions)
        target = before.clone()
        reference.store_kv(wide_k, v.float(), target, slots)
        return wide_q, target

    for norm in (False, True):
        given = norms if norm else None
        check_and_time(
            bench,
            f"rope_store{' with q/k norm' * norm}, {tokens} tokens",
            lambda given=given: (
                triton_fused.rope_store(qkv, given, table, positions, kv, slots),
                kv,
            ),
            lambda norm=norm: apart(norm),
            bytes=2 * moved,
        )


@dataclass(frozen=True)
class Problem:
    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    scale: float

    def attend(self) -> Tensor:
        return triton_attention.paged_attention(self.q, self.kv, self.batch, self.scale)

    def oracle(self) -> Tensor:
        batch = replace(self.batch, derived={})
        return reference.paged_attention(self.q.float(), self.kv.float(), batch, self.scale, None)


def attention_problem(bench: Bench, chunks: Sequence[tuple[int, int]]) -> Problem:
    """Sequences of (start, new tokens) over a shuffled pool; page 0 is nobody's and holds NaN."""
    s, device = bench.scale, bench.device
    lengths = [start + new for start, new in chunks]
    widths = [-(-length // s.page_size) for length in lengths]
    order = (torch.randperm(sum(widths)) + 1).split(widths)
    tables = torch.zeros(len(chunks), max(widths), dtype=torch.int32)
    for table, pages in zip(tables, order, strict=True):
        table[: len(pages)] = pages
    kv = _normal(bench, sum(widths) + 1, 2, s.kv_heads, s.page_size, s.head_dim)
    kv[0] = math.nan
    news = [new for _, new in chunks]
    total = sum(news)
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(start, start + new) for start, new in chunks]).to(device),
        slot_mapping=torch.full((total,), -1, device=device),
        cu_seqlens_q=torch.tensor([0, *news]).cumsum(0).to(torch.int32).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_query_len=max(news),
        max_seq_len=max(lengths),
    )
    q = _normal(bench, total, s.heads, s.head_dim)
    return Problem(q, kv, batch, s.head_dim**-0.5)


def _attention(bench: Bench, name: str, chunks: Sequence[tuple[int, int]]) -> None:
    s = bench.scale
    problem = attention_problem(bench, chunks)
    keys = sum(start + new for start, new in chunks)
    decode = all(new == 1 for _, new in chunks)
    pairs = sum(new * start + new * (new + 1) // 2 for start, new in chunks)
    work: dict[str, float] = {"flops": 4.0 * s.heads * s.head_dim * pairs}
    if decode:
        work = {"bytes": 2.0 * keys * s.kv_heads * s.head_dim * bench.dtype.itemsize}
    checked = decode or max(new for _, new in chunks) <= s.checked_tokens
    check_and_time(bench, name, problem.attend, problem.oracle if checked else None, **work)


def _neighbours(bench: Bench) -> None:
    """What a failover relies on: a row's bits do not depend on the batch or on its padding."""
    sequences, context = bench.scale.decode[1]
    with bench.case("kernels", "decode rows are bitwise independent of their batch"):
        problem = attention_problem(bench, [(context - 1, 1), (context // 3, 1)] * sequences)
        batch, whole = problem.batch, problem.attend()
        for row in (0, 1):
            alone = replace(
                batch,
                cu_seqlens_q=batch.cu_seqlens_q[:2],
                seq_lens=batch.seq_lens[row : row + 1],
                block_tables=batch.block_tables[row : row + 1],
                max_seq_len=int(batch.seq_lens[row]),
            )
            one = replace(problem, q=problem.q[row : row + 1], batch=alone).attend()
            assert torch.equal(one[0], whole[row]), f"row {row} differs"


def _pages(bench: Bench) -> None:
    s = bench.scale
    shape = (2, s.kv_heads, s.page_size, s.head_dim)
    kv = _normal(bench, 2, 4 * s.pages, *shape)
    listed = torch.randperm(4 * s.pages, device=bench.device)[: s.pages]
    staging = torch.empty(2, s.pages, *shape, dtype=bench.dtype, device=bench.device)
    want = kv[:, listed]

    def gathered() -> Tensor:
        triton_pages.gather_pages(kv, listed, staging)
        return staging

    def scattered() -> Tensor:
        triton_pages.scatter_pages(staging, listed, kv)
        return kv[:, listed]

    moved = 2.0 * staging.numel() * bench.dtype.itemsize
    check_and_time(
        bench, f"gather_pages, {s.pages} of 2 layers", gathered, lambda: want, bytes=moved
    )
    with bench.case("kernels", "scatter_pages"):
        kv.zero_()
        assert torch.equal(scattered(), want)
        kv[:, listed] = 0
        assert not kv.any(), "pages that were not listed have changed"
        seconds = bench.seconds(lambda: triton_pages.scatter_pages(staging, listed, kv))
        bench.add("kernels", f"scatter_pages, {s.pages} of 2 layers", seconds, {"bytes": moved})


def _sampling(bench: Bench) -> None:
    s = bench.scale
    logits = torch.randn(s.sampled_rows, s.vocab, device=bench.device) * 3
    mixed = [
        Greedy(logprobs=2),
        Greedy(temperature=1.0),
        Greedy(temperature=0.7, top_p=0.9),
        Greedy(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01),
    ]
    rows = [replace(mixed[i % 4], seed=i) for i in range(s.sampled_rows)]
    specs = [SampleSpec(row, [1] * (i + 1), 1) for i, row in enumerate(rows)]
    with bench.case("kernels", "sampling chooses the reference's tokens"):
        want = [r.token_id for r in sampling.sample_reference(logits.clone(), specs)]
        got = [r.token_id for r in triton_sampler.sample(logits.clone(), specs)]
        assert got == want, [(i, a, b) for i, (a, b) in enumerate(zip(got, want, strict=True))]
    read = float(logits.numel() * 4)
    kinds: dict[str, list[Any]] = {
        "draw": [Greedy(temperature=1.0)] * s.sampled_rows,
        "draw with top_p": [Greedy(temperature=1.0, top_p=0.9)] * s.sampled_rows,
    }
    shape = f"{s.sampled_rows} x {s.vocab}"
    check_and_time(
        bench,
        f"row_maxima, {shape}",
        lambda: triton_sampling.row_maxima(logits).logsumexp,
        lambda: logits.logsumexp(1),
        bytes=read,
    )
    for name, params in kinds.items():
        with bench.case("kernels", name):
            maxima = triton_sampling.row_maxima(logits)
            draws = [SampleSpec(p, [1], 1) for p in params]
            given, _ = triton_sampler.draw_params(draws, bench.device)
            seconds = bench.seconds(lambda m=maxima, g=given: triton_sampling.draw(logits, m, g))
            bench.add("kernels", f"{name}, {shape}", seconds, {"bytes": read})
