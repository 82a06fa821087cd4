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

Idle endpoints of nearly the same rate are charged by the fastest one's, and chance decides between them. So much do the
rates differ that are learned of equal engines; if that told, whoever was visited first would get every request of a
quiet fleet, and nothing would be learned of the others. Only the idle: under load the backlog tells sooner, and rates
as learned are part of what makes the choice good (levelled for all, they cost 1 % of the time to the last token).

Without stall and decode this is predicted TTFT, which is worse end to end than a good heuristic: it sends long
prompts where they hurt others. Rejected as well: normalised weighted scores (no unit, so no honest trade-off between
a queue and a cache) and a learned regressor (needs a training set per fleet, and nobody can say why it chose).
Formula and constants were found by simulation on public traces; docs/benchmarks.md has the tables.

The formula stands here twice, over arrays and over plain floats. The loop over floats takes a fraction of the time: of
few endpoints, since numpy takes a microsecond for each of thirty calls, and several where its code is not in the
processor's caches; compiled, of a thousand as well. Both take the same steps in the same order, so they agree to the
last bit (test_marginal_cost.py compares them; but for an eviction's last bit where numpy's exp is its own), and what
explains a loop's costs is made by the arrays, once somebody reads it. Rejected: one text for both. Half of it would be
about what differs between them (minima, conditions, missing dimensions), at a call for each term and endpoint. And
lists of floats: compiled, each read and each write of one is a call, and by attributes it takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Final, TypeAlias

import numpy as np

from policies.fleet_state import Load
from policies.past import Moment
from policies.placement.ledger import Pace
from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.pickers import Score, max_by_loop, max_score
from policies.placement.policy import Scored, ranking
from policies.placement.prefix_index import Matched, Room
from policies.placement.profiles import Profile
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, ListedSlots, Mask, Ranking

_HELD_SHARE: Final = 0.5
"""Of the prompt: from here on its cache is worth more than the prediction is exact."""
_NEARLY_MOST: Final = 0.9
"""Endpoints that hold this much of what the best one holds are holders as well."""
_SPILL_FACTOR: Final = 1.5
_SPILL_REQUESTS: Final = 4.0
"""A holder above so many times the mean load, and so many requests, has no band: a hot prefix spreads."""
_FAR_S: Final = 1e300
"""Beyond any cost of a holder."""
_AS_FAST: Final = 0.8
"""Of the fastest idle endpoint's rate: from here on another idle one is as fast, as far as anybody can tell."""
_LEVEL_S: Final = 1e-9
"""Costs closer than this differ by rounding alone."""

Each: TypeAlias = float | Floats
"""A figure of one request; or of w requests, shape (w, 1)."""


