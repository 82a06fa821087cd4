"""Policies of other packages: the worked example, installed as pip would leave it, and packages that are broken."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from extproc.config.loading import ConfigError, parse
from extproc.config.pool_policies import build_policy, policy_of
from extproc.config.third_party import GROUP, _loaded
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.placement import Placement
from policies.placement.policy import FormulaSpec, PolicySpec
from policies.placement.prefix_index import PrefixIndex
from policies.types import Decision, InferenceRequest, Kind

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "prompt-tiers"


def _install(site: Path, name: str, entries: dict[str, str], module: Path | str) -> None:
    """Lay a distribution out in `site`: its module and what importlib.metadata reads."""
    if isinstance(module, Path):
        shutil.copy(module, site)
    else:
        (site / f"{name}.py").write_text(module, encoding="utf-8")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{GROUP}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, gone afterwards with the modules that came from it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    _loaded.cache_clear()
    yield tmp_path
    _loaded.cache_clear()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def example(site: Path) -> None:
    """The example's own pyproject.toml says what is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = project["name"].replace("-", "_")
    _install(site, name, project["entry-points"][GROUP], EXAMPLE / f"{name}.py")


def _config(name: str = "prompt-tiers", parameters: str = "{}") -> str:
    policy = f"{{kind: custom, name: {name}, parameters: {parameters}}}"
    return f"pools: [{{name: p, models: [m], endpoints: {{static: []}}, policy: {policy}}}]"


def _fault(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(text)
    return str(error.value).removeprefix("config: ")


@pytest.mark.usefixtures("example")
def test_the_example_is_found_by_name_and_takes_its_parameters() -> None:
    """As its own dataclass, under its own name."""
    [pool] = parse(_config(parameters="{long_tokens: 100}")).pools
    spec = policy_of(pool)
    assert isinstance(spec, FormulaSpec)
    assert (spec.long_tokens, spec.filters) == (100, PolicySpec().filters)  # type: ignore[attr-defined]
    assert build_policy(pool).name == "prompt-tiers"


@pytest.mark.usefixtures("example")
def test_the_example_does_what_it_says() -> None:
    """Long prompts go to the heavy endpoint and short ones to the light, until that is full."""
    [pool] = parse(_config(parameters="{long_tokens: 100}")).pools
    state = FleetState(max_endpoints=2)
    for number, weight in enumerate((1.0, 2.0)):
        slot = state.add(f"10.0.0.{number}:80")
        state.state[slot], state.routable[slot], state.weight[slot] = State.READY, True, weight
        state.kv_capacity_tokens[slot] = 1_000
        state.set_models(slot, frozenset({"m"}))
    placement = Placement("p", build_policy(pool), PrefixIndex(1_000))
    placement.set_members((0, 1))

    def goes_to(tokens: int) -> int:
        decision = placement.choose(InferenceRequest(Kind.CHAT, "m", "m", tokens), state, 0.0, Random(1))
        assert isinstance(decision, Decision)
        return decision.order[0]

    assert (goes_to(99), goes_to(100)) == (0, 1)
    state.in_flight_prompt_tokens[1] = 950
    assert goes_to(100) == 0


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (_config("nobody"), "no policy 'nobody' is installed (entry points 'pointsman.policies': prompt-tiers)"),
        (
            _config(parameters="{long_tokens: 0}"),
            "policy 'prompt-tiers': parameters.long_tokens: Input should be greater",
        ),
        (
            _config(parameters="{lng_tokens: 1}"),
            "policy 'prompt-tiers': parameters.lng_tokens: unknown key; did you mean 'long_tokens'?",
        ),
        (_config(parameters="{zzz: 1}"), "policy 'prompt-tiers': parameters.zzz: unknown key; there are: "),
        (_config(parameters="{filters: [nope]}"), "unknown filter 'nope'"),
    ],
)
def test_what_is_wrong_is_said_when_the_config_is_read(text: str, fault: str) -> None:
    """With the place in the file; `pointsman check` says the same."""
    assert _fault(text).startswith(f"pools[0].policy: {fault}")


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("import nothing_of_this_name", "cannot be loaded: ModuleNotFoundError"),
        ("Thing = 1", "is neither a PolicySpec nor makes one"),
        ("class Thing: pass", "is no subclass of PolicySpec"),
        ("def Thing(parameters): return parameters", "makes a dict, not a PolicySpec"),
        ("def Thing(parameters): return parameters['missing']", "refuses its parameters: KeyError"),
        (
            "from policies.placement.policy import PolicySpec\nclass Thing(PolicySpec): pass",
            "the policy cannot be made: NotImplementedError",
        ),
    ],
)
def test_a_broken_package_is_a_fault_of_the_config(site: Path, module: str, fault: str) -> None:
    """Not of the process that reads it."""
    _install(site, "broken_policies", {"broken": "broken_policies:Thing"}, module)
    assert fault in _fault(_config("broken"))


def test_a_function_may_make_the_policy(site: Path) -> None:
    """From the parameters, whatever they are."""
    module = (
        "from policies.placement.rotation import ConsistentHashSpec\n"
        "def make(parameters): return ConsistentHashSpec(load_factor=parameters['bound'])"
    )
    _install(site, "made_policies", {"made": "made_policies:make"}, module)
    [pool] = parse(_config("made", "{bound: 2.0}")).pools
    assert policy_of(pool).load_factor == 2.0  # type: ignore[attr-defined]
