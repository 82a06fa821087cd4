"""Every kind of policy that a config can spell out, as one type. A new kind is a line here and a section in the docs.

Not here: what the kinds do (policies.placement), presets by name (pool_policies.py), and how a third party's policy is
found (third_party.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field

from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.peers import (
    AibrixPrefixSpec,
    CacheAwareSpec,
    DynamoKvSpec,
    LlmDSpec,
    LmetricSpec,
    PrebleE2Spec,
    SmgCacheAwareSpec,
)
from policies.placement.rotation import ConsistentHashSpec, RoundRobinSpec, WeightedRoundRobinSpec
from policies.placement.weighted import WeightedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomPolicy:
    """A policy that another package brings, by the name of its entry point, with the fields of its own spec."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["custom"] = "custom"
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


_Spec: TypeAlias = (
    MarginalCostSpec
    | WeightedSpec
    | RoundRobinSpec
    | WeightedRoundRobinSpec
    | ConsistentHashSpec
    | CacheAwareSpec
    | SmgCacheAwareSpec
    | AibrixPrefixSpec
    | LlmDSpec
    | DynamoKvSpec
    | LmetricSpec
    | PrebleE2Spec
    | CustomPolicy
)


def _kind(spec: type[Any]) -> str:
    return next(str(field.default) for field in fields(spec) if field.name == "kind")


KINDS = tuple(_kind(spec) for spec in get_args(_Spec))
"""The policies a section can spell out."""


def _weighted_unless_said(policy: Any) -> Any:  # noqa: ANN401 - what a file holds, or a policy made from it
    return {"kind": "weighted", **policy} if isinstance(policy, dict) else policy


Policy = Annotated[Annotated[_Spec, Field(discriminator="kind")], BeforeValidator(_weighted_unless_said)]
"""How a pool picks an endpoint. A preset name in the pool's `policy` stands for one of these."""
