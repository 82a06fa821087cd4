"""The gateways that ask us: which messages each sends for a request, and what it makes of the answers.

Each row is a caller of docs/conformance.md. What a gateway ignores is ignored here too: a decision that stands where it
does not look is no decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from callers import Ended, Stream
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

MODE = processing_mode_pb2.ProcessingMode
FULL_DUPLEX = "FULL_DUPLEX_STREAMED"
DESTINATION = "x-gateway-destination-endpoint"
MOST_PIECE_BYTES = 62_000
"""The reference endpoint picker's bound on a piece of a body; Envoy's side stream stalls at 64 KB."""

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Asked:
    """A client's request. `body`: in the pieces it comes in; none for a request without one.

    `subset`: the hint that goes with it, if any. `trailers`: they end the body.
    """

    body: tuple[bytes, ...] = ()
    path: str = "/v1/chat/completions"
    method: str = "POST"
    headers: Headers = ()
    subset: list[str] | str | None = None
    trailers: bool = False


@dataclass(frozen=True)
class Answered:
    """An engine's answer, in the pieces it comes in. Without trailers the last piece ends it."""

    pieces: tuple[bytes, ...]
    trailers: bool = False


@dataclass(frozen=True)
class Gateway:
    """One way of asking. Modes by their names; None where the caller states none."""

    name: str
    request_mode: str | None = "BUFFERED"
    response_mode: str | None = "NONE"
    response_phases: tuple[str, ...] = ()
    sends_trailers: bool = False
    shows_path: bool = True
    hints: bool = False
    tells_served: bool = False
    takes_list: bool = False
    edits: bool = True
    half_closes: bool = False

    @property
    def streams(self) -> bool:
        """It waits with the headers until the body is decided, and wants the body back."""
        return self.request_mode == FULL_DUPLEX

    @property
    def echoes(self) -> bool:
        """It wants every piece of the answer back."""
        return self.response_mode == FULL_DUPLEX

    def can(self, needs: Iterable[str]) -> bool:
        """Whether it has everything that a case needs."""
        return all(getattr(self, need) for need in needs)

    # -- the request

    def request(self, asked: Asked) -> list[ext_proc.ProcessingRequest]:
        """Its messages for a request, the headers first."""
        pieces = asked.body if self.streams else (b"".join(asked.body),) if asked.body else ()
        ends = [False] * len(pieces)
        if pieces and not asked.trailers:
            ends[-1] = True
        messages = [self.headers(asked), *(body_of("request_body", *part) for part in zip(pieces, ends, strict=True))]
        return [*messages, empty("request_trailers")] if asked.trailers and self.sends_trailers else messages

    def headers(self, asked: Asked) -> ext_proc.ProcessingRequest:
        """The first message."""
        message = ext_proc.ProcessingRequest()
        message.request_headers.end_of_stream = not asked.body and not asked.trailers
        pseudo = ((":method", asked.method), (":path", asked.path)) if self.shows_path else ()
        for name, value in (*pseudo, *asked.headers):
            if self.request_mode is None:
                message.request_headers.headers.headers.add(key=name.title(), value=value)  # as Go spells them
            else:
                message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        self.state_modes(message)
        if asked.subset is not None:
            fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            fields.update({f"{DESTINATION}-subset": asked.subset})
        return message

    def state_modes(self, message: ext_proc.ProcessingRequest) -> None:
        """As the first message of a stream does, whatever it is."""
        if self.request_mode is not None and self.response_mode is not None:
            message.protocol_config.request_body_mode = MODE.BodySendMode.Value(self.request_mode)
            message.protocol_config.response_body_mode = MODE.BodySendMode.Value(self.response_mode)

    async def ask(self, stream: Stream, asked: Asked) -> list[ext_proc.ProcessingResponse]:
        """Send a request as this gateway does, and read what it waits for."""
        messages = self.request(asked)
        if self.half_closes:
            return await self._ask_and_close(stream, messages)
        answers: list[ext_proc.ProcessingResponse] = []
        for message in messages:
            await stream.send(message)
            if not self.streams:
                answers.append(await answer(stream))
                if answers[-1].HasField("immediate_response"):
                    return answers
        while self.streams and not (answers and _ends(answers[-1], messages)):
            answers.append(await answer(stream))
        return answers

    @staticmethod
    async def _ask_and_close(
        stream: Stream, messages: list[ext_proc.ProcessingRequest]
    ) -> list[ext_proc.ProcessingResponse]:
        for message in messages:
            await stream.send(message)
        await stream.half_close()
        answers, end = await rest(stream)
        assert end.code == "OK"
        return answers

    # -- what it makes of the answers

    def sent_on(self, answers: list[ext_proc.ProcessingResponse], asked: Asked) -> bytes:
        """The body that the engine gets."""
        whole = b"".join(asked.body)
        if not self.edits:
            return whole
        bodies = [reply.request_body.response.body_mutation for reply in answers if reply.HasField("request_body")]
        if self.streams:
            assert all(len(body.streamed_response.body) <= MOST_PIECE_BYTES for body in bodies)
            ends = [body.streamed_response.end_of_stream for body in bodies]
            assert ends == [False] * len(ends) if asked.trailers else ends[:-1] == [False] * len(ends[:-1])
            return b"".join(body.streamed_response.body for body in bodies)
        return bodies[0].body if bodies and bodies[0].WhichOneof("mutation") else whole

    def decision(self, answers: list[ext_proc.ProcessingResponse]) -> ext_proc.ProcessingResponse:
        """The answer in which this gateway looks for the endpoint."""
        if self.streams or self.half_closes:
            return answers[0]
        return next((reply for reply in answers if reply.HasField("request_body")), answers[0])

    # -- the response

    def response(self, answered: Answered, served: str | None = None) -> list[ext_proc.ProcessingRequest]:
        """Its messages for an engine's answer; with `served` in them where it tells."""
        pieces = answered.pieces if self.echoes else (b"".join(answered.pieces),)
        ends = [False] * (len(pieces) - 1) + [not answered.trailers]
        messages = {
            "response_headers": [empty("response_headers")],
            "response_body": [body_of("response_body", *part) for part in zip(pieces, ends, strict=True)],
            "response_trailers": [empty("response_trailers")] if answered.trailers else [],
        }
        sent = [message for phase in self.response_phases for message in messages[phase]]
        for message in sent if served and self.tells_served else ():
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served})
        return sent


