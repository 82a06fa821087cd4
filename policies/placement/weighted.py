"""Weighted scorers: a mean of preferences in [0, 1], with affinity's share of it bounded.

For fleets whose operators think in weights; marginal_cost.py thinks in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from policies.placement.pickers import PICKERS
from policies.placement.policy import PolicySpec, ranking
from policies.placement.scorers import AFFINITY_SCORERS, SCORERS, Windows, queue_depth
from policies.placement.view import View
from policies.types import Decision, Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerWeight:
    """One scorer and what it weighs beside the others."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    weight: Annotated[float, Ge(0), Le(1e6)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSpec(PolicySpec):
    """Scorers with their weights, a picker, the scales of the scorers and the bound on affinity.

    `switch_margin`: scores closer than this are equal, and chance decides. `demote_above`: an endpoint with more than
    this share of the queue window waiting comes after all others.
    """

    kind: Literal["weighted"] = "weighted"
    scorers: tuple[ScorerWeight, ...] = ()
    picker: Literal["max_score", "power_of_two"] = "max_score"
    max_affinity_share: Annotated[float, Ge(0), Le(1)] = 0.3
    spill_factor: Annotated[float, Ge(1), Le(1e6)] = 1.25
    switch_margin: Annotated[float, Ge(0), Le(1)] = 0.0
    demote_above: Annotated[float, Gt(0), Le(1)] | None = None
    queue_window: Annotated[int, Gt(0)] = 10
    concurrency_window: Annotated[int, Gt(0)] = 64

    def build(self, name: str) -> Weighted:
        """The policy. Raises ValueError for an unknown scorer."""
        return Weighted(self, name)


class Weighted:
    """The weighted mean of scorers, with affinity's share of the weight bounded (no hot spots by configuration)."""

    def __init__(self, spec: WeightedSpec, name: str = "weighted") -> None:
        """Raise ValueError for an unknown scorer or picker."""
        _refuse_unknown("scorer", [scorer.name for scorer in spec.scorers], SCORERS)
        _refuse_unknown("picker", [spec.picker], PICKERS)
        self.name = name
        self._windows = Windows(
            queue_window=spec.queue_window,
            concurrency_window=spec.concurrency_window,
            spill_factor=spec.spill_factor,
        )
        self._pick = PICKERS[spec.picker]
        self._margin = spec.switch_margin
        self._demote_above = spec.demote_above
        self._scorers = [(name, weight, SCORERS[name]) for name, weight in bounded_weights(spec)]

    def rank(self, view: View, length: int) -> Ranking:
        """Sum the weighted scores and pick; with no scorers every candidate is equal."""
        total = np.zeros(len(view.slots))
        parts = {}
        for name, weight, score in self._scorers:
            part = score(view, self._windows)
            parts[name] = part
            total += weight * part
        if self._demote_above is not None:
            parts["demoted"] = np.where(queue_depth(view, self._windows) < 1 - self._demote_above, -1.0, 0.0)
            total += parts["demoted"]
        return ranking(view, total, parts, self._pick(total, length, view.rng, self._margin))

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""


def bounded_weights(spec: WeightedSpec) -> list[tuple[str, float]]:
    """Weights that sum to 1, the affinity scorers' sum at most `max_affinity_share` (if anything else scores)."""
    pairs = [(scorer.name, scorer.weight) for scorer in spec.scorers]
    affinity = sum(weight for name, weight in pairs if name in AFFINITY_SCORERS)
    others = sum(weight for name, weight in pairs if name not in AFFINITY_SCORERS)
    total = affinity + others
    if not total:
        return [(name, 0.0) for name, _ in pairs]
    share = min(affinity / total, spec.max_affinity_share) if others else 1.0
    scale = {True: share / affinity if affinity else 0.0, False: (1 - share) / others if others else 0.0}
    return [(name, weight * scale[name in AFFINITY_SCORERS]) for name, weight in pairs]


def _refuse_unknown(what: str, names: list[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(sorted(known))}")
