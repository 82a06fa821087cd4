"""Our count of requests in flight against the engines' own truth, under everything that can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import aiohttp
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

ROUNDS = 100
REQUESTS_PER_ROUND = 30
KILL_AT_ROUND = 40

FAULTS = {
    "reset": {"reset_before_headers": True},
    "busy": {"status": 503},
    "cut": {"cut_after_tokens": 3},
    "held": {"hold": 2},
}
MIX = ["plain"] * 8 + ["stream"] * 8 + ["held"] * 4 + ["abort"] * 4 + ["reset"] * 2 + ["busy", "cut", "bad", "unknown"]


@dataclass
class Load:
    """Clients of every kind. `steady` are held streams whose first bytes have come; `moving` all that may change."""

    system: System
    session: aiohttp.ClientSession
    rng: Random
    moving: set[asyncio.Task[None]] = field(default_factory=set)
    steady: set[asyncio.Task[None]] = field(default_factory=set)
    sent: int = 0

    def launch(self, kind: str) -> None:
        """Start one request of a kind."""
        self.sent += 1
        began = asyncio.Event()
        task = asyncio.create_task(self._request(kind, began))
        self.moving.add(task)
        task.add_done_callback(self.moving.discard)
        task.add_done_callback(self.steady.discard)
        if kind == "held":
            asyncio.create_task(self._settle(task, began)).add_done_callback(lambda _: None)

    async def _settle(self, task: asyncio.Task[None], began: asyncio.Event) -> None:
        await began.wait()
        if not task.done():
            self.moving.discard(task)
            self.steady.add(task)

    async def _request(self, kind: str, began: asyncio.Event) -> None:
        body = chat(f"{self.rng.random()} " * self.rng.randint(1, 60), stream=kind not in {"plain", "reset", "busy"})
        headers = {"x-sim-fault": json.dumps(FAULTS[kind])} if kind in FAULTS else {}
        if kind == "abort":
            headers = {"x-sim-fault": json.dumps(FAULTS["held"])}
        content = b"{" if kind == "bad" else json.dumps({**body, **({"model": "no"} if kind == "unknown" else {})})
        patience_s = self.rng.uniform(0, 0.08) if kind == "abort" else HANG_GUARD_S
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(patience_s):
                url = f"{self.system.url}/v1/chat/completions"
                async with self.session.post(url, data=content, headers=headers) as answer:
                    async for _ in answer.content.iter_any():
                        began.set()
        began.set()

    async def settled(self) -> None:
        """Until no request is under way but the held ones."""
        while self.moving:  # noqa: ASYNC110 - tasks leave the set by themselves
            await asyncio.sleep(0.005)

    def drop_some(self) -> None:
        """Some clients of held streams hang up."""
        for task in self.rng.sample(sorted(self.steady, key=id), len(self.steady) // 5):
            task.cancel()
            self.moving.add(task)


async def _agree(system: System, engines: list[Engine], dead: set[str]) -> dict[str, int]:
    """Wait until ours equals theirs on every endpoint; fails with both if it never does."""

    def truth() -> dict[str, int]:
        return {e.address: 0 if e.address in dead else e.state()["in_flight"] for e in engines}

    def both() -> tuple[dict[str, int], dict[str, int]]:
        return system.in_flight(), truth()

    loop = asyncio.get_running_loop()
    until = loop.time() + HANG_GUARD_S / 4
    while True:
        ours, theirs = await asyncio.to_thread(both)
        if ours == theirs:
            return ours
        assert loop.time() < until, f"in flight by our count {ours}, by the engines' {theirs}"
        await asyncio.sleep(0.02)


@pytest.mark.timeout(600)
async def test_three_thousand_mixed_requests_are_accounted_for(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """At 100 instants without arrivals our count per endpoint is the engines' own; at the end all is given back.

    Aborts, resets, cut streams, busy engines, bad bodies; from round 40 on one of four engines is dead and stays a
    first choice (probes are off the table), so that every fourth request fails over.
    """
    engines = make_engines(4, "--speed", "50")
    system = make_system(
        pools=[pool_of(engines)], probe={"interval_ms": 600_000, "failed_requests": 1_000_000, "timeout_ms": 30_000}
    )
    system.wait_pickable(*(engine.address for engine in engines))
    rng = Random(11)
    dead: set[str] = set()
    moved_in_flight = 0
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        load = Load(system, session, rng)
        for round_number in range(ROUNDS):
            if round_number == KILL_AT_ROUND:
                await asyncio.to_thread(engines[0].kill)
                dead.add(engines[0].address)
            for _ in range(REQUESTS_PER_ROUND):
                load.launch(rng.choice(MIX))
                await asyncio.sleep(rng.expovariate(1_000))
            await load.settled()
            counts = await _agree(system, engines, dead)
            assert sum(counts.values()) == len(load.steady)
            moved_in_flight += sum(counts.values())
            if rng.random() < 0.4:
                await asyncio.to_thread(rng.choice([e for e in engines if e.address not in dead]).release)
            load.drop_some()
        for engine in engines:
            if engine.address not in dead:
                await asyncio.to_thread(engine.release)
        await load.settled()

        while load.steady:  # noqa: ASYNC110 - same
            await asyncio.sleep(0.02)
    assert load.sent == ROUNDS * REQUESTS_PER_ROUND
    assert moved_in_flight > 10 * ROUNDS, "the instants compared must have had streams to compare"
    _assert_all_given_back(system)


def _assert_all_given_back(system: System) -> None:
    eventually(lambda: system.total("pointsman_requests_unsettled") == 0, "every request is settled or given up")
    metrics: Callable[..., float] = system.total
    assert set(system.in_flight().values()) == {0}
    assert metrics("pointsman_in_flight_prompt_tokens") == 0
    assert metrics("pointsman_ext_proc_streams_open") == 0
    opened, ended = (
        metrics("pointsman_ext_proc_streams_opened_total"),
        metrics("pointsman_ext_proc_streams_ended_total"),
    )
    assert opened == ended
    joined = metrics("pointsman_access_log_entries_total", 'kind="request"', 'result="joined"')
    missing = metrics("pointsman_access_log_missing_total")
    assert joined / (joined + missing) >= 0.999
    assert metrics("pointsman_requests_moved_total") > 100, "failovers must have happened"
    assert metrics("pointsman_malformed_messages_total") == 0
