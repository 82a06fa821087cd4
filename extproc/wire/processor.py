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
from typing import Any, Protocol

import grpc.aio
import structlog

from extproc.flight import Flight, Flights
from extproc.reply import Answer, Pending, Reply, refuse
from extproc.wire.messages import CONTINUE, BodyMode, Malformed, Phase, accept, read, render
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


class Exchange:
    """The messages of one HTTP request. `receive` returns what to send, in order of what came."""

    __slots__ = ("_body", "_decider", "_decision_made", "_events", "_flight", "_headers", "_phase")

    def __init__(self, flight: Flight, decider: Decider, events: WireEvents) -> None:
        self._flight = flight
        self._decider = decider
        self._events = events
        self._headers: Mapping[str, str] = {}
        self._phase = Phase.UNKNOWN
        self._body = b""
        self._decision_made = False

    def receive(self, raw: bytes) -> bytes | Pending | None:
        """Take one message. None: nothing to send. Raises Malformed."""
        message = read(raw)
        self._events.message(message.phase)
        if message.phase is Phase.REQUEST_HEADERS:
            return self._on_headers(message.headers, message.body_mode, end_of_stream=message.end_of_stream)
        if message.phase is Phase.REQUEST_BODY:
            return self._decided(Phase.REQUEST_BODY, message.body)
        return CONTINUE.get(message.phase)

    def _on_headers(self, headers: Mapping[str, str], mode: BodyMode, *, end_of_stream: bool) -> bytes | Pending:
        self._headers = headers
        if end_of_stream or ":path" not in headers:  # CONNECT has no path and sends no body to wait for
            return self._decided(Phase.REQUEST_HEADERS, b"")
        if mode not in _SERVED_MODES:
            return self._refuse_mode(mode)
        early = self._decider.refuse_early(self._flight, headers)
        if early is None:
            return accept(self._flight.request_id)
        self._decision_made = True
        return render(early, Phase.REQUEST_HEADERS, b"", self._flight.request_id)

    def _refuse_mode(self, mode: BodyMode) -> bytes:
        refusal = Refusal(
            501,
            "server_error",
            f"the gateway sends request bodies in mode {mode.name}; configure request_body_mode: BUFFERED",
            Reason.UNSUPPORTED_BODY_MODE,
        )
        self._events.refused_with(refusal.reason, refusal.status)
        return render(refuse(refusal), Phase.REQUEST_HEADERS, b"", self._flight.request_id)

    def _decided(self, phase: Phase, body: bytes) -> bytes | Pending:
        if self._decision_made:
            raise Malformed("a request was already decided on this stream")  # else it would take a second place
        self._decision_made = True
        reply = self._decider.decide(self._flight, self._headers, body)
        if isinstance(reply, Pending):
            self._phase, self._body = phase, body
            return reply
        return render(reply, phase, body, self._flight.request_id)

    def resolve(self, reply: Reply) -> bytes:
        """Encode the reply a Pending came to."""
        body, self._body = self._body, b""
        return render(reply, self._phase, body, self._flight.request_id)


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
            if isinstance(answer, Pending):
                answer = exchange.resolve(await answer.ready)
            if answer is not None:
                await context.write(answer)
