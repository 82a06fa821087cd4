"""The access-log service: entries joined to flights, and that nothing one of them does harms the others."""

from __future__ import annotations

import asyncio

import grpc.aio
import numpy as np
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2

from extproc.flight import Completion, Flight, Flights
from extproc.wire.access_log import AccessLog
from policies.fleet_state import FleetState
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.rotation import RoundRobin
from policies.types import Choice, Decision, InferenceRequest, Kind, Ranking

DOWNSTREAM_END, POOL_READY = 6, 7


class Counted:
    """AccessLogEvents and FlightEvents as lists."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.malformed_services: list[str] = []
        self.lost_addresses = 0
        self.envoy_answers: list[int] = []
        self.ends: list[Completion] = []
        self.fault: Exception | None = None

    def entry(self, *, kind: str, result: str) -> None:
        """One came."""
        self.entries.append((kind, result))

    def malformed(self, service: str) -> None:
        """Garbage came."""
        self.malformed_services.append(service)

    def answered_by_envoy(self, status: int) -> None:
        """Envoy's own answer."""
        self.envoy_answers.append(status)

    def no_known_address(self) -> None:
        """Envoy knew none."""
        self.lost_addresses += 1

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Not looked at here."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Not looked at here."""

    def settled(self, flight: Flight, completion: Completion) -> None:  # noqa: ARG002 - FlightEvents
        """A fault to order, else noted."""
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.ends.append(completion)

    def retried(self, flight: Flight, count: int) -> None:
        """Not looked at."""

    def released(self, flight: Flight) -> None:
        """Its place is free."""

    def missing(self, flight: Flight) -> None:
        """Not looked at here."""


class House:
    """One endpoint, flights on it, and the service."""

    def __init__(self) -> None:
        self.events = Counted()
        self.state = FleetState()
        self.slot = self.state.add("10.0.0.1:8000")
        self.flights = Flights(
            self.state, self.events, lambda: 0.0, max_open=9, max_unsettled=9, access_log_timeout_s=1
        )
        self.log = AccessLog(self.flights, self.events)

    def start(self) -> Flight:
        """A request under way."""
        flight = self.flights.open()
        request = InferenceRequest(Kind.CHAT, "m", "m", 10)
        one = np.zeros(1)
        ranking = Ranking([self.slot], np.array([self.slot], np.intp), 0, 0.0, lambda: (one, {}))
        decision = Decision(
            "p", "t", Choice.LOAD, (self.slot,), ("10.0.0.1:8000",), one, 0, ranking, (), self.state.addresses
        )
        placement = Placement("p", RoundRobin(), PrefixIndex(100))
        flight.reserve(
            request, decision, placement, self.state.reserve(self.slot, prompt_tokens=10, uncached_tokens=10)
        )
        return flight


def entry(kind: int, request_id: str, *, address: bool = True, **flags: bool) -> accesslog_pb2.HTTPAccessLogEntry:
    """One entry as Envoy writes it."""
    made = accesslog_pb2.HTTPAccessLogEntry()
    made.common_properties.access_log_type = kind
    made.common_properties.metadata.filter_metadata["pointsman"].update({"request_id": request_id})
    made.response.response_code.value = 200
    if address:
        socket = made.common_properties.upstream_remote_address.socket_address
        socket.address, socket.port_value = "10.0.0.1", 8000
    for name, value in flags.items():
        setattr(made.common_properties.response_flags, name, value)
    return made


def message(*entries: accesslog_pb2.HTTPAccessLogEntry) -> bytes:
    """One message of the stream."""
    made = als_pb2.StreamAccessLogsMessage()
    made.http_logs.log_entry.extend(entries)
    return made.SerializeToString()


def test_an_entry_of_ours_is_joined() -> None:
    """It settles the flight."""
    house = House()
    flight = house.start()
    house.log.receive(message(entry(DOWNSTREAM_END, flight.request_id)))
    assert house.events.entries == [("request", "joined")]
    assert [one.request_id for one in house.events.ends] == [flight.request_id]
    assert flight.settled


def test_an_attempt_of_ours_is_joined() -> None:
    """The upstream log, counted by its own kind."""
    house = House()
    flight = house.start()
    house.log.receive(message(entry(POOL_READY, flight.request_id)))
    assert house.events.entries == [("attempt", "joined")]


def test_a_routed_request_of_another_process_is_unknown() -> None:
    """Another replica's, or one from before our restart."""
    house = House()
    house.log.receive(message(entry(DOWNSTREAM_END, "f" * 24), entry(POOL_READY, "f" * 24)))
    assert house.events.entries == [("request", "unknown"), ("attempt", "unknown")]


