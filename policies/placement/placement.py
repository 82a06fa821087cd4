"""Placement: one pool's choice of endpoint. Filters, then the policy's ranking; choose reads, commit writes.

Between `choose` and `commit` there is no await, so a burst of requests sees itself: the second request of a burst
already finds the first one's blocks in the index and its load on the endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

import numpy as np

from policies.admission.class_use import ClassUse
from policies.fleet_state import FleetState
from policies.placement.calibration import Calibration
from policies.placement.filters import FILTERS, STANDING, Filter, Roll, exceeds_context, named, ready, sift
from policies.placement.ledger import Ledger
from policies.placement.policy import BadScore, Policy, Pricing
from policies.placement.prefix_index import Pinned, PrefixIndex
from policies.placement.view import View
from policies.types import (
    Choice,
    Decision,
    Fallback,
    Filtered,
    Floats,
    InferenceRequest,
    ListedSlots,
    Mask,
    Ranking,
    Reservation,
    Slots,
    listed_slots,
)

_ALWAYS = ("ready", "model", "subset")
"""Filters no policy may leave out."""
_LAST = ("busy", "zone")
"""The same; these choose among the candidates that all others leave."""
_ONLY_CANDIDATE: Final = Choice.ONLY_CANDIDATE  # a member is found far sooner by a name of our own
_NOBODY_HOLDS: Final = Choice.LOAD
_AFFINITY: Final = Choice.AFFINITY
_SPILLED: Final = Choice.SPILLED
_Filters: TypeAlias = list[tuple[str, Filter]]


@dataclass(init=False)
class Unplaceable:
    """No candidate is left. `filtered` names, per filter, the addresses it removed."""

    filtered: Filtered

    def __init__(self, filtered: Filtered) -> None:
        self.filtered = filtered

    @property
    def last_filter(self) -> str | None:
        """The one that removed the last; None in an empty pool."""
        return self.filtered[-1][0] if self.filtered else None


class Placement:
    """The endpoints of one pool and how to choose among them. It lives as long as the pool: a reload swaps parts."""

    def __init__(
        self,
        pool: str,
        policy: Policy,
        index: PrefixIndex,
        ledger: Ledger | None = None,
        *,
        filters: Iterable[str] = (),
    ) -> None:
        """Raise ValueError for an unknown filter."""
        self.pool = pool
        self.index = index
        self.ledger = ledger or Ledger()
        self.calibration = Calibration(index)
        self.class_use = ClassUse()
        self.members: Slots = np.empty(0, np.intp)
        self._listed: ListedSlots | None = None  # of these
        self._roll = Roll()
        self.index_tokens: int | None = None
        self._own_blocks = 0  # named so far, downwards: no hash is negative
        self._for_some: dict[str, tuple[Policy, _Filters]] = {}
        self.use(policy, filters=filters)

    def use(self, policy: Policy, *, filters: Iterable[str] = (), index_tokens: int | None = None) -> None:
        """Choose by this policy from now on; requests under way keep what they took. Raise ValueError as above.

        `index_tokens`: what the index holds of an endpoint, if not what its cache holds.
        """
        self._filters = _filters(filters)
        self.policy = policy
        self.pricing = policy if isinstance(policy, Pricing) else None  # asked once: it takes 30 us
        self.index_tokens = index_tokens

    def use_for_some(self, policies: Mapping[str, tuple[Policy, Iterable[str]]]) -> None:
        """Have exactly these policies, each with its filters, for the requests that name them. All else is shared."""
        self._for_some = {name: (policy, _filters(filters)) for name, (policy, filters) in policies.items()}

    def _way(self, request: InferenceRequest) -> tuple[Policy, _Filters]:
        """By what a request is placed. One that names a policy which is gone is placed by the pool's."""
        own = self.policy, self._filters
        return own if request.policy is None else self._for_some.get(request.policy, own)

    def set_members(self, slots: Iterable[int]) -> None:
        """The slots that belong to the pool; those that left lose their prefix credit."""
        members = np.array(sorted(slots), np.intp)
        for gone in np.setdiff1d(self.members, members):
            self.forget(int(gone))
        self.members, self._listed = members, listed_slots(members)

    def forget(self, slot: int) -> None:
        """The endpoint's cache is empty, or the slot is another's: nothing that was learned of it holds."""
        self.index.forget(slot)
        self.ledger.forget(slot)
        self.calibration.forget(slot)

    def view(self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random) -> View:
        """The pool's endpoints as they are for this request, before any filter."""
        index, ledger, listed = self.index, self.ledger, self._listed
        if listed is None or request.precise is not None:
            matched = self.matched(request, self.members, state)
            return View(request, state, self.members, matched, now_s, rng, index, ledger, listed)
        matched_of_listed = index.match_listed(request.block_hashes, request.block_tokens, listed)
        return View(request, state, self.members, matched_of_listed, now_s, rng, index, ledger, listed)

    def survey(self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random) -> View:
        """Those of the pool's endpoints that may take traffic, whatever a request asks for."""
        unmatched = np.zeros(len(self.members))
        view = View(request, state, self.members, unmatched, now_s, rng, self.index, self.ledger)
        taking = ready(view)
        return view if taking is None else view.take(taking)

    def choose(
        self,
        request: InferenceRequest,
        state: FleetState,
        now_s: float,
        rng: Random,
        *,
        length: int = 3,
        room: Mask | None = None,
    ) -> Decision | Unplaceable:
        """Up to `length` endpoints, best first. Takes nothing; only filters' verdicts are kept.

        `room`: by slot, who may be first; the others only follow, for retries. Raises BadScore where the policy's
        scores are none.
        """
        view, filtered = self.filter(self.view(request, state, now_s, rng))
        crowded = None
        if room is not None:
            view, crowded = view.take(room[view.slots]), view.take(~room[view.slots])
            filtered = (*filtered, *named("room", crowded))
        if not len(view.slots):
            return Unplaceable(filtered)
        policy, _ = self._way(request)
        ranking = policy.rank(view, length)
        if crowded is not None and len(crowded.slots) and len(ranking.order) < length:
            ranking.order = [*ranking.order, *policy.rank(crowded, length - len(ranking.order)).order]
        return self._decision(view, policy.name, ranking, filtered)

    def _decision(self, view: View, policy: str, ranking: Ranking, filtered: Filtered) -> Decision:
        """The ranking with all that explains it."""
        request, addresses = view.request, view.state.addresses
        order = tuple([int(slot) for slot in ranking.order])  # a third party's may be numpy's
        best = order[0]
        matched = view.matched_at(ranking.first)
        if not math.isfinite(ranking.best_score):
            told = f"{addresses[best]} with a score of {ranking.best_score}"
            raise BadScore(f"policy {policy!r} ranks {told}; scores must be finite")
        return Decision(
            pool=self.pool,
            policy=policy,
            choice=_choice(view, matched),
            order=order,
            addresses=tuple([str(addresses[slot]) for slot in order]),
            matched_tokens=view.matched,
            chosen_matched_tokens=min(int(matched), request.input_tokens),
            ranking=ranking,
            filtered=filtered,
            slot_addresses=addresses,
            fallbacks=_fallbacks(view, best),
            precise=request.precise is not None,
        )

    def matched(self, request: InferenceRequest, slots: Slots, state: FleetState) -> Floats:
        """What each of `slots` holds of the prompt, shape (n,): what the engines report, where that is known.

        What is under way there is in no report yet, so what requests in flight use counts as well: without it a burst
        would not see itself. Where an engine may hold more than it reported, our own book-keeping may know of it.
        """
        hashes, tokens, precise = request.block_hashes, request.block_tokens, request.precise
        if precise is None:
            return self.index.match(hashes, tokens, slots)
        addresses = [str(state.addresses[slot]) for slot in slots.tolist()]
        reported = np.array([precise.tokens.get(address, 0) for address in addresses], np.float64)
        matched = np.maximum(reported, self.index.in_use_tokens(hashes, tokens, slots))
        blind = np.array([not precise.sees(address) for address in addresses], np.bool_)
        if blind.any():
            believed = self.index.match(hashes, tokens, slots[blind])
            matched[blind] = np.maximum(matched[blind], believed)
        return matched

    def commit(self, decision: Decision, request: InferenceRequest, state: FleetState, now_s: float) -> Reservation:
        """Carry the decision out: index the prompt, book the load, take the turn."""
        slot = decision.order[0]
        self._way(request)[0].committed(decision)
        reservation = state.reserve(
            slot,
            prompt_tokens=request.input_tokens,
            uncached_tokens=request.input_tokens - decision.chosen_matched_tokens,
        )
        if request.precise is None:  # else it was the engine's word, and not this index's
            self.calibration.promised(slot, decision.chosen_matched_tokens)
        rested: list[float] | None = [] if self.calibration.enabled else None
        pinned = self._book(request, reservation, state, now_s, rested)
        if rested is not None:
            reservation.promise = self.calibration.promise(slot, request.block_tokens, pinned.in_use, rested, now_s)
        return reservation

    def _book(
        self,
        request: InferenceRequest,
        reservation: Reservation,
        state: FleetState,
        now_s: float,
        rested: list[float] | None = None,
    ) -> Pinned:
        """What it uses of the endpoint's cache; `rested` is told since when those were at rest that were."""
        blocks, tokens = self._blocks_of(request)
        if request.choices > 1:
            reservation.side_by_side = request.choices / self.waves(request, reservation.slot, state)
        reservation.pinned = pinned = self.index.pin(reservation.slot, blocks, tokens, rested)
        reservation.crowded = self._is_crowded(reservation.slot, state)
        self.ledger.committed(reservation, now_s)
        if request.class_name is not None:
            reservation.class_name = request.class_name
            reservation.claimed_tokens = request.input_tokens + self.ledger.answer_tokens(request)
            self.class_use.book(reservation.class_name, reservation.slot, 1, reservation.claimed_tokens)
        return pinned

    def waves(self, request: InferenceRequest, slot: int, state: FleetState) -> int:
        """In how many turns an engine writes all of a request's answers, if it does nothing else."""
        if request.choices == 1:
            return 1
        return math.ceil(request.choices / (state.most_running.item(slot) or self.ledger.profile.max_num_seqs))

    def _blocks_of(self, request: InferenceRequest) -> tuple[Sequence[int], Sequence[int]]:
        """What the request will have in the cache: its prompt's blocks, and one of its own for all that is in none.

        That is the end of the prompt and the answer. Nobody can hit it, but it takes room and pushes prefixes out.
        """
        rest = request.input_tokens - sum(request.block_tokens) + round(self.ledger.answer_tokens(request))
        if rest <= 0:
            return request.block_hashes, request.block_tokens
        self._own_blocks -= 1
        return [*request.block_hashes, self._own_blocks], [*request.block_tokens, rest]

    def _is_crowded(self, slot: int, state: FleetState) -> bool:
        """More is booked on the endpoint than its cache or its batch holds: the last one in has to wait there."""
        load = state.loads()[slot]
        tokens = load.prompt_tokens + 0.5 * self.ledger.expected_output_tokens * load.in_flight
        return tokens > load.kv_capacity_tokens or load.in_flight > self.ledger.prices.most_running

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        """The request's first token was seen."""
        self.ledger.first_token(reservation, now_s)

    def ended(self, reservation: Reservation, now_s: float) -> None:
        """The request is over; its place in the fleet's counts is given back by its Flight."""
        self.ledger.ended(reservation, now_s)
        if reservation.pinned is not None:
            self.index.release(reservation.pinned, now_s)
        if reservation.class_name is not None:
            self.class_use.book(reservation.class_name, reservation.slot, -1, -reservation.claimed_tokens)
            reservation.class_name = None

    def settled(self, reservation: Reservation) -> None:
        """The request is over, and nobody will tell more of it."""
        if reservation.pinned is not None:
            self.index.let_go(reservation.pinned)
            reservation.pinned = None

    def failed(self, reservation: Reservation) -> None:
        """The endpoint did not take the request: it did not get the part of the prompt it lacked either.

        So the logs say, which may be after the request ended.
        """
        if reservation.pinned is not None:
            self.index.discard(reservation.pinned)

    def moved(
        self, request: InferenceRequest, reservation: Reservation, slot: int, state: FleetState, now_s: float
    ) -> Reservation:
        """Another endpoint serves the request than the one chosen: load and prefix credit move there."""
        self.failed(reservation)
        self.ended(reservation, now_s)
        here = self.matched(request, np.array([slot], np.intp), state)
        uncached = max(0, request.input_tokens - int(here[0]))
        moved = state.move(reservation, slot, uncached_tokens=uncached)
        if slot in self.members:  # it may have left the pool since; then nobody would ever take its credit back
            self._book(request, moved, state, now_s)
        return moved

    def filter(self, view: View) -> tuple[View, Filtered]:
        """The view over those that may take its request at all, and who was left out by which filter."""
        standing = self._roll.standing(view)
        if standing is None:
            view, filtered = sift(view, STANDING)
        else:
            filtered = standing.filtered
            if standing.mask is not None:
                view = view.take(standing.mask)
            if standing.suffices(view.request, view.state):
                return view, filtered
        return sift(view, self._way(view.request)[1], filtered)


