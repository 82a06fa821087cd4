"""The default policy in plain data, as a config spells it. Not here: the formula (marginal_cost.py).

Apart from it since pydantic reads this class, and what pydantic reads cannot be compiled (hatch_build.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from policies.placement.policy import Policy, PolicySpec

Weight = Annotated[float, Ge(0), Le(1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalCostSpec(PolicySpec):
    """Weights of the terms; a weight of 0 leaves a term out. Seconds where the name says so."""

    kind: Literal["marginal_cost"] = "marginal_cost"
    stall_weight: Weight = 0.1
    decode_weight: Weight = 0.6
    eviction_weight: Weight = 3.0
    eviction_fade_s: Annotated[float, Gt(0), Le(1e6)] = 120.0
    overflow_s: Weight = 10.0
    affinity_band_s: Weight = 3.0

    def build(self, name: str) -> Policy:
        """The policy."""
        from policies.placement.marginal_cost import MarginalCost  # which reads this class

        return MarginalCost(self, name)
