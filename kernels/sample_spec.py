"""What sampling is asked for and what it answers, whichever backend does it.

A `SampleSpec` lives as long as its sequence. It watches `token_ids`, which only grows: what the
penalties need to know of it is counted once per token, when it is first asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

GUMBEL_SPAN = 27.0
"""Largest minus smallest noise: with 32-bit uniforms, 22.9 + 3.2, rounded up."""

NON_FINITE = "non_finite_logits"
BAD_BIAS = "logit_bias_out_of_range"


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


class TokenCounts:
    """The distinct tokens of a sequence in order of appearance, and their counts in its output."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.output_counts = array("i")
        self._place: dict[int, int] = {}
        self._num_counted = 0

    def catch_up(self, token_ids: Sequence[int], prompt_len: int) -> None:
        """Count what was appended to `token_ids` since the last call."""
        for index in range(self._num_counted, len(token_ids)):
            token = token_ids[index]
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.output_counts.append(0)
            self.output_counts[place] += index >= prompt_len
        self._num_counted = len(token_ids)


@dataclass(eq=False)
class SampleSpec:
    """How to choose the next token of one sequence."""

    params: Sampling
    token_ids: Sequence[int]
    """The whole sequence so far, prompt and output; append-only."""
    prompt_len: int
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    """Scratch of the backends: what they work out from `params` once per sequence."""
    _counts: TokenCounts = field(default_factory=TokenCounts, init=False, repr=False)

    @property
    def position(self) -> int:
        """Index of the sampled token in its sequence."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature <= 0 or self.params.top_k == 1

    @property
    def span(self) -> float:
        """A logit further than this below the best one cannot be chosen."""
        p = self.params
        span = GUMBEL_SPAN * p.temperature
        return min(span, -math.log(p.min_p) * p.temperature) if p.min_p > 0 else span

    @property
    def counts(self) -> TokenCounts:
        """Up to date; at most one token's work per call once the prompt is counted."""
        self._counts.catch_up(self.token_ids, self.prompt_len)
        return self._counts

    @property
    def has_output_penalties(self) -> bool:
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty) and self.num_output_tokens > 0

    @property
    def masked_ids(self) -> Sequence[int]:
        """Stop ids that may not be chosen yet."""
        return self.params.stop_token_ids if self.num_output_tokens < self.params.min_tokens else ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token, or why there is none."""

    token_id: int
    logprob: float | None = None
    """Natural log, after penalties and bias, before temperature; None when not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""
    error: str = ""
    """Set: `token_id` is -1 and this row alone has failed."""
