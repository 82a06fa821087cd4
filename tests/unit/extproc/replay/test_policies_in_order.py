"""The reason for all this, small enough for every run of the tests: the default policy against two that everybody has.

Virtual time and a seeded trace: the same figures on every machine. Full-size tables are in docs/benchmarks.md.
"""

from __future__ import annotations

import pytest

from extproc.replay.comparison import Table, compare
from extproc.replay.entrants import entrants
from extproc.replay.figures import Bounds, Spread
from extproc.replay.matrix import Matrix
from extproc.replay.offline import Fleet
from extproc.replay.readers import read
from extproc.replay.scenarios import at_load, disturbances, flood


@pytest.fixture(scope="module")
def table() -> Table:
    """1,500 requests of the trace that comes with us, 8 engines, nine tenths of what least-request can take."""
    trace = read("generated", requests=1500)
    matrix = Matrix({trace.digest: trace}, Bounds())
    group = at_load("load 0.9", trace, Fleet(), 0.9, matrix.capacity_per_s)
    (table,) = compare(matrix, [group], entrants(["default", "least-request", "round-robin"]), seeds=[11])
    return table


def _figures(table: Table, name: str) -> list[float]:
    """Of default, least-request and round-robin."""
    spreads: list[Spread] = [row.spread[name] for row in table.rows]
    return [spread.mean for spread in spreads]


@pytest.mark.parametrize("figure", ["ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "tpot_s"])
def test_the_default_is_faster_than_least_request_and_that_than_round_robin(table: Table, figure: str) -> None:
    """Means and tails, first tokens and whole answers; the default clearly so on the means."""
    default, least, robin = _figures(table, figure)
    assert default < least < robin
    if figure.endswith("mean_s"):
        assert default < 0.6 * least


def test_the_default_has_the_most_good_answers(table: Table) -> None:
    """And finds most prompt tokens cached, close to what is there to be found."""
    default, least, robin = _figures(table, "goodput")
    assert default > least > robin
    assert _figures(table, "hit")[0] > 0.95 * table.ideal_hit


def test_the_default_is_no_worse_than_least_request_under_any_disturbance() -> None:
    """Slow engines, late figures, one that joins, one that dies, a flood: mean and 99th percentile of TTFT."""
    trace, fleet = read("generated", requests=700), Fleet(engines=4)
    flooded = flood(trace)
    matrix = Matrix({one.digest: one for one in (trace, flooded)}, Bounds())
    groups = disturbances(trace, fleet, matrix.capacity_per_s)
    for table in compare(matrix, groups, entrants(["default", "least-request"]), seeds=[11]):
        for figure in ("ttft_mean_s", "ttft_p99_s"):
            default, least = _figures(table, figure)
            assert default <= least, (table.group.title, figure)
