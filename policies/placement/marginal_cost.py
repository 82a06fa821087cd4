"""Marginal latency cost: an endpoint is charged with the latency that placing the request there adds to everybody.

Seconds, lower wins. The terms, for a request of L prompt tokens of which the endpoint lacks u:

    own        (backlog + work) / rate               its wait and its own prefill
    stall      stall_weight * n * work / rate        the n requests already there wait while it prefills; ours, and any
                                                     that scrapes tell of beside them (after a restart, say)
    decode     decode_weight * O * (c n + d T)       its own answer of O tokens is slower beside n requests of T tokens
    eviction   eviction_weight * u / rate * fade     idle prefixes pushed out that others may still want
    overflow   overflow_s * excess                   of KV cache or batch places: it would wait inside the engine
    band       -affinity_band_s                      for the cheapest holder of more than half of the prompt

`work` includes attention (profiles.py), backlog and rate are the ledger's. The band is there because a prediction is
never so exact that a cache should be given up for less; but not for a holder with far more to do than the others, or
one hot prefix would keep everybody on one endpoint while the rest idle.

Without stall and decode this is predicted TTFT, which is worse end to end than a good heuristic: it sends long
prompts where they hurt others. Rejected as well: normalised weighted scores (no unit, so no honest trade-off between
a queue and a cache) and a learned regressor (needs a training set per fleet, and nobody can say why it chose).
Formula and constants were found by simulation on public traces; docs/benchmarks.md has the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from annotated_types import Ge, Gt, Le

from policies.placement.pickers import max_score
from policies.placement.policy import PolicySpec, ranking
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, Mask, Ranking

_HELD_SHARE = 0.5
"""Of the prompt: from here on its cache is worth more than the prediction is exact."""
_NEARLY_MOST = 0.9
"""Endpoints that hold this much of what the best one holds are holders as well."""
_SPILL_FACTOR, _SPILL_REQUESTS = 1.5, 4.0
"""A holder above so many times the mean load, and so many requests, has no band: a hot prefix spreads."""
_FAR_S = 1e9
"""Beyond any cost of a holder."""
_LEVEL_S = 1e-9
"""Costs closer than this differ by rounding alone."""

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

    def build(self, name: str) -> MarginalCost:
        """The policy."""
        return MarginalCost(self, name)


Each: TypeAlias = float | Floats
"""A figure of one request; or of w requests, shape (w, 1)."""


@dataclass(frozen=True, slots=True)
class _Asks:
    """What is asked for: by one request, its figures and (n,) matched tokens, or by w at once, (w, 1) and (w, n).

    `shortest_prompt`, `longest_prompt`, `longest_answer`, `most_matched`: of all of them. They tell at once of most
    terms that there is nothing to calculate.
    """

    prompt_tokens: Each
    answer_tokens: Each
    matched_tokens: Floats
    shortest_prompt: float
    longest_prompt: float
    longest_answer: float
    most_matched: float

    @property
    def uncached_tokens(self) -> Each:
        if not self.most_matched:
            return self.prompt_tokens
        missing = self.prompt_tokens - self.matched_tokens
        return missing if self.most_matched <= self.shortest_prompt else np.maximum(missing, 0.0)


class MarginalCost:
    """The policy. It keeps nothing: index and ledger are the pool's."""

    def __init__(self, spec: MarginalCostSpec | None = None, name: str = "marginal_cost") -> None:
        self.name = name
        self._spec = spec or MarginalCostSpec()

    def rank(self, view: View, length: int) -> Ranking:
        """Cheapest first."""
        matched, prompt = view.matched_tokens, float(view.request.input_tokens)
        answer, most_matched = view.ledger.answer_tokens(view.request), _greatest(matched)
        cost, parts = self._cost(view, _Asks(prompt, answer, matched, prompt, prompt, answer, most_matched))
        if most_matched > _HELD_SHARE * prompt:
            parts["band"] = self._band(view, matched, most_matched, cost)
            cost = cost + parts["band"]
        scores = -cost
        return ranking(view, scores, parts, max_score(scores, length, view.rng))

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """What each of w requests would cost at each candidate, without and with the band, in seconds, shape (w, n)."""
        prompts = np.array([request.input_tokens for request in requests], np.float64)[:, None]
        answers = view.ledger.answers_tokens(requests)
        most_matched = matched_tokens.max(axis=1, keepdims=True)
        extremes = prompts.min(), prompts.max(), answers.max(), most_matched.max()
        cost, _ = self._cost(view, _Asks(prompts, answers, matched_tokens, *map(float, extremes)))
        of_holders = np.where(most_matched > _HELD_SHARE * prompts, most_matched, np.inf)
        return cost, cost + self._band(view, matched_tokens, of_holders, cost)

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""

    def _cost(self, view: View, asks: _Asks) -> tuple[Floats, dict[str, Floats]]:
        """The cost without the band and its terms, in seconds, of the shape of `matched_tokens`."""
        spec, profile, answer = self._spec, view.ledger.profile, asks.answer_tokens
        uncached = asks.uncached_tokens
        running, held = _others(view)
        rate, wait_s = view.ledger.prefill(view.slots, view.now_s)
        prefill_s = profile.work(asks.prompt_tokens, uncached) / rate
        parts = {
            "own": wait_s + prefill_s,
            "stall": spec.stall_weight * running * prefill_s,
            "decode": (spec.decode_weight * answer) * (profile.sequence_s * running + profile.kv_token_s * held),
        }
        cost: Floats = parts["own"] + parts["stall"] + parts["decode"]
        parts["eviction"] = parts["overflow"] = np.zeros(len(view.slots))
        room = view.index.room_tokens(view.slots)
        if asks.longest_prompt > room.item(room.argmin()):
            parts["eviction"] = self._eviction(view, uncached, room, rate)
            cost += parts["eviction"]
        if _may_overflow(view, asks, running, held):
            parts["overflow"] = self._overflow(view, asks.prompt_tokens + answer, answer, running, held)
            cost += parts["overflow"]
        return cost, parts

    def _eviction(self, view: View, uncached: Each, room: Floats, rate: Floats) -> Floats:
        # nothing idle, nothing lost: what is in use is not evicted, and overflow counts what does not fit
        since_s = view.index.oldest_at_s(view.slots)
        idle_s = np.where(np.isinf(since_s), np.inf, view.now_s - since_s)
        fade = np.exp(-idle_s / self._spec.eviction_fade_s)
        lost: Floats = np.where(uncached > room, self._spec.eviction_weight * uncached / rate * fade, 0.0)
        return lost

    def _overflow(self, view: View, tokens: Each, answer: Each, running: Floats, held: Floats) -> Floats:
        """Excess over the KV cache or the batch, each as a share of its size, in the spec's seconds per whole size."""
        capacity = view.kv_capacity
        most = view.ledger.profile.max_num_seqs
        memory = (held + 0.5 * answer * running + tokens - capacity) / capacity
        places = (running + (1 - most)) / most
        excess: Floats = self._spec.overflow_s * np.maximum(np.maximum(memory, places), 0.0)
        return excess

    def _band(self, view: View, matched: Floats, most: Each, cost: Floats) -> Floats:
        """For the cheapest of those that hold most of a prompt (several, if level), where `most` is held by any.

        Not for one that has far more to do than others: it holds what everybody asks for, and others must come to hold
        it too.
        """
        load, less = view.in_flight, matched < _NEARLY_MOST * most
        of_holders = cost + _FAR_S * less  # as np.where would, in half the time
        banded: Mask = of_holders <= _least(of_holders) + _LEVEL_S
        banded &= load <= _SPILL_FACTOR * (np.add.reduce(load) / len(load)) + _SPILL_REQUESTS
        band = np.zeros(cost.shape)
        band[banded & ~less] = -self._spec.affinity_band_s
        return band


