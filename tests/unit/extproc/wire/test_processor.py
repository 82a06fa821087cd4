"""One ext_proc stream: what each message is answered with, and that its end gives everything back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from extproc.flight import Completion, Flight, Flights
from extproc.reply import Answer, Pending, Reply, Route
from extproc.request.splice import Splice
from extproc.wire.messages import Malformed, Phase, UnknownKind
from extproc.wire.processor import Exchange, Processor
from policies.fleet_state import FleetState

MODE = processing_mode_pb2.ProcessingMode
HANG_S = 30
CHAT = "/v1/chat/completions"


class Nobody:
    """FlightEvents that nobody hears."""

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Ignored."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Ignored."""

    def settled(self, flight: Flight, completion: Completion) -> None:
        """Ignored."""

    def retried(self, flight: Flight, count: int) -> None:
        """Not looked at."""

    def released(self, flight: Flight) -> None:
        """Its place is free."""

    def missing(self, flight: Flight) -> None:
        """Ignored."""


class Counted:
    """WireEvents as lists."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.refusals: list[tuple[str, int]] = []
        self.malformed_services: list[str] = []

    def message(self, phase: Phase) -> None:
        """One came."""
        self.phases.append(phase)

    def refused_with(self, reason: str, status: int) -> None:
        """Refused by the wire."""
        self.refusals.append((reason, status))

    def malformed(self, service: str) -> None:
        """Garbage came."""
        self.malformed_services.append(service)


class Decider:
    """A pipeline that answers what it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mapping[str, str], bytes]] = []
        self.was_asked = asyncio.Event()
        self.reply: Reply | Pending | None = None
        self.early: Answer | None = None
        self.largest_body_bytes = 1_000_000
        self.hold_s = 0.0
        self.held_for_s: float | None = None

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:  # noqa: ARG002 - Decider
        """Nothing to object unless told so."""
        return self.early

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:
        """Route to one place unless told otherwise."""
        self.asked.append((headers, body))
        self.held_for_s = flight.hold_s
        self.was_asked.set()
        return self.reply or Route("pool_p", ("10.0.0.1:80",), flight.request_id, "m")


