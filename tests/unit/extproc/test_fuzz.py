"""Any headers and any body, from ext_proc's bytes to ext_proc's bytes: an answer always comes, and nothing is kept.

`FUZZ_EXAMPLES` says how many cases; what a release is held against is ten times what a commit is.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Flights
from extproc.names import LB_NAMESPACE, OWN_DETAILS, SERVED_KEY, SUBSET_KEY, SUBSET_NAMESPACE
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.pipeline import Pipeline
from extproc.request.apis import BY_PATH, ModelIn
from extproc.wire.processor import Exchange
from policies.fleet_state import FleetState
from policies.types import Reason
from vllm_adapters.health import Listing

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5000"))
BOUNDARY = "bound"
ADDRESSES = ("10.0.0.1:8000", "10.0.0.2:8000")
CONFIG = """
limits: {request_body_bytes: 5000, stored_responses: 3}
routing:
  paths: [{prefix: /custom, pool: chat}, {prefix: /, pool: bare}]
pools:
  - name: chat
    models: [served]
    aliases: {gpt-4o: served}
    endpoints: {static: ["10.0.0.1:8000", "10.0.0.2:8000"]}
  - name: bare
    models: [nothing]
    endpoints: {file: none.yaml}
"""


def _ignore(*_: object, **__: object) -> None:
    """Whatever happened."""


class Unheard:
    """Events that nobody hears."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _ignore


class House:
    """Everything from the wire to the fleet, without sockets; the same for all cases, so that what leaks adds up."""

    def __init__(self, config: str = CONFIG) -> None:
        unheard: Any = Unheard()
        self.state = FleetState()
        self.metrics = Metrics()
        generation = Generation(1, parse(config))
        self.fleet = fleet = Fleet(self.state, unheard, lambda: 100.0)
        self.flights = Flights(
            self.state, unheard, lambda: 100.0, max_open=10, max_unsettled=10, access_log_timeout_s=10
        )
        self.pipeline = Pipeline(
            generation, fleet, self.flights, DecisionLog(10), self.metrics,
            clock=lambda: 100.0, wall_clock=lambda: 1.78e9, rng=Random(7),
        )  # fmt: skip
        fleet.configure(generation)
        for pool in generation.config.pools:
            fleet.set_endpoints(pool.name, ADDRESSES if pool.endpoints.static else ())
        fleet.acknowledged(fleet.assignments())
        for address in ADDRESSES:
            fleet.listed_models(address, Listing(frozenset({"served"}), 100_000))

    def converse(self, messages: list[ext_proc.ProcessingRequest]) -> list[list[ext_proc.ProcessingResponse]]:
        """What is sent for each message of one exchange, whose stream then ends."""
        flight = self.flights.open()
        exchange = Exchange(flight, self.pipeline, self.metrics)
        sent = []
        try:
            for message in messages:
                sending = exchange.receive(message.SerializeToString())
                assert isinstance(sending, list)
                sent.append([ext_proc.ProcessingResponse.FromString(raw) for raw in sending])
            return sent
        finally:
            flight.close()

    def is_empty(self) -> bool:
        """Nothing is open, booked, pending or pinned."""
        counts: list[Any] = [self.state.in_flight, self.state.in_flight_prompt_tokens]
        pinned: list[Any] = []
        for placement in self.fleet.placements.values():
            counts += [placement.ledger.pending, placement.ledger.pending_tokens]
            shelves = placement.index._shelves.values()
            pinned += [[held for held in shelf.blocks.values() if held.users] for shelf in shelves]
        return not (self.flights.open_count or any(count.any() for count in counts) or any(pinned))

    def faults(self) -> float:
        """How often a decision failed by our own fault."""
        labels = {"reason": Reason.INTERNAL_ERROR.value, "status": "500"}
        return self.metrics.registry.get_sample_value("pointsman_refusals_total", labels) or 0.0


@dataclass(frozen=True)
class Manners:
    """How a gateway sends a request and its answer. Modes None: not stated.

    `subset`, `served`: what its metadata says. `trailers`: they end the request's body. `asks`: how many of its
    messages come before the response does; None for all. `response`: pieces of the response's body, None for none.
    """

    pieces: int = 1
    mode: int | None = None
    response_mode: int | None = None
    subset: Any = None
    served: str = ""
    trailers: bool = False
    asks: int | None = None
    response: list[bytes] | None = None


def _asking(request: Request, how: Manners) -> list[ext_proc.ProcessingRequest]:
    headers, body = request
    pieces = _in_pieces(body, min(how.pieces, 1) if how.mode in {None, BUFFERED} else how.pieces)
    messages = [_headers(headers, how, end_of_stream=not pieces)]
    # Whoever says that it sends no bodies sends none, whatever the client does
    for number, piece in enumerate(() if how.mode == NO_BODIES else pieces, 1):
        part = ext_proc.ProcessingRequest()
        part.request_body.body = piece
        part.request_body.end_of_stream = number == len(pieces) and not how.trailers
        messages.append(part)
    return [*messages, _bare("request_trailers")] if how.trailers and pieces else messages


