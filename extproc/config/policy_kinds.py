"""Every kind of policy that a config can spell out, as one type. A new kind is a line here and a section in the docs.

Not here: what the kinds do (policies.placement), and presets and third parties' policies by name (pool_policies.py).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BeforeValidator, Field

from policies.placement.marginal_cost import MarginalCostSpec
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
)


def _kind(spec: type[Any]) -> str:
    return next(str(field.default) for field in fields(spec) if field.name == "kind")


KINDS = tuple(_kind(spec) for spec in get_args(_Spec))
"""The policies a section can spell out."""


def _weighted_unless_said(policy: Any) -> Any:  # noqa: ANN401 - what a file holds, or a policy made from it
    return {"kind": "weighted", **policy} if isinstance(policy, dict) else policy


Policy = Annotated[Annotated[_Spec, Field(discriminator="kind")], BeforeValidator(_weighted_unless_said)]
"""How a pool picks an endpoint. A preset name in the pool's `policy` stands for one of these."""