def _may_overflow(view: View, asks: _Asks, running: Floats, held: Floats) -> bool:
    """By the greatest figures, whosever they are: False where surely nothing overflows anywhere."""
    most_running, capacity = _greatest(running), view.kv_capacity
    tokens = _greatest(held) + 0.5 * asks.longest_answer * most_running + asks.longest_prompt + asks.longest_answer
    return tokens > capacity.item(capacity.argmin()) or most_running > view.ledger.profile.max_num_seqs - 1


def _least(figures: Floats) -> Each:
    """The least, or that of each row."""
    if figures.ndim > 1:
        return np.minimum.reduce(figures, axis=-1, keepdims=True)
    least: float = figures.item(figures.argmin())
    return least


def _greatest(figures: Floats) -> float:
    """What max() gives, in a fifth of its time."""
    most: float = figures.item(figures.argmax())
    return most


def _others(view: View) -> tuple[Floats, Floats]:
    """Requests running on each endpoint and the tokens of their prompts: ours, and those we know of by scrapes only.

    Of the latter nothing is known but their number; their prompts are taken to be like ours.
    """
    running, held = view.in_flight, view.prompt_tokens_in_flight
    if not view.state.has_foreign:
        return running, held
    foreign = view.foreign
    ours = running.sum()
    each = held.sum() / ours if ours else float(view.request.input_tokens)
    return running + foreign, held + each * foreign
