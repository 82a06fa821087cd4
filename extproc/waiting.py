"""Requests that wait: a room per pool with its queue, and the wakes in which they go.

A wake binds whoever can go (policies/admission/binding.py). It comes when a request has ended or another has come, and
every `_LOOK_S`, since work is done where nobody tells of it. Wakes are coalesced, stop after `_LONGEST_WAKE_S`, and
rest afterwards where they were in vain, so that a long queue never keeps the loop from new requests.

A waiting request hangs on its Flight: whose stream ends leaves the queue at once. Here is no reply made: the pipeline
does that, through `Carrier`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from time import thread_time
from typing import Any, Protocol, cast

import structlog

from extproc.asked import Asked
from extproc.config.generations import Generation
from extproc.config.schema import Config
from extproc.config.sections.queueing import PoolQueue
from extproc.reply import Pending, Reply
from policies.admission.binding import Binder, BindingSpec, Bound, Faulty, WaitingRequest
from policies.admission.queue import ClassSpec, Queue, QueueSpec
from policies.admission.room import RoomSpec
from policies.fleet_state import FleetState
from policies.placement.placement import Placement, Unplaceable
from policies.types import Decision, InferenceRequest, Reason, Refusal, retry_after_s

log = structlog.get_logger(__name__)

_LOOK_S = 0.05
_LONGEST_WAKE_S = 0.002
_REST_IN_VAIN = 4.0
"""Times the CPU time of a wake in which nobody could go, before the next: looking has a fifth of the loop at most."""


@dataclass(slots=True, eq=False, kw_only=True)
class Held(WaitingRequest):
    """One request that waits. `again`: decides anew, for when the config has changed meanwhile."""

    asked: Asked
    again: Callable[[], Reply | Pending]
    room: WaitingRoom
    ready: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future(), init=False)

    def leave(self) -> None:
        """Its client has gone."""
        self.room.lose(self)


class Carrier(Protocol):
    """What becomes of requests that have waited."""

    def carry(self, held: Held, decision: Decision) -> Reply:
        """It goes: commit and render."""

    def turn_away(self, held: Held, refusal: Refusal) -> Reply:
        """It has waited in vain."""

    def abandoned(self, held: Held) -> None:
        """Its client has gone."""

    @property
    def generation(self) -> Generation:
        """The config in force."""


class WaitingEvents(Protocol):
    """Who counts those that wait."""

    def queue_changed(self, pool: str, class_name: str, waiting: int, held_bytes: int) -> None:
        """So many wait in a class now; `held_bytes` in all classes of the pool."""

    def queue_left(self, pool: str, class_name: str, how: str, waited_s: float) -> None:
        """A request waits no more."""

    def queue_class_known(self, pool: str, class_name: str) -> None:
        """There is such a class."""

    def queue_class_gone(self, pool: str, class_name: str) -> None:
        """There is no such class any more."""


class WaitingRoom:
    """Those that wait for one pool."""

    def __init__(
        self, pool: str, binder: Binder[Held], carrier: Carrier, events: WaitingEvents, state: FleetState, rng: Random,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.pool = pool
        self.binder = binder
        self._carrier = carrier
        self._events = events
        self._state = state
        self._rng = rng
        self._clock = clock
        self._wake: asyncio.Handle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._rests_until_s = -math.inf

    def at_once(self, request: InferenceRequest, now_s: float, length: int) -> Decision | Unplaceable | None:
        """Where a request goes without waiting; None if it has to."""
        return self.binder.at_once(request, self._state, now_s, self._rng, length=length)

    def enter(self, held: Held) -> Reply | Pending | Refusal:
        """Wait. The reply itself, if there was room after all; a refusal if the queue is full."""
        queue, now_s, asked = self.binder.queue, self._clock(), held.class_name
        if not queue.offer(held, now_s, held.asked.flight.waits_since_s):
            self._events.queue_left(self.pool, asked, "full", 0.0)
            return _refusal_of_full(self.pool, asked, queue.predicted_wait_s(asked, now_s))
        if held.class_name != asked:
            self._events.queue_left(self.pool, asked, "overflowed", 0.0)
            held.request.class_name = held.class_name  # so it is in all that follows
        held.asked.flight.wait, held.asked.flight.waits_since_s = held, held.since_s
        try:
            self.binder.came(held, self._state, now_s, self._rng)
        except Exception:  # a policy's, perhaps; whoever is answered with an error must not wait on
            self._leave(held, "failed")
            raise
        self._changed(held.class_name)
        self.wake(at_once=len(queue) == 1)
        return held.ready.result() if held.ready.done() else Pending(held.ready)

    def lose(self, held: Held) -> None:
        """A client has gone."""
        self._leave(held, "client_gone")
        self._carrier.abandoned(held)

    # -- wakes

    def wake(self, *, at_once: bool = False) -> None:
        """Something has changed: see who can go, now or as soon as it is time."""
        if not len(self.binder.queue) or self._wake is not None:
            return
        rest_s = self._rests_until_s - self._clock()
        if at_once and rest_s <= 0:
            self._bind()
        else:
            loop = asyncio.get_running_loop()
            self._wake = loop.call_later(rest_s, self._bind) if rest_s > 0 else loop.call_soon(self._bind)

    def _bind(self) -> None:
        self._wake = None
        self._look_later()  # first: whatever fails here, nobody waits for longer than he may
        began, left = thread_time(), len(self.binder.queue)
        more = self._let_go(began)
        if len(self.binder.queue) == left:
            self._rests_until_s = self._clock() + _REST_IN_VAIN * (thread_time() - began)
        if more:
            self.wake()

    def _look_later(self) -> None:
        if len(self.binder.queue) and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._look_later()
        self._expire()
        self.wake()

    def _let_go(self, began: float) -> bool:
        """Bind whoever can go. True if there was no time for all."""
        binder, length = self.binder, self._carrier.generation.list_length
        try:
            for bound in binder.bindings(self._state, self._clock(), self._rng, length=length):
                self._go(bound)
                if thread_time() - began > _LONGEST_WAKE_S:
                    return True
        except Exception as error:
            # a policy of a third party, perhaps; without a queue its fault would be one request's as well
            log.exception("binding failed", pool=self.pool, error=str(error))
            self._give_up(cast("Held", error.ticket) if isinstance(error, Faulty) else binder.queue.window(1)[0])
            return True
        return binder.unfinished

    def _go(self, bound: Bound[Held]) -> None:
        held = bound.ticket
        if held.ready.cancelled():  # its client has just gone, and its stream has not ended yet
            self.lose(held)
            return
        self.binder.queue.take(held, self._clock())
        self._left(held, "detour" if bound.decision.detour_s else "bound")
        if held.asked.generation is not self._carrier.generation:
            _chain(held, held.again())
            return
        held.ready.set_result(self._carrier.carry(held, bound.decision))

    def _give_up(self, held: Held) -> None:
        self._leave(held, "failed")
        self._answer(held, INTERNAL_ERROR)

    def _expire(self) -> None:
        queue, now_s = self.binder.queue, self._clock()
        for held in queue.expire(now_s):
            self._left(held, "timeout")
            again_s = queue.predicted_wait_s(held.class_name, now_s) if len(queue) else held.wait_s
            self._answer(held, _refusal_of_timeout(self.pool, held, again_s))

    def _answer(self, held: Held, refusal: Refusal) -> None:
        if not held.ready.done():
            held.ready.set_result(self._carrier.turn_away(held, refusal))
        else:  # its client has gone in this very moment
            self._carrier.abandoned(held)

    # -- coming and going

    def _leave(self, held: Held, how: str) -> None:
        self.binder.queue.drop(held)
        self._left(held, how)

    def _left(self, held: Held, how: str) -> None:
        held.asked.flight.wait = None
        self._events.queue_left(self.pool, held.class_name, how, self._clock() - held.since_s)
        self._changed(held.class_name)

    def _changed(self, class_name: str) -> None:
        queue = self.binder.queue
        self._events.queue_changed(self.pool, class_name, queue.waiting(class_name), queue.held_bytes)

    # -- configuration

    def configure(self, spec: PoolQueue, most_tenants: int) -> None:
        """Use new limits; who waits goes on waiting."""
        queue = self.binder.queue
        gone = {one.name for one in queue.spec.classes} - {one.name for one in spec.classes}
        queue.configure(queue_spec(spec, most_tenants))
        self.binder.spec = binding_spec(spec)
        for name in gone:
            self._events.queue_class_gone(self.pool, name)
        for one in spec.classes:
            self._events.queue_class_known(self.pool, one.name)
            self._changed(one.name)
        self.wake()

    def decide_anew(self) -> None:
        """There is no queue here any more: whoever waits is decided without."""
        self._stop()
        everybody = deque(self.binder.queue.clear())
        for held in everybody:
            self._left(held, "reconfigured")
        self._decide_some(everybody)

    def _decide_some(self, left: deque[Held]) -> None:
        """Of those that a queue has left behind, and the others in the loop's next turns: each is read anew."""
        began = thread_time()
        while left:
            held = left.popleft()
            if held.ready.cancelled():
                self._carrier.abandoned(held)
            else:
                _chain(held, held.again())
            if thread_time() - began > _LONGEST_WAKE_S:
                asyncio.get_running_loop().call_soon(self._decide_some, left)
                return

    def turn_all_away(self, refusal: Refusal) -> None:
        """We stop."""
        for held in self.binder.queue.clear():
            self._left(held, "shut_down")
            self._answer(held, refusal)
        self._stop()

    def _stop(self) -> None:
        for timer in (self._wake, self._look):
            if timer is not None:
                timer.cancel()
        self._wake = self._look = None

    def describe(self) -> dict[str, Any]:
        """Who waits, for the admin API."""
        queue, now_s = self.binder.queue, self._clock()
        return {
            "held_bytes": queue.held_bytes,
            "classes": {
                one.name: {
                    "waiting": queue.waiting(one.name),
                    "places": one.places,
                    "predicted_wait_s": round(queue.predicted_wait_s(one.name, now_s), 3),
                }
                for one in queue.spec.classes
            },
        }


