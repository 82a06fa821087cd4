"""The table: fleets, requests, and what must come of them, whoever asks and whatever carries it.

The cases of llm-d's EPP tests are here as far as they make sense for us; where we decide otherwise, the case says how.
Not there yet, hence not here: loading an adapter on an endpoint that does not list it, and the limit an engine has on
adapters (`max_loras`); shedding by saturation (429 is for `limits.open_requests` alone); objectives.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from gateways import Answered, Asked
from house import P, address

THREE = (P(0, 3, 0.2), P(1, 0, 0.1), P(2, 10, 0.2))
EQUAL = (P(0), P(1), P(2))
_SHOWN = ("shows_path",)
OPERATOR_PATHS = {"routing": {"paths": [{"prefix": "/custom", "pool": "chat"}]}}


@dataclass(frozen=True)
class Routed:
    """Sent on, to the first or any of these endpoints; `body` None: byte for byte as it came."""

    to: tuple[int, ...] = (0, 1, 2)
    body: bytes | None = None
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Answered with an error of ours: status, and `type` and `code` of OpenAI's error object."""

    status: int
    type: str
    code: str


@dataclass(frozen=True)
class Case:
    """One row. `needs`: what a gateway must have for it to make sense, by the names in `Gateway`."""

    name: str
    asked: Asked
    want: Routed | Refused
    fleet: tuple[P, ...] = EQUAL
    config: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def chat(model: str | None = "base", content: str = "hello", **fields: Any) -> bytes:
    """A chat body."""
    named = {} if model is None else {"model": model}
    return json.dumps({**named, "messages": [{"role": "user", "content": content}], **fields}).encode()


def post(*pieces: bytes, **rest: Any) -> Asked:
    """A POST of a chat."""
    return Asked(pieces, **rest)


def get(path: str, **rest: Any) -> Asked:
    """A request that ends with its headers."""
    return Asked((), path, rest.pop("method", "GET"), **rest)


def cut(body: bytes, *sizes: int) -> tuple[bytes, ...]:
    """`body` in pieces of these sizes, the last size again and again."""
    pieces, at, number = [], 0, 0
    while at < len(body):
        size = sizes[min(number, len(sizes) - 1)]
        pieces.append(body[at : at + size])
        at, number = at + size, number + 1
    return tuple(pieces)


def _invalid(code: str = "invalid_request", status: int = 400) -> Refused:
    return Refused(status, "invalid_request_error", code)


NOBODY = Refused(503, "server_error", "no_ready_endpoint")
UNKNOWN_MODEL = _invalid("model_not_found", 404)
BROKEN = _invalid("invalid_json")

# -- which endpoint

LOAD = (
    Case("lower queue and kv cache", post(chat()), Routed((1,)), THREE),
    Case("no other way round", post(chat()), Routed((2,)), (P(0, 3, 0.2), P(1, 10, 0.2), P(2, 0, 0.1))),
    Case("kv cache alone", post(chat()), Routed((1,)), (P(0, 5, 0.9), P(1, 5, 0.1))),
    Case("the one that lists the adapter", post(chat("sql-lora")), Routed((1,)),
         (P(0, 0, 0.2, "tweet-lora"), P(1, 0, 0.1, "sql-lora"), P(2, 10, 0.2, "tweet-lora"))),
    Case("the adapter in spite of queue and kv cache", post(chat("sql-lora")), Routed((2,)),
         (P(0, 0, 0.1), P(1, 0, 0.2, "tweet-lora"), P(2, 10, 0.9, "sql-lora"))),
    Case("of two with the adapter the less loaded", post(chat("sql-lora")), Routed((1,)),
         (P(0, 10, 0.9, "sql-lora"), P(1, 2, 0.1, "sql-lora"), P(2, 0, 0.0))),
    # llm-d would load the adapter somewhere; we route only to who lists it
    Case("nobody lists the adapter", post(chat("sql-lora")), NOBODY, (P(0), P(1, 0, 0.0, "tweet-lora"))),
    Case("load is shed by nobody", post(chat()), Routed((0,)), (P(0, 1_000, 0.99),)),
    Case("least bad when all are full", post(chat()), Routed((1,)), (P(0, 60, 0.99), P(1, 9, 0.85), P(2, 80, 0.9))),
    Case("only who is ready", post(chat()), Routed((2,)), (P(0, ready=False), P(1, ready=False), P(2, 50, 0.9))),
    Case("nobody is ready", post(chat()), NOBODY, (P(0, ready=False),)),
    Case("no endpoints", post(chat()), NOBODY, ()),
    Case("no endpoints, no body", get("/custom/a"), NOBODY, (), OPERATOR_PATHS, _SHOWN),
)  # fmt: skip

# -- the subset a gateway allows

_HINTS = ("hints",)


def _allowed(hint: list[str] | str, to: Iterable[int] | None, name: str) -> Case:
    want = NOBODY if to is None else Routed(tuple(to))
    return Case(f"subset: {name}", post(chat(), subset=hint), want, THREE, needs=_HINTS)


