"""Callers that stream bodies through us, or read the headers' answer only: held headers, pieces, echoes, hints."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import given
from hypothesis import strategies as st

from extproc.flight import Flight, Flights
from extproc.reply import Answer, Pending, Reply, Route
from extproc.request.splice import Splice
from extproc.wire.messages import MOST_CHUNK_BYTES, Phase
from extproc.wire.processor import Exchange, Turn
from policies.fleet_state import FleetState

MODE = processing_mode_pb2.ProcessingMode
PATH = "/v1/chat/completions"


class Nobody:
    """Every kind of events, unheard."""

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Ignored."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Ignored."""

    def settled(self, flight: Flight, completion: object) -> None:
        """Ignored."""

    def missing(self, flight: Flight) -> None:
        """Ignored."""

    def message(self, phase: Phase) -> None:
        """Ignored."""

    def refused_with(self, reason: str, status: int) -> None:
        """Ignored."""

    def malformed(self, service: str) -> None:
        """Ignored."""


class Gateway:
    """A gateway in one of the streaming shapes, its exchange, and a decider that routes to two addresses."""

    largest_body_bytes = 500_000

    def __init__(self, mode: int | None = MODE.FULL_DUPLEX_STREAMED, *, list_for_all: bool = False) -> None:
        self.mode = mode
        self.list_for_all = list_for_all
        self.splices: tuple[Splice, ...] = ()
        self.bodies: list[bytes] = []
        self.early: Answer | None = None
        flights = Flights(FleetState(), Nobody(), lambda: 0.0, max_open=9, max_unsettled=9, access_log_timeout_s=1)
        self.flight = flights.open()
        self.exchange = Exchange(self.flight, self, Nobody())

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:  # noqa: ARG002 - Decider
        """As told."""
        return self.early

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:  # noqa: ARG002 - Decider
        """Refuse what is too large, route the rest."""
        self.bodies.append(body)
        if len(body) > self.largest_body_bytes:
            return Answer(413, b"{}", reason="body_too_large")
        addresses = ("10.0.0.1:80", "10.0.0.2:80")
        return Route("c", addresses, flight.request_id, "m", splices=self.splices, list_for_all=self.list_for_all)

    def give(self, message: ext_proc.ProcessingRequest) -> list[ext_proc.ProcessingResponse]:
        """One message, and every reply to it."""
        sending = self.exchange.receive(message.SerializeToString())
        assert isinstance(sending, list)
        return [ext_proc.ProcessingResponse.FromString(raw) for raw in sending]

    def headers(self, *, end_of_stream: bool = False, **fields: str) -> list[ext_proc.ProcessingResponse]:
        """The request's headers."""
        message = ext_proc.ProcessingRequest()
        message.request_headers.end_of_stream = end_of_stream
        for name, value in ({":method": "POST", ":path": PATH} if self.mode is not None else {}).items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        for name, value in fields.items():
            message.request_headers.headers.headers.add(key=name.replace("_", "-"), value=value)
        if self.mode is not None:
            message.protocol_config.request_body_mode = self.mode
            message.protocol_config.response_body_mode = self.mode
        return self.give(message)

    def body(self, text: bytes, *, end_of_stream: bool) -> list[ext_proc.ProcessingResponse]:
        """A piece of the request's body."""
        message = ext_proc.ProcessingRequest()
        message.request_body.body = text
        message.request_body.end_of_stream = end_of_stream
        return self.give(message)

    def other(self, field: str) -> list[ext_proc.ProcessingResponse]:
        """A message of another kind, empty."""
        message = ext_proc.ProcessingRequest()
        getattr(message, field).SetInParent()
        return self.give(message)


def _destination(reply: ext_proc.ProcessingResponse) -> tuple[str, str]:
    """What header and metadata say."""
    mutation = reply.request_headers.response.header_mutation
    headers = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    return headers["x-gateway-destination-endpoint"], reply.dynamic_metadata["envoy.lb"][
        "x-gateway-destination-endpoint"
    ]


