"""The link: the senses as a process, from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from typing import Any

import pytest
from aiohttp import web

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses import link as module
from extproc.senses.inbox import Inbox
from extproc.senses.link import Senses
from extproc.senses.messages import Alive, Target, encode
from policies.fleet_state import FleetState
from policies.lifecycle import State

HANG_S = 60
PAGE = "vllm:num_requests_running {}\nvllm:num_requests_waiting 2.0\n"


async def eventually(check: Callable[[], bool]) -> None:
    """Until it holds."""
    async with asyncio.timeout(HANG_S):
        while not check():  # noqa: ASYNC110 - what is waited for is another process's doing
            await asyncio.sleep(0.005)


class House:
    """A fleet of one engine, and the senses that watch it."""

    def __init__(self) -> None:
        self.up: list[bool] = []
        self.losses = 0
        self.running = 3
        self.state = FleetState()
        metrics = Metrics()
        self.fleet = Fleet(self.state, metrics, asyncio.get_running_loop().time)
        text = "probe: {interval_ms: 20}\nscrape: {interval_ms: 20}\n"
        config = parse(text + "pools: [{name: p, models: [m], endpoints: {file: none.yaml}}]")
        self.fleet.configure(Generation(1, config))
        self.inbox = Inbox(self.fleet, metrics, asyncio.get_running_loop().time)
        self.senses = Senses(self.inbox, self, config)

    def senses_up(self, *, up: bool) -> None:
        """LinkEvents."""
        self.up.append(up)

    def senses_lost(self) -> None:
        """LinkEvents."""
        self.losses += 1

    def senses_dropped(self, reports: int) -> None:
        """LinkEvents."""

    async def start(self) -> None:
        """An engine, listed; and senses to watch it."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{self.runner.addresses[0][1]}"
        self.fleet.set_endpoints("p", [address])
        self.senses.start()
        self.senses.watch([Target(address)])

    async def _answer(self, request: web.Request) -> web.Response:
        answers = {"/v1/models": '{"data": [{"id": "m"}]}', "/metrics": PAGE.format(self.running)}
        return web.Response(text=answers.get(request.path, "{}"))

    async def until_seen(self, running: int) -> None:
        """The engine's load is known."""
        self.running = running
        await eventually(lambda: self.state.running[0] == running)

    async def process(self) -> int:
        """The process that watches now."""
        await eventually(lambda: bool(self.up) and self.up[-1])
        assert self.senses.pid is not None
        return self.senses.pid


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Watching, until the test is over."""
    house = House()
    await house.start()
    yield house
    await house.senses.close()
    await house.runner.cleanup()


async def test_an_engine_is_watched_from_another_process(house: House) -> None:
    """Its models, a trial and its figures come over the socket."""
    await eventually(lambda: house.state.state[0] == State.READY)
    await house.until_seen(5)
    assert await house.process() != os.getpid()


async def test_senses_that_are_killed_are_started_again(house: House) -> None:
    """They watch what the ones before watched; meanwhile they count as down."""
    await house.until_seen(5)
    killed = await house.process()
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: house.losses == 1)
    assert house.up[-1] is False
    await house.until_seen(6)
    assert await house.process() != killed


async def test_senses_that_hang_are_killed_and_started_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process says nothing; its heartbeat is what is missed."""
    await house.until_seen(5)
    hung = await house.process()
    monkeypatch.setattr(module, "_HANGS_AFTER_S", 3.0)
    monkeypatch.setattr(module, "_STOP_GRACE_S", 0.1)
    os.kill(hung, signal.SIGSTOP)
    await eventually(lambda: house.losses == 1)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    await house.until_seen(7)


class Line:
    """Our end of a socket whose other end is in the test's hand; `silence`: runs until it is believed.

    `taken`: reports, and what a test puts between them.
    """

    async def open(self) -> Line:
        """Connect it."""
        ours, self.theirs = socket.socketpair()
        self.taken: list[object] = []
        loop = asyncio.get_running_loop()
        self.transport, self.line = await loop.create_unix_connection(
            lambda: module._Line(self.taken.append), sock=ours
        )
        self.silence = asyncio.create_task(self.line.until_silent())
        await asyncio.sleep(0)
        return self

    def close(self) -> None:
        """Hang up."""
        self.silence.cancel()
        self.transport.abort()
        self.theirs.close()


async def test_senses_are_not_silent_because_we_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a SIGSTOP our own timers are due at once; what they sent meanwhile is there, but not read yet."""
    monkeypatch.setattr(module, "_HANGS_AFTER_S", 0.05)
    line = await Line().open()
    line.theirs.send(encode(Alive()))
    time.sleep(0.1)  # noqa: ASYNC251 - we stand still
    monkeypatch.setattr(module, "_HANGS_AFTER_S", 60.0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not line.silence.done()
    line.close()


async def test_senses_that_stood_still_with_us_get_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept: nothing waits to be read, but they go on as we do."""
    monkeypatch.setattr(module, "_HANGS_AFTER_S", 0.0)
    monkeypatch.setattr(module, "_SECOND_LOOK_S", 60.0)
    line = await Line().open()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not line.silence.done()
    line.close()


async def test_senses_that_say_nothing_at_the_second_look_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment passes too."""
    monkeypatch.setattr(module, "_HANGS_AFTER_S", 0.01)
    monkeypatch.setattr(module, "_SECOND_LOOK_S", 0.01)
    line = await Line().open()
    async with asyncio.timeout(HANG_S):
        await line.silence
    line.close()


async def test_many_reports_at_once_let_requests_between_them() -> None:
    """What came in one read is taken over several turns of the loop, in order; what comes later waits in the socket."""
    line = await Line().open()
    line.theirs.send(b"".join(encode(Alive(number)) for number in range(100)))
    while Alive(99) not in line.taken:
        line.taken.append(None)
        await asyncio.sleep(0)
    line.theirs.send(encode(Alive(100)))
    await eventually(lambda: line.taken[-1] == Alive(100))
    runs = [len(list(run)) for idle, run in groupby(line.taken, lambda taken: taken is None) if not idle]
    assert max(runs) <= 100 // module._SHARE_AT_ONCE
    assert min(runs[:-2]) >= module._TAKEN_AT_ONCE
    assert [taken for taken in line.taken if taken is not None] == [Alive(number) for number in range(101)]
    line.close()


async def test_nothing_is_taken_of_senses_that_were_given_up() -> None:
    """What of theirs still waits is about a fleet that was forgotten with them."""
    line = await Line().open()
    line.theirs.send(b"".join(encode(Alive(number)) for number in range(100)))
    while not line.taken:  # noqa: ASYNC110 - a turn at a time, or all are taken
        await asyncio.sleep(0)
    line.line.close()
    before = len(line.taken)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(line.taken) == before < 100
    line.close()


async def test_closing_leaves_no_process(house: House) -> None:
    """And counts as no loss."""
    running = await house.process()
    await house.senses.close()
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)
    assert house.losses == 0


async def test_a_report_that_trips_us_ends_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, and the next one is taken."""
    await house.until_seen(5)
    tripped: list[int] = []

    class Broken:
        """Compiled, a fleet's own methods cannot be replaced."""

        def __getattr__(self, name: str) -> Any:
            if name != "scraped":
                return getattr(house.fleet, name)
            tripped.append(1)
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(house.inbox, "_fleet", Broken())
        await eventually(lambda: len(tripped) > 1)
    await house.until_seen(6)
    assert house.losses == 0
