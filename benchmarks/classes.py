"""Two classes at three times what the engines can do, through a real Envoy: who waits, and for how long.

    make bench-classes [ARGS='--rounds 3']

Two simulated engines of eight places each, in front of them Envoy and Pointsman. What they can do is measured first.
Rounds, the kinds of load of each one after the other, so that a busy machine is equally hard on all of them:

- `alone`: a fifth of it, all real-time: the unloaded figure;
- `three times`: three times it, a fifth of that real-time, through the queue;
- `no queue`: the same load, every request sent on at once, so that they wait inside the engines;
- `both too many`: three times it again, half of each class, so that both wait all the time.

Shares are of dispatches, as `pointsman_queue_left_total` counts them: of `three times` from its first arrival to its
last, of `both too many` while both classes had somebody waiting.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import typer
from harness import Engine, System, free_ports, pool_of  # of the tests over a real Envoy

from benchmarks.open_loop import Answer, Load, Stream, quantiles_ms, statuses

_ENGINES, _PLACES = 2, 8
_RT, _BATCH = "real-time", "batch"
_MOST_WAIT_S = {_RT: 3.0, _BATCH: 6.0}
_CLASSES = [
    {"name": _RT, "weight": 7, "places": 100, "max_wait_s": _MOST_WAIT_S[_RT]},
    {"name": _BATCH, "weight": 3, "places": 200, "max_wait_s": _MOST_WAIT_S[_BATCH]},
]
_QUEUE = {"classes": _CLASSES, "endpoint_requests": _PLACES}
_CAPACITY_S = 6.0
_FILLS_S = 2.0
_SLACK_S = 1.0
"""What an answer may come late by: a look at the queue, and the machine."""


def stream(name: str, per_s: float) -> Stream:
    """Requests of a class."""
    return Stream(name, per_s, {"x-pointsman-priority": name})


@contextmanager
def system(engines: list[Engine], folder: Path, queue: dict[str, Any] | None) -> Iterator[System]:
    """Pointsman and Envoy over the engines."""
    folder.mkdir()
    pool = pool_of(engines, hardware="8b-l40s", **({"queue": queue} if queue else {}))
    made = System(folder, {"pools": [pool]})
    made.start()
    try:
        made.wait_pickable(*(engine.address for engine in engines))
        yield made
    finally:
        made.stop()


async def capacity_per_s(url: str) -> float:
    """Requests per second with twice as many under way as there are places; the first seconds do not count."""
    load, began_s = Load(url, 99), time.monotonic()
    counts_s, ends_s = began_s + _FILLS_S, began_s + _FILLS_S + _CAPACITY_S

    async def one_after_the_other(client: aiohttp.ClientSession) -> None:
        while time.monotonic() < ends_s:
            await load.ask(client, stream(_RT, 1.0))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(one_after_the_other(client) for _ in range(2 * _ENGINES * _PLACES)))
    ended = [one.asked_s + one.ended_s for one in load.answers]
    return sum(counts_s <= at_s < ends_s for at_s in ended) / _CAPACITY_S


def dispatched(to: System) -> dict[str, float]:
    """Requests that left the queue for an engine, by class."""
    return {
        name: sum(
            to.total("pointsman_queue_left_total", f'class="{name}"', f'how="{how}"') for how in ("bound", "detour")
        )
        for name in (_RT, _BATCH)
    }


@dataclass
class Outcome:
    """One kind of load in one round: the answers, and dispatches by class while it lasted."""

    answers: list[Answer]
    dispatches: dict[str, float]

    @property
    def share(self) -> float:
        """Of real-time, of the dispatches."""
        return self.dispatches[_RT] / max(1.0, sum(self.dispatches.values()))


async def play(to: System, streams: list[Stream], for_s: float, seed: int, *, skip_s: float = 0.0) -> Outcome:
    """Put the load on; dispatches count from `skip_s` on, to the last arrival."""
    at: list[dict[str, float]] = []

    async def look() -> None:
        for wait_s in (skip_s, for_s - skip_s):
            await asyncio.sleep(wait_s)
            at.append(await asyncio.to_thread(dispatched, to))

    answers, _ = await asyncio.gather(Load(to.url, seed).run(streams, for_s), look())
    return Outcome(answers, {name: at[1][name] - at[0][name] for name in at[0]})


Rounds = dict[str, list[Outcome]]


def measure(engines: list[Engine], folder: Path, rounds: int, for_s: float, seed: int) -> tuple[float, Rounds]:
    """What the engines can do per second, and every kind of load in every round."""
    found: Rounds = {"alone": [], "three times": [], "no queue": [], "both too many": []}
    with system(engines, folder / "with", _QUEUE) as waits, system(engines, folder / "without", None) as not_:
        can = asyncio.run(capacity_per_s(not_.url))
        typer.echo(f"{_ENGINES} engines of {_PLACES} places can do {can:.1f} requests per second")
        mostly_batch = [stream(_RT, 0.6 * can), stream(_BATCH, 2.4 * can)]
        both = [stream(_RT, 1.5 * can), stream(_BATCH, 1.5 * can)]
        for number in range(rounds):
            at = seed + 10 * number
            found["alone"].append(asyncio.run(play(waits, [stream(_RT, 0.2 * can)], for_s, at)))
            found["three times"].append(asyncio.run(play(waits, mostly_batch, for_s, at + 1)))
            found["no queue"].append(asyncio.run(play(not_, mostly_batch, for_s, at + 1)))
            found["both too many"].append(asyncio.run(play(waits, both, for_s, at + 2, skip_s=_FILLS_S)))
    return can, found


def report(found: Rounds) -> None:
    """The tables."""
    typer.echo(f"{'load':14} {'class':10} {'answered':>8} {'TTFT p50':>9} {'p95':>7} {'p99':>7} ms   statuses")
    for kind, outcomes in found.items():
        for name in (_RT, _BATCH):
            answers = [one for outcome in outcomes for one in outcome.answers if one.stream == name]
            if not answers:
                continue
            of = quantiles_ms(answers)
            times = " ".join(f"{of.get(share, 0):7.0f}" for share in ("p50", "p95", "p99"))
            typer.echo(f"{kind:14} {name:10} {of['count']:8.0f}   {times}      {statuses(answers)}")
    for kind in ("three times", "both too many"):
        shares = ", ".join(f"{100 * outcome.share:.1f}" for outcome in found[kind])
        typer.echo(f"{kind}: real-time's share of dispatches by round, %: {shares}")
    late = [
        one.waited_s - _MOST_WAIT_S[one.stream]
        for kind in ("three times", "both too many")
        for outcome in found[kind]
        for one in outcome.answers
        if one.ttft_s < 0
    ]
    typer.echo(f"turned away: {len(late)}, the last of them {max(late, default=0.0):+.2f} s from its limit")
    ratios = [ratio(outcomes, found["alone"]) for outcomes in (found["three times"], found["no queue"])]
    typer.echo(f"real-time's p50 over its unloaded one: {ratios[0]:.1f} with the queue, {ratios[1]:.0f} without")


def ratio(loaded: list[Outcome], unloaded: list[Outcome]) -> float:
    """Of real-time's median TTFT."""
    of = [
        quantiles_ms(one for outcome in outcomes for one in outcome.answers if one.stream == _RT)["p50"]
        for outcomes in (loaded, unloaded)
    ]
    return of[0] / of[1]


def main(rounds: int = 2, seconds: float = 12.0, seed: int = 1) -> None:
    """Start engines and both systems, measure, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = ("--max-num-seqs", str(_PLACES), "--hardware", "8b-l40s")
        engines = [Engine(folder / f"{port}.log", port, *places) for port in free_ports(_ENGINES)]
        try:
            for engine in engines:
                engine.wait_ready()
            _, found = measure(engines, folder, rounds, seconds, seed)
        finally:
            for engine in engines:
                engine.stop()
    report(found)


if __name__ == "__main__":
    typer.run(main)
