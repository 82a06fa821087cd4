"""The only module on the hot path that knows protobuf: ext_proc and access-log messages to plain data and back.

What our own Envoy sends of every request is read from its bytes, plain headers and whole bodies, and all that is in any
way unusual by upb (xds-protos), whose objects cost 1 to 3 us each; envoy-data-plane's are pleasant and cost 300 us.
Replies are joined from parts that upb has written once. The hand reads what upb would read, or leaves it to upb: tests
compare the two.

Rejected: reading access-log entries by hand too. One has four dozen fields, a third of which are read; stepping over
the others, and reading times whose digits are spread over septets, takes longer than upb does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgspec
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2, wrappers_pb2

from extproc.flight import LONGEST_PATH, REQUEST_ID_BYTES, TIMED_OUT, Attempt, Completion, Usage
from extproc.names import (
    ATTEMPT_HEADER,
    CLUSTER_HEADER,
    DESTINATION_HEADER,
    FIRST_CHOICE_HEADER,
    JWT_KEY,
    JWT_NAMESPACE,
    LB_NAMESPACE,
    METADATA_NAMESPACE,
    OWN_DETAILS,
    REQUEST_ID_HEADER,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    USAGE_NAMESPACE,
)
from extproc.reply import Answer, Route
from extproc.request.splice import apply


class Phase(IntEnum):
    """Which of ext_proc's messages this is."""

    REQUEST_HEADERS = 0
    REQUEST_BODY = 1
    REQUEST_TRAILERS = 2
    RESPONSE_HEADERS = 3
    RESPONSE_BODY = 4
    RESPONSE_TRAILERS = 5
    UNKNOWN = 6


class BodyMode(IntEnum):
    """How the caller sends bodies; the numbers are ext_proc's. UNSTATED: it did not say. UNKNOWN: newer than we are."""

    NONE = processing_mode_pb2.ProcessingMode.NONE
    STREAMED = processing_mode_pb2.ProcessingMode.STREAMED
    BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
    BUFFERED_PARTIAL = processing_mode_pb2.ProcessingMode.BUFFERED_PARTIAL
    FULL_DUPLEX_STREAMED = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
    UNSTATED = -1
    UNKNOWN = -2


_BODY_MODES = {mode.value: mode for mode in BodyMode if mode >= 0}

_PHASES = {
    "request_headers": Phase.REQUEST_HEADERS,
    "request_body": Phase.REQUEST_BODY,
    "request_trailers": Phase.REQUEST_TRAILERS,
    "response_headers": Phase.RESPONSE_HEADERS,
    "response_body": Phase.RESPONSE_BODY,
    "response_trailers": Phase.RESPONSE_TRAILERS,
}


class Received(msgspec.Struct):
    """One message from a gateway; what its phase does not carry is empty.

    With the first message of a stream, whatever its phase: `body_mode` and `response_mode`. With REQUEST_HEADERS:
    `subset`, the addresses the endpoint must be one of; `claims` of a token that the gateway verified. With
    RESPONSE_HEADERS: `served`, who answered.
    """

    phase: Phase
    headers: Mapping[str, str] = {}
    body: bytes = b""
    end_of_stream: bool = False
    body_mode: BodyMode = BodyMode.UNSTATED
    response_mode: BodyMode = BodyMode.UNSTATED
    subset: tuple[str, ...] | None = None
    claims: Mapping[str, str] | None = None
    served: str | None = None

    @property
    def wants_response(self) -> bool:
        """The caller would send us the response's body too."""
        return self.response_mode not in _NO_BODY


_NO_BODY = (BodyMode.NONE, BodyMode.UNSTATED)


class Malformed(Exception):
    """The bytes are no message of the protocol, or not one whose turn it is."""


class UnknownKind(Malformed):
    """A message of a kind that we do not know, from a version later than ours."""


