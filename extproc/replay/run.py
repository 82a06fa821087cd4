"""`pointsman replay --offline`: from what was asked for to tables on the screen and files. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from extproc import __version__
from extproc.replay import scenarios
from extproc.replay.comparison import Table, as_data, compare
from extproc.replay.entrants import Entrant, entrants
from extproc.replay.figures import Bounds
from extproc.replay.live import compare_live
from extproc.replay.matrix import IN_FLIGHT_PER_ENGINE, Matrix, code_version
from extproc.replay.offline import Fleet
from extproc.replay.readers import read
from extproc.replay.scenarios import Group
from extproc.replay.screen import as_markdown, counter, show
from extproc.replay.traces import Trace

_FIRST_SEED = 11
_ENOUGH = 5
"""Times the number in flight: from so many requests on a measured capacity means something."""


class Unusable(Exception):
    """What was asked for does not go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for. `loads`, `rates`: shares of capacity; requests (or sessions) per second.

    `live_speed`: through a real Envoy, so much faster than the hardware; None for offline.
    """

    source: str
    form: str | None = None
    policies: tuple[str, ...]
    right_sized: bool = False
    fleet: Fleet
    loads: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    disturbances: bool = False
    flood: bool = False
    live_speed: float | None = None
    seeds: int = 1
    requests: int | None = None
    bounds: Bounds = field(default_factory=Bounds)
    jobs: int = 1
    resume: Path | None = None
    json_file: Path | None = None
    markdown_file: Path | None = None
    plots: Path | None = None
    command: str = ""


def run(options: Options, console: Console) -> list[Table]:
    """The whole of it. Raises Unusable, BadTrace, NoSuchPolicy, Stuck, OSError."""
    runners = entrants(options.policies, right_sized=options.right_sized)
    trace = read(options.source, options.form, options.requests)
    _check(options, trace)
    if options.flood:
        trace = scenarios.flood(trace)
    flooded = [scenarios.flood(trace)] if options.disturbances else []
    traces = {one.digest: one for one in (trace, *flooded)}
    matrix = Matrix(traces, options.bounds, folder=options.resume, jobs=options.jobs)
    console.print(_about(options, trace, [one.name for one in runners]), markup=False)
    groups = _groups(options, trace, _told(matrix, console))
    seeds = [_FIRST_SEED + number for number in range(options.seeds)]
    if options.live_speed is not None:
        tables = [_live(options, group, runners, seeds, console) for group in groups]
    else:
        count = counter(console, len(groups) * len(runners) * len(seeds))
        tables = compare(matrix, groups, runners, seeds, count)
    show(console, tables, options.bounds)
    _write(options, tables, console)
    return tables


def _live(options: Options, group: Group, runners: Sequence[Entrant], seeds: Sequence[int], console: Console) -> Table:
    def say(line: str) -> None:
        console.print(line, markup=False)

    return compare_live(group, runners, seeds, options.live_speed or 1.0, options.bounds, say)


def _check(options: Options, trace: Trace) -> None:
    """Raise Unusable for loads that this trace cannot have."""
    if trace.closed and (options.loads or options.disturbances):
        raise Unusable(f"{trace.name}: its sessions wait for answers, so it has no load; give --sessions-per-s")
    if options.flood and (trace.closed or options.disturbances):
        raise Unusable("--flood is for traces whose requests do not wait, and one of the --disturbances already")
    if options.live_speed is not None and options.disturbances:
        raise Unusable("disturbances are for --offline")
    if options.live_speed is not None and options.fleet.first_tokens != "seen":
        raise Unusable("--first-tokens is for --offline; live they are told as a running system tells them")
    if not (options.loads or options.rates or options.disturbances):
        raise Unusable("give --load, --rate (or --sessions-per-s), or --disturbances")


def _about(options: Options, trace: Trace, names: Sequence[str]) -> str:
    fleet = options.fleet
    return (
        f"{trace.name}: {len(trace.requests)} requests, digest {trace.digest[:12]}; "
        f"{fleet.engines} x {fleet.hardware}, {fleet.capacity_tokens} tokens of KV cache each\n"
        f"policies: {', '.join(names)}; {options.seeds} seed(s); {options.jobs} process(es); code {code_version()[:12]}"
    )


def _told(matrix: Matrix, console: Console) -> scenarios.Capacity:
    """Capacities, each said once as it becomes known."""
    told: set[str] = set()

    def capacity(trace: Trace, fleet: Fleet) -> float:
        per_s, in_flight = matrix.capacity_per_s(trace, fleet), IN_FLIGHT_PER_ENGINE * fleet.engines
        line = f"load 1 on {trace.name}, {_speeds(fleet)}: {per_s:.3f} requests/s"
        if len(trace.requests) < _ENOUGH * in_flight:
            line += f"; uncertain: measured with {in_flight} in flight, of only {len(trace.requests)}"
        if line not in told:
            console.print(line, markup=False)
        told.add(line)
        return per_s

    return capacity


def _speeds(fleet: Fleet) -> str:
    slow = sum(speed < 1 for speed in fleet.speeds)
    return f"{fleet.engines} engines" + (f", {slow} of them slowed" if slow else "")


def _groups(options: Options, trace: Trace, capacity: scenarios.Capacity) -> list[Group]:
    fleet = options.fleet
    groups = [scenarios.at_load(f"load {load:g}", trace, fleet, load, capacity) for load in options.loads]
    groups += [Group(title="fixed rate", trace=trace, fleet=fleet, rate=rate) for rate in options.rates]
    if options.disturbances:
        groups += scenarios.disturbances(trace, fleet, capacity)
    return groups


def _write(options: Options, tables: Sequence[Table], console: Console) -> None:
    writers: list[tuple[Path | None, Callable[[Path], Path]]] = [
        (options.json_file, lambda path: _write_json(path, options, tables)),
        (options.markdown_file, lambda path: _write_markdown(path, tables)),
        (options.plots, lambda path: _write_pages(path, options, tables)),
    ]
    for path, write in writers:
        if path is not None:
            console.print(f"wrote {write(path)}", markup=False)


def _write_json(path: Path, options: Options, tables: Sequence[Table]) -> Path:
    document: dict[str, Any] = {
        "pointsman": __version__,
        "command": options.command,
        "code": code_version(),
        "bounds": asdict(options.bounds),
        "tables": as_data(tables),
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _write_markdown(path: Path, tables: Sequence[Table]) -> Path:
    path.write_text(
        "\n\n".join(f"### {table.group.title}\n\n{as_markdown(table)}" for table in tables) + "\n", encoding="utf-8"
    )
    return path


def _write_pages(path: Path, options: Options, tables: Sequence[Table]) -> Path:
    from extproc.replay import pages  # matplotlib takes a second to import

    return pages.write(path, tables, options.bounds, options.command)
