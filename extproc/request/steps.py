"""Work cut into steps: a generator that yields where others may go on, and returns its result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

Steps: TypeAlias = Generator[None, None, _T]


def at_once(steps: Steps[_T]) -> _T:
    """All of it, without a pause."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return] # StopIteration knows no types