_parse = ext_proc.ProcessingRequest.FromString
_REQUEST_HEADERS, _REQUEST_BODY = Phase.REQUEST_HEADERS, Phase.REQUEST_BODY  # by the enum each takes ten times as long
_NO_HEADERS: Mapping[str, str] = {}


def read(raw: bytes | list[bytes | memoryview]) -> Received:
    """Decode one ProcessingRequest, perhaps in pieces. Raises Malformed."""
    if isinstance(raw, list):
        return _body_of(raw) or read(b"".join(raw))
    if raw.startswith(_BODY_TAG):
        length = len(raw) - len(_NO_METADATA) if raw.endswith(_NO_METADATA) else len(raw)
        frame, body = _whole_body_frame(length)
        if raw.startswith(frame) and raw.endswith(_END_OF_STREAM, 0, length):
            return Received(_REQUEST_BODY, _NO_HEADERS, raw[body], True)
    elif raw.startswith(_HEADERS_TAG):
        plain = _plain_headers(raw)
        if plain is not None:
            return plain
    return _read_any(raw)


def _read_any(raw: bytes) -> Received:
    try:
        message = _parse(raw)
    except Exception as error:  # upb's DecodeError has no public name of its own
        raise Malformed(f"not a ProcessingRequest: {error}") from error
    phase = _PHASES.get(message.WhichOneof("request") or "", Phase.UNKNOWN)
    received = Received(phase)
    if message.HasField("protocol_config"):
        received.body_mode, received.response_mode = _modes(message)
    if phase is Phase.REQUEST_BODY or phase is Phase.RESPONSE_BODY:
        part = message.request_body if phase is Phase.REQUEST_BODY else message.response_body
        received.body, received.end_of_stream = part.body, part.end_of_stream
    elif phase is Phase.REQUEST_HEADERS:
        sent = message.request_headers
        received.headers = {h.key: str(h.raw_value, "utf-8", "replace") or h.value for h in sent.headers.headers}
        if received.body_mode is BodyMode.UNSTATED:  # NGINX's shim spells names as Go does, Content-Type
            received.headers = {name.lower(): value for name, value in received.headers.items()}
        received.end_of_stream = sent.end_of_stream
        if message.HasField("metadata_context"):
            received.subset, received.claims = _subset(message), _claims(message)
    elif phase is Phase.RESPONSE_HEADERS:
        received.served = _served(message)
    return received


def _modes(message: ext_proc.ProcessingRequest) -> tuple[BodyMode, BodyMode]:
    """That of request bodies and that of response bodies."""
    modes = message.protocol_config
    return (
        _BODY_MODES.get(modes.request_body_mode, BodyMode.UNKNOWN),
        _BODY_MODES.get(modes.response_body_mode, BodyMode.UNKNOWN),
    )


_HEADERS_TAG, _FIELD_1, _FIELD_3, _HEADERS_END_STREAM = b"\x12", 0x0A, 0x1A, b"\x18\x01"
"""ProcessingRequest.request_headers; HttpHeaders.headers, a list's entries and their `key`; `raw_value`."""
_LONGEST_TAIL = 16
"""What is kept is a key made of what came: two modes, an empty field and the end are 12 bytes, longer is none of it."""


def _plain_headers(raw: bytes) -> Received | None:
    """Request headers as our own Envoy sends them, read by hand; None for all others, which upb reads.

    upb makes an object of each header, and that takes three times as long. Here an entry is one of up to 127 bytes, its
    sizes are a byte each, and it has a value that is ASCII; behind the list stand its end, the modes and nothing else.
    """
    try:
        begin, end = _extent(raw, 1)
        begin, list_end = _extent(raw, begin + 1) if raw[begin] == _FIELD_1 else (0, 0)
        headers = _entries(raw[begin:list_end])
    except (IndexError, UnicodeDecodeError):
        return None
    if not list_end <= end <= len(raw) <= list_end + _LONGEST_TAIL:
        return None
    tail = _tail(raw[list_end:], end - list_end)
    return None if tail is None else Received(_REQUEST_HEADERS, headers, b"", *tail)


