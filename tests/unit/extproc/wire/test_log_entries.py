"""Access-log messages: what is read from Envoy's bytes, by hand and by upb."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf import any_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.flight import Attempt, Completion, Usage
from extproc.wire import log_entries
from extproc.wire.log_entries import read_access_log, read_any
from extproc.wire.messages import Malformed

ID = "0123456789abcdef01234567"


def entry_of(
    kind: int,
    *,
    request_id: str | None = ID,
    address: tuple[str, int] | None = ("10.0.0.1", 8000),
    status: int | None = 200,
    **flags: bool,
) -> accesslog_pb2.HTTPAccessLogEntry:
    """One entry as Envoy writes it."""
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    common.access_log_type = kind
    if request_id is not None:
        common.metadata.filter_metadata["pointsman"].update({"request_id": request_id})
    if address is not None:
        socket = common.upstream_remote_address.socket_address
        socket.address, socket.port_value = address
    if status is not None:
        entry.response.response_code.value = status
    for name, value in flags.items():
        setattr(common.response_flags, name, value)
    return entry


def logged(*entries: accesslog_pb2.HTTPAccessLogEntry) -> list[Any]:
    """What the entries say."""
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return read_access_log(message.SerializeToString())


DOWNSTREAM_END, POOL_READY, UPSTREAM_END = 6, 7, 9


def test_a_finished_request_is_a_completion() -> None:
    """Everything Envoy measured, in our units."""
    entry = entry_of(DOWNSTREAM_END)
    common = entry.common_properties
    common.duration.FromNanoseconds(2_500_000_000)
    common.time_to_last_upstream_tx_byte.FromNanoseconds(300_000_000)
    common.time_to_last_upstream_rx_byte.FromNanoseconds(2_400_000_000)
    common.upstream_request_attempt_count = 2
    common.custom_tags["ttft_us"] = "125000"
    entry.response.response_code_details = "via_upstream"
    entry.request.request_body_bytes = 300
    entry.response.response_body_bytes = 4_000
    [completion] = logged(entry)
    assert completion == Completion(
        request_id=ID,
        address="10.0.0.1:8000",
        status=200,
        flags=(),
        details="via_upstream",
        attempts=2,
        failed=None,
        duration_s=2.5,
        ttft_s=125_000 * 1e-6,
        request_bytes=300,
        response_bytes=4_000,
        usage=None,
        upstream_s=(2 + 400_000_000 * 1e-9) - 300_000_000 * 1e-9,
    )


def test_figures_envoy_did_not_measure_are_none() -> None:
    """No answer at all: no status, no time, no address."""
    [completion] = logged(entry_of(DOWNSTREAM_END, address=None, status=None))
    assert isinstance(completion, Completion)
    assert (completion.status, completion.address) == (0, None)
    assert (completion.duration_s, completion.ttft_s, completion.usage) == (None, None, None)
    assert completion.upstream_s is None


@pytest.mark.parametrize("tag", ["", "-", "-5", "1.5", "²", "٣"])
def test_a_time_to_first_token_that_is_no_count_is_none(tag: str) -> None:
    """Envoy's formatter writes `-` for what did not happen."""
    entry = entry_of(DOWNSTREAM_END)
    entry.common_properties.custom_tags["ttft_us"] = tag
    [completion] = logged(entry)
    assert isinstance(completion, Completion)
    assert completion.ttft_s is None


def test_absurd_figures_are_left_out_and_named() -> None:
    """An engine's usage of 2^64 tokens would teach a pool for days, a time of centuries would be the mean."""
    entry = entry_of(DOWNSTREAM_END)
    entry.common_properties.custom_tags["ttft_us"] = "9" * 300
    [late] = logged(entry)
    usage = entry.common_properties.metadata.typed_filter_metadata["pointsman.usage"]
    usage.value = bytes.fromhex("1a02081e220b08ffffffffffffffffff01")
    entry.common_properties.custom_tags["ttft_us"] = "125000"
    [many] = logged(entry)
    assert isinstance(late, Completion)
    assert isinstance(many, Completion)
    assert (late.ttft_s, late.odd) == (None, "ttft")
    assert (many.ttft_s, many.usage, many.odd) == (0.125, None, "usage")


