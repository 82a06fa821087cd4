"""Which waiting request goes now, and where: late binding.

A request is not sent to wait inside an engine. It waits here until an endpoint has room for it (room.py), and is bound
to one then, when more is known than at its arrival. The queue says in which order requests are looked at, the placement
policy what each place would cost; the rule is the ski renter's: a request whose best endpoint has room goes there; one
whose best has none waits for it, but the longer it has waited the more it will pay for another that has room
(`patience` seconds per second of waiting, never more than `longest_detour_s`: beyond that a long wait would give up
every cache, and in overload everybody waits long). Without that rule one hot prefix keeps the whole queue waiting for
its holder.

The window is priced requests by endpoints, some at once, and of these everybody goes who can, each to an endpoint of
his own: a second one for the same endpoint is priced again in the next pass, when the first one's load is there. A pass
must cost no more than a millisecond or so beside what goes: so nothing is done where no endpoint has room; what prompts
find in the caches is looked up once and then every `_LOOKED_AGAIN_S`, or when others come to hold the half of it; and
in a large fleet one pass sees only a slice of the window, the next pass the next one. Where all of the window would
rather wait, or may go nowhere else, those behind it are asked too, for the places that the window has left: no flood
for one endpoint keeps anybody from another. The choice itself is `Placement.choose`'s as always, restricted to
endpoints with room, so it is exact and explains itself.

Who is passed over for his length alone would starve while shorter ones fill every gap. So one such request at a time,
once it has waited for a third of what it may, has an endpoint kept free for it.

Where a policy names no prices (Pricing), or late binding is off, the queue decides when and the policy where: as soon
as any endpoint has room, the next request goes to what the policy likes best of all that have a place in their batch.
Rejected: to the best of those with room, or whose cache has a place. It gives up prefixes for places, and so in
overload most of the goodput.
Formula and constants were found by simulation: docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Generic, TypeVar

import numpy as np

from policies.admission.queue import Queue, Ticket
from policies.admission.room import RoomSpec, cache_holds, class_has_room, with_places, with_room
from policies.fleet_state import FleetState
from policies.placement.placement import Placement, Unplaceable
from policies.placement.view import View
from policies.types import Decision, Filtered, Floats, InferenceRequest, Mask, Slots

_WINDOW_PER_ENDPOINT = 6
"""Requests looked at per endpoint; an eighth of that costs half of the gain in a fleet of 32."""
_FEWEST_LOOKED_AT, _MOST_LOOKED_AT = 16, 512
_FEWEST_AT_ONCE = 8
_MOST_PRICED, _MOST_AT_ONCE = 8_192, 64
"""Requests times endpoints, and requests, in one pass: about a millisecond."""
_FARTHEST = 2_048
"""Requests looked at where nobody in the window wants what there is."""
_FIRST_PRICED, _MOST_FIRST, _TIMES_MORE = 4_096, 16, 5
"""Of these the first, and how many more each time: who goes, if anybody does, is mostly among the first."""
_LOOKED_AGAIN_S = 1.0
_MOST_LOOKED_UP = 4
"""Prompts looked up in one pass, at about 50 us each."""
_STARVING = 1 / 3
"""Of what it may wait, after which a request that fits nowhere has an endpoint kept free."""


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

    `holders`: who held the first half of its prompt then. `nobody`: it may go nowhere.
    """

    matched_tokens: Floats
    members: Slots
    holders: int
    at_s: float
    nobody: bool


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


class Faulty(Exception):
    """A request cannot be judged, by a fault of its own policy's or of ours."""

    def __init__(self, ticket: WaitingRequest) -> None:
        super().__init__("a waiting request cannot be judged")
        self.ticket = ticket


class _Sure(Random):
    """Chances as in `of`, except that whatever may happen by `random()` does."""

    def __init__(self, of: Random) -> None:
        super().__init__(0)
        self.of = of

    def random(self) -> float:
        return 0.0

    def getrandbits(self, k: int, /) -> int:
        return self.of.getrandbits(k)


