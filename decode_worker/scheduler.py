"""What runs in the next step: pure decisions over the page ledger.

A step is one token for every decoding sequence, plus chunks of local prefills within
`max_num_batched_tokens`. Invariants:

- A sequence that holds pages is in `running`, and everything in `running` can be scheduled or
  preempted; a waiting one holds nothing. So no two requests can block each other half-admitted.
- The oldest running sequence is never preempted, so every step brings some request nearer to its
  end.
- A step either emits or computes something, or there is nothing to run.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from pageferry.decode_worker.sequence import Sequence
from pageferry.kvtransfer.keys import CLASSES
from pageferry.kvtransfer.pool import OutOfPages, PagePool


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark_pages: int


@dataclass(frozen=True)
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

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state; full pages stay findable as cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._give_back(sequence)

    # -- a step

    def schedule(self) -> StepPlan:
        """Choose the work of the next step, growing block tables and preempting where needed."""
        plan = StepPlan()
        budget = self._schedule_decodes(plan, self.limits.max_num_batched_tokens)
        budget = self._schedule_prefills(plan, budget)
        self._admit_waiting(plan, budget)
        return plan

    def advance(self, work: Work) -> None:
        """Record that `work` was computed."""
        work.sequence.num_computed_tokens += work.num_tokens

    def _schedule_decodes(self, plan: StepPlan, budget: int) -> int:
        for sequence in [s for s in self.running if s.is_decoding]:
            if len(plan.work) == self.limits.max_num_seqs or not budget:
                break
            if sequence in self.running and self._grow(sequence, plan):
                plan.work.append(_next_work(sequence, 1))
                budget -= 1
        # A sequence chosen above may have been preempted for a later, older-ranked one.
        plan.work[:] = [w for w in plan.work if w.sequence in self.running]
        return budget

    def _schedule_prefills(self, plan: StepPlan, budget: int) -> int:
        for sequence in self.running:
            if not budget or len(plan.work) == self.limits.max_num_seqs:
                break
            if not sequence.is_decoding:
                plan.work.append(_next_work(sequence, budget))
                budget -= plan.work[-1].num_tokens
        return budget

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if not self._allocate_prompt(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            plan.work.append(_next_work(sequence, budget))
            budget -= plan.work[-1].num_tokens

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
        sequence.page_ids = cached + fresh
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(cached) * page_size
        return True

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make room for one more token; False when `sequence` has to sit this step out.

        Either it was preempted itself, or it runs alone and the missing pages are reserved for
        handoffs in flight; those end within their deadline and can then be preempted.
        """
        while len(sequence.page_ids) * self.pool.page_size <= sequence.num_computed_tokens:
            try:
                sequence.page_ids += self.pool.allocate(1)
            except OutOfPages:
                victim = self._victim()
                if victim is None:
                    return False
                self.running.remove(victim)
                self._give_back(victim)
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

    def _give_back(self, sequence: Sequence) -> None:
        pages, sequence.page_ids = sequence.page_ids, []
        if not pages:
            return
        full = sequence.num_computed_tokens // self.pool.page_size
        if full:
            hashes = self.pool.hash_prefix(
                sequence.token_ids[: full * self.pool.page_size], sequence.request.salt
            )
            self.pool.register(pages[:full], hashes)
        self.pool.release(pages)

    def _number(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals


def _next_work(sequence: Sequence, budget: int) -> Work:
    num_tokens = min(budget, sequence.num_uncomputed_tokens)
    return Work(sequence, sequence.num_computed_tokens, num_tokens)