def _entries(block: bytes) -> dict[str, str]:
    """The headers of a list of them. Raises IndexError or UnicodeDecodeError where it is none, or one not so plain."""
    text = block.decode("ascii")  # with that no size in it has two bytes
    headers, at, length = {}, 0, len(block)
    while at < length:
        begin = at + 6 + block[at + 3]
        end = at + 2 + block[at + 1]
        name = _header_name(block[at + 2 : begin - 1])
        if block[at] != _FIELD_1 or block[begin - 1] != end - begin:
            raise IndexError
        headers[name] = text[begin:end]
        at = end
    if at > length:
        raise IndexError
    return headers


@lru_cache(maxsize=1024)
def _header_name(key: bytes) -> str:
    """The name in the bytes of a header's `key`, with the tag of its value behind it. Raises IndexError for others."""
    if key[0] != _FIELD_1 or key[1] != len(key) - 3 or key[-1] != _FIELD_3:
        raise IndexError
    return key[2:-1].decode()


def _extent(raw: bytes, at: int) -> tuple[int, int]:
    """Where something begins and ends whose size stands there. Raises IndexError for more than 16 KB."""
    size = raw[at]
    if size <= 0x7F:
        return at + 1, at + 1 + size
    if raw[at + 1] > 0x7F:
        raise IndexError
    return at + 2, at + 2 + (size & 0x7F | raw[at + 1] << 7)


@lru_cache(maxsize=64)
def _tail(tail: bytes, of_headers: int) -> tuple[bool, BodyMode, BodyMode] | None:
    """Whether the request has ended, and the modes, in a message that says nothing else behind its list of headers.

    None for another. `of_headers`: so many bytes still belong to them. A gateway says always the same.
    """
    if tail[:of_headers] not in (b"", _HEADERS_END_STREAM):
        return None
    try:
        message = _parse(tail[of_headers:])
    except Exception:  # noqa: BLE001 - as above; and whoever reads all of it says what is wrong
        return None
    if message.metadata_context.ByteSize():
        return None
    message.ClearField("metadata_context")  # Envoy sends it also where there is nothing in it
    if [field.name for field, _ in message.ListFields()] != ["protocol_config"]:
        return None
    return (of_headers > 0, *_modes(message))


_BODY_TAG, _BYTES_TAG, _END_OF_STREAM = b"\x22", b"\x0a", b"\x10\x01"
"""ProcessingRequest.request_body; in it HttpBody.body and `end_of_stream: true`."""
_NO_METADATA = b"\x42\x00"
"""ProcessingRequest.metadata_context with nothing in it, with which Envoy ends every message."""


@lru_cache(maxsize=4096)
def _whole_body_frame(length: int) -> tuple[bytes, slice]:
    """How a message of this length begins that is a whole request body and nothing else, and where the body stands.

    By it such a message is read with one copy of what may be megabytes; upb, which reads all others, makes two.
    """
    outer = _length_that_fills(length - 1)
    inner = _length_that_fills(length - 1 - len(outer) - 1 - len(_END_OF_STREAM))
    frame = _BODY_TAG + outer + _BYTES_TAG + inner
    return (frame, slice(len(frame), length - len(_END_OF_STREAM))) if outer and inner else (_NO_FRAME, slice(0))


_NO_FRAME = b"\0"
"""What no message begins with that is asked about."""


def _body_of(pieces: list[bytes | memoryview]) -> Received | None:
    """A message that is a whole request body and nothing else, joined without what stands around that; None for others.

    Its frame must lie in the first piece, and what ends it in the last.
    """
    first, last, length = pieces[0], pieces[-1], sum(map(len, pieces))
    ending = _END_OF_STREAM + (_NO_METADATA if last[-len(_NO_METADATA) :] == _NO_METADATA else b"")
    frame, _ = _whole_body_frame(length - len(ending) + len(_END_OF_STREAM))
    if len(pieces) == 1 or frame == _NO_FRAME or first[: len(frame)] != frame or last[-len(ending) :] != ending:
        return None
    body = b"".join((memoryview(first)[len(frame) :], *pieces[1:-1], memoryview(last)[: -len(ending)]))
    return Received(_REQUEST_BODY, _NO_HEADERS, body, True)


