"""Norm, rotation and store in one Triton kernel against the reference's separate operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this platform")

from pageferry.kernels import reference
from pageferry.kernels.head_norms import HeadNorms
from pageferry.kernels.triton_fused import rope_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SLOTS = [39, -1, 0, 8, -1, 21]
POSITIONS = [0, 1, 96, 7, 3, 96]


def inputs(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """qkv with NaN between tokens, table, positions, a pool of NaN, slots."""
    torch.manual_seed(3)
    total = heads[0] + 2 * heads[1]
    room = torch.full((6, total * head_dim + 5), math.nan, dtype=dtype)
    room[:, 2:-3] = torch.randn(6, total * head_dim).to(dtype)
    qkv = room.to(DEVICE)[:, 2:-3].unflatten(1, (total, head_dim))
    angles = torch.arange(97.0)[:, None] / 100.0 ** (torch.arange(head_dim // 2) / head_dim)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    pool = torch.full((3, 5, 2, heads[1], 8, head_dim), math.nan, dtype=dtype, device=DEVICE)
    positions = torch.tensor(POSITIONS, device=DEVICE)
    return qkv, table, positions, pool, torch.tensor(SLOTS, device=DEVICE)


def check(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    qkv, table, positions, pool, slots = inputs(heads, head_dim, dtype)
    norms = None
    q, k, v = qkv.split([heads[0], heads[1], heads[1]], dim=1)
    if norm:
        weights = (1 + torch.randn(2, head_dim) / 4).to(dtype).to(DEVICE)
        norms = HeadNorms(weights[0], weights[1], 1e-5)
        q, k = reference.rms_norm(q, weights[0], 1e-5), reference.rms_norm(k, weights[1], 1e-5)
    q, k = reference.rope(q, k, table, positions)
    want = pool.clone()
    reference.store_kv(k, v, want[1], slots)
    got = rope_store(qkv, norms, table, positions, pool[1], slots)
    near = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    near(got, q)
    near(pool, want, equal_nan=True)
    assert torch.equal(pool[1].isnan(), want[1].isnan())  # untouched slots stay poisoned
    stored = torch.tensor(SLOTS)[torch.tensor(SLOTS) >= 0]
    assert torch.equal(
        pool[1, stored // 8, 1, :, stored % 8], want[1, stored // 8, 1, :, stored % 8]
    )


def check_empty() -> None:
    qkv, table, positions, pool, slots = inputs((2, 1), 8, torch.float32)
    assert rope_store(qkv[:0], None, table, positions[:0], pool[0], slots[:0]).shape == (0, 2, 8)
    assert pool.isnan().all()


CASES: dict[str, Callable[[], Any]] = {"empty": check_empty}
for _heads, _dim in (((9, 3), 64), ((1, 1), 80), ((5, 5), 72), ((8, 1), 2), ((6, 2), 128)):
    for _norm in (False, True):
        for _name in ("float32", "float16", *(["bfloat16"] if DEVICE == "cuda" else [])):
            CASES[f"{_heads[0]}-{_heads[1]}-{_dim}-{_name}{'-norm' * _norm}"] = partial(
                check, _heads, _dim, getattr(torch, _name), _norm
            )


@pytest.mark.parametrize("case", CASES)
def test_against_the_separate_operations(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_refused_arguments() -> None:
    table, ids, kv = torch.ones(4, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 2, 1, 8, 8)
    qkv = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match="does not fit"):
        rope_store(qkv[:, :2], None, table, ids, kv, ids)
    with pytest.raises(ValueError, match="must be even"):
        rope_store(qkv, None, table[:, :6], ids, kv, ids)
    with pytest.raises(ValueError, match="one dtype"):
        rope_store(qkv.half(), None, table, ids, kv, ids)
    with pytest.raises(ValueError, match=r"norms must be \[8\]"):
        rope_store(qkv, HeadNorms(table[0], table[0, :6], 1e-5), table, ids, kv, ids)
    with pytest.raises(ValueError, match="adjacent"):
        rope_store(qkv, None, table, ids, kv.transpose(3, 4), ids)
