"""After the last fault: is everything back where it was, and did any log tell of more?

1. `settle`: within `SETTLE_S` all workers are back, ledgers balance and hold nothing, Redis' queues
   are empty, the gauges are 0.
2. `usage`: memory and descriptors per process, for the report.
3. `log_problems`: errors, tracebacks and deaths that nobody injected.
"""

from __future__ import annotations

import asyncio
import collections
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from processes import PROXIED, Stack

SETTLE_S = 30.0
STATES = ("free", "reserved", "live", "cached", "quarantined")
BUSY = ("reserved", "live", "quarantined")
GAUGES = re.compile(
    r"^pageferry:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)"
)

LOUD = re.compile(
    r"^[\d-]{10} [\d:,]{12} (?:ERROR|CRITICAL) |^Traceback|^[\w.]+(?:Error|Exception)\b"
)
WARNING = re.compile(r"^[\d-]{10} [\d:,]{12} WARNING \S+ (.*)")
VARIABLE = re.compile(r"\b(?=\w*\d)[\w.:-]+")
"""Ids and numbers, for grouping warnings."""
ENDED = re.compile(r"pageferry: (\S+) ended \((.*?)\) after")
NO_REDIS = "Redis at --redis-url cannot be used"

ALLOWED = {
    f"{PROXIED}-\\w+ broke the handoff protocol": "a bit was flipped outside of the pages",
}
"""Regular expression of a loud log line -> why it is no failure."""


async def settle(stack: Stack) -> list[str]:
    """Problems that are left after `SETTLE_S`; returns as soon as there are none."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    while True:
        try:
            problems = [problem async for problem in _unsettled(stack)]
        except Exception as error:  # any part may still be starting
            problems = [f"{type(error).__name__}: {error}"]
        if not problems or loop.time() > deadline:
            return [f"{SETTLE_S:g} s after the end: {problem}" for problem in problems]
        await asyncio.sleep(0.5)


async def _unsettled(stack: Stack) -> Any:
    await stack.wait_ready(1.0)
    for url in stack.urls.values():
        for worker in (await stack.get(url, "/v1/workers"))["data"]:
            ledger = worker["ledger"]
            if sum(ledger[state] for state in STATES) != ledger["total"]:
                yield f"{worker['id']}: pages do not add up: {ledger}"
            if any(ledger[state] for state in BUSY):
                yield f"{worker['id']}: pages are held: {ledger}"
            if worker["num_running"] or worker["num_waiting"]:
                yield f"{worker['id']}: {worker['num_running']} run, {worker['num_waiting']} wait"
        for line in (await stack.get(url, "/metrics")).splitlines():
            if (gauge := GAUGES.match(line)) and float(gauge[1]):
                yield f"{url}: {line}"
    async for problem in _queues(stack.redis):
        yield problem


async def _queues(redis: Any) -> Any:
    async for raw in redis.scan_iter("pf:*"):
        key = raw.decode()
        tail = key.split("}:")[-1]
        if tail.startswith(("prefill:", "decode:")) and (length := await redis.xlen(key)):
            yield f"{key}: {length} entries"
        if tail.startswith("prefill:"):
            for group in await redis.xinfo_groups(key):
                if group["pending"]:
                    yield f"{key}: {group['pending']} pending"
        if tail.startswith("tokens:") and await redis.ttl(key) < 0:
            yield f"{key}: does not expire"


def usage(stack: Stack) -> dict[str, dict[str, int]]:
    """Per program: pid, resident KiB, descriptors, threads."""
    found = {}
    for name in ("valkey", *stack.gateways, *stack.workers):
        pid = stack.pid(name)
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            fds = len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmRSS" not in fields:  # it has ended and is not reaped yet
            continue
        found[name] = {
            "pid": pid,
            "rss_kib": int(fields["VmRSS"].split()[0]),
            "threads": int(fields["Threads"]),
            "fds": fds,
        }
    return found


def log_problems(log_dir: Path, kills: Mapping[str, int]) -> list[str]:
    """Loud lines and unexplained deaths."""
    problems = []
    deaths: collections.Counter[str] = collections.Counter()
    for path in sorted(log_dir.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            if LOUD.search(line) and not any(re.search(p, line) for p in ALLOWED):
                problems.append(f"{path.name}:{number}: {line[:300]}")
            if ended := ENDED.search(line):
                name, how = ended[1], ended[2]
                deaths[name] += how == "signal SIGKILL"
                if how not in ("signal SIGKILL", "exit code 0") and not _had_no_redis(
                    log_dir / f"{name}.log", how
                ):
                    problems.append(f"{path.name}:{number}: {line}")
    for name, count in deaths.items():
        if count > kills.get(name, 0):
            problems.append(f"{name} was killed {count} times, {kills.get(name, 0)} by us")
    return problems


def _had_no_redis(log: Path, how: str) -> bool:
    """A worker that starts while Redis is away says so and exits with 1; it is started again."""
    return how == "exit code 1" and NO_REDIS in log.read_text(errors="replace")


def warnings(log_dir: Path) -> dict[str, int]:
    """How often each warning was logged, ids and numbers left out."""
    counts: collections.Counter[str] = collections.Counter()
    for path in log_dir.glob("*.log"):
        counts.update(_shapes(path))
    return dict(counts.most_common(40))


def _shapes(path: Path) -> Iterator[str]:
    for line in path.read_text(errors="replace").splitlines():
        if match := WARNING.match(line):
            yield VARIABLE.sub("#", match[1])[:160]
