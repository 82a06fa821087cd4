"""An engine that pushes and has a page: which of the two is looked at, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from extproc.senses import push, watchers
from extproc.senses.messages import FellSilent, FromSenses, Heard, Pace, Scraped, Target, Tried, Watch
from extproc.senses.watchers import Watchers

HANG_S = 60
PAGE = 'vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\npointsman_stats_port{{run="a1"}} {port}.0\n'

PACE = Pace(
    scrape_interval_ms=5, scrape_timeout_ms=5_000, scrape_backoff_max_ms=5, probe_interval_ms=5_000,
    probe_timeout_ms=5_000, trial_timeout_ms=5_000,
)  # fmt: skip


async def eventually(check: Callable[[], bool]) -> None:
    """Until it holds."""
    async with asyncio.timeout(HANG_S):
        while not check():  # noqa: ASYNC110 - what is waited for is in many places
            await asyncio.sleep(0.001)


class House:
    """An engine with both, and somebody who watches it; a scrape every 5 ms."""

    def __init__(self) -> None:
        self.reports: list[FromSenses] = []
        self.pages = 0
        self.speaks = True
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.watchers = Watchers(self.reports.append)

    async def start(self) -> None:
        """Listen, and push."""
        app = web.Application()
        app.router.add_get("/metrics", self._page)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self.runner.addresses[0][1]}"
        self.pushing = asyncio.create_task(self._push())

    async def _page(self, _request: web.Request) -> web.Response:
        self.pages += 1
        return web.Response(text=PAGE.format(port=self.port))

    async def _push(self) -> None:
        seq = 0
        while True:
            seq += 1
            message = {"v": 1, "run": "a1", "seq": seq, "phase": "serving", "engines": [{"running": 7}]}
            if self.speaks:
                await self.socket.send(msgspec.msgpack.encode(message))
            await asyncio.sleep(0.005)

    def watch(self, **pace: Any) -> None:
        """Have it watched."""
        self.watchers.watch(Watch([Target(self.address)], msgspec.structs.replace(PACE, **pace)))

    def seen(self, kind: type[FromSenses]) -> list[Any]:
        """Reports of a kind."""
        return [report for report in self.reports if isinstance(report, kind)]

    async def close(self) -> None:
        """End all."""
        await self.watchers.close()
        self.pushing.cancel()
        await asyncio.gather(self.pushing, return_exceptions=True)
        await self.runner.cleanup()
        self.context.destroy(linger=0)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One that has started."""
    made = House()
    await made.start()
    yield made
    await made.close()


async def test_a_page_is_read_rarely_while_figures_are_pushed(house: House) -> None:
    """Once to find the port; the next one is far off."""
    house.watch()
    await eventually(lambda: len(house.seen(Heard)) > 5)
    pages, heard = house.pages, len(house.seen(Heard))
    await eventually(lambda: len(house.seen(Heard)) > heard + 20)
    assert house.pages <= pages + 1  # one may have been under way


async def test_the_pages_read_meanwhile_are_marked_as_spare(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are older than what is pushed."""
    monkeypatch.setattr(watchers, "_CHECK_S", 0.05)
    house.watch()
    await eventually(lambda: any(scraped.spare for scraped in house.seen(Scraped)))
    first = house.reports.index(next(scraped for scraped in house.seen(Scraped) if scraped.spare))
    await eventually(lambda: sum(scraped.spare for scraped in house.seen(Scraped)) > 3)
    assert all(report.spare for report in house.reports[first:] if isinstance(report, Scraped))


async def test_pages_are_read_again_at_once_when_pushes_stop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the full pace, and no longer spare."""
    monkeypatch.setattr(push, "SILENCE_S", 0.2)
    house.watch()
    await eventually(lambda: bool(house.seen(Heard)))
    house.speaks = False
    await eventually(lambda: bool(house.seen(FellSilent)))
    pages, reports = house.pages, len(house.reports)
    await eventually(lambda: house.pages > pages + 5)
    assert not any(report.spare for report in house.reports[reports:] if isinstance(report, Scraped))


async def test_pushes_can_be_left_aside(house: House) -> None:
    """`scrape.pushes: false`; taken back, they are heard."""
    house.watch(pushes=False)
    await eventually(lambda: house.pages > 10)
    assert house.seen(Heard) == []
    house.watch()
    await eventually(lambda: bool(house.seen(Heard)))


async def test_a_watcher_that_is_dropped_takes_its_word_back(house: House) -> None:
    """Nobody would say of another, or of none, that its pushes have stopped."""
    house.watch()
    await eventually(lambda: bool(house.seen(Heard)))
    house.watchers.watch(Watch([], PACE))
    assert house.seen(FellSilent) == [FellSilent(house.address)]


async def test_a_watcher_in_anothers_place_hears_anew(house: House) -> None:
    """As when the exporter is named or no more: silent, and then heard again by the one after it."""
    house.watch()
    await eventually(lambda: bool(house.seen(Heard)))
    house.watchers.watch(Watch([Target(house.address, exporter="127.0.0.1:1")], PACE))
    silent = house.reports.index(FellSilent(house.address))
    await eventually(lambda: any(isinstance(report, Heard) for report in house.reports[silent:]))


async def test_a_trial_that_nobody_waits_out_has_failed(house: House) -> None:
    """It is made again, and not first missed until its time is over; one that has ended is not told of twice."""
    house.watch()
    house.watchers.try_generation(house.address, "m")
    house.watchers.watch(Watch([], PACE))
    assert house.seen(Tried) == [Tried(house.address, None)]
    house.watch()
    house.watchers.try_generation(house.address, "m")
    await eventually(lambda: len(house.seen(Tried)) == 2)
    house.watchers.watch(Watch([], PACE))
    assert len(house.seen(Tried)) == 2
