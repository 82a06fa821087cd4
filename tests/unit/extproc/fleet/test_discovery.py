"""Discovery: lists of endpoints from text, and files that are followed through every way of replacing them."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import watchfiles

from extproc.config.loading import parse
from extproc.config.schema import Pool
from extproc.fleet import discovery
from extproc.fleet.discovery import BadEndpoints, Discovery, follow_file, follow_parsed, parse_endpoints

HANG_S = 60


# -- text


@pytest.mark.parametrize(
    "text",
    [
        "- 10.0.0.1:80\n- '[::1]:81'\n",
        '["10.0.0.1:80", "[::1]:81"]',
        '{"endpoints": ["10.0.0.1:80", "[::1]:81"], "comment": "ours"}',
        "endpoints:\n  - 10.0.0.1:80\n  - '[::1]:81'\n",
    ],
    ids=["yaml", "json", "json mapping", "yaml mapping"],
)
def test_a_list_is_read_from_yaml_and_json(text: str) -> None:
    """Bare, or under `endpoints` beside whatever else a file may hold."""
    assert parse_endpoints(text) == ["10.0.0.1:80", "[::1]:81"]


def test_an_address_listed_twice_counts_once() -> None:
    """Its first place is kept: a file made by a script may repeat itself."""
    assert parse_endpoints("[10.0.0.2:80, 10.0.0.1:80, 10.0.0.2:80]") == ["10.0.0.2:80", "10.0.0.1:80"]


def test_an_empty_list_is_a_list() -> None:
    """Scaled to zero on purpose."""
    assert parse_endpoints("[]") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "expected a list"),
        ("{", "not YAML or JSON"),
        ("[" * 100_000, "not YAML or JSON"),
        ("- " * 100_000, "not YAML or JSON"),
        ("10.0.0.1:80", "expected a list"),
        ("{hosts: [10.0.0.1:80]}", "expected a list"),
        ("{endpoints: 10.0.0.1:80}", "expected a list"),
        ("[17]", "expected a list"),
        ("[{address: 10.0.0.1:80}]", "expected a list"),
        ("[engine:80]", "is not IP:port"),
        ("[10.0.0.1]", "is not IP:port"),
        ("[10.0.0.1:0]", "port outside 1-65535"),
        ("[10.0.0.1:80, 10.0.0.256:80]", "10.0.0.256:80' is not IP:port"),
    ],
)
def test_anything_else_is_refused_in_words(text: str | None, message: str) -> None:
    """An empty or half-written file must not read as an empty fleet."""
    with pytest.raises(BadEndpoints, match=message):
        parse_endpoints(text)


# -- files


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again soon where a change fell between reading and watching, or the folder is not there."""
    monkeypatch.setattr(watchfiles, "awatch", functools.partial(watchfiles.awatch, rust_timeout=200))
    monkeypatch.setattr(discovery, "_RETRY_S", 0.02)


def put(file: Path, text: str) -> None:
    """Write the whole text at once; a write in place can be seen half done."""
    new = file.with_name("put-" + file.name)
    new.write_text(text)
    new.rename(file)


class Follower:
    """A file being followed and what was told of it."""

    def __init__(self) -> None:
        self.texts: asyncio.Queue[str | None] = asyncio.Queue()

    async def next(self) -> str | None:
        """The next text told."""
        return await asyncio.wait_for(self.texts.get(), HANG_S)


@asynccontextmanager
async def following(file: Path) -> AsyncIterator[Follower]:
    """Follow `file` for as long as the block lasts."""
    follower = Follower()
    task = asyncio.create_task(follow_file(file, follower.texts.put_nowait))
    try:
        yield follower
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_is_told_at_once_and_when_it_changes(tmp_path: Path) -> None:
    """Rewritten in place."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("one")
    async with following(file) as follower:
        assert await follower.next() == "one"
        file.write_text("two")
        while await follower.next() != "two":
            pass  # seen half written


async def test_a_file_replaced_by_rename_is_followed(tmp_path: Path) -> None:
    """The careful way to write: another file takes its name."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("one")
    async with following(file) as follower:
        assert await follower.next() == "one"
        for text in ("two", "three"):
            put(file, text)
            assert await follower.next() == text