def _filters(names: Iterable[str]) -> _Filters:
    """The filters of these names, and those that always apply, behind the standing ones. ValueError for an unknown."""
    wanted = dict.fromkeys((*_ALWAYS, *(name for name in names if name not in _LAST), *_LAST))
    unknown = [name for name in wanted if name not in FILTERS]
    if unknown:
        raise ValueError(f"unknown filter {unknown[0]!r}; there are: {', '.join(sorted(FILTERS))}")
    return [(name, FILTERS[name]) for name in wanted if name not in dict(STANDING)]


def _choice(view: View, matched: float) -> Choice:
    most = view.most_matched
    if len(view.slots) == 1:
        return _ONLY_CANDIDATE
    if not most:
        return _NOBODY_HOLDS
    return _AFFINITY if matched == most else _SPILLED


def _fallbacks(view: View, first: int) -> tuple[Fallback, ...]:
    """What the ranking had to do without; `first` is the slot it chose."""
    missing = view.request.without
    if view.fell_back:
        missing += (Fallback.STALE_FIGURES,)
    precise = view.request.precise
    if precise is not None and any(not precise.sees(str(view.state.addresses[slot])) for slot in view.slots.tolist()):
        missing += (Fallback.PREFIX_BLIND,)
    if view.state.window(first) < view.request.input_tokens and exceeds_context(view):
        missing += (Fallback.CONTEXT_ESTIMATE,)
    return missing
