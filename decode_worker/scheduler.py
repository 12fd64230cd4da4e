"""What runs in the next step: pure decisions over the page ledger.

A step is one token for every decoding sequence, plus chunks of local prefills within
`max_num_batched_tokens`. Invariants:

- A sequence that holds pages is in `running`, and everything in `running` can be scheduled or
  preempted; a waiting one holds nothing. So no two requests can block each other half-admitted.
- The oldest running sequence is never preempted, so every step brings some request nearer to its
  end.
- Running sequences go first. Prompts share what is left of the budget (`kvtransfer.fair_share`); a
  waiting one is admitted when it would get a share, so a short one may pass a long one, but none
  passes one that lacks pages.
- A step either emits or computes something, or there is nothing to run.
"""

from __future__ import annotations

import collections
import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from pageferry.decode_worker.sequence import Sequence
from pageferry.kvtransfer.fair_share import share_budget
from pageferry.kvtransfer.keys import CLASSES
from pageferry.kvtransfer.pool import OutOfPages, PagePool

LOOK_AHEAD = 32
"""How many waiting prompts are looked at for one that gets a share of the next step."""


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark_pages: int


@dataclass(slots=True)
class Work:
    """One sequence's share of a step: compute tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's last one: its logits are wanted."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True)
class StepPlan:
    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    """Already without pages; they go back to their gateways."""


class Scheduler:
    """Owns the sequences and their pages on this worker. Not thread-safe: the engine's thread."""

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._arrivals = 0

    # -- intake

    def add_local(self, sequence: Sequence) -> None:
        """A request to prefill here; it waits until its prompt's pages can be had."""
        self._number(sequence)
        page_size = self.pool.page_size
        # The last token is always computed, so a full hit gives up its last page.
        usable = (len(sequence.token_ids) - 1) // page_size * page_size
        sequence.hashes = self.pool.hash_prefix(sequence.token_ids[:usable], sequence.request.salt)
        self.waiting.append(sequence)

    def add_sealed(self, sequence: Sequence) -> None:
        """A handed-over sequence: its pages are filled and its next token is known."""
        self._number(sequence)
        self.running.append(sequence)

    def let_go(self, limit: int) -> list[Sequence]:
        """Take out up to `limit` decoding sequences, oldest first, with their pages."""
        leaving = [s for s in self.running if s.is_decoding][:limit]
        self.running = [s for s in self.running if s not in leaving]
        return leaving

    def rejoin(self, sequence: Sequence) -> None:
        """Take back what was let go of; its age counts as before."""
        self.running.insert(0, sequence)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state; full pages stay findable as cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        release_pages(self.pool, sequence)

    # -- a step

    def schedule(self) -> StepPlan:
        """Choose the work of the next step, growing block tables and preempting where needed."""
        plan = StepPlan()
        budget = self._schedule_decodes(plan, self.limits.max_num_batched_tokens)
        if budget and len(plan.work) < self.limits.max_num_seqs:
            self._schedule_prefills(plan, budget)
        return plan

    def advance(self, work: Work) -> None:
        """Record that `work` was computed."""
        work.sequence.num_computed_tokens += work.num_tokens

    def _schedule_decodes(self, plan: StepPlan, budget: int) -> int:
        most = min(budget, self.limits.max_num_seqs)
        for sequence in [s for s in self.running if s.is_decoding]:
            if len(plan.work) == most:
                break
            # One without pages was preempted for a sequence before it.
            if sequence.page_ids and self._grow(sequence, plan):
                plan.work.append(Work(sequence, sequence.num_computed_tokens, 1))
        if plan.preempted:
            # So may have been one that was already chosen.
            plan.work[:] = [w for w in plan.work if w.sequence.page_ids]
        return budget - len(plan.work)

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> None:
        prompts = [s for s in self.running if not s.is_decoding]
        if self.waiting:
            self._admit_waiting(prompts, budget)
        for sequence, num_tokens in _shares(prompts, budget):
            if num_tokens and len(plan.work) < self.limits.max_num_seqs:
                plan.work.append(Work(sequence, sequence.num_computed_tokens, num_tokens))

    def _admit_waiting(self, prompts: list[Sequence], budget: int) -> None:
        """Move waiting prompts that get a share of `budget` to `running` and to `prompts`."""
        for sequence in list(itertools.islice(self.waiting, LOOK_AHEAD)):
            if len(self.running) >= self.limits.max_num_seqs:
                break
            shares = dict(_shares([*prompts, sequence], budget))
            if not shares[sequence]:
                continue
            if not self._allocate_prompt(sequence):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            prompts.append(sequence)

    # -- pages

    def _allocate_prompt(self, sequence: Sequence) -> bool:
        """Pages for all tokens so far and the next one, or nothing."""
        page_size = self.pool.page_size
        cached = self.pool.match(sequence.hashes)
        needed = -(-(len(sequence.token_ids) + 1) // page_size) - len(cached)
        reserve = self.limits.watermark_pages if self.running else 0
        if self.pool.ledger().available < needed + reserve:
            self.pool.release(cached)
            return False
        try:
            fresh = self.pool.allocate(needed)
        except OutOfPages:  # a handoff reserved them since we looked
            self.pool.release(cached)
            return False
        sequence.page_ids = array("i", cached + fresh)
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(cached) * page_size
        return True

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make room for one more token; False when `sequence` has to sit this step out.

        Either it was preempted itself, or it runs alone and the missing pages are reserved for
        handoffs in flight; those end within their deadline and can then be preempted.
        """
        while len(sequence.page_ids) * self.pool.page_size <= sequence.num_computed_tokens:
            try:
                sequence.page_ids.extend(self.pool.allocate(1))
            except OutOfPages:
                victim = self._victim()
                if victim is None:
                    return False
                self.running.remove(victim)
                release_pages(self.pool, victim)
                self.num_preemptions += 1
                plan.preempted.append(victim)
                if victim is sequence:
                    return False
        return True

    def _victim(self) -> Sequence | None:
        """The youngest of the lowest class, never the oldest of all."""
        if len(self.running) < 2:
            return None
        oldest = min(self.running, key=lambda s: s.arrival)
        rank = {name: i for i, name in enumerate(CLASSES)}
        candidates = [s for s in self.running if s is not oldest]
        return max(candidates, key=lambda s: (rank[s.request.queue_class], s.arrival))

    def _number(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals


def release_pages(pool: PagePool, sequence: Sequence) -> None:
    """Let go of a sequence's pages; full ones stay findable as cache."""
    pages, sequence.page_ids = sequence.page_ids, array("i")
    if not pages:
        return
    full = sequence.num_computed_tokens // pool.page_size
    if full:
        tokens = sequence.token_ids[: full * pool.page_size]
        pool.register(pages[:full], pool.hash_prefix(tokens, sequence.request.salt))
    pool.release(pages)


def _shares(prompts: Iterable[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """The prompts by age, each with the tokens of it that the next step computes."""
    by_age = sorted(prompts, key=lambda s: s.arrival)
    grants = share_budget([s.num_uncomputed_tokens for s in by_age], budget)
    return list(zip(by_age, grants, strict=True))
