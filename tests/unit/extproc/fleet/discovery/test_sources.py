"""Discovery: every pool's source is followed, and what it lists is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from extproc.config.loading import parse
from extproc.config.schema import Pool
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.sink import Sink
from extproc.fleet.discovery.sources import Discovery

HANG_S = 60


def put(file: Path, text: str) -> None:
    """Write the whole text at once; a write in place can be seen half done."""
    new = file.with_name("put-" + file.name)
    new.write_text(text)
    new.rename(file)


class House:
    """A discovery and what it reported."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()
        self.reads: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.failures: list[tuple[str, str]] = []
        self.states: list[tuple[int, bool]] = []
        self.could_not_read: list[str] = []
        self.discovery = Discovery(self._report, self, self.could_not_read.append)

    def _report(self, pool: str, endpoints: list[Discovered]) -> None:
        self.reports.put_nowait((pool, [endpoint.address for endpoint in endpoints]))

    def discovered(self, pool: str, *, ok: bool) -> None:
        """DiscoveryEvents."""
        self.reads.put_nowait((pool, ok))

    def discovery_failed(self, pool: str, reason: str) -> None:
        """DiscoveryEvents."""
        self.failures.append((pool, reason))

    def discovery_state(self, pool: str, *, endpoints: int, skipped: int, stale: bool) -> None:  # noqa: ARG002
        """DiscoveryEvents."""
        self.states.append((endpoints, stale))

    async def report(self) -> tuple[str, list[str]]:
        """The next report."""
        return await asyncio.wait_for(self.reports.get(), HANG_S)

    async def read(self) -> tuple[str, bool]:
        """The next read."""
        return await asyncio.wait_for(self.reads.get(), HANG_S)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A discovery that is closed afterwards."""
    house = House()
    yield house
    await house.discovery.close()


Pools = Callable[..., tuple[Pool, ...]]


@pytest.fixture
def pools(tmp_path: Path) -> Pools:
    """Pools by name and source; a source is a file name, or a list of addresses."""

    def make(**sources: str | list[str]) -> tuple[Pool, ...]:
        entries = [
            f"{{name: {name}, models: [{name}], endpoints: "
            + (f"{{static: {source}}}" if isinstance(source, list) else f"{{file: {tmp_path / source}}}")
            + "}"
            for name, source in sources.items()
        ]
        return parse(f"pools: [{', '.join(entries)}]").pools

    return make


async def test_a_static_list_is_reported_at_once(house: House, pools: Pools) -> None:
    """No task, no waiting."""
    house.discovery.configure(pools(p=["10.0.0.1:80"]))
    assert house.reports.get_nowait() == ("p", ["10.0.0.1:80"])
    assert house.reads.get_nowait() == ("p", True)


async def test_a_file_is_reported_whenever_its_list_changes(house: House, pools: Pools, tmp_path: Path) -> None:
    """The first list, then the next."""
    (tmp_path / "a.yaml").write_text("[10.0.0.1:80]")
    house.discovery.configure(pools(p="a.yaml"))
    assert await house.report() == ("p", ["10.0.0.1:80"])
    put(tmp_path / "a.yaml", "[10.0.0.1:80, 10.0.0.2:80]")
    assert await house.report() == ("p", ["10.0.0.1:80", "10.0.0.2:80"])


async def test_a_bad_file_keeps_the_last_good_list(house: House, pools: Pools, tmp_path: Path) -> None:
    """Counted as failed with a reason, stale and not reported; the next good one is."""
    file = tmp_path / "a.yaml"
    file.write_text("[10.0.0.1:80]")
    house.discovery.configure(pools(p="a.yaml"))
    assert await house.read() == ("p", True)
    put(file, "{broken")
    assert await house.read() == ("p", False)
    put(file, "[10.0.0.2:80]")
    assert await house.read() == ("p", True)
    assert [await house.report() for _ in range(2)] == [("p", ["10.0.0.1:80"]), ("p", ["10.0.0.2:80"])]
    assert house.reports.empty()
    assert house.failures == [("p", "bad_file")]
    assert house.could_not_read == []
    assert house.states == [(1, False), (1, True), (1, False)]


async def test_a_file_that_is_not_there_is_told_as_that(house: House, pools: Pools, tmp_path: Path) -> None:
    """Not as one that holds no list."""
    with capture_logs() as logs:
        house.discovery.configure(pools(p="gone.yaml"))
        assert await house.read() == ("p", False)
    assert [entry["error"] for entry in logs if "endpoints not read" in entry["event"]] == [
        f"{tmp_path / 'gone.yaml'}: there is no such file"
    ]
    assert house.could_not_read == ["p"]


async def test_an_unchanged_source_is_left_alone_by_a_reload(house: House, pools: Pools, tmp_path: Path) -> None:
    """Its task goes on; the new pool gets its own."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("[10.0.0.1:80]")
    house.discovery.configure(pools(p="a.yaml"))
    await house.report()
    task = house.discovery._tasks["p"][1]
    house.discovery.configure(pools(p="a.yaml", q="b.yaml"))
    assert house.discovery._tasks["p"][1] is task
    assert await house.report() == ("q", ["10.0.0.1:80"])


async def test_a_changed_source_replaces_the_old_one(house: House, pools: Pools, tmp_path: Path) -> None:
    """From one file to another, and from a file to a list; a removed pool is followed no more."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"[10.0.0.{ord(name)}:80]")
    house.discovery.configure(pools(p="a.yaml"))
    assert await house.report() == ("p", ["10.0.0.97:80"])
    house.discovery.configure(pools(p="b.yaml"))
    assert await house.report() == ("p", ["10.0.0.98:80"])
    house.discovery.configure(pools(p=["10.0.0.1:80"]))
    assert await house.report() == ("p", ["10.0.0.1:80"])
    assert house.discovery._tasks == {}


async def test_closing_ends_every_task(house: House, pools: Pools, tmp_path: Path) -> None:
    """Nothing is reported afterwards."""
    (tmp_path / "a.yaml").write_text("[10.0.0.1:80]")
    house.discovery.configure(pools(p="a.yaml"))
    await house.report()
    task = house.discovery._tasks["p"][1]
    await house.discovery.close()
    assert task.done()


def test_a_last_good_list_is_spoken_of_once_there_is_one(house: House) -> None:
    """Before that, nothing is kept, and to say so would calm where nothing is calm."""
    sink = Sink("p", lambda *_: None, house)
    with capture_logs() as logs:
        sink.failed("bad_file", "gone")
        sink.found(["10.0.0.1:80"])
        sink.failed("bad_file", "gone")
    assert [entry["event"] for entry in logs] == [
        "endpoints not read; there has been no list yet",
        "endpoints not read, keeping the last good list",
    ]