SUBSETS = (
    _allowed([address(0), address(1), address(2)], (1,), "all, so the best"),
    _allowed([address(0), address(2)], (0,), "the best of a part"),
    _allowed([address(2)], (2,), "one, however loaded"),
    _allowed(["10.9.9.9:8000", address(2)], (2,), "one of them not ours"),
    _allowed(["10.9.9.9:8000"], None, "none of ours"),
    _allowed([], None, "an empty list"),
    _allowed("", None, "an empty string"),
    _allowed(f"{address(0)},{address(2)}", (0,), "one string"),
    _allowed(f"  {address(2)} , 10.9.9.9:8000,", (2,), "a string with spaces and a last comma"),
    _allowed([f" {address(2)} "], (2,), "a list with spaces"),
    _allowed(["192.168.1.3"], (2,), "an IP allows its every port"),
    _allowed(["192.168.1.3:9999"], None, "another port of ours"),
    _allowed(["192.168.1"], None, "the beginning of an address"),
    Case("subset: without a body", get("/custom/a", subset=[address(2)]), Routed((2,)), THREE, OPERATOR_PATHS,
         ("hints", "shows_path")),
    Case("subset: none of ours, without a body", get("/custom/a", subset=[]), NOBODY, THREE, OPERATOR_PATHS,
         ("hints", "shows_path")),
)  # fmt: skip

# -- what bodies say

_ODD = (
    b'{ "temperature":1e0,  "model" : "%s",\n"messages":[{"content":"\\u4f60 \xe4\xbd\xa0"}], "x":{"model":"gpt-4o"} } '
)
_LONG = chat(content="word " * 40_000)
BODIES = (
    Case("odd but valid, untouched", post(_ODD % b"base"), Routed()),
    Case("an alias is replaced, nothing else", post(_ODD % b"gpt-4o"), Routed(body=_ODD % b"base")),
    Case("an alias in a long body", post(*cut(_LONG.replace(b"base", b"gpt-4o"), 16_384)), Routed(body=_LONG)),
    Case("no model", post(chat(None)), _invalid()),
    Case("a model that is no string", post(b'{"model":7,"messages":[]}'), _invalid()),
    Case("no model, but a default", post(b'{"messages":["a"]}'), Routed(body=b'{"model":"base","messages":["a"]}'),
         config={"routing": {"default_model": "base"}}),
    Case("an unknown model", post(chat("nobody")), UNKNOWN_MODEL),
    Case("an unknown model, no endpoints", post(chat("nobody")), UNKNOWN_MODEL, ()),
    Case("invalid JSON", post(b"no healthy upstream"), BROKEN),
    Case("invalid JSON in pieces", post(b'{"model":', b'"base",,', b"}"), BROKEN),
    Case("JSON that is no object", post(b'["base"]'), BROKEN),
    Case("no messages", post(b'{"model":"base"}'), _invalid()),
    Case("an empty body", post(b""), _invalid("empty_body")),
    Case("compressed, as it came", post(gzip.compress(chat(), mtime=0), headers=(("content-encoding", "gzip"),)),
         Routed()),
    Case("compressed and cut off", post(gzip.compress(_LONG * 2)[:-1], headers=(("content-encoding", "gzip"),)),
         _invalid("unsupported_encoding", 415)),
    Case("compressed with an alias, sent on plain",
         post(gzip.compress(_LONG.replace(b"base", b"gpt-4o")), headers=(("content-encoding", "gzip"),)),
         Routed(body=_LONG, removed=("content-encoding",))),
    Case("an unknown encoding", post(chat(), headers=(("content-encoding", "br"),)),
         _invalid("unsupported_encoding", 415), needs=_SHOWN),
    Case("larger than allowed", post(*cut(_LONG, 10_000)), _invalid("body_too_large", 413),
         config={"limits": {"request_body_bytes": 100_000}}),
    Case("said to be larger than allowed", post(chat(), headers=(("content-length", "100001"),)),
         _invalid("body_too_large", 413), config={"limits": {"request_body_bytes": 100_000}}),
)  # fmt: skip

_PIECES = {
    "whole": (chat(),),
    "in two": cut(chat(), 20),
    "byte by byte": cut(chat(), 1),
    "in growing pieces": cut(_LONG, 1, 10, 100, 1_000, 10_000, 65_536),
    "at a piece's bound": cut(chat(content="x" * 60_000), 60_000),
    "larger than one message may be": (_LONG,),
    "an empty end": (chat(), b""),
    "an empty start": (b"", chat()),
    "empty pieces between": (b"", chat()[:9], b"", b"", chat()[9:], b"", b""),
    "just empty pieces": (b"", b"", b""),
}
PIECES = (
    *(Case(f"body {name}", post(*pieces), Routed() if any(pieces) else _invalid("empty_body"))
      for name, pieces in _PIECES.items()),
    *(Case(f"alias, body {name}", post(*cut(chat("gpt-4o"), size)), Routed(body=chat()))
      for name, size in (("in two", 14), ("byte by byte", 1))),
    Case("an empty body by a path", post(b"", path="/custom/a"), Routed(), config=OPERATOR_PATHS, needs=_SHOWN),
    Case("trailers after the body", post(*cut(chat(), 9), trailers=True), Routed(), needs=_SHOWN),
    Case("trailers after an empty piece", post(chat(), b"", trailers=True), Routed(), needs=_SHOWN),
    Case("trailers after a broken body", post(b"{", trailers=True), BROKEN, needs=_SHOWN),
    Case("trailers instead of a body", post(trailers=True), _invalid("empty_body"), needs=("sends_trailers",)),
    Case("trailers instead of a body, by a path", post(trailers=True, path="/custom/a"), Routed(),
         config=OPERATOR_PATHS, needs=("streams",)),
)  # fmt: skip

