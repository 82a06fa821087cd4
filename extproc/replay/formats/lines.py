"""Reading files line by line, with errors that say where: every reader's first layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BadTrace(Exception):
    """The file is no trace of this form. The message names file and line."""


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every line that is not blank. Raises BadTrace."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadTrace(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadTrace(f"{path}, line {number}: expected an object, found {type(found).__name__}")
    return found


class Row:
    """One line's fields, checked as they are read. `where` begins every message."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self.where = where

    def number(self, name: str, default: float | None = None) -> float:
        """A number that is not negative. Raises BadTrace."""
        value = self._fields.get(name, default)
        try:
            number = float(value)  # type: ignore[arg-type] # None and all else that is no number is refused below
        except (TypeError, ValueError):
            raise self.bad(f"{name} is {_shown(value)}, not a number") from None
        if isinstance(value, bool) or not 0 <= number < float("inf"):
            raise self.bad(f"{name} is {_shown(value)}, not a number of at least 0")
        return number

    def count(self, name: str) -> int:
        """A whole number, at least 1 whatever the trace says: no engine runs an empty prompt or answer."""
        return max(1, int(self.number(name)))

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers. Raises BadTrace."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise self.bad(f"{name} is {_shown(value)}, not a list of whole numbers")
        return value

    def bad(self, what: str) -> BadTrace:
        """The exception to raise."""
        return BadTrace(f"{self.where}: {what}")


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."
