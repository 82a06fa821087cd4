"""Counts that every request raises: plain numbers (counting.py) that are made into samples only when somebody asks.

prometheus_client's own counters and histograms lock and check at each call: a histogram of eleven buckets takes 2 us,
this one a third of one, and a tenth where it is compiled. Good where few series are counted often, and by one thread
alone, the decision loop; a page made meanwhile in another thread is a request behind, at worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.observe.counting import Series, Times, TimesByValue


class Tally(Collector):
    """One counter by one label, whose values are known beforehand; `counts[i]` is that of the i-th."""

    def __init__(self, name: str, text: str, label: str, values: Sequence[str]) -> None:
        self.counts: list[int] = [0] * len(values)
        self._name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterable[Metric]:
        """What has been counted; a value never met has no series."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in zip(self._values, self.counts, strict=True):
            if count:
                family.add_metric([value], count)
        yield family


class Counts(Collector):
    """One counter by labels whose values come and go: with pools, say. `series`: by these values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.series = Series()

    def drop(self, label: str, value: str) -> None:
        """Drop every series with this value."""
        if label in self._labels:
            self.series.drop(self._labels.index(label), value)

    def collect(self) -> Iterable[Metric]:
        """What has been counted."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.series.read():
            family.add_metric(values, count)
        yield family


class TimesByLabel(Collector):
    """Histograms of seconds by one label; `series`: by its values."""

    def __init__(self, name: str, text: str, label: str, bounds_s: Sequence[float]) -> None:
        self._name, self._text, self._label, self._bounds_s = name, text, label, tuple(bounds_s)
        self.series = TimesByValue(self._bounds_s)

    def of(self, value: str) -> Times:
        """That of one value of the label; hold on to it."""
        return self.series.of(value)

    def drop(self, label: str, value: str) -> None:
        """Drop the histogram of this value."""
        if label == self._label:
            self.series.drop(value)

    def collect(self) -> Iterable[Metric]:
        """All of them, with cumulative buckets as Prometheus has them."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        for value, times in self.series.read():
            family.add_metric([value], list(zip(bounds, accumulate(times.counts), strict=True)), times.total_s)
        yield family