async def test_a_config_map_is_followed_through_its_symlinks(tmp_path: Path) -> None:
    """Kubernetes: file -> ..data/file, ..data -> ..<time>, and an update swaps `..data`."""
    for name, text in (("..v1", "one"), ("..v2", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "endpoints.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..v1")
    file = tmp_path / "endpoints.yaml"
    file.symlink_to("..data/endpoints.yaml")
    async with following(file) as follower:
        assert await follower.next() == "one"
        (tmp_path / "..data_tmp").symlink_to("..v2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert await follower.next() == "two"


async def test_a_missing_file_is_told_as_none_and_read_when_it_comes(tmp_path: Path) -> None:
    """And as None again when it is deleted."""
    file = tmp_path / "endpoints.yaml"
    async with following(file) as follower:
        assert await follower.next() is None
        put(file, "here")
        assert await follower.next() == "here"
        file.unlink()
        assert await follower.next() is None


async def test_a_missing_folder_is_waited_for(tmp_path: Path) -> None:
    """A volume that is mounted later."""
    file = tmp_path / "mount" / "endpoints.yaml"
    async with following(file) as follower:
        assert await follower.next() is None
        (tmp_path / "staged").mkdir()
        (tmp_path / "staged" / "endpoints.yaml").write_text("here")
        (tmp_path / "staged").rename(tmp_path / "mount")
        assert await follower.next() == "here"


async def test_a_neighbours_change_is_not_told(tmp_path: Path) -> None:
    """Only the file's own text counts, and only when it differs."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("one")
    async with following(file) as follower:
        assert await follower.next() == "one"
        (tmp_path / "other").write_text("noise")
        put(file, "one")
        put(file, "two")
        assert await follower.next() == "two"
        assert follower.texts.empty()


async def test_bytes_that_are_no_text_are_told_as_none(tmp_path: Path) -> None:
    """As a file that cannot be read."""
    file = tmp_path / "endpoints.yaml"
    file.write_bytes(b"\xff\xfe")
    async with following(file) as follower:
        assert await follower.next() is None


async def test_a_listener_that_fails_misses_one_change_only(tmp_path: Path) -> None:
    """The file is followed on: the next change is told."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("one")
    texts: asyncio.Queue[str | None] = asyncio.Queue()

    def take(text: str | None) -> None:
        texts.put_nowait(text)
        if text == "one":
            raise ZeroDivisionError

    task = asyncio.create_task(follow_file(file, take))
    assert await asyncio.wait_for(texts.get(), HANG_S) == "one"
    put(file, "two")
    assert await asyncio.wait_for(texts.get(), HANG_S) == "two"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_file_is_parsed_in_another_thread(tmp_path: Path) -> None:
    """A large one takes longer than decisions can wait; what comes of it is told in the loop's own."""
    (tmp_path / "endpoints.yaml").write_text("one")
    told: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    def parse(text: str | None) -> tuple[str, bool]:
        return f"parsed {text}", threading.current_thread() is threading.main_thread()

    def take(parsed: tuple[str, bool]) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.put_nowait(parsed)

    task = asyncio.create_task(follow_parsed(tmp_path / "endpoints.yaml", parse, take))
    assert await asyncio.wait_for(told.get(), HANG_S) == ("parsed one", False)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_parser_that_fails_misses_one_change_only(tmp_path: Path) -> None:
    """As a listener that fails."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("0")
    told: asyncio.Queue[float] = asyncio.Queue()
    asked: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def parse(text: str | None) -> float:
        loop.call_soon_threadsafe(asked.put_nowait, None)
        return 1 / int(text or 1)

    task = asyncio.create_task(follow_parsed(file, parse, told.put_nowait))
    await asyncio.wait_for(asked.get(), HANG_S)
    put(file, "2")
    assert await asyncio.wait_for(told.get(), HANG_S) == 0.5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_no_fault_of_watching_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that nobody thought of either: the file is read again."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("one")
    watched: asyncio.Queue[None] = asyncio.Queue()

    def broken(*_args: object, **_kwargs: object) -> None:
        watched.put_nowait(None)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(watchfiles, "awatch", broken)
        async with following(file) as follower:
            assert await follower.next() == "one"
            for _ in range(2):
                await asyncio.wait_for(watched.get(), HANG_S)
            put(file, "two")
            assert await follower.next() == "two"


# -- pools


class House:
    """A discovery and what it reported."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[tuple[str, list[str]]] = asyncio.Queue()
        self.reads: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.discovery = Discovery(lambda pool, addresses: self.reports.put_nowait((pool, addresses)), self)

    def discovered(self, pool: str, *, ok: bool) -> None:
        """DiscoveryEvents."""
        self.reads.put_nowait((pool, ok))

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
    """Counted as failed, not reported; the next good one is."""
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
