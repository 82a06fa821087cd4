"""The documentation against the code: what it names exists, and what exists is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel

from extproc.cli import cli
from extproc.config.loading import load, parse
from extproc.config.pool_policies import presets
from extproc.config.schema import Config
from extproc.observe.loop_lag import LoopLag
from extproc.observe.metrics import Metrics
from extproc.replay.entrants import entrants
from policies.fleet_state import FleetState
from policies.placement.filters import FILTERS
from policies.placement.policy import PolicySpec
from policies.placement.scorers import SCORERS
from policies.types import Choice, Fallback, Reason
from vllm_adapters.stat_logger.wire import PORT_GAUGE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


# -- docs/configuration.md

_TOLD_AT = {
    "tenants.named": "tenants.default",
    "tenants.spare": "tenants.default.requests",
    "tenants.default.tokens": "tenants.default.requests",
    "tenants.default.policies": "pools[].policy",
    "guard.requests": "tenants.default.requests",
}
"""Sections that are like another, and told there."""


@dataclass(frozen=True)
class Field:
    """One field of a configuration file: `shown` is its default as the page writes it."""

    section: str
    name: str
    shown: str


def _sections_in(annotation: object) -> Iterator[tuple[str, Any]]:
    """Sections within a field's type, each with what its path gets behind the field's name."""
    if isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel)):
        yield "", annotation
    for part in get_args(annotation):
        for suffix, found in _sections_in(part):
            yield "[]" if get_origin(annotation) is tuple else suffix, found


def _fields(section: Any, path: str = "") -> Iterator[Field]:
    """Everything a configuration file may hold."""
    members = _members_of_model if issubclass(section, BaseModel) else _members_of_dataclass
    for name, annotation, default in members(section):
        place = f"{path} ({_kind(section)})" if name in _own_fields(section) else path
        yield Field(place, name, _shown(default))
        for suffix, inner in _sections_in(annotation):
            inside = f"{path}.{name}{suffix}".lstrip(".")
            yield from _fields(inner, _TOLD_AT.get(inside, inside))


def _kind(section: Any) -> str:
    return next(str(field.default) for field in fields(section) if field.name == "kind")


def _own_fields(section: Any) -> set[str]:
    """What only one kind of policy has, or has otherwise; all kinds stand in one place of the file."""
    if not is_dataclass(section) or "kind" not in {field.name for field in fields(section)}:
        return set()
    common = {field.name: field.default for field in fields(PolicySpec)} | {"kind": _kind(section)}
    return {field.name for field in fields(section) if field.name not in common or common[field.name] != field.default}


def _members_of_model(section: type[BaseModel]) -> Iterator[tuple[str, Any, Any]]:
    for name, field in section.model_fields.items():
        yield name, field.annotation, _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


def _members_of_dataclass(section: Any) -> Iterator[tuple[str, Any, Any]]:
    annotations = get_type_hints(section)
    for field in fields(section):
        made = field.default if field.default_factory is MISSING else field.default_factory()
        default = "weighted" if field.name == "kind" else made
        yield field.name, annotations[field.name], _REQUIRED if default is MISSING else default


_REQUIRED = object()


def _shown(default: object) -> str:
    if default is _REQUIRED:
        return "required"
    first = next(iter(default), None) if isinstance(default, tuple) else default
    if isinstance(first, BaseModel):
        return "see below"
    return "none" if default is None else f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


FIELDS = sorted(set(_fields(Config)), key=lambda field: (field.section, field.name))


def _rows(section: str) -> dict[str, str]:
    """The default column of a section's table, by field."""
    place, _, kind = section.partition(" ")
    heading = f"## `{place}` {kind}".rstrip() if section else "## Top level"
    _, found, rest = CONFIGURATION.partition(f"{heading}\n")
    assert found, f"docs/configuration.md has no section {heading}"
    table = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", rest.partition("\n## ")[0], re.MULTILINE)
    return dict(table)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.section}.{field.name}".lstrip("."))
def test_every_config_field_is_documented_with_its_default(field: Field) -> None:
    """In the table of its section, so that the page can be trusted."""
    assert _rows(field.section).get(field.name) == field.shown


