"""The gateway's own histogram against the library's; what is counted adds up, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pageferry.gateway.metrics import GatewayMetrics, Tally
from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.wire import Event, Kind

Cluster = Any
BUCKETS = (0.125, 0.5, 1.0, 2.5)


def lines(registry: CollectorRegistry) -> list[str]:
    """The exposition without creation times."""
    text = generate_latest(registry).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 2.5, 99.0]), st.integers(1, 3)))
)
def test_a_tally_is_exposed_like_a_histogram(values: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("gap_seconds", "Help.", "m", BUCKETS)
    ours.register(tally)
    label = names.MODEL_LABEL
    histogram = Histogram("gap_seconds", "Help.", (label,), buckets=BUCKETS, registry=theirs)
    child = histogram.labels("m")
    for value, count in values:
        tally.add(value, count)
        for _ in range(count):
            child.observe(value)
    assert lines(ours) == lines(theirs)


def test_delivered_tokens_are_counted_once_over_several_scrapes() -> None:
    metrics = GatewayMetrics("m")
    series = f'{names.PREFIX}{names.GENERATION_TOKENS}_total{{{names.MODEL_LABEL}="m"}} 7.0'
    metrics.delivered_tokens += 5
    metrics.expose()
    metrics.delivered_tokens += 2
    assert series in metrics.expose().decode()
    assert series in metrics.expose().decode()


async def endings(cluster: Cluster) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    name = "request_success_total"
    return {r: await cluster.metric(name, finished_reason=r) for r in reasons}


async def test_gauges_are_back_at_once_after_a_mass_abort(service: Cluster) -> None:
    service.workers[0].step_s = 0.2
    calls = [
        asyncio.create_task(service.events(prompt=f"{i:04}" * 20, max_tokens=200))
        for i in range(64)
    ]
    await service.until(lambda: len([g for g in service.generations() if g.tokens]) == 64)
    assert await service.metric(names.NUM_REQUESTS_RUNNING) == 64
    for call in calls:
        call.cancel()
    await service.until(lambda: not service.generations())
    for name in (names.NUM_REQUESTS_RUNNING, names.NUM_REQUESTS_WAITING):
        assert await service.metric(name) == 0
    assert await endings(service) == {"stop": 0, "length": 0, "abort": 64, "error": 0}
    assert await service.metric("requests_accepted_total") == 64
    await service.until(lambda: not service.workers[0].active)


async def test_sums_over_endings_refusals_and_failures(service: Cluster) -> None:
    """10 finished, 5 aborted, 3 failed, 4 refused, and one that is still running."""
    decode, prefill = service.workers
    delivered = 0
    for _ in range(10):
        _, body = await service.post(prompt="abcd", max_tokens=4)
        delivered += body["usage"]["completion_tokens"]
    for _ in range(2):
        assert (await service.post(prompt="abcd", max_tokens=4, model="other"))[0] == 404

    def fail(event: Event) -> list[Event]:
        return [dataclasses.replace(event, kind=Kind.ERROR, token_ids=(), code="odd")]

    prefill.mangle = fail
    failed = [await service.post(prompt="abcd", max_tokens=4) for _ in range(3)]
    assert [status for status, _ in failed] == [500] * 3
    prefill.mangle = lambda event: [event]

    decode.step_s = 0.05
    calls = [
        asyncio.create_task(service.events(prompt="abcd" * 20, max_tokens=200)) for _ in range(6)
    ]
    await service.until(lambda: len([g for g in service.generations() if g.tokens]) == 6)
    streams = service.generations()
    for call in calls[1:]:
        call.cancel()
    await service.until(lambda: len(service.generations()) == 1)

    (running,) = service.generations()
    decode.state = "draining"
    await service.until(lambda: not service.gateways[0].fleet.has_decode)
    for _ in range(2):
        assert (await service.post(prompt="abcd", max_tokens=4))[0] == 503
    decode.state = "ready"

    counts = await endings(service)
    assert counts == {"stop": 0, "length": 10, "abort": 5, "error": 3}
    accepted = await service.metric("requests_accepted_total")
    assert sum(counts.values()) + await service.metric(names.NUM_REQUESTS_RUNNING) == accepted
    assert await service.metric("requests_refused_total", status="404") == 2
    assert await service.metric("requests_refused_total", status="503") == 2
    running.deadline = 0
    await calls[0]
    delivered += sum(generation.delivered for generation in streams)
    assert await service.metric("generation_tokens_total") == delivered
    assert (await endings(service))["error"] == 4


async def test_broken_counters_end_no_stream(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    monkeypatch.setattr(Counter, "inc", fail)
    monkeypatch.setattr(Histogram, "observe", fail)
    events = await service.events(prompt="abc", max_tokens=9)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "abc" * 3
    assert service.gateways[0].metrics.contained > 3
