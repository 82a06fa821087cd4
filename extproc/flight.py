"""The life of one request: what it holds, and the one place that gives it back.

    open -> reserved -> released (the stream ended) -> settled (its access-log entry came, or never will)

A transport opens a Flight when its stream opens and calls `close()` in its `finally`; `close()` is idempotent, and
nothing else gives anything back. The access log may come before or after the end of the stream. Rejected: releasing
on the access log alone (entries are lost while we restart) and on the stream's end alone (it does not say who served
nor how it went).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from extproc.access.gate import Caller
from extproc.config.generations import Generation
from extproc.request.apis import Api
from extproc.usage_reports import Report
from policies.admission.breakers import Breaker
from policies.admission.clients import Visit
from policies.admission.idempotency import KeyHold
from policies.admission.tenants import Charge
from policies.fleet_state import FleetState
from policies.placement.placement import Placement
from policies.types import Decision, InferenceRequest, Reservation

REQUEST_ID_BYTES: Final = 12
"""Random bytes of a request id: 96 bits do not meet twice. Shown as twice as many hex digits."""
_IDS_AT_ONCE: Final = 256

LONGEST_PATH = 200
"""Characters of a path that are remembered."""


class _RequestIds:
    """No one can be told from others. Many at once: the kernel takes longer to be asked than to answer."""

    def __init__(self) -> None:
        self._digits = ""
        self._next = 0

    def next(self) -> str:
        """One that nobody has yet."""
        if self._next >= len(self._digits):
            self._digits, self._next = os.urandom(REQUEST_ID_BYTES * _IDS_AT_ONCE).hex(), 0
        first = self._next
        self._next = first + 2 * REQUEST_ID_BYTES
        return self._digits[first : self._next]


_request_ids: Final = _RequestIds()

TIMED_OUT = frozenset({"upstream_request_timeout", "stream_idle_timeout"})
"""Names of Envoy's response flags for its time limits: on a try, on the whole, on silence."""
BROKE = "status_500"
"""Why an attempt failed: the endpoint answered 500. It shuts down, or is broken, or the request breaks it."""

_OK: Final = 200
_MOST_SETTLED: Final = 1_000
"""Settled requests kept: a tenth of a second at 10,000 requests a second, where the logs are 10 ms apart."""


class Stage(IntEnum):
    """How far a request has come."""

    OPEN = 0
    RESERVED = 1
    RELEASED = 2


# asked for by every request: a member is found far sooner by a name of our own
_OPEN: Final = Stage.OPEN
_RESERVED: Final = Stage.RESERVED
_RELEASED: Final = Stage.RELEASED


@dataclass(init=False)
class Attempt:
    """One try at one endpoint, as the upstream log tells it; never changed. `failed`: why it came to nothing, if so.

    `number`: of the request's tries, from 1.
    """

    request_id: str
    address: str | None
    failed: str | None
    number: int

    def __init__(
        self,
        request_id: str,
        address: str | None,
        failed: str | None,
        number: int = 1,
    ) -> None:
        self.request_id = request_id
        self.address = address
        self.failed = failed
        self.number = number


