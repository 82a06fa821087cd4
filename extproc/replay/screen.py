"""What a replay prints: what is being run, a line per finished cell, the tables. Plain lines where no terminal is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as Grid

from extproc.replay.comparison import Row, Table, winners
from extproc.replay.figures import Bounds, Spread
from extproc.replay.matrix import Cell, Result

_PLAIN_WIDTH = 180


@dataclass(frozen=True, slots=True)
class Column:
    """A figure as the tables show it."""

    heading: str
    figure: str
    shown: Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ms(value: float) -> str:
    return f"{value * 1000:.1f}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f}"


COLUMNS = (
    Column("TTFT mean s", "ttft_mean_s", _seconds),
    Column("p50", "ttft_p50_s", _seconds),
    Column("p90", "ttft_p90_s", _seconds),
    Column("p99", "ttft_p99_s", _seconds),
    Column("TPOT ms", "tpot_s", _ms),
    Column("e2e mean s", "e2e_mean_s", _seconds),
    Column("p99", "e2e_p99_s", _seconds),
    Column("goodput %", "goodput", _percent),
    Column("hit %", "hit", _percent),
    Column("promised %", "promised", _percent),
    Column("imbalance", "imbalance", "{:.2f}".format),
)


def make_console(*, quiet: bool = False) -> Console:
    """A console that does not fold the tables where there is no terminal."""
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=_PLAIN_WIDTH)


def counter(console: Console, total: int) -> Callable[[Cell, Result], None]:
    """Prints a line for each finished cell."""
    done = 0

    def count(cell: Cell, result: Result) -> None:
        nonlocal done
        done += 1
        console.print(
            f"{done}/{total} {cell.entrant.name}, {cell.rate:.3g}/s, seed {cell.seed}: "
            f"mean TTFT {_seconds(result.figures.ttft_mean_s)} s, {result.took_s:.0f} s of CPU",
            markup=False,
        )

    return count


def show(console: Console, tables: Sequence[Table], bounds: Bounds) -> None:
    """Every table, and what its columns say."""
    for table in tables:
        console.print(_grid(table))
    console.print(legend(bounds, tables), markup=False)


def _grid(table: Table) -> Grid:
    group = table.group
    grid = Grid(
        title=f"{group.trace.name}, {group.title} ({group.rate:.3g} per s, {group.fleet.engines} engines); "
        f"ideal hit {_percent(table.ideal_hit)} %"
    )
    grid.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        grid.add_column(column.heading, justify="right")
    best = winners(table)
    for row in table.rows:
        grid.add_row(row.policy, *(cell(column, row, best, bold="[bold green]{}[/]") for column in COLUMNS))
    return grid


def cell(column: Column, row: Row, best: dict[str, float], *, bold: str) -> str:
    """One figure with its spread over seeds; the best of its column set in `bold` and marked."""
    spread = row.spread[column.figure]
    shown = _with_spread(column, spread, several=len(row.results) > 1)
    return bold.format(f"{shown}*") if best.get(column.figure) == spread.mean else shown


def _with_spread(column: Column, spread: Spread, *, several: bool) -> str:
    return f"{column.shown(spread.mean)}±{column.shown(spread.sd)}" if several else column.shown(spread.mean)


def legend(bounds: Bounds, tables: Sequence[Table]) -> str:
    """What the columns say."""
    several = any(len(row.results) > 1 for table in tables for row in table.rows)
    spread = " Spread: standard deviation over seeds." if several else ""
    return f"""\
*          the best of its column
TTFT       from arrival to the first token; TPOT: between tokens, mean; e2e: to the last token
goodput    answers with TTFT under {bounds.ttft_s:g} s and TPOT under {bounds.tpot_s * 1000:g} ms
hit        prompt tokens found cached; promised: believed to be by the policy's index; ideal: one endless cache
imbalance  requests of the busiest engine over the mean
The first tenth of the requests is left out.{spread}"""


def as_markdown(table: Table) -> str:
    """The table for a page."""
    lines = [
        f"| policy | {' | '.join(column.heading for column in COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
    ]
    best = winners(table)
    lines += [
        f"| {row.policy} | {' | '.join(cell(column, row, best, bold='**{}**') for column in COLUMNS)} |"
        for row in table.rows
    ]
    return "\n".join(lines)
