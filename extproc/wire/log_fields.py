"""The fields of access-log entries that are read, from a message's bytes, stepping over all others.

One function per message. Whatever is unusual in any way is not read here: log_entries.py then has upb read the whole
message, which takes three times as long, and ten times where little is in the processor's caches. Not here: what the
fields say of a request.
"""

from __future__ import annotations

from typing import Final

from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.flight import Usage
from extproc.names import ATTEMPT_HEADER, METADATA_NAMESPACE, REQUEST_ID_HEADER, USAGE_NAMESPACE

TTFT_TAG: Final = "ttft_us"
"""The custom tag of our configuration that tells when an answer's first byte came."""


class LogFields:
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


class Unusual(Exception):
    """For upb to read."""


# Numbers below are tags, a field's number times 8 and how it is written.

_BYTES: Final = 2
_SMALL: Final = 1 << 31
"""What lies below is the same number in fields of any width."""


def read_fields(raw: bytes) -> list[LogFields]:
    """StreamAccessLogsMessage. Raises Unusual, IndexError or UnicodeDecodeError for what upb had better read."""
    entries: list[LogFields] = []
    at, end, found = 0, len(raw), False
    while at < end:
        tag = raw[at]
        begin, stop = _extent(raw, at + 1, end)
        if tag == 0x12 and not found:
            found = True
            _read_entries(raw, begin, stop, entries)
        elif tag != 0x0A:
            raise Unusual
        at = stop
    return entries


def _read_entries(raw: bytes, at: int, end: int, entries: list[LogFields]) -> None:
    while at < end:
        if raw[at] != 0x0A:
            raise Unusual
        begin, stop = _extent(raw, at + 1, end)
        entry = LogFields()
        _read_entry(raw, begin, stop, entry)
        entries.append(entry)
        at = stop


def _read_entry(raw: bytes, at: int, end: int, entry: LogFields) -> None:
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


def _read_common(raw: bytes, at: int, end: int, entry: LogFields) -> None:
    """AccessLogCommon."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag & 7 == _BYTES:
            begin, at = _extent(raw, after, end)
            _read_part(raw, tag, begin, at, entry)
        else:
            at = _read_figure(raw, tag, after, end, entry)
    if at > end:
        raise Unusual


def _read_part(raw: bytes, tag: int, at: int, end: int, entry: LogFields) -> None:
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


def _read_figure(raw: bytes, tag: int, at: int, end: int, entry: LogFields) -> int:
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


def _read_request(raw: bytes, at: int, end: int, entry: LogFields) -> None:
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
        raise Unusual


def _read_response(raw: bytes, at: int, end: int, entry: LogFields) -> None:
    """HTTPResponseProperties."""
    while at < end:
        tag, after = _varint(raw, at)
        if tag == 10:  # response_code
            begin, at = _extent(raw, after, end)
            if entry.has_status:
                raise Unusual
            entry.has_status, entry.status = True, _wrapped(raw, begin, at)
            if entry.status >= _SMALL:
                raise Unusual
        elif tag == 50:  # response_code_details
            begin, at = _extent(raw, after, end)
            entry.details = raw[begin:at].decode("utf-8")
        elif tag == 24:  # response_body_bytes
            entry.response_bytes, at = _varint(raw, after)
        else:
            at = _past(raw, tag, after, end)
    if at > end:
        raise Unusual


def _read_flags(raw: bytes, at: int, end: int, entry: LogFields) -> None:
    """ResponseFlags, as far as they are bits; in the order of their numbers, as whoever lists them has them."""
    if entry.flags:
        raise Unusual
    names: list[str] = []
    last = 0
    while at < end:
        tag, at = _varint(raw, at)
        number, at = _small(raw, at)
        name = _FLAGS.get(tag)
        if name is None or tag <= last or number != 1:
            raise Unusual
        last = tag
        names.append(name)
    if at > end:
        raise Unusual
    entry.flags = tuple(names)


_FLAGS: Final[dict[int, str]] = {
    field.number << 3: field.name
    for field in accesslog_pb2.ResponseFlags.DESCRIPTOR.fields
    if field.type == field.TYPE_BOOL
}


def _read_address(raw: bytes, at: int, end: int, entry: LogFields) -> None:
    """Address with a SocketAddress in it, and nothing else."""
    if entry.has_address or raw[at] != 0x0A:
        raise Unusual
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
            raise Unusual
    if at != end:
        raise Unusual


def _read_metadata(raw: bytes, at: int, end: int, entry: LogFields) -> None:
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


def _read_struct(raw: bytes, at: int, end: int, entry: LogFields) -> None:
    """The field that is our request id, a Value that is a string."""
    while at < end:
        if raw[at] != 0x0A:
            raise Unusual
        begin, at = _extent(raw, at + 1, end)
        value = _map_value(raw, begin, at, _REQUEST_ID_KEY)
        if value >= 0:
            if value >= at or raw[value] != 0x1A:
                raise Unusual
            text, stop = _extent(raw, value + 1, at)
            if stop != at:
                raise Unusual
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
            raise Unusual
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
            raise Unusual
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
                raise Unusual
            cached = _wrapped(raw, begin, at)
        else:
            at = _past(raw, tag, after, end)
    return max(cached, 0)


def _wrapped(raw: bytes, at: int, end: int) -> int:
    """The number in a UInt32Value or UInt64Value."""
    if at == end:
        return 0
    if raw[at] != 0x08:
        raise Unusual
    number, at = _varint(raw, at + 1)
    if at != end:
        raise Unusual
    return number


def _seconds(raw: bytes, at: int, end: int, before: float | None) -> float:
    """A Duration that has not come before."""
    seconds = nanos = 0
    if before is not None:
        raise Unusual
    while at < end:
        tag = raw[at]
        if tag == 0x08:
            seconds, at = _varint(raw, at + 1)
        elif tag == 0x10:
            nanos, at = _small(raw, at + 1)
        else:
            raise Unusual
    if at != end:
        raise Unusual
    return seconds + nanos * 1e-9


def _key(name: str) -> bytes:
    """How a map's entry of that key begins, up to the size of its value, which is no number."""
    return bytes((0x0A, len(name))) + name.encode() + b"\x12"


