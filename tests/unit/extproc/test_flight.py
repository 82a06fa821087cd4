"""Flights: everything taken is given back exactly once, whatever comes in whatever order."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.flight import Attempt, Completion, Flight, Flights, Stage, Usage
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.rotation import RoundRobin, WeightedRoundRobin
from policies.types import Decision, InferenceRequest, Kind

ADDRESSES = tuple(f"10.0.0.{number}:8000" for number in range(4))
ELSEWHERE = "10.9.9.9:8000"


class Events:
    """FlightEvents as lists."""

    def __init__(self) -> None:
        self.moves: list[tuple[Flight, int, int]] = []
        self.retries = 0
        self.failures: list[tuple[Flight, str, str]] = []
        self.ends: list[tuple[Flight, Completion]] = []
        self.gaps: list[Flight] = []

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Served elsewhere."""
        self.moves.append((flight, from_slot, to_slot))

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Charged."""
        self.failures.append((flight, address, why))

    def settled(self, flight: Flight, completion: Completion) -> None:
        """Its entry came."""
        self.ends.append((flight, completion))

    def retried(self, flight: Flight, count: int) -> None:  # noqa: ARG002 - FlightEvents
        """Tried again."""
        self.retries += count

    def released(self, flight: Flight) -> None:
        """Its place is free."""

    def missing(self, flight: Flight) -> None:
        """Its entry did not come."""
        self.gaps.append(flight)


class House:
    """A fleet of four, a pool over it, and the flights."""

    def __init__(self, *, max_open: int = 100, max_unsettled: int = 100) -> None:
        self.now_s = 0.0
        self.state = FleetState(initial_slots=2)
        self.events = Events()
        self.placement = Placement("p", RoundRobin(), PrefixIndex(10_000))
        self.flights = Flights(
            self.state,
            self.events,
            lambda: self.now_s,
            max_open=max_open,
            max_unsettled=max_unsettled,
            access_log_timeout_s=10,
        )
        for address in ADDRESSES:
            self.add(address)

    def add(self, address: str) -> None:
        """Make `address` ready."""
        slot = self.state.add(address)
        self.state.state[slot] = State.READY
        self.state.routable[slot] = True
        self.state.set_models(slot, frozenset({"m"}))
        self.placement.set_members(self.state)

    def reserve(self, flight: Flight, tokens: int = 100) -> None:
        """As the pipeline does."""
        hashes = [1, 2 + tokens % 3]  # some prompts share all, some just their beginning
        request = InferenceRequest(Kind.CHAT, "m", "m", tokens, block_hashes=hashes, block_tokens=[40, 40])
        decision = self.placement.choose(request, self.state, self.now_s, Random(1))
        assert isinstance(decision, Decision)
        reservation = self.placement.commit(decision, request, self.state, self.now_s)
        flight.reserve(request, decision, self.placement, reservation)

    def start(self, tokens: int = 100) -> Flight:
        """A request that has its place."""
        flight = self.flights.open()
        self.reserve(flight, tokens)
        return flight

    def load(self) -> list[int]:
        """Requests in flight by address."""
        return [int(self.state.in_flight[slot]) for slot in (self.state.slot_of(a) for a in ADDRESSES)]

    def booked_nowhere(self) -> bool:
        """Nothing is out: not by the fleet's counts, nor by the ledger's, nor pinned in the index."""
        state, ledger = self.state, self.placement.ledger
        counts = (
            state.in_flight, state.in_flight_prompt_tokens, state.in_flight_uncached_tokens,
            ledger.pending, ledger.pending_tokens, ledger.pending_work,
        )  # fmt: skip
        shelves = self.placement.index._shelves.values()
        pinned = [{block: held.users for block, held in shelf.blocks.items() if held.users} for shelf in shelves]
        return not any(any(count) for count in counts) and not any(pinned)


def completion_of(
    flight: Flight, address: str | None = None, failed: str | None = None, status: int = 200
) -> Completion:
    """An access-log entry."""
    return Completion(
        request_id=flight.request_id,
        address=address,
        status=status,
        flags=(),
        details="via_upstream",
        attempts=1,
        failed=failed,
        duration_s=1.0,
        ttft_s=0.1,
        request_bytes=1,
        response_bytes=2,
        usage=Usage(1, 2, None),
    )


def other_than(flight: Flight) -> str:
    """An endpoint the flight was not sent to."""
    return next(address for address in ADDRESSES if address != flight.served_by)


@pytest.fixture
def house() -> House:
    """Four ready endpoints."""
    return House()


# -- the life of one


@pytest.mark.parametrize("told", ["by the upstream log", "by the access log"])
@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_that_its_endpoint_did_not_take_is_credited_nowhere(told: str, late: bool) -> None:  # noqa: FBT001
    """Whichever log tells of it; the last attempt's entries come after the stream's end as a rule."""
    house = House()
    flight = house.start()
    address = flight.served_by
    if late:
        flight.close()
    if told == "by the access log":
        house.flights.on_completion(completion_of(flight, address, failed="status_503", status=503))
    else:
        house.flights.on_attempt(Attempt(flight.request_id, address, "status_503"))
    flight.close()
    assert len(house.placement.index) == 0
    assert house.booked_nowhere()


def test_a_prompt_stays_credited_where_its_endpoint_fell_silent() -> None:
    """It may have computed it, and been cut off while it wrote."""
    house = House()
    flight = house.start()
    flight.close()
    address = flight.served_by
    house.flights.on_completion(completion_of(flight, address, failed="upstream_request_timeout", status=504))
    slot = house.state.slot_of(str(address))
    assert house.placement.index.match([1, 3], [40, 40], np.array([slot])).tolist() == [80]
    assert house.booked_nowhere()


def test_a_request_id_is_random_hex_of_one_length(house: House) -> None:
    """24 digits, known from the start and never twice."""
    ids = {house.flights.open().request_id for _ in range(200)}
    assert len(ids) == 200
    assert all(re.fullmatch(r"[0-9a-f]{24}", request_id) for request_id in ids)


def test_an_unrouted_stream_holds_nothing(house: House) -> None:
    """Opened and closed: counted, and no entry is awaited for it."""
    flight = house.flights.open()
    assert (house.flights.open_count, flight.stage) == (1, Stage.OPEN)
    flight.close()
    assert (house.flights.open_count, flight.stage) == (0, Stage.RELEASED)
    assert house.flights.unsettled_count == 0
    assert not house.flights.on_completion(completion_of(flight))


def test_a_reservation_lasts_as_long_as_the_stream(house: House) -> None:
    """Booked when reserved, given back at the end, and only then awaiting its entry."""
    flight = house.start(tokens=100)
    assert sorted(house.load()) == [0, 0, 0, 1]
    assert house.state.in_flight_prompt_tokens.sum() == 100
    assert house.flights.unsettled_count == 0
    flight.close()
    assert house.booked_nowhere()
    assert house.flights.unsettled_count == 1


def test_closing_again_gives_nothing_back(house: House) -> None:
    """`close` is safe to call any number of times."""
    flight, other = house.start(), house.start()
    for _ in range(3):
        flight.close()
    assert sum(house.load()) == 1
    assert house.flights.ended == 1
    other.close()
    assert house.booked_nowhere()


def test_served_by_is_the_first_choice_until_told_otherwise(house: House) -> None:
    """The decision's first address, then what Envoy says."""
    flight = house.start()
    assert flight.reservation is not None
    assert flight.served_by == house.state.addresses[flight.reservation.slot]
    elsewhere = other_than(flight)
    house.flights.on_attempt(Attempt(flight.request_id, elsewhere, None))
    assert flight.served_by == elsewhere


