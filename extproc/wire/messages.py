"""The only module that knows ext_proc's protobuf: its messages to plain data and back.

What our own Envoy sends of every request is read from its bytes, plain headers and whole bodies, and all that is in any
way unusual by upb (xds-protos), whose objects cost 1 to 3 us each; envoy-data-plane's are pleasant and cost 300 us.
Replies are joined from parts that upb has written once. The hand reads what upb would read, or leaves it to upb: tests
compare the two.

Not here: access-log messages (log_entries.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import struct_pb2

from extproc.flight import REQUEST_ID_BYTES
from extproc.names import (
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


# by the enum each takes ten times as long
_REQUEST_HEADERS: Final = Phase.REQUEST_HEADERS
_REQUEST_BODY: Final = Phase.REQUEST_BODY
_NONE: Final = BodyMode.NONE
_UNSTATED: Final = BodyMode.UNSTATED
NO_HEADERS: Final[dict[str, str]] = {}


@dataclass(init=False)
class Received:
    """One message from a gateway; what its phase does not carry is empty.

    With the first message of a stream, whatever its phase: `body_mode` and `response_mode`. With REQUEST_HEADERS:
    `subset`, the addresses the endpoint must be one of; `claims` of a token that the gateway verified. With
    RESPONSE_HEADERS: `served`, who answered.
    """

    phase: Phase
    headers: dict[str, str]
    body: bytes
    end_of_stream: bool
    body_mode: BodyMode
    response_mode: BodyMode
    subset: tuple[str, ...] | None
    claims: dict[str, str] | None
    served: str | None

    def __init__(
        self,
        phase: Phase,
        headers: dict[str, str] = NO_HEADERS,
        body: bytes = b"",
        *,
        end_of_stream: bool = False,
        body_mode: BodyMode = _UNSTATED,
        response_mode: BodyMode = _UNSTATED,
    ) -> None:
        self.phase = phase
        self.headers = headers
        self.body = body
        self.end_of_stream = end_of_stream
        self.body_mode = body_mode
        self.response_mode = response_mode
        self.subset = None
        self.claims = None
        self.served = None

    @property
    def wants_response(self) -> bool:
        """The caller would send us the response's body too."""
        return self.response_mode is not _NONE and self.response_mode is not _UNSTATED


class Malformed(Exception):
    """The bytes are no message of the protocol, or not one whose turn it is."""


class UnknownKind(Malformed):
    """A message of a kind that we do not know, from a version later than ours."""


_parse = ext_proc.ProcessingRequest.FromString


def read(raw: bytes | list[bytes | memoryview]) -> Received:
    """Decode one ProcessingRequest, perhaps in pieces. Raises Malformed."""
    if isinstance(raw, list):
        return _body_of(raw) or read_whole(b"".join(raw))
    return read_whole(raw)


def read_whole(raw: bytes) -> Received:
    """The same of one that came in one piece."""
    if raw:
        if raw[0] == _BODY_TAG:
            ending = _ending(raw)
            begin = _body_begins(raw, len(raw), ending)
            if begin:
                return Received(_REQUEST_BODY, NO_HEADERS, raw[begin : len(raw) - ending], end_of_stream=True)
        elif raw[0] == _HEADERS_TAG:
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


_HEADERS_TAG: Final = 0x12
"""ProcessingRequest.request_headers; in it HttpHeaders.headers, a list."""
_FIELD_1: Final = 0x0A
"""That, the list's entries, and their `key`."""
_RAW_VALUE: Final = 0x1A
"""Theirs."""
_HEADERS_END_STREAM: Final = b"\x18\x01"
_LONGEST_TAIL: Final = 16
"""What is kept is a key made of what came: two modes, an empty field and the end are 12 bytes, longer is none of it."""