@dataclass(frozen=True, slots=True)
class _Prices:
    """Of each request at each endpoint, shape (w, n): whether it may go there, the cost, and what decides (Pricing).

    Without costs any endpoint is as good as any other.
    """

    allowed: Mask
    costs: Floats | None
    liked: Floats | None

    def detours_s(self, fits: Mask) -> Floats:
        """What the best that `fits` costs each more than its choice, shape (w,); infinite where nothing does.

        Less, where its choice is the holder of its prompt and dearer: it was to be kept only if that has room.
        """
        some: Mask = np.asarray(fits.any(axis=1))
        if self.costs is None or self.liked is None:
            return np.where(some, 0.0, np.inf)
        rows = np.arange(len(fits))
        choice = np.where(self.allowed, self.liked, np.inf).argmin(axis=1)
        offer = np.where(fits, self.liked, np.inf).argmin(axis=1)
        return np.where(some, self.costs[rows, offer] - self.costs[rows, choice], np.inf)


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
        self._sure = _Sure(Random(0))
        self._found: tuple[InferenceRequest, _Prospects] | None = None  # of the one that has just come
        self._kept: tuple[_W, int] | None = None  # for whom an endpoint is kept free, and its slot

    def at_once(
        self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random, *, length: int = 3
    ) -> Decision | Unplaceable | None:
        """Where a request goes that has just come; None if it has to wait."""
        rng = self._certain(rng)
        if len(self.queue):
            prospects, filtered = self._find(request, state, now_s, rng)
            self._found = request, prospects
            return Unplaceable(filtered) if prospects.nobody else None
        decision = self.placement.choose(request, state, now_s, rng, length=length)
        if isinstance(decision, Unplaceable):
            return decision
        view = self.placement.survey(request, state, now_s, rng)
        may = self._class_may(view, request)
        fits = may & cache_holds(view, request.input_tokens) & with_room(view, self.spec.room)
        if not self._late and fits.any():
            fits = may & with_places(view, self.spec.room)
        return decision if fits[view.slots == decision.order[0]].all() else None

    def came(self, ticket: _W, state: FleetState, now_s: float, rng: Random) -> None:
        """A request waits from now on. Looked up at once, so that passes are short however many come."""
        request, prospects = self._found or (None, None)
        self._found = None
        if request is not ticket.request:
            prospects = self._prospects(ticket, state, now_s, self._certain(rng))
        ticket.prospects = prospects

    def bindings(self, state: FleetState, now_s: float, rng: Random, *, length: int = 3) -> Iterator[Bound[_W]]:
        """One pass: who goes now, and where to. Each must be taken from the queue and committed before the next.

        Raises Faulty where a request cannot be judged: it, or a policy of its own, is to blame.
        """
        begin, self._begin, self.unfinished = self._begin, 0, False
        rng = self._certain(rng)
        anyone = self.queue.anyone()
        if anyone is None or not len(self.placement.members):
            return
        view = self.placement.survey(anyone.request, state, now_s, rng)
        general = with_room(view, self.spec.room)
        if not general.any():
            return
        begin = self._begin_at(begin, frozenset(view.slots[general].tolist()))
        far = begin >= self._window()
        self._lookups_left = _MOST_LOOKED_UP
        for tickets in self._slices(begin):
            known, went = self._look_up(tickets, state, now_s, rng, far=far), False
            for bound in self._those_that_go(known, view, general, rng, length):
                went = True
                yield bound
            if went:  # the order is another one by now
                self._begin, self.unfinished = begin if far else 0, True
                return

    def _certain(self, rng: Random) -> Random:
        """The same chances, but for whether one that warms up is looked at: here its share of places is its share."""
        if self._sure.of is not rng:
            self._sure = _Sure(rng)
        return self._sure

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
        rows = min(max(_FIRST_PRICED // members, _FEWEST_AT_ONCE), _MOST_FIRST)
        while tickets := list(islice(order, rows)):
            yield tickets
            rows *= _TIMES_MORE
        if end < size:
            self._begin, self.unfinished = end, True

    def _those_that_go(
        self, tickets: list[_W], view: View, general: Mask, rng: Random, length: int
    ) -> Iterator[Bound[_W]]:
        """Of these who can go, in order. `general` loses the endpoints that have got somebody.

        Without late binding only the first: whether there is room for another one yet the next pass will see.
        """
        if not tickets:
            return
        prices = self._price(view, tickets)
        waited_s = view.now_s - np.array([ticket.since_s for ticket in tickets])
        affordable_s = np.minimum(self.spec.patience * waited_s, self.spec.longest_detour_s)
        may = self._classes_may(view, tickets) & prices.allowed
        holds = may & cache_holds(view, np.array([[ticket.request.input_tokens] for ticket in tickets], np.float64))
        self._keep_for_the_starving(tickets, waited_s, holds, prices.allowed, view)
        fits: Mask = holds & self._open_to(tickets, view, general)
        where = fits if self._late else may & self._open_to(tickets, view, with_places(view, self.spec.room))
        detours_s = prices.detours_s(fits)
        while len(going := np.flatnonzero(detours_s <= affordable_s)):
            row = int(going[0])
            bound = self._bound(tickets[row], where[row], float(detours_s[row]), view, rng, length)
            detours_s[row], fits[row] = np.inf, False
            if bound is None:
                continue
            yield bound
            if not self._late:
                return
            taken = view.slots == bound.decision.order[0]
            np.logical_and(general, ~taken, out=general)
            np.logical_and(fits, ~taken, out=fits)
            detours_s = prices.detours_s(fits)

    def _bound(self, ticket: _W, fits: Mask, detour_s: float, view: View, rng: Random, length: int) -> Bound[_W] | None:
        """The exact choice among the endpoints that have room for it; None if the world has moved since."""
        room = np.zeros(len(view.state.generation), np.bool_)
        room[view.slots[fits]] = True
        try:
            decision = self.placement.choose(ticket.request, view.state, view.now_s, rng, length=length, room=room)
        except Exception as error:
            raise Faulty(ticket) from error
        if isinstance(decision, Unplaceable):
            ticket.prospects = None
            return None
        decision.waited_s, decision.detour_s = view.now_s - ticket.since_s, detour_s
        if self._kept is not None and self._kept[0] is ticket:
            self._kept = None
        return Bound(ticket, decision)

    def _open_to(self, tickets: list[_W], view: View, general: Mask) -> Mask:
        """Where there is room for any request, but for the endpoint that is kept free for one of them; (w, n)."""
        room = np.broadcast_to(general, (len(tickets), len(general)))
        if self._kept is None:
            return room
        ticket, slot = self._kept
        for_him = np.array([[one is ticket] for one in tickets])
        kept_free: Mask = room & (for_him | (view.slots != slot))
        return kept_free

    def _keep_for_the_starving(
        self, tickets: list[_W], waited_s: Floats, holds: Mask, allowed: Mask, view: View
    ) -> None:
        """Keep an endpoint free for a request that is too long for every gap: the one with most of its cache free."""
        if self._kept is not None and not self._still_waits(*self._kept, view):
            self._kept = None
        if self._kept is not None:
            return
        limits_s = np.array([ticket.wait_s for ticket in tickets])
        starving = (waited_s > _STARVING * limits_s) & ~holds.any(axis=1) & allowed.any(axis=1)
        if starving.any():
            row = int(starving.argmax())
            free = np.where(allowed[row], view.kv_capacity - view.prompt_tokens_in_flight, -np.inf)
            self._kept = tickets[row], int(view.slots[free.argmax()])

    def _still_waits(self, ticket: _W, slot: int, view: View) -> bool:
        return self.queue.has(ticket) and slot in view.slots

    # -- what they find

    def _look_up(self, tickets: list[_W], state: FleetState, now_s: float, rng: Random, *, far: bool) -> list[_W]:
        """Those of which is known what they find. The first few of whom it is not, or no longer, are looked up now.

        `far`: they are behind the window, and what was known of them once will do until one of them could go.
        """
        known = []
        for ticket in tickets:
            if not (self._is_known(ticket) if far else self._is_fresh(ticket, now_s)):
                if self._lookups_left:
                    self._lookups_left -= 1
                    ticket.prospects = self._prospects(ticket, state, now_s, rng)
                else:
                    self.unfinished = True
            if self._is_known(ticket):
                known.append(ticket)
        return known

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

    def _prospects(self, ticket: _W, state: FleetState, now_s: float, rng: Random) -> _Prospects:
        try:
            return self._find(ticket.request, state, now_s, rng)[0]
        except Exception as error:
            raise Faulty(ticket) from error

    def _find(
        self, request: InferenceRequest, state: FleetState, now_s: float, rng: Random
    ) -> tuple[_Prospects, Filtered]:
        view = self.placement.view(request, state, now_s, rng)
        may, filtered = self.placement.filter(view)
        matched = np.full(len(view.slots), -1.0)
        matched[view.slots.searchsorted(may.slots)] = may.matched_tokens
        return _Prospects(matched, view.slots, self._holders(request), now_s, not len(may.slots)), filtered

    # -- where they could go, and at what price

    def _price(self, view: View, tickets: list[_W]) -> _Prices:
        matched = self._matched(view, tickets)
        allowed = matched >= 0
        pricing = self.placement.pricing
        if not self._late or pricing is None:
            return _Prices(allowed, None, None)
        costs, liked = pricing.price(view, [ticket.request for ticket in tickets], np.maximum(matched, 0.0))
        return _Prices(allowed, costs, liked)

    def _matched(self, view: View, tickets: list[_W]) -> Floats:
        """What each finds at each of the view's candidates, shape (w, n); less than 0 where it may not go."""
        members = self.placement.members
        rows = [ticket.prospects.matched_tokens for ticket in tickets if ticket.prospects is not None]
        matched = np.concatenate(rows).reshape(len(rows), len(members))
        if len(view.slots) < len(members):
            matched = matched[:, members.searchsorted(view.slots)]
        return matched

    def _classes_may(self, view: View, tickets: list[_W]) -> Mask:
        """Where each one's class has not yet all that it may have; shape (w, n)."""
        may = np.ones((len(tickets), len(view.slots)), np.bool_)
        for name in {ticket.class_name for ticket in tickets}:
            spec = self.queue.class_of(name)
            if spec.limited:
                rows = [row for row, ticket in enumerate(tickets) if ticket.class_name == name]
                tokens = np.array([[self._claims(tickets[row].request)] for row in rows])
                may[rows] = class_has_room(view, spec, self.placement.class_use, tokens)
        return may

    def _class_may(self, view: View, request: InferenceRequest) -> Mask:
        """The same of one request, shape (n,)."""
        spec = self.queue.class_of(request.class_name)
        if not spec.limited:
            return np.ones(len(view.slots), np.bool_)
        return class_has_room(view, spec, self.placement.class_use, self._claims(request))

    @property
    def _late(self) -> bool:
        return self.spec.late and self.placement.pricing is not None

    def _claims(self, request: InferenceRequest) -> float:
        return request.input_tokens + self.placement.ledger.answer_tokens(request)
