"""Follows every pool's source and tells the fleet what each lists.

A source that cannot be read keeps the last good list, and says so: a counter with the reason, a log line, and a gauge
while the list in use is the last good one. Not here: how a kind of source is read (its own module).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import structlog

from extproc.config.schema import Pool
from extproc.fleet.discovery.endpoints import BadEndpoints, Discovered, as_discovered, parse_endpoints
from extproc.fleet.discovery.files import follow_parsed

log = structlog.get_logger(__name__)


class DiscoveryEvents(Protocol):
    """Who counts discovery's reads."""

    def discovered(self, pool: str, *, ok: bool) -> None:
        """A source was read."""

    def discovery_failed(self, pool: str, reason: str) -> None:
        """Why a source could not be read; one of a fixed set of words."""

    def discovery_state(self, pool: str, *, endpoints: int, stale: bool) -> None:
        """How many endpoints the list in use has, and whether its source cannot be read at the moment."""


class Sink:
    """Where one pool's source tells what it lists, or why it cannot."""

    def __init__(self, pool: str, report: Callable[[str, list[Discovered]], None], events: DiscoveryEvents) -> None:
        self.pool = pool
        self._report = report
        self._events = events
        self._last: list[Discovered] | None = None

    def found(self, endpoints: Iterable[Discovered | str]) -> None:
        """The source was read: this is all it lists. Reported further when it differs from what it listed before."""
        listed = list(as_discovered(endpoints).values())
        self._events.discovered(self.pool, ok=True)
        self._events.discovery_state(self.pool, endpoints=len(listed), stale=False)
        if listed != self._last:
            self._last = listed
            self._report(self.pool, listed)

    def failed(self, reason: str, error: object) -> None:
        """The source could not be read; what it listed last stays in use."""
        log.warning("endpoints not read, keeping the last good list", pool=self.pool, reason=reason, error=str(error))
        self._events.discovered(self.pool, ok=False)
        self._events.discovery_failed(self.pool, reason)
        self._events.discovery_state(self.pool, endpoints=len(self._last or ()), stale=True)


class Discovery:
    """Follows every pool's source and reports each list to `report(pool, endpoints)`."""

    def __init__(self, report: Callable[[str, list[Discovered]], None], events: DiscoveryEvents) -> None:
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
                self._sink(name).found(pool.endpoints.static)
            elif name not in self._tasks:
                self._tasks[name] = (pool, asyncio.create_task(self._follow(pool), name=f"discovery {name}"))

    def _sink(self, pool: str) -> Sink:
        return Sink(pool, self._report, self._events)

    async def close(self) -> None:
        """Stop following."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, pool: Pool) -> None:
        endpoints, sink = pool.endpoints, self._sink(pool.name)
        if endpoints.file is None:
            raise AssertionError("only file sources are followed")
        await follow_endpoints_file(endpoints.file, sink)


async def follow_endpoints_file(file: Path, sink: Sink) -> None:
    """Tell what `file` lists now, and whenever it has changed."""

    def tell(found: list[Discovered] | BadEndpoints) -> None:
        if isinstance(found, BadEndpoints):
            sink.failed("bad_file", f"{file}: {found}")
        else:
            sink.found(found)

    await follow_parsed(file, _endpoints_or_why_not, tell)


def _endpoints_or_why_not(text: str | None) -> list[Discovered] | BadEndpoints:
    try:
        return parse_endpoints(text)
    except BadEndpoints as error:
        return error