_SPACES = [(1 << 7 * width) - 1 + width for width in range(1, 6)]
"""The largest that a varint of one byte to five fills with what it counts. A message's length has 32 bits at most."""


def _length_that_fills(space: int) -> bytes:
    """The varint that says how much there is behind it, in a space that both of them fill.

    Nothing where there is none, as where it would take a byte more to say a byte more.
    """
    width = bisect_left(_SPACES, space)  # and one more byte, the last
    length = space - width - 1
    if not 0 <= length <= _SPACES[-1] or (width and not length >> 7 * width):
        return b""
    return bytes([*[length >> 7 * place & 0x7F | 0x80 for place in range(width)], length >> 7 * width])


def _subset(message: ext_proc.ProcessingRequest) -> tuple[str, ...] | None:
    """The endpoint-picker protocol's subset hint: a list of addresses, or one string of them with commas."""
    namespaces = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in namespaces or SUBSET_KEY not in namespaces[SUBSET_NAMESPACE].fields:
        return None
    hint = namespaces[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    texts = [hint.string_value] if hint.HasField("string_value") else [v.string_value for v in hint.list_value.values]
    return tuple(address for text in texts for part in text.split(",") if (address := part.strip()))


def _claims(message: ext_proc.ProcessingRequest) -> dict[str, str] | None:
    """What a token says that the gateway's JWT filter verified; None without one."""
    namespaces = message.metadata_context.filter_metadata
    if JWT_NAMESPACE not in namespaces or JWT_KEY not in namespaces[JWT_NAMESPACE].fields:
        return None
    return dict(_flat(namespaces[JWT_NAMESPACE].fields[JWT_KEY].struct_value, ""))


_EXACT_NUMBER = 2.0**53


def _flat(claims: struct_pb2.Struct, prefix: str) -> Iterator[tuple[str, str]]:
    """Texts and whole numbers by name, those within objects by `object.name`; beyond 2^53 numbers run together."""
    for name, value in claims.fields.items():
        kind = value.WhichOneof("kind")
        if kind == "string_value":
            yield prefix + name, value.string_value
        elif kind == "number_value" and value.number_value.is_integer() and abs(value.number_value) < _EXACT_NUMBER:
            yield prefix + name, str(int(value.number_value))
        elif kind == "struct_value":
            yield from _flat(value.struct_value, f"{prefix}{name}.")


def _served(message: ext_proc.ProcessingRequest) -> str | None:
    """Who answered, where the gateway tells: the endpoint-picker protocol's feedback."""
    namespaces = message.metadata_context.filter_metadata
    if LB_NAMESPACE not in namespaces:
        return None
    fields = namespaces[LB_NAMESPACE].fields
    return fields[SERVED_KEY].string_value or None if SERVED_KEY in fields else None


def _empty_reply(name: str) -> bytes:
    response = ext_proc.ProcessingResponse()
    getattr(response, name).SetInParent()
    return bytes(response.SerializeToString())


CONTINUE: dict[Phase, bytes] = {phase: _empty_reply(name) for name, phase in _PHASES.items()}
"""Per phase the reply that changes nothing."""


def _accept_template(*, keep_response: bool) -> tuple[bytes, bytes]:
    """What stands before and after the request id in the reply to request headers. Ids are all of one length.

    `keep_response`: ask the gateway not to send us the response. Buffered, it would reach the client only when whole.
    """
    placeholder = "0" * 2 * REQUEST_ID_BYTES
    response = ext_proc.ProcessingResponse()
    response.request_headers.SetInParent()
    if keep_response:
        mode = response.mode_override
        mode.request_body_mode = mode.BUFFERED
        mode.response_header_mode = mode.SKIP
        mode.response_body_mode = mode.NONE
        mode.response_trailer_mode = mode.SEND
    response.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields["request_id"].string_value = placeholder
    before, _, after = bytes(response.SerializeToString()).partition(placeholder.encode())
    return before, after


_ACCEPT = {keep: _accept_template(keep_response=keep) for keep in (False, True)}


def accept(request_id: str, *, keep_response: bool) -> bytes:
    """The reply to request headers: go on, remember `request_id` for the access log, perhaps keep the response."""
    before, after = _ACCEPT[keep_response]
    return before + request_id.encode() + after


MOST_CHUNK_BYTES = 60_000
"""Of a body sent back in pieces: below the 64 KB at which Envoy's side stream starts to wait for itself."""


def echo_request(body: bytes, *, end_of_stream: bool) -> list[bytes]:
    """A request body back to a gateway that streams it, in pieces; an empty one counts if it ends the stream."""
    starts = range(0, len(body), MOST_CHUNK_BYTES) or (range(1) if end_of_stream else ())
    last = len(body) - MOST_CHUNK_BYTES
    return [
        _streamed("request_body", body[start : start + MOST_CHUNK_BYTES], end_of_stream and start >= last)
        for start in starts
    ]


def echo_response(body: bytes, *, end_of_stream: bool) -> bytes:
    """One piece of a response body, as it came."""
    return _streamed("response_body", body, end_of_stream)


def _streamed(name: str, body: bytes, end_of_stream: bool) -> bytes:  # noqa: FBT001 - as in the message
    response = ext_proc.ProcessingResponse()
    piece = getattr(response, name).response.body_mutation.streamed_response
    piece.body = body
    piece.end_of_stream = end_of_stream
    return bytes(response.SerializeToString())


def render_route(route: Route, phase: Phase, body: bytes) -> bytes:
    """Encode a route as the answer to a REQUEST_HEADERS or REQUEST_BODY message; `body` is what its splices edit.

    The parts one after the other: protobuf reads messages written in a row as one, lists and maps joined.
    """
    first, all_of_them = route.addresses[0].encode(), ",".join(route.addresses).encode()
    begin, to_header, to_first, to_metadata, end = _places_template(phase, len(first), len(all_of_them))
    terms = _terms_part(phase, route.cluster, route.headers, route.model, route.remove_headers)
    request_id = route.request_id.encode()
    parts = [terms, begin, request_id, to_header, all_of_them, to_first, first, to_metadata, all_of_them, end]
    if route.splices and phase is Phase.REQUEST_BODY:
        parts.append(_body_part(apply(body, route.splices)))
    return b"".join(parts)


def _body_part(body: bytes) -> bytes:
    response = ext_proc.ProcessingResponse()
    common = response.request_body.response
    common.body_mutation.body = body
    _set_header(common, "content-length", str(len(body)))
    return bytes(response.SerializeToString())


@lru_cache(maxsize=4096)
def _terms_part(
    phase: Phase, cluster: str, headers: tuple[tuple[str, str], ...], model: str, remove_headers: tuple[str, ...]
) -> bytes:
    """What requests for one model on the same terms have in common."""
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_route_template(phase, cluster, headers, model))
    _common(response, phase).header_mutation.remove_headers.extend(remove_headers)
    return bytes(response.SerializeToString())


