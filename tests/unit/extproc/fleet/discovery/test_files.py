"""Files that are followed through every way of replacing them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import watchfiles

from extproc.fleet.discovery import files
from extproc.fleet.discovery.files import follow_file, follow_parsed, read_text, why_unreadable

HANG_S = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again soon where a change fell between reading and watching, or the folder is not there."""
    monkeypatch.setattr(watchfiles, "awatch", functools.partial(watchfiles.awatch, rust_timeout=200))
    monkeypatch.setattr(files, "_RETRY_S", 0.02)


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


def test_why_there_is_no_text_is_told_in_words(tmp_path: Path) -> None:
    """Of whatever stands there instead of a file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("gone", "there is no such file"),
        ("folder", "is a folder"),
        ("binary", "is not text in UTF-8"),
        ("loop", "there is no such file"),
        ("pipe", "cannot be read"),
        ("x" * 300, "cannot be read: File name too long"),
        ("\0", "there is no such file"),
    ):
        assert read_text(tmp_path / name) is None
        assert why_unreadable(tmp_path / name) == why


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
