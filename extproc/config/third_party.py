"""Policies that other packages bring, found by entry point. docs/writing-a-policy.md shows how to make one.

An entry point of the group `pointsman.policies` names a subclass of PolicySpec, or a function that makes one from the
parameters. It is loaded when the config is read, so that `pointsman check` finds what is wrong with it. Not here: any
isolation. Such a policy runs within the decision loop and is trusted as Pointsman itself is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import TypeAdapter, ValidationError

from extproc.config.policy_kinds import CustomPolicy
from extproc.config.wording import in_words
from policies.placement.policy import PolicySpec

GROUP = "pointsman.policies"


def spec_of(custom: CustomPolicy) -> PolicySpec:
    """The policy in plain data. Raises ValueError where it is not installed, is broken or refuses its parameters."""
    make = _loaded(custom.name)
    try:
        spec = _adapter(make).validate_python(custom.parameters) if isinstance(make, type) else make(custom.parameters)
    except ValidationError as error:
        faults = "; ".join(_faults(make, error))
        raise ValueError(f"policy {custom.name!r}: {faults}") from error
    except Exception as error:
        raise ValueError(f"policy {custom.name!r} refuses its parameters: {error!r}") from error
    if not isinstance(spec, PolicySpec):
        raise ValueError(f"policy {custom.name!r} makes a {type(spec).__name__}, not a PolicySpec")  # noqa: TRY004 - a fault of the config
    return spec


@cache
def _loaded(name: str) -> Any:  # noqa: ANN401 - whatever a third party put there
    """What the entry point names. Packages do not come and go while we run, so this is looked up once."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        there = ", ".join(sorted(installed)) or "none"
        raise ValueError(f"no policy {name!r} is installed (entry points {GROUP!r}: {there})")
    try:
        found = installed[name].load()
    except Exception as error:
        raise ValueError(f"policy {name!r} ({installed[name].value}) cannot be loaded: {error!r}") from error
    if isinstance(found, type) and not issubclass(found, PolicySpec):
        raise ValueError(f"policy {name!r} ({installed[name].value}) is no subclass of PolicySpec")  # noqa: TRY004
    if not callable(found):
        raise ValueError(f"policy {name!r} ({installed[name].value}) is neither a PolicySpec nor makes one")  # noqa: TRY004
    return found


@cache
def _adapter(spec: type[PolicySpec]) -> TypeAdapter[PolicySpec]:
    return TypeAdapter(spec)


def _faults(make: Any, error: ValidationError) -> Iterator[str]:  # noqa: ANN401 - as above
    # a function may use a model of its own, of which we know nothing
    names = [field.name for field in fields(make) if field.init] if isinstance(make, type) else []
    see = f"there are: {', '.join(names)}" if names else ""
    for place, what in in_words(error, lambda _place: names, see=see):
        separator = "." if place and not place.startswith("[") else ""
        yield f"parameters{separator}{place}: {what}"
