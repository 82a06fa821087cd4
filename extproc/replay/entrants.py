"""Who takes part in a comparison: presets by name and files with a policy section, each with an index of its own.

Written `NAME[@INDEX][+HELD]`: without INDEX the policy's own size of prefix index; `engine` for exactly the engine's KV
cache; `exact` for what the engines really hold; a number of tokens otherwise. HELD: `late` for late binding where no
endpoint has room, `queue` for a queue alone; without it nothing is held.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from extproc.config.loading import explain
from extproc.config.near_misses import unknown
from extproc.config.policy_kinds import CustomPolicy, Policy
from extproc.config.pool_policies import build, presets
from extproc.config.third_party import spec_of
from extproc.config.yaml_text import BadYaml, parse_yaml
from policies.admission.binding import BindingSpec
from policies.placement.policy import PolicySpec


class NoSuchPolicy(Exception):
    """Neither a preset nor a file with a policy."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy in a comparison. `exact`: it is told what the engines really hold. `binding`: how it holds requests."""

    name: str
    spec: PolicySpec
    exact: bool = False
    binding: BindingSpec | None = None

    def described(self) -> dict[str, Any]:
        """Everything that decides how it places, as plain data; our own code is `code_version`'s business."""
        described = {"kind": type(self.spec).__name__, **asdict(self.spec), "exact": self.exact}
        if self.binding is not None:
            described["binding"] = asdict(self.binding)
        foreign = _foreign_code(type(self.spec))
        return {**described, "source": foreign} if foreign else described


def _foreign_code(spec: type[PolicySpec]) -> str:
    """A hash of what other packages the policy's class comes from; empty if from none.

    Whole packages, since a policy may call whatever else its package brings.
    """
    packages = {base.__module__.partition(".")[0] for base in spec.__mro__} - {"policies", *sys.stdlib_module_names}
    files = [file for package in sorted(packages) for file in _files_of(sys.modules.get(package))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""


def _files_of(package: ModuleType | None) -> list[Path]:
    folders = getattr(package, "__path__", None)
    if folders is not None:
        return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    file = getattr(package, "__file__", None)
    return [Path(file)] if file else []


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


_HELD = {"late": BindingSpec(), "queue": BindingSpec(late=False)}


def _entrant(written: str) -> Entrant:
    name, plus, held = written.rpartition("+")
    if not plus or held not in _HELD:
        return _unheld(written)
    entrant = _unheld(name)
    if entrant.exact:
        raise NoSuchPolicy(f"{written}: what engines really hold is looked up as a request comes, not while it waits")
    return replace(entrant, name=f"{entrant.name}+{held}", binding=_HELD[held])


def _unheld(written: str) -> Entrant:
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
        raise NoSuchPolicy(f"{unknown('no preset', name, known)}; a file ends in .yaml")
    return known[name]


def _from_file(path: Path) -> PolicySpec:
    """A file that is a policy, or has one under `policy`. Built once, so that what is wrong is said before any run."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
        spec = _from_document(document)
        build(spec, path.stem)
    except ValidationError as error:
        raise NoSuchPolicy(f"{path}: {'; '.join(explain(error))}") from error
    except OSError as error:
        raise NoSuchPolicy(f"{path}: {error.strerror or error}") from error
    except (BadYaml, ValueError) as error:
        raise NoSuchPolicy(f"{path}: {' '.join(str(error).split())}") from error
    return spec


def _from_document(document: Any) -> PolicySpec:  # noqa: ANN401 - YAML can hold anything
    if isinstance(document, dict) and "pools" in document:
        raise ValueError("a whole config; put the `policy` of one pool into a file of its own")
    section = document.get("policy", document) if isinstance(document, dict) else document
    if isinstance(section, str):
        return _preset(section)
    found: PolicySpec | CustomPolicy = TypeAdapter[Any](Policy).validate_python(section)
    return spec_of(found) if isinstance(found, CustomPolicy) else found
