"""Request bytes -> InferenceRequest, or a Refusal that says what is wrong with them.

Reads only what routing needs, with msgspec into a Struct whose big fields stay raw: `messages` is never decoded, only
hashed and measured, and unknown fields are never looked at. Which fields are the prompt stands in the API's row
(apis.py). Not here: which pool a model belongs to (plans.py) and what is sent on (splice.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from extproc.request import multipart
from extproc.request.apis import Api
from extproc.request.blocks import block_hashes, block_tokens, ends_of, hash_more, seed_of
from extproc.request.bounds import Bounds
from extproc.request.splice import Splice, insert_field, locate
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

_NONE = msgspec.Raw(b"")
_NOTHING = memoryview(b"")
_INVALID = "invalid_request_error"
_COMPLETION, _RESPONSE = Kind.COMPLETION, Kind.RESPONSE  # every request asks: by the enum each takes ten times as long
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class _Body(msgspec.Struct):
    """The fields that routing reads, whatever the API. Types are loose: the engine is the judge."""

    model: msgspec.Raw = _NONE
    stream: Any = False
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    cache_salt: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    request_id: Any = None
    store: Any = None
    stream_options: msgspec.Raw = _NONE
    nothing: ClassVar[msgspec.Raw] = _NONE


_Raws: TypeAlias = tuple[msgspec.Raw, ...]


class _Reader(NamedTuple):
    """How bodies of one API are read. `prompt` and `required` give the values of these fields of a decoded one."""

    decode: Callable[[bytes], Any]
    prompt: Callable[[Any], _Raws]
    required: Callable[[Any], _Raws]


@cache
def _reader(api: Api) -> _Reader:
    """Its body may have the row's fields beside the common ones; they stay raw. Cached for every row."""
    fields = dict.fromkeys((*api.prompt, *api.required))
    struct = msgspec.defstruct("_Body", [(name, msgspec.Raw, _NONE) for name in fields], bases=(_Body,))
    return _Reader(msgspec.json.Decoder(struct).decode, _values(api.prompt), _values(api.required))


def _values(names: tuple[str, ...]) -> Callable[[Any], _Raws]:
    """Gets them in one call; `nothing` twice, since of one name alone would come a value, and no tuple."""
    return attrgetter(*names, "nothing", "nothing")


_decode_name = msgspec.json.Decoder(str | None).decode

_SetModel: TypeAlias = Callable[[bytes, "Parsed", str], Splice]


def _set_json_model(body: bytes, parsed: Parsed, model: str) -> Splice:
    name = msgspec.json.encode(model)
    if not parsed.model_raw:
        return insert_field(body, "model", name)
    return Splice(*locate(body, parsed.model_raw), name)


class Stored(msgspec.Struct, frozen=True):
    """What a request of the Responses API says of stored answers; `None` where it says nothing."""

    wanted: bool
    own_id: str | None
    previous_id: str | None


class Parsed(msgspec.Struct, frozen=True):
    """A body that could be read; `prompt` is raw JSON, joined in the order a chat template uses it.

    Of a long body it is a view, where there is nothing to join.
    `model_raw` and `stream_options` are views of what stands in the body; empty where it has none.
    """

    kind: Kind
    model: str
    model_raw: memoryview
    stream: bool = False
    prompt: bytes | memoryview = b""
    max_tokens: int | None = None
    choices: int = 1
    cache_salt: str | None = None
    session_key: str | None = None
    stored: Stored | None = None
    stream_options: memoryview = _NOTHING
    set_model: _SetModel = _set_json_model