def _plain_headers(raw: bytes) -> Received | None:
    """Request headers as our own Envoy sends them, read by hand; None for all others, which upb reads.

    upb makes an object of each header, and that takes many times as long. Here each has a name and a value that are
    ASCII, and of up to 16 KB; behind the list stand its end, the modes and nothing else.
    """
    try:
        at, end = _extent(raw, 1)
        if raw[at] != _FIELD_1:
            return None
        at, list_end = _extent(raw, at + 1)
        if not list_end <= end <= len(raw) <= list_end + _LONGEST_TAIL:
            return None
        headers = _entries(raw, at, list_end)
    except IndexError:
        return None
    tail = _tail(raw[list_end:], end - list_end)
    if headers is None or tail is None:
        return None
    ends, body_mode, response_mode = tail
    return Received(
        _REQUEST_HEADERS, headers, b"", end_of_stream=ends, body_mode=body_mode, response_mode=response_mode
    )


def _entries(raw: bytes, at: int, end: int) -> dict[str, str] | None:
    """The headers of a list of them; None where it is none, or one not so plain. Or raises IndexError."""
    headers: dict[str, str] = {}
    # One decoding for all of it; only sizes beyond 127 are not ASCII, and each value is asked where there are any
    text = raw[at:end].decode("latin-1")
    plain, base = text.isascii(), at
    while at < end:
        if raw[at] != _FIELD_1:
            return None
        at, stop = _extent(raw, at + 1)
        if raw[at] != _FIELD_1:
            return None
        begin, name_end = _extent(raw, at + 1)
        if name_end == stop:
            value = ""
        elif name_end < stop and raw[name_end] == _RAW_VALUE:
            at, value_end = _extent(raw, name_end + 1)
            if value_end != stop:
                return None
            value = text[at - base : stop - base]
        else:
            return None
        name = text[begin - base : name_end - base]
        if not plain and not (name.isascii() and value.isascii()):
            return None
        headers[name] = value
        at = stop
    return headers if at == end else None


def _extent(raw: bytes, at: int) -> tuple[int, int]:
    """Where something begins and ends whose size stands there. Raises IndexError for more than 16 KB."""
    size = raw[at]
    if size <= 0x7F:
        return at + 1, at + 1 + size
    more = raw[at + 1]
    if more > 0x7F:
        raise IndexError
    return at + 2, at + 2 + (size & 0x7F | more << 7)


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


_BODY_TAG: Final = 0x22
"""ProcessingRequest.request_body; in it HttpBody.body, FIELD_1, and `end_of_stream: true`."""
_END_OF_STREAM: Final = b"\x10\x01"
_NO_METADATA: Final = b"\x42\x00"
"""ProcessingRequest.metadata_context with nothing in it, with which Envoy ends every message."""
_ENDS_PLAIN: Final = len(_END_OF_STREAM)
_ENDS_WITH_METADATA: Final = len(_END_OF_STREAM + _NO_METADATA)
_LONGEST_FRAME: Final = 12
"""Two tags and two sizes of five bytes."""


def _ending(last: bytes) -> int:
    """How many bytes stand behind the body in a message that is a whole request body; 0 in others."""
    if last.endswith(_NO_METADATA):
        return _ENDS_WITH_METADATA if last.endswith(_END_OF_STREAM + _NO_METADATA) else 0
    return _ENDS_PLAIN if last.endswith(_END_OF_STREAM) else 0


def _body_begins(first: bytes, length: int, ending: int) -> int:
    """Where the body begins in a message of so many bytes that is a whole request body and nothing else; 0 in others.

    `first`: how it begins. By this it is read with one copy of what may be megabytes; upb makes two.
    """
    if not ending or len(first) < _ENDS_PLAIN or first[0] != _BODY_TAG:
        return 0
    at, size = _size(first, 1)
    if not at or at + size != length - ending + _ENDS_PLAIN or at >= len(first) or first[at] != _FIELD_1:
        return 0
    at, size = _size(first, at + 1)
    return at if at and at + size == length - ending else 0


def _size(raw: bytes, at: int) -> tuple[int, int]:
    """Where something begins whose size stands there, and that; 0 where it is not all there, or longer than need be."""
    size = shift = 0
    while at < len(raw) and shift < 35:
        more = raw[at]
        at += 1
        size |= (more & 0x7F) << shift
        if more <= 0x7F:
            return (at, size) if more or not shift else (0, 0)
        shift += 7
    return 0, 0


