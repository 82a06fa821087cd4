"""One ext_proc stream: Envoy's messages in, our answers out.

`Exchange` is the state machine, without I/O: bytes in, bytes or a `Pending` out. One machine serves every caller; how
a caller wants to be answered (`Manner`) is told from its first message, and a mode that cannot be served is refused in
words. `Processor` is the thin grpc.aio shell around it.

Callers that buffer the request body (our own config, Envoy Gateway, Istio by EnvoyFilter) cost two messages whatever
the length of the answer. Callers that stream both bodies through us (InferencePool gateways) cost one more per piece
of the answer, which is passed back untouched; leaving the stream early would empty or cut answers. Either way the
stream stays open until the HTTP stream ends, and its end gives the reservation back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, Protocol, TypeAlias

import grpc.aio
import structlog

from extproc.flight import Flight, Flights
from extproc.names import HOLD_METADATA
from extproc.reply import Answer, Pending, Reply, Route, refuse
from extproc.request.apis import is_grpc
from extproc.wire.messages import (
    CONTINUE,
    NO_HEADERS,
    BodyMode,
    Malformed,
    Phase,
    Received,
    UnknownKind,
    accept,
    echo_request,
    echo_response,
    read,
    read_whole,
    render_answer,
    render_route,
    render_streamed_route,
)
from policies.types import Reason, Refusal

log = structlog.get_logger(__name__)


class Decider(Protocol):
    """The pipeline, as a transport sees it. It knows nothing of the transport."""

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:
        """Asked when only the headers are there: a refusal saves the client sending its body."""

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:
        """What to do with the whole request."""

    @property
    def largest_body_bytes(self) -> int:
        """No more of a body is held than this; a larger one is refused."""

    @property
    def hold_s(self) -> float:
        """How long a gateway waits for an answer that does not say so itself."""


class WireEvents(Protocol):
    """Who counts what passes over the wire."""

    def message(self, phase: Phase) -> None:
        """One message came from Envoy."""

    def refused_with(self, reason: str, status: int) -> None:
        """The wire itself refused a request."""

    def malformed(self, service: str) -> None:
        """Bytes came that are no message of the protocol."""


class Turn(IntEnum):
    """Where one exchange stands."""

    HEADERS = 0
    """Nothing has come yet."""
    BODY = 1
    """The body is awaited; in `Manner.BUFFERED` the headers were answered."""
    ROUTED = 2
    """Decided, and sent on."""
    ANSWERED = 3
    """Ended by an answer of ours; what the gateway had already under way is passed over."""


class Manner(IntEnum):
    """How the caller wants to be answered; told from its first message."""

    BUFFERED = 0
    """The body comes whole; headers are answered at once, the decision goes into the answer to the body."""
    STREAMED = 1
    """Bodies come and go in pieces; the decision goes into the answer to the headers, given when the body is whole."""
    HEADERS_ONLY = 2
    """As STREAMED, but nothing is wanted back but the answer to the headers (NGINX Gateway Fabric)."""


# Members that every request asks for. By its enum one is found in ten times the time of a name of our own.
_HEADERS: Final = Turn.HEADERS
_BODY: Final = Turn.BODY
_ROUTED: Final = Turn.ROUTED
_ANSWERED: Final = Turn.ANSWERED
_BUFFERED: Final = Manner.BUFFERED
_STREAMED: Final = Manner.STREAMED
_REQUEST_HEADERS: Final = Phase.REQUEST_HEADERS
_REQUEST_BODY: Final = Phase.REQUEST_BODY
_NO_BODY: Final = BodyMode.NONE
_BUFFERED_BODY: Final = BodyMode.BUFFERED
_DUPLEX_BODY: Final = BodyMode.FULL_DUPLEX_STREAMED
_UNSTATED_BODY: Final = BodyMode.UNSTATED


Sending: TypeAlias = list[bytes] | Pending
"""What to send, in order, or the promise of it."""


class Exchange:
    """The messages of one HTTP request. `receive` returns what to send, in order of what came."""

    def __init__(self, flight: Flight, decider: Decider, events: WireEvents, hold_s: float | None = None) -> None:
        """`hold_s`: how long the gateway says that it waits for an answer; None if it does not."""
        self._flight = flight
        self._decider = decider
        self._events = events
        self._hold_s = hold_s
        self._headers: dict[str, str] = NO_HEADERS
        self._body: bytes | bytearray = b""
        self._echoes: bool = False
        self._end_of_stream: bool = False
        self._endless: bool = False
        self._one_address: bool = True
        self._trailers: bool = False
        self.manner: Manner = _BUFFERED
        self.turn: Turn = _HEADERS

    def receive(self, raw: bytes | list[bytes | memoryview]) -> Sending:
        """Take one message, perhaps in pieces. Raises Malformed for bytes or an order that make no sense."""
        message = read_whole(raw) if isinstance(raw, bytes) else read(raw)
        phase = message.phase
        self._events.message(phase)
        if self.turn is _ANSWERED:
            return []
        if message.response_mode is not _UNSTATED_BODY:
            self._echoes = message.response_mode is _DUPLEX_BODY
        if phase is _REQUEST_BODY:
            return self._on_body(message)
        if phase is _REQUEST_HEADERS:
            return self._on_headers(message)
        if phase is Phase.REQUEST_TRAILERS:
            return self._on_trailers()
        return self._on_response(message)

    # -- the request

    def _on_headers(self, message: Received) -> Sending:
        if self.turn is not _HEADERS:
            raise Malformed("request headers came twice")
        self.turn = _BODY
        flight, headers = self._flight, message.headers
        self._headers = headers
        flight.subset, flight.claims = message.subset, message.claims
        manner = _BUFFERED if message.body_mode is _BUFFERED_BODY else _manner(message)
        if manner is None:
            return self._refuse_mode(message.body_mode)
        self.manner, wants_response = manner, message.wants_response
        if manner is _STREAMED:
            flight.hold_s = math.inf  # there Envoy has no limit to how long it waits for our answer
        else:
            flight.hold_s = self._decider.hold_s if self._hold_s is None else self._hold_s
        # who buffers answers as well is an Envoy AI Gateway: its clusters take one address, a list gets a 503
        self._one_address = manner is not _BUFFERED or wants_response
        # CONNECT has a method but no path, and sends no body to wait for; nor has an upgrade one that would end,
        # nor perhaps a gRPC call: what its client streams is passed back piece by piece
        connect = ":path" not in headers and ":method" in headers
        self._endless = manner is _STREAMED and is_grpc(headers)
        if message.end_of_stream or connect or self._endless or message.body_mode is _NO_BODY:
            self._end_of_stream = True
            return self._decide(_REQUEST_HEADERS)
        early = self._decider.refuse_early(flight, headers)
        if early is not None:
            return self._answer(early, _REQUEST_HEADERS, b"")
        if manner is not _BUFFERED:
            return []
        return [accept(flight.request_id, keep_response=wants_response)]

    def _on_body(self, message: Received) -> Sending:
        if self._endless:
            return [*echo_request(message.body, end_of_stream=message.end_of_stream)]
        if self.turn is not _BODY:
            raise Malformed("a request body came before the headers or after the decision")
        if self._body:
            self._collect(message.body)
        else:
            self._body = message.body
        self._end_of_stream = message.end_of_stream
        # A body beyond the limit is decided at once, which refuses it: nothing may make us hold more.
        whole = message.end_of_stream or self.manner is _BUFFERED
        if whole or len(self._body) > self._decider.largest_body_bytes:
            return self._decide(_REQUEST_BODY)
        return []

    def _collect(self, piece: bytes) -> None:
        """One buffer, not a list of pieces: a body of a byte each would take many times its size in objects."""
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += piece

    def _on_trailers(self) -> Sending:
        """Trailers end the body of a caller that streams; the body's last piece did not say so."""
        if self.turn is _HEADERS:
            raise Malformed("request trailers came before the headers")
        if self.turn is not _BODY:
            return [CONTINUE[Phase.REQUEST_TRAILERS]]
        if self.manner is _BUFFERED:
            # the answer to trailers cannot carry a route, and a gateway must not choose behind our back
            return self._refuse(Refusal(400, "invalid_request_error", "the request has no body", Reason.EMPTY_BODY))
        self._trailers = True
        return self._decide(_REQUEST_BODY)

    def _refuse_mode(self, mode: BodyMode) -> list[bytes]:
        message = f"request bodies in mode {mode.name} cannot be routed; configure request_body_mode: BUFFERED"
        return self._refuse(Refusal(501, "server_error", message, Reason.UNSUPPORTED_BODY_MODE))

    def _refuse(self, refusal: Refusal) -> list[bytes]:
        """Refuse what is wrong with the conversation, not with the request."""
        self._events.refused_with(refusal.reason, refusal.status)
        return self._answer(refuse(refusal), _REQUEST_HEADERS, b"")

    # -- the decision

    def _decide(self, phase: Phase) -> Sending:
        self._body = body = bytes(self._body)  # the very same object if it came in one piece
        reply = self._decider.decide(self._flight, self._headers, body)
        if isinstance(reply, Pending):
            return reply
        return self._answer(reply, phase, body)

    def resolve(self, reply: Reply) -> list[bytes]:
        """Encode the reply a Pending came to."""
        body = bytes(self._body)
        return self._answer(reply, _REQUEST_BODY if body else _REQUEST_HEADERS, body)

    def _answer(self, reply: Reply, phase: Phase, body: bytes) -> list[bytes]:
        """Encode the reply, and let go of everything it took to find it: the stream may stay open for minutes."""
        self._headers, self._body = NO_HEADERS, b""
        if isinstance(reply, Answer):
            self.turn = _ANSWERED
            return [render_answer(reply, self._flight.request_id)]
        self.turn = _ROUTED
        route = reply.for_one_address_callers() if self._one_address else reply
        if self.manner is _BUFFERED:
            return [render_route(route, phase, body)]
        return self._answer_streamed(route, phase, body)

    def _answer_streamed(self, route: Route, phase: Phase, body: bytes) -> list[bytes]:
        if phase is _REQUEST_HEADERS:
            return render_streamed_route(route, b"", end_of_stream=False)
        sending = render_streamed_route(route, body, end_of_stream=self._end_of_stream)
        if self.manner is Manner.HEADERS_ONLY:
            return sending[:1]
        return [*sending, CONTINUE[Phase.REQUEST_TRAILERS]] if self._trailers else sending

    # -- the response, where the caller shows it: passed back untouched

    def _on_response(self, message: Received) -> list[bytes]:
        """In any turn: a gateway may answer by itself, before we were asked or while the body is still to come."""
        if message.phase is Phase.UNKNOWN:
            raise UnknownKind("a message of a kind that is not known here")
        if message.served is not None:
            self._flight.served(message.served)
        if message.phase is Phase.RESPONSE_BODY and self._echoes:
            return [echo_response(message.body, end_of_stream=message.end_of_stream)]
        return [CONTINUE[message.phase]]