@lru_cache(maxsize=4096)
def _places_template(phase: Phase, first_bytes: int, all_bytes: int) -> tuple[bytes, ...]:
    """What stands around the request id, and around the first endpoint and all of them, where these are so long.

    A part per list of endpoints would be found again only in small fleets: a hundred endpoints make a million lists.
    """
    # each begins with a byte that no length before it ends with: those are below 128
    request_id, first, all_of_them = (
        letter + "x" * (size - len(letter.encode()))
        for letter, size in zip("éèê", (2 * REQUEST_ID_BYTES, first_bytes, all_bytes), strict=True)
    )
    response = ext_proc.ProcessingResponse()
    common = _common(response, phase)
    _set_header(common, REQUEST_ID_HEADER, request_id)
    _set_destination(response, common, first, all_of_them)
    whole, places = response.SerializeToString(), (request_id, all_of_them, first, all_of_them)
    parts = []
    for place in places:
        before, _, whole = whole.partition(place.encode())
        parts.append(before)
    return (*parts, whole)


def _common(response: ext_proc.ProcessingResponse, phase: Phase) -> ext_proc.CommonResponse:
    return (response.request_body if phase is Phase.REQUEST_BODY else response.request_headers).response


def render_streamed_route(route: Route, body: bytes, *, end_of_stream: bool) -> list[bytes]:
    """A route for a gateway that waits with the headers until the body is decided, and takes the body back in pieces.

    Only the answer to the request headers counts there, so the route stands in it. Gateways drop the content-length of
    such bodies themselves.
    """
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_route_template(Phase.REQUEST_HEADERS, route.cluster, route.headers, route.model))
    _set_destination(response, response.request_headers.response, route.addresses[0], ",".join(route.addresses))
    _set_header(response.request_headers.response, REQUEST_ID_HEADER, route.request_id)
    response.request_headers.response.header_mutation.remove_headers.extend(route.remove_headers)
    fields = response.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields
    fields["request_id"].string_value = route.request_id
    edited = apply(body, route.splices) if route.splices else body
    return [bytes(response.SerializeToString()), *echo_request(edited, end_of_stream=end_of_stream)]


