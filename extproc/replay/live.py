"""A trace through the real thing: simulated engines, a real Envoy and Pointsman, one policy after the other.

What offline.py leaves out is here: HTTP, Envoy, scrapes that come late, tokens estimated from bytes, prefixes hashed
from text. So figures differ; the order of policies should not. Prompts are text that begins alike where the trace's
prompts do. Answers are the simulator's: a prompt that goes on where an answer of the trace ended finds none of it
cached.

`speed` makes engines, arrivals and the costs that policies are told run faster than the hardware's time; figures are
given in the hardware's time. What HTTP costs is then multiplied by `speed` as well, so it should stay small.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from extproc.config.sections.queueing import LONGEST_WAIT_S
from extproc.demo.processes import MODEL, Setting, System
from extproc.replay.comparison import Row, Table
from extproc.replay.entrants import Entrant
from extproc.replay.figures import Bounds, curves, figures, over_seeds, warmed_up
from extproc.replay.matrix import Result
from extproc.replay.offline import Fleet, Outcome, Run
from extproc.replay.scenarios import Group
from extproc.replay.traces import Trace, TraceRequest
from policies.admission.binding import BindingSpec
from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.policy import PolicySpec
from policies.placement.profiles import HARDWARE as PROFILES
from policies.placement.profiles import Profile
from vllm_adapters.simulator.text import TOKEN_BYTES

_PATIENCE_S = 600.0
"""A guard: an answer that takes longer counts as never given."""
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
_TAIL_BYTES = 2_000
"""Of a streamed answer: where its usage stands."""
_ENDLESS = 2**31 - 1
_ROOM = 1.05
"""What an engine's context must have above the longest request: the simulator counts a few tokens more."""


class Failed(Exception):
    """A request was not answered. The comparison would be worth nothing."""


def compare_live(
    group: Group,
    runners: Sequence[Entrant],
    seeds: Sequence[int],
    speed: float,
    bounds: Bounds,
    say: Callable[[str], None],
) -> Table:
    """One table, as of an offline comparison. Raises Failed, DidNotComeUp."""
    trace = group.trace.fitted(group.fleet.capacity_tokens)
    rows = []
    for runner in runners:
        results = []
        for seed in seeds:
            run = asyncio.run(_play(trace.at_rate(group.rate, seed), group.fleet, runner, speed))
            found = figures(run, bounds)
            say(f"{runner.name}, seed {seed}: mean TTFT {found.ttft_mean_s:.3f} s, goodput {found.goodput:.3f}")
            results.append(Result(found, curves(run), group.rate, run.ended_s / speed))
        rows.append(Row(runner.name, results, over_seeds([result.figures for result in results])))
    return Table(group, trace.ideal_hit_rate(warmed_up(len(trace.requests))), rows)


async def _play(trace: Trace, fleet: Fleet, runner: Entrant, speed: float) -> Run:
    longest = max(request.prompt_tokens + request.output_tokens for request in trace.requests)
    setting = Setting(fleet.engines, fleet.hardware, speed, fleet.capacity_tokens, int(longest * _ROOM))
    with tempfile.TemporaryDirectory(prefix="pointsman-replay-") as folder:
        pool, requests = _pool(runner, fleet, speed), len(trace.requests)
        async with System(Path(folder), runner.name, setting, pool=pool, decisions=requests) as system:
            player = _Player(trace, system, speed)
            await player.run()
            await player.ask_what_was_promised()
    return Run(trace, fleet, player.outcomes, max(one.ended_s for one in player.outcomes), 0)


def _pool(runner: Entrant, fleet: Fleet, speed: float) -> dict[str, Any]:
    """The policy, what it is told of the hardware, and how requests wait, in the faster time."""
    pool = {
        "policy": _plain(_hastened(runner.spec, speed)),
        "hardware": _plain(_hastened_profile(PROFILES[fleet.hardware], speed)),
        "kv_capacity_tokens": fleet.capacity_tokens,
    }
    return pool if runner.binding is None else {**pool, "queue": _queue(runner.binding, speed)}


def _queue(binding: BindingSpec, speed: float) -> dict[str, Any]:
    """A queue that refuses nobody: the comparison is of when and where requests go, not of how many are let in."""
    return {
        "classes": [{"name": "all", "places": _ENDLESS, "max_wait_s": LONGEST_WAIT_S}],
        "max_bytes": _ENDLESS,
        "late_binding": binding.late,
        "longest_detour_ms": _ms(binding.longest_detour_s / speed),
        "busy_ms": _ms(binding.room.busy_s / speed),
    }


