"""Request bytes -> InferenceRequest, or a Refusal that says what is wrong with them.

Reads only what routing needs, with msgspec into a Struct whose big fields stay raw: `messages` is never decoded, only
hashed and measured, and unknown fields are never looked at. Not here: which pool a model belongs to (the
generation's routing table) and what is sent on (splice.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.request.blocks import block_hashes, block_tokens, seed_of
from extproc.request.splice import Splice, locate
from extproc.request.tokens import TokenRates, image_spans, prompt_tokens
from policies.types import InferenceRequest, Kind, Reason, Refusal

_NONE = msgspec.Raw(b"")
_INVALID = "invalid_request_error"


class _Body(msgspec.Struct):
    """The fields of a chat or text completion that routing reads. Types are loose: the engine is the judge."""

    model: msgspec.Raw = _NONE
    stream: Any = False
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    max_tokens: Any = None
    max_completion_tokens: Any = None
    cache_salt: Any = None
    user: Any = None
    prompt_cache_key: Any = None


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_text = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body that could be read; `prompt` is raw JSON, joined in the order a chat template uses it.

    `model_raw` is a view of the model's JSON where it stands in the body.
    """

    kind: Kind
    model: str
    model_raw: memoryview
    stream: bool
    prompt: bytes
    max_tokens: int | None
    cache_salt: str | None
    session_key: str | None


def parse_body(kind: Kind, body: bytes) -> Parsed | Refusal:
    """Read one JSON body. A Refusal (400) for what no engine could serve."""
    if not body:
        return _refuse("the request has no body", Reason.EMPTY_BODY)
    try:
        fields = _decode_body(body)
        model = _model(fields.model)
    except msgspec.ValidationError as error:
        return _refuse(f"the body cannot be read as a request: {error}", Reason.INVALID_JSON)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _refuse(f"the body is not valid JSON: {error}", Reason.INVALID_JSON)
    except RecursionError:
        return _refuse("the body is nested too deeply", Reason.INVALID_JSON)
    if not model:
        return _refuse("you must provide a model, as a string", Reason.INVALID_REQUEST, "model")
    return _PARSERS[kind](fields, model)


def _chat(fields: _Body, model: str) -> Parsed | Refusal:
    return _parsed(Kind.CHAT, fields, model, "messages", bytes(fields.messages), bytes(fields.tools))


def _completion(fields: _Body, model: str) -> Parsed | Refusal:
    return _parsed(Kind.COMPLETION, fields, model, "prompt", bytes(fields.prompt), b"")


_PARSERS: dict[Kind, Callable[[_Body, str], Parsed | Refusal]] = {Kind.CHAT: _chat, Kind.COMPLETION: _completion}


def _parsed(kind: Kind, fields: _Body, model: str, param: str, prompt: bytes, tools: bytes) -> Parsed | Refusal:
    if not prompt:
        return _refuse(f"you must provide {param}", Reason.INVALID_REQUEST, param)
    return Parsed(
        kind=kind,
        model=model,
        model_raw=memoryview(fields.model),
        stream=fields.stream is True,
        prompt=tools + prompt if tools else prompt,
        max_tokens=_count(fields.max_completion_tokens) or _count(fields.max_tokens),
        cache_salt=_text(fields.cache_salt),
        session_key=_text(fields.prompt_cache_key) or _text(fields.user),
    )


def to_request(parsed: Parsed, model: str, rates: TokenRates, *, session_key: str | None = None) -> InferenceRequest:
    """The request as the policies see it; `model` is the name the engines serve, aliases resolved."""
    prompt = parsed.prompt
    images = image_spans(prompt)
    tokens = prompt_tokens(prompt, images, rates)
    hashes, ends = block_hashes(prompt, seed_of(model, None, parsed.cache_salt))
    return InferenceRequest(
        kind=parsed.kind,
        model=model,
        asked_model=parsed.model,
        input_tokens=tokens,
        stream=parsed.stream,
        max_tokens=parsed.max_tokens,
        prompt=prompt,
        block_hashes=hashes,
        block_tokens=block_tokens(ends, len(prompt), tokens, images, rates.tokens_per_image),
        session_key=session_key or parsed.session_key,
        cache_salt=parsed.cache_salt,
    )


def model_splice(body: bytes, parsed: Parsed, model: str) -> Splice:
    """The edit that puts `model` in the place of the model in `body`, from which `parsed` was read."""
    start, end = locate(body, parsed.model_raw)
    return Splice(start, end, msgspec.json.encode(model))


def _model(raw: msgspec.Raw) -> str | None:
    """The model's name, or None for anything but a string. Raises DecodeError for broken bytes."""
    try:
        return _decode_text(raw) if raw else None
    except msgspec.ValidationError:
        return None


def _count(value: object) -> int | None:
    """A token count within reason; anything else is left to the engine to refuse."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _refuse(message: str, reason: Reason, param: str | None = None) -> Refusal:
    return Refusal(400, _INVALID, message, reason, param)
