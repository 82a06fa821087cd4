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

    def discovery_state(self, pool: str, *, endpoints: int, skipped: int, stale: bool) -> None:
        """How many endpoints the list in use has and lacks, and whether its source cannot be read at the moment."""


class Sink:
    """Where one pool's source tells what it lists, or why it cannot."""

    def __init__(
        self,
        pool: str,
        report: Callable[[str, list[Discovered]], None],
        events: DiscoveryEvents,
        could_not_read: Callable[[str], None] = lambda _pool: None,
    ) -> None:
        """`could_not_read` hears of failures as long as there is nothing to report."""
        self.pool = pool
        self._report = report
        self._events = events
        self._could_not_read = could_not_read
        self._last: dict[str, Discovered] | None = None
        self._skipped = 0

    def found(self, endpoints: Iterable[Discovered | str], *, skipped: int = 0, stale: bool = False) -> None:
        """The source was read: this is all it lists, in whatever order. Reported further when it has changed.

        `skipped`: what ought to be endpoints beside these and cannot. `stale`: part of the source cannot be read.
        """
        listed = as_discovered(endpoints)
        self._events.discovered(self.pool, ok=True)
        self._note(len(listed), skipped, stale=stale)
        if listed != self._last:
            self._last = listed
            self._report(self.pool, list(listed.values()))

    def failed(self, reason: str, error: object) -> None:
        """The source could not be read; what it listed last stays in use."""
        kept = "; there has been no list yet" if self._last is None else ", keeping the last good list"
        log.warning(f"endpoints not read{kept}", pool=self.pool, reason=reason, error=str(error))
        self._events.discovered(self.pool, ok=False)
        self._events.discovery_failed(self.pool, reason)
        self._note(len(self._last or ()), self._skipped, stale=True)
        if self._last is None:
            self._could_not_read(self.pool)

    def _note(self, endpoints: int, skipped: int, *, stale: bool) -> None:
        if skipped and skipped != self._skipped:
            log.warning("no endpoints for want of an address or a port", pool=self.pool, skipped=skipped)
        self._skipped = skipped
        self._events.discovery_state(self.pool, endpoints=endpoints, skipped=skipped, stale=stale)
