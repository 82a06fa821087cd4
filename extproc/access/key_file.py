"""The file of API keys, followed like a file of endpoints: a key added or taken out counts without a restart.

A file that cannot be read or understood keeps the last good list, and is counted: a slip of the pen must not lock
everybody out. An empty list is a good list, and locks everybody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from extproc.access.keys import BadKeys, parse_keys
from extproc.config.sections.callers import ApiKey
from extproc.fleet.discovery.files import follow_parsed, read_text, why_unreadable

log = structlog.get_logger(__name__)


class KeyFileEvents(Protocol):
    """Who counts reads."""

    def key_file_read(self, *, ok: bool) -> None:
        """The file was read, and whether it was a list of keys."""


class KeyFile:
    """Follows one file, or none. `keys` is the last good list, None before there was one."""

    def __init__(self, on_change: Callable[[], None], events: KeyFileEvents) -> None:
        self._on_change = on_change
        self._events = events
        self._file: Path | None = None
        self._task: asyncio.Task[None] | None = None
        self.keys: tuple[ApiKey, ...] | None = ()

    def configure(self, file: Path | None) -> None:
        """Follow exactly this file. It is read at once: no request may be refused because we have not looked yet."""
        if file == self._file:
            return
        self._stop()
        self._file = file
        self.keys = () if file is None else None
        if file is not None:
            self._take(read_keys(file))
            following = follow_parsed(file, partial(_parsed_or_why_not, file), self._changed)
            self._task = asyncio.create_task(following, name="api keys")

    async def close(self) -> None:
        """Stop following."""
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _changed(self, found: tuple[ApiKey, ...] | BadKeys) -> None:
        self._take(found)
        self._on_change()

    def _take(self, found: tuple[ApiKey, ...] | BadKeys) -> None:
        self._events.key_file_read(ok=not isinstance(found, BadKeys))
        if isinstance(found, BadKeys):
            kept = "; there has been no list yet" if self.keys is None else ", the last good list stays"
            log.warning(f"API key file ignored{kept}", file=str(self._file), error=str(found))
        else:
            self.keys = found


def read_keys(file: Path) -> tuple[ApiKey, ...] | BadKeys:
    """The keys in a file as it is now, or why there are none."""
    return _parsed_or_why_not(file, read_text(file))


def _parsed_or_why_not(file: Path, text: str | None) -> tuple[ApiKey, ...] | BadKeys:
    if text is None:
        return BadKeys(why_unreadable(file))
    try:
        return parse_keys(text)
    except BadKeys as error:
        return error
