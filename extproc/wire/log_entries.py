"""Access-log messages to plain data: what the entries of one say.

An entry has some four dozen fields, of which a dozen are read. They are read from the bytes, stepping over the others;
whatever is unusual in any way upb (xds-protos) reads, the whole message. Compiled (hatch_build.py) that takes 3 us, upb
and its objects take 10, and all of it several times as long where little is in the processor's caches. Interpreted it
takes 36. What is stepped over is not looked into: a fault in there, for which upb would refuse the whole message, takes
nothing from the rest.
"""

from __future__ import annotations

from typing import Any, Final

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

from extproc.flight import LONGEST_PATH, TIMED_OUT, Attempt, Completion, Usage
from extproc.names import ATTEMPT_HEADER, METADATA_NAMESPACE, REQUEST_ID_HEADER, USAGE_NAMESPACE
from extproc.wire.messages import Malformed

_DOWNSTREAM_END: Final = int(accesslog_pb2.DownstreamEnd)
"""Or 0, of those that do not say."""
_UPSTREAM_END: Final = int(accesslog_pb2.UpstreamEnd)
_UPSTREAM_TYPES: Final = (int(accesslog_pb2.UpstreamPoolReady), int(accesslog_pb2.UpstreamPeriodic), _UPSTREAM_END)
_CLIENT_LEFT: Final = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
"""Flags that mean the client ended it; what happens to the endpoint's connection then is not the endpoint's doing."""
_ENDPOINT_FAILED: Final = frozenset(
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
_BUFFERED_BYTES: Final = 32 * 1024
"""What a gateway takes from an endpoint though its client reads nothing: no buffer limit that we know of is smaller.

A client that does not read looks like an endpoint that does not write. Only below this it must have been the endpoint;
else any client could have endpoints taken out.
"""
_MOST_TOKENS: Final = 1 << 31
"""Of one answer. A hundred times what any model takes in; what is beyond it an engine has got wrong, and a pool that
learned from it would not forget it for days."""
_LONGEST_TTFT_S: Final = 1e6
_TTFT_TAG: Final = "ttft_us"


def read_access_log(raw: bytes) -> list[Attempt | Completion | Malformed]:
    """Decode one StreamAccessLogsMessage into what its entries say; one that cannot be read is a Malformed.

    Raises Malformed if nothing of the message can be read.
    """
    try:
        entries = _read_by_hand(raw)
    except (_Unusual, IndexError, UnicodeDecodeError):
        return read_any(raw)
    found: list[Attempt | Completion | Malformed] = []
    for entry in entries:
        _add(found, entry)
    return found


def read_any(raw: bytes) -> list[Attempt | Completion | Malformed]:
    """The same by upb alone."""
    try:
        message = als_pb2.StreamAccessLogsMessage.FromString(raw)
    except Exception as error:  # upb's DecodeError has no public name of its own
        raise Malformed(str(error)) from error
    found: list[Attempt | Completion | Malformed] = []
    for logged in message.http_logs.log_entry:
        try:
            entry = _entry_of(logged)
        except Exception as error:  # noqa: BLE001 - one odd entry must not take the others with it
            found.append(Malformed(str(error)))
        else:
            _add(found, entry)
    return found


class _Entry:
    """What is read of one entry. None is what it does not have; of what is no message, that is as good as nothing."""

    def __init__(self) -> None:
        self.kind: int = 0
        self.intermediate: bool = False
        self.has_address: bool = False
        self.host: str = ""
        self.port: int = 0
        self.flags: tuple[str, ...] = ()
        self.own_id: str | None = None
        self.id_header: str = ""
        self.attempt_header: str = ""
        self.attempts: int = 0
        self.duration_s: float | None = None
        self.asked_s: float | None = None
        """When an endpoint had got all of the request, so that it was its turn."""
        self.answered_s: float | None = None
        self.ttft_tag: str = ""
        """Envoy's own time_to_first_upstream_rx_byte is the headers, which vLLM sends at once."""
        self.bytes_from_endpoint: int = 0
        self.usage: Usage | None = None
        self.path: str = ""
        self.request_bytes: int = 0
        self.has_status: bool = False
        self.status: int = 0
        self.details: str = ""
        self.response_bytes: int = 0


# -- what an entry says


def _add(found: list[Attempt | Completion | Malformed], entry: _Entry) -> None:
    try:
        if _is_final(entry):
            found.append(_completion(entry))
        elif entry.kind in _UPSTREAM_TYPES:
            found.append(_attempt(entry))
    except Exception as error:  # noqa: BLE001 - one odd entry must not take the others with it
        found.append(Malformed(str(error)))


def _is_final(entry: _Entry) -> bool:
    return (entry.kind == _DOWNSTREAM_END or not entry.kind) and not entry.intermediate


def _attempt(entry: _Entry) -> Attempt:
    failed = None
    if entry.kind == _UPSTREAM_END:
        failed = _failure(entry)
        if failed is None:
            # An attempt that ended well says nothing new: where it ran was told when it started.
            return Attempt(_request_id(entry), None, None)
    why = _AS_THE_OTHER_LOG.get(failed, failed) if failed else None
    return Attempt(_request_id(entry), _address(entry), why, _attempt_number(entry.attempt_header))


_AS_THE_OTHER_LOG = {"stream_idle_timeout": "upstream_request_timeout"}
"""Envoy has two flags for a try that fell silent, one in each log. Either log may come first; a reason has one name."""


def _attempt_number(number: str) -> int:
    """From the header by which Envoy counts; the field for it is only set at the end of the whole request."""
    return int(number) if number.isascii() and number.isdecimal() else 1


def _failure(entry: _Entry) -> str | None:
    if not entry.flags and entry.status < 500:
        return None  # as most
    failed = None
    for name in entry.flags:
        if name in _CLIENT_LEFT:
            return None
        if name in _ENDPOINT_FAILED or (name in TIMED_OUT and entry.asked_s is not None):
            failed = name
    if failed in TIMED_OUT and entry.bytes_from_endpoint > _BUFFERED_BYTES:
        return None
    if failed is not None:
        return failed
    # without an address it is the gateway's own answer, to a request that no endpoint has seen
    return f"status_{entry.status}" if entry.status >= 500 and entry.has_address else None


def _completion(entry: _Entry) -> Completion:
    usage, ttft_s, odd = entry.usage, _ttft_s(entry.ttft_tag), ""
    if usage is not None and _is_absurd(usage):
        usage, odd = None, "usage"
    if ttft_s is not None and ttft_s > _LONGEST_TTFT_S:
        ttft_s, odd = None, "ttft"
    return Completion(
        _request_id(entry),
        _address(entry),
        entry.status,
        entry.flags,
        entry.details,
        entry.attempts,
        _failure(entry),
        entry.duration_s,
        ttft_s,
        entry.request_bytes,
        entry.response_bytes,
        usage,
        entry.path[:LONGEST_PATH],
        _upstream_s(entry.asked_s, entry.answered_s),
        odd,
    )


def _is_absurd(usage: Usage) -> bool:
    cached = usage.cached_tokens or 0
    return usage.prompt_tokens > _MOST_TOKENS or usage.completion_tokens > _MOST_TOKENS or cached > _MOST_TOKENS


def _request_id(entry: _Entry) -> str:
    return entry.id_header if entry.own_id is None else entry.own_id


def _address(entry: _Entry) -> str | None:
    host = entry.host
    if not host:
        return None
    return f"[{host}]:{entry.port}" if ":" in host else f"{host}:{entry.port}"


def _upstream_s(asked_s: float | None, answered_s: float | None) -> float | None:
    if asked_s is None or answered_s is None or answered_s < asked_s:
        return None
    return answered_s - asked_s


def _ttft_s(tag: str) -> float | None:
    return int(tag) * 1e-6 if tag.isascii() and tag.isdecimal() else None


# -- by hand: one function per message. Numbers below are tags, a field's number times 8 and how it is written.


class _Unusual(Exception):
    """For upb to read."""


_BYTES: Final = 2
_SMALL: Final = 1 << 31
"""What lies below is the same number in fields of any width."""


def _read_by_hand(raw: bytes) -> list[_Entry]:
    """StreamAccessLogsMessage. Raises _Unusual, IndexError or UnicodeDecodeError for what upb had better read."""
    entries: list[_Entry] = []
    at, end, found = 0, len(raw), False
    while at < end:
        tag = raw[at]
        begin, stop = _extent(raw, at + 1, end)
        if tag == 0x12 and not found:
            found = True
            _read_entries(raw, begin, stop, entries)
        elif tag != 0x0A:
            raise _Unusual
        at = stop
    return entries


def _read_entries(raw: bytes, at: int, end: int, entries: list[_Entry]) -> None:
    while at < end:
        if raw[at] != 0x0A:
            raise _Unusual
        begin, stop = _extent(raw, at + 1, end)
        entry = _Entry()
        _read_entry(raw, begin, stop, entry)
        entries.append(entry)
        at = stop


def _read_entry(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """HTTPAccessLogEntry. Its parts may come again: what must not come in two pieces is seen to further down."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 0x0A:
            begin, at = _extent(raw, after, end)
            _read_common(raw, begin, at, entry)
        elif tag == 0x1A:
            begin, at = _extent(raw, after, end)
            _read_request(raw, begin, at, entry)
        elif tag == 0x22:
            begin, at = _extent(raw, after, end)
            _read_response(raw, begin, at, entry)
        else:
            at = _past(raw, tag, after, end)


def _read_common(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """AccessLogCommon."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag & 7 == _BYTES:
            begin, at = _extent(raw, after, end)
            _read_part(raw, tag, begin, at, entry)
        else:
            at = _read_figure(raw, tag, after, end, entry)
    if at > end:
        raise _Unusual


def _read_part(raw: bytes, tag: int, at: int, end: int, entry: _Entry) -> None:
    if tag == 186:  # duration
        entry.duration_s = _seconds(raw, at, end, entry.duration_s)
    elif tag == 66:  # time_to_last_upstream_tx_byte
        entry.asked_s = _seconds(raw, at, end, entry.asked_s)
    elif tag == 82:  # time_to_last_upstream_rx_byte
        entry.answered_s = _seconds(raw, at, end, entry.answered_s)
    elif tag == 106:  # upstream_remote_address
        _read_address(raw, at, end, entry)
    elif tag == 138:  # metadata
        _read_metadata(raw, at, end, entry)
    elif tag == 178:  # custom_tags
        value = _map_value(raw, at, end, _TTFT_KEY)
        if value >= 0:
            entry.ttft_tag = raw[value:end].decode("utf-8")
    elif tag == 130:  # response_flags
        _read_flags(raw, at, end, entry)


def _read_figure(raw: bytes, tag: int, at: int, end: int, entry: _Entry) -> int:
    """Where it ends."""
    if tag == 264:  # access_log_type
        entry.kind, at = _small(raw, at)
    elif tag == 192:  # upstream_request_attempt_count
        entry.attempts, at = _small(raw, at)
    elif tag == 256:  # upstream_wire_bytes_received
        entry.bytes_from_endpoint, at = _varint(raw, at)
    elif tag == 216:  # intermediate_log_entry
        number, at = _small(raw, at)
        entry.intermediate = number != 0
    else:
        at = _past(raw, tag, at, end)
    return at


def _read_request(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """HTTPRequestProperties."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 106:  # request_headers
            begin, at = _extent(raw, after, end)
            value = _map_value(raw, begin, at, _ID_HEADER_KEY)
            if value >= 0:
                entry.id_header = raw[value:at].decode("utf-8")
            else:
                value = _map_value(raw, begin, at, _ATTEMPT_HEADER_KEY)
                if value >= 0:
                    entry.attempt_header = raw[value:at].decode("utf-8")
        elif tag == 42:  # path
            begin, at = _extent(raw, after, end)
            entry.path = raw[begin:at].decode("utf-8")
        elif tag == 96:  # request_body_bytes
            entry.request_bytes, at = _varint(raw, after)
        else:
            at = _past(raw, tag, after, end)
    if at > end:
        raise _Unusual


def _read_response(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """HTTPResponseProperties."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 10:  # response_code
            begin, at = _extent(raw, after, end)
            if entry.has_status:
                raise _Unusual
            entry.has_status, entry.status = True, _wrapped(raw, begin, at)
            if entry.status >= _SMALL:
                raise _Unusual
        elif tag == 50:  # response_code_details
            begin, at = _extent(raw, after, end)
            entry.details = raw[begin:at].decode("utf-8")
        elif tag == 24:  # response_body_bytes
            entry.response_bytes, at = _varint(raw, after)
        else:
            at = _past(raw, tag, after, end)
    if at > end:
        raise _Unusual


def _read_flags(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """ResponseFlags, as far as they are bits; in the order of their numbers, as whoever lists them has them."""
    if entry.flags:
        raise _Unusual
    names: list[str] = []
    last = 0
    while at < end:
        tag, at = _varint(raw, at)
        number, at = _small(raw, at)
        name = _FLAGS.get(tag)
        if name is None or tag <= last or number != 1:
            raise _Unusual
        last = tag
        names.append(name)
    if at > end:
        raise _Unusual
    entry.flags = tuple(names)


_FLAGS: Final[dict[int, str]] = {
    field.number << 3: field.name
    for field in accesslog_pb2.ResponseFlags.DESCRIPTOR.fields
    if field.type == field.TYPE_BOOL
}


def _read_address(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """Address with a SocketAddress in it, and nothing else."""
    if entry.has_address or raw[at] != 0x0A:
        raise _Unusual
    entry.has_address = True
    at, stop = _extent(raw, at + 1, end)
    while at < stop:
        tag = raw[at]
        if tag == 0x12:
            begin, at = _extent(raw, at + 1, stop)
            entry.host = raw[begin:at].decode("utf-8")
        elif tag == 0x18:
            entry.port, at = _small(raw, at + 1)
        elif tag == 0x08:
            _, at = _small(raw, at + 1)
        else:
            raise _Unusual
    if at != end:
        raise _Unusual


def _read_metadata(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """Metadata: filter_metadata, whose values are Structs, and typed_filter_metadata, whose values are Anys."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 0x0A:
            begin, at = _extent(raw, after, end)
            value = _map_value(raw, begin, at, _METADATA_KEY)
            if value >= 0:
                entry.own_id = None
                _read_struct(raw, value, at, entry)
        elif tag == 0x12:
            begin, at = _extent(raw, after, end)
            value = _map_value(raw, begin, at, _USAGE_KEY)
            if value >= 0:
                entry.usage = _usage_in(raw, value, at)
        else:
            at = _past(raw, tag, after, end)


def _read_struct(raw: bytes, at: int, end: int, entry: _Entry) -> None:
    """The field that is our request id, a Value that is a string."""
    while at < end:
        if raw[at] != 0x0A:
            raise _Unusual
        begin, at = _extent(raw, at + 1, end)
        value = _map_value(raw, begin, at, _REQUEST_ID_KEY)
        if value >= 0:
            if value >= at or raw[value] != 0x1A:
                raise _Unusual
            text, stop = _extent(raw, value + 1, at)
            if stop != at:
                raise _Unusual
            entry.own_id = raw[text:at].decode("utf-8")


def _usage_in(raw: bytes, at: int, end: int) -> Usage:
    """An Any with envoy.data.ai.v3.TokenUsage in it."""
    found = stop = 0
    while at < end:
        tag, after = _varint(raw, at)
        begin, at = _extent(raw, after, end)
        if tag == 0x12 and not found:
            found, stop = begin, at
        elif tag != 0x0A:
            raise _Unusual
    prompt = completion = cached = -1
    at = found
    while at < stop:
        tag, after = _varint(raw, at)
        if tag == 0x1A and prompt < 0:
            begin, at = _extent(raw, after, stop)
            prompt = _wrapped(raw, begin, at)
        elif tag == 0x22 and completion < 0:
            begin, at = _extent(raw, after, stop)
            completion = _wrapped(raw, begin, at)
        elif tag == 0x32 and cached < 0:
            begin, at = _extent(raw, after, stop)
            cached = _cached_in(raw, begin, at)
        elif tag in (0x1A, 0x22, 0x32):
            raise _Unusual
        else:
            at = _past(raw, tag, after, stop)
    return Usage(max(prompt, 0), max(completion, 0), cached if cached >= 0 else None)


def _cached_in(raw: bytes, at: int, end: int) -> int:
    """TokenUsage's InputDetails."""
    cached = -1
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 0x0A:
            begin, at = _extent(raw, after, end)
            if cached >= 0:
                raise _Unusual
            cached = _wrapped(raw, begin, at)
        else:
            at = _past(raw, tag, after, end)
    return max(cached, 0)


def _wrapped(raw: bytes, at: int, end: int) -> int:
    """The number in a UInt32Value or UInt64Value."""
    if at == end:
        return 0
    if raw[at] != 0x08:
        raise _Unusual
    number, at = _varint(raw, at + 1)
    if at != end:
        raise _Unusual
    return number


def _seconds(raw: bytes, at: int, end: int, before: float | None) -> float:
    """A Duration that has not come before."""
    seconds = nanos = 0
    if before is not None:
        raise _Unusual
    while at < end:
        tag = raw[at]
        if tag == 0x08:
            seconds, at = _varint(raw, at + 1)
        elif tag == 0x10:
            nanos, at = _small(raw, at + 1)
        else:
            raise _Unusual
    if at != end:
        raise _Unusual
    return seconds + nanos * 1e-9


def _key(name: str) -> bytes:
    """How a map's entry of that key begins, up to the size of its value, which is no number."""
    return bytes((0x0A, len(name))) + name.encode() + b"\x12"


_TTFT_KEY: Final = _key(_TTFT_TAG)
_ID_HEADER_KEY: Final = _key(REQUEST_ID_HEADER)
_ATTEMPT_HEADER_KEY: Final = _key(ATTEMPT_HEADER)
_METADATA_KEY: Final = _key(METADATA_NAMESPACE)
_USAGE_KEY: Final = _key(USAGE_NAMESPACE)
_REQUEST_ID_KEY: Final = _key("request_id")


def _map_value(raw: bytes, at: int, end: int, key: bytes) -> int:
    """Where the value begins in a map's entry of this key; it fills the rest. -1 where the key is another."""
    if raw[at] != 0x0A or raw[at + 1] >= 0x80:
        raise _Unusual  # nor is a key of that length one of ours, but who knows what it hides
    size = len(key)
    if raw[at + 1] != size - 3:
        return _other(raw, at, end)
    for place in range(2, size - 1):
        if raw[at + place] != key[place]:
            return _other(raw, at, end)
    if raw[at + size - 1] != 0x12:
        raise _Unusual
    begin, stop = _extent(raw, at + size, end)
    if stop != end:
        raise _Unusual
    return begin


def _other(raw: bytes, at: int, end: int) -> int:
    """-1 for an entry of another key and its value: else the key may come again behind it, as one of ours."""
    _, at = _extent(raw, at + 1, end)
    if at >= end or raw[at] != 0x12:
        raise _Unusual
    _, at = _extent(raw, at + 1, end)
    if at != end:
        raise _Unusual
    return -1


def _past(raw: bytes, tag: int, at: int, end: int) -> int:
    """Where a field ends whose tag has been read."""
    if tag < 8:
        raise _Unusual
    written = tag & 7
    if written == _BYTES:
        _, at = _extent(raw, at, end)
    elif written == 0:
        _, at = _varint(raw, at)
    elif written == 1:
        at += 8
    elif written == 5:
        at += 4
    else:
        raise _Unusual
    if at > end:
        raise _Unusual
    return at


def _extent(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Where something begins and ends whose size stands there, and that lies before `end`."""
    size = raw[at]
    at += 1
    if size > 0x7F:
        size, at = _varint(raw, at - 1)
    if at + size > end:
        raise _Unusual
    return at, at + size


def _small(raw: bytes, at: int) -> tuple[int, int]:
    """A number that is the same whatever the width of its field, and where it ends."""
    number, at = _varint(raw, at)
    if number >= _SMALL:
        raise _Unusual
    return number, at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number of up to nine bytes, and where it ends."""
    number = raw[at]
    at += 1
    if number <= 0x7F:
        return number, at
    number &= 0x7F
    shift = 7
    while shift < 63:
        more = raw[at]
        at += 1
        number |= (more & 0x7F) << shift
        if more <= 0x7F:
            return number, at
        shift += 7
    raise _Unusual


# -- by upb


def _entry_of(logged: accesslog_pb2.HTTPAccessLogEntry) -> _Entry:
    entry = _Entry()
    common, request, response = logged.common_properties, logged.request, logged.response
    entry.kind, entry.intermediate = common.access_log_type, common.intermediate_log_entry
    entry.flags = tuple([field.name for field, _ in common.response_flags.ListFields()])
    entry.has_address = common.HasField("upstream_remote_address")
    socket = common.upstream_remote_address.socket_address
    entry.host, entry.port = socket.address, socket.port_value
    ours = common.metadata.filter_metadata.get(METADATA_NAMESPACE)
    value = None if ours is None else ours.fields.get("request_id")
    entry.own_id = None if value is None else value.string_value
    entry.id_header = request.request_headers.get(REQUEST_ID_HEADER, "")
    entry.attempt_header = request.request_headers.get(ATTEMPT_HEADER, "")
    entry.attempts = common.upstream_request_attempt_count
    entry.duration_s = _span(common, "duration")
    entry.asked_s = _span(common, "time_to_last_upstream_tx_byte")
    entry.answered_s = _span(common, "time_to_last_upstream_rx_byte")
    entry.ttft_tag = common.custom_tags.get(_TTFT_TAG, "")
    entry.bytes_from_endpoint = common.upstream_wire_bytes_received
    entry.usage = _usage(common) if _is_final(entry) else None
    entry.path, entry.request_bytes = request.path, request.request_body_bytes
    entry.status, entry.details = response.response_code.value, response.response_code_details
    entry.response_bytes = response.response_body_bytes
    return entry


def _span(common: accesslog_pb2.AccessLogCommon, name: str) -> float | None:
    if not common.HasField(name):
        return None
    span = getattr(common, name)
    seconds: float = span.seconds + span.nanos * 1e-9
    return seconds


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
