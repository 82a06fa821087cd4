"""What a decision costs on the wire: CPU of ours and of Envoy per request, throughput, p50 and p99.

    make bench-overhead [ARGS='--rounds 5']

Four ways to sixteen constant engines (wire_rig.py), five kinds of load, each way once in each round in an order drawn
anew. Half as many requests come first and are not counted, so that what one load leaves in the prefix index is not the
next one's to evict: a prompt of 512 KB takes the place of 240 of 2 KB, with 2,000 blocks. Absolute figures of one way
differ between rounds by half as much again on a shared machine, so what counts are ratios: of a way to `no-op` (our
CPU) or to `no ext_proc` (Envoy's) in the same round, and of those the median. Our CPU is that of the decision process,
the access log's part of it included; what it takes when idle, watching sixteen engines, is told apart.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import typer

from benchmarks.wire_rig import ENGINES, GRPCIO, LANE, NO_EXT_PROC, NO_OP, Run, Way, measure, ways


@dataclass(frozen=True)
class Load:
    """So many clients with bodies of one size, and how many requests make a run."""

    body_bytes: int
    clients: int
    requests: int

    def __str__(self) -> str:
        return f"{self.body_bytes // 1000} KB, c={self.clients}"

    @property
    def options(self) -> tuple[str, ...]:
        """For the load generator."""
        return self._options(self.requests)

    @property
    def settling(self) -> tuple[str, ...]:
        """The same for what comes first."""
        return self._options(self.requests // 2)

    def _options(self, requests: int) -> tuple[str, ...]:
        told = {"connections": self.clients, "requests": requests, "body-bytes": self.body_bytes}
        return tuple(part for name, value in told.items() for part in (f"--{name}", str(value)))


_SMALL, _MEDIUM, _LARGE = 2_000, 64_000, 512_000
LOADS = (
    Load(_SMALL, 1, 400),
    Load(_SMALL, 16, 1_500),
    Load(_SMALL, 64, 1_500),
    Load(_MEDIUM, 16, 800),
    Load(_LARGE, 8, 160),
)
_BUDGETS = {
    (GRPCIO, _SMALL): 1.9,
    (GRPCIO, _MEDIUM): 2.4,
    (LANE, _SMALL): 0.30,
    (LANE, _MEDIUM): 0.75,
    (LANE, _LARGE): 1.1,
}
"""Of our CPU, to that of `no-op`; judged where requests come together (c > 1)."""

Rounds = dict[Load, list[dict[str, Run]]]


def run(found: list[Way], rounds: int, dice: random.Random) -> Rounds:
    """Every way under every load in every round; first each once for nothing, to warm up."""
    for way in found:
        for size in (_SMALL, _MEDIUM, _LARGE):
            measure(way, *Load(size, 16, 100).options)
    results: Rounds = defaultdict(list)
    for _ in range(rounds):
        for load in LOADS:
            order = dice.sample(found, len(found))
            results[load].append({way.name: _settled(way, load) for way in order})
    return results


def _settled(way: Way, load: Load) -> Run:
    measure(way, *load.settling)
    return measure(way, *load.options)


def ratio(rounds: list[dict[str, Run]], of: Callable[[Run], float], name: str, base: str) -> float:
    """The median over rounds of one way's figure to another's."""
    return statistics.median(of(one[name]) / of(one[base]) for one in rounds)


def report(results: Rounds, names: list[str]) -> None:
    """A row for every load and way."""
    head = f"{'load':15} {'way':12} {'our us':>8} {'to no-op':>9} {'Envoy us':>9} {'to none':>8}"
    typer.echo(f"{head} {'req/s':>7} {'p50 ms':>7} {'p99 ms':>7} {'failed':>7}")
    for load, rounds in results.items():
        for name in names:
            typer.echo(_row(load, rounds, name))


def _row(load: Load, rounds: list[dict[str, Run]], name: str) -> str:
    own = [one[name] for one in rounds]

    def middle(of: Callable[[Run], float]) -> float:
        return statistics.median(of(one) for one in own)

    ours = f"{middle(_decider):8.0f} {ratio(rounds, _decider, name, NO_OP):8.2f}x"
    envoy = f"{middle(_envoy):9.0f} {ratio(rounds, _envoy, name, NO_EXT_PROC):7.2f}x"
    times = f"{middle(lambda one: one.p50_ms):7.2f} {middle(lambda one: one.p99_ms):7.2f}"
    failed = sum(one.bad for one in own)
    return (
        f"{load!s:15} {name:12} {ours if name != NO_EXT_PROC else '':18} {envoy} "
        f"{middle(lambda one: one.per_s):7.0f} {times} {failed:7}"
    )


def _decider(run: Run) -> float:
    return run.decider_us


def _envoy(run: Run) -> float:
    return run.envoy_us


def judge(results: Rounds) -> bool:
    """A line for every budget; whether all hold."""
    kept = True
    for (name, size), most in _BUDGETS.items():
        for load, rounds in results.items():
            if load.body_bytes != size or load.clients == 1:
                continue
            found = ratio(rounds, _decider, name, NO_OP)
            kept &= found <= most
            typer.echo(
                f"budget {name:7} {load!s:14} {found:.2f}x of at most {most}x: {'kept' if found <= most else 'MISSED'}"
            )
    return kept


def main(rounds: int = 9, seed: int = 1) -> None:
    """Start all, measure, print; ends with 1 if a budget is missed."""
    with ways() as found:
        typer.echo(
            f"{rounds} rounds, {ENGINES} engines, Envoy with one thread; medians, and medians of ratios by round"
        )
        for way in found:
            if way.decider is not None:
                typer.echo(f"{way.name}: {way.idle_share:.1%} of a core without any request, not counted below")
        results = run(found, rounds, random.Random(seed))
        report(results, [way.name for way in found])
    if not judge(results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
