"""A simulated engine that pushes: found by its page, the same figures as there, a drain before the first refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio

from vllm_adapters.metrics import EngineFigures, parse_metrics
from vllm_adapters.pushed import Pushed, parse_pushed
from vllm_adapters.simulator import pushing
from vllm_adapters.simulator.faults import NONE, Faults
from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.server import SimulatedServer

OPTIONS = SimOptions(port=0, models=("tiny",), speed=1000, max_model_len=4096, stats_port=0)


class Ear:
    """Subscribes to an engine."""

    def __init__(self, server: SimulatedServer) -> None:
        self.server = server
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)

    async def page(self) -> EngineFigures:
        """The engine's."""
        async with aiohttp.ClientSession(self.server.url) as client, client.get("/metrics") as answer:
            return parse_metrics(await answer.read())

    async def listen(self) -> None:
        """Where its page says."""
        self._socket.connect(f"tcp://127.0.0.1:{(await self.page()).stats_port}")
        self._socket.subscribe(b"")

    async def next(self) -> Pushed:
        """The next message."""
        return parse_pushed(await asyncio.wait_for(self._socket.recv(), 30))

    def close(self) -> None:
        """Hear no more."""
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def ear(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ear]:
    """At a fast engine that pushes."""
    monkeypatch.setattr(pushing, "HOLD_S", 0.05)
    server = SimulatedServer(OPTIONS)
    await server.start()
    made = Ear(server)
    await made.listen()
    yield made
    made.close()
    await server.stop()


async def _ask(server: SimulatedServer) -> int:
    body: dict[str, Any] = {"model": "tiny", "prompt": "say something", "max_tokens": 4}
    async with aiohttp.ClientSession(server.url) as client, client.post("/v1/completions", json=body) as answer:
        return answer.status


async def test_what_is_pushed_is_what_the_page_says(ear: Ear) -> None:
    """Figure by figure, so that the two can take turns; and marked as the page says."""
    await ear.next()
    assert await _ask(ear.server) == 200
    while (pushed := await ear.next()).figures.generated_tokens != 4:
        pass
    page = await ear.page()
    assert pushed.run == page.stats_run
    assert pushed.server_port == ear.server.port
    told = replace(page, stats_port=None, stats_run=None, finished={"length": 1.0})
    assert pushed.figures == told


@pytest.mark.parametrize(
    ("path", "asks", "name"),
    [("/v1/completions", {"prompt": "say"}, "cmpl-mine-0"),
     ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say"}]}, "chatcmpl-mine")],
)  # fmt: skip
async def test_requests_that_have_ended_are_listed_as_vllm_names_them(
    ear: Ear, path: str, asks: dict[str, Any], name: str
) -> None:
    """Once each, with the tokens that their usage would tell."""
    body = {"model": "tiny", "max_tokens": 4, **asks}
    headers = {"x-request-id": "mine"}
    async with aiohttp.ClientSession(ear.server.url) as client, client.post(path, json=body, headers=headers) as answer:
        usage = (await answer.json())["usage"]
    while not (finished := (await ear.next()).finished):
        pass
    [one] = finished
    assert (one.request_id, one.reason) == (name, "length")
    assert (one.prompt, one.generated) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (await ear.next()).finished == ()


async def test_an_engine_without_a_stats_port_shows_none() -> None:
    """As vLLM without the plugin."""
    server = SimulatedServer(replace(OPTIONS, stats_port=None))
    await server.start()
    without = Ear(server)
    assert (await without.page()).stats_port is None
    without.close()
    await server.stop()


async def test_one_that_is_silent_lives_on(ear: Ear) -> None:
    """Its messages are counted and not sent: the gap shows when they come again."""
    first = await ear.next()
    ear.server.set_faults(Faults(silent_pushes=True))
    assert await _ask(ear.server) == 200
    ear.server.set_faults(NONE)
    while (pushed := await ear.next()).seq == first.seq:
        pass
    assert pushed.seq > first.seq


async def test_a_drain_is_told_before_anything_is_refused(ear: Ear) -> None:
    """And held for a moment in which requests are served."""
    await ear.next()
    stopping = asyncio.create_task(ear.server.stop(5))
    while (await ear.next()).phase != "draining":
        pass
    assert await _ask(ear.server) == 200
    await stopping
