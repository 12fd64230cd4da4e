"""The figures of a chaos run: one table by kind of fault, one JSON record."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from client import Answer
from oracle import Fault

OUTCOMES = ("right", "429", "503", "500", "error event", "cut", "broken", "hung", "wrong")
AFTER_S = 0.5
"""A pause that begins so long after a fault's end is still put down to it."""


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def _figures(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(quantile(values, 0.5), 2),
        "p99": round(quantile(values, 0.99), 2),
        "max": round(max(values, default=0.0), 2),
    }


def worst_pause(answer: Answer, since: float, until: float) -> float:
    """The longest pause of a stream that overlaps the interval; 0 without one."""
    pauses = [(a, b) for a, b in answer.gaps if b > since and a < until]
    return max((b - a for a, b in pauses), default=0.0)


def by_kind(
    faults: Sequence[Fault], judged: Sequence[tuple[Answer, str]]
) -> dict[str, dict[str, Any]]:
    """Per kind: how often, what became of the requests that were open, how long streams paused."""
    table = {}
    for kind in sorted({fault.kind for fault in faults}):
        outcomes: collections.Counter[str] = collections.Counter()
        pauses = []
        same = [fault for fault in faults if fault.kind == kind]
        for fault in same:
            for answer, outcome in judged:
                if answer.started < fault.until + 0.01 and answer.ended > fault.at:
                    outcomes[outcome] += 1
                    if answer.stream and answer.first_event is not None:
                        pauses.append(worst_pause(answer, fault.at, fault.until + AFTER_S))
        table[kind] = {"count": len(same), "open": dict(outcomes), "pause_s": _figures(pauses)}
    return table


def _refusal(answer: Answer) -> str:
    code = (answer.error or {}).get("code")
    return f"event {code}" if answer.stream and answer.status == 200 else f"{answer.status} {code}"


def line_of(answer: Answer, outcome: str, begun: float) -> dict[str, Any]:
    """One request for `requests.jsonl`; times in seconds since `begun`."""
    return {
        "start": round(answer.started - begun, 2),
        "end": round(answer.ended - begun, 2),
        "first": round(answer.first_event - begun, 2) if answer.first_event else None,
        "case": answer.case.name,
        "stream": answer.stream,
        "gateway": answer.gateway,
        "outcome": outcome,
        "error": _refusal(answer) if answer.error else answer.broken,
        "gaps": [[round(a - begun, 2), round(b - begun, 2)] for a, b in answer.gaps if b - a > 1],
    }


def fault_of(fault: Fault, begun: float) -> dict[str, Any]:
    """One fault for the record; times in seconds since `begun`."""
    times = {"at": round(fault.at - begun, 2), "until": round(fault.until - begun, 2)}
    return {"kind": fault.kind, "target": fault.target, **times, "note": fault.note}


def totals(judged: Sequence[tuple[Answer, str]]) -> dict[str, Any]:
    """Outcomes of all requests; the longest pause of each stream, and of the first event alone."""
    streams = [a for a, outcome in judged if a.stream and outcome == "right"]
    after_first = [
        worst_pause(a, (a.first_event or 0.0) + 1e-6, a.ended) for a in streams if a.first_event
    ]
    first = [a.first_event - a.started for a in streams if a.first_event]
    return {
        "requests": len(judged),
        "outcomes": dict(collections.Counter(outcome for _, outcome in judged)),
        "refusals": dict(collections.Counter(_refusal(a) for a, _ in judged if a.error)),
        "pause_s": _figures(after_first),
        "first_event_s": _figures(first),
    }


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g} s" for name, value in figures.items())


def show(record: dict[str, Any]) -> str:
    """The record as text for a terminal."""
    used = [o for o in OUTCOMES if any(o in row["open"] for row in record["by_kind"].values())]
    head = f"{'fault':18}{'count':>6}" + "".join(f"{o:>12}" for o in used)
    lines = [head + f"{'pause p50':>12}{'p99':>8}{'max':>8}"]
    for kind, row in record["by_kind"].items():
        pause = row["pause_s"]
        lines.append(
            f"{kind:18}{row['count']:6}"
            + "".join(f"{row['open'].get(o, 0):12}" for o in used)
            + f"{pause['p50']:12.2f}{pause['p99']:8.2f}{pause['max']:8.2f}"
        )
    whole = record["totals"]
    lines.append(
        f"{record['num_faults']} faults in {record['seconds']:.0f} s, "
        f"{whole['requests']} requests: "
        + ", ".join(f"{count} {outcome}" for outcome, count in whole["outcomes"].items())
    )
    lines.append(
        "refusals: " + ", ".join(f"{n} {what}" for what, n in sorted(whole["refusals"].items()))
    )
    lines.append(
        f"longest pause of a stream: {_shown(whole['pause_s'])}; "
        f"first event: {_shown(whole['first_event_s'])}"
    )
    memory = record["memory"]
    for name, now in memory["after"].items():
        before = memory["before"].get(name, now)
        peak = max((s[name][1] for s in memory["samples"] if name in s), default=0)
        same = "" if before["pid"] == now["pid"] else " (another process)"
        lines.append(
            f"{name}: {before['rss_kib'] >> 10} -> {now['rss_kib'] >> 10} MiB resident "
            f"(at most {peak >> 10}), "
            f"{before['fds']} -> {now['fds']} descriptors{same}"
        )
    return "\n".join(lines)
