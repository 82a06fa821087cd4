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

The formula stands here twice, over arrays and over plain floats. Of few endpoints the loop over floats takes a fraction
of the time: numpy takes a microsecond for each of thirty calls, and several where its code is not in the processor's
caches. Both take the same steps in the same order, so they agree to the last bit (test_marginal_cost.py compares them;
but for an eviction's last bit where numpy's exp is its own), and what explains a loop's costs is made by the arrays,
once somebody reads it. Rejected: one text for both. Half of it would be about what differs between them (minima,
conditions, missing dimensions), at a call for each term and endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from annotated_types import Ge, Gt, Le

from policies.placement.pickers import max_of_few, max_score
from policies.placement.policy import PolicySpec, Scored, ranking
from policies.placement.profiles import Profile
from policies.placement.view import View
from policies.types import Decision, FewSlots, Floats, InferenceRequest, Mask, Ranking

_HELD_SHARE = 0.5
"""Of the prompt: from here on its cache is worth more than the prediction is exact."""
_NEARLY_MOST = 0.9
"""Endpoints that hold this much of what the best one holds are holders as well."""
_SPILL_FACTOR, _SPILL_REQUESTS = 1.5, 4.0
"""A holder above so many times the mean load, and so many requests, has no band: a hot prefix spreads."""
_FAR_S = 1e300
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
_Column = TypeVar("_Column", Floats, Sequence[float])
"""One figure per candidate."""


class _Asks(msgspec.Struct, Generic[_Column]):
    """What is asked for: by one request, its figures and (n,) matched tokens, or by w at once, (w, 1) and (w, n).

    `shortest_prompt`, `longest_prompt`, `longest_answer`, `most_matched`: of all of them. They tell at once of most
    terms that there is nothing to calculate.
    """

    prompt_tokens: Each
    answer_tokens: Each
    matched_tokens: _Column
    shortest_prompt: float
    longest_prompt: float
    longest_answer: float
    most_matched: float


class _Figures(msgspec.Struct, Generic[_Column]):
    """What the formula takes of the candidates, as they were when the request was placed.

    `running`, `held`: requests on each endpoint and the tokens of their prompts; `in_flight`: ours among them.
    `room`, and for `idle_s` what would be evicted next is idle: None where all that is asked for has room everywhere.
    `capacity`: None where surely nothing overflows anywhere. Decisions are kept by the thousand, and so are these.
    """

    profile: Profile
    in_flight: _Column
    running: _Column
    held: _Column
    rate: _Column
    wait_s: _Column
    capacity: _Column | None
    room: _Column | None
    idle_s: _Column | None


