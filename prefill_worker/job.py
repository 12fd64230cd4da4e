"""One claimed request on a prefill worker. State lives here; everything else is derived."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageferry.kvtransfer.handoff_client import Handoff
from pageferry.kvtransfer.wire import Event, Request


@dataclass(eq=False)
class Job:
    """A request between its claim and its ack.

    1. claimed: the queue entry is ours, the gateway knows.
    2. booked: a decode worker granted pages (`handoff`).
    3. computing: the engine holds pages for it and pushes them layer by layer.
    4. sealing: the first token is out, the decode worker checks and commits.
    5. acked: the entry is deleted, the pages are only cache.
    """

    request: Request
    queue: str
    entry_id: bytes
    hashes: list[bytes]
    """Prefix hashes of the request's full pages."""
    handoff: Handoff | None = None
    decode_worker: str = ""
    page_ids: list[int] = field(default_factory=list)
    """This worker's pages in order, one reference each; set by the engine."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that the prefix cache spared."""
    num_pushed_pages: int = 0
    """Leading pages that are pushed for every layer, or that the decode worker already holds."""
    first_token: Event | None = None
    is_started: bool = False
    is_ending: bool = False
    """Cancelled or cleaning up; set by the worker."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens
