"""Request bytes -> InferenceRequest, or a Refusal that says what is wrong with them.

Reads only what routing needs, with msgspec into a Struct whose big fields stay raw: `messages` is never decoded, only
hashed and measured, and unknown fields are never looked at. Which fields are the prompt stands in the API's row
(apis.py). Not here: which pool a model belongs to (plans.py) and what is sent on (splice.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from extproc.request import multipart
from extproc.request.apis import Api
from extproc.request.blocks import block_hashes, block_tokens, ends_of, hash_more, seed_of
from extproc.request.bounds import Bounds
from extproc.request.splice import Splice, View, insert_field, locate
from extproc.request.steps import Steps, at_once
from extproc.request.tokens import (
    PART_BYTES,
    PARTS_A_STEP,
    Count,
    Span,
    TokenRates,
    estimate_tokens,
    image_spans,
    prompt_token_steps,
    prompt_tokens,
)
from policies.types import InferenceRequest, Kind, Reason, Refusal

_NONE: Final = msgspec.Raw(b"")
_INVALID: Final = "invalid_request_error"
_COMPLETION: Final = Kind.COMPLETION  # every request asks: by the enum each takes ten times as long
_RESPONSE: Final = Kind.RESPONSE
_BYTE_ORDER_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_FIRST_OF_MARKS: Final = 0xEF
"""None begins with less, and every JSON object does."""

_COMMON: Final = (
    ("model", msgspec.Raw, _NONE),
    ("stream_options", msgspec.Raw, _NONE),
    ("stream", Any, False),
    ("max_completion_tokens", Any, None),
    ("max_output_tokens", Any, None),
    ("max_tokens", Any, None),
    ("n", Any, None),
    ("cache_salt", Any, None),
    ("prompt_cache_key", Any, None),
    ("user", Any, None),
    ("previous_response_id", Any, None),
    ("request_id", Any, None),
    ("store", Any, None),
)
"""The fields that routing reads, whatever the API, in the order of their values; and each one's value if left out.

Types are loose: the engine is the judge.
"""
_MODEL: Final = 0
_RAWS: Final = 13
"""So many they are; behind their values stand those of the fields of the API's row."""

_Values: TypeAlias = tuple[Any, ...]


class _Reader:
    """How bodies of one API are read: into the common fields' values, and those of the row's fields, which stay raw.

    `prompt_end`: the prompt's values end before it. `required`: the places of the values of which one must be given.
    """

    def __init__(self, api: Api) -> None:
        fields = tuple(dict.fromkeys((*api.prompt, *api.required)))
        raws = [(name, msgspec.Raw, _NONE) for name in fields]
        self.decode: Any = msgspec.json.Decoder(msgspec.defstruct("_Body", [*_COMMON, *raws])).decode
        self.prompt_end = _RAWS + len(api.prompt)
        self.required = [_RAWS + fields.index(name) for name in api.required]


_READERS: Final[dict[Api, _Reader]] = {}


def _reader(api: Api) -> _Reader:
    """Made once for every row."""
    reader = _READERS.get(api)
    if reader is None:
        reader = _READERS[api] = _Reader(api)
    return reader


_values_of: Final = msgspec.structs.astuple
_decode_name: Final = msgspec.json.Decoder(str | None).decode


@dataclass(init=False)
class Stored:
    """What a request of the Responses API says of stored answers; `None` where it says nothing. Never changed."""

    wanted: bool
    own_id: str | None
    previous_id: str | None

    def __init__(self, own_id: str | None, previous_id: str | None, *, wanted: bool) -> None:
        self.wanted = wanted
        self.own_id = own_id
        self.previous_id = previous_id


@dataclass(init=False)
class Parsed:
    """A body that could be read, never changed; `prompt` is raw JSON, joined in the order a chat template uses it.

    Of a long body it is a view, where there is nothing to join.
    `model_raw` and `stream_options` are views of what stands in the body; empty where it has none.
    `boundary`: what stands before every part of a form; empty where the body is JSON.
    """

    kind: Kind
    model: str
    model_raw: View
    stream: bool
    prompt: bytes | memoryview
    max_tokens: int | None
    choices: int
    cache_salt: str | None
    session_key: str | None
    stored: Stored | None
    stream_options: View
    boundary: bytes

    def __init__(
        self,
        kind: Kind,
        model: str,
        model_raw: View,
        *,
        stream: bool = False,
        prompt: bytes | memoryview = b"",
        max_tokens: int | None = None,
        choices: int = 1,
        cache_salt: str | None = None,
        session_key: str | None = None,
        stored: Stored | None = None,
        stream_options: View = _NONE,
        boundary: bytes = b"",
    ) -> None:
        self.kind = kind
        self.model = model
        self.model_raw = model_raw
        self.stream = stream
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.choices = choices
        self.cache_salt = cache_salt
        self.session_key = session_key
        self.stored = stored
        self.stream_options = stream_options
        self.boundary = boundary


