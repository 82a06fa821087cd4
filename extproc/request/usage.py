"""Whether a streamed answer will tell what it cost: asked for by the client, by us in its place, or not wanted.

A streamed answer of chat and completions tells its usage only if `stream_options.include_usage` says so, in one chunk
more at its end. Where that is missing we write it into the body, as a splice: nothing else of it changes. Who says
`false` means it, and is left alone. The other APIs always tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from extproc.request.parsing import Parsed
from extproc.request.splice import Splice, View, insert_field, locate
from policies.types import Kind


class AskedBy(StrEnum):
    """Who asked for a stream's usage: the bounded label set of a metric."""

    CLIENT = "client"
    US = "us"
    NOBODY = "nobody"
    """The client said no."""


@dataclass(init=False)
class UsageAsked:
    """Who asked, and what has to be written into the body for that."""

    by: AskedBy
    splices: tuple[Splice, ...]

    def __init__(self, by: AskedBy, splices: tuple[Splice, ...] = ()) -> None:
        self.by = by
        self.splices = splices


_Options: Any = msgspec.defstruct("_Options", [("include_usage", Any, msgspec.UNSET)])
_decode = msgspec.json.Decoder(_Options).decode
_KINDS = frozenset({Kind.CHAT, Kind.COMPLETION})
_WANTED: Final = b'{"include_usage":true}'
_NULL: Final = b"null"


def ask_for_usage(body: bytes, parsed: Parsed) -> UsageAsked | None:
    """What it takes that the answer tells its usage; None where there is nothing to ask for, or no way to."""
    if not parsed.stream or parsed.kind not in _KINDS:
        return None
    raw = parsed.stream_options
    if not raw:
        return UsageAsked(AskedBy.US, (insert_field(body, "stream_options", _WANTED),))
    if len(raw) == len(_NULL) and bytes(raw) == _NULL:
        start, end = locate(body, raw)
        return UsageAsked(AskedBy.US, (Splice(start, end, _WANTED),))
    try:
        said = _decode(raw).include_usage
    except msgspec.MsgspecError:
        return None  # no object: the engine will say so
    if said is True:
        return UsageAsked(AskedBy.CLIENT)
    return UsageAsked(AskedBy.NOBODY) if said is not msgspec.UNSET else _inserted(body, raw)


def _inserted(body: bytes, options: View) -> UsageAsked:
    start, end = locate(body, options)
    member = insert_field(body[start:end], "include_usage", b"true")
    return UsageAsked(AskedBy.US, (Splice(start + member.start, start + member.end, member.text),))
