"""What pydantic finds wrong, in an operator's words: where, what, and how to mend it.

Not here: which files are read, and which keys there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from extproc.config.near_misses import did_you_mean
from extproc.config.policy_kinds import KINDS
from extproc.config.sections.fields import Faults

Place: TypeAlias = tuple[int | str, ...]


def in_words(
    error: ValidationError, keys_at: Callable[[Place], Iterable[str]], *, see: str = "", quote: bool = True
) -> Iterator[tuple[str, str]]:
    """Each fault as its place, empty for the whole, and what is wrong there.

    `keys_at`: which keys there may be at a place. `see`: what to look at where an unknown key is close to none of
    them. `quote`: whether anything that stands there may be told, be it the name of an unknown key. Of places where
    something secret may stand nothing is quoted in any case.
    """
    found = error.errors(include_input=quote)
    for fault in found:
        if not _follows(fault, found):
            hidden = fault["type"] in _UNKNOWN and not (quote and _NEVER_NAMED.isdisjoint(fault["loc"]))
            place = path(fault["loc"][:-1] if hidden else fault["loc"])
            yield from ((place, sentence) for sentence in _sentences(fault, keys_at, see))


def keys_of(model: type[BaseModel]) -> Callable[[Place], Iterable[str]]:
    """For a list of such sections, or a section that has none below it: which keys there may be anywhere."""
    return lambda _place: model.model_fields


def _follows(fault: Any, faults: list[Any]) -> bool:  # noqa: ANN401 - pydantic's ErrorDetails, as below
    """A fault that is only the shadow of another.

    A list counts as too short when its one item is wrong, and an inline policy is no preset's name either.
    """
    place = fault["loc"]
    if fault["type"] == "too_short":
        return any(other["loc"][: len(place)] == place for other in faults if other is not fault)
    if place[-1:] == ("str",) and fault["type"] == "string_type":
        return any(other["loc"][: len(place) - 1] == place[:-1] for other in faults if other is not fault)
    return False


_UNION_MEMBERS = {"int", "str", "Profile", "Endpoint", *KINDS}
_UNIONS = ("tagged-union[", "function-before[")


def path(place: Place) -> str:
    """`pools[0].endpoints.static` from pydantic's tuple; the names of union members are left out."""
    told = ""
    for part in place:
        if isinstance(part, int):
            told += f"[{part}]"
        elif part not in _UNION_MEMBERS and not part.startswith(_UNIONS):
            told += f".{part}" if told else part
    return told


_NEVER_QUOTED = {"access", "api_server"}
"""Sections and fields whose values are not told: keys and tokens may stand there instead of what says how to know them,
and passwords in URLs."""
_NEVER_NAMED = {"api_keys"}
"""Where the name of an unknown key may be secret too: an API key with its tenant behind it."""

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_WORDS = {
    "missing": "required, but not given",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "string_type": "should be text; put it in quotes",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "should be a mapping"),
}
"""An operator's words for what pydantic says in a Python programmer's."""


def _sentences(
    fault: Any,  # noqa: ANN401 - pydantic's ErrorDetails is a TypedDict only in its stubs
    keys_at: Callable[[Place], Iterable[str]],
    see: str,
) -> Iterable[str]:
    if fault["type"] in _UNKNOWN:
        return [_unknown_key(fault["loc"], keys_at, see)]
    if fault["type"] == "union_tag_invalid":
        tag = str(fault["ctx"]["tag"])
        meant = did_you_mean(tag, KINDS)
        return [f"kind must be one of {', '.join(map(repr, KINDS))}, not {tag!r}{meant and f'; {meant}'}"]
    several = fault.get("ctx", {}).get("error")
    if isinstance(several, Faults):
        return several.faults
    hidden = fault["type"] == "missing" or not _NEVER_QUOTED.isdisjoint(fault["loc"])
    given = None if hidden else fault.get("input")
    message = _message(fault)
    if isinstance(given, int | float | bool) or (isinstance(given, str) and repr(given) not in message):
        message = f"{message} (given: {given!r})"
    return [message]


def _message(fault: Any) -> str:  # noqa: ANN401 - as above
    if fault["type"] == "too_short":
        return f"should have at least {fault['ctx']['min_length']} item"
    return _WORDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")


def _unknown_key(place: Place, keys_at: Callable[[Place], Iterable[str]], see: str) -> str:
    meant = did_you_mean(str(place[-1]), keys_at(place[:-1])) or see
    return f"unknown key{meant and f'; {meant}'}"
