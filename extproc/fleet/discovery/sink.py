"""Where a source tells what it lists: counted, logged, and reported further when it differs.

Not here: what a source is and how it is read (its own module).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from extproc.fleet.discovery.endpoints import Discovered, as_discovered

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
        self._last: dict[str, Discovered] | None = None

    def found(self, endpoints: Iterable[Discovered | str]) -> None:
        """The source was read: this is all it lists, in whatever order. Reported further when it has changed."""
        listed = as_discovered(endpoints)
        self._events.discovered(self.pool, ok=True)
        self._events.discovery_state(self.pool, endpoints=len(listed), stale=False)
        if listed != self._last:
            self._last = listed
            self._report(self.pool, list(listed.values()))

    def failed(self, reason: str, error: object) -> None:
        """The source could not be read; what it listed last stays in use."""
        log.warning("endpoints not read, keeping the last good list", pool=self.pool, reason=reason, error=str(error))
        self._events.discovered(self.pool, ok=False)
        self._events.discovery_failed(self.pool, reason)
        self._events.discovery_state(self.pool, endpoints=len(self._last or ()), stale=True)
