"""The torch operations against arithmetic written out per query, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pageferry.kernels import ops, reference
from pageferry.kernels.batch import AttentionBatch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MIXES = {
    "decode": [(1, 1), (1, 2), (1, 17), (1, 33), (1, 200)],
    "very unequal decode": [(1, 3000), (1, 5), (1, 16), (1, 2999), (1, 1), (1, 700)],
    "whole prompts": [(5, 5), (1, 1), (33, 33)],
    "mixed": [(1, 40), (7, 20), (1, 1), (16, 16), (3, 131), (1, 64)],
    "one chunk": [(31, 95)],
}
"""Per case (new tokens, context length) of each sequence."""


@dataclass(frozen=True)
class Case:
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    """Per sequence [length, Hkv, D]."""
    kv: Tensor
    batch: AttentionBatch


def make_case(
    mix: list[tuple[int, int]],
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
) -> Case:
    """Sequences in permuted pages of a pool that is filled with `poison` everywhere else."""
    g = torch.Generator().manual_seed(5)
    lengths = [n for _, n in mix]
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(counts) + 5, generator=g)[: sum(counts)].split(counts)
    tables = torch.zeros(len(mix), max(counts) + 1, dtype=torch.int32)
    for row, ids in zip(tables, pages, strict=True):
        row[: len(ids)] = ids
    kv = torch.full((sum(counts) + 5, 2, heads[1], page_size, head_dim), poison, dtype=dtype)
    keys, values, positions, slots = [], [], [], []
    for i, (new, length) in enumerate(mix):
        k, v = torch.randn(2, length, heads[1], head_dim, generator=g).to(dtype)
        where = torch.arange(length)
        slot = tables[i, where // page_size].long() * page_size + where % page_size
        reference.store_kv(k, v, kv, slot)
        keys.append(k)
        values.append(v)
        positions.append(where[-new:])
        slots.append(slot[-new:])
    new_lengths = torch.tensor([0, *(n for n, _ in mix)])
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        cu_seqlens_q=new_lengths.cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        max_query_len=int(new_lengths.max()),
        max_seq_len=max(lengths),
    )
    q = torch.randn(int(new_lengths.sum()), heads[0], head_dim, generator=g).to(dtype)
    return Case(q, keys, values, kv, batch)


def oracle(case: Case, scale: float, window: int | None) -> Tensor:
    """Query by query: softmax over the positions it may see, in float64."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    bounds = case.batch.cu_seqlens_q.tolist()
    for i, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        group = case.q.shape[1] // k.shape[1]
        for row in range(bounds[i], bounds[i + 1]):
            newest = int(case.batch.positions[row])
            oldest = 0 if window is None else max(0, newest - window + 1)
            for head in range(case.q.shape[1]):
                seen = k[oldest : newest + 1, head // group].double()
                weights = (seen @ case.q[row, head].double() * scale).softmax(0)
                out[row, head] = weights @ v[oldest : newest + 1, head // group].double()
    return out


def check(case: Case, window: int | None, scale: float = 0.3) -> None:
    got = ops.paged_attention(case.q, case.kv, case.batch, scale, window)
    error = (got.double() - oracle(case, scale, window)).abs().max().item()
    assert got.dtype == case.q.dtype
    assert error < TOLERANCE[case.q.dtype]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 16, 23])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_ragged_mixes(mix: str, window: int | None, poison: float) -> None:
    check(make_case(MIXES[mix], poison=poison), window)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_head_and_page_sizes(head_dim: int, page_size: int) -> None:
    case = make_case([(1, 37), (5, 19), (1, 3)], head_dim=head_dim, page_size=page_size)
    check(case, None, head_dim**-0.5)


@pytest.mark.parametrize("heads", [(9, 3), (5, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_groups_and_types(heads: tuple[int, int], dtype: torch.dtype) -> None:
    poison = 3e38 if dtype != torch.float16 else 6e4
    check(make_case(MIXES["mixed"], heads, dtype=dtype, poison=poison), None)
    check(make_case(MIXES["mixed"], heads, dtype=dtype), 20)


def test_strided_queries() -> None:
    case = make_case(MIXES["mixed"])
    wide = torch.randn(case.q.shape[0], 11, 16)
    wide[:, 2:8] = case.q
    check(replace(case, q=wide[:, 2:8]), None)


def test_padding_rows_and_padding_sequences_come_back_as_zeros() -> None:
    case = make_case(MIXES["decode"])
    bounds, lengths = case.batch.cu_seqlens_q, case.batch.seq_lens
    batch = replace(
        case.batch,
        positions=torch.cat((case.batch.positions, torch.zeros(2, dtype=torch.int64))),
        cu_seqlens_q=torch.cat((bounds, bounds[-1:] + 1, bounds[-1:] + 1)),
        seq_lens=torch.cat((lengths, torch.zeros(2, dtype=torch.int32))),
        block_tables=torch.cat((case.batch.block_tables, torch.zeros(2, 14, dtype=torch.int32))),
        derived={},
    )
    q = torch.cat((case.q, torch.full((2, *case.q.shape[1:]), float("nan"))))
    got = ops.paged_attention(q, case.kv, batch, 0.3, None)
    assert torch.equal(got[-2:], torch.zeros(got[-2:].shape))
    assert torch.equal(got[:-2], ops.paged_attention(case.q, case.kv, case.batch, 0.3, None))


def test_store_writes_the_slots_and_nothing_else() -> None:
    kv = torch.full((5, 2, 3, 8, 4), 7.0)
    k, v = torch.randn(2, 4, 3, 4)
    reference.store_kv(k, v, kv, torch.tensor([39, -1, 0, 13]))
    expected = torch.full_like(kv, 7.0)
    for row, page, offset in ((0, 4, 7), (2, 0, 0), (3, 1, 5)):
        expected[page, 0, :, offset], expected[page, 1, :, offset] = k[row], v[row]
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 123, dtype=torch.float64).to(dtype)
    weight = torch.randn(123).to(dtype)

    def expected(value: Tensor) -> Tensor:
        wide = value.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()

    tolerance = TOLERANCE[dtype]
    normed = ops.rms_norm(x, weight, 1e-3)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected(x), rtol=tolerance, atol=tolerance)
    normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), expected(total), rtol=tolerance, atol=tolerance)


def test_rope_turns_pairs_half_a_head_apart() -> None:
    q, k = torch.randn(4, 3, 10), torch.randn(4, 2, 10)
    angles = torch.rand(50, 5) * 6
    positions = torch.tensor([0, 7, 49, 7])
    table = torch.cat((angles.cos(), angles.sin()), -1)
    got_q, got_k = reference.rope(q, k, table, positions)
    turn = torch.polar(torch.ones(4, 1, 5), angles[positions][:, None])
    for x, got in ((q, got_q), (k, got_k)):
        expected = torch.complex(x[..., :5], x[..., 5:]) * turn
        torch.testing.assert_close(got, torch.cat((expected.real, expected.imag), -1))


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 14)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    torch.testing.assert_close(ops.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