USAGE = bytes.fromhex("0801120373696d1a02081e220208082a02082632040a020810420208264801")
"""A TokenUsage as Envoy 1.40 wrote it: 30 prompt tokens, 16 of them cached, 8 completion tokens."""


def test_the_engines_token_usage_is_read_from_typed_metadata() -> None:
    """As Envoy's own filter wrote it, field by field."""
    entry = entry_of(DOWNSTREAM_END)
    entry.common_properties.metadata.typed_filter_metadata["pointsman.usage"].CopyFrom(
        any_pb2.Any(type_url="type.googleapis.com/envoy.data.ai.v3.TokenUsage", value=USAGE)
    )
    [completion] = logged(entry)
    assert isinstance(completion, Completion)
    assert completion.usage == Usage(prompt_tokens=30, completion_tokens=8, cached_tokens=16)


def test_usage_without_details_does_not_say_what_was_cached() -> None:
    """None, not zero: most servers do not report it."""
    entry = entry_of(DOWNSTREAM_END)
    entry.common_properties.metadata.typed_filter_metadata["pointsman.usage"].value = bytes.fromhex("1a02081e22020808")
    [completion] = logged(entry)
    assert isinstance(completion, Completion)
    assert completion.usage == Usage(30, 8, None)


def test_flags_are_told_by_name() -> None:
    """Several at once, in Envoy's order."""
    [completion] = logged(
        entry_of(DOWNSTREAM_END, status=503, upstream_retry_limit_exceeded=True, upstream_connection_failure=True)
    )
    assert isinstance(completion, Completion)
    assert completion.flags == ("upstream_connection_failure", "upstream_retry_limit_exceeded")
    assert completion.failed == "upstream_connection_failure"


@pytest.mark.parametrize(
    "flag",
    [
        "upstream_connection_failure",
        "upstream_remote_reset",
        "upstream_connection_termination",
        "upstream_protocol_error",
        "upstream_request_timeout",
        "upstream_overflow",
    ],
)
@pytest.mark.parametrize("kind", [DOWNSTREAM_END, UPSTREAM_END])
def test_flags_of_the_upstream_are_the_endpoints_failure(kind: int, flag: str) -> None:
    """In either log."""
    [told] = logged(entry_of(kind, status=None, **{flag: True}))
    assert told.failed == flag


@pytest.mark.parametrize(
    "flag", ["downstream_connection_termination", "downstream_remote_reset", "no_healthy_upstream", "local_reset"]
)
def test_other_flags_are_not_held_against_an_endpoint(flag: str) -> None:
    """A client that left, and an endpoint Envoy never reached."""
    [told] = logged(entry_of(DOWNSTREAM_END, status=None, **{flag: True}))
    assert isinstance(told, Completion)
    assert (told.failed, told.flags) == (None, (flag,))


@pytest.mark.parametrize("kind", [DOWNSTREAM_END, UPSTREAM_END])
@pytest.mark.parametrize("flag", ["upstream_request_timeout", "stream_idle_timeout"])
@pytest.mark.parametrize(("received_bytes", "charged"), [(0, True), (32 * 1024, True), (32 * 1024 + 1, False)])
def test_an_answer_whose_client_may_not_have_read_is_held_against_nobody(
    kind: int, flag: str, received_bytes: int, *, charged: bool
) -> None:
    """Silence after more bytes than buffers take may be the client's doing; below that it cannot be."""
    entry = entry_of(kind, **{flag: True})
    entry.common_properties.time_to_last_upstream_tx_byte.FromNanoseconds(1)
    entry.common_properties.upstream_wire_bytes_received = received_bytes
    [told] = logged(entry)
    name = "upstream_request_timeout" if kind == UPSTREAM_END else flag
    assert told.failed == (name if charged else None)


def test_a_try_that_fell_silent_has_one_name_in_both_logs() -> None:
    """Envoy has a flag for it in each, and either may come first."""
    entries = [
        entry_of(UPSTREAM_END, stream_idle_timeout=True),
        entry_of(DOWNSTREAM_END, upstream_request_timeout=True),
    ]
    for entry in entries:
        entry.common_properties.time_to_last_upstream_tx_byte.FromNanoseconds(1)
    assert [told.failed for entry in entries for told in logged(entry)] == ["upstream_request_timeout"] * 2


