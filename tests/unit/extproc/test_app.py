"""The composition root: what a running system does again and again, and what only when something has changed."""

from __future__ import annotations

import asyncio

import pytest

from extproc import app as module
from extproc.app import App
from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.schema import Config
from extproc.config.sections.watching import Dcgm
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.fleet import Fleet
from extproc.senses.messages import Target
from extproc.senses.targets import targets_of

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def config(text: str = "") -> Config:
    """One pool of one endpoint."""
    return parse(f"{text}\npools: [{{name: p, models: [m], endpoints: {{static: ['{A}']}}}}]")


class House:
    """An app that has taken its config and serves nobody; `ordered`: what was to be watched, each time it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ordered: list[list[Target]] = []
        monkeypatch.setattr(module, "targets_of", self._targets_of)
        self.app = App(config())
        self.apply(config())

    def _targets_of(self, fleet: Fleet, dcgm: Dcgm | None) -> list[Target]:
        self.ordered.append(targets_of(fleet, dcgm))
        return self.ordered[-1]

    def apply(self, wanted: Config) -> None:
        """A new generation."""
        self.app._apply(Generation(self.app.generation.number + 1, wanted))

    def discover(self, *addresses: str) -> None:
        """What discovery lists now."""
        self.app._discovered("p", [Discovered(address) for address in addresses])

    @property
    def watched(self) -> list[str]:
        """As last ordered."""
        return sorted(target.address for target in self.ordered[-1])


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> House:
    """On a loop, as the app is made."""
    return House(monkeypatch)


async def test_ticks_do_not_make_out_anew_what_to_watch(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes milliseconds in a large fleet, during which nobody's request is decided."""
    monkeypatch.setattr(module, "_TICK_S", 0.0)
    ticked = asyncio.Event()

    class Health:
        ticks = 0

        async def set_serving(self, *, serving: bool) -> None:  # noqa: ARG002 - HealthServer
            self.ticks += 1
            if self.ticks == 5:
                ticked.set()

    house.app._health = Health()  # type: ignore[assignment]
    before = len(house.ordered)
    ticking = asyncio.create_task(house.app._tick())
    await ticked.wait()
    ticking.cancel()
    assert len(house.ordered) == before


async def test_whatever_changes_what_is_watched_is_ordered_at_once(house: House) -> None:
    """Endpoints that come and go, and a config; an endpoint whose grace is over is watched no more already."""
    assert house.watched == [A]
    house.discover(A, B)
    assert house.watched == [A, B]
    house.discover(B)
    assert house.watched == [B]
    house.app.fleet.tick()
    assert house.watched == sorted(house.app.fleet.addresses())
    house.apply(config("scrape: {dcgm: {port: 9400}}"))
    assert {target.exporter for target in house.ordered[-1]} == {"10.0.0.1:9400"}


async def test_a_large_fleet_is_scraped_more_slowly(house: House) -> None:
    """A thousand pages a second at most; figures are believed for as many of the intervals that come of it."""
    many = [f"10.1.{number // 250}.{number % 250}:8000" for number in range(1_024)]
    paces = []
    for addresses in ([A], many[:200], many, many[:500]):
        house.discover(*addresses)
        paces.append((house.app._senses._watch.pace.scrape_interval_ms, house.app.fleet.state.stale_after_s))
    assert paces == [(200, 0.6), (200, 0.6), (1_024, 3.072), (500, 1.5)]
    house.apply(config("scrape: {interval_ms: 700, stale_after_intervals: 2}"))
    house.discover(*many[:500])
    assert (house.app._senses._watch.pace.scrape_interval_ms, house.app.fleet.state.stale_after_s) == (700, 1.4)


async def test_who_is_not_ready_says_what_it_waits_for(house: House) -> None:
    """The pools by name; before anything is found, all of them."""
    pools = "{name: p, models: [m], endpoints: {static: []}}, {name: q, models: [n], endpoints: {file: /gone/q.yaml}}"
    wanted = parse(f"pools: [{pools}]")
    assert App(wanted).ready() == (False, "discovery has not reported for: p, q")
    assert house.app.ready() == (True, "")
    house.apply(wanted)
    assert house.app.ready() == (False, "discovery has not reported for: q")
    house.app._discovered("q", [])
    assert house.app.ready() == (True, "")
    await house.app._discovery.close()