def _headers(headers: dict[str, str], how: Manners, *, end_of_stream: bool) -> ext_proc.ProcessingRequest:
    first = ext_proc.ProcessingRequest()
    first.request_headers.end_of_stream = end_of_stream
    for name, value in headers.items():
        header = first.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode("utf-8", "surrogatepass")
    if how.subset is not None:
        first.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: how.subset})
    return first


def _answering(how: Manners) -> list[ext_proc.ProcessingRequest]:
    if how.response is None:
        return []
    first = _bare("response_headers")
    first.metadata_context.filter_metadata[LB_NAMESPACE].update({SERVED_KEY: how.served})
    messages = [first]
    for piece in how.response:
        part = ext_proc.ProcessingRequest()
        part.response_body.body = piece
        messages.append(part)
    return [*messages, _bare("response_trailers")]


def _state_modes(first: ext_proc.ProcessingRequest, how: Manners) -> None:
    """As the first message of a stream does, whatever it is."""
    if how.mode is not None:
        first.protocol_config.request_body_mode = how.mode
        first.protocol_config.response_body_mode = how.response_mode or NO_BODIES


def _bare(phase: str) -> ext_proc.ProcessingRequest:
    message = ext_proc.ProcessingRequest()
    getattr(message, phase).SetInParent()
    return message


# -- what may come

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "model", "stream", "messages", "prompt", "tools", "max_tokens", "max_output_tokens", "cache_salt", "user", "input",
    "instructions", "previous_response_id", "request_id", "store", "system", "query", "documents", "text_1", "unknown",
)  # fmt: skip
MODELS = st.sampled_from(["served", "gpt-4o", "nothing", "nope", ""])
OBJECTS = st.builds(
    lambda model, fields: {**fields, **model},
    st.just({}) | st.fixed_dictionaries({"model": MODELS | JSON}),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8),
)
DOCUMENTS = st.builds(
    lambda document, ascii_only, indent: json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(
        "utf-8", "surrogatepass"
    ),
    OBJECTS | JSON,
    st.booleans(),
    st.sampled_from([None, 1]),
)
PARTS = st.lists(
    st.builds(
        lambda name, value: b'\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name, value),
        st.sampled_from([b"model", b"file", b"x"]),
        st.sampled_from([b"served", b"gpt-4o", b""]) | st.binary(max_size=20),
    ),
    max_size=4,
)
FORMS = PARTS.map(lambda parts: b"".join(b"--bound" + part for part in parts) + b"--bound--\r\n")


def _cut(body: bytes, start: int, width: int, text: bytes) -> bytes:
    start = start % (len(body) + 1)
    return body[:start] + text + body[start + width :]


PLAIN = DOCUMENTS | FORMS
DAMAGED = st.builds(_cut, PLAIN, st.integers(0, 5_000), st.integers(0, 9), st.binary(max_size=9))
BOMBS = st.sampled_from(
    [b"[" * 4_999, b'{"model":"served","messages":' + b"[" * 4_000, b'{"max_tokens":1' + b"0" * 4_000]
)
BODIES = PLAIN | PLAIN | DAMAGED | BOMBS | st.binary(max_size=60) | st.just(b"x" * 6_000)
PACKED = BODIES.map(gzip.compress) | BODIES.map(zlib.compress) | st.just(gzip.compress(b" " * 100_000))

KNOWN_PATHS = [path.format(id="resp_x") for path in BY_PATH]
PATHS = st.sampled_from([*KNOWN_PATHS, "/custom/a", "/custom", "/sleep", "/%73leep", "/x/../metrics"]) | st.text(
    max_size=20
)
QUERIES = st.sampled_from(["", "?model=served", "?model=%ff", "?", "?model"]) | st.text(max_size=9).map("?{}".format)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        ":method": st.sampled_from(["POST", "POST", "POST", "GET", "HEAD", "PUT", "CONNECT", ""]),
        ":path": st.builds("{}{}".format, PATHS, QUERIES),
        "content-type": st.sampled_from(
            ["application/json", f"multipart/form-data; boundary={BOUNDARY}", "multipart/form-data", "text/plain"]
        )
        | st.text(max_size=20),
        "content-encoding": st.sampled_from(["gzip", "deflate", "identity", "br", "gzip, gzip", ""]),
        "content-length": st.sampled_from(["0", "10", "99999999999999999999", "-1", "x"]),
        "x-session-id": st.text(max_size=9),
    },
)
GOOD_MODEL = st.sampled_from(["served", "gpt-4o"])
REQUIRED = st.fixed_dictionaries(dict.fromkeys(("messages", "prompt", "input", "query"), JSON))
GOOD = st.builds(
    lambda fields, required, model: json.dumps({**fields, **required, "model": model}).encode(),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    REQUIRED,
    GOOD_MODEL,
)
JSON_PATHS = st.sampled_from([path for path, api in BY_PATH.items() if api.model_in is ModelIn.JSON])
Request = tuple[dict[str, str], bytes]