def test_a_request_that_fell_silent_before_an_endpoint_had_it_is_held_against_nobody() -> None:
    """Its client did not send it to the end."""
    [told] = logged(entry_of(DOWNSTREAM_END, stream_idle_timeout=True))
    assert told.failed is None


@pytest.mark.parametrize(
    ("status", "failed"), [(200, None), (400, None), (429, None), (499, None), (500, "status_500"), (503, "status_503")]
)
@pytest.mark.parametrize("kind", [DOWNSTREAM_END, UPSTREAM_END])
def test_a_server_error_is_the_endpoints_failure(kind: int, status: int, failed: str | None) -> None:
    """A client error is not."""
    [told] = logged(entry_of(kind, status=status))
    assert told.failed == failed


def test_the_gateways_own_error_is_no_endpoints_failure() -> None:
    """It has not asked any: too many headers, say, once ours are among them."""
    entry = entry_of(DOWNSTREAM_END, status=500)
    entry.common_properties.ClearField("upstream_remote_address")
    [told] = logged(entry)
    assert (told.address, told.failed) == (None, None)


def test_an_attempt_that_starts_says_where() -> None:
    """Even one that will fail: whether it does is told at its end."""
    assert logged(entry_of(POOL_READY, status=None)) == [Attempt(ID, "10.0.0.1:8000", None)]


def test_an_attempt_that_failed_says_where_and_how() -> None:
    """So the endpoint can be charged at once."""
    assert logged(entry_of(UPSTREAM_END, status=503)) == [Attempt(ID, "10.0.0.1:8000", "status_503")]


@pytest.mark.parametrize(("count", "number"), [("2", 2), ("10", 10), ("", 1), ("x", 1), ("²", 1)])
@pytest.mark.parametrize("kind", [POOL_READY, UPSTREAM_END])
def test_an_attempt_says_which_of_the_requests_it_is(kind: int, count: str, number: int) -> None:
    """By Envoy's own header; the first where it is missing or no number."""
    entry = entry_of(kind, status=503 if kind == UPSTREAM_END else None)
    entry.request.request_headers["x-envoy-attempt-count"] = count
    [attempt] = logged(entry)
    assert isinstance(attempt, Attempt)
    assert attempt.number == number


def test_an_attempt_that_ended_well_says_nothing_new() -> None:
    """It moves nothing: a straggler must not undo a later attempt's move."""
    assert logged(entry_of(UPSTREAM_END)) == [Attempt(ID, None, None)]


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 10, 11])
def test_entries_of_other_kinds_are_passed_over(kind: int) -> None:
    """Starts, TCP, tunnels; the entry beside them is read."""
    assert len(logged(entry_of(kind), entry_of(DOWNSTREAM_END))) == 1


def test_an_intermediate_entry_is_not_the_end() -> None:
    """Old Envoys mark periodic entries this way and give no type."""
    entry = entry_of(0)
    entry.common_properties.intermediate_log_entry = True
    assert logged(entry) == []
    assert len(logged(entry_of(0))) == 1


def test_an_ipv6_address_is_written_as_the_config_writes_it() -> None:
    """In brackets."""
    [told] = logged(entry_of(POOL_READY, address=("fd00::1", 8000)))
    assert isinstance(told, Attempt)
    assert told.address == "[fd00::1]:8000"


def test_an_address_that_is_no_socket_is_none() -> None:
    """A pipe or an internal listener is no endpoint."""
    entry = entry_of(DOWNSTREAM_END, address=None)
    entry.common_properties.upstream_remote_address.pipe.path = "/run/engine.sock"
    [told] = logged(entry)
    assert isinstance(told, Completion)
    assert told.address is None


def test_the_request_id_is_taken_from_metadata_first_then_from_the_header() -> None:
    """A mesh without our metadata logs the header; a client's forged one does not win."""
    both = entry_of(DOWNSTREAM_END)
    both.request.request_headers["x-pointsman-request-id"] = "forged"
    header = entry_of(DOWNSTREAM_END, request_id=None)
    header.request.request_headers["x-pointsman-request-id"] = ID
    neither = entry_of(DOWNSTREAM_END, request_id=None)
    assert [told.request_id for told in logged(both, header, neither)] == [ID, ID, ""]


