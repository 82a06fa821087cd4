"""How long the decision loop is kept, by many endpoints and by large bodies, and what small requests notice of it.

    make bench-loop [ARGS='--seconds 30 --transport grpcio']

Small requests at random times: over two engines; over 256 of them; over two beside bodies of 4 MB, 6 per second; and
what memory a flood of compressed bodies leaves behind. Lateness is the loop's own figure, `own`: what our code kept it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import typer
from harness import System, chat, free_ports

from benchmarks.rig import LightEngines, cost, pids, prepare, system_over

_CHAT = "/v1/chat/completions"
_SMALL_PER_S, _LARGE_PER_S = 100.0, 6.0
_LARGE_BYTES = 4_000_000
_MANY = 256
_FLOOD, _AT_ONCE = 40, 20
_QUIET_S = 15.0


def _body(size: int) -> bytes:
    return json.dumps(chat("".join(f"word{number} " for number in range(size // 10)))).encode()


async def _arrivals(per_s: float, for_s: float, ask: Callable[[], Awaitable[None]]) -> None:
    """At random times, whether or not the ones before are done."""
    dice, due_s = random.Random(1), time.monotonic()
    until_s = due_s + for_s
    async with asyncio.TaskGroup() as tasks:
        while (due_s := due_s + dice.expovariate(per_s)) < until_s:
            await asyncio.sleep(due_s - time.monotonic())
            tasks.create_task(_as_coroutine(ask))


async def _as_coroutine(ask: Callable[[], Awaitable[None]]) -> None:
    await ask()


class Client:
    """Asks one system, and keeps how long small requests took, in ms."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._large = _body(_LARGE_BYTES)
        self._packed = gzip.compress(_body(25_000_000), 1)
        self.times_ms: list[float] = []

    async def small(self) -> None:
        """One of 2 KB."""
        began = time.perf_counter()
        await self._ask(_body(2_000))
        self.times_ms.append(1000 * (time.perf_counter() - began))

    async def large(self) -> None:
        """One of 4 MB."""
        await self._ask(self._large)

    async def packed(self) -> None:
        """One that inflates to 25 MB."""
        await self._ask(self._packed, **{"content-encoding": "gzip"})

    async def _ask(self, body: bytes, **headers: str) -> None:
        async with self._session.post(_CHAT, data=body, headers={"content-type": "application/json", **headers}) as it:
            await it.read()
            if it.status != 200:
                raise AssertionError(f"status {it.status}")


async def _measure(system: System, for_s: float, *, large: bool) -> list[float]:
    async with aiohttp.ClientSession(system.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session)
        await _arrivals(_SMALL_PER_S, 2.0, client.small)
        client.times_ms.clear()
        loads = [_arrivals(_SMALL_PER_S, for_s, client.small)]
        if large:
            loads.append(_arrivals(_LARGE_PER_S, for_s, client.large))
        await asyncio.gather(*loads)
        return client.times_ms


async def _flood(system: System) -> None:
    async with aiohttp.ClientSession(system.url, connector=aiohttp.TCPConnector(limit=_AT_ONCE)) as session:
        client = Client(session)
        await asyncio.gather(*(client.packed() for _ in range(_FLOOD)))


def _lag_buckets(system: System) -> dict[float, float]:
    """How often the loop was at most so late, through our own doing."""
    found = {}
    for sample, value in system.metrics().items():
        if sample.startswith("pointsman_loop_lag_seconds_bucket") and 'of="own"' in sample:
            end = sample.partition('le="')[2].partition('"')[0]
            found[float(end.replace("+Inf", "inf"))] = value
    return found


def _shares(before: dict[float, float], after: dict[float, float]) -> str:
    counts = {end: after[end] - before.get(end, 0) for end in after}
    total = counts[float("inf")]
    beyond = {f"{1000 * end:g} ms": 100 * (1 - counts[end] / total) for end in (0.002, 0.005, 0.01, 0.05)}
    return f"{total:.0f} looks; later than " + ", ".join(f"{end}: {share:.2f} %" for end, share in beyond.items())


def run(label: str, system: System, for_s: float, *, large: bool = False) -> None:
    """One row."""
    before = _lag_buckets(system)
    times = sorted(asyncio.run(_measure(system, for_s, large=large)))
    at = [times[min(len(times) - 1, int(len(times) * share))] for share in (0.5, 0.99)]
    lag = _shares(before, _lag_buckets(system))
    typer.echo(f"{label:28} small requests p50 {at[0]:6.2f} p99 {at[1]:7.1f} ms | loop: {lag}")


def flood(system: System) -> None:
    """Memory before, at its highest, and once it is quiet."""
    pid = pids(system)["decision"]
    before = cost(pid).rss_kb
    asyncio.run(_flood(system))
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    time.sleep(_QUIET_S)
    told = " -> ".join(f"{kb / 1024:.0f}" for kb in (before, peak, cost(pid).rss_kb))
    typer.echo(f"memory before, at its highest in, and {_QUIET_S:.0f} s after a flood of {_FLOOD} bodies: {told} MB")


def main(seconds: float = 30.0, transport: str = "lane") -> None:
    """Every load, one after the other."""
    prepare()
    typer.echo(f"by {transport}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        few, many = LightEngines(Path(name), free_ports(2), 1.0), LightEngines(Path(name), free_ports(_MANY), 1.0)
        try:
            with system_over(Path(name), transport, [few]) as system:
                run("2 endpoints", system, seconds)
                run("2 endpoints, 6/s of 4 MB", system, seconds, large=True)
                flood(system)
            with system_over(Path(name), transport, [many]) as system:
                run(f"{_MANY} endpoints", system, seconds)
        finally:
            few.kill()
            many.kill()


if __name__ == "__main__":
    typer.run(main)
