"""Which prompt chunks run in the next step: chunks of several prompts are packed into one pass.

Pages are had in order of arrival. The token budget is shared (`kvtransfer.fair_share`): a long
prompt gets half of it, and short ones behind it need not wait until it is done.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from pageferry.kvtransfer.fair_share import share_budget
from pageferry.kvtransfer.pool import PagePool
from pageferry.prefill_worker.job import Job


@dataclass(frozen=True)
class Work:
    """One job's share of a step: compute tokens [start, end)."""

    job: Job
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether this chunk ends the prompt: its last logits give the first token."""
        return self.end == self.job.num_tokens


class Scheduler:
    """Owns the jobs in the engine. A waiting job holds no pages, a running one all it needs."""

    def __init__(self, pool: PagePool, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.waiting: collections.deque[Job] = collections.deque()
        self.running: list[Job] = []
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Forget a job; its pages stay with it, whoever called releases them."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.running:
            self.running.remove(job)

    def schedule(self) -> list[Work]:
        """Admit what fits, then cut chunks within the token budget."""
        while self.waiting and len(self.running) < self._max_seqs:
            if not self._allocate(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        grants = share_budget([j.num_uncomputed_tokens for j in self.running], self._max_tokens)
        return [
            Work(job, job.num_computed_tokens, job.num_computed_tokens + tokens)
            for job, tokens in zip(self.running, grants, strict=True)
            if tokens
        ]

    def advance(self, work: Work) -> None:
        """Record that `work` was computed; a finished prompt leaves the engine."""
        work.job.num_computed_tokens += work.num_tokens
        if not work.job.num_uncomputed_tokens:
            self.running.remove(work.job)

    def _allocate(self, job: Job) -> bool:
        page_size = self.pool.page_size
        # The last token is always computed, so a full hit gives up its last page.
        cached = self.pool.match(job.hashes[: (job.num_tokens - 1) // page_size])
        needed = -(-job.num_tokens // page_size) - len(cached)
        if self.pool.ledger().available < needed:
            self.pool.release(cached)
            return False
        job.page_ids = cached + self.pool.allocate(needed)
        job.num_computed_tokens = job.num_cached_tokens = len(cached) * page_size
        return True
