"""One sequence on a decode worker. State lives here; everything else is derived."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from pageferry.kernels.sample_spec import SampleSpec
from pageferry.kvtransfer.wire import Request


def _no_ids() -> array[int]:
    return array("i")


@dataclass(eq=False)
class Sequence:
    """A request with its pages.

    Life: (sealed handoff | local request) -> waiting -> running -> finished, preempted or dropped.
    A sealed sequence arrives with all prompt pages filled and its first token sampled.

    Ids are int32 buffers that grow in place: a step hands them to numpy without walking them.
    """

    request: Request
    token_ids: array[int]
    """Prompt and output so far; only the engine appends."""
    page_ids: array[int] = field(default_factory=_no_ids)
    """Pages in order, one reference each. Block tables are append-only."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the pages."""
    num_cached_tokens: int = 0
    """Of those, how many came from the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)
    """Prefix hashes to look for when admitted; set once, while it waits nothing changes them."""
    arrival: int = 0
    """Order of arrival on this worker, set by the scheduler."""
    ends_at: float = field(init=False)
    """When the request's time to live is over, by the monotonic clock."""
    sample_spec: SampleSpec = field(init=False)
    """How to choose its tokens; lives as long as the sequence and counts its tokens."""

    def __post_init__(self) -> None:
        request = self.request
        self.ends_at = time.monotonic() + request.ttl_ms / 1000
        self.sample_spec = SampleSpec(request.sampling, self.token_ids, request.prompt_len)

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """Nothing computed yet."""
        return cls(request, array("i", request.token_ids))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.prompt_len

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 for a decoding sequence, more while its prompt is being prefilled here."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0
