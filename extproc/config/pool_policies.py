"""From a pool's `policy` to a policy object: presets by name, policies spelled out, and what both are made of.

Not here: what policies do (policies.placement).
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from extproc.config.schema import Policy, Pool
from extproc.config.yaml_text import parse_yaml
from policies.placement.filters import FILTERS
from policies.placement.policy import ConsistentHash, RoundRobin, Weighted, WeightedSpec
from policies.placement.policy import Policy as BuiltPolicy
from policies.placement.scorers import Windows


def presets() -> dict[str, Policy]:
    """The policies that ship with Pointsman, by the name a pool's `policy` uses."""
    return dict(_presets())


def policy_of(policy: str | Policy) -> Policy:
    """The policy a pool names or spells out. Raises KeyError for an unknown preset."""
    return policy if isinstance(policy, Policy) else _presets()[policy]


@cache
def _presets() -> dict[str, Policy]:
    folder = resources.files("extproc.config").joinpath("presets")
    return {
        file.name.removesuffix(".yaml"): Policy.model_validate(parse_yaml(file.read_text(encoding="utf-8")))
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }


def build_policy(pool: Pool) -> BuiltPolicy:
    """The pool's policy object. Raises KeyError for an unknown preset, ValueError for an unknown part."""
    spec = policy_of(pool.policy)
    name = pool.policy if isinstance(pool.policy, str) else "inline"
    for unknown in set(spec.filters) - set(FILTERS):
        raise ValueError(f"unknown filter {unknown!r}; there are: {', '.join(sorted(FILTERS))}")
    if spec.kind == "round_robin":
        return RoundRobin(name)
    if spec.kind == "consistent_hash":
        return ConsistentHash(name, load_factor=spec.load_factor)
    return Weighted(_weighted_spec(name, spec))


def _weighted_spec(name: str, spec: Policy) -> WeightedSpec:
    windows = Windows(
        queue_window=spec.queue_window,
        concurrency_window=spec.concurrency_window,
        spill_factor=spec.spill_factor,
    )
    weights = tuple((scorer.name, scorer.weight) for scorer in spec.scorers)
    return WeightedSpec(name, weights, spec.picker, windows, spec.max_affinity_share)
