"""Plain counts as Prometheus reads them: the same samples as its own classes give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from extproc.observe.tallies import Counts, Tally, TimesByLabel

BOUNDS_S = (1e-5, 0.002, 0.1, 5)


def lines(registry: CollectorRegistry) -> set[str]:
    """What a scrape reads, without the times at which series were made."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@given(st.lists(st.sampled_from(BOUNDS_S) | st.floats(0, 10), min_size=1, max_size=30))
def test_times_are_told_as_by_a_histogram(seconds: list[float]) -> None:
    """Bounds belong to the bucket below; count, sum and text as well."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = TimesByLabel("x_seconds", "How long", "stage", BOUNDS_S)
    ours.register(times)
    histogram = Histogram("x_seconds", "How long", ("stage",), buckets=BOUNDS_S, registry=theirs)
    for one in seconds:
        times.of("parse").observe(one)
        histogram.labels("parse").observe(one)
    assert lines(ours) == lines(theirs)


def test_counts_are_told_as_by_a_counter() -> None:
    """Only of what was met."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("x", "How many", "kind", ("good", "bad", "odd"))
    ours.register(tally)
    counter = Counter("x", "How many", ("kind",), registry=theirs)
    for position, kind in ((0, "good"), (2, "odd"), (2, "odd")):
        tally.counts[position] += 1
        counter.labels(kind).inc()
    assert lines(ours) == lines(theirs)


def test_series_come_and_go_as_a_counters() -> None:
    """By any of their labels; a label that a family does not have is no matter."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("x", "How many", "pool", "kind")
    ours.register(counts)
    counter = Counter("x", "How many", ("pool", "kind"), registry=theirs)
    for pool, kind, more in (("a", "good", 2), ("b", "good", 1), ("a", "good", 0.5), ("b", "bad", 3)):
        counts.series.add((pool, kind), more)
        counter.labels(pool, kind).inc(more)
    assert lines(ours) == lines(theirs)
    counts.drop("kind", "bad")
    counts.drop("endpoint", "a")
    counter.remove("b", "bad")
    assert lines(ours) == lines(theirs)
    counts.drop("pool", "b")
    counts.drop("pool", "b")
    counter.remove("b", "good")
    counts.series.add(("b", "bad"), 2)
    counter.labels("b", "bad").inc(2)
    assert lines(ours) == lines(theirs)
    counts.drop("kind", "bad")
    assert counts.series.read() == [(("a", "good"), 2.5)]


def test_a_histogram_goes_with_its_label() -> None:
    """And begins anew if it comes back."""
    registry = CollectorRegistry()
    times = TimesByLabel("x_seconds", "How long", "pool", BOUNDS_S)
    registry.register(times)
    times.of("a").observe(1.0)
    times.drop("endpoint", "a")
    assert 'x_seconds_count{pool="a"} 1.0' in lines(registry)
    times.drop("pool", "a")
    assert not any("_count" in line for line in lines(registry))
