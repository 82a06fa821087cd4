"""The bodies of vLLM's OpenAI API: requests as far as the simulator reads them, answers as vLLM writes them.

No sockets and no engine here. Fields nobody needs (temperature, n, stop, ...) are accepted and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from vllm_adapters.simulator.text import (
    TOKEN_BYTES,
    Function,
    Message,
    answer,
    chain_seed,
    count_tokens,
    render_call,
    render_chat,
    render_token_ids,
)

DEFAULT_MAX_TOKENS = 64  # vLLM's is all that fits the context; a simulated answer has no natural end
DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class ApiError(Exception):
    """A request answered with an error, in vLLM's shape."""

    def __init__(self, status: int, message: str, *, type: str | None = None, param: str | None = None) -> None:  # noqa: A002
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, type, param)


def error_body(status: int, message: str, type: str | None = None, param: str | None = None) -> bytes:  # noqa: A002
    """The JSON of an error; the type is vLLM's for the status unless given."""
    type = type or _TYPES.get(status) or HTTPStatus(status).phrase  # noqa: A001
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": status}})


class StreamOptions(msgspec.Struct):
    """What the client wants in a stream besides the text."""

    include_usage: bool | None = None


class _Parameters(msgspec.Struct):
    properties: dict[str, dict[str, Any]] = {}


class _ToolFunction(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Tool(msgspec.Struct):
    function: _ToolFunction


class _ToolChoice(msgspec.Struct):
    function: Function


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[Message]
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: str | _ToolChoice | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str]


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request: the prompt as text, and the answer it will get (cut to `max_tokens` or the context)."""

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    prompt: bytes
    answer: bytes
    seed: int  # of the chain of block hashes
    call: Function | None = None  # the answer is this tool call
    whole: bool = False  # the answer has its natural end, not one for length

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return count_tokens(self.prompt)

    @property
    def output_tokens(self) -> int:
        """Length of the answer."""
        return count_tokens(self.answer)


@contextmanager
def _validation() -> Iterator[None]:
    """What a body is refused with that has not the shape it should have."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"1 validation error: {error}", type="Bad Request") from error


class Reader:
    """Reads request bodies for an engine that serves `models` with contexts of `max_model_len` tokens."""

    def __init__(self, models: tuple[str, ...], max_model_len: int) -> None:
        self.models = models
        self.max_model_len = max_model_len
        self._chat = msgspec.json.Decoder(_ChatBody)
        self._completion = msgspec.json.Decoder(_CompletionBody)

    def read(self, body: bytes, *, chat: bool) -> Ask:
        """The request in `body`. Raises ApiError."""
        with _validation():
            return self._read_chat(body) if chat else self._read_completion(body)

    def decode(self, body: bytes, type: type[_T]) -> _T:  # noqa: A002 - as msgspec calls it
        """The body as a struct of that type. Raises ApiError."""
        with _validation():
            return msgspec.json.decode(body, type=type)

    def _read_completion(self, document: bytes) -> Ask:
        body = self._completion.decode(document)
        return self._ask(body, self.model(body.model), _prompt(body))

    def model(self, asked: str | None) -> str:
        """The model meant; the first one where none is named. Raises ApiError for one that is not served."""
        if asked is None:
            return self.models[0]
        if asked not in self.models:
            aliases = ", ".join(self.models)
            message = f"The model `{asked}` does not exist. Valid aliases: {aliases}."
            raise ApiError(404, message, param="model")
        return asked

    def _read_chat(self, document: bytes) -> Ask:
        body = self._chat.decode(document)
        model = self.model(body.model)
        if not body.messages:
            raise ApiError(400, "messages must not be empty")
        tools = b"" if bytes(body.tools) == b"null" else bytes(body.tools)
        call = _forced_call(tools, body.tool_choice)
        return self._ask(body, model, render_chat(body.messages, tools), call)

    def _ask(self, body: _Body, model: str, prompt: bytes, call: Function | None = None) -> Ask:
        chat = isinstance(body, _ChatBody)
        tokens = self._output_tokens(body, count_tokens(prompt), chat=chat)
        seed = chain_seed(model, body.cache_salt)
        text = answer(prompt, seed, tokens) if call is None else render_call(call.name, call.arguments)
        return Ask(
            chat=chat,
            model=model,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            prompt=prompt,
            answer=text[: tokens * TOKEN_BYTES],
            seed=seed,
            call=call,
            whole=call is not None and count_tokens(text) <= tokens,
        )

    def _output_tokens(self, body: _Body, prompt_tokens: int, *, chat: bool) -> int:
        limit = self.max_model_len
        if prompt_tokens >= limit:
            message = (
                f"This model's maximum context length is {limit} tokens. "
                f"However, your prompt contains at least {prompt_tokens} input tokens."
            )
            raise ApiError(400, message, param="input_tokens")
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        tokens = DEFAULT_MAX_TOKENS if asked is None else asked
        if tokens < 1 or (tokens > limit and not chat):
            raise ApiError(400, f"max_tokens must be at least 1 and at most {limit}, got {tokens}.", param="max_tokens")
        return min(tokens, limit - prompt_tokens)


def _prompt(body: _CompletionBody) -> bytes:
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "prompt must not be empty")
    if isinstance(prompt, str):
        return prompt.encode()
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) < len(prompt):
        raise ApiError(400, "the simulator takes one prompt per request")
    return render_token_ids(ids)