_ALL = ("response_headers", "response_body", "response_trailers")

GATEWAYS = (
    Gateway("own-envoy", response_phases=("response_trailers",), hints=True, takes_list=True),
    Gateway("envoy-gateway", hints=True, takes_list=True),
    Gateway("kgateway", response_phases=("response_trailers",), hints=True, takes_list=True),
    Gateway("istio", FULL_DUPLEX, FULL_DUPLEX, _ALL, sends_trailers=True, hints=True, tells_served=True),
    Gateway("ai-gateway", FULL_DUPLEX, FULL_DUPLEX, _ALL, sends_trailers=True),
    # both annotations: what we ask of it takes effect
    Gateway("ai-gateway-buffered", "BUFFERED", "BUFFERED", ("response_trailers",), sends_trailers=True),
    # without allow-mode-override: it sends the whole answer all the same
    Gateway("ai-gateway-held", "BUFFERED", "BUFFERED", _ALL, sends_trailers=True),
    Gateway("agentgateway", FULL_DUPLEX, FULL_DUPLEX, _ALL, sends_trailers=True, hints=True, tells_served=True),
    Gateway("nginx", None, None, shows_path=False, edits=False, half_closes=True),
)
"""Every caller of docs/conformance.md; `kgateway` stands for whoever lets its user choose BUFFERED."""
OWN = GATEWAYS[0]
ISTIO = next(gateway for gateway in GATEWAYS if gateway.name == "istio")


def _ends(reply: ext_proc.ProcessingResponse, messages: list[ext_proc.ProcessingRequest]) -> bool:
    """Nothing more will be waited for after this answer."""
    if reply.HasField("immediate_response") or reply.HasField("request_trailers"):
        return True
    if messages[-1].HasField("request_headers"):
        return reply.HasField("request_headers")
    return bool(reply.request_body.response.body_mutation.streamed_response.end_of_stream)


async def answer(stream: Stream) -> ext_proc.ProcessingResponse:
    """The next answer; there must be one."""
    received = await stream.receive()
    assert not isinstance(received, Ended), received
    return received


async def rest(stream: Stream) -> tuple[list[ext_proc.ProcessingResponse], Ended]:
    """Everything that still comes, and how the stream ends."""
    answers = []
    while not isinstance(received := await stream.receive(), Ended):
        answers.append(received)
    return answers, received


def body_of(phase: str, text: bytes, end_of_stream: bool) -> ext_proc.ProcessingRequest:  # noqa: FBT001 - as in the message
    """A piece of a body."""
    message = ext_proc.ProcessingRequest()
    part: Any = getattr(message, phase)
    part.SetInParent()
    part.body, part.end_of_stream = text, end_of_stream
    return message


def empty(phase: str) -> ext_proc.ProcessingRequest:
    """A message that says only which phase it is."""
    message = ext_proc.ProcessingRequest()
    getattr(message, phase).SetInParent()
    return message
