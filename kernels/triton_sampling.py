# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Choose tokens on the GPU: the rules of `kernels/sampling.py`, a row of logits per sequence.

1. `row_maxima`: largest logit, its first index and the logsumexp, one pass over the row. The
   vocabulary is cut into parts for several programs; a second kernel joins what they found.
2. `draw`, cut and joined likewise: argmax(logit / T + g) over the tokens above the row's floor,
   where the noise g is a hash of (key, token id), the same integers and float64 steps as on the
   CPU.
3. Rows with top_k or top_p first search the logit below which nothing is kept: sixteen thresholds a
   pass, eight passes over the bits of a float. Nothing is sorted. Among logits equal to the
   threshold the lower ids are kept, so the last id kept goes with it.

Nothing here waits for the device. Masses for top_p are sums of fp32 exponentials in float64; the
reference has float64 throughout: a token whose cumulated probability is within 1e-6 of top_p may be
kept by one and not by the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageferry.kernels.triton_launch import next_power_of_2
from pageferry.kernels.triton_ops import on_device_of

PART = 2048
"""Logits that one program of a cut row takes: 8 KiB."""

DIGITS = 16
"""Thresholds that one pass of the search compares: 4 bits of 32."""

SEARCH_BLOCK = 512


@triton.jit
def ordered(x):
    """int32 keys that sort as the fp32 values do; -0.0 counts as 0.0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def maxima_kernel(
    logits,
    peaks,
    places,
    masses,
    stride_row,
    size,
    parts,
    PART: tl.constexpr,
):
    """Program (row, part). NaN counts as +inf, so it is seen: a row's peak must be finite."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride_row + ids, mask=ids < size, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    peak, place = tl.max(x, 0, return_indices=True)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    cell = row * parts + tl.program_id(1)
    tl.store(peaks + cell, peak)
    tl.store(places + cell, (tl.program_id(1) * PART + place).to(tl.int64))
    tl.store(masses + cell, tl.sum(tl.exp(x - base), 0))


