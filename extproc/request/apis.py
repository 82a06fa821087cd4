"""The APIs we route, a row each: its paths, where it names its model, and which fields make up its prompt.

What is true of one API alone stands in its row; the code that reads requests knows only what a row may say. Not here:
reading bodies (parsing.py, multipart.py), and paths that an operator adds (`routing.paths`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Final
from urllib.parse import unquote

import msgspec

from policies.types import Kind


class ModelIn(IntEnum):
    """Where a request names its model."""

    JSON = auto()
    """A field of its JSON body."""
    FORM = auto()
    """A part of its multipart body."""
    QUERY = auto()
    """The query: there is no body, or none that ends."""
    RESPONSE_ID = auto()
    """Not at all: the path names an answer, and only the endpoint that gave it has it."""
    PATH = auto()
    """Not at all: the operator's rule for the path names a pool."""
    NOWHERE = auto()
    """Not at all: we answer ourselves."""


@dataclass(init=False, eq=False)
class Api:
    """One row, never changed.

    `prompt`: the fields of the prompt, in the order a chat template uses them; `required`: any one of them.

    An API without `prompt` fields has nothing that an engine's prefix cache could hold.
    """

    kind: Kind
    paths: tuple[str, ...]
    prompt: tuple[str, ...]
    required: tuple[str, ...]
    model_in: ModelIn
    methods: tuple[str, ...]
    anthropic: bool
    """Errors have the shape that Anthropic's clients parse."""

    def __init__(
        self,
        kind: Kind,
        paths: tuple[str, ...],
        prompt: tuple[str, ...] = (),
        required: tuple[str, ...] = (),
        model_in: ModelIn = ModelIn.JSON,
        methods: tuple[str, ...] = ("POST",),
        *,
        anthropic: bool = False,
    ) -> None:
        self.kind = kind
        self.paths = paths
        self.prompt = prompt
        self.required = required
        self.model_in = model_in
        self.methods = methods
        self.anthropic = anthropic


_FIRST_TEXTS = ("query", "queries", "text_1", "data_1")

APIS = (
    Api(Kind.CHAT, ("/v1/chat/completions", "/v1/chat/completions/batch"), ("tools", "messages"), ("messages",)),
    Api(Kind.COMPLETION, ("/v1/completions",), ("prompt",), ("prompt",)),
    Api(Kind.RESPONSE, ("/v1/responses",), ("instructions", "tools", "input"), ("input",)),
    Api(Kind.EMBEDDING, ("/v1/embeddings",), ("input", "messages"), ("input", "messages")),
    Api(
        Kind.RERANK,
        ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        (*_FIRST_TEXTS, "documents", "text_2", "data_2"),
        _FIRST_TEXTS,
    ),
    Api(Kind.MESSAGE, ("/v1/messages",), ("system", "tools", "messages"), ("messages",), anthropic=True),
    Api(Kind.TOKENIZE, ("/v1/messages/count_tokens",), anthropic=True),
    Api(Kind.POOLING, ("/pooling", "/classify", "/v1/classify", "/v1/pooling"), ("input", "messages")),
    Api(Kind.TOKENIZE, ("/tokenize", "/detokenize")),
    Api(Kind.AUDIO, ("/v1/audio/transcriptions", "/v1/audio/translations"), model_in=ModelIn.FORM),
    Api(Kind.REALTIME, ("/v1/realtime",), model_in=ModelIn.QUERY, methods=("GET",)),
    Api(Kind.RESPONSE, ("/v1/responses/{id}",), model_in=ModelIn.RESPONSE_ID, methods=("GET",)),
    Api(Kind.RESPONSE, ("/v1/responses/{id}/cancel",), model_in=ModelIn.RESPONSE_ID),
    Api(
        Kind.OTHER, ("/v1/models", "/v1/models/", "/v1/models/{id}"), model_in=ModelIn.NOWHERE, methods=("GET", "HEAD")
    ),
)
OTHER = Api(Kind.OTHER, (), model_in=ModelIn.PATH, methods=())
"""Whatever an operator's path rule leads somewhere; any method."""

