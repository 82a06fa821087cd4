"""A comparison from end to end: groups times policies times seeds, as rows of figures. Nothing is shown here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from extproc.replay.entrants import Entrant
from extproc.replay.figures import Spread, over_seeds, warmed_up
from extproc.replay.matrix import Cell, Matrix, Result
from extproc.replay.scenarios import Group


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one group: its results by seed, and their mean and spread."""

    policy: str
    results: Sequence[Result]
    spread: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Table:
    """One group. `ideal_hit`: share of prompt tokens one engine of endless memory would find."""

    group: Group
    ideal_hit: float
    rows: Sequence[Row]


def compare(
    matrix: Matrix,
    groups: Sequence[Group],
    entrants: Sequence[Entrant],
    seeds: Sequence[int],
    done: Callable[[Cell, Result], None] | None = None,
) -> list[Table]:
    """One table per group, rows in the order of `entrants`."""
    results = iter(matrix.run([_cell(*one) for one in product(groups, entrants, seeds)], done))
    return [
        Table(group, _ideal(group), [_row(one, [next(results) for _ in seeds]) for one in entrants]) for group in groups
    ]


def _ideal(group: Group) -> float:
    return group.trace.fitted(group.fleet.capacity_tokens).ideal_hit_rate(warmed_up(len(group.trace.requests)))


def _cell(group: Group, entrant: Entrant, seed: int) -> Cell:
    return Cell(trace=group.trace.digest, entrant=entrant, fleet=group.fleet, rate=group.rate, seed=seed)


def _row(entrant: Entrant, results: Sequence[Result]) -> Row:
    return Row(entrant.name, results, over_seeds([result.figures for result in results]))


LOWER_IS_BETTER = frozenset(
    {"ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_s", "e2e_mean_s", "e2e_p99_s", "imbalance"}
)
HIGHER_IS_BETTER = frozenset({"goodput", "hit"})


def winners(table: Table) -> dict[str, float]:
    """The best mean of each figure that can be won, where one policy alone has it."""
    best: dict[str, float] = {}
    for name in LOWER_IS_BETTER | HIGHER_IS_BETTER:
        means = [row.spread[name].mean for row in table.rows]
        first = min(means) if name in LOWER_IS_BETTER else max(means)
        if means.count(first) == 1:
            best[name] = first
    return best


def as_data(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Everything as plain data, curves included."""
    return [
        {
            "title": table.group.title,
            "trace": table.group.trace.name,
            "requests": len(table.group.trace.requests),
            "fleet": asdict(table.group.fleet),
            "rate_per_s": table.group.rate,
            "ideal_hit": table.ideal_hit,
            "rows": [_row_as_data(row) for row in table.rows],
        }
        for table in tables
    ]


def _row_as_data(row: Row) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "figures": {name: asdict(spread) for name, spread in row.spread.items()},
        "seeds": [asdict(result) for result in row.results],
    }
