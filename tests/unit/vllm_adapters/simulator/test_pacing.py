from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from vllm_adapters.simulator.engine import Engine
from vllm_adapters.simulator.pacing import PacedEngine


@contextlib.asynccontextmanager
async def running(speed: float) -> AsyncIterator[PacedEngine]:
    """A paced engine with its task."""
    paced = PacedEngine(Engine(), speed)
    task = asyncio.create_task(paced.run())
    try:
        yield paced
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("speed", [5.0, 1e9])
async def test_tokens_arrive_in_order_to_the_last(speed: float) -> None:
    """Whether slower or faster than asyncio can sleep, waiting ends with every token there."""
    async with running(speed) as paced:
        ticket = paced.submit((), 100, 200)
        seen = [0]
        while not ticket.done:
            seen.append(await ticket.more(seen[-1]))
        assert seen == sorted(set(seen))
        assert seen[-1] == 200
        assert paced.engine.running == 0


async def test_an_idle_engine_wakes_for_the_next_request() -> None:
    """After the work has run out, new work starts again."""
    async with running(1e6) as paced:
        for _ in range(3):
            ticket = paced.submit((), 10, 5)
            while not ticket.done:
                await ticket.more(ticket.produced)
            for _ in range(5):
                await asyncio.sleep(0)
        assert paced.engine.generation_tokens_total == 15


async def test_frozen_time_brings_no_tokens() -> None:
    """While it stands still nothing is produced; afterwards it goes on."""
    async with running(1e6) as paced:
        paced.moving.clear()
        ticket = paced.submit((), 10, 5)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert ticket.produced == 0
        paced.moving.set()
        while not ticket.done:
            await ticket.more(ticket.produced)
        assert ticket.produced == 5


async def test_cancelling_everything_wakes_those_who_wait() -> None:
    """They get what there is, and the engine is empty."""
    async with running(1e-3) as paced:
        ticket = paced.submit((), 10, 5)
        waiting = asyncio.create_task(ticket.more(0))
        await asyncio.sleep(0.01)
        paced.cancel_all()
        assert await waiting == 0
        assert (ticket.done, paced.engine.running) == (True, 0)
