# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Pages of a pool to and from one contiguous staging buffer, as plain bytes.

A transfer wants scattered pages side by side: `gather_pages` collects them, `scatter_pages` puts
them back. One launch does a list of pages of one layer (`kv[i : i + 1]`) or of all layers. Bytes
move in the widest integers that sizes and strides allow (8 bytes each; Triton joins two neighbours
into one 16-byte access), so every dtype is copied bit for bit, NaN payloads included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.triton_launch import next_power_of_2, warps_for
from pageferry.kernels.triton_ops import on_device_of

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

MAX_BLOCK = 2048
"""Words one program moves: 16 KiB, which is a page of 16 slots, 8 heads of 32 in bf16."""


@triton.jit
def copy_pages_kernel(
    pool,
    staging,
    pages,
    stride_layer,
    stride_page,
    stride_staging_layer,
    stride_staging_page,
    WORDS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (listed page, part of it, layer). OUT: pool to staging, else staging to pool."""
    listed = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64)
    inside = words < WORDS
    page = tl.load(pages + listed).to(tl.int64)
    in_pool = pool + layer * stride_layer + page * stride_page + words
    in_staging = staging + layer * stride_staging_layer + listed * stride_staging_page + words
    if OUT:
        tl.store(in_staging, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=inside), mask=inside)


def gather_pages(kv: Tensor, pages: Tensor, staging: Tensor) -> None:
    """staging[l, i] = kv[l, pages[i]] for every layer l and every listed page, bit for bit.

    kv [layers, pool pages, ...] and staging [layers, n, ...] have one dtype and one shape per page;
    layer and page strides are free, a page is contiguous. pages int64 or int32 [n], on the device,
    within the pool (not checked: a wrong one reads outside of it).
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    _copy(kv, pages, staging, out=True)


def scatter_pages(staging: Tensor, pages: Tensor, kv: Tensor) -> None:
    """kv[l, pages[i]] = staging[l, i]: `gather_pages` backwards. A page listed twice ends up as
    either of its two copies, or a mixture."""
    _copy(kv, pages, staging, out=False)


def _copy(kv: Tensor, pages: Tensor, staging: Tensor, out: bool) -> None:
    layers, count = kv.shape[0], pages.shape[0]
    if kv.dim() < 3 or staging.shape != (layers, count, *kv.shape[2:]) or staging.dtype != kv.dtype:
        raise ValueError(
            f"staging {tuple(staging.shape)} {staging.dtype} does not hold {count} pages of "
            f"kv {tuple(kv.shape)} {kv.dtype}"
        )
    if not (kv[0, 0].is_contiguous() and (count == 0 or staging[0, 0].is_contiguous())):
        raise ValueError(
            f"a page must be contiguous, got strides {kv.stride()} and {staging.stride()}"
        )
    if count == 0 or layers == 0:
        return
    pool_words, staging_words = _as_words(kv, staging)
    words = pool_words.shape[2]
    block = min(MAX_BLOCK, next_power_of_2(words))
    with on_device_of(kv):
        copy_pages_kernel[(count, triton.cdiv(words, block), layers)](
            pool_words, staging_words, pages,
            pool_words.stride(0), pool_words.stride(1),
            staging_words.stride(0), staging_words.stride(1),
            WORDS=words, OUT=out, BLOCK=block, num_warps=warps_for(block * 2),
        )  # fmt: skip


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """The tensors as [layers, pages, words] of the widest integer that addresses all of them."""
    flat = [tensor.flatten(2) for tensor in tensors]
    for word in WORDS:
        size = word.itemsize
        numbers = [
            number * tensor.element_size()
            for tensor in flat
            for number in (
                tensor.shape[2], tensor.stride(0), tensor.stride(1), tensor.storage_offset()
            )
        ]  # fmt: skip
        if size >= flat[0].element_size() and all(number % size == 0 for number in numbers):
            return [tensor.view(word) for tensor in flat]
    raise ValueError(f"no integer is as wide as {tensors[0].dtype}")