class MarginalCost:
    """The policy. It keeps nothing: index and ledger are the pool's."""

    def __init__(self, spec: MarginalCostSpec | None = None, name: str = "marginal_cost") -> None:
        self.name = name
        self._spec = spec or MarginalCostSpec()

    def rank(self, view: View, length: int) -> Ranking:
        """Cheapest first."""
        few = view.few
        if few is not None:
            return self._rank_few(view, few, length)
        asks = _asked(view, view.matched_tokens, _greatest(view.matched_tokens))
        scores, parts = self._scored(asks, _figures(view, asks))
        return ranking(view, scores, parts, max_score(scores, length, view.rng))

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """What each of w requests would cost at each candidate, without and with the band, in seconds, shape (w, n)."""
        prompts = np.array([request.input_tokens for request in requests], np.float64)[:, None]
        answers = view.ledger.answers_tokens(requests)
        most_matched = matched_tokens.max(axis=1, keepdims=True)
        extremes = prompts.min(), prompts.max(), answers.max(), most_matched.max()
        asks = _Asks(prompts, answers, matched_tokens, *map(float, extremes))
        figures = _figures(view, asks)
        cost, _ = self._cost(asks, figures)
        of_holders = np.where(most_matched > _HELD_SHARE * prompts, most_matched, np.inf)
        return cost, cost + self._band(figures.in_flight, matched_tokens, of_holders, cost)

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""

    # -- over arrays: many candidates, many requests, and explanations

    def _scored(self, asks: _Asks[Floats], figures: _Figures[Floats]) -> Scored:
        """Scores and parts for one request."""
        cost, parts = self._cost(asks, figures)
        if asks.most_matched > _HELD_SHARE * asks.longest_prompt:
            parts["band"] = self._band(figures.in_flight, asks.matched_tokens, asks.most_matched, cost)
            cost = cost + parts["band"]
        return -cost, parts

    def _cost(self, asks: _Asks[Floats], figures: _Figures[Floats]) -> tuple[Floats, dict[str, Floats]]:
        """The cost without the band and its terms, in seconds, of the shape of `matched_tokens`."""
        spec, profile, answer = self._spec, figures.profile, asks.answer_tokens
        uncached, running = _uncached(asks), figures.running
        prefill_s = profile.work(asks.prompt_tokens, uncached) / figures.rate
        parts = {
            "own": figures.wait_s + prefill_s,
            "stall": spec.stall_weight * running * prefill_s,
            "decode": (spec.decode_weight * answer)
            * (profile.sequence_s * running + profile.kv_token_s * figures.held),
        }
        cost: Floats = parts["own"] + parts["stall"] + parts["decode"]
        parts["eviction"] = parts["overflow"] = np.zeros(len(running))
        if figures.room is not None and figures.idle_s is not None:
            parts["eviction"] = self._eviction(uncached, figures.rate, figures.room, figures.idle_s)
            cost += parts["eviction"]
        if figures.capacity is not None:
            parts["overflow"] = self._overflow(figures, figures.capacity, asks.prompt_tokens + answer, answer)
            cost += parts["overflow"]
        return cost, parts

    def _eviction(self, uncached: Each, rate: Floats, room: Floats, idle_s: Floats) -> Floats:
        # nothing idle, nothing lost: what is in use is not evicted, and overflow counts what does not fit
        spec, fade = self._spec, np.exp(-idle_s / self._spec.eviction_fade_s)
        lost: Floats = np.where(uncached > room, spec.eviction_weight * uncached / rate * fade, 0.0)
        return lost

    def _overflow(self, figures: _Figures[Floats], capacity: Floats, tokens: Each, answer: Each) -> Floats:
        """Excess over the KV cache or the batch, each as a share of its size, in the spec's seconds per whole size."""
        running, most = figures.running, figures.profile.max_num_seqs
        memory = (figures.held + 0.5 * answer * running + tokens - capacity) / capacity
        places = (running + (1 - most)) / most
        excess: Floats = self._spec.overflow_s * np.maximum(np.maximum(memory, places), 0.0)
        return excess

    def _band(self, load: Floats, matched: Floats, most: Each, cost: Floats) -> Floats:
        """For the cheapest of those that hold most of a prompt (several, if level), where `most` is held by any.

        Not for one that has far more to do than others: it holds what everybody asks for, and others must come to hold
        it too.
        """
        less = matched < _NEARLY_MOST * most
        of_holders = cost + _FAR_S * less  # as np.where would, in half the time
        banded: Mask = of_holders <= _least(of_holders) + _LEVEL_S
        banded &= load <= _SPILL_FACTOR * (np.add.reduce(load) / len(load)) + _SPILL_REQUESTS
        band = np.zeros(cost.shape)
        band[banded & ~less] = -self._spec.affinity_band_s
        return band

    # -- the same over floats: one request and few candidates

    def _rank_few(self, view: View, few: FewSlots, length: int) -> Ranking:
        matched = view.matched_of_few
        asks = _asked(view, matched, max(matched))
        figures = _figures_of_few(view, few, asks)
        scores = self._scores_of_few(asks, figures)
        if asks.most_matched > _HELD_SHARE * asks.longest_prompt:
            self._add_band(figures.in_flight, matched, asks.most_matched, scores)
        positions = max_of_few(scores[:], length, view.rng)
        first, listed = positions[0], few.listed
        order = [listed[position] for position in positions]
        return Ranking(order, view.slots, first, scores[first], partial(self._explained, asks, figures))

    def _explained(self, asks: _Asks[Sequence[float]], figures: _Figures[Sequence[float]]) -> Scored:
        """The same scores again, and their parts."""
        return self._scored(_as_arrays(asks), _as_arrays(figures))

    def _scores_of_few(self, asks: _Asks[Sequence[float]], figures: _Figures[Sequence[float]]) -> list[float]:
        """As `_cost`, but below zero."""
        profile, prompt, answer = figures.profile, asks.longest_prompt, asks.longest_answer
        stall, decode = self._spec.stall_weight, self._spec.decode_weight * answer
        sequence_s, kv_token_s = profile.sequence_s, profile.kv_token_s
        work = profile.work
        whole = work(prompt, prompt)
        columns = zip(
            asks.matched_tokens, figures.rate, figures.wait_s, figures.running, figures.held, strict=True
        )  # fmt: skip
        scores = [
            -(wait_s + prefill_s + stall * running * prefill_s + decode * (sequence_s * running + kv_token_s * held))
            for matched, rate, wait_s, running, held in columns
            for prefill_s in [(work(prompt, max(prompt - matched, 0.0)) if matched else whole) / rate]
        ]
        if figures.room is not None and figures.idle_s is not None:
            lost = zip(asks.matched_tokens, figures.rate, figures.room, figures.idle_s, strict=True)
            self._add_eviction(prompt, lost, scores)
        if figures.capacity is not None:
            load = zip(figures.held, figures.running, figures.capacity, strict=True)
            self._add_overflow(prompt + answer, answer, profile.max_num_seqs, load, scores)
        return scores

    def _add_eviction(self, prompt: float, lost: Iterable[tuple[float, ...]], scores: list[float]) -> None:
        weight, fade_s = self._spec.eviction_weight, self._spec.eviction_fade_s
        for position, (matched, rate, room, idle_s) in enumerate(lost):
            uncached = max(prompt - matched, 0.0) if matched else prompt
            if uncached > room:
                scores[position] -= weight * uncached / rate * exp(-idle_s / fade_s)

    def _add_overflow(
        self, tokens: float, answer: float, most: int, load: Iterable[tuple[float, ...]], scores: list[float]
    ) -> None:
        for position, (held, running, capacity) in enumerate(load):
            memory = (held + 0.5 * answer * running + tokens - capacity) / capacity
            scores[position] -= self._spec.overflow_s * max(memory, (running + (1 - most)) / most, 0.0)

    def _add_band(self, load: Sequence[float], matched: Sequence[float], most: float, scores: list[float]) -> None:
        enough = _NEARLY_MOST * most
        holders = [position for position, tokens in enumerate(matched) if tokens >= enough]
        level = max([scores[position] for position in holders]) - _LEVEL_S
        usual = _SPILL_FACTOR * (sum(load) / len(load)) + _SPILL_REQUESTS
        for position in holders:
            if scores[position] >= level and load[position] <= usual:
                scores[position] += self._spec.affinity_band_s


