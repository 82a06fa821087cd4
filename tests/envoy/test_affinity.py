"""Sessions stay with their cache, load stays even, a hot prefix spreads."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import pytest
from harness import HANG_GUARD_S, Engine, System, pool_of

SESSIONS, TURNS, AT_ONCE = 200, 5, 48
WORDS = ["switch", "signal", "rail", "sleeper", "ballast", "point", "frog", "lever", "lamp", "block", "token", "bell"]


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def _ask(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    """One streamed turn: (the endpoint that served, the answer's text)."""
    body = {"model": "sim", "messages": messages, "max_tokens": 40, "stream": True}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        text = ""
        async for line in answer.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        return answer.headers["x-pointsman-endpoint"], text


async def _sample_loads(system: System, loads: dict[str, list[int]], stop: asyncio.Event) -> None:
    while not stop.is_set():
        for address, count in (await asyncio.to_thread(system.in_flight)).items():
            loads[address].append(count)
        await asyncio.sleep(0.05)


class Sessions:
    """200 conversations of 5 turns; every second one shares the first half of its opening with three others."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.rng = Random(5)
        self.url = url
        self.client = client
        self.served: dict[int, list[str]] = defaultdict(list)
        self.room = asyncio.Semaphore(AT_ONCE)
        shared = [_text(self.rng, 300) for _ in range(SESSIONS // 8)]
        self.openings = [
            (shared[n // 8] if n % 2 else _text(self.rng, 300)) + " " + _text(self.rng, 300) for n in range(SESSIONS)
        ]

    async def run(self) -> None:
        """All sessions, started in an order that has nothing to do with their numbers."""
        order = list(range(SESSIONS))
        self.rng.shuffle(order)
        await asyncio.gather(*(self._converse(number) for number in order))

    async def _converse(self, number: int) -> None:
        messages = [{"role": "user", "content": self.openings[number]}]
        async with self.room:
            for turn in range(TURNS):
                endpoint, text = await _ask(self.client, self.url, messages)
                self.served[number].append(endpoint)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and then, {turn}?"}]
                await asyncio.sleep(self.rng.uniform(0.0, 0.05))

    def stayed(self) -> float:
        """Share of follow-up turns served by the endpoint of the turn before: it alone holds the whole history."""
        follow_ups = [(a, b) for turns in self.served.values() for a, b in pairwise(turns)]
        assert len(follow_ups) == SESSIONS * (TURNS - 1)
        return sum(a == b for a, b in follow_ups) / len(follow_ups)


@pytest.fixture
def fleet(make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]) -> System:
    """Four engines under the default policy."""
    engines = make_engines(4, "--speed", "1")
    system = make_system(pools=[pool_of(engines)])
    system.wait_pickable(*(engine.address for engine in engines))
    return system


async def test_follow_up_turns_go_to_the_holder_and_load_stays_even(fleet: System) -> None:
    """At least 95 % of follow-ups on the longest prefix's holder; mean load of the busiest under 1.5 x the mean."""
    loads: dict[str, list[int]] = defaultdict(list)
    stop = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        sessions = Sessions(fleet.url, client)
        sampler = asyncio.create_task(_sample_loads(fleet, loads, stop))
        async with asyncio.timeout(2 * HANG_GUARD_S):
            await sessions.run()
        stop.set()
        await sampler
    means = [sum(counts) / len(counts) for counts in loads.values()]
    report: dict[str, Any] = {"stayed": sessions.stayed(), "imbalance": max(means) / (sum(means) / 4), "means": means}
    print(report)
    assert len(means) == 4
    assert sum(means) > 8, "there must have been load to balance"
    assert report["stayed"] >= 0.95, report
    assert report["imbalance"] < 1.5, report
    matched = fleet.total("pointsman_prefix_matched_tokens_total")
    assert matched / fleet.total("pointsman_prefix_prompt_tokens_total") > 0.5


async def test_a_hot_prefix_spreads_once_its_holder_is_loaded(fleet: System) -> None:
    """300 requests with the same 8 KB before a tail of their own, 48 at a time: no engine serves over half."""
    rng = Random(9)
    hot = _text(rng, 1_400)[:8_192]
    room = asyncio.Semaphore(AT_ONCE)
    served: Counter[str] = Counter()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(number: int) -> None:
            async with room:
                endpoint, _ = await _ask(client, fleet.url, [{"role": "user", "content": f"{hot} {number}"}])
                served[endpoint] += 1

        await asyncio.gather(*(one(number) for number in range(300)))
    print(served)
    assert sum(served.values()) == 300
    assert max(served.values()) <= 150, served
