"""The demo from start to end: two systems one after the other, the same sessions through each, the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from extproc.demo import screen
from extproc.demo.clients import play
from extproc.demo.figures import LoadSamples, Outcome, Report, hit_rate, report
from extproc.demo.processes import MODEL, DidNotComeUp, Setting, System
from extproc.demo.workload import Session, Shape, ideal_hit_rate, plan
from extproc.launcher import find_envoy
from vllm_adapters.simulator.engine import BLOCK_SIZE_TOKENS

_BASELINE, _OURS = "round-robin", "default"
_HARDWARE = "8b-l40s"
_SAMPLE_S = 0.1
FAILED_REQUESTS, DID_NOT_RUN, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0."""


@dataclass(frozen=True, slots=True)
class Demo:
    """What to run."""

    shape: Shape
    engines: int
    speed: float
    seed: int
    keep: bool

    @property
    def setting(self) -> Setting:
        """The engines: a cache that holds each its share of the sessions, and a context that fits in it."""
        capacity_tokens = self.shape.kv_capacity_tokens(self.engines)
        return Setting(self.engines, _HARDWARE, self.speed, capacity_tokens, 2 * self.shape.longest_tokens)


def run(demo: Demo) -> int:
    """Run it; the exit code. Raises NoEnvoy."""
    find_envoy()
    console = screen.make_console()
    try:
        return asyncio.run(_until_signal(demo, console))
    except DidNotComeUp as error:
        console.print(f"The system did not come up: {error}", markup=False)
        return DID_NOT_RUN
    except asyncio.CancelledError:
        console.print("Stopped.")
        return INTERRUPTED


async def _until_signal(demo: Demo, console: Console) -> int:
    """Run the demo as a task that SIGINT and SIGTERM cancel, so that everything stops in order."""
    task = asyncio.ensure_future(_run(demo, console))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


async def _run(demo: Demo, console: Console) -> int:
    sessions = plan(demo.shape, demo.seed)
    ideal = ideal_hit_rate(sessions, MODEL, demo.shape.answer_tokens, BLOCK_SIZE_TOKENS)
    console.print(describe(demo))
    with tempfile.TemporaryDirectory(prefix="pointsman-demo-") as folder:
        console.print(f"{_BASELINE}: starting engines and Pointsman")
        async with System(Path(folder), _BASELINE, demo.setting) as system:
            baseline = await _measure(demo, console, system, _BASELINE, sessions)
        console.print(f"{_OURS}: starting them afresh, with empty caches")
        async with System(Path(folder), _OURS, demo.setting) as system:
            ours = await _measure(demo, console, system, _OURS, sessions)
            screen.show_reports(console, [baseline, ours], ideal)
            await _next_steps(demo, console, system)
    return exit_code([baseline, ours])


def exit_code(reports: Sequence[Report]) -> int:
    """0 only if every request of every policy was answered."""
    return FAILED_REQUESTS if any(one.errors or not one.requests for one in reports) else 0


def describe(demo: Demo) -> str:
    """What runs, in words."""
    shape, setting = demo.shape, demo.setting
    return (
        f"{setting.engines} simulated engines ({setting.hardware} at {setting.speed:g} times its speed, "
        f"{setting.kv_capacity_tokens} tokens of KV cache each; no GPU, made-up text) behind a real Envoy.\n"
        f"{shape.sessions} sessions of {shape.turns} turns: {shape.sessions * shape.turns} requests per policy, "
        f"streamed; prompts of {shape.system_tokens + shape.document_tokens} tokens and growing, "
        f"{shape.apps} shared system prompts, seed {demo.seed}."
    )


async def _measure(demo: Demo, console: Console, system: System, policy: str, sessions: list[Session]) -> Report:
    outcomes: list[Outcome] = []
    load = LoadSamples()
    with screen.progress(console, policy, demo.shape.sessions * demo.shape.turns) as count:

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            count(outcome)

        sampler = asyncio.create_task(_sample(system, load))
        try:
            await play(sessions, f"http://{system.http}/v1", MODEL, demo.shape.answer_tokens, on_outcome)
        finally:
            sampler.cancel()
    figures = await system.engine_figures()
    hits = hit_rate((f.prefix_hits_tokens or 0, f.prefix_queries_tokens or 0) for f in figures)
    return report(policy, outcomes, hits, load.imbalance())


async def _sample(system: System, load: LoadSamples) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        # one sample that could not be had is no reason to spoil the run
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            load.add(clock(), await system.in_flight())
        await asyncio.sleep(_SAMPLE_S)


async def _next_steps(demo: Demo, console: Console, system: System) -> None:
    if not demo.keep:
        screen.show_next_steps(console, screen.DEFAULT_PLACE, running=False)
        return
    screen.show_next_steps(console, screen.Place(system.http, system.admin, system.endpoints[0]), running=True)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
