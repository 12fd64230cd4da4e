"""The workers as last seen in the registry, and what follows from them. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pageferry.kvtransfer.device_health import DEVICE_HEALTH, SEVERITY
from pageferry.kvtransfer.wire import WorkerRecord

MAX_REMEMBERED = 1_000
"""Workers whose weights are remembered, live or gone; a request lives for minutes."""


def is_blocked(record: WorkerRecord) -> bool:
    """Whether its memory or its device is in such a state that it takes no new work."""
    return record.stats.get(DEVICE_HEALTH, 0) >= SEVERITY["stop"]


def is_pair(prefill: WorkerRecord, decode: WorkerRecord) -> bool:
    """Whether pages may go from one to the other: same weights, same layout."""
    return prefill.fingerprint == decode.fingerprint and prefill.layout == decode.layout


def capacity(record: WorkerRecord) -> int:
    """Tokens, prompt and output, of the longest sequence that it can hold."""
    return min(record.max_model_len, record.ledger.total * record.ledger.page_size)


class Fleet:
    """Live workers. `update` replaces the picture; everything else is derived from it."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self._weights: dict[str, str] = {}
        """Fingerprints by worker, those seen last at the end."""
        self._promised: dict[str, int] = {}
        """Pages of requests sent straight to a decode worker since its ledger was read."""

    def update(self, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Take in the registry; returns the workers that are no longer there."""
        live = {record.id: record for record in records}
        gone = [record for i, record in self.records.items() if i not in live]
        self.records = live
        self._promised.clear()
        for record in records:
            self._weights.pop(record.id, None)
            self._weights[record.id] = record.fingerprint
        while len(self._weights) > MAX_REMEMBERED:
            del self._weights[next(iter(self._weights))]
        return gone

    def ready(self, role: str) -> list[WorkerRecord]:
        return [r for r in self.records.values() if r.role == role and r.state == "ready"]

    @property
    def has_prefill(self) -> bool:
        """Some ready prefill worker fits some ready decode worker."""
        return bool(self._prefillers())

    def may_continue(self, worker: str, maker: str) -> bool:
        """Whether `worker` has the weights that made a sequence's tokens: those of `maker`.

        Both are ids, of workers live or gone. Without a maker there are no tokens, and anybody may.
        A maker that came and went between two looks at the registry is taken to have had the
        weights of all others if these agree, else nobody may. A worker that is not yet in the
        registry may not.
        """
        if not maker:
            return True
        weights = self._weights.get(maker)
        if weights is None:
            return len({r.fingerprint for r in self.records.values()}) == 1
        return self._weights.get(worker) == weights

    def can_prefill(self, num_tokens: int, maker: str = "") -> bool:
        """Whether so many can be left to the prefill queues, where any worker may take them.

        Each needs room itself, and a decode worker that fits it and may take the sequence.
        """
        prefillers, takers = self._prefillers(), list(self._takers(num_tokens, maker))
        return bool(prefillers) and all(
            p.max_model_len > num_tokens and any(is_pair(p, d) for d in takers) for p in prefillers
        )

    def _prefillers(self) -> list[WorkerRecord]:
        decoders = self.ready("decode")
        return [p for p in self.ready("prefill") if any(is_pair(p, d) for d in decoders)]

    def _takers(self, num_tokens: int, maker: str) -> Iterator[WorkerRecord]:
        """Ready decode workers that may and can hold the sequence, if not at this moment."""
        for record in self.ready("decode"):
            if capacity(record) > num_tokens and self.may_continue(record.id, maker):
                yield record

    def why_nobody(self, num_tokens: int, maker: str = "") -> str:
        """Why no decode worker will ever take such a sequence, in one sentence; empty if one will.

        Being short of memory is no reason: that passes.
        """
        if any(self._takers(num_tokens, maker)):
            return ""
        same = [r for r in self.ready("decode") if self.may_continue(r.id, maker)]
        if same:
            longest = max(map(capacity, same))
            return (
                f"The sequence has {num_tokens} tokens and at least 1 is to come; the decode "
                f"workers that are left take at most {longest} tokens."
            )
        return self.why_not_ready() or (
            "No decode worker is left with the weights that this answer was begun with; those that "
            "are ready have others."
        )

    @property
    def has_decode(self) -> bool:
        return bool(self.ready("decode"))

    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output, that the roomiest decode worker can hold; 0 without one."""
        return max(map(capacity, self._decoders()), default=0)

    def _decoders(self) -> Iterable[WorkerRecord]:
        return (r for r in self.records.values() if r.role == "decode")

    def pick_decode(self, num_tokens: int, maker: str = "") -> WorkerRecord | None:
        """The decode worker with the most room for a sequence of `num_tokens`, or None.

        Its tokens so far came from `maker`. What the worker gets is remembered until the next
        `update`, so that a burst between two looks at the registry is spread over the workers.
        """

        def room(record: WorkerRecord) -> int:
            taken = self._promised.get(record.id, 0)
            return (record.ledger.available - taken) * record.ledger.page_size

        candidates = [r for r in self._takers(num_tokens, maker) if not is_blocked(r)]
        if not candidates:
            return None
        best = max(candidates, key=room)
        pages = -(-(num_tokens + 1) // best.ledger.page_size)
        self._promised[best.id] = self._promised.get(best.id, 0) + pages
        return best

    def refusals(self) -> list[str]:
        """HELLO refusals of all live workers, each with the worker that refused."""
        return [f"{r.id}: {text}" for r in self.records.values() for text in r.refusals]

    def why_not_ready(self) -> str:
        """Empty when requests can be served, else the reason in one sentence."""
        ready = self.ready("decode")
        if any(not is_blocked(r) for r in ready):
            return ""
        if ready:
            ids = ", ".join(sorted(r.id for r in ready))
            return f"Every decode worker is short of memory and takes nothing new: {ids}."
        states = sorted(f"{r.id} is {r.state}" for r in self._decoders())
        if states:
            return f"No decode worker is ready: {', '.join(states)}."
        return "No decode worker is registered."
