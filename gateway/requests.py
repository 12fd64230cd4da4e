"""One sequence as its gateway sees it: the single owner of its tokens, from arrival to end.

A client's call has one `Generation` per choice. States of a generation, and who moves it:

1. *parked*: no worker has it. New, or being resubmitted (`Dispatcher`).
2. *queued*: an entry in a prefill queue or in `decode:<worker>` (`Dispatcher`, when Redis took it).
3. *owned*: a worker answers for it (`apply`, on OWNED or TOKENS).
4. *done*: `outcome` is set, once, by `close`: stop, length, abort or error.

Whatever takes it from 2 or 3 back to 1 raises `epoch`; events of earlier epochs are stale from then
on. `tokens` only grows, and only by the next index: a token can be neither lost nor doubled.
"""

from __future__ import annotations

import asyncio
import enum
from array import array
from dataclasses import dataclass, field

from pageferry.gateway.errors import ApiError
from pageferry.kvtransfer.wire import (
    Event,
    Kind,
    Request,
    SamplingParams,
    TokenLogprob,
    ttl_left_ms,
)

PROGRESS_TOKENS = 2
"""New tokens after which a request is not to blame for earlier deaths: with the first one a prefill
worker has survived it, with the second one a decode worker."""
SUSPECT_DEATHS = 2
"""Deaths in a row after which a request is tried alone."""


class Verdict(enum.Enum):
    """What an event meant for its generation."""

    STALE = enum.auto()
    """Older epoch, duplicate, or after the end: nothing changed."""
    OWNED = enum.auto()
    TOKENS = enum.auto()
    FINISHED = enum.auto()
    GAP = enum.auto()
    """Tokens are missing before this event: it cannot be used."""
    REQUEUE = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True)
class Entry:
    """Where a queued request lies."""

    queue: str
    id: bytes
    worker: str = ""
    """The worker that reads this queue alone; empty for the shared prefill queues."""


