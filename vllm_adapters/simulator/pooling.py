"""vLLM's APIs that generate nothing: embeddings, scores, tokens, transcripts. As far as a router cares for them.

Each is a function from the request's body to the answer's document. They are answered at once and take no place in
the engine model; the figures in them are hashes of the text, the same whenever and wherever it is asked for.
"""

from __future__ import annotations

import base64
import email
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message as MimeMessage
from typing import Any, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from vllm_adapters.simulator.api import ApiError, Reader
from vllm_adapters.simulator.text import TOKEN_BYTES, count_tokens

DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class Posted:
    """One request: the body, what its headers say of it, and its id."""

    body: bytes
    content_type: str
    request_id: str


Answerer: TypeAlias = Callable[[Reader, Posted], dict[str, Any]]


class _Embed(msgspec.Struct):
    model: str | None = None
    input: Any = None
    messages: Any = None
    encoding_format: str | None = None


class _Rank(msgspec.Struct):
    model: str | None = None
    query: Any = None
    text_1: Any = None
    documents: Any = None
    text_2: Any = None


class _Tokenize(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: Any = None


class _Detokenize(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def _embeddings(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, texts = _inputs(reader, posted)
    data = [
        {"index": index, "object": "embedding", "embedding": _embedding(text, asked.encoding_format)}
        for index, text in enumerate(texts)
    ]
    return _list(f"embd-{posted.request_id}", reader.model(asked.model), data, texts)


def _pooling(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, texts = _inputs(reader, posted)
    data = [{"index": index, "object": "pooling", "data": _embedding(text, None)} for index, text in enumerate(texts)]
    return _list(f"pool-{posted.request_id}", reader.model(asked.model), data, texts)


def _classes(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, texts = _inputs(reader, posted)
    shares = [_score("", text) for text in texts]
    data = [
        {"index": index, "label": f"LABEL_{int(share > 0.5)}", "probs": [1 - share, share], "num_classes": 2}
        for index, share in enumerate(shares)
    ]
    return _list(f"classify-{posted.request_id}", reader.model(asked.model), data, texts)


def _batch(reader: Reader, posted: Posted) -> dict[str, Any]:
    """Chats answered together, without taking places in the engine: a choice per conversation."""
    asked, texts = _inputs(reader, posted)
    choices = [
        {"index": index, "message": {"role": "assistant", "content": f"{_score('', text)}"}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    name, model = f"chatcmpl-{posted.request_id}", reader.model(asked.model)
    return {"id": name, "object": "chat.completion", "model": model, "choices": choices, "usage": _usage(texts)}


def _message_tokens(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, texts = _inputs(reader, posted)
    reader.model(asked.model)
    return {"input_tokens": _usage(texts)["prompt_tokens"]}


def _scores(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, query, documents = _pairs(reader, posted)
    data = [{"index": index, "object": "score", "score": _score(query, text)} for index, text in enumerate(documents)]
    return _list(f"score-{posted.request_id}", reader.model(asked.model), data, [query, *documents])


def _rerank(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked, query, documents = _pairs(reader, posted)
    results: list[dict[str, Any]] = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": _score(query, text)}
        for index, text in enumerate(documents)
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    usage = _usage([query, *documents])
    return {"id": f"score-{posted.request_id}", "model": reader.model(asked.model), "usage": usage, "results": results}


def _inputs(reader: Reader, posted: Posted) -> tuple[_Embed, list[str]]:
    asked = reader.decode(posted.body, _Embed)
    return asked, _texts(asked.messages if asked.input is None else asked.input, "input")


def _pairs(reader: Reader, posted: Posted) -> tuple[_Rank, str, list[str]]:
    asked = reader.decode(posted.body, _Rank)
    (query, *_) = _texts(asked.text_1 if asked.query is None else asked.query, "query")
    return asked, query, _texts(asked.text_2 if asked.documents is None else asked.documents, "documents")


def _tokenize(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked = reader.decode(posted.body, _Tokenize)
    reader.model(asked.model)
    text = asked.prompt if asked.prompt is not None else _texts(asked.messages, "prompt")[0]
    data = text.encode()
    tokens = [int.from_bytes(data[start : start + TOKEN_BYTES], "little") for start in range(0, len(data), TOKEN_BYTES)]
    return {"count": len(tokens), "max_model_len": reader.max_model_len, "tokens": tokens, "token_strs": None}


def _detokenize(reader: Reader, posted: Posted) -> dict[str, Any]:
    asked = reader.decode(posted.body, _Detokenize)
    reader.model(asked.model)
    data = b"".join((token & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "little") for token in asked.tokens)
    return {"prompt": data.rstrip(b"\0").decode(errors="replace")}


def _transcription(reader: Reader, posted: Posted) -> dict[str, Any]:
    """The text is the file's digest: that the very bytes arrived can be told from it."""
    header = b"Content-Type: " + posted.content_type.encode("latin-1", "replace") + b"\r\n\r\n"
    form = {_field(part): part for part in email.message_from_bytes(header + posted.body).walk()}
    if "file" not in form:
        raise ApiError(400, "1 validation error: a form with the part `file` is wanted", type="Bad Request")
    reader.model(_content(form["model"]).decode(errors="replace") if "model" in form else None)
    return {"text": f"{xxh3_64_intdigest(_content(form['file'])):016x}", "usage": {"type": "duration", "seconds": 1}}


def _field(part: MimeMessage) -> object:
    return part.get_param("name", header="content-disposition")


def _content(part: MimeMessage) -> bytes:
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


ANSWERERS: dict[str, Answerer] = {
    "/v1/embeddings": _embeddings,
    "/pooling": _pooling,
    "/v1/pooling": _pooling,
    "/classify": _classes,
    "/v1/classify": _classes,
    "/v1/chat/completions/batch": _batch,
    "/v1/messages/count_tokens": _message_tokens,
    "/score": _scores,
    "/v1/score": _scores,
    "/rerank": _rerank,
    "/v1/rerank": _rerank,
    "/v2/rerank": _rerank,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/v1/audio/transcriptions": _transcription,
    "/v1/audio/translations": _transcription,
}
"""Who answers a POST to which path."""


def _texts(value: object, param: str) -> list[str]:
    """What was sent as a list of texts: a string is one, a list its items, and what is no string its JSON."""
    if value is None or value == []:
        raise ApiError(400, f"{param} must not be empty", param=param)
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items]


def _embedding(text: str, encoding: str | None) -> list[float] | str:
    figures = [xxh3_64_intdigest(text.encode(), seed=place) / 2**63 - 1 for place in range(DIMENSIONS)]
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *figures)).decode()
    return figures


def _score(query: str, document: str) -> float:
    return float(xxh3_64_intdigest(f"{query}\0{document}".encode()) / 2**64)


def _usage(texts: list[str]) -> dict[str, Any]:
    tokens = sum(count_tokens(text.encode()) for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}


def _list(name: str, model: str, data: list[dict[str, Any]], texts: list[str]) -> dict[str, Any]:
    created = int(time.time())
    return {"id": name, "object": "list", "created": created, "model": model, "data": data, "usage": _usage(texts)}