class WaitingRooms:
    """The waiting rooms by pool. They outlive generations."""

    def __init__(
        self, carrier: Carrier, events: WaitingEvents, state: FleetState, rng: Random, clock: Callable[[], float]
    ) -> None:
        self._carrier = carrier
        self._events = events
        self._state = state
        self._rng = rng
        self._clock = clock
        self._rooms: dict[str, WaitingRoom] = {}

    def of(self, pool: str) -> WaitingRoom | None:
        """The pool's, if it has a queue."""
        return self._rooms.get(pool)

    def waiting(self, pool: str) -> int:
        """How many requests wait for a pool."""
        room = self._rooms.get(pool)
        return 0 if room is None else len(room.binder.queue)

    def configure(self, config: Config, placements: dict[str, Placement]) -> None:
        """Take a new config: rooms come and go with their sections, and their pools."""
        wanted = {pool.name: pool.queue for pool in config.pools if pool.queue is not None}
        gone = [self._rooms.pop(name) for name in self._rooms.keys() - wanted.keys()]
        for name, spec in wanted.items():
            placement, room = placements[name], self._rooms.get(name)
            if room is None or room.binder.placement is not placement:
                if room is not None:
                    gone.append(room)
                room = self._rooms[name] = self._open(name, placement, spec, config.limits.tenants)
            room.configure(spec, config.limits.tenants)
            placement.class_use.keep({one.name for one in spec.classes})
        for room in gone:
            room.decide_anew()

    def _open(self, pool: str, placement: Placement, spec: PoolQueue, most_tenants: int) -> WaitingRoom:
        binder = Binder(placement, Queue[Held](queue_spec(spec, most_tenants)), binding_spec(spec))
        return WaitingRoom(pool, binder, self._carrier, self._events, self._state, self._rng, self._clock)

    def wake(self, pool: str) -> None:
        """A request of the pool has ended."""
        room = self._rooms.get(pool)
        if room is not None:
            room.wake()

    def turn_all_away(self, refusal: Refusal) -> None:
        """We stop."""
        for room in self._rooms.values():
            room.turn_all_away(refusal)

    def describe(self) -> dict[str, Any]:
        """Who waits, by pool, for the admin API."""
        return {name: room.describe() for name, room in self._rooms.items()}


