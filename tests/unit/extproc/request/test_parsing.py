"""Bodies: what is read, what is refused, and that an edit changes nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.request.apis import APIS
from extproc.request.blocks import block_hashes, block_tokens, seed_of
from extproc.request.parsing import Parsed, model_edits, parse_body, to_request
from extproc.request.splice import Splice, apply
from extproc.request.tokens import TokenRates, image_spans
from policies.types import Kind, Reason, Refusal

RATES = TokenRates()
API_OF = {api.kind: api for api in reversed(APIS)}


def parsed(body: bytes, kind: Kind = Kind.CHAT) -> Parsed:
    """The body, read."""
    found = parse_body(API_OF[kind], body)
    assert isinstance(found, Parsed), found
    return found


def refused(body: bytes, kind: Kind = Kind.CHAT) -> Refusal:
    """The refusal the body gets; always a client error of OpenAI's type."""
    found = parse_body(API_OF[kind], body)
    assert isinstance(found, Refusal), found
    assert (found.status, found.type) == (400, "invalid_request_error")
    assert found.retry_after_s is None
    return found


# -- what is read


def test_a_chat_body_is_read() -> None:
    """Every field that routing uses, from one ordinary body."""
    body = (
        b'{"model": "m", "stream": true, "messages": [{"role": "user"}], "max_tokens": 7, "cache_salt": "s",'
        b' "user": "u", "temperature": 0.5}'
    )
    assert parsed(body) == Parsed(
        kind=Kind.CHAT,
        model="m",
        model_raw=memoryview(b'"m"'),
        stream=True,
        prompt=b'[{"role": "user"}]',
        max_tokens=7,
        cache_salt="s",
        session_key="u",
    )


def test_a_text_completion_reads_the_prompt_and_no_tools() -> None:
    """The legacy API has a prompt; messages and tools in it mean nothing."""
    found = parsed(b'{"model":"m","prompt":"Once","messages":[1],"tools":[2]}', Kind.COMPLETION)
    assert found.prompt == b'"Once"'
    assert found.kind is Kind.COMPLETION


def test_tools_stand_before_messages_whatever_their_order_in_the_body() -> None:
    """A chat template puts the tools first, so they come first in the prompt."""
    tools_first = parsed(b'{"tools":[{"t":1}],"model":"m","messages":["hi"]}')
    tools_last = parsed(b'{"model":"m","messages":["hi"],"tools":[{"t":1}]}')
    assert tools_first.prompt == tools_last.prompt == b'[{"t":1}]["hi"]'


def test_the_prompt_is_the_raw_slice_of_the_body() -> None:
    """Spacing, escapes and even bytes that are no UTF-8 stay as the client wrote them."""
    raw = b'[ {"content" : "caf\\u00e9 \xff \\/ \xe4\xbd\xa0" } ]'
    assert parsed(b'{"model":"m","messages":' + raw + b"}").prompt == raw


def test_a_key_written_with_escapes_is_the_same_key() -> None:
    """A letter written as an escape still makes `model` to every JSON reader."""
    assert parsed(b'{"mod\\u0065l":"m","messages":[]}').model == "m"


def test_unicode_model_names_are_read() -> None:
    """Raw and escaped spellings of one name are the same name."""
    assert parsed('{"model":"模型","messages":[]}'.encode()).model == "模型"
    assert parsed(b'{"model":"\\u6a21\\u578b","messages":[]}').model == "模型"


def test_of_a_key_given_twice_the_last_counts() -> None:
    """As for every Python engine behind us."""
    found = parsed(b'{"model":"a","messages":[1],"model":"b","messages":[2]}')
    assert (found.model, found.prompt) == ("b", b"[2]")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 5.0}, None),
        ({"max_tokens": [5]}, None),
        ({"max_tokens": 2**31 - 1}, 2**31 - 1),
        ({"max_tokens": 2**31}, None),
        ({"max_tokens": 10**40}, None),
        ({"max_tokens": -(10**40)}, None),
    ],
)
def test_max_tokens_is_a_count_or_nothing(fields: dict[str, Any], max_tokens: int | None) -> None:
    """The newer name first; what is no sensible count is left for the engine to refuse."""
    assert parsed(json.dumps({"model": "m", "messages": [], **fields}).encode()).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("a text", 2),
        ('["no list"]', 2),
        (["one", "two", "three"], 6),
        (['a " [ b\\', "", "\\"], 6),
        ([1, 2, 3], 2),
        ([[1, 2], [3]], 4),
        ([], 2),
    ],
)
def test_every_prompt_of_a_completion_has_its_choices(prompt: object, choices: int) -> None:
    """A list of numbers is one prompt, of tokens."""
    assert parsed(json.dumps({"model": "m", "prompt": prompt, "n": 2}).encode(), Kind.COMPLETION).choices == choices


