"""What is made of a run's raw observations. Pure arithmetic; nothing here asks, waits or prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it: seconds to the first token, or what went wrong."""

    ttft_s: float | None = None
    error: str | None = None


@dataclass(slots=True)
class LoadSamples:
    """Requests in flight per endpoint, integrated over time; each sample holds until the next."""

    _area: dict[str, float] = field(default_factory=dict)
    _last_s: float | None = None
    _last: Mapping[str, int] = field(default_factory=dict)

    def add(self, at_s: float, in_flight: Mapping[str, int]) -> None:
        """Take one sample; times never go back."""
        if self._last_s is not None:
            for endpoint, count in self._last.items():
                self._area[endpoint] = self._area.get(endpoint, 0.0) + count * (at_s - self._last_s)
        self._last_s, self._last = at_s, dict(in_flight)

    def imbalance(self) -> float:
        """Max over mean of the time-averaged load; 1 is perfectly even. NaN if nothing was ever in flight."""
        total = sum(self._area.values())
        return max(self._area.values()) * len(self._area) / total if total else math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """One row of the table."""

    policy: str
    requests: int
    errors: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float
    first_error: str | None = None


def report(policy: str, outcomes: Sequence[Outcome], hit_rate: float, imbalance: float) -> Report:
    """A run in figures."""
    ttfts_s = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return Report(
        policy,
        len(outcomes),
        len(errors),
        hit_rate,
        percentile(ttfts_s, 0.50),
        percentile(ttfts_s, 0.99),
        imbalance,
        errors[0] if errors else None,
    )


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def hit_rate(counters: Iterable[tuple[float, float]]) -> float:
    """Hits over queries, summed over engines' (hits, queries)."""
    hits, queries = map(sum, zip(*counters, strict=True))
    return hits / queries if queries else math.nan


def times_faster(slow: Report, fast: Report) -> float:
    """How many times the median TTFT of one is that of the other."""
    return slow.ttft_p50_s / fast.ttft_p50_s if fast.ttft_p50_s else math.nan