def _set_destination(
    response: ext_proc.ProcessingResponse, common: ext_proc.CommonResponse, first: str, destination: str
) -> None:
    """The endpoints, as header and as metadata: gateways read the one or the other, and the two must not differ."""
    _set_header(common, DESTINATION_HEADER, destination)
    _set_header(common, FIRST_CHOICE_HEADER, first)
    metadata = response.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    metadata.fields[DESTINATION_HEADER].string_value = destination


@lru_cache(maxsize=4096)
def _route_template(
    phase: Phase, cluster: str, headers: tuple[tuple[str, str], ...], model: str
) -> ext_proc.ProcessingResponse:
    """What requests for one model on the same terms have in common; some dozens per model, and bounded all the same."""
    response = ext_proc.ProcessingResponse()
    common = _common(response, phase)
    _set_header(common, CLUSTER_HEADER, cluster)
    for name, value in headers:
        _set_header(common, name, value)
    common.clear_route_cache = True
    response.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value.fields["model"].string_value = model
    return response


def _set_header(common: ext_proc.CommonResponse, name: str, value: str) -> None:
    option = common.header_mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode("utf-8", "replace")
    option.append_action = _OVERWRITE


_OVERWRITE = ext_proc.HeaderMutation().set_headers.add().OVERWRITE_IF_EXISTS_OR_ADD


def render_answer(answer: Answer, request_id: str) -> bytes:
    """Encode an answer of our own, to whichever message."""
    response = ext_proc.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = answer.status
    immediate.body = answer.body
    immediate.details = OWN_DETAILS + answer.reason
    for name, value in (*answer.headers, (REQUEST_ID_HEADER, request_id)):
        option = immediate.headers.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = _OVERWRITE
    return bytes(response.SerializeToString())


# -- access log


_UPSTREAM_TYPES = (accesslog_pb2.UpstreamPoolReady, accesslog_pb2.UpstreamPeriodic, accesslog_pb2.UpstreamEnd)
_FINAL_TYPES = (accesslog_pb2.DownstreamEnd, accesslog_pb2.NotSet)
_CLIENT_LEFT = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
"""Flags that mean the client ended it; what happens to the endpoint's connection then is not the endpoint's doing."""
_ENDPOINT_FAILED = frozenset(
    {
        "upstream_connection_failure",
        "upstream_remote_reset",
        "upstream_connection_termination",
        "upstream_protocol_error",
        "upstream_request_timeout",
        "upstream_overflow",
    }
)
"""Flags that mean the endpoint, not the client, broke the attempt."""
_BUFFERED_BYTES = 32 * 1024
"""What a gateway takes from an endpoint though its client reads nothing: no buffer limit that we know of is smaller.

A client that does not read looks like an endpoint that does not write. Only below this it must have been the endpoint;
else any client could have endpoints taken out.
"""


