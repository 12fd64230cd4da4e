"""Choose the next token of each row of logits.

Per row, in this order: repetition penalty (prompt and output), presence and frequency penalties
(output), logit bias, masking of stop ids below `min_tokens`; then the logprobs are taken; then
temperature, min_p, top_k, top_p, and the draw.

The draw is the Gumbel-max rule: the winner is argmax(logit / T + g), and g depends on (seed,
position, token id) alone through an integer hash. So a row's choice does not depend on its batch,
and a sequence that was preempted or moved goes on as it would have. `position` is the index of the
sampled token in its sequence.

g is bounded (`GUMBEL_SPAN`), so tokens further than that below the best one cannot win: the draw
looks at the few candidates above that line, exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
UNIFORM_BITS = 32
GUMBEL_SPAN = 27.0
"""Largest minus smallest g: with 32-bit uniforms, 22.9 + 3.2, rounded up."""

NON_FINITE = "non_finite_logits"
BAD_BIAS = "logit_bias_out_of_range"

ARGMAX_BLOCK = 64


class Sampling(Protocol):
    """Sampling parameters; ranges as in the OpenAI API, checked by whoever accepts the request."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def logprobs(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class SampleSpec:
    """How to choose the next token of one sequence."""

    params: Sampling
    token_ids: Sequence[int]
    """The whole sequence so far, prompt and output."""
    prompt_len: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True)
class Sampled:
    """One chosen token, or why there is none."""

    token_id: int
    logprob: float | None = None
    """Natural log, after penalties and bias, before temperature; None when not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""
    error: str = ""
    """Set: `token_id` is -1 and this row alone has failed."""


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One token per row of `logits` float32 [N, V], which is overwritten.

    Entries of -inf are tokens that cannot be chosen. A row with NaN or +inf, or without any
    finite entry, yields an error for that row alone.
    """
    best, greedy = _row_max(logits)
    results: list[Sampled | None] = [None] * len(specs)
    maxima, choices = best.tolist(), greedy.tolist()
    for i, spec in enumerate(specs):
        if not math.isfinite(maxima[i]):
            results[i] = Sampled(-1, error=NON_FINITE)
            continue
        params = spec.params
        if _adjusts(spec):
            error = _adjust(logits[i], spec)
            value, index = _row_max(logits[i : i + 1])
            maxima[i], choices[i] = value.item(), int(index.item())
            if error or not math.isfinite(maxima[i]):
                results[i] = Sampled(-1, error=error or NON_FINITE)
                continue
        token = choices[i]
        if params.temperature > 0 and params.top_k != 1:
            token = _draw(logits[i], maxima[i], spec)
        if params.logprobs >= 0:
            results[i] = _with_logprobs(logits[i], token, params.logprobs)
        else:
            results[i] = Sampled(token)
    return [r for r in results if r is not None]


def _row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its first index per row; NaN counts as the maximum.

    In two levels: a maximum with index over 49152 entries takes 60 us a row in torch 2.13 on CPU,
    a plain maximum 5 us.
    """
    rows, size = logits.shape
    if size % ARGMAX_BLOCK:
        value, index = logits.max(dim=-1)
        return value, index
    blocks = logits.reshape(rows, -1, ARGMAX_BLOCK)
    block = blocks.amax(-1).argmax(-1)
    value, within = blocks[torch.arange(rows, device=logits.device), block].max(dim=-1)
    return value, block * ARGMAX_BLOCK + within


def _adjusts(spec: SampleSpec) -> bool:
    p = spec.params
    return bool(
        p.repetition_penalty != 1.0
        or ((p.presence_penalty or p.frequency_penalty) and spec.num_output_tokens)
        or p.logit_bias
        or (p.stop_token_ids and spec.num_output_tokens < p.min_tokens)
    )


def _adjust(row: Tensor, spec: SampleSpec) -> str:
    """Penalties, bias and the minimum length, in place. Returns an error word or ""."""
    p = spec.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(spec.token_ids)), device=row.device)
        score = row[seen]
        # Source: CTRL, arXiv:1909.05858, with the sign handling that all implementations share.
        row[seen] = torch.where(
            score > 0, score / p.repetition_penalty, score * p.repetition_penalty
        )
    if (p.presence_penalty or p.frequency_penalty) and spec.num_output_tokens:
        counts = Counter(spec.token_ids[spec.prompt_len :])
        ids = torch.tensor(list(counts), device=row.device)
        number = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
        row[ids] -= p.presence_penalty + p.frequency_penalty * number
    if p.logit_bias:
        if not all(0 <= i < row.shape[0] for i in p.logit_bias):
            return BAD_BIAS
        ids = torch.tensor(list(p.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(p.logit_bias.values()), device=row.device)
    if spec.num_output_tokens < p.min_tokens:
        stops = [i for i in p.stop_token_ids if 0 <= i < row.shape[0]]
        row[torch.tensor(stops, dtype=torch.long, device=row.device)] = float("-inf")
    return ""


def _draw(row: Tensor, best: float, spec: SampleSpec) -> int:
    p = spec.params
    span = GUMBEL_SPAN * p.temperature
    if p.min_p > 0:
        span = min(span, -math.log(p.min_p) * p.temperature)
    ids = (row >= best - span).nonzero().flatten()
    scores = (row[ids].double() - best) / p.temperature
    if 0 < p.top_k < ids.numel() or p.top_p < 1.0:
        ids, scores = _nucleus(ids, scores, p)
    scores += gumbel(p.seed, len(spec.token_ids), ids)
    return int(ids[scores.argmax()].item())


def _nucleus(ids: Tensor, scores: Tensor, params: Sampling) -> tuple[Tensor, Tensor]:
    """The `top_k` best, then the fewest of them that hold `top_p` of their probability.

    Among equal scores the lower id comes first. Source for top_p: arXiv:1904.09751.
    """
    scores, order = scores.sort(descending=True, stable=True)
    if params.top_k > 0:
        scores, order = scores[: params.top_k], order[: params.top_k]
    if params.top_p < 1.0:
        probs = scores.softmax(-1)
        keep = probs.cumsum(-1) - probs < params.top_p
        keep[0] = True
        scores, order = scores[keep], order[keep]
    return ids[order], scores


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """float64, like `ids`: standard Gumbel noise from a hash of (seed, position, id)."""
    key = _mix((seed + _mix(position + 1)) & MASK64)
    bits = _mix_tensor(ids * _signed(0x9E3779B97F4A7C15) + _signed(key))
    bits = (bits >> (64 - UNIFORM_BITS)) & ((1 << UNIFORM_BITS) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of the splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014)."""


def _mix(value: int) -> int:
    """splitmix64's finaliser over the next step of its counter."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & MASK64
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    """The finaliser on int64 tensors; products wrap, shifts are made logical by a mask."""
    for shift, factor in _MIX:
        value = (value ^ _logical_shift(value, shift)) * _signed(factor)
    return value ^ _logical_shift(value, 31)


def _logical_shift(value: Tensor, shift: int) -> Tensor:
    return (value >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _with_logprobs(row: Tensor, token: int, count: int) -> Sampled:
    logprobs = row.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        values, ids = logprobs.topk(min(count, row.shape[0]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        top = tuple((i, v) for i, v in pairs if v > -math.inf)
    return Sampled(token, float(logprobs[token].item()), top)
