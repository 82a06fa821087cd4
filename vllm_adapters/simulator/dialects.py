"""The Responses API and Anthropic's Messages API, as dialects of chat: what vLLM makes of them, and of the answer.

A request is turned into a chat's body, goes the way of any chat, and the answer is dressed up again. A stream says
the whole text in one delta. Answers of the Responses API are kept, by the one engine that gave them.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from vllm_adapters.simulator.api import ApiError, Reader, Usage

MOST_STORED = 1_000

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer's text, and what it cost."""

    model: str
    text: str
    usage: Usage
    finish_reason: str


class Dialect(Protocol):
    """One request in a dialect."""

    stream: bool

    def as_chat(self) -> bytes:
        """The same as a chat's body."""

    def whole(self, spoken: Spoken) -> Document:
        """The answer."""

    def events(self, answer: Document) -> list[tuple[str, Document]]:
        """The same answer as the events of a stream."""


# -- Responses


class _Ask(msgspec.Struct):
    input: str | list[Document]
    model: str | None = None
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    max_output_tokens: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    request_id: str = ""
    store: bool | None = True


class Responses:
    """Every answer given by one engine, by id; the oldest are forgotten."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._given: OrderedDict[str, Document] = OrderedDict()

    def read(self, body: bytes, _: str) -> Response:
        """One request. Raises ApiError. Its id is the body's `request_id`, never a header's: so it is in vLLM."""
        asked = self._reader.decode(body, _Ask)
        previous = None if asked.previous_response_id is None else self.find(asked.previous_response_id)
        return Response(asked, previous, self)

    def find(self, response_id: str) -> Document:
        """An answer given before. Raises ApiError."""
        if response_id not in self._given:
            raise ApiError(404, f"Response with id '{response_id}' not found.", param="response_id")
        return self._given[response_id]

    def keep(self, answer: Document) -> None:
        """Remember an answer."""
        self._given[answer["id"]] = answer
        if len(self._given) > MOST_STORED:
            self._given.popitem(last=False)


class Response:
    """One request of the Responses API."""

    def __init__(self, asked: _Ask, previous: Document | None, given: Responses) -> None:
        self.stream = bool(asked.stream)
        self._asked = asked
        self._previous = previous
        self._given = given
        self._id = asked.request_id or f"resp_{uuid.uuid4().hex}"

    def as_chat(self) -> bytes:
        """Instructions first, then the answer this goes on from, then the input."""
        asked = self._asked
        messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        if self._previous is not None:
            messages.append({"role": "assistant", "content": self._previous["output"][0]["content"][0]["text"]})
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        messages += [{"role": item.get("role", "tool"), "content": _plain(item.get("content"))} for item in items]
        return msgspec.json.encode(
            {
                "model": asked.model,
                "messages": messages,
                "tools": asked.tools,
                "max_tokens": asked.max_output_tokens,
                "cache_salt": asked.cache_salt,
            }
        )

    def whole(self, spoken: Spoken) -> Document:
        """As vLLM writes it; kept unless the client said not to."""
        usage = spoken.usage
        answer = {
            **self._envelope(spoken.model, "completed"),
            "output": [_message(f"msg_{self._id}", spoken.text)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self._asked.store is not False:
            self._given.keep(answer)
        return answer

    def _envelope(self, model: str, status: str) -> Document:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id,
            "metadata": None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def events(self, answer: Document) -> list[tuple[str, Document]]:
        """Created, one delta, done, completed."""
        (message,) = answer["output"]
        place = {"item_id": message["id"], "output_index": 0, "content_index": 0, "logprobs": []}
        text = message["content"][0]["text"]
        return [
            ("response.created", {"response": self._envelope(answer["model"], "in_progress")}),
            ("response.output_item.added", {"output_index": 0, "item": message | {"content": []}}),
            ("response.output_text.delta", {**place, "delta": text}),
            ("response.output_text.done", {**place, "text": text}),
            ("response.output_item.done", {"output_index": 0, "item": message}),
            ("response.completed", {"response": answer}),
        ]


def _message(name: str, text: str) -> Document:
    content: Document = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [content]}


def _plain(content: Any) -> Any:  # noqa: ANN401 - a JSON value
    """Content as chat has it: parts of text are called `text` there."""
    if not isinstance(content, list):
        return content
    return [{**part, "type": "text"} if "text" in part else part for part in content if isinstance(part, dict)]


# -- Anthropic's Messages


class _Message(msgspec.Struct):
    model: str
    messages: list[Document]
    max_tokens: int
    system: str | list[Document] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    cache_salt: str | None = None


class Message:
    """One request of Anthropic's API."""

    def __init__(self, asked: _Message, request_id: str) -> None:
        self.stream = bool(asked.stream)
        self._asked = asked
        self._id = f"chatcmpl-{request_id}"  # so it is in vLLM

    @classmethod
    def read(cls, reader: Reader, body: bytes, request_id: str) -> Message:
        """One request. Raises ApiError."""
        return cls(reader.decode(body, _Message), request_id)

    def as_chat(self) -> bytes:
        """The system's words become the first message."""
        asked = self._asked
        messages = [{"role": "system", "content": _plain(asked.system)}] if asked.system else []
        messages += [{"role": m.get("role", "user"), "content": _plain(m.get("content"))} for m in asked.messages]
        return msgspec.json.encode(
            {
                "model": asked.model,
                "messages": messages,
                "tools": asked.tools,
                "max_tokens": asked.max_tokens,
                "cache_salt": asked.cache_salt,
            }
        )

    def whole(self, spoken: Spoken) -> Document:
        """As vLLM writes it."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": spoken.text}],
            "model": spoken.model,
            "stop_reason": "max_tokens" if spoken.finish_reason == "length" else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": spoken.usage.prompt_tokens, "output_tokens": spoken.usage.completion_tokens},
        }

    def events(self, answer: Document) -> list[tuple[str, Document]]:
        """Start, one delta, stop."""
        (block,) = answer["content"]
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        return [
            ("message_start", {"message": answer | {"content": [], "stop_reason": None}}),
            ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": block["text"]}}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": ended, "usage": answer["usage"]}),
            ("message_stop", {}),
        ]


def stream_of(dialect: Dialect, answer: Document) -> bytes:
    """The whole stream of an answer: events have names here, and no [DONE] comes at the end."""
    events = [
        (name, {"type": name, "sequence_number": number, **document})
        for number, (name, document) in enumerate(dialect.events(answer))
    ]
    return b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data)) for name, data in events)


def anthropic_error(error: ApiError) -> bytes:
    """The error in the shape that Anthropic's clients parse."""
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error)}})