# -- what paths and headers say

_TWICE = (("x-session-id", "a"), ("cookie", "a=1"), ("cookie", "b=2"), ("x-custom", "1"), ("x-custom", "2"))
_OVERWRITTEN = (
    "x-gateway-destination-endpoint", "x-pointsman-cluster", "x-pointsman-endpoint", "x-pointsman-request-id"
)  # fmt: skip
_REMOVED = (
    "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-served", "x-pointsman-model",
    "x-pointsman-parent", "x-pointsman-decision", "x-pointsman-tenant",
)  # fmt: skip


def _forged(name: str, *, overwritten: bool = False) -> Case:
    """A header of ours, from a client who would like another endpoint; it is no hint, and no engine gets it."""
    asked = post(chat(), headers=((name, address(2)),))
    return Case(f"a client's own {name}", asked, Routed((1,), removed=() if overwritten else (name,)), THREE)


PATHS = (
    Case("GET is decided at its headers", get("/custom/a?b=c"), Routed((1,)), THREE, OPERATOR_PATHS, _SHOWN),
    Case("a path of the operator, any body", post(*cut(b"\x00\xff not JSON", 3), path="/custom/a"), Routed((1,)), THREE,
         OPERATOR_PATHS, _SHOWN),
    Case("an empty POST", get("/v1/chat/completions", method="POST"), _invalid("empty_body")),
    Case("an unknown path", post(chat(), path="/v1/nothing"), _invalid("unknown_path", 404), needs=_SHOWN),
    Case("an unknown path without a body", get("/v1/nothing"), _invalid("unknown_path", 404), needs=_SHOWN),
    Case("the engine's administration", post(b"{}", path="/v1/load_lora_adapter"), _invalid("engine_admin", 404),
         needs=_SHOWN),
    Case("a wrong method", get("/v1/chat/completions"), _invalid("method_not_allowed", 405), needs=_SHOWN),
    Case("headers given twice", post(chat(), headers=_TWICE), Routed()),
    Case("a header that is no UTF-8 to us", post(chat(), headers=(("x-custom", "\x80\xff"),)), Routed()),
    *(_forged(name, overwritten=True) for name in _OVERWRITTEN),
    *(_forged(name) for name in _REMOVED),
    *(replace(_forged(name), name=f"a client's own {name}, without a body",
              asked=get("/custom/a", headers=((name, address(2)),)), config=OPERATOR_PATHS, needs=_SHOWN)
      for name in _REMOVED),
    Case("all that a client may not send, together",
         post(chat(), headers=tuple((name, address(2)) for name in (*_OVERWRITTEN, *_REMOVED))),
         Routed((1,), removed=_REMOVED), THREE),
    Case("a tenant of a trusted hop's stays", post(chat(), headers=(("x-pointsman-tenant", "a"),)), Routed((1,)), THREE,
         {"access": {"tenant_header": "x-pointsman-tenant"}}),
)  # fmt: skip

CASES = (*LOAD, *SUBSETS, *BODIES, *PIECES, *PATHS)

# -- responses

_SSE = tuple(b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(20))
RESPONSES = {
    "JSON": Answered((b'{"usage":{"prompt_tokens":1}}',)),
    "JSON in pieces": Answered((b'{"usage":', b'{"prompt_', b'tokens":1}}')),
    "JSON and an empty end": Answered((b'{"usage":{}}', b"")),
    "no JSON": Answered((b"no healthy upstream",)),
    "half a JSON": Answered((b'{"usage":', b"")),
    "a stream": Answered((*_SSE, b"data: [DONE]\n\n")),
    "a stream and an empty end": Answered((*_SSE, b"data: [DONE]\n\n", b"")),
    "a stream, events cut in two": Answered(cut(b"".join(_SSE), 7)),
    "a stream and trailers": Answered(_SSE, trailers=True),
    "nothing but an end": Answered((b"",)),
    "nothing but trailers": Answered((b"",), trailers=True),
    "bytes": Answered((b"\x00\xff\xfe", bytes(range(256)))),
    "large pieces": Answered((b"x" * 65_536, b"y" * 200_000, b"")),
}