def read_access_log(raw: bytes) -> list[Attempt | Completion | Malformed]:
    """Decode one StreamAccessLogsMessage into what its entries say; one that cannot be read is a Malformed.

    Raises Malformed if nothing of the message can be read.
    """
    try:
        message = als_pb2.StreamAccessLogsMessage.FromString(raw)
    except Exception as error:  # upb's DecodeError has no public name of its own
        raise Malformed(str(error)) from error
    found: list[Attempt | Completion | Malformed] = []
    for entry in message.http_logs.log_entry:
        try:
            said = _entry(entry)
        except Exception as error:  # noqa: BLE001 - one odd entry must not take the others with it
            said = Malformed(str(error))
        if said is not None:
            found.append(said)
    return found


def _entry(entry: accesslog_pb2.HTTPAccessLogEntry) -> Attempt | Completion | Malformed | None:
    common = entry.common_properties
    kind = common.access_log_type
    if kind in _FINAL_TYPES and not common.intermediate_log_entry:
        return _completion(entry, common)
    return _attempt(entry) if kind in _UPSTREAM_TYPES else None


def _attempt(entry: accesslog_pb2.HTTPAccessLogEntry) -> Attempt:
    common = entry.common_properties
    failed = None
    if common.access_log_type == accesslog_pb2.UpstreamEnd:
        failed = _failure(common, _flags(common), entry.response.response_code.value)
        if failed is None:
            # An attempt that ended well says nothing new: where it ran was told when it started.
            return Attempt(_request_id(entry), None, None)
    why = _AS_THE_OTHER_LOG.get(failed, failed) if failed else None
    return Attempt(_request_id(entry), _address(common), why, _attempt_number(entry))


_AS_THE_OTHER_LOG = {"stream_idle_timeout": "upstream_request_timeout"}
"""Envoy has two flags for a try that fell silent, one in each log. Either log may come first; a reason has one name."""


def _attempt_number(entry: accesslog_pb2.HTTPAccessLogEntry) -> int:
    """From the header by which Envoy counts; the field for it is only set at the end of the whole request."""
    number = entry.request.request_headers.get(ATTEMPT_HEADER, "")
    return int(number) if number.isascii() and number.isdecimal() else 1


def _flags(common: accesslog_pb2.AccessLogCommon) -> tuple[str, ...]:
    """The names of the response flags that are set."""
    if not common.HasField("response_flags"):
        return ()
    return tuple([field.name for field, _ in common.response_flags.ListFields()])


def _failure(common: accesslog_pb2.AccessLogCommon, flags: tuple[str, ...], status: int) -> str | None:
    if not flags and status < 500:
        return None  # as most
    failed = None
    for name in flags:
        if name in _CLIENT_LEFT:
            return None
        if name in _ENDPOINT_FAILED or (name in TIMED_OUT and _was_asked(common)):
            failed = name
    if failed in TIMED_OUT and common.upstream_wire_bytes_received > _BUFFERED_BYTES:
        return None
    if failed is not None:
        return failed
    # without an address it is the gateway's own answer, to a request that no endpoint has seen
    return f"status_{status}" if status >= 500 and common.HasField("upstream_remote_address") else None


def _was_asked(common: accesslog_pb2.AccessLogCommon) -> bool:
    """An endpoint had got all of the request, so that it was its turn."""
    return bool(common.HasField("time_to_last_upstream_tx_byte"))