@pytest.mark.parametrize(
    ("details", "status", "answers"),
    [("pointsman_unknown_model", 404, []), ("direct_response", 503, [503]), ("downstream_remote_disconnect", 0, [])],
    ids=["answered by us", "answered by Envoy", "cut off"],
)
def test_a_request_that_went_nowhere_is_unrouted(details: str, status: int, answers: list[int]) -> None:
    """Nothing is missing; only what Envoy answered without us is counted by its status."""
    house = House()
    ended = entry(DOWNSTREAM_END, "f" * 24, address=False)
    ended.response.response_code.value = status
    ended.response.response_code_details = details
    house.log.receive(message(ended))
    assert house.events.entries == [("request", "unrouted")]
    assert house.events.envoy_answers == answers


def test_a_second_entry_of_a_request_is_not_joined_again() -> None:
    """Settled once."""
    house = House()
    flight = house.start()
    house.log.receive(message(*[entry(DOWNSTREAM_END, flight.request_id)] * 2))
    assert house.events.entries == [("request", "joined"), ("request", "unknown")]
    assert len(house.events.ends) == 1


def test_a_pick_that_envoy_did_not_know_is_counted() -> None:
    """The 503 of a strict pin has its own counter, beside being joined."""
    house = House()
    flight = house.start()
    house.log.receive(message(entry(DOWNSTREAM_END, flight.request_id, address=False, no_healthy_upstream=True)))
    assert house.events.lost_addresses == 1
    assert house.events.entries == [("request", "joined")]


def test_a_fault_over_one_entry_leaves_the_others() -> None:
    """It is counted as an error, the next entry is joined."""
    house = House()
    first, second = house.start(), house.start()
    house.events.fault = RuntimeError("ours")
    house.log.receive(message(entry(DOWNSTREAM_END, first.request_id), entry(DOWNSTREAM_END, second.request_id)))
    assert house.events.entries == [("request", "error"), ("request", "joined")]
    assert [one.request_id for one in house.events.ends] == [second.request_id]


def test_garbage_is_counted_and_survived() -> None:
    """The stream goes on."""
    house = House()
    flight = house.start()
    house.log.receive(b"\xff\xff")
    house.log.receive(message(entry(DOWNSTREAM_END, flight.request_id)))
    assert house.events.malformed_services == ["access_log"]
    assert len(house.events.ends) == 1


def test_a_figure_nobody_can_mean_is_counted_and_the_entry_taken() -> None:
    """The rest of it is as good as any."""
    house = House()
    flight = house.start()
    flight.close()
    odd = entry(DOWNSTREAM_END, flight.request_id)
    odd.common_properties.custom_tags["ttft_us"] = "9" * 30
    house.log.receive(message(odd))
    assert house.events.entries == [("request", "joined")]
    assert house.events.malformed_services == ["access_log"]


def test_an_entry_that_cannot_be_read_leaves_the_others() -> None:
    """It is counted as malformed, the next one is joined."""
    house = House()
    flight = house.start()
    odd = entry(DOWNSTREAM_END, flight.request_id)
    odd.common_properties.metadata.typed_filter_metadata["pointsman.usage"].value = b"\xff\xff"
    house.log.receive(message(odd, entry(DOWNSTREAM_END, flight.request_id)))
    assert house.events.malformed_services == ["access_log"]
    assert house.events.entries == [("request", "joined")]


class Context:
    """grpcio's side."""

    def __init__(self, *messages: object) -> None:
        self.incoming = list(messages)

    async def read(self) -> object:
        """The next message; an exception in the list is raised."""
        message = self.incoming.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message


async def test_a_stream_is_read_to_its_end() -> None:
    """Several messages; the answer is empty, as the protocol has it."""
    house = House()
    flight = house.start()
    raw = message(entry(DOWNSTREAM_END, flight.request_id))
    assert await house.log.stream(None, Context(b"", raw, grpc.aio.EOF)) == b""
    assert len(house.events.ends) == 1


async def test_an_envoy_that_goes_away_is_no_error() -> None:
    """What it sent before is kept."""
    house = House()
    flight = house.start()
    raw = message(entry(DOWNSTREAM_END, flight.request_id))
    assert await house.log.stream(None, Context(raw, asyncio.CancelledError())) == b""
    assert len(house.events.ends) == 1


def test_what_belongs_to_no_flight_is_passed_on_once() -> None:
    """To the request log; not what is joined, and not answers of ours, which it has been told of."""
    house = House()
    strays: list[str] = []
    house.log = AccessLog(house.flights, house.events, lambda completion: strays.append(completion.request_id))
    flight = house.start()
    own = entry(accesslog_pb2.DownstreamEnd, "own", address=False)
    own.response.response_code_details = "pointsman_unknown_path"
    kind = accesslog_pb2.DownstreamEnd
    house.log.receive(message(entry(kind, flight.request_id), own, entry(kind, "before us")))
    house.log.receive(message(entry(kind, "by envoy", address=False)))
    assert strays == ["before us", "by envoy"]