def test_an_entry_that_cannot_be_read_is_told_as_such_beside_the_others() -> None:
    """One odd entry does not take the message with it."""
    odd = entry_of(DOWNSTREAM_END)
    odd.common_properties.metadata.typed_filter_metadata["pointsman.usage"].value = b"\xff\xff"
    assert [type(told) for told in logged(odd, entry_of(DOWNSTREAM_END))] == [Malformed, Completion]


def test_entries_stay_in_order() -> None:
    """A failed attempt, the next one, the end."""
    told = logged(
        entry_of(UPSTREAM_END, status=503), entry_of(POOL_READY, address=("10.0.0.2", 8000)), entry_of(DOWNSTREAM_END)
    )
    assert [type(one) for one in told] == [Attempt, Attempt, Completion]


def test_the_nodes_introduction_has_no_entries() -> None:
    """Envoy's first message may carry its identifier only."""
    message = als_pb2.StreamAccessLogsMessage()
    message.identifier.node.CopyFrom(base_pb2.Node(id="envoy"))
    assert read_access_log(message.SerializeToString()) == []


def test_garbage_is_no_access_log() -> None:
    """Malformed and nothing else."""
    with pytest.raises(Malformed):
        read_access_log(b"\xff\xff\xff")


# -- by hand and by upb


def full_entry() -> accesslog_pb2.HTTPAccessLogEntry:
    """An entry with all that Envoy says of an ordinary request."""
    entry = entry_of(DOWNSTREAM_END)
    common, request, response = entry.common_properties, entry.request, entry.response
    common.sample_rate = 1.0
    for name in ("downstream_remote_address", "downstream_local_address", "upstream_local_address"):
        socket = getattr(common, name).socket_address
        socket.address, socket.port_value = "10.0.0.9", 54_321
    common.start_time.FromNanoseconds(1_790_000_000_123_456_789)
    for place, name in enumerate(SPANS, 1):
        getattr(common, name).FromNanoseconds(place * 370_370_367)
    common.upstream_cluster, common.route_name = "pool_chat", "chat"
    common.metadata.filter_metadata["envoy.lb"].update({"a": 1.5, "b": ["c", {"d": None}]})
    common.metadata.filter_metadata["pointsman"].update({"model": "sim"})
    common.metadata.typed_filter_metadata["pointsman.usage"].CopyFrom(
        any_pb2.Any(type_url="type.googleapis.com/envoy.data.ai.v3.TokenUsage", value=USAGE)
    )
    common.custom_tags["ttft_us"], common.custom_tags["other"] = "125000", "x"
    common.upstream_request_attempt_count = 1
    common.stream_id = "6c1e8a55-0d0f-4f1f-8a56-0a7f12d3e4aa"
    common.downstream_wire_bytes_sent, common.upstream_wire_bytes_received = 4_321, 4_200
    entry.protocol_version = entry.HTTP11
    request.scheme, request.path, request.user_agent = "http", "/v1/chat/completions", "a client"
    request.request_headers_bytes, request.request_body_bytes = 500, 2_000
    request.request_headers["x-pointsman-request-id"] = ID
    request.request_headers["x-envoy-attempt-count"] = "2"
    response.response_headers_bytes, response.response_body_bytes = 200, 4_000
    response.response_code_details = "via_upstream"
    return entry


SPANS = (
    "time_to_last_rx_byte",
    "time_to_first_upstream_tx_byte",
    "time_to_last_upstream_tx_byte",
    "time_to_last_upstream_rx_byte",
    "duration",
)


def message_of(*entries: accesslog_pb2.HTTPAccessLogEntry) -> bytes:
    """As Envoy sends them."""
    message = als_pb2.StreamAccessLogsMessage()
    message.identifier.log_name = "pointsman"
    message.http_logs.log_entry.extend(entries)
    return bytes(message.SerializeToString())