def _ms(time_s: float) -> int:
    return max(1, round(time_s * 1000))


def _plain(section: PolicySpec | Profile) -> dict[str, Any]:
    """As a config file would have it."""
    fields = asdict(section)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _hastened(spec: PolicySpec, speed: float) -> PolicySpec:
    """Constants that are times of the hardware's pass faster with it."""
    if not isinstance(spec, MarginalCostSpec):
        return spec
    return replace(
        spec,
        eviction_fade_s=spec.eviction_fade_s / speed,
        overflow_s=spec.overflow_s / speed,
        affinity_band_s=spec.affinity_band_s / speed,
    )


def _hastened_profile(profile: Profile, speed: float) -> Profile:
    return replace(
        profile,
        prefill_tokens_per_s=profile.prefill_tokens_per_s * speed,
        sequence_s=profile.sequence_s / speed,
        kv_token_s=profile.kv_token_s / speed,
        decode_tokens_per_s=profile.decode_tokens_per_s * speed,
    )


class _Player:
    """Sends a trace's requests at their times. Outcomes are in the hardware's time."""

    def __init__(self, trace: Trace, system: System, speed: float) -> None:
        self.outcomes = [Outcome() for _ in trace.requests]
        self._trace = trace
        self._system = system
        self._url = f"http://{system.http}/v1/completions"
        self._engines = {endpoint: number for number, endpoint in enumerate(system.endpoints)}
        self._speed = speed
        self._ended = [asyncio.Event() for _ in trace.requests]
        self._ids = [""] * len(trace.requests)
        self._began_s = 0.0

    async def run(self) -> None:
        """All of them, to the last answer. Raises Failed."""
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            self._began_s = perf_counter()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number, request in enumerate(self._trace.requests):
                        tasks.create_task(self._send(client, number, request))
            except* (aiohttp.ClientError, TimeoutError) as errors:
                raise Failed(repr(errors.exceptions[0])) from errors

    async def ask_what_was_promised(self) -> None:
        """Complete the outcomes from the router's log of decisions, once the measuring is over. Raises Failed."""
        for number, request_id in enumerate(self._ids):
            try:
                promised = await self._system.matched_tokens(request_id)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Failed(f"the router does not tell its decisions: {error!r}") from error
            if promised is None:
                raise Failed(f"request {number}: the router does not remember its decision")
            self.outcomes[number].predicted_tokens = promised

    def _now_s(self) -> float:
        return (perf_counter() - self._began_s) * self._speed

    async def _send(self, client: aiohttp.ClientSession, number: int, request: TraceRequest) -> None:
        if request.after is None:
            await self._sleep_until(request.arrives_s)
        else:
            await self._ended[request.after].wait()
            await self._sleep_until(self.outcomes[request.after].ended_s + request.think_s)
        try:
            await self._ask(client, number, request)
        finally:
            self._ended[number].set()

    async def _sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, (time_s - self._now_s()) / self._speed))

    async def _ask(self, client: aiohttp.ClientSession, number: int, request: TraceRequest) -> None:
        outcome, body = self.outcomes[number], _body(request, number, self._trace.block_tokens)
        outcome.arrived_s = self._now_s()
        async with client.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise Failed(f"request {number}: {answer.status} {(await answer.text())[:300]}")
            outcome.engine = self._engines[answer.headers["x-pointsman-endpoint"]]
            self._ids[number] = answer.headers["x-pointsman-request-id"]
            tail = b""
            async for chunk in answer.content.iter_any():
                if outcome.first_token_s < 0:
                    outcome.first_token_s = self._now_s()
                tail = (tail + chunk)[-_TAIL_BYTES:]
        outcome.ended_s = self._now_s()
        cached = _CACHED.search(tail)
        outcome.cached_tokens = int(cached.group(1)) if cached else 0


def _body(request: TraceRequest, number: int, block_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": text_of(request, number, block_tokens),
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def text_of(request: TraceRequest, number: int, block_tokens: int) -> str:
    """The prompt as text of 4 bytes per token: equal blocks, equal text; what fills no block is the request's own."""
    size = block_tokens * TOKEN_BYTES
    parts = [_filled(f"{block:x} ", size) for block in request.blocks[: request.prompt_blocks]]
    rest = request.prompt_tokens * TOKEN_BYTES - size * len(parts)
    return "".join(parts) + _filled(f"request {number} ", rest)


def _filled(word: str, size: int) -> str:
    return (word * (size // len(word) + 1))[:size]