@pytest.mark.parametrize(("n", "choices"), [(3, 3), (1, 1), (None, 1), (0, 1), ("4", 1), (True, 1)])
def test_choices_are_counted(n: object, choices: int) -> None:
    """One where the body does not say, or says nonsense."""
    assert parsed(json.dumps({"model": "m", "messages": [], "n": n}).encode()).choices == choices


@pytest.mark.parametrize(("value", "stream"), [("true", True), ("false", False), ("1", False), ('"yes"', False)])
def test_only_true_means_stream(value: str, *, stream: bool) -> None:
    """Anything but JSON's true is not a stream to us."""
    assert parsed(f'{{"model":"m","messages":[],"stream":{value}}}'.encode()).stream is stream


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"user": "u"}, "u"),
        ({"prompt_cache_key": "k"}, "k"),
        ({"user": "u", "prompt_cache_key": "k"}, "k"),
        ({"user": "u", "prompt_cache_key": ""}, "u"),
        ({"user": 17}, None),
        ({"user": {"id": 1}, "prompt_cache_key": None}, None),
        ({}, None),
    ],
)
def test_the_session_comes_from_the_cache_key_then_the_user(fields: dict[str, Any], session: str | None) -> None:
    """Both only if they are text; other types are no reason to refuse."""
    assert parsed(json.dumps({"model": "m", "messages": [], **fields}).encode()).session_key == session


@pytest.mark.parametrize("value", ["17", "null", "[]", '""'])
def test_a_salt_that_is_no_text_is_no_salt(value: str) -> None:
    """The engine is the judge of its own fields."""
    assert parsed(f'{{"model":"m","messages":[],"cache_salt":{value}}}'.encode()).cache_salt is None


# -- what is refused


def test_an_empty_body_is_refused_as_such() -> None:
    """Not as malformed JSON: the client forgot something else."""
    assert refused(b"").reason is Reason.EMPTY_BODY


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"hello",
        b'{"model":"m","messages":[]} trailing',
        b'{"model":"m","messages":[],}',
        b'{"model":"m","x":NaN,"messages":[]}',
        b'\xef\xbb\xbf{"model":"m","messages":[]}',
        b'{"model":"\xff","messages":[]}',
        b'{"model":"\\ud800","messages":[]}',
        b" ",
        b"\x00",
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    """With a message that says so."""
    refusal = refused(body)
    assert refusal.reason is Reason.INVALID_JSON
    assert refusal.message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"17", b"null", b"true"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    """A request is an object."""
    refusal = refused(body)
    assert refusal.reason is Reason.INVALID_JSON
    assert "object" in refusal.message


@pytest.mark.parametrize("field", ["messages", "user", "something_unknown"])
def test_nesting_without_end_is_refused(field: str) -> None:
    """A body of brackets neither crashes nor passes, whichever field it stands in."""
    deep = "[" * 100_000 + "]" * 100_000
    refusal = refused(f'{{"model":"m","{field}":{deep},"messages":[]}}'.encode())
    assert (refusal.reason, refusal.message) == (Reason.INVALID_JSON, "the body is nested too deeply")


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    """Python would take seconds over it; the client gets a 400 that names the field."""
    refusal = refused(b'{"model":"m","messages":[],"max_tokens":' + b"9" * 100_000 + b"}")
    assert refusal.reason is Reason.INVALID_JSON
    assert "max_tokens" in refusal.message


@pytest.mark.parametrize("model", [None, "", 17, ["m"], {"name": "m"}, True])
def test_a_model_must_be_a_name(model: object) -> None:
    """Anything but text that is not empty is refused, naming the parameter."""
    refusal = refused(json.dumps({"model": model, "messages": []}).encode())
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, "model")


def test_a_missing_model_is_refused() -> None:
    """Without a name there is nowhere to go."""
    assert refused(b'{"messages":[]}').param == "model"


@pytest.mark.parametrize(("kind", "param"), [(Kind.CHAT, "messages"), (Kind.COMPLETION, "prompt")])
def test_a_missing_prompt_is_refused_by_its_name(kind: Kind, param: str) -> None:
    """Chat misses `messages`, text completion misses `prompt`."""
    refusal = refused(b'{"model":"m"}', kind)
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)
    assert param in refusal.message


# -- what the policies see


def test_the_request_carries_what_was_parsed_under_the_engines_name() -> None:
    """The alias stays as the asked name; the hashes are those of the model that serves."""
    text = b'"' + b"x" * 598 + b'"'
    body = b'{"model":"alias","prompt":' + text + b',"max_tokens":9,"user":"u","cache_salt":"s","stream":true}'
    request = to_request(parsed(body, Kind.COMPLETION), "served", RATES)
    hashes, _ = block_hashes(text, seed_of("served", None, "s"))
    assert (request.kind, request.model, request.asked_model) == (Kind.COMPLETION, "served", "alias")
    assert (request.stream, request.max_tokens, request.session_key, request.cache_salt) == (True, 9, "u", "s")
    assert request.input_tokens == 150
    assert request.block_hashes == hashes
    assert request.block_tokens == [64, 64]
    assert request.prompt == text


