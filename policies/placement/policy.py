"""What a policy is: a ranking of the candidates that the filters left, and the plain data it is made from.

A policy ranks; it reads and never writes. What it must remember (whose turn it is) changes in `committed`, so the same
`rank` serves live decisions, explanations and replays. The policies themselves: weighted.py, rotation.py,
marginal_cost.py, peers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from annotated_types import Gt

from policies.placement.pickers import max_score
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy in plain data, as a config's `policy` section spells it.

    `filters` apply beside the ones that always do. `index_tokens`: what the prefix index holds of an endpoint; None for
    what the endpoint's cache holds, which is right for all but comparisons.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    filters: tuple[str, ...] = ("excluded", "context")
    index_tokens: Annotated[int, Gt(0)] | None = None

    def build(self, name: str) -> Policy:
        """The policy, under the name that metrics and decisions show. Raises ValueError for an unknown part."""
        raise NotImplementedError


class BadScore(Exception):
    """A policy picked by a score that is none."""


class Policy(Protocol):
    """What every policy offers. `name` appears in metrics and decisions."""

    name: str

    def rank(self, view: View, length: int) -> Ranking:
        """Order at most `length` candidates, best first. Reads only; the view has at least one candidate."""
        ...

    def committed(self, decision: Decision) -> None:
        """The decision was carried out."""
        ...


@runtime_checkable
class Pricing(Protocol):
    """A policy that can say what places cost: late binding (admission/binding.py) weighs waiting against that."""

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """What each of w requests would cost at each of the view's candidates, and by what it would choose: the lowest.

        Both in seconds and of shape (w, n), as `matched_tokens`.
        """
        ...


def ranking(view: View, scores: Floats, parts: dict[str, Floats], positions: list[int]) -> Ranking:
    """`positions` into the view's candidates, best first, as slots. Numpy's integers will do as well."""
    order, first = [view.slots.item(position) for position in positions], int(positions[0])
    return Ranking(order, view.slots, first, scores.item(first), lambda: (scores, parts))


Scored: TypeAlias = tuple[Floats, dict[str, Floats]]
"""What a formula makes of the candidates: one score each, the highest wins, and the parts for the explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaSpec(PolicySpec):
    """A policy that is one formula over the candidates and remembers nothing. Ties are broken by chance."""

    def scored(self, view: View) -> Scored:
        """Scores and parts, each of shape (n,) and finite. Reads only; the view has at least one candidate."""
        raise NotImplementedError

    def build(self, name: str) -> Formula:
        """The policy."""
        return Formula(self, name)


class Formula:
    """A FormulaSpec as a policy."""

    def __init__(self, spec: FormulaSpec, name: str) -> None:
        self.name = name
        self._spec = spec

    def rank(self, view: View, length: int) -> Ranking:
        """Highest score first."""
        scores, parts = self._spec.scored(view)
        return ranking(view, scores, parts, max_score(scores, length, view.rng))

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""
