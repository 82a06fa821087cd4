"""Which waiting request goes now, and where: late binding.

A request is not sent to wait inside an engine. It waits here until an endpoint has room for it (room.py), and is bound
to one then, when more is known than at its arrival. The queue says in which order requests are looked at, the placement
policy what each place would cost; the rule is the ski renter's: a request whose best endpoint has room goes there; one
whose best has none waits for it, but the longer it has waited the more it will pay for another that has room
(`patience` seconds per second of waiting, never more than `longest_detour_s`: beyond that a long wait would give up
every cache, and in overload everybody waits long). Without that rule one hot prefix keeps the whole queue waiting for
its holder.

The window is priced requests by endpoints, some at once and until somebody can go. A pass must cost no more than a
millisecond: so nothing is done where no endpoint has room; what prompts find in the caches is looked up once and then
every `_LOOKED_AGAIN_S`, or when others come to hold the half of it; and in a large fleet one pass sees only a slice of
the window, the next pass the next one. Where all of the window would rather wait, or may go nowhere else, those behind
it are asked too, for the places that the window has left: no flood for one endpoint keeps anybody from another. The
choice itself is `Placement.choose`'s as always, restricted to endpoints with room, so it is exact and explains itself.

Where a policy names no prices (Pricing), or late binding is off, requests go in the queue's order to the best endpoint
with room. Formula and constants were found by simulation: docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Generic, TypeVar

import numpy as np

from policies.admission.queue import Queue, Ticket
from policies.admission.room import RoomSpec, cache_holds, class_has_room, with_room
from policies.fleet_state import FleetState
from policies.placement.placement import Placement, Unplaceable
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, Mask, Slots

_WINDOW_PER_ENDPOINT = 6
"""Requests looked at per endpoint; an eighth of that costs half of the gain in a fleet of 32."""
_FEWEST_LOOKED_AT, _MOST_LOOKED_AT = 16, 512
_FEWEST_AT_ONCE = 8
_MOST_PRICED, _MOST_AT_ONCE = 8_192, 64
"""Requests times endpoints, and requests, in one pass: about a millisecond."""
_FARTHEST = 2_048
"""Requests looked at where nobody in the window wants what there is."""
_FIRST_PRICED, _TIMES_MORE = 4_096, 5
"""Of these the first, and how many more each time: who goes, if anybody does, is mostly among the first."""
_LOOKED_AGAIN_S = 1.0
_MOST_LOOKED_UP = 4
"""Prompts looked up in one pass, at about 50 us each."""


@dataclass(frozen=True, slots=True)
class BindingSpec:
    """When an endpoint has room, and what a request that has waited will pay to have any."""

    late: bool = True
    room: RoomSpec = field(default_factory=RoomSpec)
    patience: float = 0.3
    longest_detour_s: float = 2.0


@dataclass(frozen=True, slots=True)
class _Prospects:
    """What a request finds: by member of the pool, tokens of its prompt, less than 0 where it may not go at all.

    `holders`: who held the first half of its prompt then.
    """

    matched_tokens: Floats
    members: Slots
    holders: int
    at_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class WaitingRequest(Ticket):
    """A request that waits to be bound."""

    request: InferenceRequest
    prospects: _Prospects | None = field(default=None, init=False)


_W = TypeVar("_W", bound=WaitingRequest)


@dataclass(frozen=True, slots=True)
class Bound(Generic[_W]):
    """A request that goes now."""

    ticket: _W
    decision: Decision


class Binder(Generic[_W]):
    """The binding of one pool. It reads only; who goes is taken from the queue, and committed, by the caller.

    `unfinished`: the last pass left requests unlooked at, so another should follow soon.
    """

    def __init__(self, placement: Placement, queue: Queue[_W], spec: BindingSpec) -> None:
        self.placement = placement
        self.queue = queue
        self.spec = spec
        self.unfinished = False
        self._begin = 0
        self._left_over: frozenset[int] = frozenset()  # who had room when those before `_begin` were asked
        self._lookups_left = 0

    def at_once(
        self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random, *, length: int = 3
    ) -> Decision | Unplaceable | None:
        """Where a request goes that has just come; None if it has to wait."""
        if len(self.queue):
            return None
        decision = self.placement.choose(request, state, now_s, rng, length=length)
        if isinstance(decision, Unplaceable):
            return decision
        view = self.placement.survey(request, state, now_s, rng)
        there = view.take(view.slots == decision.order[0])
        return decision if self._has_room(there, request).all() else None

    def came(self, ticket: _W, state: FleetState, now_s: float, rng: Random) -> None:
        """A request waits from now on. Looked up at once, so that passes are short however many come."""
        ticket.prospects = self._prospects(ticket.request, state, now_s, rng)

    def next(self, state: FleetState, now_s: float, rng: Random, *, length: int = 3) -> Bound[_W] | None:
        """The next request that goes and where to; None if nobody can."""
        begin, self._begin, self.unfinished = self._begin, 0, False
        anyone = self.queue.anyone()
        if anyone is None or not len(self.placement.members):
            return None
        view = self.placement.survey(anyone.request, state, now_s, rng)
        general = with_room(view, self.spec.room)
        if not general.any():
            return None
        begin = self._begin_at(begin, frozenset(view.slots[general].tolist()))
        far = begin >= self._window()
        self._lookups_left = _MOST_LOOKED_UP
        for tickets in self._slices(begin):
            known = self._look_up(tickets, state, now_s, rng, far=far)
            bound = self._first_that_goes(known, view, general, rng, length)
            if bound is not None:
                self._begin = begin if far else 0
                return bound
        return None

    def _begin_at(self, begin: int, room: frozenset[int]) -> int:
        """Go on where the last pass has stopped, unless there is room now that those before it were not asked for."""
        if not begin or begin >= len(self.queue) or not room <= self._left_over:
            begin, self._left_over = 0, room
        return begin

    def _window(self) -> int:
        """So many are looked at, and looked up, before all others."""
        members = len(self.placement.members)
        return min(max(_WINDOW_PER_ENDPOINT * members, _FEWEST_LOOKED_AT), _MOST_LOOKED_AT)

    def _slices(self, begin: int) -> Iterator[list[_W]]:
        """This pass's part of the queue, in parts that are priced at once. The next pass goes on behind it."""
        members, window, size = len(self.placement.members), self._window(), min(len(self.queue), _FARTHEST)
        most = min(max(_MOST_PRICED // members, _FEWEST_AT_ONCE), _MOST_AT_ONCE)
        end = min(begin + most, min(window, size) if begin < window else size)
        order = islice(self.queue.in_order(), begin, end)
        rows = min(max(_FIRST_PRICED // members, _FEWEST_AT_ONCE), _FEWEST_LOOKED_AT)
        while tickets := list(islice(order, rows)):
            yield tickets
            rows *= _TIMES_MORE
        if end < size:
            self._begin, self.unfinished = end, True

    def _first_that_goes(
        self, tickets: list[_W], view: View, general: Mask, rng: Random, length: int
    ) -> Bound[_W] | None:
        """The first of these who can go, and where to."""
        state, now_s = view.state, view.now_s
        while tickets:
            fits, detours_s = self._weigh(view, tickets, general)
            first = self._first(tickets, detours_s, now_s)
            if first is None:
                return None
            ticket = tickets[first]
            if self._lookups_left and not self._is_fresh(ticket, now_s):
                self._look_up_one(ticket, state, now_s, rng)
                continue
            room = np.zeros(len(state.generation), np.bool_)
            room[view.slots[fits[first]]] = True
            decision = self.placement.choose(ticket.request, state, now_s, rng, length=length, room=room)
            if not isinstance(decision, Unplaceable):
                decision.waited_s, decision.detour_s = now_s - ticket.since_s, float(detours_s[first])
                return Bound(ticket, decision)
            ticket.prospects = None  # the world has moved since it was looked at
            del tickets[first]
        return None

    # -- what they find

    def _look_up(self, tickets: list[_W], state: FleetState, now_s: float, rng: Random, *, far: bool) -> list[_W]:
        """Those of which is known what they find. The first few of whom it is not, or no longer, are looked up now.

        `far`: they are behind the window, and what was known of them once will do until one of them could go.
        """
        known = []
        for ticket in tickets:
            if not (self._is_known(ticket) if far else self._is_fresh(ticket, now_s)):
                if self._lookups_left:
                    self._look_up_one(ticket, state, now_s, rng)
                else:
                    self.unfinished = True
            if self._is_known(ticket):
                known.append(ticket)
        return known

    def _look_up_one(self, ticket: _W, state: FleetState, now_s: float, rng: Random) -> None:
        self._lookups_left -= 1
        ticket.prospects = self._prospects(ticket.request, state, now_s, rng)

    def _is_known(self, ticket: _W) -> bool:
        return ticket.prospects is not None and ticket.prospects.members is self.placement.members

    def _is_fresh(self, ticket: _W, now_s: float) -> bool:
        found = ticket.prospects
        if found is None or found.members is not self.placement.members or now_s - found.at_s > _LOOKED_AGAIN_S:
            return False
        return self._holders(ticket.request) == found.holders

    def _holders(self, request: InferenceRequest) -> int:
        """Who holds the first half of the prompt: another one by now, if a request like this has gone."""
        hashes = request.block_hashes
        return self.placement.index.holders(hashes[len(hashes) // 2]) if hashes else 0

    def _prospects(self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random) -> _Prospects:
        view = self.placement.view(request, state, now_s, rng)
        may, _ = self.placement.filter(view)
        matched = np.full(len(view.slots), -1.0)
        matched[view.slots.searchsorted(may.slots)] = may.matched_tokens
        return _Prospects(matched, view.slots, self._holders(request), now_s)

    # -- where they could go, and at what price

    def _weigh(self, view: View, tickets: list[_W], general: Mask) -> tuple[Mask, Floats]:
        """Where each could go now, shape (w, n); and what the best of these costs more than its choice, (w,).

        Less, where its choice is the holder of its prompt and dearer: it was to be kept only if that has room.
        """
        matched = self._matched(view, tickets)
        allowed = matched >= 0
        fits: Mask = self._fits(view, tickets) & allowed & general
        pricing = self.placement.pricing
        if not self.spec.late or pricing is None:
            return fits, np.where(fits.any(axis=1), 0.0, np.inf)
        costs, liked = pricing.price(view, [ticket.request for ticket in tickets], np.maximum(matched, 0.0))
        rows = np.arange(len(tickets))
        choice = np.where(allowed, liked, np.inf).argmin(axis=1)
        offer = np.where(fits, liked, np.inf).argmin(axis=1)
        return fits, np.where(fits.any(axis=1), costs[rows, offer] - costs[rows, choice], np.inf)

    def _matched(self, view: View, tickets: list[_W]) -> Floats:
        """What each finds at each of the view's candidates, shape (w, n); less than 0 where it may not go."""
        members = self.placement.members
        rows = [ticket.prospects.matched_tokens for ticket in tickets if ticket.prospects is not None]
        matched = np.concatenate(rows).reshape(len(rows), len(members))
        if len(view.slots) < len(members):
            matched = matched[:, members.searchsorted(view.slots)]
        return matched

    def _fits(self, view: View, tickets: list[_W]) -> Mask:
        """Where there is room for each, beside what is needed for any; shape (w, n)."""
        fits = cache_holds(view, np.array([[ticket.request.input_tokens] for ticket in tickets], np.float64))
        for name in {ticket.class_name for ticket in tickets}:
            spec = self.queue.class_of(name)
            if spec.limited:
                rows = [row for row, ticket in enumerate(tickets) if ticket.class_name == name]
                tokens = np.array([[self._claims(tickets[row].request)] for row in rows])
                fits[rows] &= class_has_room(view, spec, self.placement.class_use, tokens)
        return fits

    def _has_room(self, view: View, request: InferenceRequest) -> Mask:
        spec = self.queue.class_of(request.class_name)
        room = with_room(view, self.spec.room) & cache_holds(view, request.input_tokens)
        if spec.limited:
            room &= class_has_room(view, spec, self.placement.class_use, self._claims(request))
        return room

    def _claims(self, request: InferenceRequest) -> float:
        return request.input_tokens + self.placement.ledger.answer_tokens(request)

    def _first(self, tickets: list[_W], detours_s: Floats, now_s: float) -> int | None:
        """The first, in the queue's order, to whom its place is not too dear."""
        waited_s = now_s - np.array([ticket.since_s for ticket in tickets])
        affordable = detours_s <= np.minimum(self.spec.patience * waited_s, self.spec.longest_detour_s)
        first = int(affordable.argmax())
        return first if affordable[first] else None