def test_a_session_of_the_headers_comes_before_the_bodys() -> None:
    """The header is the operator's way to say it."""
    request = to_request(parsed(b'{"model":"m","messages":[],"user":"u"}'), "m", RATES, session_key="header")
    assert request.session_key == "header"


# -- edits


def test_the_model_that_counts_is_the_one_that_is_edited() -> None:
    """Of two models the last is parsed, so the last is replaced and the first stays."""
    body = b'{"model":"a","messages":["a"],"model" : "a" }'
    assert apply(body, model_edits(body, parsed(body), "b")) == b'{"model":"a","messages":["a"],"model" : "b" }'


def test_an_edit_is_escaped_as_json() -> None:
    """A name with quotes cannot break out of its string."""
    body = b'{"model":"m","messages":[]}'
    edited = apply(body, model_edits(body, parsed(body), 'a"},{"\n'))
    assert json.loads(edited) == {"model": 'a"},{"\n', "messages": []}


def test_splices_apply_in_order_of_place() -> None:
    """Whatever order they are given in; an empty one inserts."""
    assert apply(b"0123456789", [Splice(8, 9, b"EIGHT"), Splice(0, 2, b""), Splice(5, 5, b"+")]) == b"234+567EIGHT9"


def test_no_splices_leave_the_body() -> None:
    """The same bytes."""
    assert apply(b"body", []) == b"body"


def test_overlapping_splices_are_a_fault_of_ours() -> None:
    """Neither of the two could be right."""
    with pytest.raises(AssertionError, match="overlap"):
        apply(b"0123456789", [Splice(0, 5, b""), Splice(4, 6, b"")])


_READ_FIELDS = (
    "model", "stream", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "cache_salt", "user",
    "prompt_cache_key",
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
UNKNOWN = st.dictionaries(st.text().filter(lambda key: key not in _READ_FIELDS), JSON, max_size=5)


@settings(deadline=None)
@given(
    before=UNKNOWN,
    after=UNKNOWN,
    messages=JSON,
    model=st.text(min_size=1),
    new=st.text(),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_replacing_the_model_changes_the_model_and_nothing_else(
    before: dict[str, Any],
    after: dict[str, Any],
    messages: Any,
    model: str,
    new: str,
    *,
    ascii_only: bool,
    indent: int | None,
) -> None:
    """For any object: it parses to the same but for the model, and every byte outside the model's value is the same."""
    document = {**before, "model": model, "messages": messages, **{k: v for k, v in after.items() if k not in before}}
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    splices = model_edits(body, parsed(body), new)
    edited = apply(body, splices)
    assert json.loads(edited) == {**document, "model": new}
    if new == model:
        assert splices == ()
        return
    (splice,) = splices
    assert json.loads(body[splice.start : splice.end]) == model
    assert edited[: splice.start] == body[: splice.start]
    assert edited[splice.start + len(splice.text) :] == body[splice.end :]
    if new:
        assert parsed(edited).prompt == parsed(body).prompt


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_raise(body: bytes) -> None:
    """Whatever comes, the answer is a value."""
    for api in APIS:
        assert isinstance(parse_body(api, body), Parsed | Refusal)


@pytest.mark.parametrize("text", ["x" * 70_000, "a;b\\n" * 9_000, "你" * 50_000, "\\u4f60" * 30_000, "é" * 70_000])
@pytest.mark.parametrize("image", ["", '"data:image/png;base64,' + "A" * 500 + '",'])
def test_a_long_prompt_is_told_as_its_whole(text: str, image: str) -> None:
    """Walked in parts, wherever they cut it, it has the tokens and the blocks of the same prompt in one piece."""
    for before in range(65_504, 65_530):
        messages = f'"{"y" * before}",{image}"{text}"'
        found = parsed(f'{{"model":"m","messages":[{messages}]}}'.encode())
        assert isinstance(found.prompt, memoryview)
        raw, request = bytes(found.prompt), to_request(found, "m", RATES)
        counted = raw.replace(image.encode(), b"")
        wide = len(re.findall("[\u3000-\udfff]", counted.decode())) + counted.count(b"\\u")
        plain = len(counted) - 3 * text.count("你") - 6 * counted.count(b"\\u")
        assert abs(request.input_tokens - (plain / 4 + 1.5 * wide + 1024 * bool(image))) <= 1
        hashes, ends = block_hashes(raw, seed_of("m", None, None))
        assert request.block_hashes == hashes
        images = image_spans(raw)
        assert len(images) == bool(image)
        assert request.block_tokens == block_tokens(ends, len(raw), request.input_tokens, images, 1024)
