"""From a pool's `policy` and `hardware` to objects: presets by name, or what the pool spells out.

Not here: what policies do (policies.placement).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from pydantic import TypeAdapter

from extproc.config.near_misses import unknown
from extproc.config.policy_kinds import CustomPolicy, Policy
from extproc.config.schema import Pool
from extproc.config.sections.callers import Quota
from extproc.config.third_party import spec_of
from extproc.config.yaml_text import parse_yaml
from policies.placement.filters import FILTERS
from policies.placement.policy import Policy as BuiltPolicy
from policies.placement.policy import PolicySpec
from policies.placement.profiles import HARDWARE, Profile
from policies.placement.scorers import SCORERS
from policies.placement.weighted import WeightedSpec

_T = TypeVar("_T")


def presets() -> dict[str, PolicySpec]:
    """The policies that ship with Pointsman, by the name a pool's `policy` uses."""
    return dict(_presets())


def policy_of(pool: Pool) -> PolicySpec:
    """The policy a pool names or spells out. Raises ValueError for an unknown preset, or one that is not installed."""
    return _spec_of(pool.policy)


def _spec_of(policy: str | Policy) -> PolicySpec:
    if isinstance(policy, CustomPolicy):
        return spec_of(policy)
    if not isinstance(policy, str):
        return policy
    return _named("preset", policy, _presets())


def profile_of(pool: Pool) -> Profile:
    """What the pool's model costs on its hardware. Raises ValueError for an unknown name."""
    return pool.hardware if isinstance(pool.hardware, Profile) else _named("hardware", pool.hardware, HARDWARE)


def build_policy(pool: Pool) -> BuiltPolicy:
    """The pool's policy object. Raises ValueError for an unknown preset or part."""
    return build(policy_of(pool), _shown_name(pool.policy))


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A policy that some tenants have in a pool instead of the pool's own. `name`: what decisions show."""

    pool: str
    name: str
    spec: PolicySpec


def tenant_policies(quota: Quota, where: str) -> Iterator[TenantPolicy]:
    """Those of one section of `tenants`. Raises ValueError as `policy_of`, beginning with the pool that it is for."""
    for pool, policy in quota.policies.items():
        try:
            yield TenantPolicy(pool, name_for(policy, where), _spec_of(policy))
        except ValueError as error:
            raise ValueError(f"{pool}: {error}") from error


def tenant_policy_faults(quota: Quota, where: str) -> Iterator[str]:
    """Why those of one section cannot be built, each beginning with the pool that it is for."""
    for pool, policy in quota.policies.items():
        try:
            build(_spec_of(policy), name_for(policy, where))
        except ValueError as error:
            yield f"{pool}: {error}"


def name_for(policy: str | Policy, where: str) -> str:
    """What a policy of a section of `tenants` is called: a preset by its name, others by whose they are as well."""
    owner = where.removeprefix("named.") if where.startswith("named.") else f"tenants.{where}"
    return policy if isinstance(policy, str) else f"{_shown_name(policy)} of {owner}"


def build(spec: PolicySpec, name: str) -> BuiltPolicy:
    """The policy object under the name that is shown. Raises ValueError for an unknown part, or none that ranks."""
    faults = _unknown_parts("filter", spec.filters, FILTERS)
    if isinstance(spec, WeightedSpec):
        faults += _unknown_parts("scorer", [scorer.name for scorer in spec.scorers], SCORERS)
    if faults:
        raise ValueError("; ".join(faults))
    if isinstance(spec, WeightedSpec) and not any(scorer.weight for scorer in spec.scorers):
        raise ValueError("nothing ranks the endpoints; name scorers, or use least-request")
    try:
        return spec.build(name)
    except ValueError:
        raise
    except Exception as error:  # a third party's, which must not end a reload
        raise ValueError(f"the policy cannot be made: {error!r}") from error


def _unknown_parts(what: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    return [unknown(f"unknown {what}", name, known) for name in names if name not in known]


def _shown_name(policy: str | Policy) -> str:
    """What metrics and decisions call a policy."""
    if isinstance(policy, CustomPolicy):
        return policy.name
    return policy if isinstance(policy, str) else "inline"


@cache
def _presets() -> dict[str, PolicySpec]:
    folder = resources.files("extproc.config").joinpath("presets")
    adapter: TypeAdapter[Any] = TypeAdapter(Policy)
    return {
        file.name.removesuffix(".yaml"): adapter.validate_python(parse_yaml(file.read_text(encoding="utf-8")))
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }


def _named(what: str, name: str, known: Mapping[str, _T]) -> _T:
    if name not in known:
        raise ValueError(unknown(f"no {what}", name, known))
    return known[name]
