"""Real clients through a real Envoy: what the engine gets and what the client gets, byte for byte."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, pool_of

PNG = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 400).decode()
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(system: System) -> openai.OpenAI:
    """The openai SDK, without its own retries."""
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=HANG_GUARD_S)


@pytest.fixture
def last_request(engines: list[Engine]) -> Callable[[httpx.Response], dict[str, Any]]:
    """What the serving engine remembers of the request that got this answer."""

    def find(response: httpx.Response) -> dict[str, Any]:
        request_id = response.headers["x-pointsman-request-id"]
        found = [r for e in engines for r in e.requests() if r["headers"].get("x-pointsman-request-id") == request_id]
        assert len(found) == 1
        return found[0]

    return find


def test_the_sdk_gets_a_whole_answer(client: openai.OpenAI) -> None:
    """Non-streamed, by alias: text, usage, and the name the engine knows."""
    answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert len(answer.choices[0].message.content or "") == 20


def test_the_sdk_gets_every_chunk_of_a_stream(client: openai.OpenAI) -> None:
    """Streamed: as many deltas as tokens, then the usage."""
    stream = client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert sum(1 for c in chunks if c.choices and c.choices[0].delta.content) == 7
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_text_completions_are_routed_too(client: openai.OpenAI) -> None:
    """/v1/completions, a prompt instead of messages."""
    assert client.completions.create(model="sim", prompt="once", max_tokens=3).choices[0].finish_reason == "length"


def test_tools_arrive_and_tool_calls_come_back(client: openai.OpenAI) -> None:
    """`tools` and `tool_choice` reach the engine; its tool call reaches the client."""
    answer = client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "weather?"}],
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice="required",
        max_tokens=20,
    )
    assert answer.choices[0].message.tool_calls


def test_an_inline_image_is_a_few_tokens_not_its_bytes(client: openai.OpenAI, system: System) -> None:
    """A data URL of 136 KB is counted as one image, and the request goes through."""
    raw = client.chat.completions.with_raw_response.create(
        model="sim",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            }
        ],
        max_tokens=2,
    )
    assert len(PNG) > 130_000
    assert 1024 < system.decision(raw.headers["x-pointsman-request-id"])["input_tokens"] < 1_200


def test_a_prompt_of_two_megabytes_arrives_whole(
    system: System, last_request: Callable[[httpx.Response], dict[str, Any]]
) -> None:
    """By alias, so that the body is also edited: everything but the model is as it was."""
    body = json.dumps(chat("wört " * 400_000, model="gpt-4o")).encode()
    assert len(body) > 2_000_000
    answer = httpx.post(f"{system.url}/v1/chat/completions", content=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > 500_000
    assert base64.b64decode(last_request(answer)["body_base64"]) == body.replace(b'"gpt-4o"', b'"sim"', 1)


def test_the_sdk_sends_two_megabytes(client: openai.OpenAI) -> None:
    """A prompt of 2 MB by the SDK itself, streamed: the engine has read it all."""
    stream = client.chat.completions.create(
        model="gpt-4o",
        messages=[{"role": "user", "content": "word " * 420_000}],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = list(stream)[-1].usage
    assert usage is not None
    assert usage.prompt_tokens > 500_000


def test_unknown_fields_arrive_byte_for_byte(
    system: System, last_request: Callable[[httpx.Response], dict[str, Any]]
) -> None:
    """Odd spacing, escapes, numbers and fields of no known API survive, with and without a rewritten model."""
    body = (
        b'{ "x_new":\t[1.0, 1E2, "\\u00e9\\/"],"model" : "MODEL",'
        b' "messages":[{"role":"user","content":"\xe4\xbd\xa0"}],'
        b'"nested":{"model":"keep me"}, "max_tokens":2 ,"big": 123456789012345678901234567890}'
    )
    for name in (b"sim", b"gpt-4o"):
        sent = body.replace(b"MODEL", name)
        answer = httpx.post(f"{system.url}/v1/chat/completions", content=sent, timeout=HANG_GUARD_S)
        assert answer.status_code == 200
        assert base64.b64decode(last_request(answer)["body_base64"]) == body.replace(b"MODEL", b"sim")


def test_a_stream_is_byte_identical_to_what_the_engine_sent(
    system: System, last_request: Callable[[httpx.Response], dict[str, Any]]
) -> None:
    """SHA-256 of the body at the client equals the engine's own."""
    body = chat(max_tokens=300, stream=True)
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert hashlib.sha256(answer.content).hexdigest() == last_request(answer)["sent_sha256"]


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
@pytest.mark.parametrize("upload", ["content-length", "chunked"])
def test_curl_over_both_http_versions(
    system: System, version: str, upload: str, last_request: Callable[[httpx.Response], dict[str, Any]]
) -> None:
    """A stream by curl, body sent at once or in chunks: same bytes as the engine's."""
    assert shutil.which("curl"), "these tests need curl"
    body = json.dumps(chat(max_tokens=20, stream=True))
    chunked = ["-H", "Transfer-Encoding: chunked"] if upload == "chunked" and version == "--http1.1" else []
    command = ["curl", "-sS", "-D-", version, *chunked, "-d", "@-", f"{system.url}/v1/chat/completions"]
    done = subprocess.run(command, input=body.encode(), capture_output=True, check=True, timeout=HANG_GUARD_S)
    head, _, answer = done.stdout.partition(b"\r\n\r\n")
    assert b" 200" in head.splitlines()[0]
    headers = dict(line.decode().lower().split(": ", 1) for line in head.splitlines()[1:])
    record = last_request(httpx.Response(200, headers=headers))
    assert hashlib.sha256(answer).hexdigest() == record["sent_sha256"]
    assert base64.b64decode(record["body_base64"]) == body.encode()


def test_http2_by_a_second_client(system: System) -> None:
    """By httpx: prior knowledge, many requests on one connection."""
    with httpx.Client(http1=False, http2=True, timeout=HANG_GUARD_S) as client:
        answers = [client.post(f"{system.url}/v1/chat/completions", json=chat(f"n {n}")) for n in range(20)]
    assert {(a.status_code, a.http_version) for a in answers} == {(200, "HTTP/2")}


def test_models_are_listed_with_their_aliases(client: openai.OpenAI) -> None:
    """GET /v1/models is the union over pools, aliases included."""
    assert {model.id for model in client.models.list()} == {"sim", "gpt-4o"}


def test_one_model_is_retrieved(client: openai.OpenAI) -> None:
    """The object of the list; for another name the error that the library knows."""
    listed = {model.id: model for model in client.models.list()}
    for name in ("sim", "gpt-4o"):
        assert client.models.retrieve(name) == listed[name]
    with pytest.raises(openai.NotFoundError) as told:
        client.models.retrieve("nope")
    assert (told.value.code, told.value.param) == ("model_not_found", "model")


def test_a_model_with_a_slash_in_its_name_is_retrieved(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """As the library writes it into the path."""
    engines = make_engines(1)
    name = "Qwen/Qwen2.5-7B-Instruct"
    system = make_system(pools=[pool_of(engines, aliases={name: "sim"})])
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve(name).id == name