def _completion(entry: accesslog_pb2.HTTPAccessLogEntry, common: accesslog_pb2.AccessLogCommon) -> Completion:
    request, response, flags = entry.request, entry.response, _flags(common)
    status, usage, ttft_s = response.response_code.value, _usage(common), _ttft_s(common)
    odd = ""
    if usage is not None and max(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens or 0) > _MOST_TOKENS:
        usage, odd = None, "usage"
    if ttft_s is not None and ttft_s > _LONGEST_TTFT_S:
        ttft_s, odd = None, "ttft"
    return Completion(
        _request_id(entry),
        _address(common),
        status,
        flags,
        response.response_code_details,
        common.upstream_request_attempt_count,
        _failure(common, flags, status),
        _seconds(common.duration) if common.HasField("duration") else None,
        ttft_s,
        request.request_body_bytes,
        response.response_body_bytes,
        usage,
        request.path[:LONGEST_PATH],
        _upstream_s(common),
        odd,
    )


_MOST_TOKENS = 1 << 31
"""Of one answer. A hundred times what any model takes in; what is beyond it an engine has got wrong, and a pool that
learned from it would not forget it for days."""
_LONGEST_TTFT_S = 1e6


def _request_id(entry: accesslog_pb2.HTTPAccessLogEntry) -> str:
    ours = entry.common_properties.metadata.filter_metadata.get(METADATA_NAMESPACE)
    value = None if ours is None else ours.fields.get("request_id")
    if value is not None:
        request_id: str = value.string_value
        return request_id
    return str(entry.request.request_headers.get(REQUEST_ID_HEADER, ""))


def _address(common: accesslog_pb2.AccessLogCommon) -> str | None:
    socket = common.upstream_remote_address.socket_address
    host = socket.address
    if not host:
        return None
    return f"[{host}]:{socket.port_value}" if ":" in host else f"{host}:{socket.port_value}"


def _seconds(span: duration_pb2.Duration) -> float:
    seconds: float = span.seconds + span.nanos * 1e-9
    return seconds


def _upstream_s(common: accesslog_pb2.AccessLogCommon) -> float | None:
    if not common.HasField("time_to_last_upstream_tx_byte") or not common.HasField("time_to_last_upstream_rx_byte"):
        return None
    took_s = _seconds(common.time_to_last_upstream_rx_byte) - _seconds(common.time_to_last_upstream_tx_byte)
    return None if took_s < 0.0 else took_s


def _ttft_s(common: accesslog_pb2.AccessLogCommon) -> float | None:
    """From our custom tag: Envoy's own time_to_first_upstream_rx_byte is the headers, which vLLM sends at once."""
    value = common.custom_tags.get("ttft_us", "")
    return int(value) * 1e-6 if value.isascii() and value.isdecimal() else None


def _usage_message() -> Any:  # noqa: ANN401 - the class exists only at run time
    """The parts of envoy.data.ai.v3.TokenUsage that we read; xds-protos does not ship the message yet."""
    file = descriptor_pb2.FileDescriptorProto(
        name="pointsman/token_usage.proto",
        package="pointsman",
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name],
    )
    usage, details = file.message_type.add(name="TokenUsage"), file.message_type.add(name="InputDetails")
    count = ".google.protobuf.UInt64Value"
    for message, name, number, type_name in (
        (usage, "input_tokens", 3, count),
        (usage, "output_tokens", 4, count),
        (usage, "input_details", 6, ".pointsman.InputDetails"),
        (details, "cached_tokens", 1, count),
    ):
        field = message.field.add(name=name, number=number, type_name=type_name)
        field.type, field.label = field.TYPE_MESSAGE, field.LABEL_OPTIONAL
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pointsman.TokenUsage"))


_TokenUsage = _usage_message()


def _usage(common: accesslog_pb2.AccessLogCommon) -> Usage | None:
    told = common.metadata.typed_filter_metadata.get(USAGE_NAMESPACE)
    if told is None:
        return None
    usage = _TokenUsage.FromString(told.value)
    cached = usage.input_details.cached_tokens.value if usage.HasField("input_details") else None
    return Usage(usage.input_tokens.value, usage.output_tokens.value, cached)