def parse_body(
    api: Api, body: bytes, default_model: str | None = None, bounds: Bounds | None = None
) -> Parsed | Refusal:
    """Read one JSON body. A Refusal (400) for what no engine could serve, or what is beyond `bounds`."""
    if not body:
        return _no_body()
    if body[0] >= _FIRST_OF_MARKS and body.startswith(_BYTE_ORDER_MARKS):
        return refuse("the body is not valid JSON: it begins with a byte order mark", Reason.INVALID_JSON)
    reader = _reader(api)
    try:
        values: _Values = _values_of(reader.decode(body))
        model = _model(values[_MODEL], default_model)
    except msgspec.ValidationError as error:
        return refuse(f"the body cannot be read as a request: {error}", Reason.INVALID_JSON)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return refuse(f"the body is not valid JSON: {error}", Reason.INVALID_JSON)
    except RecursionError:
        return refuse("the body is nested too deeply", Reason.INVALID_JSON)
    raws = values[_RAWS : reader.prompt_end]
    if bounds is not None:
        refusal = bounds.judge_body(body, map(memoryview, raws))
        if refusal is not None:
            return refusal
    if not model:
        return no_model()
    if reader.required and not any(values[place] for place in reader.required):
        return refuse(f"you must provide {' or '.join(api.required)}", Reason.INVALID_REQUEST, api.required[0])
    return _parsed(api.kind, values, model, b"".join(raws) if len(body) <= PART_BYTES else _joined(raws, body))


def _joined(raws: _Values, body: bytes) -> bytes | memoryview:
    """All of them; one alone without a copy if it is most of the body, which a view keeps for as long as itself."""
    given = [raw for raw in raws if raw]
    if len(given) != 1 or 2 * len(given[0]) <= len(body):
        return b"".join(given)
    start, end = locate(body, given[0])
    return memoryview(body)[start:end]


def _parsed(kind: Kind, values: _Values, model: str, prompt: bytes | memoryview) -> Parsed:
    # a field that is not there, as most, costs no call
    (
        model_raw, stream_options, stream, completion_tokens, output_tokens, max_tokens, answers,
        cache_salt, cache_key, user, previous_id, own_id, store,
    ) = values[:_RAWS]  # fmt: skip
    most: int | None = None
    if completion_tokens is not None:
        most = _count(completion_tokens)
    if most is None and output_tokens is not None:
        most = _count(output_tokens)
    if most is None and max_tokens is not None:
        most = _count(max_tokens)
    choices = 1 if answers is None else _count(answers) or 1
    if kind is _COMPLETION:
        choices *= _prompts(values[_RAWS])
    session_key = None if cache_key is None else _text(cache_key)
    if session_key is None and user is not None:
        session_key = _text(user)
    stored: Stored | None = None
    if kind is _RESPONSE:
        stored = Stored(_text(own_id), _text(previous_id), wanted=store is not False)
    return Parsed(
        kind,
        model,
        model_raw,
        stream=stream is True,
        prompt=prompt,
        max_tokens=most,
        choices=choices,
        cache_salt=None if cache_salt is None else _text(cache_salt),
        session_key=session_key,
        stored=stored,
        stream_options=stream_options,
    )


_PROMPTS_IN_A_LIST: Final = re.compile(rb"\s*\[\s*([\"\[])")


def _prompts(prompt: msgspec.Raw) -> int:
    """How many prompts a completion has: a list is one of tokens, or of texts or lists of tokens, each a prompt.

    By counting what delimits them: an object for each would be gigabytes for a body of empty texts.
    """
    found = _PROMPTS_IN_A_LIST.match(prompt)
    if found is None:
        return 1
    raw = bytes(prompt)
    if found[1] == b"[":
        return raw.count(b"[") - 1
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2


def parse_form(api: Api, content_type: str, body: bytes, default_model: str | None = None) -> Parsed | Refusal:
    """Find the model in a multipart form. A Refusal (400) for what no engine could serve."""
    if not body:
        return _no_body()
    try:
        boundary = multipart.boundary_of(content_type)
        place = multipart.find_model(body, boundary)
        start, end = place or (0, 0)
        named = memoryview(body)[start:end]
        model = str(named, "utf-8") or default_model
    except multipart.NotAForm as error:
        return refuse(f"the body cannot be read as a form: {error}", Reason.INVALID_REQUEST)
    except UnicodeDecodeError:
        return refuse("the model's name is not UTF-8", Reason.INVALID_REQUEST, "model")
    if not model:
        return no_model()
    return Parsed(api.kind, model, named, boundary=boundary)


