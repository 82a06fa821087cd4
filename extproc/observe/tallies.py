"""Counts that every request raises, as plain numbers that are made into samples only when somebody asks.

prometheus_client's own counters and histograms lock and check at each call: a histogram of eleven buckets takes 2 us,
this one a third of one. Good where few series are counted often, and by one thread alone, the decision loop; a page
made meanwhile in another thread is a request behind, at worst.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """One counter by one label, whose values are known beforehand; `counts[i]` is that of the i-th."""

    def __init__(self, name: str, text: str, label: str, values: Sequence[str]) -> None:
        self.counts = [0] * len(values)
        self._name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterable[Metric]:
        """What has been counted; a value never met has no series."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in zip(self._values, self.counts, strict=True):
            if count:
                family.add_metric([value], count)
        yield family


class _Series(dict[tuple[str, ...], float]):
    """Counts by the values of labels, from 0 on; found by one of these values as well, since whole fleets may go."""

    def __init__(self) -> None:
        super().__init__()
        self._having: dict[tuple[int, str], set[tuple[str, ...]]] = {}

    def __missing__(self, values: tuple[str, ...]) -> float:
        for place in enumerate(values):
            self._having.setdefault(place, set()).add(values)
        self[values] = 0
        return 0

    def drop(self, position: int, value: str) -> None:
        """Drop those that have this value there."""
        for values in self._having.pop((position, value), ()):
            del self[values]
            for place in enumerate(values):
                self._having.get(place, set()).discard(values)


class Counts(Collector):
    """One counter by labels whose values come and go: with pools, say. `counts`: by these values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts = _Series()

    def drop(self, label: str, value: str) -> None:
        """Drop every series with this value."""
        if label in self._labels:
            self.counts.drop(self._labels.index(label), value)

    def collect(self) -> Iterable[Metric]:
        """What has been counted."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.counts.copy().items():
            family.add_metric(values, count)
        yield family


class Times:
    """One histogram of seconds."""

    __slots__ = ("_bounds_s", "counts", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """It took so long."""
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.total_s += seconds


class TimesByLabel(Collector):
    """Histograms of seconds by one label."""

    def __init__(self, name: str, text: str, label: str, bounds_s: Sequence[float]) -> None:
        self._name, self._text, self._label, self._bounds_s = name, text, label, tuple(bounds_s)
        self._by_value: dict[str, Times] = {}

    def of(self, value: str) -> Times:
        """That of one value of the label; hold on to it."""
        times = self._by_value.get(value)
        if times is None:
            times = self._by_value[value] = Times(self._bounds_s)
        return times

    def drop(self, label: str, value: str) -> None:
        """Drop the histogram of this value."""
        if label == self._label:
            self._by_value.pop(value, None)

    def collect(self) -> Iterable[Metric]:
        """All of them, with cumulative buckets as Prometheus has them."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        for value, times in self._by_value.copy().items():
            family.add_metric([value], list(zip(bounds, accumulate(times.counts), strict=True)), times.total_s)
        yield family
