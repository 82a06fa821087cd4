"""Edits of a JSON body as splices into the original bytes: what is not edited survives byte for byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import msgspec
import numpy as np


@dataclass(init=False)
class Splice:
    """Put `text` in the place of `body[start:end]`. Never changed."""

    start: int
    end: int
    text: bytes

    def __init__(self, start: int, end: int, text: bytes) -> None:
        self.start = start
        self.end = end
        self.text = text


def apply(body: bytes, splices: Sequence[Splice]) -> bytes:
    """The body with every splice applied. Splices must not overlap."""
    parts = []
    position = 0
    for splice in sorted(splices, key=attrgetter("start")):
        if splice.start < position:
            raise AssertionError("splices overlap")
        parts += [body[position : splice.start], splice.text]
        position = splice.end
    parts.append(body[position:])
    return b"".join(parts)


View: TypeAlias = memoryview | msgspec.Raw
"""Of a part of a body."""

_NOTHING_MORE = re.compile(rb"\s*\}")


def insert_field(body: bytes, name: str, value: bytes) -> Splice:
    """A field more, in front of all others; `body` is a JSON object, `value` JSON."""
    start = body.index(b"{") + 1
    comma = b"" if _NOTHING_MORE.match(body, start) else b","
    return Splice(start, start, b'"%s":%s%s' % (name.encode(), value, comma))


def locate(body: bytes, raw: View) -> tuple[int, int]:
    """Where `raw`, a view that msgspec made into `body`, starts and ends.

    By address, not by search: of two equal values, or a key given twice, only the one that was parsed is meant.
    """
    start = _address_of(raw) - _address_of(body)
    if not 0 <= start <= len(body) - len(raw):
        raise AssertionError("the view does not lie in the body")
    return start, start + len(raw)


def _address_of(buffer: bytes | View) -> int:
    """Where its first byte lies in memory."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
