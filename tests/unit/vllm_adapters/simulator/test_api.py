from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_adapters.simulator.api import Answer, ApiError, Ask, Reader, Usage

READER = Reader(("tiny", "alias"), 100)


def read(*, chat: bool = True, **fields: object) -> Ask:
    """The request with these fields on top of the smallest one."""
    smallest: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    return READER.read(json.dumps(smallest | fields).encode(), chat=chat)


def error_of(body: bytes, *, chat: bool = True) -> tuple[int, dict[str, Any]]:
    """Status and error object this body is refused with."""
    with pytest.raises(ApiError) as caught:
        READER.read(body, chat=chat)
    return caught.value.status, json.loads(caught.value.body)["error"]


def events(stream: bytes) -> list[dict[str, Any]]:
    """The documents of a stream of server-sent events."""
    return [json.loads(line[6:]) for line in stream.decode().split("\n\n") if line]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": [{"content": "x"}]}', b'{"messages": "\xff"}']
)
def test_bodies_that_do_not_validate_are_400(body: bytes) -> None:
    """VLLM's message and type for bad JSON, missing fields and wrong types."""
    status, error = error_of(body)
    assert (status, error["type"], error["code"]) == (400, "Bad Request", 400)
    assert error["message"].startswith("1 validation error: ")


def test_an_unknown_model_is_404() -> None:
    """The message lists the names served."""
    status, error = error_of(b'{"model": "nope", "messages": [{"role": "user", "content": "hi"}]}')
    assert status == 404
    assert error == {
        "message": "The model `nope` does not exist. Valid aliases: tiny, alias.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "input_tokens"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{"function": {"name": "a"}}], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
        ),
    ],
)
def test_requests_that_make_no_sense_are_400(fields: dict[str, Any], param: str | None) -> None:
    """Valid JSON, invalid request."""
    smallest = {"messages": [{"role": "user", "content": "hi"}]}
    status, error = error_of(json.dumps(smallest | fields).encode())
    assert (status, error["type"], error["param"]) == (400, "BadRequestError", param)


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, "b"]])
def test_a_completion_takes_one_prompt(prompt: object) -> None:
    """Text, or token ids, or a list with one text; nothing empty."""
    assert error_of(json.dumps({"prompt": prompt}).encode(), chat=False)[0] == 400


def test_the_answer_is_cut_to_what_fits_the_context() -> None:
    """A chat's max_tokens is capped silently, a completion's beyond the context refused; the default is 64."""
    prompt_tokens = read().prompt_tokens
    assert read(max_tokens=10_000).output_tokens == 100 - prompt_tokens
    assert read(max_tokens=5, max_completion_tokens=7).output_tokens == 7
    assert read().output_tokens == 64
    assert error_of(b'{"prompt": "hi", "max_tokens": 101}', chat=False)[0] == 400


def test_fields_nobody_reads_change_nothing() -> None:
    """Sampling parameters and unknown fields are accepted."""
    assert read(n=3, temperature=0.1, x_unknown={"a": 1}) == read()


def test_model_and_salt_choose_the_chain() -> None:
    """No model is the first one; salts separate."""
    assert read().seed == read(model="tiny").seed
    assert len({read().seed, read(model="alias").seed, read(cache_salt="s").seed}) == 3


def test_one_event_per_token_however_they_are_grouped() -> None:
    """The pieces of a stream spell the answer, token by token, and the last event says why it ended."""
    ask = read(max_tokens=5)
    answer = Answer(ask, "rid", 1)
    apart = b"".join(answer.tokens(i, i + 1) for i in range(4))
    assert apart == answer.tokens(0, 4)
    assert answer.tokens(4, 4) == b""
    parts = events(answer.opening() + apart + answer.last("length"))
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == ask.answer.decode()
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 5 + ["length"]
    assert {part["id"] for part in parts} == {"chatcmpl-rid"}


def test_an_id_that_needs_escaping_survives() -> None:
    """The request id is the client's and goes into JSON as it is."""
    parts = events(Answer(read(), 'a"\\b\u00e9', 1).tokens(0, 1))
    assert parts[0]["id"] == 'chatcmpl-a"\\b\u00e9'


def test_completions_have_their_own_shape() -> None:
    """No role, `text` instead of `delta`, another id prefix."""
    ask = read(chat=False, max_tokens=2)
    answer = Answer(ask, "rid", 1)
    parts = events(answer.opening() + answer.tokens(0, 1) + answer.last("length"))
    assert "".join(part["choices"][0]["text"] for part in parts) == ask.answer.decode()
    assert {(part["id"], part["object"]) for part in parts} == {("cmpl-rid", "text_completion")}
    whole = json.loads(answer.whole(2, "length", Usage(1, 2, 0)))
    assert whole["choices"][0]["text"] == ask.answer.decode()


TOOLS = [
    {"type": "function", "function": {"name": "other"}},
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["°C", "°F"]},
                },
            },
        },
    },
]
CHOICE = {"type": "function", "function": {"name": "wetter"}}
ARGUMENTS = {"city": "word", "days": 1, "unit": "°C"}


def test_a_forced_tool_is_called_with_plausible_arguments() -> None:
    """The named tool, or the first one when any is required; otherwise the answer is text."""
    roomy = Reader(("tiny",), 1000)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": CHOICE}
    ask = roomy.read(json.dumps(body).encode(), chat=True)
    answer = Answer(ask, "rid", 1)
    message = json.loads(answer.whole(ask.output_tokens, "tool_calls", Usage(1, 1, 0)))["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "wetter"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert answer.finish_reason() == "tool_calls"
    any_tool = roomy.read(json.dumps(body | {"tool_choice": "required"}).encode(), chat=True)
    assert any_tool.call is not None
    assert any_tool.call.name == "other"
    assert roomy.read(json.dumps(body | {"tool_choice": "auto"}).encode(), chat=True).call is None


def test_a_streamed_tool_call_spells_the_same_arguments() -> None:
    """Name in the opening, the arguments in pieces."""
    roomy = Reader(("tiny",), 1000)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": CHOICE}
    ask = roomy.read(json.dumps(body).encode(), chat=True)
    answer = Answer(ask, "rid", 1)
    parts = events(answer.opening() + answer.tokens(0, ask.output_tokens - 1) + answer.last("tool_calls"))
    calls = [part["choices"][0]["delta"]["tool_calls"][0]["function"] for part in parts[1:]]
    assert calls[0]["name"] == "wetter"
    assert json.loads("".join(call["arguments"] for call in calls)) == ARGUMENTS
