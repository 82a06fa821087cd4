"""Callers that stream bodies through us: any cut of any body. What else they get stands in tests/conformance."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import given
from hypothesis import strategies as st

from extproc.flight import Flight, Flights
from extproc.reply import Answer, Pending, Reply, Route
from extproc.wire.messages import MOST_CHUNK_BYTES, Phase
from extproc.wire.processor import Exchange
from policies.fleet_state import FleetState

MODE = processing_mode_pb2.ProcessingMode


class Nobody:
    """Every kind of events, unheard."""

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Ignored."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Ignored."""

    def settled(self, flight: Flight, completion: object) -> None:
        """Ignored."""

    def retried(self, flight: Flight, count: int) -> None:
        """Not looked at."""

    def released(self, flight: Flight) -> None:
        """Its place is free."""

    def missing(self, flight: Flight) -> None:
        """Ignored."""

    def message(self, phase: Phase) -> None:
        """Ignored."""

    def refused_with(self, reason: str, status: int) -> None:
        """Ignored."""

    def malformed(self, service: str) -> None:
        """Ignored."""


class Gateway:
    """A gateway that streams, its exchange, and a decider that routes to two addresses."""

    largest_body_bytes = 500_000
    hold_s = 0.0

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        flights = Flights(FleetState(), Nobody(), lambda: 0.0, max_open=9, max_unsettled=9, access_log_timeout_s=1)
        self.flight = flights.open()
        self.exchange = Exchange(self.flight, self, Nobody())

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:
        """Nothing to object."""

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:  # noqa: ARG002 - Decider
        """Route whatever it is."""
        self.bodies.append(body)
        return Route("c", ("10.0.0.1:80", "10.0.0.2:80"), flight.request_id, "m")

    def give(self, message: ext_proc.ProcessingRequest) -> list[ext_proc.ProcessingResponse]:
        """One message, and every reply to it."""
        sending = self.exchange.receive(message.SerializeToString())
        assert isinstance(sending, list)
        return [ext_proc.ProcessingResponse.FromString(raw) for raw in sending]

    def headers(self, content_type: str = "application/json") -> list[ext_proc.ProcessingResponse]:
        """The request's headers."""
        message = ext_proc.ProcessingRequest()
        for name, value in ((":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", content_type)):
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message.protocol_config.request_body_mode = MODE.FULL_DUPLEX_STREAMED
        message.protocol_config.response_body_mode = MODE.FULL_DUPLEX_STREAMED
        return self.give(message)

    def body(self, text: bytes, *, end_of_stream: bool) -> list[ext_proc.ProcessingResponse]:
        """A piece of the request's body."""
        message = ext_proc.ProcessingRequest()
        message.request_body.body = text
        message.request_body.end_of_stream = end_of_stream
        return self.give(message)


def _pieces(replies: list[ext_proc.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    streamed = [reply.request_body.response.body_mutation.streamed_response for reply in replies]
    return [(piece.body, piece.end_of_stream) for piece in streamed]


@given(st.lists(st.binary(max_size=90_000), min_size=1, max_size=4), st.booleans())
def test_headers_wait_for_the_body_and_the_body_comes_back_whole(parts: list[bytes], empty_end: bool) -> None:  # noqa: FBT001 - drawn
    """However it is cut: nothing is answered before the end; then the route in the headers, and every byte once."""
    gateway = Gateway()
    assert gateway.headers() == []
    assert gateway.flight.hold_s == math.inf  # Envoy has no limit to that, so the request may wait in a queue
    if empty_end:
        parts = [*parts, b""]
    for part in parts[:-1]:
        assert gateway.body(part, end_of_stream=False) == []
    first, *rest = gateway.body(parts[-1], end_of_stream=True)
    assert first.WhichOneof("response") == "request_headers"
    assert first.request_headers.response.clear_route_cache
    assert first.dynamic_metadata["pointsman"]["request_id"] == gateway.flight.request_id
    pieces = _pieces(rest)
    assert b"".join(body for body, _ in pieces) == b"".join(parts) == gateway.bodies[0]
    assert [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(body) for body, _ in pieces) <= MOST_CHUNK_BYTES


def test_a_body_in_tiny_pieces_takes_no_more_than_its_length() -> None:
    """A client may send two bytes a frame; kept as objects they would take twenty times their size."""
    gateway = Gateway()
    gateway.headers()
    message = ext_proc.ProcessingRequest()
    message.request_body.body = b"ab"
    raw = message.SerializeToString()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20_000):
        assert gateway.exchange.receive(raw) == []
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < 2 * 40_000


def test_a_grpc_call_is_decided_before_its_messages() -> None:
    """Which may never end: they pass piece by piece, each as it comes."""
    gateway = Gateway()
    (reply,) = gateway.headers(content_type="application/grpc+proto")
    assert reply.request_headers.response.clear_route_cache
    for part, end in ((b"first", False), (b"x" * 70_000, False), (b"", True)):
        pieces = _pieces(gateway.body(part, end_of_stream=end))
        assert (b"".join(body for body, _ in pieces), pieces[-1][1]) == (part, end)
    assert gateway.bodies == [b""]
