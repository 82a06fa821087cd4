"""From outcomes to figures: small runs whose figures can be told by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extproc.replay.comparison import Row, Table, winners
from extproc.replay.figures import Bounds, Figures, curves, figures, over_seeds, quantile
from extproc.replay.offline import Fleet, Outcome, Run, Sample
from extproc.replay.scenarios import Group


def _run(make_trace: Any) -> Run:
    """Ten requests of 33 tokens and 11 of answer: TTFT 1, 2, .. 10 s, then 0.1 s a token; the first does not count."""
    trace = make_trace(*([number, 100 + number] for number in range(10)), output_tokens=11)
    outcomes = [
        Outcome(
            arrived_s=float(number),
            first_token_s=number + 1.0 * (number + 1),
            ended_s=number + 1.0 * (number + 1) + 1.0,
            engine=0 if number < 7 else 1,
            cached_tokens=16,
            predicted_tokens=32,
        )
        for number in range(10)
    ]
    samples = [Sample(0.0, (1, 0), (0, 0), (0, 0)), Sample(1.0, (2, 0), (100, 0), (25, 0))]
    return Run(trace, Fleet(engines=2), outcomes, 99.0, preemptions=3, samples=samples)


def test_figures_are_of_the_requests_after_the_first_tenth(make_trace: Any) -> None:
    """TTFT 2 .. 10 s: mean 6; six of nine on engine 0."""
    found = figures(_run(make_trace), Bounds())
    assert found.ttft_mean_s == pytest.approx(6.0)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (6.0, 10.0)
    assert found.tpot_s == pytest.approx(0.1)
    assert found.e2e_mean_s == pytest.approx(7.0)
    assert (found.hit, found.promised) == (pytest.approx(16 / 33), pytest.approx(32 / 33))
    assert found.imbalance == pytest.approx(6 / 4.5)
    assert (found.preemptions, found.ended_s) == (3.0, 99.0)


def test_goodput_needs_both_bounds(make_trace: Any) -> None:
    """Four of nine first tokens come within 5.5 s, none of the others within 50 ms each."""
    run = _run(make_trace)
    assert figures(run, Bounds()).goodput == 0.0
    assert figures(run, Bounds(ttft_s=5.5, tpot_s=0.2)).goodput == pytest.approx(4 / 9)


def test_curves_end_where_the_figures_do(make_trace: Any) -> None:
    """The slowest first token; hits of the last samples, None while nothing was asked."""
    drawn = curves(_run(make_trace))
    assert (drawn.ttft_s[0], drawn.ttft_s[-1]) == (2.0, 10.0)
    assert drawn.load == [[1, 2], [0, 0]]
    assert drawn.hit == [[None, 0.25], [None, None]]


def test_quantiles_are_values_that_occurred() -> None:
    """No interpolation."""
    values = np.array([4.0, 1.0, 3.0, 2.0])
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]


def test_a_spread_is_over_seeds(make_trace: Any) -> None:
    """Mean and sample deviation; none for a single seed."""
    one = figures(_run(make_trace), Bounds())
    two = replace(one, ttft_mean_s=8.0)
    spread = over_seeds([one, two])["ttft_mean_s"]
    assert (spread.mean, spread.sd) == (pytest.approx(7.0), pytest.approx(2**0.5))
    assert over_seeds([one])["ttft_mean_s"].sd == 0.0


def test_the_winner_is_the_lowest_time_and_the_highest_share(make_trace: Any) -> None:
    """By the mean."""
    run = _run(make_trace)
    slow = figures(run, Bounds())
    fast: Figures = replace(slow, ttft_mean_s=1.0, goodput=0.9)
    group = Group(title="", trace=run.trace, fleet=run.fleet, rate=1.0)
    table = Table(group, 0.0, [Row(name, [], over_seeds([one])) for name, one in (("slow", slow), ("fast", fast))])
    assert (winners(table)["ttft_mean_s"], winners(table)["goodput"]) == (1.0, 0.9)
    assert "hit" not in winners(table)  # both have it: nobody wins