class _Asks:
    """What is asked for: by one request, its figures and (n,) matched tokens, or by w at once, (w, 1) and (w, n).

    `shortest_prompt`, `longest_prompt`, `longest_answer`, `most_matched`: of all of them. They tell at once of most
    terms that there is nothing to calculate.
    """

    def __init__(
        self,
        prompt_tokens: Each,
        answer_tokens: Each,
        matched_tokens: Floats,
        shortest_prompt: float,
        longest_prompt: float,
        longest_answer: float,
        most_matched: float,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.matched_tokens = matched_tokens
        self.shortest_prompt = shortest_prompt
        self.longest_prompt = longest_prompt
        self.longest_answer = longest_answer
        self.most_matched = most_matched


class _Figures:
    """What the formula takes of the candidates, as they were when the request was placed.

    `running`, `held`: requests on each endpoint and the tokens of their prompts; `in_flight`: ours among them. `rate`:
    what prefill is charged by.
    `room`, and for `idle_s` what would be evicted next is idle: None where all that is asked for has room everywhere.
    `capacity`: None where surely nothing overflows anywhere.
    """

    def __init__(
        self, profile: Profile, in_flight: Floats, running: Floats, held: Floats, rate: Floats, wait_s: Floats
    ) -> None:
        self.profile = profile
        self.in_flight = in_flight
        self.running = running
        self.held = held
        self.rate = _levelled(in_flight, rate)
        self.wait_s = wait_s
        self.capacity: Floats | None = None
        self.room: Floats | None = None
        self.idle_s: Floats | None = None


class MarginalCost:
    """The policy. It keeps nothing but paper to write scores on: index and ledger are the pool's."""

    def __init__(self, spec: MarginalCostSpec | None = None, name: str = "marginal_cost") -> None:
        self.name = name
        spec = spec or MarginalCostSpec()
        self.stall_weight: float = spec.stall_weight
        self.decode_weight: float = spec.decode_weight
        self.eviction_weight: float = spec.eviction_weight
        self.eviction_fade_s: float = spec.eviction_fade_s
        self.overflow_s: float = spec.overflow_s
        self.affinity_band_s: float = spec.affinity_band_s
        self._scores: list[Score] = []

    def rank(self, view: View, length: int) -> Ranking:
        """Cheapest first."""
        slots = view.listed
        if slots is not None:
            return self._rank_by_loop(view, slots, length)
        prompt, answer = float(view.request.input_tokens), view.ledger.answer_tokens(view.request)
        matched = view.matched_tokens
        asks = _Asks(prompt, answer, matched, prompt, prompt, answer, _greatest(matched))
        scores, parts = self.scored(asks, _figures(view, asks))
        return ranking(view, scores, parts, max_score(scores, length, view.rng))

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """What each of w requests would cost at each candidate, without and with the band, in seconds, shape (w, n)."""
        prompts = np.array([request.input_tokens for request in requests], np.float64)[:, None]
        answers = view.ledger.answers_tokens(requests)
        most_matched = matched_tokens.max(axis=1, keepdims=True)
        asks = _Asks(
            prompts,
            answers,
            matched_tokens,
            float(prompts.min()),
            float(prompts.max()),
            float(answers.max()),
            float(most_matched.max()),
        )
        figures = _figures(view, asks)
        cost, _ = self._cost(asks, figures)
        of_holders = np.where(most_matched > _HELD_SHARE * prompts, most_matched, np.inf)
        return cost, cost + self._band(figures.in_flight, matched_tokens, of_holders, cost)

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""

    # -- over arrays: many candidates, many requests, and explanations

    def scored(self, asks: _Asks, figures: _Figures) -> Scored:
        """Scores and parts for one request."""
        cost, parts = self._cost(asks, figures)
        if asks.most_matched > _HELD_SHARE * asks.longest_prompt:
            parts["band"] = self._band(figures.in_flight, asks.matched_tokens, asks.most_matched, cost)
            cost = cost + parts["band"]
        return -cost, parts

    def _cost(self, asks: _Asks, figures: _Figures) -> tuple[Floats, dict[str, Floats]]:
        """The cost without the band and its terms, in seconds, of the shape of `matched_tokens`."""
        profile, answer = figures.profile, asks.answer_tokens
        uncached, running = _uncached(asks), figures.running
        prefill_s = profile.work(asks.prompt_tokens, uncached) / figures.rate
        parts = {
            "own": figures.wait_s + prefill_s,
            "stall": self.stall_weight * running * prefill_s,
            "decode": (self.decode_weight * answer)
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
        fade = np.exp(-idle_s / self.eviction_fade_s)
        lost: Floats = np.where(uncached > room, self.eviction_weight * uncached / rate * fade, 0.0)
        return lost

    def _overflow(self, figures: _Figures, capacity: Floats, tokens: Each, answer: Each) -> Floats:
        """Excess over the KV cache or the batch, each as a share of its size, in the spec's seconds per whole size."""
        running, most = figures.running, figures.profile.max_num_seqs
        memory = (figures.held + 0.5 * answer * running + tokens - capacity) / capacity
        places = (running + (1 - most)) / most
        excess: Floats = self.overflow_s * np.maximum(np.maximum(memory, places), 0.0)
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
        band[banded & ~less] = -self.affinity_band_s
        return band

    # -- the same over floats: one request and listed candidates

    def _rank_by_loop(self, view: View, slots: ListedSlots, length: int) -> Ranking:
        matched, prompt = view.matched_of_listed(slots), float(view.request.input_tokens)
        answer, most_matched = view.ledger.answer_tokens(view.request), matched.most
        working = _Working(self, view, matched, prompt, answer)
        enough = _NEARLY_MOST * most_matched if most_matched > _HELD_SHARE * prompt else inf
        holders: list[int] = []
        scores = self._scores_by_loop(working, view, slots, enough, holders)
        if holders:
            self._add_band(view, slots, holders, working.in_flight, scores)
        positions = max_by_loop(scores, length, view.rng)
        order = [slots.listed[position] for position in positions]
        return Ranking(order, view.slots, positions[0], scores[positions[0]].value, working)

    def _scores_by_loop(
        self, working: _Working, view: View, slots: ListedSlots, enough: float, holders: list[int]
    ) -> list[Score]:
        """As `_cost`, but below zero. Positions of who holds `enough` go into `holders`."""
        prompt, answer, now_s, stall = working.prompt, working.answer, view.now_s, self.stall_weight
        prices, anybody_holds = view.ledger.prices, working.matched.most > 0.0
        sequence_s, kv_token_s, most_running = prices.sequence_s, prices.kv_token_s, prices.most_running
        whole, decode, asked = prices.work(prompt, prompt), self.decode_weight * answer, prompt + answer
        listed = slots.listed
        loads, paces, rooms = view.state.loads(), view.ledger.paces(listed[-1]), view.index.rooms(listed[-1])
        working.matched.put_down(rooms)
        if slots.end != len(listed):  # else they are the first ones, as usual, and are read where they stand
            loads, paces = [loads[slot] for slot in listed], [paces[slot] for slot in listed]
            rooms = [rooms[slot] for slot in listed]
        others = working.sees_others(view)
        scores, position, in_flight = self._room_for(len(listed)), -1, 0.0
        fastest = _fastest_idle(scores, loads, paces)
        as_fast = _AS_FAST * fastest
        for score, load, pace, room in zip(scores, loads, paces, rooms):  # noqa: B905 - the others may go on
            position += 1
            in_flight += load.in_flight
            running, held, wait_s = load.in_flight, load.prompt_tokens, pace.longest_s
            rate = fastest if running == 0.0 and pace.rate >= as_fast else pace.rate  # as _levelled
            if others:
                running, held = float(working.running[position]), float(working.held[position])
            if wait_s > 0.0:  # as Ledger.prefill; where nothing is pending, as at most endpoints, in one look
                wait_s = min(max(pace.done_at_s - now_s, 0.0), wait_s)
            uncached, work = prompt, whole
            if anybody_holds:
                matched = room.matched_tokens
                if matched:
                    room.matched_tokens = 0.0
                    uncached = max(prompt - matched, 0.0)
                    work = prices.work(prompt, uncached)
                    if matched >= enough:
                        holders.append(position)
            prefill_s = work / rate
            load_s = sequence_s * running + kv_token_s * held
            value = -(wait_s + prefill_s + stall * running * prefill_s + decode * load_s)
            if uncached > room.tokens:
                value -= self._loss(working, view, uncached, rate, room)
            tokens = held + 0.5 * answer * running + asked
            if tokens > load.kv_capacity_tokens or running > most_running - 1.0:
                working.overflows = True
                memory = (tokens - load.kv_capacity_tokens) / load.kv_capacity_tokens
                excess = max(memory, (running + (1.0 - most_running)) / most_running)  # of three it would be a call
                value -= self.overflow_s * max(excess, 0.0)
            score.value = value
        working.in_flight = in_flight
        working.remember(view)
        return scores

    def _room_for(self, count: int) -> list[Score]:
        """So many of the scores that are kept to be written anew each time."""
        while len(self._scores) < count:
            self._scores.append(Score(0.0))
        return self._scores[:count] if count < len(self._scores) else self._scores

    def _loss(self, working: _Working, view: View, uncached: float, rate: float, room: Room) -> float:
        """By eviction, at one endpoint."""
        if not working.evicts:
            working.evicts = True
            view.index.settle()
        idle_s = max(view.now_s - room.oldest_at_s, 0.0) if room.oldest_at_s < inf else inf
        return self.eviction_weight * uncached / rate * exp(-idle_s / self.eviction_fade_s)

    def _add_band(
        self, view: View, slots: ListedSlots, holders: list[int], in_flight: float, scores: list[Score]
    ) -> None:
        loads, listed, level = view.state.loads(), slots.listed, -inf
        usual = _SPILL_FACTOR * (in_flight / len(listed)) + _SPILL_REQUESTS
        for position in holders:
            level = max(level, scores[position].value)
        level -= _LEVEL_S
        for position in holders:
            score = scores[position]
            if score.value >= level and loads[listed[position]].in_flight <= usual:
                score.value += self.affinity_band_s


class _Working:
    """How a loop came to its costs: called, it tells by arrays the same scores again, and their parts.

    Decisions are kept by the thousand, and so are these: the figures as they were, never to change. `running`, `held`:
    only where they are not just ours. `in_flight`: ours, at all endpoints. `evicts`, `overflows`: something was
    calculated of these terms.
    """

    load: Moment
    pace: Moment

    def __init__(
        self,
        policy: MarginalCost,
        view: View,
        matched: Matched,
        prompt: float,
        answer: float,
    ) -> None:
        self.policy = policy
        self.profile = view.ledger.profile
        self.prompt = prompt
        self.answer = answer
        self.matched = matched
        self.slots = view.slots
        self.now_s = view.now_s
        self.in_flight = 0.0
        self.evicts = False
        self.overflows = False
        self.running = _NONE
        self.held = _NONE
        self.room = _NONE
        self.oldest_at_s = _NONE

    def sees_others(self, view: View) -> bool:
        """Some requests are none of ours; then all are counted."""
        if not view.state.has_foreign:
            return False
        self.running, self.held = _others(view)
        return True

    def remember(self, view: View) -> None:
        """The figures of this moment."""
        self.load, self.pace = view.state.moment(), view.ledger.moment()
        if self.evicts:
            self.room, self.oldest_at_s = view.index.room_tokens(view.slots), view.index.oldest_at_s(view.slots)

    def __call__(self) -> Scored:
        matched, prompt, answer, slots = self.matched.array(), self.prompt, self.answer, self.slots
        in_flight, held, capacity = self.load.of(slots)
        rate, done_at_s, longest_s = self.pace.of(slots)
        wait_s = np.minimum(np.maximum(done_at_s - self.now_s, 0.0), longest_s)
        figures = _Figures(self.profile, in_flight, in_flight, held, rate, wait_s)
        if self.running is not _NONE:
            figures.running, figures.held = self.running, self.held
        if self.evicts:
            figures.room, figures.idle_s = self.room, _idle_s(self.oldest_at_s, self.now_s)
        if self.overflows:
            figures.capacity = capacity
        return self.policy.scored(_Asks(prompt, answer, matched, prompt, prompt, answer, self.matched.most), figures)


_NONE: Final[Floats] = np.empty(0)


def _levelled(in_flight: Floats, rate: Floats) -> Floats:
    """The fastest idle endpoint's rate for all that are idle and nearly as fast, and everybody else's own."""
    idle: Mask = in_flight == 0.0
    fastest = _greatest(rate * idle)
    return np.where(idle & (rate >= _AS_FAST * fastest), fastest, rate)


def _fastest_idle(scores: list[Score], loads: list[Load], paces: list[Pace]) -> float:
    """The highest rate of those without a request; none, if there are no such. There is a score for each candidate."""
    fastest = 0.0
    for _, load, pace in zip(scores, loads, paces):  # noqa: B905 - the others may go on
        if load.in_flight == 0.0 and pace.rate > fastest:
            fastest = pace.rate
    return fastest


def _uncached(asks: _Asks) -> Each:
    if not asks.most_matched:
        return asks.prompt_tokens
    missing = asks.prompt_tokens - asks.matched_tokens
    return missing if asks.most_matched <= asks.shortest_prompt else np.maximum(missing, 0.0)


def _figures(view: View, asks: _Asks) -> _Figures:
    profile, capacity = view.ledger.profile, view.kv_capacity
    running, held = _others(view)
    rate, wait_s = view.ledger.prefill(view.slots, view.now_s)
    figures = _Figures(profile, view.in_flight, running, held, rate, wait_s)
    room = view.index.room_tokens(view.slots)
    if asks.longest_prompt > _least_of(room):
        figures.room, figures.idle_s = room, _idle_s(view.index.oldest_at_s(view.slots), view.now_s)
    # by the greatest figures, whosever they are: otherwise surely nothing overflows anywhere
    most_running, answer = _greatest(running), asks.longest_answer
    tokens = _greatest(held) + 0.5 * answer * most_running + asks.longest_prompt + answer
    if tokens > _least_of(capacity) or most_running > profile.max_num_seqs - 1:
        figures.capacity = capacity
    return figures


def _idle_s(since_s: Floats, now_s: float) -> Floats:
    """How long what would be evicted next is idle; endless where nothing is."""
    return np.where(np.isinf(since_s), np.inf, np.maximum(now_s - since_s, 0.0))


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
