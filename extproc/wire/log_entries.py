"""Access-log messages to plain data: what the entries of one say.

An entry has some four dozen fields, of which a dozen are read. They are read from the bytes (log_fields.py), stepping
over the others; whatever is unusual in any way upb (xds-protos) reads, the whole message. Compiled (hatch_build.py)
that takes 3 us, upb and its objects take 10, and all of it several times as long where little is in the processor's
caches. Interpreted it takes 36. What is stepped over is not looked into: a fault in there, for which upb would refuse
the whole message, takes nothing from the rest.
"""

from __future__ import annotations

from typing import Any, Final

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

from extproc.flight import LONGEST_PATH, TIMED_OUT, Attempt, Completion, Usage
from extproc.names import ATTEMPT_HEADER, METADATA_NAMESPACE, REQUEST_ID_HEADER, USAGE_NAMESPACE
from extproc.wire.log_fields import TTFT_TAG, LogFields, Unusual, read_fields
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


def read_access_log(raw: bytes) -> list[Attempt | Completion | Malformed]:
    """Decode one StreamAccessLogsMessage into what its entries say; one that cannot be read is a Malformed.

    Raises Malformed if nothing of the message can be read.
    """
    try:
        entries = read_fields(raw)
    except (Unusual, IndexError, UnicodeDecodeError):
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


def _add(found: list[Attempt | Completion | Malformed], entry: LogFields) -> None:
    try:
        if _is_final(entry):
            found.append(_completion(entry))
        elif entry.kind in _UPSTREAM_TYPES:
            found.append(_attempt(entry))
    except Exception as error:  # noqa: BLE001 - one odd entry must not take the others with it
        found.append(Malformed(str(error)))


def _is_final(entry: LogFields) -> bool:
    return (entry.kind == _DOWNSTREAM_END or not entry.kind) and not entry.intermediate


def _attempt(entry: LogFields) -> Attempt:
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


def _failure(entry: LogFields) -> str | None:
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


def _completion(entry: LogFields) -> Completion:
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


def _request_id(entry: LogFields) -> str:
    return entry.id_header if entry.own_id is None else entry.own_id


def _address(entry: LogFields) -> str | None:
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


def _entry_of(logged: accesslog_pb2.HTTPAccessLogEntry) -> LogFields:
    entry = LogFields()
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
    entry.ttft_tag = common.custom_tags.get(TTFT_TAG, "")
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
