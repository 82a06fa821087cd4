"""Which of the requests that wait goes next. One queue per pool; nothing else holds requests.

Three questions, in this order:

- *which class*: by weight among the classes that wait, none below `min_share` of the turns, and none passed over more
  than `most_passed_over` times in a row;
- *which tenant* of it: fair by predicted tokens;
- *which request* of that tenant: the earliest arrival or the earliest deadline, where one step of priority counts as
  much as `ageing_s` of waiting, so that whoever waits long enough comes before everybody who comes later.

Classes and tenants are served by virtual time: a turn advances the clock of whoever got it, by its cost over its
weight, and the one whose clock is furthest behind is next. Who comes back from idling starts at the present, not at
his last turn, or he could save turns up; a debt he keeps. Rejected: deficit round robin. Late binding takes requests
from anywhere in the window, and rounds say nothing about those; clocks do.

`in_order` says in which order requests would go, without changing anything; `take` says that one has gone.
Not here: whether anything may go now (binding.py), and holding the requests themselves (extproc).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Literal, TypeVar


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """One class of requests.

    `weight`: its share of the turns beside others that wait. `places`: requests that may wait. `max_wait_s`: then they
    are answered with an error. `overflow`: the class that takes what finds no place here. `endpoint_requests`,
    `endpoint_kv_share`: what its requests may have of one endpoint at once (room.py).
    """

    name: str
    weight: float = 1.0
    places: int = 1_000
    max_wait_s: float = 30.0
    overflow: str | None = None
    endpoint_requests: float = math.inf
    endpoint_kv_share: float = 1.0

    @property
    def limited(self) -> bool:
        """It may not have all of an endpoint."""
        return self.endpoint_requests < math.inf or self.endpoint_kv_share < 1


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """Classes, first the one that requests belong to which name none, and what holds for all of them.

    `max_bytes`: of bodies held. `min_share`: of the turns, for every class that waits. `most_idle_tenants`: whose debt
    is remembered while they wait for nothing.
    """

    classes: tuple[ClassSpec, ...]
    order: Literal["arrival", "deadline"] = "arrival"
    max_bytes: int = 256 * 1024 * 1024
    min_share: float = 0.2
    most_passed_over: int = 20
    ageing_s: float = 5.0
    most_idle_tenants: int = 10_000

    def shares(self) -> dict[str, float]:
        """Each class's share of the turns when all wait: by weight, but for those that would fall below the least."""
        least = min(self.min_share, 1.0 / len(self.classes))
        shares = {one.name: least for one in self.classes}
        lifted: set[str] = set()
        while True:
            rest = [one for one in self.classes if one.name not in lifted]
            left, weights = 1.0 - least * len(lifted), sum(one.weight for one in rest)
            below = {one.name for one in rest if one.weight / weights * left < least}
            if not below:
                return shares | {one.name: one.weight / weights * left for one in rest}
            lifted |= below


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that waits. `tokens`: what it is predicted to cost.

    `priority`: lower goes sooner. `deadline_s`: when its first token should come, if somebody said so. `most_wait_s`:
    its caller waits no longer, whatever its class may.
    """

    class_name: str
    tenant: str
    tokens: float
    held_bytes: int = 0
    priority: int = 0
    deadline_s: float = math.inf
    most_wait_s: float = math.inf
    since_s: float = field(default=0.0, init=False)
    expires_s: float = field(default=math.inf, init=False)
    wait_s: float = field(default=math.inf, init=False)
    together: tuple[float, int] = field(default=(math.inf, 0), init=False)
    rank: tuple[float, int] = field(default=(0.0, 0), init=False)


_T = TypeVar("_T", bound=Ticket)


class _Clocks:
    """Virtual clocks of those who share something; see the module."""

    __slots__ = ("_at", "_now", "most_idle")

    def __init__(self, most_idle: float) -> None:
        self._at: dict[str, float] = {}
        self._now = 0.0
        self.most_idle = most_idle

    def at(self, name: str) -> float:
        """Its clock, which is never in the past."""
        return max(self._at.get(name, 0.0), self._now)

    def each(self, names: Iterable[str]) -> Iterator[tuple[float, str]]:
        """The clocks of many, at once since there may be thousands."""
        now, at = self._now, self._at.get
        return ((max(at(name, now), now), name) for name in names)

    def turn(self, name: str, cost: float, waiting: Iterable[str]) -> None:
        """`name` got a turn, one of those `waiting`."""
        began = self.at(name)
        self._now = max(self._now, min((self.at(one) for one in waiting), default=began))
        self._at[name] = began + cost
        if len(self._at) > self.most_idle:
            self._forget()

    def keep(self, names: Iterable[str]) -> None:
        """There are these and no others any more."""
        self._at = {name: self._at[name] for name in names if name in self._at}

    def _forget(self) -> None:
        """Drop clocks that the present has passed, and the smallest debts if those are too many."""
        owing = sorted((at, name) for name, at in self._at.items() if at > self._now)
        self._at = {name: at for at, name in owing[int(-self.most_idle // 2) :]}


class _Line(Generic[_T]):
    """The requests of one class."""

    __slots__ = ("arrivals", "by_wait", "clocks", "passed_over", "spec", "tenants")

    def __init__(self, spec: ClassSpec, most_idle: int) -> None:
        self.spec = spec
        self.clocks = _Clocks(most_idle)
        self.tenants: dict[str, list[_T]] = {}  # each by rank
        self.arrivals: dict[_T, None] = {}
        # by arrival as well, those that may wait equally long together: of these the first is the first to go
        self.by_wait: dict[tuple[float, int], dict[_T, None]] = {}
        self.passed_over = 0

    def in_order(self) -> Iterator[_T]:
        """The requests in the order in which they would go."""
        heads = [(at, tenant, 0) for at, tenant in self.clocks.each(self.tenants)]
        heapq.heapify(heads)
        while heads:
            at, tenant, position = heads[0]
            tickets = self.tenants[tenant]
            ticket = tickets[position]
            yield ticket
            position += 1
            if position < len(tickets):
                heapq.heapreplace(heads, (at + ticket.tokens, tenant, position))
            else:
                heapq.heappop(heads)

    def overdue(self, now_s: float) -> _T | None:
        for waiting in self.by_wait.values():
            first = next(iter(waiting))
            if first.expires_s <= now_s:
                return first
        return None

    def add(self, ticket: _T) -> None:
        insort(self.tenants.setdefault(ticket.tenant, []), ticket, key=_rank)
        self._came(ticket)

    def _came(self, ticket: _T) -> None:
        self.arrivals[ticket] = None
        self.by_wait.setdefault(ticket.together, {})[ticket] = None

    def take_over(self, tickets: Sequence[_T]) -> None:
        """Add those of another class, which may have come before some of ours."""
        for ticket in tickets:
            ticket.class_name = self.spec.name
            insort(self.tenants.setdefault(ticket.tenant, []), ticket, key=_rank)
        everybody = sorted((*self.arrivals, *tickets), key=lambda one: one.since_s)
        self.arrivals, self.by_wait = {}, {}
        for ticket in everybody:
            self._came(ticket)

    def remove(self, ticket: _T) -> None:
        del self.arrivals[ticket]
        waiting = self.by_wait[ticket.together]
        del waiting[ticket]
        if not waiting:
            del self.by_wait[ticket.together]
        tickets = self.tenants[ticket.tenant]
        del tickets[bisect_left(tickets, ticket.rank, key=_rank)]
        if not tickets:
            del self.tenants[ticket.tenant]


def _rank(ticket: Ticket) -> tuple[float, int]:
    return ticket.rank


class _Going(Generic[_T]):
    """A class while its next turns are foretold. `passed_over_since`: the turn from which on others went."""

    __slots__ = ("at", "left", "order", "passed_over_since", "turn_cost")

    def __init__(self, line: _Line[_T], at: float, share: float) -> None:
        self.order = line.in_order()
        self.left = len(line.arrivals)
        self.at = at
        self.turn_cost = 1.0 / share
        self.passed_over_since = -line.passed_over


class Queue(Generic[_T]):
    """The waiting requests of one pool. Every call takes the time it happens at, in seconds of one clock."""

    def __init__(self, spec: QueueSpec) -> None:
        self.held_bytes = 0
        self._count = 0
        self._lines: dict[str, _Line[_T]] = {}
        self._clocks = _Clocks(math.inf)  # as many as there are classes
        self._pace = _Pace()
        self.configure(spec)

    def configure(self, spec: QueueSpec) -> None:
        """Use new limits and weights. Who waits in a class that there is no more waits in the first from now on."""
        self.spec = spec
        self._shares = spec.shares()
        old, lines = dict(self._lines), {}
        for one in spec.classes:
            line = old.pop(one.name) if one.name in old else _Line(one, spec.most_idle_tenants)
            line.spec, line.clocks.most_idle = one, spec.most_idle_tenants
            lines[one.name] = line
        self._lines = lines  # at once: another thread may be counting who waits
        self._clocks.keep(self._lines)
        homeless = [ticket for line in old.values() for ticket in line.arrivals]
        self._lines[spec.classes[0].name].take_over(homeless)

    def has(self, ticket: _T) -> bool:
        """Whether this request waits."""
        line = self._lines.get(ticket.class_name)
        return line is not None and ticket in line.arrivals

    def class_of(self, name: str | None) -> ClassSpec:
        """The class of that name; the first one for a name that there is no (more), and for none."""
        line = self._lines.get(name or "")
        return self.spec.classes[0] if line is None else line.spec

    def __len__(self) -> int:
        return sum(len(line.arrivals) for line in self._lines.values())

    def anyone(self) -> _T | None:
        """One of those that wait, if somebody does."""
        return next((next(iter(line.arrivals)) for line in self._lines.values() if line.arrivals), None)

    def waiting(self, class_name: str) -> int:
        """How many of a class wait."""
        return len(self._lines[class_name].arrivals)

    # -- coming and going

    def offer(self, ticket: _T, now_s: float, since_s: float | None = None) -> bool:
        """Let a request wait, in its class or the first it overflows into that has a place; False if none has.

        `since_s`: it came then, and waits again. It keeps a place, also where there are fewer by now.
        """
        line = self._with_room(ticket) if since_s is None else self._lines[ticket.class_name]
        if line is None:
            return False
        if not line.arrivals:
            line.passed_over = 0
        self._count += 1
        ticket.class_name = line.spec.name
        ticket.since_s = now_s if since_s is None else since_s
        ticket.wait_s = min(line.spec.max_wait_s, ticket.most_wait_s)
        ticket.expires_s = ticket.since_s + ticket.wait_s
        ticket.together = (ticket.wait_s, 0 if since_s is None else self._count)
        ticket.rank = (self._due_s(ticket) + ticket.priority * self.spec.ageing_s, self._count)
        line.add(ticket)
        self.held_bytes += ticket.held_bytes
        return True

    def _with_room(self, ticket: _T) -> _Line[_T] | None:
        if self.held_bytes + ticket.held_bytes > self.spec.max_bytes:
            return None
        name: str | None = ticket.class_name
        tried: set[str] = set()
        while name is not None and name not in tried:
            line = self._lines[name]
            if len(line.arrivals) < line.spec.places:
                return line
            tried.add(name)
            name = line.spec.overflow
        return None

    def _due_s(self, ticket: _T) -> float:
        if self.spec.order == "arrival":
            return ticket.since_s
        return min(ticket.deadline_s, ticket.expires_s)

    def take(self, ticket: _T, now_s: float) -> None:
        """This request goes: its class and its tenant have had a turn."""
        line = self._lines[ticket.class_name]
        self._clocks.turn(ticket.class_name, 1.0 / self._shares[ticket.class_name], self._waiting_classes())
        line.clocks.turn(ticket.tenant, ticket.tokens, line.tenants)
        for other in self._lines.values():
            other.passed_over = other.passed_over + 1 if other.arrivals and other is not line else 0
        self.drop(ticket)
        self._pace.departed(now_s)

    def drop(self, ticket: _T) -> None:
        """This request waits no more: its client has gone."""
        self._lines[ticket.class_name].remove(ticket)
        self.held_bytes -= ticket.held_bytes

    def expire(self, now_s: float) -> list[_T]:
        """Remove and return those that have waited for as long as they may."""
        gone: list[_T] = []
        for line in self._lines.values():
            while (first := line.overdue(now_s)) is not None:
                self.drop(first)
                gone.append(first)
        return gone

    def clear(self) -> list[_T]:
        """Remove and return everybody."""
        everybody = [ticket for line in self._lines.values() for ticket in line.arrivals]
        for ticket in everybody:
            self.drop(ticket)
        return everybody

    # -- the order

    def window(self, most: int) -> list[_T]:
        """The next requests in the order in which they would go if all of them could."""
        return list(islice(self.in_order(), most))

    def in_order(self) -> Iterator[_T]:
        """The same, of all that wait; the queue must not change meanwhile."""
        going = [_Going(line, self._clocks.at(name), self._shares[name]) for name, line in self._lines.items()]
        going = [one for one in going if one.left]
        turn = 0
        while going:
            first = going[0] if len(going) == 1 else self._next_class(going, turn)
            yield next(first.order)
            turn += 1
            first.at += first.turn_cost
            first.passed_over_since = turn
            first.left -= 1
            if not first.left:
                going.remove(first)

    def _next_class(self, going: list[_Going[_T]], turn: int) -> _Going[_T]:
        first = starved = going[0]
        for one in going:
            if one.at < first.at:
                first = one
            if one.passed_over_since < starved.passed_over_since:
                starved = one
        return starved if turn - starved.passed_over_since >= self.spec.most_passed_over else first

    def _waiting_classes(self) -> list[str]:
        return [name for name, line in self._lines.items() if line.arrivals]

    # -- what to tell those who come in vain

    def predicted_wait_s(self, class_name: str, now_s: float) -> float:
        """How long a request of this class that came now would wait, by the pace of the last departures.

        Where nothing has departed of late, for as long as it may; and not at all where nobody waits.
        """
        line = self._lines[class_name]
        pace = self._pace.per_s(now_s)
        if not len(self):
            return 0.0
        if pace < _SLOWEST_PACE_PER_S:
            return line.spec.max_wait_s
        shares = sum(self._shares[name] for name in {*self._waiting_classes(), class_name})
        alone_s = (len(line.arrivals) + 1) * shares / self._shares[class_name] / pace
        return min(alone_s, (len(self) + 1) / pace, line.spec.max_wait_s)


_PACE_MEMORY_S = 10.0
_SLOWEST_PACE_PER_S = 1e-3
"""What is left of a pace long after the last departure foretells nothing."""


class _Pace:
    """Departures per second, of about the last ten seconds."""

    __slots__ = ("_at_s", "_began_s", "_count")

    def __init__(self) -> None:
        self._count = 0.0
        self._at_s = self._began_s = -math.inf

    def departed(self, now_s: float) -> None:
        if self._began_s == -math.inf:
            self._began_s = self._at_s = now_s
        self._count = self._faded(now_s) + 1.0
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 before anything has departed."""
        if not self._count:
            return 0.0
        # of a history shorter than the memory, only what there was of it counts
        seen_s = _PACE_MEMORY_S * -math.expm1(-(now_s - self._began_s) / _PACE_MEMORY_S)
        return self._faded(now_s) / max(seen_s, 1.0)

    def _faded(self, now_s: float) -> float:
        return self._count * math.exp(-(now_s - self._at_s) / _PACE_MEMORY_S) if self._count else 0.0
