"""Which waiting request goes now, and where: late binding.

A request is not sent to wait inside an engine. It waits here until an endpoint has room for it (room.py), and is bound
to one then, when more is known than at its arrival. The queue says in which order requests are looked at, the placement
policy what each place would cost; the rule is the ski renter's: a request whose best endpoint has room goes there; one
whose best has none waits for it, but the longer it has waited the more it will pay for another that has room
(`patience` seconds per second of waiting, never more than `longest_detour_s`: beyond that a long wait would give up
every cache, and in overload everybody waits long). Without that rule one hot prefix keeps the whole queue waiting for
its holder.

The whole window is priced in one pass, requests by endpoints. What prompts find in the caches is looked up once and
then every `_LOOKED_AGAIN_S`, or when one like it has gone: a pass must cost no more than a millisecond. The choice
itself is `Placement.choose`'s as always, restricted to endpoints with room, so it is exact and explains itself.

Where a policy names no prices (Pricing), or late binding is off, requests go in the queue's order to the best endpoint
with room. Formula and constants were found by simulation: docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

import numpy as np

from policies.admission.queue import Queue, Ticket
from policies.admission.room import RoomSpec, cache_holds, class_has_room, with_room
from policies.fleet_state import FleetState
from policies.placement.placement import Placement, Unplaceable
from policies.placement.policy import Pricing
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, Mask, Slots

_WINDOW_PER_ENDPOINT = 6
"""Requests looked at per endpoint; an eighth of that costs half of the gain in a fleet of 32."""
_FEWEST_LOOKED_AT = 16
_MOST_PRICED = 65_536
"""Requests times endpoints in one pass."""
_LOOKED_AGAIN_S = 1.0
_MOST_LOOKED_UP = 12
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
    """What a request finds: by member of the pool, tokens of its prompt, and whether it may go there at all."""

    matched_tokens: Floats
    allowed: Mask
    members: Slots
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
        self._looked_at: list[_W] = []

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
        self.unfinished = False
        window = self._window()
        if not window:
            return None
        view = self.placement.survey(window[0].request, state, now_s, rng)
        general = with_room(view, self.spec.room)
        if not general.any():
            return None
        self._looked_at = self._look_up(window, state, now_s, rng)
        while self._looked_at:
            fits, detours_s = self._weigh(view, self._looked_at, general)
            first = self._first(self._looked_at, detours_s, now_s)
            if first is None:
                return None
            ticket = self._looked_at[first]
            room = np.zeros(len(state.generation), np.bool_)
            room[view.slots[fits[first]]] = True
            decision = self.placement.choose(ticket.request, state, now_s, rng, length=length, room=room)
            if not isinstance(decision, Unplaceable):
                decision.waited_s, decision.detour_s = now_s - ticket.since_s, float(detours_s[first])
                return Bound(ticket, decision)
            ticket.prospects = None  # the world has moved since it was looked at
            del self._looked_at[first]
        return None

    def went(self, ticket: _W) -> None:
        """A request has gone: what it brings to its endpoint, those that begin alike will find there."""
        begins = ticket.request.block_hashes[:1]
        for other in self._looked_at:
            if begins and other.request.block_hashes[:1] == begins:
                other.prospects = None

    def _window(self) -> list[_W]:
        members = len(self.placement.members)
        if not members or not len(self.queue):
            return []
        most = min(_WINDOW_PER_ENDPOINT * members, _MOST_PRICED // members)
        return self.queue.window(max(most, _FEWEST_LOOKED_AT))

    # -- what they find

    def _look_up(self, window: list[_W], state: FleetState, now_s: float, rng: Random) -> list[_W]:
        """Those of which is known what they find. The first few of whom it is not, or no longer, are looked up now."""
        left, known = _MOST_LOOKED_UP, []
        for ticket in window:
            if not self._is_fresh(ticket.prospects, now_s):
                if left:
                    left -= 1
                    ticket.prospects = self._prospects(ticket.request, state, now_s, rng)
                else:
                    self.unfinished = True
            if ticket.prospects is not None and ticket.prospects.members is self.placement.members:
                known.append(ticket)
        return known

    def _is_fresh(self, prospects: _Prospects | None, now_s: float) -> bool:
        if prospects is None or prospects.members is not self.placement.members:
            return False
        return now_s - prospects.at_s <= _LOOKED_AGAIN_S

    def _prospects(self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random) -> _Prospects:
        view = self.placement.view(request, state, now_s, rng)
        may, _ = self.placement.filter(view)
        return _Prospects(view.matched_tokens, np.isin(view.slots, may.slots), view.slots, now_s)

    # -- where they could go, and at what price

    def _weigh(self, view: View, tickets: list[_W], general: Mask) -> tuple[Mask, Floats]:
        """Where each could go now, shape (w, n); and what the best of these costs more than its choice, (w,).

        Less, where its choice is the holder of its prompt and dearer: it was to be kept only if that has room.
        """
        at = self.placement.members.searchsorted(view.slots)
        found = [ticket.prospects for ticket in tickets if ticket.prospects is not None]
        allowed = np.stack([one.allowed for one in found])[:, at]
        fits: Mask = self._fits(view, tickets) & allowed & general
        policy = self.placement.policy
        if not self.spec.late or not isinstance(policy, Pricing):
            return fits, np.where(fits.any(axis=1), 0.0, np.inf)
        matched = np.stack([one.matched_tokens for one in found])[:, at]
        costs, liked = policy.price(view, [ticket.request for ticket in tickets], matched)
        rows = np.arange(len(tickets))
        choice = np.where(allowed, liked, np.inf).argmin(axis=1)
        offer = np.where(fits, liked, np.inf).argmin(axis=1)
        return fits, np.where(fits.any(axis=1), costs[rows, offer] - costs[rows, choice], np.inf)

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
