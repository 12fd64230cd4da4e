"""The gateway's Prometheus metrics. Gauges are computed when scraped, so none can get stuck.

Counting must never end a request: `count` and `observe` contain every error and count it. Label
values come from fixed sets and from the registry, never from clients.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pageferry.gateway.fleet import Fleet
from pageferry.gateway.requests import Generation
from pageferry.kvtransfer import metric_names as names

log = logging.getLogger(__name__)


class GatewayMetrics:
    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self.contained = 0
        """Errors inside metrics code so far."""
        self.delivered_tokens = 0
        """Tokens given to clients since the last scrape; a counter of their own is too slow."""
        text, buckets = names.GATEWAY_HISTOGRAMS[names.INTER_TOKEN_LATENCY]
        self._gaps = Tally(names.PREFIX + names.INTER_TOKEN_LATENCY, text, model, buckets)
        self.registry.register(self._gaps)
        self._counters = {
            name: Counter(
                names.PREFIX + name, text, (names.MODEL_LABEL, *labels), registry=self.registry
            )
            for name, (text, labels) in names.GATEWAY_COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(
                names.PREFIX + name,
                text,
                (names.MODEL_LABEL,),
                buckets=buckets,
                registry=self.registry,
            ).labels(model)
            for name, (text, buckets) in names.GATEWAY_HISTOGRAMS.items()
            if name != names.INTER_TOKEN_LATENCY
        }
        self._children: dict[tuple[str, str], Counter] = {}
        for name, (_, labels) in names.GATEWAY_COUNTERS.items():
            if not labels:
                self._children[name, ""] = self._counters[name].labels(model)
        for reason in ("stop", "length", "abort", "error"):
            self.count(names.REQUEST_SUCCESS, 0, reason)

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Raise a counter; `label` is the value of its one label beside the model."""
        try:
            child = self._children.get((name, label))
            if child is None:
                child = self._children[name, label] = self._counters[name].labels(self.model, label)
            child.inc(amount)
        except Exception as error:
            self._contain(name, error)

    def observe(self, name: str, value: float) -> None:
        try:
            self._histograms[name].observe(value)
        except Exception as error:
            self._contain(name, error)

    def token_gap(self, seconds: float, count: int) -> None:
        """`count` tokens of one sequence came `seconds` apart from each other."""
        self._gaps.add(seconds, count)

    def _contain(self, name: str, error: Exception) -> None:
        self.contained += 1
        if self.contained == 1:
            log.error("metric %s: %s: %s", name, type(error).__name__, error)

    def ended(self, generation: Generation, now: float) -> None:
        """Account for a generation that has just been closed."""
        self.count(names.REQUEST_SUCCESS, 1, generation.outcome)
        self.observe(names.E2E_LATENCY, max(0.0, now - generation.arrived))
        self.observe(names.REQUEST_PROMPT_TOKENS, len(generation.prompt))
        self.observe(names.REQUEST_GENERATION_TOKENS, generation.delivered)
        first, last, claimed = generation.first_token, generation.last_token, generation.claimed
        if claimed is not None:
            self.observe(names.QUEUE_TIME, max(0.0, claimed - generation.arrived))
        if first is None or last is None:
            return
        if claimed is not None:
            self.observe(names.PREFILL_TIME, max(0.0, first - claimed))
        self.observe(names.DECODE_TIME, max(0.0, last - first))
        if len(generation.tokens) > 1:
            mean = (last - first) / (len(generation.tokens) - 1)
            self.observe(names.TIME_PER_OUTPUT_TOKEN, max(0.0, mean))

    def expose(self) -> bytes:
        """The text of `/metrics`."""
        self.count(names.GENERATION_TOKENS, self.delivered_tokens)
        self.delivered_tokens = 0
        return generate_latest(self.registry)


class Tally(Collector):
    """A histogram that one thread fills: 0.3 µs a value, where the library's lock takes 2 µs."""

    def __init__(self, name: str, text: str, model: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._model = name, text, model
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        labels = [names.MODEL_LABEL]
        metric = HistogramMetricFamily(self._name, self._text, labels=labels)
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        metric.add_metric([self._model], buckets, self._sum)
        yield metric


class LiveGauges(Collector):
    """Reads the gateway's and the fleet's present state at each scrape."""

    def __init__(
        self,
        model: str,
        fleet: Fleet,
        generations: Callable[[], Iterable[Generation]],
        redis_up: Callable[[], bool],
    ) -> None:
        self._model = model
        self._fleet = fleet
        self._generations = generations
        self._redis_up = redis_up

    def collect(self) -> Iterable[Metric]:
        running = waiting = 0
        for generation in self._generations():
            if not generation.done:
                waiting += generation.waiting
                running += not generation.waiting
        values = {
            names.NUM_REQUESTS_RUNNING: running,
            names.NUM_REQUESTS_WAITING: waiting,
            names.REDIS_UP: int(self._redis_up()),
        }
        for name, text in names.GATEWAY_GAUGES.items():
            gauge = GaugeMetricFamily(names.PREFIX + name, text, labels=[names.MODEL_LABEL])
            gauge.add_metric([self._model], values[name])
            yield gauge
        yield self._workers()
        yield from self._ledgers()
        yield from self._stats()

    def _workers(self) -> Metric:
        gauge = GaugeMetricFamily(
            names.PREFIX + names.NUM_WORKERS,
            "Live workers by role and state.",
            labels=[names.MODEL_LABEL, "role", "state"],
        )
        for role in ("prefill", "decode"):
            for state in ("ready", "draining", "unhealthy"):
                same = [
                    r for r in self._fleet.records.values() if (r.role, r.state) == (role, state)
                ]
                gauge.add_metric([self._model, role, state], len(same))
        return gauge

    def _ledgers(self) -> Iterable[Metric]:
        labels = list(names.WORKER_LABELS)
        pages = GaugeMetricFamily(
            names.PREFIX + names.PAGES, "KV pages by state.", labels=[*labels, "state"]
        )
        usage = GaugeMetricFamily(
            names.PREFIX + names.KV_CACHE_USAGE,
            "Share of KV pages in use, cached ones not counted (1 is all).",
            labels=labels,
        )
        for record in self._fleet.records.values():
            who = [self._model, record.role, record.id]
            for state in names.LEDGER_STATES:
                pages.add_metric([*who, state], getattr(record.ledger, state))
            used = record.ledger.total - record.ledger.available
            usage.add_metric(who, used / max(1, record.ledger.total))
        yield pages
        yield usage

    def _stats(self) -> Iterable[Metric]:
        for name, text in names.WORKER_STATS.items():
            known = [r for r in self._fleet.records.values() if name in r.stats]
            if not known:
                continue
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(names.PREFIX + name, text, labels=list(names.WORKER_LABELS))
            for record in known:
                metric.add_metric([self._model, record.role, record.id], float(record.stats[name]))
            yield metric