def _body_of(pieces: list[bytes | memoryview]) -> Received | None:
    """A message that is a whole request body and nothing else, joined without what stands around that; None for others.

    Its frame must lie in the first piece, and what ends it in the last.
    """
    if len(pieces) < 2:
        return None
    length = 0
    for piece in pieces:
        length += len(piece)
    first, last = memoryview(pieces[0]), memoryview(pieces[-1])
    ending = _ending(bytes(last[-_ENDS_WITH_METADATA:]))
    begin = _body_begins(bytes(first[:_LONGEST_FRAME]), length, ending)
    if not begin:
        return None
    body = b"".join([first[begin:], *pieces[1:-1], last[: len(last) - ending]])
    return Received(_REQUEST_BODY, NO_HEADERS, body, end_of_stream=True)


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


_ACCEPT: Final = _accept_template(keep_response=False)
_ACCEPT_AND_KEEP: Final = _accept_template(keep_response=True)


def accept(request_id: str, *, keep_response: bool) -> bytes:
    """The reply to request headers: go on, remember `request_id` for the access log, perhaps keep the response."""
    before, after = _ACCEPT_AND_KEEP if keep_response else _ACCEPT
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
    addresses, with_body = route.addresses, phase is _REQUEST_BODY
    first = addresses[0].encode()
    all_of_them = first if len(addresses) == 1 else ",".join(addresses).encode()
    begin, to_header, to_first, to_metadata, end = _places_template(with_body, len(first), len(all_of_them))
    terms = _terms_part(with_body, route.cluster, route.headers, route.model, route.remove_headers)
    request_id = route.request_id.encode()
    parts = [terms, begin, request_id, to_header, all_of_them, to_first, first, to_metadata, all_of_them, end]
    if route.splices and with_body:
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
    with_body: bool,  # noqa: FBT001 - of a key that every request makes: to hash a Phase takes longer than all the rest
    cluster: str,
    headers: tuple[tuple[str, str], ...],
    model: str,
    remove_headers: tuple[str, ...],
) -> bytes:
    """What requests for one model on the same terms have in common."""
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_route_template(with_body, cluster, headers, model))
    _common(response, with_body).header_mutation.remove_headers.extend(remove_headers)
    return bytes(response.SerializeToString())


@lru_cache(maxsize=4096)
def _places_template(
    with_body: bool,  # noqa: FBT001 - as above
    first_bytes: int,
    all_bytes: int,
) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """What stands around the request id, and around the first endpoint and all of them, where these are so long.

    A part per list of endpoints would be found again only in small fleets: a hundred endpoints make a million lists.
    """
    # each begins with a byte that no length before it ends with: those are below 128
    request_id, first, all_of_them = (
        letter + "x" * (size - len(letter.encode()))
        for letter, size in zip("éèê", (2 * REQUEST_ID_BYTES, first_bytes, all_bytes), strict=True)
    )
    response = ext_proc.ProcessingResponse()
    common = _common(response, with_body)
    _set_header(common, REQUEST_ID_HEADER, request_id)
    _set_destination(response, common, first, all_of_them)
    begin, _, rest = bytes(response.SerializeToString()).partition(request_id.encode())
    to_header, _, rest = rest.partition(all_of_them.encode())
    to_first, _, rest = rest.partition(first.encode())
    to_metadata, _, end = rest.partition(all_of_them.encode())
    return begin, to_header, to_first, to_metadata, end


def _common(
    response: ext_proc.ProcessingResponse,
    with_body: bool,  # noqa: FBT001 - as above
) -> ext_proc.CommonResponse:
    return (response.request_body if with_body else response.request_headers).response


def render_streamed_route(route: Route, body: bytes, *, end_of_stream: bool) -> list[bytes]:
    """A route for a gateway that waits with the headers until the body is decided, and takes the body back in pieces.

    Only the answer to the request headers counts there, so the route stands in it. Gateways drop the content-length of
    such bodies themselves.
    """
    response = ext_proc.ProcessingResponse()
    response.CopyFrom(_route_template(False, route.cluster, route.headers, route.model))
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
    with_body: bool,  # noqa: FBT001 - as above
    cluster: str,
    headers: tuple[tuple[str, str], ...],
    model: str,
) -> ext_proc.ProcessingResponse:
    """What requests for one model on the same terms have in common; some dozens per model, and bounded all the same."""
    response = ext_proc.ProcessingResponse()
    common = _common(response, with_body)
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
