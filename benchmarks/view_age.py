"""How late a router learns what an engine does: pushed and scraped, side by side, from the same real vLLM.

    make bench-view [ARGS='--changes 300']

One vLLM on CPU with our stat-logger plugin, and two of our routers' views of it, each with a senses process of its own:
one listens, one only scrapes at the default interval. Requests come and go; each makes the number of running requests
change. When it really changed is written down inside the engine by a second, tiny stat logger (`PROBE`), so the figures
hold the whole way: plugin, wire, senses, the hop to the decision process, FleetState. Both views are of the same
changes at the same time, so a busy machine is equally hard on both.

A change that a view does not show before the next one comes is `missed`, and not among the delays.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import typer
from harness import free_ports  # of the tests over real engines, as is the next
from real_engines import Vllm, plugin

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.sections.watching import Scrape
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses.inbox import Inbox
from extproc.senses.link import Senses
from extproc.senses.messages import Target
from policies.fleet_state import FleetState

PROBE = '''
"""Writes down when the number of running requests changes, as the engine knows it."""
import os
import time

from vllm.v1.metrics.loggers import StatLoggerBase


class Probe(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.running = 0
        self.file = open(os.environ["VIEW_AGE_PROBE"], "a", buffering=1)

    def record(self, scheduler_stats, iteration_stats, *_, **__):
        if scheduler_stats is not None and scheduler_stats.num_running_reqs != self.running:
            self.running = scheduler_stats.num_running_reqs
            self.file.write(f"{time.time()!r} {self.running}\\n")

    def log_engine_initialized(self):
        pass
'''
_SETTLE_S = 1.0


@dataclass(frozen=True)
class Change:
    """The number of running requests is another from here on; Unix time."""

    at_s: float
    running: float


class View:
    """One router's view of the engine: a fleet and its senses."""

    def __init__(self, address: str, *, pushes: bool) -> None:
        scrape = f"scrape: {{pushes: {str(pushes).lower()}}}\n"
        config = parse(scrape + "pools: [{name: mid, models: [mid], endpoints: {file: no.yaml}}]")
        self.state = FleetState(max_endpoints=1)
        self.seen: list[Change] = []
        metrics, now_s = Metrics(), asyncio.get_running_loop().time
        self.fleet = Fleet(self.state, metrics, now_s)
        self.fleet.configure(Generation(1, config))
        self.fleet.set_endpoints("mid", [address])
        self.senses = Senses(Inbox(self.fleet, metrics, now_s), metrics, config)
        self.senses.start()
        self.senses.watch([Target(address)])
        self._recording = asyncio.create_task(self._record())

    async def _record(self) -> None:
        """Note when the fleet's view of the engine changes, to a millisecond."""
        while True:
            running = float(self.state.running[0])
            if not self.seen or self.seen[-1].running != running:
                self.seen.append(Change(time.time(), running))
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Look no more."""
        self._recording.cancel()
        await self.senses.close()

    @property
    def source(self) -> str:
        """Where its figures come from."""
        [told] = self.fleet.describe()
        return str(told["source"])


async def until_source(view: View, source: str) -> None:
    """It sees the engine."""
    async with asyncio.timeout(60):
        while view.source != source:  # noqa: ASYNC110 - what is waited for is another process's doing
            await asyncio.sleep(0.05)


async def load(url: str, requests: int, seed: int) -> None:
    """One request after the other, with pauses that have no rhythm a scrape could fall in step with."""
    dice = random.Random(seed)
    async with aiohttp.ClientSession() as client:
        for number in range(requests):
            body = {"model": "mid", "prompt": f"say {number}", "max_tokens": dice.randint(15, 40)}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            await asyncio.sleep(dice.uniform(0.3, 0.9))


def delays(changes: list[Change], seen: list[Change]) -> tuple[list[float], int]:
    """Seconds from each change to the view that shows it, and how many were never shown before the next."""
    found, missed = [], 0
    ends = [change.at_s for change in changes[1:]] + [float("inf")]
    for change, end_s in zip(changes, ends, strict=True):
        shown = [one.at_s for one in seen if change.at_s <= one.at_s < end_s and one.running == change.running]
        found += [at_s - change.at_s for at_s in shown[:1]]
        missed += not shown
    return found, missed


def write_probe(folder: Path) -> None:
    """A plugin as vLLM finds it: a module, and the metadata of a distribution."""
    (folder / "view_age_probe.py").write_text(PROBE)
    info = folder / "view_age_probe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: view-age-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nview_age = view_age_probe:Probe\n")


async def measure(server: Vllm, changes: int, seed: int) -> tuple[dict[str, list[Change]], float]:
    """The two views' records over so many changes, and when the load began."""
    views = {"push": View(server.address, pushes=True), "scrape": View(server.address, pushes=False)}
    try:
        for source, view in views.items():
            await until_source(view, source)
        await asyncio.sleep(_SETTLE_S)
        began_s = time.time()
        await load(f"http://{server.address}", changes // 2, seed)
        await asyncio.sleep(_SETTLE_S)
    finally:
        for view in views.values():
            await view.close()
    return {source: view.seen for source, view in views.items()}, began_s


def report(truth: list[Change], seen: dict[str, list[Change]]) -> None:
    """The table."""
    typer.echo(f"{'view':8} {'shown':>6} {'missed':>7} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    cuts = {}
    for source, changes in seen.items():
        found, missed = delays(truth, changes)
        of = cuts[source] = statistics.quantiles([1000 * one for one in found], n=100, method="inclusive")
        figures = " ".join(f"{figure:8.1f}" for figure in (of[49], of[89], of[98], 1000 * max(found)))
        typer.echo(f"{source:8} {len(found):6} {missed:7} {figures}")
    ratios = [cuts["scrape"][at] / cuts["push"][at] for at in (49, 98)]
    typer.echo(f"scraped over pushed: p50 {ratios[0]:.1f}, p99 {ratios[1]:.1f}")


def main(changes: int = 200, seed: int = 1) -> None:
    """Start the engine, measure, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_probe(folder)
        probe = folder / "changes.txt"
        environment = {"PYTHONPATH": f"{plugin()}:{folder}", "VIEW_AGE_PROBE": str(probe)}
        [port] = free_ports(1)
        server = Vllm(folder, port, "mid", **environment)
        try:
            server.wait_ready()
            version = server.get("/version").json()["version"]
            seen, began_s = asyncio.run(measure(server, changes, seed))
        finally:
            server.stop()
        lines = probe.read_text().splitlines()
    truth = [Change(float(at_s), float(running)) for at_s, running in map(str.split, lines)]
    interval_ms = Scrape().interval_ms
    typer.echo(f"vLLM {version} on CPU, model mid; a scrape every {interval_ms} ms, at most 50 pushes per second")
    report([change for change in truth if change.at_s >= began_s], seen)


if __name__ == "__main__":
    typer.run(main)