def queue_spec(queue: PoolQueue, most_tenants: int) -> QueueSpec:
    """The policy's spec of a config's section."""
    return QueueSpec(
        tuple(_class_specs(queue)),
        order=queue.order,
        max_bytes=queue.max_bytes,
        min_share=queue.min_share,
        most_passed_over=queue.most_passed_over,
        ageing_s=queue.ageing_s,
        most_idle_tenants=most_tenants,
    )


def _class_specs(queue: PoolQueue) -> Iterable[ClassSpec]:
    for one in queue.classes:
        yield ClassSpec(
            one.name,
            one.weight,
            one.places,
            one.max_wait_s,
            one.overflow,
            one.endpoint_requests or math.inf,
            one.endpoint_kv_share,
        )


def binding_spec(queue: PoolQueue) -> BindingSpec:
    """The policy's spec of a config's section."""
    room = RoomSpec(queue.busy_ms / 1000, queue.endpoint_requests or math.inf)
    return BindingSpec(queue.late_binding, room, longest_detour_s=queue.longest_detour_ms / 1000)


def _chain(held: Held, reply: Reply | Pending) -> None:
    """Let the reply be what `held` waits for."""
    if held.ready.done():
        return
    if not isinstance(reply, Pending):
        held.ready.set_result(reply)
        return

    def settle(done: asyncio.Future[Reply]) -> None:
        if done.cancelled() or held.ready.done():
            held.ready.cancel()
        elif (error := done.exception()) is not None:
            held.ready.set_exception(error)
        else:
            held.ready.set_result(done.result())

    reply.ready.add_done_callback(settle)
    # whose client leaves meanwhile gives up what it waits for
    held.ready.add_done_callback(lambda ready: reply.ready.cancel() if ready.cancelled() else None)


INTERNAL_ERROR = Refusal(500, "server_error", "internal error while routing", Reason.INTERNAL_ERROR)


def _refusal_of_full(pool: str, class_name: str, wait_s: float) -> Refusal:
    message = f"the queue of pool {pool} is full for class {class_name}"
    return Refusal(429, "rate_limit_error", message, Reason.QUEUE_FULL, retry_after_s=retry_after_s(wait_s))


def _refusal_of_timeout(pool: str, held: Held, wait_s: float) -> Refusal:
    message = f"no endpoint of pool {pool} had room within {held.wait_s:g} s"
    return Refusal(503, "server_error", message, Reason.QUEUE_TIMEOUT, retry_after_s=retry_after_s(wait_s))
