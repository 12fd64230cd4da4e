"""What transfers cost, counted apart for each transport.

A `Tally` belongs to one thread at a time. Sums of tallies become `WorkerRecord.stats` in `figures`;
ratios are taken of the sums, so that a short handoff does not weigh as much as a long one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageferry.kvtransfer import metric_names as names


@dataclass
class Tally:
    """Counts of one transport on one side. Times are wall-clock seconds."""

    bytes: int = 0
    pages: int = 0
    seconds: float = 0.0
    """Writer: sending pages until SEAL, and from SEAL to COMMIT. Receiver: taking pages in."""
    exposed_seconds: float = 0.0
    """Writer: from SEAL to COMMIT."""
    sealed: int = 0
    """Writer: handoffs in `exposed_seconds`."""
    digest_seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.bytes += other.bytes
        self.pages += other.pages
        self.seconds += other.seconds
        self.exposed_seconds += other.exposed_seconds
        self.sealed += other.sealed
        self.digest_seconds += other.digest_seconds


def figures(tallies: dict[str, Tally]) -> dict[str, float]:
    """Metrics by name of the tallies by transport. What only a writer knows, the exposed time, is
    there after its first handoff."""
    found: dict[str, float] = {}
    for transport, tally in tallies.items():
        values = {
            names.TRANSFER_BYTES: tally.bytes,
            names.TRANSFER_SECONDS: tally.seconds,
            names.TRANSFER_DIGEST_SECONDS: tally.digest_seconds,
            names.GB_PER_S: tally.bytes / tally.seconds / 1e9 if tally.seconds else 0.0,
        }
        if tally.sealed:
            values[names.TRANSFER_SEALED] = tally.sealed
            values[names.TRANSFER_EXPOSED_SECONDS] = tally.exposed_seconds
            hidden = 1.0 - tally.exposed_seconds / tally.seconds
            values[names.OVERLAP_RATIO] = min(1.0, max(0.0, hidden))
        for name, value in values.items():
            found[names.of_transport(name, transport)] = float(value)
    return found
