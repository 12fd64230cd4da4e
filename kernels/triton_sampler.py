"""`sample` for logits on a GPU: one look at the results per step, however many rows there are.

1. What the rows ask for is written into a few flat host arrays, each copied to the device once.
2. Penalties, bias and masks of all rows are applied with a handful of launches.
3. `triton_sampling` finds the best tokens and draws.
4. Tokens, logprobs and errors come back in one array: the only point that waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.kernels.sample_spec import BAD_BIAS, NON_FINITE, Sampled, SampleSpec
from pageferry.kernels.triton_sampling import DrawParams, RowMaxima, draw, row_maxima

_MASK64 = (1 << 64) - 1


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One token per row of `logits` float32 [N, V], which is overwritten; see `sampling.sample`."""
    size = logits.shape[1]
    errors = {i: BAD_BIAS for i, spec in enumerate(specs) if not _bias_fits(spec, size)}
    _repeat(logits, specs)
    _add(logits, specs, errors)
    _mask(logits, specs)
    maxima = row_maxima(logits)
    tokens = maxima.token
    if not all(spec.is_greedy for spec in specs):
        params, greedy = draw_params(specs, logits.device)
        tokens = torch.where(greedy, tokens, draw(logits, maxima, params))
    return _fetch(logits, specs, maxima, tokens, errors)


def draw_params(specs: Sequence[SampleSpec], device: torch.device) -> tuple[DrawParams, Tensor]:
    """Parameters of the rows, and which of them are greedy: bool [N]; those draw in vain."""
    rows = [(1.0, 0.0, 1.0) if s.is_greedy else _reals(s) for s in specs]
    reals = torch.tensor(rows, dtype=torch.float64).to(device).T.contiguous()
    whole = [(_key(s), 0 if s.is_greedy else s.params.top_k, s.is_greedy) for s in specs]
    numbers = torch.tensor(whole, dtype=torch.int64).to(device).T.contiguous()
    cut = any(not s.is_greedy and (s.params.top_k > 0 or s.params.top_p < 1) for s in specs)
    params = DrawParams(
        temperatures=reals[0],
        spans=reals[1],
        keys=numbers[0],
        top_ks=numbers[1],
        top_ps=reals[2],
        cut=cut,
    )
    return params, numbers[2].bool()


def _reals(spec: SampleSpec) -> tuple[float, float, float]:
    return spec.params.temperature, spec.span, spec.params.top_p


def _key(spec: SampleSpec) -> int:
    """The row's part of the noise's hash, as a signed 64-bit number."""
    key = _mixed((spec.params.seed + _mixed((spec.position + 1) & _MASK64)) & _MASK64)
    return key - (1 << 64) if key >> 63 else key


def _mixed(value: int) -> int:
    """The finaliser of splitmix64 over the next step of its counter, as in `sampling`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _bias_fits(spec: SampleSpec, size: int) -> bool:
    return all(0 <= token < size for token in spec.params.logit_bias)


@dataclass
class _Entries:
    """(row, token, number) triples of several rows, as flat arrays."""

    places: list[NDArray[np.int64]]
    numbers: list[NDArray[np.float32]]

    def add(
        self, row: int, size: int, ids: NDArray[np.int64], numbers: NDArray[np.float32]
    ) -> None:
        self.places.append(ids + row * size)
        self.numbers.append(numbers)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Flat indices int64 and numbers float32, or None if there are none."""
        if not self.places:
            return None
        places, numbers = np.concatenate(self.places), np.concatenate(self.numbers)
        return torch.from_numpy(places).to(device), torch.from_numpy(numbers).to(device)


def _repeat(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Repetition penalty (CTRL, arXiv:1909.05858) over each row's prompt and output."""
    size, entries = logits.shape[1], _Entries([], [])
    for row, spec in enumerate(specs):
        if spec.params.repetition_penalty != 1.0:
            ids = np.array(spec.counts.ids, dtype=np.int64)
            numbers = np.full(len(ids), spec.params.repetition_penalty, dtype=np.float32)
            entries.add(row, size, ids, numbers)
    if found := entries.on(logits.device):
        places, penalty = found
        flat = _flat(logits)
        score = flat[places]
        flat[places] = torch.where(score > 0, score / penalty, score * penalty)


def _add(logits: Tensor, specs: Sequence[SampleSpec], errors: dict[int, str]) -> None:
    """Presence and frequency penalties, then bias."""
    size, penalties, biases = logits.shape[1], _Entries([], []), _Entries([], [])
    for row, spec in enumerate(specs):
        p = spec.params
        if spec.has_output_penalties:
            counts = np.array(spec.counts.output_counts, dtype=np.float32)
            ids = np.array(spec.counts.ids, dtype=np.int64)[counts > 0]
            counts = counts[counts > 0]
            penalties.add(row, size, ids, -(p.presence_penalty + p.frequency_penalty * counts))
        if p.logit_bias and row not in errors:
            values = np.array(list(p.logit_bias.values()), dtype=np.float32)
            biases.add(row, size, np.array(list(p.logit_bias), dtype=np.int64), values)
    for entries in (penalties, biases):
        if found := entries.on(logits.device):
            places, numbers = found
            flat = _flat(logits)
            flat[places] = flat[places] + numbers  # each place occurs once


def _mask(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Stop ids of rows below their least length cannot be chosen."""
    size = logits.shape[1]
    places = [
        row * size + token
        for row, spec in enumerate(specs)
        for token in spec.masked_ids
        if 0 <= token < size
    ]
    if places:
        _flat(logits)[torch.tensor(places).to(logits.device)] = -math.inf


def _flat(logits: Tensor) -> Tensor:
    return logits.view(-1)


def _fetch(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    maxima: RowMaxima,
    tokens: Tensor,
    errors: dict[int, str],
) -> list[Sampled]:
    """Everything in one float64 array (token ids are exact in it), copied once."""
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    columns = [tokens.double(), maxima.best.double(), (chosen - maxima.logsumexp).double()]
    table = torch.stack(columns, dim=1)
    asked = max(0, min(max(s.params.logprobs for s in specs), logits.shape[1]))
    if asked:
        # Stable: among equals the lower id comes first, which topk leaves open.
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        values = values[:, :asked] - maxima.logsumexp[:, None]
        table = torch.cat((table, ids[:, :asked].double(), values.double()), dim=1)
    results = []
    for i, (spec, row) in enumerate(zip(specs, table.tolist(), strict=True)):
        token, best, logprob = int(row[0]), row[1], row[2]
        if i in errors or not math.isfinite(best):
            results.append(Sampled(-1, error=errors.get(i, NON_FINITE)))
        elif spec.params.logprobs < 0:
            results.append(Sampled(token))
        else:
            count = min(spec.params.logprobs, asked)
            pairs = zip(row[3 : 3 + count], row[3 + asked : 3 + asked + count], strict=True)
            top = tuple((int(t), value) for t, value in pairs if value > -math.inf)
            results.append(Sampled(token, logprob, top))
    return results
