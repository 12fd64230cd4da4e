"""The workers as last seen in the registry, and what follows from them. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pageferry.kvtransfer.device_health import DEVICE_HEALTH, SEVERITY
from pageferry.kvtransfer.wire import WorkerRecord


def is_blocked(record: WorkerRecord) -> bool:
    """Whether its memory or its device is in such a state that it takes no new work."""
    return record.stats.get(DEVICE_HEALTH, 0) >= SEVERITY["stop"]


class Fleet:
    """Live workers. `update` replaces the picture; everything else is derived from it."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self._promised: dict[str, int] = {}
        """Pages of requests sent straight to a decode worker since its ledger was read."""

    def update(self, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Take in the registry; returns the workers that are no longer there."""
        live = {record.id: record for record in records}
        gone = [record for i, record in self.records.items() if i not in live]
        self.records = live
        self._promised.clear()
        return gone

    def ready(self, role: str) -> list[WorkerRecord]:
        return [r for r in self.records.values() if r.role == role and r.state == "ready"]

    @property
    def has_prefill(self) -> bool:
        """Some ready prefill worker fits some ready decode worker: same weights, same layout."""
        return bool(self._prefillers())

    def can_prefill(self, num_tokens: int) -> bool:
        """Whether so many can be left to the prefill queues, where any worker may take them."""
        prefillers = self._prefillers()
        return bool(prefillers) and all(r.max_model_len > num_tokens for r in prefillers)

    def _prefillers(self) -> list[WorkerRecord]:
        decoders = self.ready("decode")
        return [
            p
            for p in self.ready("prefill")
            if any(p.fingerprint == d.fingerprint and p.layout == d.layout for d in decoders)
        ]

    @property
    def has_decode(self) -> bool:
        return any(r.role == "decode" and r.state == "ready" for r in self.records.values())

    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output, that the roomiest decode worker can hold; 0 without one."""
        return max(
            (min(r.max_model_len, r.ledger.total * r.ledger.page_size) for r in self._decoders()),
            default=0,
        )

    def _decoders(self) -> Iterable[WorkerRecord]:
        return (r for r in self.records.values() if r.role == "decode")

    def pick_decode(self, num_tokens: int) -> WorkerRecord | None:
        """The ready decode worker with the most room for a sequence of `num_tokens`, or None.

        What it gets is remembered until the next `update`, so that a burst between two looks at
        the registry is spread over the workers.
        """

        def room(record: WorkerRecord) -> int:
            taken = self._promised.get(record.id, 0)
            return (record.ledger.available - taken) * record.ledger.page_size

        candidates = [
            r for r in self.ready("decode") if r.max_model_len > num_tokens and not is_blocked(r)
        ]
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
        if self.has_decode:
            return ""
        states = sorted(f"{r.id} is {r.state}" for r in self._decoders())
        if states:
            return f"No decode worker is ready: {', '.join(states)}."
        return "No decode worker is registered."
