"""Row-wise Triton kernels against float64 oracles: interpreted, and native where there is CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this platform")

from pageferry.kernels import triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def near(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values, rows apart: the gaps hold NaN, which no kernel may read."""
    room = torch.full((*shape[:-1], shape[-1] + 11), float("nan"), dtype=dtype)
    room[..., 3 : 3 + shape[-1]] = torch.randn(shape).to(dtype)
    return room.to(DEVICE)[..., 3 : 3 + shape[-1]]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = strided(*shape, dtype=dtype), strided(shape[-1], dtype=dtype)
    near(triton_ops.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5))
    tiny = x * 1e-3  # eps decides here
    near(triton_ops.rms_norm(tiny, weight, 1e-2), normed(tiny, weight, 1e-2))


def check_add_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, residual = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype)
    weight = strided(shape[1], dtype=dtype)
    before = x.clone(), residual.clone()
    got, total = triton_ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter rounds to bf16 towards 0
        near(total, x.double() + residual.double())
    else:
        assert torch.equal(total, x + residual)
    near(got, normed(total, weight, 1e-5))
    if DEVICE == "cpu":  # bitwise the norm of the rounded sum; on a GPU additions may be reordered
        assert torch.equal(got, triton_ops.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def check_rope(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    positions = torch.tensor([0, 1, 96, 7, 96], device=DEVICE)
    angles = torch.arange(97.0)[:, None] / 100.0 ** (torch.arange(head_dim // 2) / head_dim)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    q = strided(5, heads[0], head_dim, dtype=dtype)
    k = strided(5, heads[1], head_dim, dtype=dtype)
    for x, got in zip((q, k), triton_ops.rope(q, k, table, positions), strict=True):
        # Each pair (i, i + D/2) is a complex number, turned by its position's angle.
        left, right = x.cpu().double().chunk(2, dim=-1)
        turn = torch.polar(torch.ones_like(angles), angles)[positions.cpu()][:, None]
        turned = torch.complex(left, right) * turn
        near(got.cpu(), torch.cat((turned.real, turned.imag), dim=-1))


def check_silu_mul(tokens: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = strided(tokens, 2 * columns, dtype=dtype)
    x[0, 0], x[0, 1], x[0, 2] = -200.0, 200.0, 0.0  # exp overflows in fp32 at 89
    gate, up = x.double().chunk(2, dim=-1)
    near(triton_ops.silu_mul(x), gate * gate.sigmoid() * up)


def check_empty() -> None:
    x = torch.empty(0, 8, device=DEVICE)
    heads = torch.empty(0, 2, 8, device=DEVICE)
    assert triton_ops.rms_norm(x, torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    assert triton_ops.silu_mul(x).shape == (0, 4)
    assert triton_ops.fused_add_rms_norm(x, x, x.new_ones(8), 1e-5)[1].shape == (0, 8)
    table, none = x.new_ones(4, 8), torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert triton_ops.rope(heads, heads, table, none)[0].shape == (0, 2, 8)


CASES: dict[str, Callable[[], Any]] = {"empty": check_empty}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
for _name, _dtype in DTYPES.items():  # no dot product here: the interpreter's bf16 is right
    for _shape in ((1, 576), (5, 123), (37, 64), (3, 5000), (5, 3, 72), (4, 9, 64)):
        _id = "x".join(map(str, _shape))
        CASES[f"rms_norm-{_id}-{_name}"] = partial(check_rms_norm, _shape, _dtype)
    for _rows in ((1, 576), (5, 123), (37, 64)):
        _id = "x".join(map(str, _rows))
        CASES[f"add_norm-{_id}-{_name}"] = partial(check_add_norm, _rows, _dtype)
    for _heads, _dim in (((9, 3), 64), ((1, 1), 80), ((5, 2), 72), ((4, 1), 2)):
        _id = f"{_heads[0]}-{_heads[1]}-{_dim}"
        CASES[f"rope-{_id}-{_name}"] = partial(check_rope, _heads, _dim, _dtype)
    for _tokens, _columns in ((1, 1536), (3, 123), (5, 1025)):
        CASES[f"silu_mul-{_tokens}x{_columns}-{_name}"] = partial(
            check_silu_mul, _tokens, _columns, _dtype
        )


@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_refused_arguments() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="contiguous"):
        triton_ops.silu_mul(x.t())
    with pytest.raises(ValueError, match="same dtype"):
        triton_ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5)
    with pytest.raises(ValueError, match="must be"):
        triton_ops.fused_add_rms_norm(x, x[:1], torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="even last dimension"):
        triton_ops.rope(x[:, None], x[:, None], torch.ones(4, 6), torch.zeros(2))