def parse_body(
    api: Api, body: bytes, default_model: str | None = None, bounds: Bounds | None = None
) -> Parsed | Refusal:
    """Read one JSON body. A Refusal (400) for what no engine could serve, or what is beyond `bounds`."""
    if not body:
        return _no_body()
    if body.startswith(_BYTE_ORDER_MARKS):
        return refuse("the body is not valid JSON: it begins with a byte order mark", Reason.INVALID_JSON)
    reader = _reader(api)
    try:
        fields = reader.decode(body)
        model = _model(fields.model, default_model)
    except msgspec.ValidationError as error:
        return refuse(f"the body cannot be read as a request: {error}", Reason.INVALID_JSON)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return refuse(f"the body is not valid JSON: {error}", Reason.INVALID_JSON)
    except RecursionError:
        return refuse("the body is nested too deeply", Reason.INVALID_JSON)
    if bounds is not None:
        refusal = bounds.judge_body(body, map(memoryview, reader.prompt(fields)))
        if refusal is not None:
            return refusal
    if not model:
        return no_model()
    if api.required and not any(reader.required(fields)):
        return refuse(f"you must provide {' or '.join(api.required)}", Reason.INVALID_REQUEST, api.required[0])
    raws = reader.prompt(fields)
    return _parsed(api, fields, model, b"".join(raws) if len(body) <= PART_BYTES else _joined(raws, len(body)))


def _joined(raws: _Raws, body_bytes: int) -> bytes | memoryview:
    """All of them; one alone without a copy if it is most of the body, which a view keeps for as long as itself."""
    given = [raw for raw in raws if raw]
    return memoryview(given[0]) if len(given) == 1 and 2 * len(given[0]) > body_bytes else b"".join(given)


def _parsed(api: Api, fields: Any, model: str, prompt: bytes | memoryview) -> Parsed:  # noqa: ANN401 - made at run time, from _Body
    # a field that is not there, as most, costs no call
    return Parsed(
        kind=api.kind,
        model=model,
        model_raw=memoryview(fields.model),
        stream=fields.stream is True,
        prompt=prompt,
        max_tokens=(fields.max_completion_tokens and _count(fields.max_completion_tokens))
        or (fields.max_output_tokens and _count(fields.max_output_tokens))
        or (_count(fields.max_tokens) if fields.max_tokens else None),
        choices=((fields.n and _count(fields.n)) or 1) * (_prompts(fields.prompt) if api.kind is _COMPLETION else 1),
        cache_salt=_text(fields.cache_salt) if fields.cache_salt else None,
        session_key=(fields.prompt_cache_key and _text(fields.prompt_cache_key))
        or (_text(fields.user) if fields.user else None),
        stored=_stored(fields) if api.kind is _RESPONSE else None,
        stream_options=memoryview(fields.stream_options),
    )


_PROMPTS_IN_A_LIST = re.compile(rb"\s*\[\s*([\"\[])")


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


def _stored(fields: _Body) -> Stored:
    return Stored(fields.store is not False, _text(fields.request_id), _text(fields.previous_response_id))


def parse_form(api: Api, content_type: str, body: bytes, default_model: str | None = None) -> Parsed | Refusal:
    """Find the model in a multipart form. A Refusal (400) for what no engine could serve."""
    if not body:
        return _no_body()
    try:
        boundary = multipart.boundary_of(content_type)
        place = multipart.find_model(body, boundary)
        named = memoryview(body)[slice(*place or (0, 0))]
        model = str(named, "utf-8") or default_model
    except multipart.NotAForm as error:
        return refuse(f"the body cannot be read as a form: {error}", Reason.INVALID_REQUEST)
    except UnicodeDecodeError:
        return refuse("the model's name is not UTF-8", Reason.INVALID_REQUEST, "model")
    if not model:
        return no_model()

    def set_model(body: bytes, parsed: Parsed, model: str) -> Splice:
        if parsed.model_raw:
            return Splice(*locate(body, parsed.model_raw), model.encode())
        start = body.index(boundary)
        return Splice(start, start, multipart.model_part(boundary, model))

    return Parsed(api.kind, model, named, set_model=set_model)


def to_request(parsed: Parsed, model: str, rates: TokenRates, *, session_key: str | None = None) -> InferenceRequest:
    """The request as the policies see it; `model` is the name the engines serve, aliases resolved."""
    prompt = parsed.prompt
    if len(prompt) > PART_BYTES:
        return at_once(request_steps(parsed, model, rates, session_key=session_key))
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
    count, hashes, images = Count(), list[int](), list[Span]()
    for number, start in enumerate(range(0, len(prompt), PART_BYTES), 1):
        count.add(prompt, start)
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
    if model == parsed.model and parsed.model_raw and bytes(parsed.model_raw) != _NULL:
        return ()
    return (parsed.set_model(body, parsed, model),)


_NULL = b"null"


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
