"""Page gather and scatter in Triton against plain indexing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this platform")

from pageferry.kernels.triton_pages import _as_words, gather_pages, scatter_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def pool(layers: int, pages: int, inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes, NaN patterns among them, with a gap after each page."""
    torch.manual_seed(5)
    elements = torch.Size(inner).numel()
    gap = elements + 3
    raw = torch.randint(0, 256, (layers, pages, gap * dtype.itemsize), dtype=torch.uint8)
    room = raw.view(dtype).to(DEVICE)
    return room[:, :, :elements].unflatten(2, inner)


def check(dtype: torch.dtype, inner: tuple[int, ...], ids: type = torch.int64) -> None:
    for layers, listed in ((1, [4]), (3, [6, 0, 2, 1]), (2, [3, 5, 4])):
        kv = pool(layers, 7, inner, dtype)
        pages = torch.tensor(listed, dtype=ids, device=DEVICE)
        staging = torch.zeros(layers, len(listed), *inner, dtype=dtype, device=DEVICE)
        gather_pages(kv, pages, staging)
        assert torch.equal(bits(staging), bits(kv[:, listed]))
        target = torch.zeros(layers, 9, *inner, dtype=dtype, device=DEVICE)
        want = target.clone()
        want[:, listed] = staging
        scatter_pages(staging, pages, target)
        assert torch.equal(bits(target), bits(want))


def check_one_layer_of_a_pool() -> None:
    kv = pool(4, 6, (2, 1, 8, 16), torch.float16)
    before, pages = kv.clone(), torch.tensor([5, 1], device=DEVICE)
    staging = torch.full((1, 2, 2, 1, 8, 16), 3.0, dtype=torch.float16, device=DEVICE)
    scatter_pages(staging, pages, kv[2:3])
    before[2, [5, 1]] = 3.0
    assert torch.equal(bits(kv), bits(before))


def check_nothing() -> None:
    kv = pool(2, 3, (2, 8), torch.float32)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    gather_pages(kv, none, kv.new_empty(2, 0, 2, 8))


CASES: dict[str, Callable[[], Any]] = {
    "bf16": partial(check, torch.bfloat16, (2, 3, 8, 64)),
    "fp16-odd": partial(check, torch.float16, (2, 1, 3, 5)),
    "fp32": partial(check, torch.float32, (2, 2, 8, 72)),
    "fp32-int32-ids": partial(check, torch.float32, (2, 1, 8, 6), torch.int32),
    "bytes-odd": partial(check, torch.uint8, (17, 301)),
    "one-layer": check_one_layer_of_a_pool,
    "nothing": check_nothing,
}


@pytest.mark.parametrize("case", CASES)
def test_against_indexing(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_words_are_as_wide_as_sizes_and_strides_allow() -> None:
    even = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    assert _as_words(even)[0].dtype == torch.int64
    assert _as_words(even[:, :, :6])[0].dtype == torch.int32
    assert _as_words(even[:, :, 1:7])[0].dtype == torch.int16
    layers_apart = torch.zeros(2, 25, dtype=torch.bfloat16)[:, :24].unflatten(1, (3, 8))
    assert _as_words(layers_apart)[0].dtype == torch.int16
    assert _as_words(even, torch.zeros(2, 3, 6, dtype=torch.bfloat16))[0].dtype == torch.int32


def test_refused_arguments() -> None:
    kv, pages = torch.zeros(2, 5, 2, 8), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="does not hold 2 pages"):
        gather_pages(kv, pages, torch.zeros(2, 3, 2, 8))
    with pytest.raises(ValueError, match="does not hold 2 pages"):
        gather_pages(kv, pages, torch.zeros(2, 2, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        gather_pages(kv.transpose(2, 3), pages, torch.zeros(2, 2, 8, 2))
