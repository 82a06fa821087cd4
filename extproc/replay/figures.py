"""What is made of a finished replay: the figures of the tables and the curves of the plots. Pure arithmetic.

The first tenth of the requests is left out everywhere: they meet empty caches, which says nothing of a policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from extproc.replay.offline import Outcome, Run, Sample
from policies.types import Floats

_WARM_UP_SHARE = 0.1
_CURVE_POINTS = 200
_SMOOTHED_OVER = 10
"""Samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a good answer is: the first token sooner, and the others closer together, than this."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run in figures. Times in seconds, shares 0..1.

    `tpot_s`: mean over answers of more than one token. `e2e_*`: until the last token. `goodput`: share of answers
    within the bounds. `hit`, `promised`: share of prompt tokens found cached; believed to be by the router's
    index. `imbalance`: requests of the busiest engine over the mean.
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    goodput: float
    hit: float
    promised: float
    imbalance: float
    preemptions: float
    ended_s: float


FIGURES = tuple(field.name for field in fields(Figures))


@dataclass(frozen=True, slots=True)
class Curves:
    """What the plots show. `ttft_s`: quantiles at even steps from 0 to 1. The rest over time, one list per engine."""

    ttft_s: list[float]
    at_s: list[float]
    load: list[list[int]]
    hit: list[list[float | None]]


def warmed_up(requests: int) -> int:
    """The number of the first request that counts."""
    return int(requests * _WARM_UP_SHARE)


def figures(run: Run, bounds: Bounds) -> Figures:
    """The run in figures."""
    first = warmed_up(len(run.outcomes))
    outcomes, requests = run.outcomes[first:], run.trace.requests[first:]
    ttft = _ttft(outcomes)
    e2e = np.array([one.ended_s - one.arrived_s for one in outcomes])
    output = np.array([request.output_tokens for request in requests], np.float64)
    tpot = (e2e - ttft) / np.maximum(output - 1, 1)
    prompts = sum(request.prompt_tokens for request in requests)
    return Figures(
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=quantile(ttft, 0.50),
        ttft_p90_s=quantile(ttft, 0.90),
        ttft_p99_s=quantile(ttft, 0.99),
        tpot_s=float(tpot[output > 1].mean()) if (output > 1).any() else 0.0,
        e2e_mean_s=float(e2e.mean()),
        e2e_p99_s=quantile(e2e, 0.99),
        goodput=float(((ttft < bounds.ttft_s) & (tpot < bounds.tpot_s)).mean()),
        hit=sum(one.cached_tokens for one in outcomes) / prompts,
        promised=sum(one.predicted_tokens for one in outcomes) / prompts,
        imbalance=_imbalance(outcomes, run.fleet.engines),
        preemptions=float(run.preemptions),
        ended_s=run.ended_s,
    )


def curves(run: Run) -> Curves:
    """The run in curves."""
    ttft = np.sort(_ttft(run.outcomes[warmed_up(len(run.outcomes)) :]))
    steps = np.linspace(0, len(ttft) - 1, _CURVE_POINTS).round().astype(int)
    samples = run.samples
    return Curves(
        [round(float(value), 5) for value in ttft[steps]],
        [round(sample.at_s, 2) for sample in samples],
        [list(load) for load in zip(*(sample.load for sample in samples), strict=True)],
        [_hit_over_time(samples, engine) for engine in range(run.fleet.engines if samples else 0)],
    )


def quantile(values: Floats, share: float) -> float:
    """The smallest value that more than `share` of all do not exceed."""
    return float(np.sort(values)[min(len(values) - 1, int(share * len(values)))])


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over seeds: mean and standard deviation (0 for a single seed)."""

    mean: float
    sd: float


def over_seeds(runs: Sequence[Figures]) -> dict[str, Spread]:
    """Every figure over the runs of one policy."""
    rows = [asdict(run) for run in runs]
    return {name: _spread([row[name] for row in rows]) for name in FIGURES}


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def _ttft(outcomes: Iterable[Outcome]) -> Floats:
    return np.array([one.first_token_s - one.arrived_s for one in outcomes])


def _imbalance(outcomes: Sequence[Outcome], engines: int) -> float:
    counts = np.bincount([one.engine for one in outcomes], minlength=engines)
    return float(counts.max() * engines / counts.sum())


def _hit_over_time(samples: Sequence[Sample], engine: int) -> list[float | None]:
    """Hits over queries of the last few samples, else it would be noise; None where nothing was admitted."""
    rates: list[float | None] = [None]
    for number, after in enumerate(samples[1:], 1):
        before = samples[max(0, number - _SMOOTHED_OVER)]
        queried = after.queried_tokens[engine] - before.queried_tokens[engine]
        hits = after.hit_tokens[engine] - before.hit_tokens[engine]
        rates.append(round(hits / queried, 4) if queried else None)
    return rates