_TTFT_KEY: Final = _key(TTFT_TAG)
_ID_HEADER_KEY: Final = _key(REQUEST_ID_HEADER)
_ATTEMPT_HEADER_KEY: Final = _key(ATTEMPT_HEADER)
_METADATA_KEY: Final = _key(METADATA_NAMESPACE)
_USAGE_KEY: Final = _key(USAGE_NAMESPACE)
_REQUEST_ID_KEY: Final = _key("request_id")


def _map_value(raw: bytes, at: int, end: int, key: bytes) -> int:
    """Where the value begins in a map's entry of this key; it fills the rest. -1 where the key is another."""
    if raw[at] != 0x0A or raw[at + 1] >= 0x80:
        raise Unusual  # nor is a key of that length one of ours, but who knows what it hides
    size = len(key)
    if raw[at + 1] != size - 3:
        return _other(raw, at, end)
    for place in range(2, size - 1):
        if raw[at + place] != key[place]:
            return _other(raw, at, end)
    if raw[at + size - 1] != 0x12:
        raise Unusual
    begin, stop = _extent(raw, at + size, end)
    if stop != end:
        raise Unusual
    return begin


def _other(raw: bytes, at: int, end: int) -> int:
    """-1 for an entry of another key and its value: else the key may come again behind it, as one of ours."""
    _, at = _extent(raw, at + 1, end)
    if at >= end or raw[at] != 0x12:
        raise Unusual
    _, at = _extent(raw, at + 1, end)
    if at != end:
        raise Unusual
    return -1


def _past(raw: bytes, tag: int, at: int, end: int) -> int:
    """Where a field ends whose tag has been read."""
    if tag < 8:
        raise Unusual
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
        raise Unusual
    if at > end:
        raise Unusual
    return at


def _extent(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Where something begins and ends whose size stands there, and that lies before `end`."""
    size = raw[at]
    at += 1
    if size > 0x7F:
        size, at = _varint(raw, at - 1)
    if at + size > end:
        raise Unusual
    return at, at + size


def _small(raw: bytes, at: int) -> tuple[int, int]:
    """A number that is the same whatever the width of its field, and where it ends."""
    number, at = _varint(raw, at)
    if number >= _SMALL:
        raise Unusual
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
    raise Unusual