BY_PATH: Final = {path: api for api in APIS for path in api.paths}
JSON_PATHS: Final = tuple(path for path, api in BY_PATH.items() if api.model_in is ModelIn.JSON)
_RESPONSE_ID: Final = re.compile(r"(?<=^/v1/responses/)[^/]+")
_MODELS: Final = BY_PATH["/v1/models/"]
_BELOW_MODELS: Final = "/v1/models/"

_ENGINE_ADMIN = frozenset(
    {
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume",
        "/is_paused", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc",
        "/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/server_info",
        "/init_weight_transfer_engine", "/update_weights", "/start_weight_update", "/finish_weight_update",
        "/get_world_size", "/abort_requests", "/health", "/ping", "/load", "/version", "/metrics",
        "/kv_event_sources", "/docs", "/redoc", "/openapi.json", "/tokenizer_info",
    }
)  # fmt: skip
"""What an engine offers to those who run it. Each changes or shows one instance, and none is for clients."""


def path_of(headers: Mapping[str, str]) -> str:
    """Without the query: some clients put their key there."""
    return headers.get(":path", "").partition("?")[0]


def by_path(path: str) -> Api | None:
    """The API of a path, if it is one of ours."""
    if path.startswith(_BELOW_MODELS):
        return _MODELS
    return BY_PATH.get(path) or BY_PATH.get(_RESPONSE_ID.sub("{id}", path))


def api_of(headers: Mapping[str, str]) -> Api | None:
    """The API that a request calls, if it is one of ours.

    Below the model list only reading is: other servers have calls of their own there, for an operator's path rule.
    """
    path = headers.get(":path", "")
    api = BY_PATH.get(path) or by_path(path.partition("?")[0])
    if api is _MODELS and model_id(path_of(headers)) and headers.get(":method", "") not in api.methods:
        return None
    return api


def response_id(path: str) -> str:
    """The answer that a path asks for; empty if none."""
    found = _RESPONSE_ID.search(path)
    return unquote(found[0]) if found else ""


def model_id(path: str) -> str:
    """The model that a path below the model list asks for; empty if none. Names may have slashes, escaped or not."""
    return unquote(path[len(_BELOW_MODELS) :]) if path.startswith(_BELOW_MODELS) else ""


def canonical(path: str) -> str:
    """The path as an engine reads it: escapes decoded, dots and doubled slashes resolved."""
    return "/" + posixpath.normpath("/" + unquote(path)).lstrip("/")


def is_engine_admin(path: str) -> bool:
    """Whether a canonical path, or what it stands under, is one of an engine's own."""
    return path in _ENGINE_ADMIN or f"/{path.split('/')[1]}" in _ENGINE_ADMIN


# -- callers that do not show the path


def without_path(headers: Mapping[str, str]) -> bool:
    """A gateway that shows neither path nor method, unlike CONNECT, which lacks only the path."""
    return ":path" not in headers and ":method" not in headers


_GUESSED = tuple(api for api in APIS if api.required and not api.anthropic)
"""By the first required field found. Of two that share one, the first is meant: the model alone says where it goes."""
_Keys = msgspec.defstruct(
    "_Keys",
    [(name, msgspec.Raw, msgspec.Raw(b"")) for name in dict.fromkeys(n for api in _GUESSED for n in api.required)],
)
_decode_keys = msgspec.json.Decoder(_Keys).decode


def guess(headers: Mapping[str, str], body: bytes) -> Api:
    """The API of a request without a path, by its content type or the keys of its body; a chat if nothing tells."""
    if is_multipart(headers):
        return BY_PATH["/v1/audio/transcriptions"]
    try:
        keys = _decode_keys(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return APIS[0]  # whose parser says what is wrong with the body
    return next((api for api in _GUESSED if any(getattr(keys, name) for name in api.required)), APIS[0])


def is_grpc(headers: Mapping[str, str]) -> bool:
    """Whether the request is a gRPC call, by the rule that Envoy has for it. Its body may never end."""
    kind = headers.get("content-type", "")
    return kind == "application/grpc" or kind.startswith("application/grpc+")


def is_multipart(headers: Mapping[str, str]) -> bool:
    """Whether the body is a form with parts."""
    return headers.get("content-type", "").lower().startswith("multipart/")