def test_no_documented_field_is_an_invention() -> None:
    """What the tables name, a file may hold."""
    known = {(field.section, field.name) for field in FIELDS}
    for section in {section for section, _ in known}:
        assert {(section, name) for name in _rows(section)} <= known


def test_presets_filters_and_scorers_are_all_named() -> None:
    """Everything a policy may refer to by name."""
    rows = _preset_rows()
    assert rows == set(presets())
    for name in (*SCORERS, *(name for name in FILTERS if name not in {"ready", "model"})):
        assert f"`{name}`" in CONFIGURATION or f"[{name}, " in CONFIGURATION or f", {name}]" in CONFIGURATION


def _preset_rows() -> set[str]:
    table = CONFIGURATION.partition("## Policy presets\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_complete_config_shown_is_valid(page: Path) -> None:
    """A reader copies what is shown."""
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if "pools:" in block:
            parse(block, source=page.name)


def test_a_policy_shown_for_a_replay_can_be_replayed(tmp_path: Path) -> None:
    """As a file of its own."""
    [shown] = re.findall(
        r"```yaml\n(policy:.*?)```", (ROOT / "docs" / "replay.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "mine.yaml").write_text(shown)
    assert [entrant.name for entrant in entrants([str(tmp_path / "mine.yaml")])] == ["mine"]


def test_the_example_is_valid_and_fits_the_simulators_defaults() -> None:
    """`pointsman sim --count 4` serves exactly what it lists."""
    pool = load(ROOT / "docs" / "example.yaml").pools[0]
    assert pool.models == ("sim",)
    assert pool.endpoints.static == tuple(f"127.0.0.1:{port}" for port in range(8001, 8005))


# -- docs/metrics.md


def _families() -> list[Metric]:
    metrics = Metrics()
    state = FleetState(stale_after_s=1, max_endpoints=1)
    streams = ("ext_proc_streams_opened_total", "ext_proc_streams_ended_total", "ext_proc_streams_open",
               "requests_unsettled", "prefill_rates_misread_total", "guard_clients_forgotten_total")  # fmt: skip
    metrics.observe_state(state, lambda: dict.fromkeys(streams, 0.0), lambda: 0.0)
    metrics.observe_breakers(list)
    metrics.observe_loop(LoopLag())
    return list(metrics.registry.collect())


def test_every_reason_is_documented() -> None:
    """Each word that a refusal, a decision or a fallback may bring into metrics and logs, and no other."""
    table = METRICS.partition("## Why requests are refused\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(Reason)
    for word in (*Choice, *Fallback):
        assert f"`{word}`" in METRICS


def _name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def test_every_metric_is_documented() -> None:
    """Each name that the page of a running system may show has its row."""
    documented = set(re.findall(r"^\| `((?:pointsman|process)_\w+)` \|", METRICS, re.MULTILINE))
    assert documented == {_name(family) for family in _families()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_metric_that_does_not_exist(page: Path) -> None:
    """Dashboards and alerts are copied from these pages."""
    known = {_name(family) for family in _families()} | {PORT_GAUGE}  # our plugin's, on the engine's page
    named = set(re.findall(r"\b(?:pointsman|process)_\w+", page.read_text(encoding="utf-8"))) - {"pointsman_grpc"}
    assert {name.removesuffix("_bucket") for name in named} <= known


# -- README.md and links


def test_the_readme_names_every_command() -> None:
    """And none that there is not."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `pointsman (\w+)", readme, re.MULTILINE))
    assert named == {command.name or command.callback.__name__ for command in cli.registered_commands}


def test_the_readmes_ports_are_the_defaults() -> None:
    """The table of ports against the schema; what is listened on only when asked for is not in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {field: address for address, field in re.findall(r"^\| ([\d.:]+) \| `([\w.]+)` \|", readme, re.MULTILINE)}
    defaults = {f"{field.section}.{field.name}": field.shown.strip("`") for field in FIELDS}
    always_open = {
        field for field, default in defaults.items() if re.fullmatch(r"listen\.\w+", field) and default[0].isdecimal()
    }
    assert always_open | {"observe.metrics", "admin.listen"} == set(shown)
    assert all(defaults[field] == address for field, address in shown.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files that are there."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_index_lists_every_page() -> None:
    """A page that nothing leads to is not read."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")