class Stream:
    """An exchange and the hands that feed it."""

    def __init__(self) -> None:
        self.flights = Flights(FleetState(), Nobody(), lambda: 0.0, max_open=9, max_unsettled=9, access_log_timeout_s=1)
        self.flight = self.flights.open()
        self.decider = Decider()
        self.events = Counted()
        self.exchange = Exchange(self.flight, self.decider, self.events)

    def send(self, message: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        """Give one message and read the answer."""
        (reply,) = self.send_all(message)
        return reply

    def send_all(self, message: ext_proc.ProcessingRequest) -> list[ext_proc.ProcessingResponse]:
        """Every reply to one message."""
        sending = self.exchange.receive(message.SerializeToString())
        assert isinstance(sending, list)
        return [ext_proc.ProcessingResponse.FromString(raw) for raw in sending]


def headers_of(
    path: str | None = CHAT, *, method: str = "POST", end_of_stream: bool = False, mode: int | None = MODE.BUFFERED
) -> ext_proc.ProcessingRequest:
    """The first message."""
    headers = {":method": method} | ({":path": path} if path else {})
    message = ext_proc.ProcessingRequest()
    message.request_headers.end_of_stream = end_of_stream
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if mode is not None:
        message.protocol_config.request_body_mode = mode
    return message


def body_of(body: bytes) -> ext_proc.ProcessingRequest:
    """The second message."""
    message = ext_proc.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = True
    return message


def other(field: str) -> ext_proc.ProcessingRequest:
    """An empty message of another kind."""
    message = ext_proc.ProcessingRequest()
    getattr(message, field).SetInParent()
    return message


@pytest.fixture
def stream() -> Stream:
    """A fresh stream."""
    return Stream()


# -- the exchange


def test_a_post_is_two_messages(stream: Stream) -> None:
    """Headers are answered at once with our request id; the body with the decision over both."""
    first = stream.send(headers_of())
    assert first.WhichOneof("response") == "request_headers"
    assert dict(first.dynamic_metadata["pointsman"]) == {"request_id": stream.flight.request_id}
    assert stream.decider.asked == []
    second = stream.send(body_of(b'{"model":"m"}'))
    assert second.WhichOneof("response") == "request_body"
    sent = {o.header.key: o.header.raw_value for o in second.request_body.response.header_mutation.set_headers}
    assert sent["x-gateway-destination-endpoint"] == b"10.0.0.1:80"
    assert sent["x-pointsman-request-id"] == stream.flight.request_id.encode()
    assert stream.decider.asked == [({":method": "POST", ":path": CHAT}, b'{"model":"m"}')]
    assert stream.events.phases == [Phase.REQUEST_HEADERS, Phase.REQUEST_BODY]


def test_a_request_without_a_body_is_decided_at_its_headers(stream: Stream) -> None:
    """A GET has no second message."""
    reply = stream.send(headers_of("/v1/models", method="GET", end_of_stream=True))
    assert reply.WhichOneof("response") == "request_headers"
    assert reply.request_headers.response.clear_route_cache
    assert stream.decider.asked == [({":method": "GET", ":path": "/v1/models"}, b"")]


def test_a_connect_is_decided_at_its_headers(stream: Stream) -> None:
    """It has no path, and what follows is no body to wait for."""
    reply = stream.send(headers_of(None, method="CONNECT"))
    assert reply.WhichOneof("response") == "request_headers"
    assert stream.decider.asked == [({":method": "CONNECT"}, b"")]


def test_an_upgrade_is_decided_at_its_headers(stream: Stream) -> None:
    """Its caller sends no body to us, and the client's never ends."""
    reply = stream.send(headers_of("/v1/realtime", method="GET", mode=MODE.NONE))
    assert reply.request_headers.response.clear_route_cache
    assert stream.decider.asked == [({":method": "GET", ":path": "/v1/realtime"}, b"")]


def test_an_answer_of_ours_ends_the_request(stream: Stream) -> None:
    """Whether at the headers or at the body."""
    stream.decider.reply = Answer(404, b"{}", reason="unknown_path")
    reply = stream.send(headers_of(end_of_stream=True))
    assert (reply.immediate_response.status.code, reply.immediate_response.body) == (404, b"{}")


def test_an_edited_body_is_the_one_sent(stream: Stream) -> None:
    """The splices are of the body of this very stream."""
    stream.decider.reply = Route("c", ("10.0.0.1:80",), "1" * 24, "m", splices=(Splice(0, 1, b"[["),))
    stream.send(headers_of())
    common = stream.send(body_of(b"{}")).request_body.response
    assert common.body_mutation.body == b"[[}"


def test_a_caller_that_states_no_mode_is_served(stream: Stream) -> None:
    """Older gateways buffer and do not say."""
    assert stream.send(headers_of(mode=None)).WhichOneof("response") == "request_headers"


def test_what_headers_alone_condemn_is_refused_before_the_body(stream: Stream) -> None:
    """The client is spared sending it; what comes all the same is not decided."""
    stream.decider.early = Answer(413, b"{}", reason="body_too_large")
    reply = stream.send(headers_of())
    assert reply.immediate_response.status.code == 413
    assert stream.exchange.receive(body_of(b"{}").SerializeToString()) == []
    assert stream.decider.asked == []


def test_a_stream_is_decided_once(stream: Stream) -> None:
    """A second body, or headers after it, would take a second place that nobody gives back."""
    stream.send(headers_of())
    stream.send(body_of(b"{}"))
    for again in (body_of(b"{}"), headers_of("/v1/models", end_of_stream=True)):
        with pytest.raises(Malformed, match=r"twice|after the decision"):
            stream.exchange.receive(again.SerializeToString())
    assert len(stream.decider.asked) == 1


def test_a_chunk_that_follows_a_refused_mode_is_not_decided(stream: Stream) -> None:
    """Callers that stream send their body without waiting for our answer."""
    stream.send(headers_of(mode=MODE.STREAMED))
    assert stream.exchange.receive(body_of(b"{}").SerializeToString()) == []
    assert stream.decider.asked == []


def test_a_get_is_served_in_every_mode(stream: Stream) -> None:
    """Without a body the mode of bodies does not matter."""
    reply = stream.send(headers_of(end_of_stream=True, mode=MODE.FULL_DUPLEX_STREAMED))
    assert reply.WhichOneof("response") == "request_headers"


@pytest.mark.parametrize("field", ["request_trailers", "response_headers", "response_body", "response_trailers"])
def test_every_other_message_is_let_through(stream: Stream, field: str) -> None:
    """With an answer of its own kind that changes nothing."""
    stream.send(headers_of())
    stream.send(body_of(b"{}"))
    reply = stream.send(other(field))
    assert reply.WhichOneof("response") == field
    assert getattr(reply, field).SerializeToString() == b""
    assert len(stream.decider.asked) == 1


def test_a_message_of_a_later_version_ends_the_stream(stream: Stream) -> None:
    """We cannot know its answer, and silence would hang the request."""
    with pytest.raises(UnknownKind):
        stream.exchange.receive(b"")


def test_garbage_is_malformed(stream: Stream) -> None:
    """The transport decides what to do about it."""
    with pytest.raises(Malformed):
        stream.exchange.receive(b"\xff\xff")


async def test_a_pending_reply_is_sent_when_it_resolves(stream: Stream) -> None:
    """With the edits of the body that was waiting, as the answer to that message."""
    pending = Pending(asyncio.get_running_loop().create_future())
    stream.decider.reply = pending
    stream.send(headers_of())
    assert stream.exchange.receive(body_of(b"{}").SerializeToString()) is pending
    route = Route("c", ("10.0.0.1:80",), "1" * 24, "m", splices=(Splice(1, 1, b"!"),))
    reply = ext_proc.ProcessingResponse.FromString(stream.exchange.resolve(route)[0])
    assert reply.request_body.response.body_mutation.body == b"{!}"


# -- the grpc.aio shell


class Aborted(Exception):
    """What grpcio raises out of `abort`."""


class Context:
    """grpcio's side: messages in, answers out."""

    def __init__(self, *messages: object) -> None:
        self.incoming = list(messages)
        self.written: list[bytes] = []
        self.aborted: tuple[grpc.StatusCode, str] | None = None
        self.metadata: tuple[tuple[str, str], ...] = ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What came with the call."""
        return self.metadata

    async def read(self) -> object:
        """The next message; an exception in the list is raised."""
        if not self.incoming:
            return grpc.aio.EOF
        message = self.incoming.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message

    async def write(self, answer: bytes) -> None:
        """Sent to Envoy."""
        self.written.append(answer)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End with an error."""
        self.aborted = (code, details)
        raise Aborted


class Server:
    """A processor over a deciding stand-in."""

    def __init__(self) -> None:
        self.flights = Stream().flights
        self.flights.opened = 0
        self.decider = Decider()
        self.events = Counted()
        self.processor = Processor(self.flights, self.decider, self.events)

    async def serve(self, context: Context) -> Context:
        """One stream to its end."""
        await asyncio.wait_for(self.processor.process(None, context), HANG_S)
        return context


POST = (headers_of().SerializeToString(), body_of(b"{}").SerializeToString())


async def test_a_stream_is_served_to_its_end() -> None:
    """One answer per message; when Envoy is done the flight is closed."""
    server = Server()
    context = await server.serve(Context(*POST, other("response_trailers").SerializeToString()))
    kinds = [ext_proc.ProcessingResponse.FromString(raw).WhichOneof("response") for raw in context.written]
    assert kinds == ["request_headers", "request_body", "response_trailers"]
    assert (server.flights.opened, server.flights.ended) == (1, 1)


async def test_a_reset_by_envoy_is_an_end_like_any_other() -> None:
    """No error is raised, the flight is closed."""
    server = Server()
    await server.serve(Context(*POST, asyncio.CancelledError()))
    assert (server.flights.opened, server.flights.ended) == (1, 1)


async def test_garbage_ends_the_stream_with_a_status() -> None:
    """INVALID_ARGUMENT, counted, and the flight is closed."""
    server = Server()
    context = Context(b"\xff\xff")
    with pytest.raises(Aborted):
        await server.serve(context)
    assert context.aborted is not None
    assert context.aborted[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert server.events.malformed_services == ["ext_proc"]
    assert server.flights.open_count == 0


async def test_a_fault_inside_still_closes_the_flight() -> None:
    """Whatever is raised."""
    server = Server()
    with pytest.raises(OSError, match="broken pipe"):
        await server.serve(Context(POST[0], OSError("broken pipe")))
    assert server.flights.open_count == 0


async def test_a_queued_request_is_answered_when_its_turn_comes() -> None:
    """The stream waits for it, and for nothing else."""
    server = Server()
    pending = Pending(asyncio.get_running_loop().create_future())
    server.decider.reply = pending
    asyncio.get_running_loop().call_soon(pending.ready.set_result, Answer(429, b"{}"))
    context = await server.serve(Context(*POST))
    last = ext_proc.ProcessingResponse.FromString(context.written[-1])
    assert last.immediate_response.status.code == 429


@pytest.mark.parametrize(
    ("said", "hold_s"), [("600", 600.0), (None, 7.0), ("a while", 7.0), ("-5", 7.0), ("9" * 50, 999_999.0)], ids=str
)
async def test_a_gateway_says_how_long_it_waits_for_us(said: str | None, hold_s: float) -> None:
    """In its call's metadata, as our own Envoy does; of others the config knows, and nonsense says nothing."""
    server = Server()
    server.decider.hold_s = 7.0
    server.decider.reply = Answer(200, b"{}")
    context = Context(*POST)
    if said is not None:
        context.metadata = (("user-agent", "envoy"), ("x-pointsman-hold-s", said))
    await server.serve(context)
    assert server.decider.held_for_s == hold_s


async def test_a_client_that_leaves_the_queue_gives_up_its_place() -> None:
    """The stream's end cancels the wait and closes the flight."""
    server = Server()
    server.decider.reply = Pending(asyncio.get_running_loop().create_future())
    serving = asyncio.create_task(server.processor.process(None, Context(*POST)))
    async with asyncio.timeout(HANG_S):
        await server.decider.was_asked.wait()
    serving.cancel()
    await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), HANG_S)
    assert server.decider.reply.ready.cancelled()
    assert server.flights.open_count == 0