def _pieces(replies: list[ext_proc.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    streamed = [reply.request_body.response.body_mutation.streamed_response for reply in replies]
    return [(piece.body, piece.end_of_stream) for piece in streamed]


@given(st.lists(st.binary(max_size=90_000), min_size=1, max_size=4), st.booleans())
def test_headers_wait_for_the_body_and_the_body_comes_back_whole(parts: list[bytes], empty_end: bool) -> None:  # noqa: FBT001 - drawn
    """However it is cut: nothing is answered before the end; then the route in the headers, and every byte once."""
    gateway = Gateway()
    assert gateway.headers() == []
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


def test_header_and_metadata_agree_on_one_address() -> None:
    """Of these gateways only some understand a list, so they get the first address alone."""
    gateway = Gateway()
    gateway.headers()
    assert _destination(gateway.body(b"{}", end_of_stream=True)[0]) == ("10.0.0.1:80", "10.0.0.1:80")


def test_a_list_is_sent_where_the_operator_asks_for_it() -> None:
    """`wire.endpoint_list: list`, for Istio: it walks the list on a retry."""
    gateway = Gateway(list_for_all=True)
    gateway.headers()
    assert _destination(gateway.body(b"{}", end_of_stream=True)[0])[0] == "10.0.0.1:80,10.0.0.2:80"


def test_an_edited_body_is_sent_in_its_new_form() -> None:
    """The alias is spliced out before the body is cut again."""
    gateway = Gateway()
    gateway.splices = (Splice(1, 2, b"XYZ"),)
    gateway.headers()
    gateway.body(b"ab", end_of_stream=False)
    assert _pieces(gateway.body(b"c", end_of_stream=True)[1:]) == [(b"aXYZc", True)]


def test_trailers_end_a_body_too() -> None:
    """The body's last piece did not say so; the pieces are open-ended and the trailers follow."""
    gateway = Gateway()
    gateway.headers()
    gateway.body(b"{}", end_of_stream=False)
    replies = gateway.other("request_trailers")
    assert [reply.WhichOneof("response") for reply in replies] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert _pieces(replies[1:2]) == [(b"{}", False)]


def test_a_get_gets_its_route_at_the_headers() -> None:
    """No body will come; waiting for one would hang the request for ever."""
    (reply,) = Gateway().headers(end_of_stream=True)
    assert reply.WhichOneof("response") == "request_headers"


def test_responses_pass_piece_by_piece_untouched() -> None:
    """Every piece is echoed with the same bytes and the same end; headers and trailers are let through."""
    gateway = Gateway()
    gateway.headers()
    gateway.body(b"{}", end_of_stream=True)
    assert gateway.other("response_headers")[0].WhichOneof("response") == "response_headers"
    for text, end in ((b"data: 1\n\n", False), (b"\x00\xff", False), (b"", True)):
        message = ext_proc.ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = text, end
        (reply,) = gateway.give(message)
        piece = reply.response_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (text, end)
    assert gateway.other("response_trailers")[0].WhichOneof("response") == "response_trailers"


def test_more_than_the_limit_is_refused_without_waiting_for_the_end() -> None:
    """Nobody makes us hold more than one body's worth; what follows is passed over."""
    gateway = Gateway()
    gateway.headers()
    replies = [reply for _ in range(8) for reply in gateway.body(b"x" * 90_000, end_of_stream=False)]
    assert [reply.immediate_response.status.code for reply in replies] == [413]
    assert len(gateway.bodies) == 1
    assert gateway.exchange.turn is Turn.ANSWERED


def test_an_early_refusal_needs_no_body() -> None:
    """What headers condemn is answered there in this mode too."""
    gateway = Gateway()
    gateway.early = Answer(404, b"{}", reason="unknown_path")
    assert gateway.headers()[0].immediate_response.status.code == 404
    assert gateway.body(b"{}", end_of_stream=True) == []


def test_nginx_reads_the_answer_to_the_headers_only() -> None:
    """No modes, no pseudo headers: the endpoint stands in the one reply it reads, given when the body has come."""
    gateway = Gateway(mode=None)
    assert gateway.headers(content_type="application/json") == []
    (reply,) = gateway.body(b"{}", end_of_stream=True)
    assert _destination(reply)[0] == "10.0.0.1:80"


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (None, None),
        ([], ()),
        (["10.0.0.1:80", " 10.0.0.2:80 "], ("10.0.0.1:80", "10.0.0.2:80")),
        ("10.0.0.1:80, 10.0.0.2", ("10.0.0.1:80", "10.0.0.2")),
        ("", ()),
    ],
)
def test_the_subset_hint_is_read_in_both_forms(hint: list[str] | str | None, subset: tuple[str, ...] | None) -> None:
    """A list or one string; an empty one allows nobody, none at all allows everybody."""
    gateway = Gateway()
    message = ext_proc.ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", value=PATH)
    message.protocol_config.request_body_mode = MODE.FULL_DUPLEX_STREAMED
    if hint is not None:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        fields.update({"x-gateway-destination-endpoint-subset": hint})
    gateway.give(message)
    assert gateway.flight.subset == subset


def test_a_buffering_caller_that_would_send_the_response_is_asked_not_to() -> None:
    """Buffered responses would reach the client only when whole: a stream would come all at once."""
    gateway = Gateway(mode=MODE.BUFFERED)
    (reply,) = gateway.headers()
    override = reply.mode_override
    assert (override.request_body_mode, override.response_body_mode) == (MODE.BUFFERED, MODE.NONE)
    assert (override.response_header_mode, override.response_trailer_mode) == (MODE.SKIP, MODE.SEND)


def test_a_buffering_caller_that_would_send_the_response_gets_one_address() -> None:
    """That is Envoy AI Gateway, whose clusters answer a list with 503; who wants no response takes the list."""
    gateway = Gateway(mode=MODE.BUFFERED)
    gateway.headers()
    (reply,) = gateway.body(b"{}", end_of_stream=True)
    mutation = reply.request_body.response.header_mutation
    (destination,) = [
        o.header.raw_value for o in mutation.set_headers if o.header.key == "x-gateway-destination-endpoint"
    ]
    assert destination == b"10.0.0.1:80"