def _as_arrays(of_few: Any) -> Any:  # noqa: ANN401 - either struct, with arrays for its lists
    fields = msgspec.structs.astuple(of_few)
    return type(of_few)(*[np.array(field) if isinstance(field, list | tuple) else field for field in fields])


def _asked(view: View, matched: _Column, most_matched: float) -> _Asks[_Column]:
    """By one request."""
    prompt, answer = float(view.request.input_tokens), view.ledger.answer_tokens(view.request)
    return _Asks(prompt, answer, matched, prompt, prompt, answer, most_matched)


def _uncached(asks: _Asks[Floats]) -> Each:
    if not asks.most_matched:
        return asks.prompt_tokens
    missing = asks.prompt_tokens - asks.matched_tokens
    return missing if asks.most_matched <= asks.shortest_prompt else np.maximum(missing, 0.0)


def _figures(view: View, asks: _Asks[Floats]) -> _Figures[Floats]:
    profile, capacity = view.ledger.profile, view.kv_capacity
    running, held = _others(view)
    rate, wait_s = view.ledger.prefill(view.slots, view.now_s)
    figures: _Figures[Floats] = _Figures(profile, view.in_flight, running, held, rate, wait_s, None, None, None)
    room = view.index.room_tokens(view.slots)
    if asks.longest_prompt > _least_of(room):
        figures.room, figures.idle_s = room, _idle_s(view)
    if _may_overflow(asks, profile, _greatest(running), _greatest(held), _least_of(capacity)):
        figures.capacity = capacity
    return figures


def _figures_of_few(view: View, few: FewSlots, asks: _Asks[Sequence[float]]) -> _Figures[Sequence[float]]:
    profile, now_s = view.ledger.profile, view.now_s
    in_flight, held, capacity, foreign = view.state.load_of_few(few)
    running = in_flight
    if any(foreign):
        running, held = [column.tolist() for column in _others(view)]
    rate, wait_s = view.ledger.prefill_of_few(few, now_s)
    figures: _Figures[Sequence[float]] = _Figures(profile, in_flight, running, held, rate, wait_s, None, None, None)
    room = view.index.room_of_few(few)
    if asks.longest_prompt > min(room):
        oldest_at_s = view.index.oldest_of_few(few)
        figures.room, figures.idle_s = room, [max(now_s - at_s, 0.0) if at_s < inf else inf for at_s in oldest_at_s]
    if _may_overflow(asks, profile, max(running), max(held), min(capacity)):
        figures.capacity = capacity
    return figures


def _idle_s(view: View) -> Floats:
    """How long what would be evicted next is idle; endless where nothing is."""
    since_s = view.index.oldest_at_s(view.slots)
    return np.where(np.isinf(since_s), np.inf, np.maximum(view.now_s - since_s, 0.0))


def _may_overflow(
    asks: _Asks[_Column], profile: Profile, most_running: float, most_held: float, least_capacity: float
) -> bool:
    """By the greatest figures, whosever they are: False where surely nothing overflows anywhere."""
    tokens = most_held + 0.5 * asks.longest_answer * most_running + asks.longest_prompt + asks.longest_answer
    return tokens > least_capacity or most_running > profile.max_num_seqs - 1


def _least_of(figures: Floats) -> float:
    """What min() gives, in a fifth of its time."""
    least: float = figures.item(figures.argmin())
    return least


def _least(figures: Floats) -> Each:
    """The least, or that of each row."""
    if figures.ndim > 1:
        return np.minimum.reduce(figures, axis=-1, keepdims=True)
    return _least_of(figures)


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