def _manner(message: Received) -> Manner | None:
    """How a caller wants to be answered that does not simply send bodies whole; None if that cannot be served."""
    if message.body_mode is _DUPLEX_BODY:
        return _STREAMED
    if message.body_mode is _UNSTATED_BODY:
        # An old Envoy states no modes but shows the path; NGINX's shim shows neither.
        return _BUFFERED if ":path" in message.headers or ":method" in message.headers else Manner.HEADERS_ONLY
    if message.end_of_stream:
        return _BUFFERED
    if message.body_mode is _NO_BODY and (message.headers.get(":method") == "GET" or is_grpc(message.headers)):
        return _BUFFERED  # an upgrade, or a gRPC call: what follows is for the engine alone
    return None


class Processor:
    """The grpc.aio handler of `ExternalProcessor.Process`, over raw bytes."""

    def __init__(self, flights: Flights, decider: Decider, events: WireEvents) -> None:
        self._flights = flights
        self._decider = decider
        self._events = events

    async def process(self, _requests: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        """Serve one stream until the HTTP request it belongs to has ended."""
        flight = self._flights.open()
        try:
            await self._converse(Exchange(flight, self._decider, self._events, _hold_s(context)), context)
        except Malformed as error:
            self._events.malformed("ext_proc")
            log.warning("malformed ext_proc message", error=str(error))
            await context.abort(_status_of(error), str(error))
        except asyncio.CancelledError:
            # How Envoy usually ends a stream: half-close and reset race each other. Not an error.
            pass
        finally:
            flight.close()

    async def _converse(self, exchange: Exchange, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        while True:
            raw = await context.read()
            if raw is grpc.aio.EOF:
                return
            sending = exchange.receive(raw)
            del raw  # else this frame would keep the body for as long as the answer streams
            if isinstance(sending, Pending):
                sending = exchange.resolve(await sending.ready)
            while sending:
                await context.write(sending.pop(0))


def _hold_s(context: Any) -> float | None:  # noqa: ANN401 - grpcio has no types
    """How long a gateway with a configuration of ours waits for an answer: it says so in the metadata of its call."""
    for name, value in context.invocation_metadata() or ():
        if name == HOLD_METADATA and isinstance(value, str) and value.isascii() and value.isdecimal():
            return float(value[:_LONGEST_HOLD])
    return None


_LONGEST_HOLD = 6
"""Digits of seconds; more would be days."""


def _status_of(error: Malformed) -> grpc.StatusCode:
    return grpc.StatusCode.UNIMPLEMENTED if isinstance(error, UnknownKind) else grpc.StatusCode.INVALID_ARGUMENT
