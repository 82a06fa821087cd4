"""Where endpoints come from: the config itself, or a file that is watched.

A file is a YAML or JSON list of `IP:port` (or a mapping with such a list under `endpoints`). It is read whole again
whenever its folder changes, so an atomic rename and a mounted ConfigMap's symlink swap both work. A file that cannot
be read keeps the last good list, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
import watchfiles

from extproc.config.schema import Pool, check_address
from extproc.config.yaml_text import BadYaml, parse_yaml

log = structlog.get_logger(__name__)

_Parsed = TypeVar("_Parsed")


class DiscoveryEvents(Protocol):
    """Who counts discovery's reads."""

    def discovered(self, pool: str, *, ok: bool) -> None:
        """A source was read."""


class BadEndpoints(Exception):
    """The source's content is not a list of endpoints."""


def parse_endpoints(text: str | None) -> list[str]:
    """Addresses from a file's text (None: it could not be read). Raises BadEndpoints."""
    if text is None:
        raise BadEndpoints("cannot be read")
    try:
        document = parse_yaml(text)
    except BadYaml as error:
        raise BadEndpoints(f"not YAML or JSON: {error}") from error
    if isinstance(document, dict):
        document = document.get("endpoints")
    if not isinstance(document, list) or not all(isinstance(address, str) for address in document):
        raise BadEndpoints("expected a list of IP:port, or a mapping with one under `endpoints`")
    try:
        return list(dict.fromkeys(check_address(address) for address in document))
    except ValueError as error:
        raise BadEndpoints(str(error)) from error


class Discovery:
    """Follows every pool's source and reports each list to `report(pool, addresses)`."""

    def __init__(self, report: Callable[[str, list[str]], None], events: DiscoveryEvents) -> None:
        self._report = report
        self._events = events
        self._tasks: dict[str, tuple[Pool, asyncio.Task[None]]] = {}

    def configure(self, pools: tuple[Pool, ...]) -> None:
        """Follow exactly these pools; a pool whose source is unchanged is left alone."""
        by_name = {pool.name: pool for pool in pools}
        for name, (pool, task) in list(self._tasks.items()):
            if name not in by_name or by_name[name].endpoints != pool.endpoints:
                task.cancel()
                del self._tasks[name]
        for name, pool in by_name.items():
            if pool.endpoints.static is not None:
                self._report(name, list(pool.endpoints.static))
                self._events.discovered(name, ok=True)
            elif name not in self._tasks:
                self._tasks[name] = (pool, asyncio.create_task(self._follow(pool), name=f"discovery {name}"))

    async def close(self) -> None:
        """Stop following."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, pool: Pool) -> None:
        file = pool.endpoints.file
        if file is None:
            raise AssertionError("only file sources are followed")
        await follow_parsed(file, _endpoints_or_why_not, lambda found: self._read(pool.name, file, found))

    def _read(self, pool: str, file: Path, found: list[str] | BadEndpoints) -> None:
        if isinstance(found, BadEndpoints):
            log.warning(
                "endpoints file ignored, keeping the last good list", pool=pool, file=str(file), error=str(found)
            )
            self._events.discovered(pool, ok=False)
            return
        self._events.discovered(pool, ok=True)
        self._report(pool, found)


def _endpoints_or_why_not(text: str | None) -> list[str] | BadEndpoints:
    try:
        return parse_endpoints(text)
    except BadEndpoints as error:
        return error


_RETRY_S = 1.0
"""How soon a folder that cannot be watched (not there yet) is tried again."""


async def follow_file(file: Path, on_text: Callable[[str | None], None]) -> None:
    """Call `on_text` with the file's text now and whenever it has changed; None when it cannot be read."""
    await follow_parsed(file, lambda text: text, on_text)


async def follow_parsed(
    file: Path, parse: Callable[[str | None], _Parsed], on_parsed: Callable[[_Parsed], None]
) -> None:
    """Call `on_parsed` with what `parse` makes of the file's text, now and whenever the text has changed.

    `parse` runs in the thread that reads the file, since a large file takes long; it gets None for one that cannot be
    read. What it raises is logged, and that change is missed.
    """
    seen: list[str | None] = []  # nothing yet, or the text last reported
    while True:
        try:
            await _report_change(file, seen, parse, on_parsed)
            async for _ in watchfiles.awatch(file.parent, recursive=False, debounce=50, step=20, yield_on_timeout=True):
                await _report_change(file, seen, parse, on_parsed)
        except (OSError, RuntimeError) as error:  # watchfiles' way to say that the folder is not there
            log.debug("cannot watch", folder=str(file.parent), error=str(error))
        except Exception:
            log.exception("cannot follow", file=str(file))  # and tries again: nobody else would notice the end
        await asyncio.sleep(_RETRY_S)


async def _report_change(
    file: Path, seen: list[str | None], parse: Callable[[str | None], _Parsed], on_parsed: Callable[[_Parsed], None]
) -> None:
    text = await asyncio.to_thread(_text, file)
    if seen == [text]:
        return
    seen[:] = [text]
    try:
        on_parsed(await asyncio.to_thread(parse, text))
    except Exception:
        log.exception("change not taken over", file=str(file))  # the next change must still be seen


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # ValueError: bytes that are no text, a name that no file can have
        return None