@dataclass(init=False)
class Usage:
    """Tokens of one request as the engine counted them, never changed; `cached_tokens` None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def __init__(
        self,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens


@dataclass(init=False)
class Completion:
    """How a request went, as the access log tells it; never changed. Times in seconds, None where Envoy took none.

    `upstream_s`: from all of it sent to the endpoint until the last byte of the answer; `ttft_s`: the same until the
    first.

    `flags` are Envoy's response flags by name, `status` 0 when no response headers were sent. `failed` says how the
    endpoint failed the request, if it did. `odd` names a figure that nobody can mean, and that is left out.
    """

    request_id: str
    address: str | None
    status: int
    flags: tuple[str, ...]
    details: str
    attempts: int
    failed: str | None
    duration_s: float | None
    ttft_s: float | None
    request_bytes: int
    response_bytes: int
    usage: Usage | None
    path: str
    upstream_s: float | None
    odd: str

    def __init__(
        self,
        request_id: str,
        address: str | None,
        status: int,
        flags: tuple[str, ...],
        details: str,
        attempts: int,
        failed: str | None,
        duration_s: float | None,
        ttft_s: float | None,
        request_bytes: int,
        response_bytes: int,
        usage: Usage | None = None,
        path: str = "",
        upstream_s: float | None = None,
        odd: str = "",
    ) -> None:
        self.request_id = request_id
        self.address = address
        self.status = status
        self.flags = flags
        self.details = details
        self.attempts = attempts
        self.failed = failed
        self.duration_s = duration_s
        self.ttft_s = ttft_s
        self.request_bytes = request_bytes
        self.response_bytes = response_bytes
        self.usage = usage
        self.path = path
        self.upstream_s = upstream_s
        self.odd = odd

    @property
    def client_left(self) -> bool:
        """The client ended it. What Envoy then does to the endpoint's connection is not the endpoint's fault."""
        return "downstream_connection_termination" in self.flags or "downstream_remote_reset" in self.flags

    @property
    def timed_out(self) -> bool:
        """A time limit ended it."""
        return not TIMED_OUT.isdisjoint(self.flags)


@dataclass(init=False)
class Note:
    """What a request log will tell of a routed request beside what a Flight knows; made only where there is one.

    `prompt` is its beginning as it came, and empty unless prompts are wanted.
    """

    path: str
    kind: str
    asked_model: str
    model: str
    stream: bool
    first_endpoint: str
    prompt: bytes

    def __init__(
        self,
        path: str,
        kind: str,
        asked_model: str,
        model: str,
        first_endpoint: str,
        prompt: bytes,
        *,
        stream: bool,
    ) -> None:
        self.path = path
        self.kind = kind
        self.asked_model = asked_model
        self.model = model
        self.stream = stream
        self.first_endpoint = first_endpoint
        self.prompt = prompt


class FlightEvents(Protocol):
    """Who wants to know what becomes of requests: metrics, the decision log, the fleet."""

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Another endpoint serves the request than the one chosen."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """An endpoint could not serve the request."""

    def retried(self, flight: Flight, count: int) -> None:
        """So many more tries of the request than were known of."""

    def released(self, flight: Flight) -> None:
        """A request has given its place back."""

    def settled(self, flight: Flight, completion: Completion) -> None:
        """The access-log entry came."""

    def missing(self, flight: Flight) -> None:
        """The access-log entry did not come in time."""


class Wait(Protocol):
    """A place in a queue."""

    def leave(self) -> None:
        """Give it up: the client has gone."""


class Flight:
    """One request. Everything it takes hangs here; `close()` gives it back exactly once."""

    _flights: Flights
    opened_at_s: float
    request_id: str
    """Known to Envoy before the body comes, so that the log can name even a request cut off while we decide."""
    ended_at_s: float = 0.0
    stage: Stage = _OPEN
    settled: bool = False
    # What its headers alone tell, until it is decided: its API, and by which config they were found right
    api: Api | None = None
    judged_by: Generation | None = None
    # Its place
    request: InferenceRequest | None = None
    placement: Placement | None = None
    pool: str = ""
    reservation: Reservation | None = None
    served_by: str | None = None
    attempts: int = 1
    charged: tuple[str, ...] = ()
    broke: str | None = None  # the first endpoint that answered it 500
    subset: tuple[str, ...] | None = None
    streamed: bool = False
    claims: Mapping[str, str] | None = None
    caller: Caller | None = None
    charge: Charge | None = None
    visit: Visit | None = None
    report: Report | None = None  # what its engine tells of it afterwards, if that may be needed
    key_hold: KeyHold | None = None
    note: Note | None = None
    trials: tuple[tuple[Breaker, int], ...] = ()  # half-open breakers that wait for its end, and its passes
    hold_s: float = 0.0  # how long the gateway waits for us
    wait: Wait | None  # while it has its place in a queue
    waits_since_s: float | None = None

    def __init__(self, flights: Flights, opened_at_s: float, request_id: str) -> None:
        self._flights = flights
        self.opened_at_s = opened_at_s
        self.request_id = request_id
        self.wait = None  # here: of a Protocol's attribute mypyc forgets what the class says

    @property
    def tenant(self) -> str | None:
        """Whose request it is, once that is established; None for ever where everybody may call."""
        return None if self.caller is None else self.caller.tenant

    def reserve(
        self, request: InferenceRequest, decision: Decision, placement: Placement, reservation: Reservation
    ) -> None:
        """The request has its place; from here on `close()` gives it back.

        Of the decision only the names are kept: its arrays belong to the decision log, not to every open stream.
        """
        self.must_be_open()
        self.request = request
        self.pool = decision.pool
        self.streamed = request.stream
        self.placement = placement
        self.reservation = reservation
        self.served_by = decision.addresses[0]
        self.stage = _RESERVED
        self._flights.track(self)

    def must_be_open(self) -> None:
        """Raise AssertionError for a request that has its place already, or is over: it would never be given back."""
        if self.stage is not _OPEN:
            raise AssertionError("a request takes one place, once")

    def served(self, address: str) -> None:
        """The gateway says who answers the request, while it does."""
        self._flights.served(self, address)

    def close(self) -> None:
        """The stream ended. Safe to call again."""
        self._flights.close(self)


class Flights:
    """Every request under way, and every finished one whose access-log entry is still to come.

    Bounded by `max_open` (`full` tells) and `max_unsettled` (the oldest is given up as missing).
    """

    def __init__(
        self,
        state: FleetState,
        events: FlightEvents,
        clock: Callable[[], float],
        *,
        max_open: int,
        max_unsettled: int,
        access_log_timeout_s: float,
    ) -> None:
        self._state = state
        self._events = events
        self._clock = clock
        self.max_open = max_open
        self.max_unsettled = max_unsettled
        self.access_log_timeout_s = access_log_timeout_s
        self.opened = 0
        self.ended = 0
        self._reserved: dict[str, Flight] = {}
        self._unsettled: OrderedDict[str, Flight] = OrderedDict()
        self._settled: OrderedDict[str, Flight] = OrderedDict()

    @property
    def open_count(self) -> int:
        """Streams open now."""
        return self.opened - self.ended

    @property
    def unsettled_count(self) -> int:
        """Finished requests whose access-log entry has not come yet."""
        return len(self._unsettled)

    @property
    def full(self) -> bool:
        """No further request may be taken."""
        return self.opened - self.ended > self.max_open

    def open(self) -> Flight:
        """A stream opened."""
        self.opened += 1
        return Flight(self, self._clock(), _request_ids.next())

    def track(self, flight: Flight) -> None:
        """Make a reserved flight findable by its request id."""
        self._reserved[flight.request_id] = flight

    def close(self, flight: Flight) -> None:
        """Release what the flight holds; idempotent."""
        stage = flight.stage
        if stage is _RELEASED:
            return
        flight.stage = _RELEASED
        flight.ended_at_s = now_s = self._clock()
        self.ended += 1
        if flight.wait is not None:
            flight.wait.leave()
        if flight.charge is not None:
            flight.charge.ended()
        if flight.visit is not None:
            flight.visit.ended(now_s)
        if flight.key_hold is not None:
            flight.key_hold.ended(now_s) if stage is _RESERVED else flight.key_hold.free()
        reservation = flight.reservation
        if stage is _RESERVED and reservation is not None:
            self._state.release(reservation)
            if flight.placement is not None:
                flight.placement.ended(reservation, now_s)
            flight.request = None  # needed only for a move, and nothing moves any more
            del self._reserved[flight.request_id]
            self._events.released(flight)
            if flight.settled:
                self._let_go(flight)
                self._keep_for_late_attempts(flight)
            else:
                self._await_access_log(flight)

    def _await_access_log(self, flight: Flight) -> None:
        self._unsettled[flight.request_id] = flight
        if len(self._unsettled) > self.max_unsettled:
            self._give_up(self._unsettled.popitem(last=False)[1])

    def _keep_for_late_attempts(self, flight: Flight) -> None:
        """The two logs are separate streams: word of a failed attempt may come after the request's own entry."""
        self._settled[flight.request_id] = flight
        if len(self._settled) > _MOST_SETTLED:
            self._settled.popitem(last=False)

    def on_attempt(self, attempt: Attempt) -> bool:
        """Take one entry of the upstream log. False if the request is not known."""
        flight = self._find(attempt.request_id) or self._settled.get(attempt.request_id)
        if flight is None:
            return False
        self._count_attempts(flight, attempt.number)
        if attempt.failed is not None:
            self._charge(flight, attempt.address, attempt.failed)
            self._take_credit_back(flight, attempt.address, attempt.failed)
        elif attempt.address is not None and not flight.settled:
            self._move(flight, attempt.address)
        return True

    def _count_attempts(self, flight: Flight, attempts: int) -> None:
        """Tell of tries beyond the first once each, whichever log has word of them first."""
        if attempts > flight.attempts:
            self._events.retried(flight, attempts - flight.attempts)
            flight.attempts = attempts

    def served(self, flight: Flight, address: str) -> None:
        """Take a gateway's word for who serves a request."""
        if flight.stage is _RESERVED:
            self._move(flight, address)

    def _move(self, flight: Flight, address: str) -> None:
        """Book the request on the endpoint that really serves it."""
        slot = self._state.slot_of(address)
        reservation, placement, request = flight.reservation, flight.placement, flight.request
        flight.served_by = address
        if slot is None or reservation is None or slot == reservation.slot:
            return
        self._events.moved(flight, reservation.slot, slot)
        if placement is not None and request is not None:
            flight.reservation = placement.moved(request, reservation, slot, self._state, self._clock())

    def on_completion(self, completion: Completion) -> bool:
        """Take one entry of the access log. False if the request is not known (or was given up)."""
        flight = self._unsettled.pop(completion.request_id, None)
        if flight is not None:
            self._keep_for_late_attempts(flight)
        else:  # before the stream's end
            flight = self._reserved.get(completion.request_id)
            if flight is None or flight.settled:
                return False
        flight.settled = True
        self._count_attempts(flight, completion.attempts)
        if completion.address is not None:
            flight.served_by = completion.address
        if completion.failed is not None and not completion.client_left:
            self._charge(flight, completion.address, completion.failed)
            self._take_credit_back(flight, completion.address, completion.failed)
        self._learn(flight, completion)
        self._events.settled(flight, completion)
        self._let_go(flight)
        return True

    @staticmethod
    def _let_go(flight: Flight) -> None:
        """Once it is over and told of, it must not keep a pool alive that may be gone by then, nor what that holds."""
        if flight.stage is _RELEASED:
            if flight.placement is not None and flight.reservation is not None:
                flight.placement.settled(flight.reservation)
            flight.placement = None

    def _learn(self, flight: Flight, completion: Completion) -> None:
        """What the pool can learn of one answer. Only a streamed one tells when its first token came."""
        reservation, placement, usage = flight.reservation, flight.placement, completion.usage
        if reservation is None or placement is None or completion.failed is not None:
            return
        if self._state.generation.item(reservation.slot) != reservation.generation:
            return  # the slot is another endpoint's by now
        if flight.streamed and completion.ttft_s is not None and completion.status == _OK:
            placement.ledger.timed(reservation, completion.ttft_s)
        if usage is not None and usage.completion_tokens:
            placement.ledger.answered(usage.completion_tokens)
            if completion.upstream_s is not None and completion.status == _OK:
                ttft_s = completion.ttft_s if flight.streamed else None
                placement.ledger.decoded(reservation, usage.completion_tokens, completion.upstream_s, ttft_s)
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            # in the tokens that we count in: a share is right though our count of the prompt is not
            found = usage.cached_tokens / usage.prompt_tokens * reservation.prompt_tokens
            placement.calibration.answered(reservation.slot, reservation.promise, found)

    def _take_credit_back(self, flight: Flight, address: str | None, why: str) -> None:
        """A prompt that an endpoint did not take is not in its cache. One that fell silent may have computed it."""
        reservation, placement = flight.reservation, flight.placement
        if reservation is None or placement is None or address is None or why in TIMED_OUT:
            return
        if self._state.slot_of(address) == reservation.slot:
            placement.failed(reservation)

    def _charge(self, flight: Flight, address: str | None, why: str) -> None:
        """Hold a failure against an endpoint, once per request: both logs tell of the last attempt."""
        if address is not None and address not in flight.charged:
            flight.charged += (address,)
            self._events.failed(flight, address, why)

    def expire(self) -> None:
        """Give up on access-log entries that are overdue."""
        overdue = self._clock() - self.access_log_timeout_s
        while self._unsettled:
            flight = next(iter(self._unsettled.values()))
            if flight.ended_at_s > overdue:
                return
            del self._unsettled[flight.request_id]
            self._give_up(flight)

    def _give_up(self, flight: Flight) -> None:
        self._events.missing(flight)
        self._let_go(flight)

    def _find(self, request_id: str) -> Flight | None:
        return self._reserved.get(request_id) or self._unsettled.get(request_id)
