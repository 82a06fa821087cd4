"""Latency as clients see it that do not wait for each other: both transports under Poisson arrivals.

    make bench-tail [ARGS='--rounds 5 --seconds 20']

First what `grpcio` can do: the median of three closed loops of 64 clients. Then arrivals at 30 % and 70 % of that, of
either transport in turns, in an order drawn anew each round. Latency counts from when a request was due; the table has
the medians of the rounds' quantiles. Bodies of 2 KB, sixteen constant engines (wire_rig.py). A 99.9th percentile of
some thousand requests is a handful of them, and on few cores it is the machine's more than ours.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict

import typer

from benchmarks.wire_rig import GRPCIO, LANE, Run, Way, measure, ways

_SHARES = (0.3, 0.7)
_CLIENTS, _REQUESTS = 64, 2_000
Runs = dict[tuple[float, str], list[Run]]


def capacity(way: Way) -> float:
    """Requests per second of a closed loop; the first one is for warming up."""
    closed = ("--connections", str(_CLIENTS), "--requests", str(_REQUESTS))
    return statistics.median([measure(way, *closed).per_s for _ in range(4)][1:])


def run(found: list[Way], most: float, rounds: int, seconds: float, dice: random.Random) -> Runs:
    """Every share over every way in every round."""
    results: Runs = defaultdict(list)
    for number in range(rounds):
        for share in _SHARES:
            for way in dice.sample(found, len(found)):
                rate = ("--per-second", str(share * most), "--seconds", str(seconds), "--seed", str(number))
                results[share, way.name].append(measure(way, "--connections", str(_CLIENTS), *rate))
    return results


def report(results: Runs, most: float) -> None:
    """A row for each share and way; `busy`: of a core, our decision process."""
    head = f"{'arrivals':>14} {'way':8} {'p50 ms':>8} {'p99 ms':>8} {'p99.9 ms':>9}"
    typer.echo(f"{head} {'busy':>6} {'requests':>9} {'failed':>7}")
    for (share, name), runs in sorted(results.items()):
        told = f"{100 * share:.0f} % = {share * most:.0f}/s"
        typer.echo(f"{told:>14} {name:8} {_row(runs)}")


def _row(runs: list[Run]) -> str:
    p50, p99, p999 = (statistics.median(getattr(one, name) for one in runs) for name in ("p50_ms", "p99_ms", "p999_ms"))
    busy = statistics.median(one.decider_us * one.per_s / 1e6 for one in runs)
    count, failed = sum(one.count for one in runs), sum(one.bad for one in runs)
    return f"{p50:8.2f} {p99:8.2f} {p999:9.2f} {busy:6.0%} {count:9} {failed:7}"


def main(rounds: int = 3, seconds: float = 12.0, seed: int = 1) -> None:
    """Start all, measure, print."""
    with ways() as found:
        both = [way for way in found if way.name in {GRPCIO, LANE}]
        for way in both:
            capacity(way)
        most = capacity(next(way for way in both if way.name == GRPCIO))
        typer.echo(f"grpcio's capacity: {most:.0f} requests/s; {rounds} rounds of {seconds:.0f} s\n")
        report(run(both, most, rounds, seconds, random.Random(seed)), most)


if __name__ == "__main__":
    typer.run(main)