def _post(path: str, body: bytes, encoding: str = "") -> Request:
    headers = {":method": "POST", ":path": path}
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body) if encoding else body
    return (headers | {"content-encoding": encoding} if encoding else headers), packed


def _form(path: str, body: bytes) -> Request:
    return {":method": "POST", ":path": path, "content-type": f"multipart/form-data; boundary={BOUNDARY}"}, body


REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.builds(_post, JSON_PATHS, GOOD, st.sampled_from(["", "gzip", "deflate"])),
    st.builds(_post, JSON_PATHS, DAMAGED | DOCUMENTS | BOMBS),
    st.builds(_form, st.just("/v1/audio/translations"), FORMS | DAMAGED),
    st.builds(lambda body: ({}, body), GOOD | BODIES),
    st.tuples(HEADERS, BODIES | PACKED),
)
NO_BODIES = processing_mode_pb2.ProcessingMode.NONE
BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
STREAMED = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
MODES = st.sampled_from([None, BUFFERED, STREAMED]) | st.sampled_from(
    processing_mode_pb2.ProcessingMode.BodySendMode.values()
)
HINTS = st.sampled_from([*ADDRESSES, "10.0.0.1", "10.9.9.9:80", "", " , "]) | st.text(max_size=9)
MANNERS = st.builds(
    Manners,
    pieces=st.sampled_from([1, 3, 2, 0]),
    mode=MODES,
    response_mode=MODES,
    subset=st.none() | st.none() | HINTS | st.lists(HINTS, max_size=3) | JSON,
    served=HINTS,
    trailers=st.booleans(),
    asks=st.none() | st.none() | st.integers(0, 3),
    response=st.none() | st.lists(st.binary(max_size=9), max_size=3),
)


def _in_pieces(body: bytes, count: int) -> list[bytes]:
    size = max(1, -(-len(body) // count)) if count else 0
    return [body[start : start + size] for start in range(0, len(body), size)] or [b""] if count else []


@pytest.fixture(scope="module")
def house() -> House:
    """One for all cases."""
    return House()


@pytest.mark.timeout(max(1_200, EXAMPLES // 4))  # a hang guard; coverage slows it several times
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=REQUESTS, how=MANNERS)
def test_whatever_comes_is_routed_or_answered_and_given_back(house: House, request: Request, how: Manners) -> None:
    """No exception escapes, none hides in a 500; a reply is a route into the fleet or JSON; nothing stays booked.

    A request that is complete is decided, and every part of a response goes on: nothing is met with silence.
    """
    asking, answering = _asking(request, how)[: how.asks], _answering(how)
    for first in (*asking, *answering)[:1]:
        _state_modes(first, how)
    sent = house.converse([*asking, *answering])
    replies = [reply for some in sent for reply in some]
    for reply in replies:
        _check(reply)
    decided = [reply for reply in replies if reply.HasField("immediate_response") or _destination(reply)]
    assert len(decided) == 1 or (not decided and len(asking) < len(_asking(request, how)))
    if not any(reply.HasField("immediate_response") for reply in decided):
        _check_response(answering, sent[len(asking) :], echoes=how.mode is not None and how.response_mode == STREAMED)
    assert house.faults() == 0
    assert house.is_empty()


def _check_response(
    asked: list[ext_proc.ProcessingRequest], sent: list[list[ext_proc.ProcessingResponse]], *, echoes: bool
) -> None:
    for message, replies in zip(asked, sent, strict=True):
        (reply,) = replies
        assert reply.WhichOneof("response") == message.WhichOneof("request")
        if message.HasField("response_body"):
            piece = reply.response_body.response.body_mutation.streamed_response
            assert piece.body == (message.response_body.body if echoes else b"")


def _check(reply: ext_proc.ProcessingResponse) -> None:
    if reply.HasField("immediate_response"):
        answer = reply.immediate_response
        assert 200 <= answer.status.code < 600
        assert answer.details.startswith(OWN_DETAILS)
        event(answer.details)
        assert json.loads(answer.body)
        assert {o.header.key: o.header.raw_value for o in answer.headers.set_headers}[
            "content-type"
        ] == b"application/json"
    elif destination := _destination(reply):
        event("routed")
        assert set(destination.split(",")) <= set(ADDRESSES)


def _destination(reply: ext_proc.ProcessingResponse) -> str:
    common = (reply.request_body if reply.HasField("request_body") else reply.request_headers).response
    headers: dict[str, str] = {
        option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers
    }
    return headers.get("x-gateway-destination-endpoint", "")