# -- tool calls


def _forced_call(tools_json: bytes, choice: str | _ToolChoice | None) -> Function | None:
    """The call an answer must consist of: the first tool if one is required, or the named one."""
    if not tools_json or not (choice == "required" or isinstance(choice, _ToolChoice)):
        return None
    functions = [tool.function for tool in msgspec.json.decode(tools_json, type=list[_Tool])]
    if isinstance(choice, _ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
    if not functions:
        raise ApiError(400, "tool_choice names no tool in tools", param="tool_choice")
    parameters = functions[0].parameters or _Parameters()
    arguments = {name: _plausible(schema) for name, schema in parameters.properties.items()}
    return Function(functions[0].name, json.dumps(arguments))


def _plausible(schema: dict[str, Any]) -> Any:  # noqa: ANN401 - a JSON value
    """A value a JSON schema of this type accepts."""
    if schema.get("enum"):
        return schema["enum"][0]
    samples: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return samples.get(str(schema.get("type")), "word")


# -- answers


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """As vLLM writes them, with --enable-prompt-tokens-details."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """Writes the answer to one request, whole or as server-sent events. A token is a cheap concatenation.

    `engine_id`: what vLLM calls the request in its statistics.
    """

    def __init__(self, ask: Ask, request_id: str, created_s: int) -> None:
        self.ask = ask
        self.envelope = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{request_id}",
            "object": ("chat.completion" if ask.chat else "text_completion"),
            "created": created_s,
            "model": ask.model,
        }
        self.engine_id = f"chatcmpl-{request_id}" if ask.chat else f"cmpl-{request_id}-0"  # of its first prompt
        self.call_id = f"chatcmpl-tool-{request_id}"
        # An event with a marker where the token's text goes, cut there: nothing but that text changes per token.
        event = self._event(self._delta("\0"), None)
        self._before, self._after = event.split(b"\\u0000")

    def finish_reason(self) -> str:
        """Why a complete answer ended."""
        return "tool_calls" if self.ask.whole else "length"

    # -- streams

    def opening(self) -> bytes:
        """What comes with the first token, before it."""
        if not self.ask.chat:
            return b""
        opening = self._event({"role": "assistant", "content": ""}, None)
        if self.ask.call is None:
            return opening
        function = {"name": self.ask.call.name, "arguments": ""}
        call = {"id": self.call_id, "type": "function", "index": 0, "function": function}
        return opening + self._event({"tool_calls": [call]}, None)

    def tokens(self, start: int, stop: int) -> bytes:
        """One event per token from `start` to before `stop`."""
        if stop <= start:
            return b""
        before, after = self._before, self._after
        if self.ask.call is not None:
            return b"".join(before + _escaped(self._piece(i)) + after for i in range(start, stop))
        text = self.ask.answer  # words: nothing in them needs escaping
        pieces = [text[i : i + TOKEN_BYTES] for i in range(start * TOKEN_BYTES, stop * TOKEN_BYTES, TOKEN_BYTES)]
        return before + (after + before).join(pieces) + after

    def last(self, finish_reason: str) -> bytes:
        """The event of the last token, with the reason."""
        piece = self._piece(self.ask.output_tokens - 1).decode(errors="replace")
        return self._event(self._delta(piece), finish_reason)

    def closing(self, finish_reason: str) -> bytes:
        """An event that only gives the reason, for an answer that ends after its last token was sent."""
        return self._event({"content": ""} if self.ask.chat else "", finish_reason)

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage."""
        return self._data({"choices": [], "usage": usage.as_json()})

    def _piece(self, token: int) -> bytes:
        """Text of one token; of a tool call only the arguments, for its name came with the opening."""
        skipped = len(self.ask.call.name.encode()) if self.ask.call else 0
        start = token * TOKEN_BYTES
        return self.ask.answer[max(start, skipped) : max(start + TOKEN_BYTES, skipped)]

    def _delta(self, piece: str) -> dict[str, Any] | str:
        if not self.ask.chat:
            return piece
        if self.ask.call is None:
            return {"content": piece}
        return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}

    def _event(self, delta: dict[str, Any] | str, finish_reason: str | None) -> bytes:
        key = "delta" if self.ask.chat else "text"
        choice = {"index": 0, key: delta, "logprobs": None, "finish_reason": finish_reason}
        return self._data({"choices": [choice]})

    def _data(self, content: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return b"data: " + msgspec.json.encode({**self.envelope, "object": kind, **content}) + b"\n\n"

    # -- in one piece

    def whole(self, produced: int, finish_reason: str, usage: Usage) -> bytes:
        """The answer's first `produced` tokens as one JSON document."""
        text = self.ask.answer[: produced * TOKEN_BYTES].decode(errors="replace")
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if not self.ask.chat:
            choice["text"] = text
        else:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        if self.ask.call is not None:
            function = {"name": self.ask.call.name, "arguments": text[len(self.ask.call.name) :]}
            call = {"id": self.call_id, "type": "function", "function": function}
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        return msgspec.json.encode({**self.envelope, "choices": [choice], "usage": usage.as_json()})


def _escaped(piece: bytes) -> bytes:
    return msgspec.json.encode(piece.decode(errors="replace"))[1:-1]