@triton.jit
def join_maxima_kernel(peaks, places, masses, best, token, logsumexp, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    cells = row * parts + part
    peak = tl.load(peaks + cells, mask=part < parts, other=float("-inf"))
    mass = tl.load(masses + cells, mask=part < parts, other=0.0)
    highest, winner = tl.max(peak, 0, return_indices=True)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(mass * tl.exp(peak - base), 0)
    tl.store(best + row, highest)
    tl.store(token + row, tl.load(places + row * parts + winner))
    tl.store(logsumexp + row, base + tl.log(total))


@triton.jit
def floor_of(best, spans, row):
    """The lowest logit that can win, rounded to fp32 where the reference rounds it; above -inf."""
    floor = (tl.load(best + row).to(tl.float64) - tl.load(spans + row)).to(tl.float32)
    return tl.maximum(floor, -3.4028234663852886e38)


@triton.jit
def tile_of(logits_row, start, size, floor, low_key, last_id, BLOCK: tl.constexpr):
    """Logits, keys (0 .. 2**32 - 1) and ids of a tile, and which of them still take part."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_row + ids, mask=ids < size, other=float("-inf"))
    keys = ordered(x).to(tl.int64) + 2147483648
    inside = (ids < size) & (x >= floor)
    inside = inside & ((keys > low_key) | ((keys == low_key) & (ids <= last_id)))
    return x, keys, ids, inside


@triton.jit
def share_of(x, inside, best, temperature, BY_MASS: tl.constexpr):
    """What a token counts for: 1, or its probability relative to the best token's."""
    if BY_MASS:
        share = tl.exp(((x - best) / temperature).to(tl.float32))
    else:
        share = tl.full(x.shape, 1.0, tl.float32)
    return tl.where(inside, share, 0.0)


@triton.jit
def narrow(
    logits_row,
    size,
    floor,
    best,
    temperature,
    limit,
    low_key,
    last_id,
    BY_MASS: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(low_key, last_id) of the tokens that have less than `limit` of shares ahead of them.

    A token is ahead of another with a higher logit, or an equal one and a lower id. The key sought
    is the smallest `t` with less than `limit` strictly above it, found from its highest digit down.
    """
    digits = tl.arange(0, DIGITS)
    found = low_key * 0
    above = limit * 0.0
    for step in range(8):
        shift = 28 - 4 * step
        sums = tl.zeros([DIGITS], dtype=tl.float64)  # of keys beyond each digit's range
        for start in range(0, size, BLOCK):
            x, keys, _ids, inside = tile_of(logits_row, start, size, floor, low_key, last_id, BLOCK)
            share = share_of(x, inside, best, temperature, BY_MASS)
            place = tl.minimum(tl.maximum((keys - found) >> shift, -1), DIGITS).to(tl.int32)
            beyond = place[None, :] > digits[:, None]
            sums += tl.sum(tl.where(beyond, share[None, :], 0.0), 1).to(tl.float64)
        digit = tl.min(tl.where(sums < limit, digits, DIGITS - 1), 0)
        above = tl.sum(tl.where(digits == digit, sums, 0.0), 0)
        found += digit.to(tl.int64) << shift
    last = found * 0 - 1
    ties = found * 0
    for start in range(0, size, BLOCK):
        x, keys, ids, inside = tile_of(logits_row, start, size, floor, low_key, last_id, BLOCK)
        tied = inside & (keys == found)
        share = share_of(x, inside, best, temperature, BY_MASS).to(tl.float64)
        before = ties + tl.cumsum(tied.to(tl.int32), 0) - tied.to(tl.int32)
        kept = tied & (above + before.to(tl.float64) * share < limit)
        last = tl.maximum(last, tl.max(tl.where(kept, ids, -1), 0).to(tl.int64))
        ties += tl.sum(tied.to(tl.int32), 0).to(tl.int64)
    return found, last


@triton.jit
def threshold_kernel(
    logits,
    best,
    spans,
    temperatures,
    top_ks,
    top_ps,
    low_keys,
    last_ids,
    stride_row,
    size,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: one row. What top_k and then top_p leave of it, as (lowest key, last id at it)."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * stride_row
    peak = tl.load(best + row)
    floor = floor_of(best, spans, row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    low_key = top_k * 0
    last_id = low_key + size
    if (top_k > 0) & (top_k < size):
        low_key, last_id = narrow(
            logits_row, size, floor, peak, temperature, top_k.to(tl.float64), low_key, last_id,
            False, DIGITS, BLOCK,
        )  # fmt: skip
    if top_p < 1.0:
        total = top_p * 0.0
        for start in range(0, size, BLOCK):
            x, _keys, _ids, inside = tile_of(
                logits_row, start, size, floor, low_key, last_id, BLOCK
            )
            share = share_of(x, inside, peak, temperature, True)
            total += tl.sum(share, 0).to(tl.float64)
        limit = tl.maximum(top_p * total, 1e-300)  # the best token is kept even at top_p 0
        low_key, last_id = narrow(
            logits_row, size, floor, peak, temperature, limit, low_key, last_id,
            True, DIGITS, BLOCK,
        )  # fmt: skip
    tl.store(low_keys + row, low_key)
    tl.store(last_ids + row, last_id)


@triton.jit
def mixed(bits):
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) on uint64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise, float64, of uint64 ids under a row's uint64 key."""
    bits = mixed(ids * 0x9E3779B97F4A7C15 + key) >> 32
    uniform = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw_kernel(
    logits,
    best,
    spans,
    temperatures,
    keys,
    low_keys,
    last_ids,
    scores,
    places,
    stride_row,
    size,
    parts,
    CUT: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (row, part): the part's highest score and its token. CUT: some row has a threshold"""
    row = tl.program_id(0).to(tl.int64)
    low_key = row * 0
    last_id = low_key + size
    if CUT:
        low_key = tl.load(low_keys + row)
        last_id = tl.load(last_ids + row)
    floor = floor_of(best, spans, row)
    start = tl.program_id(1) * PART
    x, _keys, ids, inside = tile_of(
        logits + row * stride_row, start, size, floor, low_key, last_id, PART
    )
    noise = gumbel(tl.load(keys + row).to(tl.uint64, bitcast=True), ids.to(tl.uint64))
    scaled = (x.to(tl.float64) - tl.load(best + row).to(tl.float64)) / tl.load(temperatures + row)
    score, place = tl.max(tl.where(inside, scaled + noise, float("-inf")), 0, return_indices=True)
    cell = row * parts + tl.program_id(1)
    tl.store(scores + cell, score)
    tl.store(places + cell, (start + place).to(tl.int64))


@triton.jit
def join_draw_kernel(scores, places, token, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    score = tl.load(scores + row * parts + part, mask=part < parts, other=float("-inf"))
    _highest, winner = tl.max(score, 0, return_indices=True)
    tl.store(token + row, tl.load(places + row * parts + winner))


@dataclass(frozen=True, eq=False)
class RowMaxima:
    best: Tensor
    """float32 [N]; +inf where the row holds NaN or +inf, -inf where nothing is finite."""
    token: Tensor
    """int64 [N]; the first of the best."""
    logsumexp: Tensor
    """float32 [N]; natural log. A token's logprob is its logit less this."""


@dataclass(frozen=True, eq=False)
class DrawParams:
    """Parameters of the rows of one draw, on the device."""

    temperatures: Tensor
    """float64 [N], above 0."""
    spans: Tensor
    """float64 [N]; logits further below the best cannot win: GUMBEL_SPAN * temperature, or
    -ln(min_p) * temperature if that is less."""
    keys: Tensor
    """int64 [N]; the hash of (seed, position), wrapped to signed."""
    top_ks: Tensor
    """int64 [N]; 0: all."""
    top_ps: Tensor
    """float64 [N]; 1: all."""
    cut: bool
    """Whether any row has top_k above 0 or top_p below 1: else the search is not launched."""


def row_maxima(logits: Tensor) -> RowMaxima:
    """Largest logit, its first index and logsumexp of logits float32 [N, V], last axis contiguous.

    Raises ValueError for another dtype or layout.
    """
    rows, size = _check(logits)
    parts = triton.cdiv(size, PART)
    peaks = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    result = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        with on_device_of(logits):
            maxima_kernel[(rows, parts)](
                logits, peaks[0], places, peaks[1], logits.stride(0), size, parts,
                PART=PART, num_warps=8,
            )  # fmt: skip
            join_maxima_kernel[(rows,)](
                peaks[0], places, peaks[1], result[0], token, result[1], parts,
                BLOCK=next_power_of_2(parts), num_warps=1,
            )  # fmt: skip
    return RowMaxima(result[0], token, result[1])


def draw(logits: Tensor, maxima: RowMaxima, params: DrawParams) -> Tensor:
    """One token per row, int64 [N], of logits float32 [N, V] whose maxima are `row_maxima`'s.

    What it yields for a row whose best logit is not finite has no meaning.
    Raises ValueError for another dtype or layout.
    """
    rows, size = _check(logits)
    parts = triton.cdiv(size, PART)
    device = logits.device
    scores = torch.empty((rows, parts), dtype=torch.float64, device=device)
    places = torch.empty((rows, parts), dtype=torch.int64, device=device)
    bounds = torch.empty((2, rows), dtype=torch.int64, device=device)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return token
    with on_device_of(logits):
        if params.cut:
            threshold_kernel[(rows,)](
                logits, maxima.best, params.spans, params.temperatures, params.top_ks,
                params.top_ps, bounds[0], bounds[1], logits.stride(0), size,
                DIGITS=DIGITS, BLOCK=SEARCH_BLOCK, num_warps=8,
            )  # fmt: skip
        draw_kernel[(rows, parts)](
            logits, maxima.best, params.spans, params.temperatures, params.keys,
            bounds[0], bounds[1], scores, places, logits.stride(0), size, parts,
            CUT=params.cut, PART=PART, num_warps=8,
        )  # fmt: skip
        join_draw_kernel[(rows,)](
            scores, places, token, parts, BLOCK=next_power_of_2(parts), num_warps=1
        )
    return token


def _check(logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 [N, V] with a contiguous last axis, got {logits.dtype} "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    rows, size = logits.shape
    if size == 0:
        raise ValueError("logits have no columns")
    return rows, size