def to_request(parsed: Parsed, model: str, rates: TokenRates, *, session_key: str | None = None) -> InferenceRequest:
    """The request as the policies see it; `model` is the name the engines serve, aliases resolved."""
    prompt = parsed.prompt
    if len(prompt) > PART_BYTES:
        return at_once(request_steps(parsed, model, rates, session_key=session_key))
    if not isinstance(prompt, bytes):
        prompt = bytes(prompt)
    images = image_spans(prompt)
    tokens = prompt_tokens(prompt, images, rates) if images else estimate_tokens(prompt, rates)
    hashes, ends = block_hashes(prompt, seed_of(model, None, parsed.cache_salt))
    shares = block_tokens(ends, len(prompt), tokens, images, rates.tokens_per_image)
    return _request(parsed, model, tokens, hashes, shares, session_key)


def request_steps(
    parsed: Parsed, model: str, rates: TokenRates, *, session_key: str | None = None
) -> Steps[InferenceRequest]:
    """The same, in steps; and in parts, each of which is counted and hashed while it is at hand."""
    prompt, seed = memoryview(parsed.prompt), seed_of(model, None, parsed.cache_salt)
    count, hashes, images = Count(prompt), list[int](), list[Span]()
    for number, start in enumerate(range(0, len(prompt), PART_BYTES), 1):
        count.add(start)
        hash_more(prompt, min(start + PART_BYTES, len(prompt)), seed, hashes)
        if not number % PARTS_A_STEP:
            yield
    tokens = count.tokens(rates)
    if count.images:
        text = bytes(prompt)
        images = image_spans(text)
        yield
        tokens = yield from prompt_token_steps(text, images, rates)
    shares = block_tokens(ends_of(hashes), len(prompt), tokens, images, rates.tokens_per_image)
    return _request(parsed, model, tokens, hashes, shares, session_key)


def _request(
    parsed: Parsed, model: str, tokens: int, hashes: list[int], shares: list[int], session_key: str | None
) -> InferenceRequest:
    return InferenceRequest(
        kind=parsed.kind,
        model=model,
        asked_model=parsed.model,
        input_tokens=tokens,
        stream=parsed.stream,
        max_tokens=parsed.max_tokens,
        choices=parsed.choices,
        prompt=parsed.prompt,
        block_hashes=hashes,
        block_tokens=shares,
        session_key=session_key or parsed.session_key,
        cache_salt=parsed.cache_salt,
    )


def model_edits(body: bytes, parsed: Parsed, model: str) -> tuple[Splice, ...]:
    """What makes `body`, from which `parsed` was read, name `model`; nothing if it does."""
    length = len(parsed.model_raw)
    if model == parsed.model and length and (length != len(_NULL) or bytes(parsed.model_raw) != _NULL):
        return ()
    return (_set_model(body, parsed, model),)


def _set_model(body: bytes, parsed: Parsed, model: str) -> Splice:
    boundary = parsed.boundary
    if len(parsed.model_raw):
        start, end = locate(body, parsed.model_raw)
        return Splice(start, end, model.encode() if boundary else msgspec.json.encode(model))
    if not boundary:
        return insert_field(body, "model", msgspec.json.encode(model))
    start = body.index(boundary)
    return Splice(start, start, multipart.model_part(boundary, model))


_NULL: Final = b"null"


def _model(raw: msgspec.Raw, default: str | None) -> str | None:
    """The model's name, the default for none, None for anything but a string. Raises DecodeError for broken bytes."""
    if not raw:
        return default
    try:
        name = _decode_name(raw)
    except msgspec.ValidationError:
        return None
    return default if name is None else name


def _count(value: object) -> int | None:
    """A token count within reason; anything else is left to the engine to refuse."""
    return value if type(value) is int and 0 < value < 2**31 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def refuse(message: str, reason: Reason, param: str | None = None) -> Refusal:
    """The refusal of a request that no engine could serve."""
    return Refusal(400, _INVALID, message, reason, param)


def no_model() -> Refusal:
    """The refusal of a request that does not say who is to serve it."""
    return refuse("you must provide a model, as a string", Reason.INVALID_REQUEST, "model")


def _no_body() -> Refusal:
    return refuse("the request has no body", Reason.EMPTY_BODY)
