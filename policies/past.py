"""Figures by slot as they were at some moment, for explanations: a copy of all of them, and what was written since.

Every decision keeps the figures that it was made of, and hardly any is ever asked for them. Copies for each of a
thousand endpoints were 48 KB a decision: of the thousands that are kept every byte was written to memory that no cache
held any more, which took as long as to choose. What a request changes is the figures of one endpoint.
"""

from __future__ import annotations

from policies.types import Floats, Slots

_MOST_WRITTEN = 256
"""After so many changes a new copy is made, by the next who wants to remember."""


class _Written:
    """Three figures of one slot."""

    def __init__(self, slot: int, first: float, second: float, third: float) -> None:
        self.slot = slot
        self.first = first
        self.second = second
        self.third = third


class _Page:
    """A copy of all figures, and the changes behind it in order."""

    def __init__(self, figures: Floats) -> None:
        self.figures: Floats = figures.copy()
        self.written: list[_Written] = []


class Moment:
    """All figures as they were at one moment, which never changes."""

    def __init__(self, page: _Page) -> None:
        self._page = page
        self._written = len(page.written)

    def of(self, slots: Slots) -> Floats:
        """Those of some slots, shape (3, n)."""
        figures = self._page.figures.copy()
        last = {change.slot: change for change in self._page.written[: self._written]}
        for slot, change in last.items():
            figures[:, slot] = change.first, change.second, change.third
        found: Floats = figures.take(slots, 1)
        return found


class Past:
    """Who writes the figures tells it each change, or `lose`s them all. Nothing is kept before anybody asks."""

    def __init__(self) -> None:
        self._page: _Page | None = None

    def write(self, slot: int, first: float, second: float, third: float) -> None:
        """A slot's figures are these now."""
        page = self._page
        if page is not None:
            page.written.append(_Written(slot, first, second, third))
            if len(page.written) >= _MOST_WRITTEN:
                self._page = None

    def lose(self) -> None:
        """They may have been written in any other way."""
        self._page = None

    def now(self, figures: Floats) -> Moment:
        """This moment, at which they are these, shape (3, slots)."""
        page = self._page
        if page is None:
            page = self._page = _Page(figures)
        return Moment(page)
