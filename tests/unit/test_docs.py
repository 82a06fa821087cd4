"""The documentation against the code: what it names exists, and what exists is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from extproc.cli import cli
from extproc.config.loading import load, parse
from extproc.config.pool_policies import presets
from extproc.config.schema import Config
from extproc.observe.metrics import Metrics
from policies.fleet_state import FleetState
from policies.placement.filters import FILTERS
from policies.placement.scorers import SCORERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


# -- docs/configuration.md


def _models_in(annotation: object) -> Iterator[tuple[str, type[BaseModel]]]:
    """Models within a field's type, each with what its path gets behind the field's name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    for part in get_args(annotation):
        for suffix, found in _models_in(part):
            yield "[]" if "tuple" in str(annotation) else suffix, found


def _fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, field name, field) of everything a configuration file may hold."""
    for name, field in model.model_fields.items():
        yield path, name, field
        for suffix, inner in _models_in(field.annotation):
            yield from _fields(inner, f"{path}.{name}{suffix}".lstrip("."))


FIELDS = list(_fields(Config))


def _rows(section: str) -> dict[str, str]:
    """The default column of a section's table, by field."""
    heading = f"## `{section}`" if section else "## Top level"
    _, found, rest = CONFIGURATION.partition(f"{heading}\n")
    assert found, f"docs/configuration.md has no section {heading}"
    table = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", rest.partition("\n## ")[0], re.MULTILINE)
    return dict(table)


def _shown(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "see below"
    return "none" if default is None else f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("section", "name", "field"), FIELDS, ids=[f"{s}.{n}".lstrip(".") for s, n, _ in FIELDS])
def test_every_config_field_is_documented_with_its_default(section: str, name: str, field: FieldInfo) -> None:
    """In the table of its section, so that the page can be trusted."""
    assert _rows(section).get(name) == _shown(field)


def test_no_documented_field_is_an_invention() -> None:
    """What the tables name, a file may hold."""
    known = {(section, name) for section, name, _ in FIELDS}
    for section in {section for section, _, _ in FIELDS}:
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
               "requests_unsettled")  # fmt: skip
    metrics.observe_state(state, lambda: dict.fromkeys(streams, 0.0), lambda: 0.0)
    return list(metrics.registry.collect())


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_every_metric_is_documented() -> None:
    """Each name that the page of a running system may show has its row."""
    documented = set(re.findall(r"^\| `(pointsman_\w+)` \|", METRICS, re.MULTILINE))
    assert documented == {_name(family) for family in _families()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_metric_that_does_not_exist(page: Path) -> None:
    """Dashboards and alerts are copied from these pages."""
    known = {_name(family) for family in _families()}
    assert set(re.findall(r"\bpointsman_\w+", page.read_text(encoding="utf-8"))) - {"pointsman_grpc"} <= known


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
    defaults = {f"{s}.{n}": f.default for s, n, f in FIELDS}
    always_open = {
        field for field, default in defaults.items() if field.startswith("listen.") and isinstance(default, str)
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
