"""ext_proc messages: what is read from Envoy's bytes and what our answers say."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.flight import REQUEST_ID_BYTES
from extproc.names import DESTINATION_HEADER, FIRST_CHOICE_HEADER, REQUEST_ID_HEADER
from extproc.reply import Answer, Route
from extproc.request.splice import Splice
from extproc.wire import messages
from extproc.wire.messages import (
    CONTINUE,
    BodyMode,
    Malformed,
    Phase,
    accept,
    read,
    render_answer,
    render_route,
    render_streamed_route,
)

ID = "0123456789abcdef01234567"
MODE = processing_mode_pb2.ProcessingMode
ROUTE = Route(
    cluster="pool_chat",
    addresses=("10.0.0.1:8000", "10.0.0.2:8000"),
    request_id=ID,
    model="m",
    headers=(("x-envoy-max-retries", "1"), ("x-envoy-retry-on", "reset")),
)


# -- from Envoy


def headers_message(
    headers: dict[str, str], *, end_of_stream: bool = False, mode: int | None = MODE.BUFFERED
) -> ext_proc.ProcessingRequest:
    """The first message of a stream."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.end_of_stream = end_of_stream
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if mode is not None:
        message.protocol_config.request_body_mode = mode
    return message


def test_request_headers_are_read() -> None:
    """Names to values, whether a body follows, and how it will come."""
    received = read(headers_message({":path": "/v1/models", "x-a": "ü"}).SerializeToString())
    assert received.phase is Phase.REQUEST_HEADERS
    assert received.headers == {":path": "/v1/models", "x-a": "ü"}
    assert (received.body, received.end_of_stream, received.body_mode) == (b"", False, BodyMode.BUFFERED)


def test_the_older_field_of_a_header_value_is_read_too() -> None:
    """`value` is what callers other than Envoy still fill."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", value="/v1/models")
    assert read(message.SerializeToString()).headers == {":path": "/v1/models"}


def test_a_header_that_is_no_utf8_is_read_with_marks() -> None:
    """Never a crash: what cannot be decoded is replaced."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-a", raw_value=b"a\xffb")
    assert read(message.SerializeToString()).headers == {"x-a": "a\ufffdb"}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, BodyMode.UNSTATED),
        (MODE.NONE, BodyMode.NONE),
        (MODE.STREAMED, BodyMode.STREAMED),
        (MODE.BUFFERED, BodyMode.BUFFERED),
        (MODE.BUFFERED_PARTIAL, BodyMode.BUFFERED_PARTIAL),
        (MODE.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
        (5, BodyMode.UNKNOWN),
        (77, BodyMode.UNKNOWN),
    ],
)
def test_the_callers_body_mode_is_told_from_the_first_message(mode: int | None, expected: BodyMode) -> None:
    """Old callers do not say; the rest name one of ext_proc's modes, newer ones perhaps one that we do not know."""
    assert read(headers_message({}, mode=mode).SerializeToString()).body_mode is expected


def test_a_get_ends_with_its_headers() -> None:
    """Then no body message will come."""
    assert read(headers_message({}, end_of_stream=True).SerializeToString()).end_of_stream


def test_a_request_body_is_read() -> None:
    """All its bytes, zeros included."""
    message = ext_proc.ProcessingRequest()
    message.request_body.body = b"\x00{}\xff"
    message.request_body.end_of_stream = True
    received = read(message.SerializeToString())
    assert (received.phase, received.body, received.end_of_stream) == (Phase.REQUEST_BODY, b"\x00{}\xff", True)


