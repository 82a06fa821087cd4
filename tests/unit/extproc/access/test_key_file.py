"""The file of API keys: read at once, followed, and never lost to a slip."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from structlog.testing import capture_logs

from extproc.access.key_file import KeyFile
from extproc.access.keys import digest_of

HANG_GUARD_S = 30


class House:
    """A file in a folder, and what is heard of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.reads: list[bool] = []
        self.changes = 0
        self.file = KeyFile(self._changed, self)

    def _changed(self) -> None:
        self.changes += 1

    def key_file_read(self, *, ok: bool) -> None:
        """KeyFileEvents."""
        self.reads.append(ok)

    def write(self, *names: str) -> None:
        """A good list."""
        self.path.write_text(json.dumps([{"name": n, "tenant": "t", "sha256": digest_of(n)} for n in names]))

    def names(self) -> list[str] | None:
        """Of the keys that count."""
        return None if self.file.keys is None else [key.name for key in self.file.keys]

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait for it."""
        async with asyncio.timeout(HANG_GUARD_S):
            while not what():  # noqa: ASYNC110 - a file watched by another task
                await asyncio.sleep(0.01)


async def test_no_file_is_no_keys(tmp_path: Path) -> None:
    """And nothing to be followed."""
    house = House(tmp_path)
    house.file.configure(None)
    assert house.names() == []
    await house.file.close()


async def test_a_file_is_read_at_once(tmp_path: Path) -> None:
    """Before the first request."""
    house = House(tmp_path)
    house.write("a")
    house.file.configure(house.path)
    assert (house.names(), house.reads) == (["a"], [True])
    await house.file.close()


async def test_a_file_that_is_not_there_is_told_from_an_empty_one(tmp_path: Path) -> None:
    """And is taken up when it comes."""
    house = House(tmp_path)
    with capture_logs() as logs:
        house.file.configure(house.path)
    assert [entry["event"] for entry in logs] == ["API key file ignored; there has been no list yet"]
    assert logs[0]["error"] == "there is no such file"
    assert (house.names(), house.reads) == (None, [False])
    house.write()
    await house.until(lambda: house.names() == [])
    await house.file.close()


async def test_a_slip_keeps_the_last_good_list(tmp_path: Path) -> None:
    """It is counted; a good list after it counts again."""
    house = House(tmp_path)
    house.write("a")
    house.file.configure(house.path)
    house.path.write_text("- {name: half")
    await house.until(lambda: False in house.reads)
    assert house.names() == ["a"]
    changes = house.changes
    house.write("b")
    await house.until(lambda: house.names() == ["b"])
    assert house.changes > changes
    await house.file.close()


async def test_an_emptied_file_says_how_to_let_nobody_in(tmp_path: Path) -> None:
    """Emptied by somebody who means that, or by a slip: the keys stay in force, and the log says what to write."""
    house = House(tmp_path)
    house.write("a")
    house.file.configure(house.path)
    with capture_logs() as logs:
        house.path.write_text("")
        await house.until(lambda: False in house.reads)
    assert house.names() == ["a"]
    [told] = [entry for entry in logs if entry["event"] == "API key file ignored, the last good list stays"]
    assert told["error"] == "the file is empty; write `[]` to let nobody in"
    house.path.write_text("[]")
    await house.until(lambda: house.names() == [])
    await house.file.close()


async def test_another_file_is_another_list(tmp_path: Path) -> None:
    """What only the old one held is forgotten, even if the new one cannot be read."""
    house = House(tmp_path)
    house.write("a")
    house.file.configure(house.path)
    house.file.configure(tmp_path / "none.yaml")
    assert house.names() is None
    house.file.configure(None)
    assert house.names() == []
    await house.file.close()
