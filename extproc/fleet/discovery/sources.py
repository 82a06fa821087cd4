"""Follows every pool's source and tells the fleet what each lists.

A source that cannot be read keeps the last good list, and says so: a counter with the reason, a log line, and a gauge
while the list in use is the last good one. Not here: how a kind of source is read (its own module).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from extproc.config.schema import Pool
from extproc.fleet.discovery.endpoints import BadEndpoints, Discovered, as_discovered, parse_endpoints
from extproc.fleet.discovery.files import follow_parsed, read_text, why_unreadable
from extproc.fleet.discovery.sink import DiscoveryEvents, Sink


class Discovery:
    """Follows every pool's source and reports each list to `report(pool, endpoints)`.

    `could_not_read` hears of a pool whose source fails before it has ever listed anything.
    """

    def __init__(
        self,
        report: Callable[[str, list[Discovered]], None],
        events: DiscoveryEvents,
        could_not_read: Callable[[str], None] = lambda _pool: None,
    ) -> None:
        self._report = report
        self._events = events
        self._could_not_read = could_not_read
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
                self._sink(name).found(as_discovered(pool.endpoints.static).values())
            elif name not in self._tasks:
                self._tasks[name] = (pool, asyncio.create_task(self._follow(pool), name=f"discovery {name}"))

    def _sink(self, pool: str) -> Sink:
        return Sink(pool, self._report, self._events, self._could_not_read)

    async def close(self) -> None:
        """Stop following."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, pool: Pool) -> None:
        endpoints, sink = pool.endpoints, self._sink(pool.name)
        if endpoints.file is not None:
            await follow_endpoints_file(endpoints.file, sink)
        elif endpoints.dns is not None:
            # here, since its library takes a quarter of a second to import, which few need
            from extproc.fleet.discovery.dns import follow_dns

            await follow_dns(endpoints.dns, sink)
        elif endpoints.kubernetes is not None:
            from extproc.fleet.discovery.kubernetes import follow_kubernetes

            await follow_kubernetes(endpoints.kubernetes, sink)


async def follow_endpoints_file(file: Path, sink: Sink) -> None:
    """Tell what `file` lists now, and whenever it has changed."""

    def tell(found: list[Discovered] | BadEndpoints) -> None:
        if isinstance(found, BadEndpoints):
            sink.failed("bad_file", f"{file}: {found}")
        else:
            sink.found(found)

    await follow_parsed(file, partial(_endpoints_or_why_not, file), tell)


def read_endpoints(file: Path) -> list[Discovered] | BadEndpoints:
    """What a file lists as it is now, or why that is no list of endpoints."""
    return _endpoints_or_why_not(file, read_text(file))


def _endpoints_or_why_not(file: Path, text: str | None) -> list[Discovered] | BadEndpoints:
    if text is None:
        return BadEndpoints(why_unreadable(file))
    try:
        return parse_endpoints(text)
    except BadEndpoints as error:
        return error