# -- the upstream log


def test_a_failover_moves_the_booking(house: House) -> None:
    """The endpoint really serving carries the request, the first one no more; the end releases the new one."""
    flight = house.start()
    assert flight.reservation is not None
    first, elsewhere = flight.reservation.slot, other_than(flight)
    slot = house.state.slot_of(elsewhere)
    assert house.flights.on_attempt(Attempt(flight.request_id, elsewhere, None))
    assert house.state.in_flight[first] == 0
    assert house.state.in_flight[slot] == 1
    assert house.events.moves == [(flight, first, slot)]
    flight.close()
    assert house.booked_nowhere()


def test_how_many_answers_are_made_side_by_side_is_known_wherever_they_are(house: House) -> None:
    """Where it was sent, and where it was moved: their pace is learned there."""
    flight = house.flights.open()
    request = InferenceRequest(Kind.CHAT, "m", "m", 100, choices=4)
    decision = house.placement.choose(request, house.state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    flight.reserve(request, decision, house.placement, house.placement.commit(decision, request, house.state, 0.0))
    seen = [flight.reservation]
    house.flights.on_attempt(Attempt(flight.request_id, other_than(flight), None))
    seen.append(flight.reservation)
    assert [reservation.side_by_side for reservation in seen if reservation] == [4, 4]


def test_an_attempt_where_it_was_sent_changes_nothing(house: House) -> None:
    """Every request has one; it is joined and no move."""
    flight = house.start()
    before = house.load()
    assert house.flights.on_attempt(Attempt(flight.request_id, flight.served_by, None))
    assert house.load() == before
    assert house.events.moves == []


def test_a_failed_attempt_charges_the_endpoint_and_leaves_the_booking(house: House) -> None:
    """The next attempt's entry moves it; until then the request is where we put it."""
    flight = house.start()
    address = flight.served_by
    before = house.load()
    assert house.flights.on_attempt(Attempt(flight.request_id, address, "status_503"))
    assert house.events.failures == [(flight, address, "status_503")]
    assert house.load() == before


@pytest.mark.parametrize(
    ("numbers", "attempts", "retries"),
    [((), 1, 0), ((), 3, 2), ((2,), 2, 1), ((1, 2, 2), 2, 1), ((3, 2), 3, 2), ((2,), 0, 1)],
    ids=["none", "by the access log alone", "told by both", "told twice", "out of order", "none counted at the end"],
)
def test_a_retry_is_told_of_once(house: House, numbers: tuple[int, ...], attempts: int, retries: int) -> None:
    """By whichever log has word of it first, while the request runs or afterwards."""
    flight = house.start()
    for number in numbers:
        house.flights.on_attempt(Attempt(flight.request_id, other_than(flight), "x", number))
    assert house.events.retries == max([number - 1 for number in numbers], default=0)
    house.flights.on_completion(replace(completion_of(flight), attempts=attempts))
    assert house.events.retries == retries
    flight.close()
    house.flights.on_attempt(Attempt(flight.request_id, other_than(flight), None, attempts))
    assert house.events.retries == retries


def test_both_logs_of_one_failure_charge_once(house: House) -> None:
    """The upstream log and the access log tell of the same last attempt."""
    flight = house.start()
    house.flights.on_attempt(Attempt(flight.request_id, ADDRESSES[0], "upstream_connection_failure"))
    house.flights.on_completion(completion_of(flight, ADDRESSES[0], "upstream_connection_failure", 503))
    assert [(address, why) for _, address, why in house.events.failures] == [
        (ADDRESSES[0], "upstream_connection_failure")
    ]


def test_two_endpoints_that_failed_one_request_are_both_charged(house: House) -> None:
    """First choice dead, fallback dead too."""
    flight = house.start()
    house.flights.on_attempt(Attempt(flight.request_id, ADDRESSES[0], "upstream_connection_failure"))
    house.flights.on_completion(completion_of(flight, ADDRESSES[1], "status_500", 500))
    assert [address for _, address, _ in house.events.failures] == [ADDRESSES[0], ADDRESSES[1]]


def test_a_failure_without_an_address_is_nobodys(house: House) -> None:
    """Envoy did not say where, so nobody is charged, but the entry is joined."""
    flight = house.start()
    assert house.flights.on_attempt(Attempt(flight.request_id, None, "upstream_overflow"))
    assert house.events.failures == []


def test_an_attempt_at_a_stranger_books_nothing(house: House) -> None:
    """An address that is no endpoint of ours is noted as who served, and the counts stay."""
    flight = house.start()
    before = house.load()
    assert house.flights.on_attempt(Attempt(flight.request_id, ELSEWHERE, None))
    assert flight.served_by == ELSEWHERE
    assert house.load() == before
    flight.close()
    assert house.booked_nowhere()


def test_an_attempt_told_after_the_end_moves_no_booking(house: House) -> None:
    """A short failed-over request can end before its upstream log comes: who served is noted, nothing is booked."""
    flight = house.start()
    elsewhere = other_than(flight)
    flight.close()
    assert house.flights.on_attempt(Attempt(flight.request_id, elsewhere, None))
    assert flight.served_by == elsewhere
    assert len(house.events.moves) == 1
    assert house.booked_nowhere()


@pytest.mark.parametrize("entry_first", [True, False])
def test_word_of_a_failed_attempt_may_come_after_the_requests_own_entry(house: House, *, entry_first: bool) -> None:
    """The two logs are two streams: the dead endpoint is still charged, and who served stays."""
    flight = house.start()
    served = flight.served_by
    if entry_first:
        house.flights.on_completion(completion_of(flight, served))
    flight.close()
    house.flights.on_completion(completion_of(flight, served))
    elsewhere = next(address for address in ADDRESSES if address != served)
    assert house.flights.on_attempt(Attempt(flight.request_id, elsewhere, "upstream_connection_failure"))
    assert house.flights.on_attempt(Attempt(flight.request_id, elsewhere, None))
    assert [address for _, address, _ in house.events.failures] == [elsewhere]
    assert (flight.served_by, house.events.moves) == (served, [])
    assert house.booked_nowhere()


def test_settled_requests_are_kept_in_bounded_number(house: House) -> None:
    """Late attempts of the newest are joined, those of long ago are unknown."""
    flights = [house.start() for _ in range(1_500)]
    for flight in flights:
        flight.close()
        house.flights.on_completion(completion_of(flight))
    assert not house.flights.on_attempt(Attempt(flights[0].request_id, ADDRESSES[0], "x"))
    assert house.flights.on_attempt(Attempt(flights[-1].request_id, ADDRESSES[0], "x"))
    assert len(house.flights._settled) == 1_000


def test_entries_of_unknown_requests_are_not_joined(house: House) -> None:
    """Another process's, a refused one's, or one from before our restart."""
    stranger = House().start()
    assert not house.flights.on_attempt(Attempt(stranger.request_id, ADDRESSES[0], "status_500"))
    assert not house.flights.on_completion(completion_of(stranger))
    assert not house.flights.on_attempt(Attempt("", ADDRESSES[0], None))
    assert (house.events.failures, house.events.ends) == ([], [])


# -- the access log


@pytest.mark.parametrize("entry_first", [True, False])
def test_the_entry_may_come_before_or_after_the_end(house: House, *, entry_first: bool) -> None:
    """Either way the request settles once and holds nothing afterwards."""
    flight = house.start()
    entry = completion_of(flight, flight.served_by)
    if not entry_first:
        flight.close()
    assert house.flights.on_completion(entry)
    if entry_first:
        assert sum(house.load()) == 1
        flight.close()
    assert house.events.ends == [(flight, entry)]
    assert house.booked_nowhere()
    assert house.flights.unsettled_count == 0
    assert house.events.gaps == []


def test_a_second_entry_is_not_joined(house: House) -> None:
    """Before the end and after it."""
    flight = house.start()
    assert house.flights.on_completion(completion_of(flight))
    assert not house.flights.on_completion(completion_of(flight))
    flight.close()
    assert not house.flights.on_completion(completion_of(flight))
    assert len(house.events.ends) == 1


def test_the_entry_says_who_served(house: House) -> None:
    """The log's word is the last one; without an address the known one stays."""
    flight, quiet = house.start(), house.start()
    elsewhere = other_than(flight)
    house.flights.on_completion(completion_of(flight, elsewhere))
    assert flight.served_by == elsewhere
    before = quiet.served_by
    house.flights.on_completion(completion_of(quiet, None))
    assert quiet.served_by == before


@pytest.mark.parametrize(
    ("streamed", "changed", "learns"),
    [
        (True, {}, 1.0),
        (False, {}, 0.5),
        (True, {"failed": "upstream_remote_reset"}, 0.0),
        (True, {"status": 400}, 0.0),
        (True, {"usage": None}, 0.0),
        (True, {"upstream_s": None}, 0.0),
    ],
    ids=["streamed", "whole", "failed", "refused", "no usage", "not measured"],
)
def test_an_answers_pace_is_learned_from_its_entry(
    house: House, changed: dict[str, object], learns: float, *, streamed: bool
) -> None:
    """100 tokens in 10 s are slower than the profile's 50 a second: a step down for a stream, half for a whole."""
    ledger, flight = house.placement.ledger, house.start()
    flight.streamed = streamed
    told = replace(completion_of(flight), upstream_s=10.0, usage=Usage(1, 101, None))
    house.flights.on_completion(replace(told, **changed))
    assert math.log(ledger.decode_rate / 50.0) == pytest.approx(-0.18 * learns)


def test_overdue_entries_are_given_up(house: House) -> None:
    """At the timeout and not before; what comes later is unknown."""
    first = house.start()
    first.close()
    house.now_s = 4
    second = house.start()
    second.close()
    house.now_s = 9.9
    house.flights.expire()
    assert house.events.gaps == []
    house.now_s = 10
    house.flights.expire()
    assert house.events.gaps == [first]
    assert not house.flights.on_completion(completion_of(first))
    assert house.flights.on_completion(completion_of(second))
    assert house.flights.unsettled_count == 0


def test_a_running_request_is_never_overdue(house: House) -> None:
    """However long the answer takes: the wait begins at its end."""
    flight = house.start()
    house.now_s = 1e6
    house.flights.expire()
    assert (house.events.gaps, sum(house.load())) == ([], 1)
    flight.close()
    house.flights.expire()
    assert house.events.gaps == []


def test_the_oldest_waiting_request_makes_room() -> None:
    """At the bound the oldest is given up as missing, the newest is kept."""
    house = House(max_unsettled=2)
    flights = [house.start() for _ in range(3)]
    for flight in flights:
        flight.close()
    assert house.events.gaps == [flights[0]]
    assert house.flights.unsettled_count == 2
    assert [house.flights.on_completion(completion_of(flight)) for flight in flights] == [False, True, True]


def test_full_means_more_streams_than_allowed() -> None:
    """The stream that asks is itself open, so as many as the bound may be served."""
    house = House(max_open=2)
    first = house.flights.open()
    house.flights.open()
    assert not house.flights.full
    house.flights.open()
    assert house.flights.full
    first.close()
    assert not house.flights.full


# -- any order of anything


class FlightMachine(RuleBasedStateMachine):
    """Streams, both logs and time, in any order, with duplicates and stragglers."""

    max_unsettled = 3

    def __init__(self) -> None:
        super().__init__()
        self.house = House(max_unsettled=self.max_unsettled)
        self.all: list[Flight] = []
        self.open: list[Flight] = []
        self.place: dict[str, str] = {}  # request id -> address that carries it now
        self.tokens: dict[str, int] = {}
        self.settled: set[str] = set()
        self.waiting: list[str] = []  # ended, not settled, in order of their end

    def _any(self, data: st.DataObject) -> Flight:
        return data.draw(st.sampled_from(self.all))

    @rule()
    def stream_opens(self) -> None:
        """A new request."""
        flight = self.house.flights.open()
        self.all.append(flight)
        self.open.append(flight)

    @precondition(lambda self: any(flight.stage is Stage.OPEN for flight in self.open))
    @rule(data=st.data(), tokens=st.integers(1, 500))
    def is_placed(self, data: st.DataObject, tokens: int) -> None:
        """The decision falls."""
        flight = data.draw(st.sampled_from([flight for flight in self.open if flight.stage is Stage.OPEN]))
        self.house.reserve(flight, tokens)
        assert flight.served_by is not None
        self.place[flight.request_id] = flight.served_by
        self.tokens[flight.request_id] = tokens

    @precondition(lambda self: self.all)
    @rule(data=st.data(), address=st.sampled_from([*ADDRESSES, ELSEWHERE, None]), failed=st.sampled_from([None, "x"]))
    def attempt_is_told(self, data: st.DataObject, address: str | None, failed: str | None) -> None:
        """The upstream log, perhaps late, perhaps twice, perhaps of a stranger."""
        flight = self._any(data)
        known = self.house.flights.on_attempt(Attempt(flight.request_id, address, failed))
        request_id = flight.request_id
        assert known is (request_id in self.place or request_id in self.waiting or request_id in self.settled)
        if failed is None and address in ADDRESSES and request_id in self.place and request_id not in self.settled:
            self.place[request_id] = address

    @precondition(lambda self: self.all)
    @rule(data=st.data(), address=st.sampled_from([*ADDRESSES, ELSEWHERE, None]), failed=st.sampled_from([None, "x"]))
    def completion_is_told(self, data: st.DataObject, address: str | None, failed: str | None) -> None:
        """The access log, perhaps early, late or twice."""
        flight = self._any(data)
        request_id = flight.request_id
        expected = request_id not in self.settled and (request_id in self.place or request_id in self.waiting)
        assert self.house.flights.on_completion(completion_of(flight, address, failed)) is expected
        if expected:
            self.settled.add(request_id)
            if request_id in self.waiting:
                self.waiting.remove(request_id)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        """The first time or again."""
        flight = self._any(data)
        flight.close()
        if flight not in self.open:
            return
        self.open.remove(flight)
        if self.place.pop(flight.request_id, None) and flight.request_id not in self.settled:
            self.waiting.append(flight.request_id)
            self.waiting = self.waiting[-self.max_unsettled :]

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        """And the overdue are looked at."""
        self.house.now_s += seconds
        self.house.flights.expire()
        ended = {flight.request_id: flight.ended_at_s for flight in self.all}
        self.waiting = [one for one in self.waiting if ended[one] > self.house.now_s - 10]

    @precondition(lambda self: len(self.place) < 2)
    @rule(data=st.data())
    def endpoint_is_replaced(self, data: st.DataObject) -> None:
        """An idle endpoint's slot goes round; a busy one's does not."""
        address = data.draw(st.sampled_from(ADDRESSES))
        slot = self.house.state.slot_of(address)
        assert slot is not None
        assert self.house.state.remove(slot) is (address not in self.place.values())
        self.house.add(address)

    @rule(address=st.sampled_from(ADDRESSES), moves=st.booleans())
    def member_leaves_and_returns(self, address: str, moves: bool) -> None:  # noqa: FBT001 - drawn
        """The pool loses one and gets it back, perhaps with requests on it; perhaps one moves there in between."""
        placement, slot = self.house.placement, self.house.state.slot_of(address)
        placement.set_members(member for member in self.house.state if member != slot)
        running = [one for one in self.place if one not in self.settled]
        if moves and running:
            self.house.flights.on_attempt(Attempt(running[0], address, None))
            self.place[running[0]] = address
        placement.set_members(self.house.state)

    @rule(address=st.sampled_from(ADDRESSES))
    def engine_restarts(self, address: str) -> None:
        """Its cache is empty; requests on it may go on all the same, by the gateway's word."""
        slot = self.house.state.slot_of(address)
        assert slot is not None
        self.house.placement.index.forget(slot)

    @rule(policy=st.sampled_from([RoundRobin, WeightedRoundRobin]), filters=st.sampled_from([(), ("context",)]))
    def config_is_reloaded(self, policy: type[RoundRobin | WeightedRoundRobin], filters: tuple[str, ...]) -> None:
        """Another policy from now on, over what is already out."""
        self.house.placement.use(policy(), filters=filters)

    @invariant()
    def counts_are_exact(self) -> None:
        """Every endpoint carries exactly the requests that are on it now."""
        state = self.house.state
        for address in ADDRESSES:
            slot = state.slot_of(address)
            here = [request_id for request_id, place in self.place.items() if place == address]
            assert state.in_flight[slot] == len(here)
            assert state.in_flight_prompt_tokens[slot] == sum(self.tokens[one] for one in here)
            assert 0 <= state.in_flight_uncached_tokens[slot] <= state.in_flight_prompt_tokens[slot]
        assert self.house.flights.open_count == len(self.open)

    @invariant()
    def the_ledger_and_the_index_know_no_more_requests_than_there_are(self) -> None:
        """Fewer perhaps: of who left the pool or restarted they forget."""
        state, placement = self.house.state, self.house.placement
        for slot in state:
            assert 0 <= placement.ledger.pending[slot] <= state.in_flight[slot]
            shelf = placement.index._shelves.get(slot)
            for users in [held.users for held in shelf.blocks.values() if held.users] if shelf else ():
                assert 0 < users <= state.in_flight[slot]

    @invariant()
    def uncached_counts_are_those_of_the_reservations(self) -> None:
        """The sum over endpoints is the sum over running requests."""
        running = [flight.reservation for flight in self.all if flight.request_id in self.place]
        uncached = sum(reservation.uncached_tokens for reservation in running if reservation is not None)
        assert self.house.state.in_flight_uncached_tokens.sum() == uncached

    @invariant()
    def every_end_is_told_once(self) -> None:
        """A request settles or goes missing, at most one of the two and at most once."""
        events = self.house.events
        told = [flight.request_id for flight, _ in events.ends] + [flight.request_id for flight in events.gaps]
        assert len(told) == len(set(told))
        assert {flight.request_id for flight, _ in events.ends} == self.settled

    @invariant()
    def failures_are_charged_once(self) -> None:
        """Once per request and endpoint."""
        charged = [(flight.request_id, address) for flight, address, _ in self.house.events.failures]
        assert len(charged) == len(set(charged))

    @invariant()
    def what_waits_is_bounded(self) -> None:
        """Exactly the ended requests without an entry, never more than allowed."""
        assert self.house.flights.unsettled_count == len(self.waiting) <= self.max_unsettled

    def teardown(self) -> None:
        """When every stream has ended nothing is out, and in time nothing waits."""
        for flight in self.all:
            flight.close()
        assert self.house.booked_nowhere()
        assert self.house.flights.open_count == 0
        self.house.now_s += 100
        self.house.flights.expire()
        assert self.house.flights.unsettled_count == 0
        assert not self.house.flights._reserved


TestFlights = FlightMachine.TestCase
TestFlights.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