def as_upb_reads(raw: bytes) -> tuple[object, object]:
    """What is made of a message by hand, as far as that goes, and by upb; Malformed as its class."""
    found: list[object] = []
    for reads in (read, messages._read_any):
        try:
            found.append(reads(raw))
        except Malformed:
            found.append(Malformed)
    return found[0], found[1]


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("end_of_stream", [False, True])
@pytest.mark.parametrize("size", [0, 1, 121, 122, 123, 124, 127, 128, 2_000, 16_376, 16_380, 3_000_000])
def test_a_whole_body_is_read_by_hand(
    size: int,
    end_of_stream: bool,  # noqa: FBT001 - a case
    metadata: bool,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same as upb reads, and without it where it ends the stream, but for an empty one."""
    message = ext_proc.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = b"\x0a" * size, end_of_stream
    if metadata:
        message.metadata_context.SetInParent()
    by_hand, by_upb = as_upb_reads(message.SerializeToString())
    assert by_hand == by_upb
    monkeypatch.setattr(messages, "_parse", None)
    assert not size or not end_of_stream or read(message.SerializeToString()) == by_hand


def read_in_pieces(raw: bytes, *cuts: int) -> object:
    """What is made of a message that came in pieces, as HTTP/2 keeps them; Malformed as its class."""
    places = sorted({0, *(min(cut, len(raw)) for cut in cuts), len(raw)})
    try:
        return read([memoryview(raw)[start:end] if start % 2 else raw[start:end] for start, end in pairwise(places)])
    except Malformed:
        return Malformed


@pytest.mark.parametrize("metadata", [False, True])
def test_a_body_in_pieces_is_joined_without_what_stands_around_it(
    metadata: bool,  # noqa: FBT001 - a case
) -> None:
    """Wherever its message is cut it is the same body, and with a usual cut it is copied but once."""
    message = ext_proc.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = bytes(range(256)) * 100, True
    if metadata:
        message.metadata_context.SetInParent()
    raw = message.SerializeToString()
    for cut in (*range(1, 12), 16_384, *range(len(raw) - 8, len(raw))):
        assert read_in_pieces(raw, cut) == read_in_pieces(raw, 9_000, cut) == read(raw)
    assert messages._body_of([raw[:16_379], memoryview(raw)[16_379:]]) == read(raw)


PARTS = (
    "22", "0a", "1001", "1000", "22030a0178", "22050a01781001", "8000", "1200", "05", "02", "00", "858000", "616263",
    "ffffffff7f", "3801", "0a0178", "07", "4200",
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.integers(0, 40), st.binary(max_size=2))
def test_by_hand_nothing_is_read_otherwise_than_by_upb(parts: list[str], at: int, by: bytes) -> None:
    """Whatever stands there: the same message, or the same fault."""
    raw = bytes.fromhex("".join(parts))
    changed = raw[:at] + by + raw[at + len(by) :]
    by_hand, by_upb = as_upb_reads(changed)
    assert by_hand == by_upb
    assert not changed or read_in_pieces(changed, at + 1, at + 4) == by_hand


PLAIN = headers_message(
    {":method": "POST", ":path": "/v1/models", "x-a": "1" * 90, "x-b": "", "authorization": "Bearer " + "j" * 200},
    end_of_stream=True,
)
PLAIN.metadata_context.SetInParent()


def test_plain_request_headers_are_read_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as upb reads, and without it, once it has read the modes that a gateway always says."""
    by_hand, by_upb = as_upb_reads(PLAIN.SerializeToString())
    assert by_hand == by_upb
    monkeypatch.setattr(messages, "_parse", None)
    assert read(PLAIN.SerializeToString()) == by_hand


UNUSUAL = (
    headers_message({"x-a": "1" * 130, "x-b": "ü"}),
    headers_message({"x-a": "1" * 130, "x-ü": "b"}),
    headers_message({"": "1"}),
    headers_message({":path": "/" + "p" * 17_000}),
    headers_message({"x-a": "", "x-b": "b"}),
    headers_message({"x-a": "1"}, mode=None),
    headers_message({}),
    ext_proc.ProcessingRequest(request_headers=PLAIN.request_headers, observability_mode=True),
    ext_proc.ProcessingRequest(request_headers=PLAIN.request_headers, metadata_context={"filter_metadata": {"a": {}}}),
)


@pytest.mark.parametrize("message", UNUSUAL)
def test_unusual_request_headers_are_read_as_well(message: ext_proc.ProcessingRequest) -> None:
    """Long ones, empty ones, and what stands beside them: by upb, if not by hand."""
    by_hand, by_upb = as_upb_reads(message.SerializeToString())
    assert by_hand == by_upb


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_by_hand_no_headers_are_read_otherwise_than_by_upb(data: st.DataObject) -> None:
    """However the bytes are changed, cut or repeated: the same message, or the same fault."""
    raw = bytearray(PLAIN.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        to = data.draw(st.integers(at, min(len(raw), at + 6)))
        some = data.draw(
            st.sampled_from([b"", b"\x0a", b"\x1a", b"\x18\x01", b"\x12\x00", b"\xff", b"\x80\x01", raw[at:to] * 2])
        )
        raw[at:to] = some
    by_hand, by_upb = as_upb_reads(bytes(raw))
    assert by_hand == by_upb


OTHERS = {
    "request_trailers": Phase.REQUEST_TRAILERS,
    "response_headers": Phase.RESPONSE_HEADERS,
    "response_body": Phase.RESPONSE_BODY,
    "response_trailers": Phase.RESPONSE_TRAILERS,
}


@pytest.mark.parametrize(("field", "phase"), OTHERS.items())
def test_every_other_message_is_told_by_its_phase(field: str, phase: Phase) -> None:
    """Nothing in them matters to us but which they are."""
    message = ext_proc.ProcessingRequest()
    getattr(message, field).SetInParent()
    assert read(message.SerializeToString()).phase is phase


def test_an_empty_message_has_no_phase() -> None:
    """A message of a later version of the protocol looks like this."""
    assert read(b"").phase is Phase.UNKNOWN


@pytest.mark.parametrize("raw", [b"garbage", b"\x0a\xff", b"\xff" * 20, b"\x12"])
def test_garbage_is_malformed(raw: bytes) -> None:
    """Bytes that are no message raise Malformed and nothing else."""
    with pytest.raises(Malformed):
        read(raw)


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_no_bytes_raise_anything_but_malformed(raw: bytes) -> None:
    """Whatever comes."""
    with suppress(Malformed):
        read(raw)


# -- to Envoy


def answered(raw: bytes) -> ext_proc.ProcessingResponse:
    """The reply as Envoy decodes it."""
    return ext_proc.ProcessingResponse.FromString(raw)


def set_headers(common: ext_proc.CommonResponse) -> dict[str, str]:
    """What the reply sets, each overwriting what the client may have sent."""
    options = common.header_mutation.set_headers
    assert all(option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD for option in options)
    names = [option.header.key for option in options]
    assert len(names) == len(set(names))
    return {option.header.key: option.header.raw_value.decode() for option in options}


@pytest.mark.parametrize(
    ("phase", "field"), [(phase, phase.name.lower()) for phase in Phase if phase is not Phase.UNKNOWN]
)
def test_continue_answers_in_kind_and_changes_nothing(phase: Phase, field: str) -> None:
    """Envoy wants the answer to be of the message's own kind."""
    reply = answered(CONTINUE[phase])
    assert reply.WhichOneof("response") == field
    assert len(getattr(reply, field).SerializeToString()) == 0
    assert not reply.HasField("dynamic_metadata")


def test_the_answer_to_headers_carries_the_request_id() -> None:
    """In dynamic metadata, where the access log finds it; nothing is changed and routing stays."""
    reply = answered(accept(ID, keep_response=False))
    assert reply.WhichOneof("response") == "request_headers"
    assert reply.request_headers.SerializeToString() == b""
    assert dict(reply.dynamic_metadata["pointsman"]) == {"request_id": ID}


@pytest.mark.parametrize(
    ("phase", "field"), [(Phase.REQUEST_BODY, "request_body"), (Phase.REQUEST_HEADERS, "request_headers")]
)
def test_a_route_says_where_to_in_headers_and_metadata(phase: Phase, field: str) -> None:
    """Cluster, the list, its first endpoint, our id, the retry headers; and the route is looked up again."""
    reply = answered(render_route(ROUTE, phase, b"{}"))
    assert reply.WhichOneof("response") == field
    common = getattr(reply, field).response
    assert set_headers(common) == {
        "x-pointsman-cluster": "pool_chat",
        "x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000",
        "x-pointsman-endpoint": "10.0.0.1:8000",
        "x-pointsman-request-id": ID,
        "x-envoy-max-retries": "1",
        "x-envoy-retry-on": "reset",
    }
    assert common.clear_route_cache
    assert common.status == ext_proc.CommonResponse.CONTINUE
    assert dict(reply.dynamic_metadata["envoy.lb"]) == {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"}
    assert dict(reply.dynamic_metadata["pointsman"]) == {"model": "m"}


def test_an_unedited_body_is_not_sent_back() -> None:
    """Nor its length: Envoy keeps the bytes it has."""
    common = answered(render_route(ROUTE, Phase.REQUEST_BODY, b"x" * 1_000)).request_body.response
    assert not common.HasField("body_mutation")
    assert "content-length" not in set_headers(common)


def test_an_edited_body_comes_with_its_exact_length() -> None:
    """In bytes, not characters."""
    route = Route("c", ("10.0.0.1:80",), ID, "m", splices=(Splice(1, 2, "模型".encode()),))
    common = answered(render_route(route, Phase.REQUEST_BODY, b"abc")).request_body.response
    assert common.body_mutation.body == "a模型c".encode()
    assert set_headers(common)["content-length"] == "8"


def test_headers_that_are_no_longer_true_are_taken_away() -> None:
    """In both manners of answering."""
    route = replace(ROUTE, remove_headers=("content-encoding",))
    buffered = answered(render_route(route, Phase.REQUEST_BODY, b"abc")).request_body.response
    streamed = answered(render_streamed_route(route, b"abc", end_of_stream=True)[0]).request_headers.response
    for common in (buffered, streamed):
        assert list(common.header_mutation.remove_headers) == ["content-encoding"]


def test_routes_to_one_place_do_not_leak_into_each_other() -> None:
    """The shared template carries neither the last request's id nor its body."""
    edited = Route("c", ("10.0.0.1:80",), "1" * 24, "m", splices=(Splice(0, 1, b"secret"),))
    render_route(edited, Phase.REQUEST_BODY, b"abc")
    plain = answered(render_route(Route("c", ("10.0.0.1:80",), "2" * 24, "m"), Phase.REQUEST_BODY, b"abc"))
    common = plain.request_body.response
    assert not common.HasField("body_mutation")
    assert set_headers(common)["x-pointsman-request-id"] == "2" * 24


def test_an_answer_ends_the_request() -> None:
    """Status, body, headers with our request id; its reason in Envoy's details."""
    answer = Answer(429, b"{}", (("content-type", "application/json"), ("retry-after", "1")), "too_many_requests")
    reply = answered(render_answer(answer, ID))
    immediate = reply.immediate_response
    assert reply.WhichOneof("response") == "immediate_response"
    assert (immediate.status.code, immediate.body) == (429, b"{}")
    assert immediate.details == "pointsman_too_many_requests"
    sent = {option.header.key: option.header.raw_value for option in immediate.headers.set_headers}
    assert sent == {
        "content-type": b"application/json",
        "retry-after": b"1",
        "x-pointsman-request-id": ID.encode(),
    }


def test_every_kind_of_message_has_its_phase() -> None:
    """Whatever ext_proc can send is answered."""
    fields: Any = ext_proc.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"].fields
    assert {field.name for field in fields} == {phase.name.lower() for phase in CONTINUE}


# -- verified claims


def _with_claims(claims: dict[str, Any], namespace: str = "envoy.filters.http.jwt_authn") -> bytes:
    """Request headers from a gateway whose JWT filter has verified these."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.SetInParent()
    message.metadata_context.filter_metadata[namespace].update({"pointsman": claims})
    return bytes(message.SerializeToString())


def test_verified_claims_are_read_by_name() -> None:
    """Texts and whole numbers, those of objects by a dotted path; what could be mistaken for another is left out."""
    claims = {
        "tenant": "acme", "org": {"id": 42, "in": {"deep": "x"}}, "https://acme.org/t": "y", "half": 1.5, "yes": True,
        "list": ["a"], "huge": 2.0**53,
    }  # fmt: skip
    assert read(_with_claims(claims)).claims == {
        "tenant": "acme",
        "org.id": "42",
        "org.in.deep": "x",
        "https://acme.org/t": "y",
    }


def test_claims_of_another_filter_are_none() -> None:
    """Only what Envoy's JWT filter wrote under our name has been verified for us."""
    assert read(_with_claims({"tenant": "acme"}, namespace="somebody.else")).claims is None
    assert read(_with_claims({})).claims == {}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 40, 65, 127, 128, 200, 300, 383, 384, 391, 511, 600])
def test_a_route_reads_the_same_however_long_its_addresses(size: int) -> None:
    """What stands around them is kept by their length, and cut out at no byte of a length."""
    first, rest = "1" * max(2, size // 2), "2" * max(2, size)
    route = Route("pool_chat", (first, rest), "0" * 2 * REQUEST_ID_BYTES, "sim")
    message = ext_proc.ProcessingResponse.FromString(render_route(route, Phase.REQUEST_BODY, b""))
    said = {
        one.header.key: one.header.raw_value.decode()
        for one in message.request_body.response.header_mutation.set_headers
    }
    assert said[FIRST_CHOICE_HEADER] == first
    assert said[DESTINATION_HEADER] == f"{first},{rest}"
    assert said[REQUEST_ID_HEADER] == route.request_id
