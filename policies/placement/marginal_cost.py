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
    """What is asked for: by one request, of shape (n,), or by w at once, of shape (w, n).

    `longest`: the longest prompt and answer of them, `shortest` the shortest prompt, `most_matched` the most that any
    endpoint holds of any: they tell at once of most terms that there is nothing to calculate.
    """

    prompt_tokens: Each
    answer_tokens: Each
    matched_tokens: Floats
    longest: tuple[float, float]
    shortest: float
    most_matched: float


class MarginalCost:
    """The policy. It keeps nothing: index and ledger are the pool's."""

    def __init__(self, spec: MarginalCostSpec | None = None, name: str = "marginal_cost") -> None:
        self.name = name
        self._spec = spec or MarginalCostSpec()

    def rank(self, view: View, length: int) -> Ranking:
        """Cheapest first."""
        request, matched = view.request, view.matched_tokens
        prompt, answer = request.input_tokens, view.ledger.answer_tokens(request)
        asks = _Asks(prompt, answer, matched, (prompt, answer), prompt, _greatest(matched))
        cost, band, parts = self._cost(view, asks)
        scores = -cost if band is None else -(cost + band)
        return ranking(view, scores, parts, max_score(scores, length, view.rng))

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """What each of w requests would cost at each candidate, without and with the band, in seconds, shape (w, n)."""
        prompts = np.array([request.input_tokens for request in requests], np.float64)[:, None]
        answers = view.ledger.answers_tokens(requests)
        longest, shortest = (float(prompts.max()), float(answers.max())), float(prompts.min())
        cost, band, _ = self._cost(
            view, _Asks(prompts, answers, matched_tokens, longest, shortest, _greatest(matched_tokens))
        )
        return cost, cost if band is None else cost + band

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""

    def _cost(self, view: View, asks: _Asks) -> tuple[Floats, Floats | None, dict[str, Floats]]:
        """The cost, the band if there is one, and the terms of both, in seconds, of the shape of `matched_tokens`."""
        parts = self._terms(view, asks)
        cost: Floats = parts["own"] + parts["stall"] + parts["decode"]
        for name in ("eviction", "overflow"):
            if name in parts:
                cost += parts[name]
            else:
                parts[name] = np.zeros(len(view.slots))
        holders = _cheapest_holders(view, asks, cost)
        if holders is None:
            return cost, None, parts
        parts["band"] = np.where(holders, -self._spec.affinity_band_s, 0.0)
        return cost, parts["band"], parts

    def _terms(self, view: View, asks: _Asks) -> dict[str, Floats]:
        """Without those that are 0 everywhere, where that can be told without calculating them."""
        spec, profile, answer = self._spec, view.ledger.profile, asks.answer_tokens
        uncached = (
            np.maximum(asks.prompt_tokens - asks.matched_tokens, 0.0) if asks.most_matched else asks.prompt_tokens
        )
        rate, wait_s = view.ledger.prefill(view.slots, view.now_s)
        prefill_s = profile.work(asks.prompt_tokens, uncached) / rate
        running, held = _others(view)
        terms = {
            "own": wait_s + prefill_s,
            "stall": spec.stall_weight * running * prefill_s,
            "decode": (spec.decode_weight * answer) * (profile.sequence_s * running + profile.kv_token_s * held),
        }
        prompt_tokens, answer_tokens = asks.longest
        room = view.index.room_tokens(view.slots)
        if prompt_tokens > room.item(room.argmin()):
            terms["eviction"] = self._eviction(view, uncached, room, rate)
        most_held = _greatest(held) + 0.5 * answer_tokens * _greatest(running) + prompt_tokens + answer_tokens
        capacity = view.kv_capacity
        if most_held > capacity.item(capacity.argmin()) or _greatest(running) > profile.max_num_seqs - 1:
            terms["overflow"] = self._overflow(view, asks.prompt_tokens + answer, answer, running, held)
        return terms

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


def _greatest(figures: Floats) -> float:
    """What max() gives, in a fifth of its time."""
    return float(figures.item(figures.argmax()))


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


def _cheapest_holders(view: View, asks: _Asks, cost: Floats) -> Mask | None:
    """Which endpoint is the cheapest of those that hold most of the prompt (several, if level); None if none does.

    Not one that has far more to do than others: it holds what everybody asks for, and others must come to hold it too.
    """
    if asks.most_matched <= _HELD_SHARE * asks.shortest:
        return None
    matched = asks.matched_tokens
    most = np.maximum.reduce(matched, axis=-1, keepdims=True)
    held = most > _HELD_SHARE * asks.prompt_tokens
    of_holders = np.where(matched >= _NEARLY_MOST * most, cost, np.inf)
    load = view.in_flight
    level = held & (of_holders <= np.minimum.reduce(of_holders, axis=-1, keepdims=True) + _LEVEL_S)
    banded: Mask = level & (load <= _SPILL_FACTOR * (np.add.reduce(load) / len(load)) + _SPILL_REQUESTS)
    return banded
