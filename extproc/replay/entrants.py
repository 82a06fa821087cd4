"""Who takes part in a comparison: presets by name and files with a policy section, each with an index of its own.

Written `NAME[@INDEX]`: without INDEX the policy's own size of prefix index; `engine` for exactly the engine's KV cache;
`exact` for what the engines really hold; a number of tokens otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from extproc.config.policy_kinds import CustomPolicy, Policy
from extproc.config.pool_policies import presets
from extproc.config.third_party import spec_of
from extproc.config.yaml_text import BadYaml, parse_yaml
from policies.placement.policy import PolicySpec


class NoSuchPolicy(Exception):
    """Neither a preset nor a file with a policy."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy in a comparison. `exact`: it is told what the engines really hold."""

    name: str
    spec: PolicySpec
    exact: bool = False

    def described(self) -> dict[str, Any]:
        """Everything that decides how it places, as plain data."""
        return {"kind": type(self.spec).__name__, **asdict(self.spec), "exact": self.exact}


def entrants(names: Iterable[str], *, right_sized: bool = False) -> list[Entrant]:
    """One for each name; with `right_sized` also one with the engine's size where it would have another of its own.

    Raises NoSuchPolicy.
    """
    found = []
    for name in names:
        entrant = _entrant(name)
        found.append(entrant)
        if right_sized and entrant.spec.index_tokens is not None and "@" not in name:
            found.append(Entrant(f"{entrant.name}@engine", replace(entrant.spec, index_tokens=None)))
    return found


def _entrant(written: str) -> Entrant:
    name, _, index = written.partition("@")
    spec = _spec(name)
    shown = Path(name).stem if _is_file(name) else name
    if not index:
        return Entrant(shown, spec)
    shown = f"{shown}@{index}"
    if index in {"engine", "exact"}:
        return Entrant(shown, replace(spec, index_tokens=None), index == "exact")
    if not index.isdecimal() or not int(index):
        raise NoSuchPolicy(f"{written}: after @ stands `engine`, `exact` or a number of tokens, not {index!r}")
    return Entrant(shown, replace(spec, index_tokens=int(index)))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _spec(name: str) -> PolicySpec:
    if _is_file(name):
        return _from_file(Path(name))
    return _preset(name)


def _preset(name: str) -> PolicySpec:
    known = presets()
    if name not in known:
        raise NoSuchPolicy(f"no preset {name!r}; there are: {', '.join(sorted(known))}; a file ends in .yaml")
    return known[name]


def _from_file(path: Path) -> PolicySpec:
    """A file that is a policy, or has one under `policy`."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
        section = document.get("policy", document) if isinstance(document, dict) else document
        if isinstance(section, str):
            return _preset(section)
        found: PolicySpec | CustomPolicy = TypeAdapter[Any](Policy).validate_python(section)
        return spec_of(found) if isinstance(found, CustomPolicy) else found
    except (OSError, BadYaml, ValueError) as error:
        raise NoSuchPolicy(f"{path}: {error}") from error
