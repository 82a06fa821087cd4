"""The plain numbers behind what every request raises. Whoever asks has samples made of them (tallies.py).

One thread alone may count, the decision loop; reading takes a copy in one step and may be done in another.
"""

from __future__ import annotations

from collections.abc import Sequence

Labels = tuple[str, ...]


class Total:
    """One number that grows."""

    def __init__(self) -> None:
        self.value: float = 0.0


class Series:
    """Totals by the values of labels; found by one of these values as well, since whole fleets may go."""

    def __init__(self) -> None:
        self._totals: dict[Labels, Total] = {}
        self._having: dict[tuple[int, str], set[Labels]] = {}

    def add(self, values: Labels, more: float) -> None:
        """So many more. What was never met begins with none."""
        total = self._totals.get(values)
        if total is None:
            total = self._begin(values)
        total.value += more

    def _begin(self, values: Labels) -> Total:
        for place in enumerate(values):
            self._having.setdefault(place, set()).add(values)
        total = self._totals[values] = Total()
        return total

    def drop(self, position: int, value: str) -> None:
        """Drop those that have this value there."""
        for values in self._having.pop((position, value), set()):
            del self._totals[values]
            for place in enumerate(values):
                self._having.get(place, set()).discard(values)

    def read(self) -> list[tuple[Labels, float]]:
        """All of them."""
        return [(values, total.value) for values, total in list(self._totals.items())]


class Times:
    """One histogram of seconds. `counts[i]`: of those up to the i-th bound and above the one before."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s: list[float] = [float(bound) for bound in bounds_s]
        self.counts: list[int] = [0] * (len(bounds_s) + 1)
        self.total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """It took so long."""
        bounds_s = self._bounds_s
        above, top = 0, len(bounds_s)
        while above < top and bounds_s[above] < seconds:
            above += 1
        self.counts[above] += 1
        self.total_s += seconds


class TimesByValue:
    """Histograms with the same bounds, by the value of a label."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._times: dict[str, Times] = {}

    def of(self, value: str) -> Times:
        """That of one value; hold on to it."""
        times = self._times.get(value)
        if times is None:
            times = self._times[value] = Times(self._bounds_s)
        return times

    def drop(self, value: str) -> None:
        """Drop the histogram of this value."""
        self._times.pop(value, None)

    def read(self) -> list[tuple[str, Times]]:
        """All of them."""
        return list(self._times.items())
