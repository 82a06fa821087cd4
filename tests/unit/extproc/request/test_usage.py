"""Asking streams for their usage: by a splice that changes nothing else, and only where nobody has said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.apis import BY_PATH
from extproc.request.parsing import Parsed, parse_body
from extproc.request.splice import apply
from extproc.request.usage import AskedBy, UsageAsked, ask_for_usage

CHAT, TEXT, MESSAGES = (BY_PATH[path] for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"))


def asked(body: bytes, api: Any = CHAT) -> UsageAsked | None:
    """What is asked of this body's answer."""
    parsed = parse_body(api, body)
    assert isinstance(parsed, Parsed)
    return ask_for_usage(body, parsed)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"model":"m","messages":[],"stream":true}',
         b'{"stream_options":{"include_usage":true},"model":"m","messages":[],"stream":true}'),
        (b'{ "model":"m", "messages":[],"stream" : true, "stream_options" : null }',
         b'{ "model":"m", "messages":[],"stream" : true, "stream_options" : {"include_usage":true} }'),
        (b'{"model":"m","messages":[],"stream":true,"stream_options":{}}',
         b'{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"model":"m","messages":[],"stream":true,"stream_options":{ "continuous" : false }}',
         b'{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true, "continuous" : false }}'),
        (b'{"model":"m","stream_options":{},"messages":[],"stream":true,"stream_options":{"x":1}}',
         b'{"model":"m","stream_options":{},"messages":[],"stream":true,"stream_options":{"include_usage":true,"x":1}}'),
    ],
    ids=["nothing", "null", "empty", "other options", "twice"],
)  # fmt: skip
def test_a_stream_that_nobody_asked_is_asked_and_nothing_else_changes(body: bytes, sent: bytes) -> None:
    """Byte for byte: spaces, order, and of two the one that counts."""
    usage = asked(body)
    assert usage is not None
    assert usage.by is AskedBy.US
    assert apply(body, usage.splices) == sent


@pytest.mark.parametrize(
    ("options", "by"),
    [
        ({"include_usage": True}, AskedBy.CLIENT),
        ({"include_usage": False}, AskedBy.NOBODY),
        ({"include_usage": None}, AskedBy.NOBODY),
        ({"include_usage": "yes"}, AskedBy.NOBODY),
    ],
)
def test_what_the_client_says_is_left_alone(options: dict[str, Any], by: AskedBy) -> None:
    """A yes, a no, and what the engine has to judge."""
    body = json.dumps({"model": "m", "messages": [], "stream": True, "stream_options": options}).encode()
    assert asked(body) == UsageAsked(by)


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": []}, CHAT),
        ({"messages": [], "stream": False}, CHAT),
        ({"messages": [], "stream": True, "stream_options": "usage"}, CHAT),
        ({"messages": [], "stream": True}, MESSAGES),
    ],
    ids=["whole", "said to be whole", "no options", "an API that always tells"],
)
def test_there_may_be_nothing_to_ask(body: dict[str, Any], api: Any) -> None:
    """Answers that tell anyway, and requests that the engine will refuse."""
    assert asked(json.dumps({"model": "m", **body}).encode(), api) is None


_VALUES = st.recursive(st.none() | st.booleans() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))


@given(
    st.dictionaries(st.text(max_size=8), _VALUES, max_size=4),
    st.none() | st.dictionaries(st.text(max_size=8), _VALUES, max_size=3),
    st.sampled_from([None, 2]),
)
def test_the_engine_reads_the_same_request_and_the_wish_for_usage(
    rest: dict[str, Any], options: dict[str, Any] | None, indent: int | None
) -> None:
    """Whatever else stands in the body."""
    document = {**rest, "model": "m", "prompt": "x", "stream": True, "stream_options": options}
    body = json.dumps(document, indent=indent).encode()
    parsed = parse_body(TEXT, body)
    assert isinstance(parsed, Parsed)
    usage = ask_for_usage(body, parsed)
    assert usage is not None
    sent = json.loads(apply(body, usage.splices))
    if usage.by is AskedBy.US:
        assert sent == document | {"stream_options": {**(options or {}), "include_usage": True}}
    else:
        assert sent == document
