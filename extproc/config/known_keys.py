"""Which keys a section of the config may hold, by pydantic's place of a fault; for suggestions, so rather too many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from extproc.config.schema import Config


def keys_at(location: tuple[int | str, ...]) -> set[str]:
    """Keys of the section at `location`; where it may be one of several, of all of these."""
    branches = [_schema()]
    for part in location:
        # pydantic names in its places which kind of a section it took a mapping for; that leads nowhere further down
        branches = [found for branch in branches for found in _below(branch, part)] or _of_kind(branches, part)
    return {key for branch in branches for key in branch.get("properties", {})}


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _below(branch: dict[str, Any], part: int | str) -> Iterator[dict[str, Any]]:
    # a mapping by names that are the operator's, with a pattern for them or without
    named = next(iter(branch.get("patternProperties", {}).values()), branch.get("additionalProperties") or None)
    found = branch.get("items") if isinstance(part, int) else branch.get("properties", {}).get(part, named)
    if found is not None:
        yield from _branches(found)


def _branches(section: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a section may be, with references followed."""
    if "$ref" in section:
        section = _schema()["$defs"][section["$ref"].rpartition("/")[2]]
    choices = section.get("anyOf") or section.get("oneOf")
    if choices is None:
        yield section
        return
    for choice in choices:
        yield from _branches(choice)


def _of_kind(branches: list[dict[str, Any]], kind: int | str) -> list[dict[str, Any]]:
    ours = [branch for branch in branches if branch.get("properties", {}).get("kind", {}).get("const") == kind]
    return ours or branches
