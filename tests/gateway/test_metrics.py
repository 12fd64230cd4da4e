"""The gateway's own histogram against the library's."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pageferry.gateway.metrics import GatewayMetrics, Tally
from pageferry.kvtransfer import metric_names as names

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
