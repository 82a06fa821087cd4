"""When an endpoint's KV cache will be full, and whether it is filling up. Pure: figures and times in, a forecast out.

Usage is a saw-tooth: it climbs with every token and falls by whole requests. Within each stretch of `BIN_S` only the
highest counts, which takes most teeth away; the trend over the window is the median of the slopes between all pairs of
these (Theil and Sen). Rejected: least squares, of which one large request that ends bends the line for a whole window.

The alarm goes by usage alone. It is for people: full caches preempt, which wastes what was computed; no policy here
heeds it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

BIN_S = 1.0
WINDOW_BINS = 15
"""Fifteen seconds: some requests long, and not so many that what happened a minute ago decides."""
_FEWEST_BINS = 4
_HYSTERESIS = 0.05
"""The alarm ends so far below where it begins."""
_SLOWEST = 1e-4
"""Shares per second: what takes hours is no forecast."""


class KvForecast:
    """One endpoint. `alarm_share` (0..1): the usage above which it is in `alarm`.

    `full_in_s`: infinite where usage does not rise, or nobody knows yet; 0 where it is full.
    """

    __slots__ = ("_bins", "_highest", "_until_s", "alarm", "alarm_share", "full_in_s", "used")

    def __init__(self, alarm_share: float) -> None:
        self.alarm_share = alarm_share
        self.alarm = False
        self.full_in_s = math.inf
        self.used = 0.0
        self._begin()

    def _begin(self) -> None:
        self._bins: deque[tuple[float, float]] = deque(maxlen=WINDOW_BINS)
        self._highest = 0.0
        self._until_s = -math.inf

    def observe(self, used: float, now_s: float) -> bool:
        """Usage, 0..1: the highest since it was last told. True if the alarm begins."""
        self.used = used
        if now_s >= self._until_s:
            self._close(now_s)
        self._highest = max(self._highest, used)
        before = self.alarm
        self.alarm = used > self.alarm_share - (_HYSTERESIS if before else 0.0)
        return self.alarm and not before

    def forget(self) -> None:
        """Another engine is there."""
        self.alarm, self.full_in_s, self.used = False, math.inf, 0.0
        self._begin()

    def _close(self, now_s: float) -> None:
        """End a bin and see what it makes of the trend. What is older than the window counts no more."""
        if self._until_s > -math.inf:
            self._bins.append((self._until_s, self._highest))
        while self._bins and now_s - self._bins[0][0] > BIN_S * WINDOW_BINS:
            self._bins.popleft()
        self._highest, self._until_s = 0.0, now_s + BIN_S
        self.full_in_s = self._seconds_until_full()

    def _seconds_until_full(self) -> float:
        if self.used >= 1.0:
            return 0.0
        if len(self._bins) < _FEWEST_BINS:
            return math.inf
        slope = trend(list(self._bins))
        return (1.0 - self.used) / slope if slope > _SLOWEST else math.inf


def trend(points: list[tuple[float, float]]) -> float:
    """The median slope between all pairs of points, each a time and a value. Times differ."""
    pairs = itertools.combinations(points, 2)
    return statistics.median([(later - earlier) / (end_s - begin_s) for (begin_s, earlier), (end_s, later) in pairs])
