"""One ext_proc stream: Envoy's messages in, our answers out.

`Exchange` is the state machine, without I/O: bytes in, bytes or a `Pending` out. It serves callers that buffer the
request body (our own config, Envoy Gateway, Istio by EnvoyFilter); `BodyMode` is told from the first message, and a
mode it cannot serve is refused in words. `Processor` is the thin grpc.aio shell around it.

A stream costs two messages whatever the length of the answer: headers and body. It stays open until the HTTP stream
ends, and its end gives the reservation back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

import grpc.aio
import structlog

from extproc.flight import Flight, Flights
from extproc.reply import Answer, Pending, Reply, refuse
from extproc.wire.messages import CONTINUE, BodyMode, Malformed, Phase, Received, accept, read, render
from policies.types import Reason, Refusal

log = structlog.get_logger(__name__)


class Decider(Protocol):
    """The pipeline, as a transport sees it. It knows nothing of the transport."""

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:
        """Asked when only the headers are there: a refusal saves the client sending its body."""

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:
        """What to do with the whole request."""


_SERVED_MODES = (BodyMode.BUFFERED, BodyMode.UNSTATED)


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
    """The headers were answered, the body is awaited."""
    ROUTED = 2
    """Decided, and sent on."""
    ANSWERED = 3
    """Ended by an answer of ours; what Envoy had already under way is passed over."""


class Exchange:
    """The messages of one HTTP request. `receive` returns what to send, in order of what came."""

    __slots__ = ("_body", "_decider", "_events", "_flight", "_headers", "_phase", "turn")

    def __init__(self, flight: Flight, decider: Decider, events: WireEvents) -> None:
        self._flight = flight
        self._decider = decider
        self._events = events
        self._headers: Mapping[str, str] = {}
        self._phase = Phase.UNKNOWN
        self._body = b""
        self.turn = Turn.HEADERS

    def receive(self, raw: bytes) -> bytes | Pending | None:
        """Take one message. None: nothing to send. Raises Malformed for bytes or an order that make no sense."""
        message = read(raw)
        self._events.message(message.phase)
        if self.turn is Turn.ANSWERED:
            return None
        if message.phase is Phase.REQUEST_HEADERS:
            return self._on_headers(message)
        if message.phase is Phase.REQUEST_BODY:
            return self._on_body(message)
        return CONTINUE.get(message.phase)

    def _on_headers(self, message: Received) -> bytes | Pending:
        if self.turn is not Turn.HEADERS:
            raise Malformed("request headers came twice")
        self.turn = Turn.BODY
        self._headers = message.headers
        # CONNECT has no path and sends no body to wait for
        if message.end_of_stream or ":path" not in message.headers:
            return self._decide(Phase.REQUEST_HEADERS, b"")
        if message.body_mode not in _SERVED_MODES:
            return self._refuse_mode(message.body_mode)
        early = self._decider.refuse_early(self._flight, message.headers)
        return accept(self._flight.request_id) if early is None else self._answer(early, Phase.REQUEST_HEADERS, b"")

    def _on_body(self, message: Received) -> bytes | Pending:
        if self.turn is not Turn.BODY:
            raise Malformed("a request body came before the headers or after the decision")
        return self._decide(Phase.REQUEST_BODY, message.body)

    def _refuse_mode(self, mode: BodyMode) -> bytes:
        refusal = Refusal(
            501,
            "server_error",
            f"the gateway sends request bodies in mode {mode.name}; configure request_body_mode: BUFFERED",
            Reason.UNSUPPORTED_BODY_MODE,
        )
        self._events.refused_with(refusal.reason, refusal.status)
        return self._answer(refuse(refusal), Phase.REQUEST_HEADERS, b"")

    def _decide(self, phase: Phase, body: bytes) -> bytes | Pending:
        reply = self._decider.decide(self._flight, self._headers, body)
        if isinstance(reply, Pending):
            self._phase, self._body = phase, body
            return reply
        return self._answer(reply, phase, body)

    def resolve(self, reply: Reply) -> bytes:
        """Encode the reply a Pending came to."""
        return self._answer(reply, self._phase, self._body)

    def _answer(self, reply: Reply, phase: Phase, body: bytes) -> bytes:
        """Encode the reply, and let go of everything it took to find it: the stream may stay open for minutes."""
        self.turn = Turn.ANSWERED if isinstance(reply, Answer) else Turn.ROUTED
        self._headers, self._body = {}, b""
        return render(reply, phase, body, self._flight.request_id)


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
            await self._converse(Exchange(flight, self._decider, self._events), context)
        except Malformed as error:
            self._events.malformed("ext_proc")
            log.warning("malformed ext_proc message", error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a ProcessingRequest")
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
            answer = exchange.receive(raw)
            del raw  # else this frame would keep the body for as long as the answer streams
            if isinstance(answer, Pending):
                answer = exchange.resolve(await answer.ready)
            if answer is not None:
                await context.write(answer)
            del answer
