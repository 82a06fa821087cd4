"""Long prompts to the endpoints with much weight, short ones to the rest; within a tier fewest tokens in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from policies.placement.policy import FormulaSpec, Scored
from policies.placement.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTiersSpec(FormulaSpec):
    """`long_tokens`: a prompt of so many is long. `heavy`: an endpoint of this weight or more takes long ones."""

    long_tokens: Annotated[int, Gt(0)] = 8_000
    heavy: Annotated[float, Gt(0)] = 2.0
    spill_at: Annotated[float, Ge(0)] = 0.9

    def scored(self, view: View) -> Scored:
        """1 in the right tier and 0 in the other, less the share of the KV cache that requests in flight claim.

        A tier that is fuller than `spill_at` is left for the other one.
        """
        is_long = view.request.input_tokens >= self.long_tokens
        right_tier = (view.state.weight[view.slots] >= self.heavy) == is_long
        fits = view.kv_claimed < self.spill_at
        parts = {"tier": np.where(right_tier & fits, 1.0, 0.0), "load": -view.kv_claimed}
        return parts["tier"] + parts["load"], parts