USUAL = {
    "ordinary": full_entry(),
    "attempt": entry_of(UPSTREAM_END, status=503, upstream_remote_reset=True),
    "begun": entry_of(POOL_READY, status=None),
    "left": entry_of(DOWNSTREAM_END, downstream_connection_termination=True, upstream_overflow=True),
    "refused": entry_of(DOWNSTREAM_END, address=None, status=429),
    "ipv6": entry_of(DOWNSTREAM_END, address=("fd00::1", 8000)),
}


@pytest.mark.parametrize("name", USUAL)
def test_what_envoy_usually_says_is_read_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as upb reads, and without it."""
    raw = message_of(USUAL[name], full_entry())
    by_upb = read_any(raw)
    monkeypatch.setattr(log_entries, "als_pb2", None)
    assert read_access_log(raw) == by_upb


def said_of(told: list[Any]) -> list[Any]:
    """Entries, comparable: two faults are the same."""
    return [type(one) if isinstance(one, Malformed) else one for one in told]


PARTS = (
    b"", b"\x00", b"\x01", b"\x08", b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x42", b"\x7f", b"\x80\x01", b"\xff",
    b"\x0a\x00", b"\x12\x00", b"\x08\x00", b"\x82\x01\x00", b"\x8a\x01\x00", b"\xb2\x01\x00", b"\x52\x00", b"\x6a\x00",
    b"\x88\x02\x06", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x07", b"\x0b",
)  # fmt: skip


@settings(deadline=None, max_examples=1_500)
@given(st.sampled_from(sorted(USUAL)), st.data())
def test_by_hand_no_entry_is_read_otherwise_than_by_upb(name: str, data: st.DataObject) -> None:
    """However the bytes are changed, cut or repeated: what upb reads is read the same.

    Where upb refuses the message, the fault may lie in what the hand steps over; but nothing else is raised.
    """
    raw = bytearray(message_of(USUAL[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        to = data.draw(st.integers(at, min(len(raw), at + 6)))
        raw[at:to] = data.draw(st.sampled_from([*PARTS, bytes(raw[at:to]) * 2]))
    try:
        by_upb = read_any(bytes(raw))
    except Malformed:
        with suppress(Malformed):
            read_access_log(bytes(raw))
        return
    assert said_of(read_access_log(bytes(raw))) == said_of(by_upb)


MESSAGES = {
    field.name: getattr(accesslog_pb2.HTTPAccessLogEntry(), field.name).DESCRIPTOR
    for field in accesslog_pb2.HTTPAccessLogEntry.DESCRIPTOR.fields
    if field.message_type is not None
}


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(sorted(USUAL)), st.sampled_from(sorted(MESSAGES)), st.data())
def test_a_part_that_comes_again_is_joined_as_upb_joins_it(name: str, part: str, data: st.DataObject) -> None:
    """Protobuf reads messages written in a row as one, part by part; so must the hand, or leave it to upb."""
    first, second = USUAL[name], USUAL[data.draw(st.sampled_from(sorted(USUAL)))]
    again = accesslog_pb2.HTTPAccessLogEntry()
    getattr(again, part).CopyFrom(getattr(second, part))
    for field in data.draw(st.sets(st.sampled_from([one.name for one in MESSAGES[part].fields]))):
        getattr(again, part).ClearField(field)
    both = first.SerializeToString() + again.SerializeToString()
    size = bytes([0x0A, len(both) & 0x7F | 0x80, len(both) >> 7]) + both
    raw = bytes([0x12, len(size) & 0x7F | 0x80, len(size) >> 7]) + size
    assert said_of(read_access_log(raw)) == said_of(read_any(raw))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_no_bytes_raise_anything_but_malformed(raw: bytes) -> None:
    """Whatever comes."""
    with suppress(Malformed):
        read_access_log(raw)


def test_a_fault_in_what_is_not_read_takes_nothing_from_the_rest() -> None:
    """A user agent that is no UTF-8, here, for which upb refuses the whole message."""
    raw = message_of(full_entry())
    odd = raw.replace(b"a client", b"a\xffclient")
    with pytest.raises(Malformed):
        read_any(odd)
    assert read_access_log(odd) == read_access_log(raw)