@dataclass(slots=True)
class Generation:
    id: str
    prompt: array[int]
    """32-bit token ids: a quarter of a list's memory, and packed at the speed of memory."""
    sampling: SamplingParams
    gateway: str
    queue_class: str
    arrived: float
    """All times are seconds of the event loop's clock."""
    deadline: float
    wake: asyncio.Event
    """Set whenever there is something new; shared by all generations of a call."""
    salt: str = ""
    """Name of the API key: partition of the prefix caches. Empty where no keys are asked for."""
    client_id: str = ""
    """The X-Request-Id of the call, for the log."""

    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per token when logprobs are wanted, else empty."""
    cached_tokens: int = 0
    entry: Entry | None = None
    owner: str = ""
    assigned: float = 0.0
    """When the present owner or entry was noted."""
    parked: bool = True
    doubted_since: float | None = None
    """Since when messages of it may be lost that nobody will repeat."""
    hopeless_since: float | None = None
    """Since when nobody who is here could ever take it, or take it over from its holder."""
    maker: str = ""
    """The worker that the last of `tokens` came from: only its weights may go on with them."""
    workers: list[str] = field(default_factory=list)
    """Every owner so far, in order."""
    deaths: int = 0
    """Workers in a row that died or failed with it before `PROGRESS_TOKENS` had come."""
    failed_handoffs: int = 0
    """In a row, likewise."""
    resubmissions: int = 0
    fruitless: int = 0
    """Resubmissions in a row without a new token, as far as they count (see `next_epoch`); sets
    the pause before the next."""
    send_at: float = 0.0
    """While parked after a resubmission: when it may go out again."""
    tokens_at_submission: int = 0
    finish: str | None = None
    """What the worker said: "stop" or "length"."""
    stop_token_id: int | None = None
    error: ApiError | None = None
    outcome: str = ""
    claimed: float | None = None
    handed_over: float | None = None
    """When a second worker took it over first: after a prefill, the COMMIT of its handoff."""
    first_token: float | None = None
    last_token: float | None = None
    delivered: int = 0
    """Tokens that count as output: those up to a stop string, not what was sampled beyond it."""

    @property
    def done(self) -> bool:
        return bool(self.outcome)

    @property
    def active(self) -> bool:
        """A worker still has something to do for it."""
        return not self.outcome and not self.finish

    @property
    def waiting(self) -> bool:
        return not self.done and not self.tokens

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of what came so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def holder(self) -> str:
        """The worker that will answer for this generation, if one is known."""
        return self.owner or (self.entry.worker if self.entry else "")

    @property
    def has_progressed(self) -> bool:
        """Whether its workers survived it since it was last sent out."""
        return len(self.tokens) - self.tokens_at_submission >= PROGRESS_TOKENS

    @property
    def is_suspect(self) -> bool:
        """May be what kills workers; until that is known it runs alone (see `Dispatcher`)."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def spent(self) -> str | None:
        """How the sequence has ended by its tokens alone, even if nobody said so."""
        enough = self.tokens and len(self.tokens) >= self.sampling.min_tokens
        if enough and self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_tokens else None

    def request(self, now: float) -> Request:
        """What a worker gets: prompt and tokens so far under the present epoch."""
        return Request(
            request_id=self.id,
            epoch=self.epoch,
            gateway=self.gateway,
            token_ids=self.prompt + array("i", self.tokens),
            prompt_len=len(self.prompt),
            sampling=self.sampling,
            queue_class=self.queue_class,
            salt=self.salt,
            ttl_ms=ttl_left_ms(self.deadline, now),
        )

    def blame(self, *, for_handoff: bool) -> int:
        """Count a death, or a failed handoff; returns how many there were in a row."""
        if for_handoff:
            self.failed_handoffs += 1
            return self.failed_handoffs
        self.deaths += 1
        return self.deaths

    def next_epoch(self, *, was_tried: bool = True) -> None:
        """Leave whoever has it: nothing that they say counts from now on.

        Unless it `was_tried`, that no token came tells nothing.
        """
        self.epoch += 1
        self.resubmissions += 1
        self.entry = None
        self.owner = ""
        self.parked = True
        self.doubted_since = None
        if self.has_progressed:
            self.deaths = self.failed_handoffs = 0
        if len(self.tokens) > self.tokens_at_submission:
            self.fruitless = 0
        elif was_tried:
            self.fruitless += 1
        self.tokens_at_submission = len(self.tokens)

    def close(self, outcome: str, error: ApiError | None = None) -> None:
        """End it; the first ending stands."""
        if not self.outcome:
            self.outcome = outcome
            self.error = error
            self.parked = False
            self.wake.set()

    def apply(self, event: Event, now: float) -> Verdict:
        """Take in one event. Pure bookkeeping: what follows from it is the caller's business."""
        if not self.active or event.epoch != self.epoch:
            return Verdict.STALE
        if event.kind is Kind.TOKENS:
            return self._apply_tokens(event, now)
        if event.kind is Kind.OWNED:
            self._own(event.worker, now)
            return Verdict.OWNED
        return Verdict.REQUEUE if event.kind is Kind.REQUEUE else Verdict.ERROR

    def _own(self, worker: str, now: float) -> None:
        if self.claimed is None:
            self.claimed = now
        if self.owner != worker:
            if self.owner and self.handed_over is None:
                self.handed_over = now
            self.owner = worker
            self.assigned = now
            self.workers.append(worker)
        if self.doubted_since is not None:
            self.doubted_since = now

    def _apply_tokens(self, event: Event, now: float) -> Verdict:
        have = len(self.tokens)
        if event.index > have:
            return Verdict.GAP
        known = have - event.index
        if known > len(event.token_ids) or (known == len(event.token_ids) and not event.finish):
            return Verdict.STALE
        # Who sends new tokens answers for the request, also before it is known that it took over.
        self._own(event.worker, now)
        self.doubted_since = None
        self.maker = event.worker
        self.tokens.extend(event.token_ids[known:])
        if self.sampling.logprobs >= 0:
            self.logprobs.extend(event.logprobs[known:])
        if not have:
            self.cached_tokens = event.num_cached_tokens
        if event.finish:
            self.finish = event.finish
            self.stop_token_id = event.stop_token_id
        self.wake.set()
        return Verdict.FINISHED if event.finish else Verdict.TOKENS
