"""The simulator's APIs beyond chat and completions, in vLLM's shapes."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.server import SimulatedServer

FAST = SimOptions(port=0, models=("tiny",), speed=1000, max_model_len=4096, record=4)


@pytest.fixture
async def server() -> AsyncIterator[SimulatedServer]:
    """A fast engine on a free port."""
    server = SimulatedServer(FAST)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: SimulatedServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of it."""
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    """The document that a JSON body is answered with."""
    async with client.post(path, json=body, headers={"X-Request-Id": "rid"}) as response:
        assert response.status == status, await response.text()
        document: dict[str, Any] = await response.json()
        return document


def events(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """The named events of a stream."""
    parts = (part.split("\n") for part in stream.strip().split("\n\n"))
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


async def test_embeddings_are_the_same_in_both_encodings(client: aiohttp.ClientSession) -> None:
    """Floats, or the base64 that the openai SDK asks for; one per input."""
    plain = await post(client, "/v1/embeddings", model="tiny", input=["a", "b"])
    packed = await post(client, "/v1/embeddings", model="tiny", input="a", encoding_format="base64")
    assert (plain["id"], plain["object"], [d["index"] for d in plain["data"]]) == ("embd-rid", "list", [0, 1])
    assert plain["usage"]["total_tokens"] == 2
    unpacked = struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(unpacked) == pytest.approx(plain["data"][0]["embedding"], rel=1e-6)
    assert plain["data"][0]["embedding"] != plain["data"][1]["embedding"]


async def test_a_ranking_is_sorted_and_a_score_is_not(client: aiohttp.ClientSession) -> None:
    """Both give the same figures."""
    ranking = await post(client, "/v1/rerank", model="tiny", query="q", documents=["a", "b", "c"])
    scores = await post(client, "/score", model="tiny", text_1="q", text_2=["a", "b", "c"])
    by_index = {result["index"]: result["relevance_score"] for result in ranking["results"]}
    assert [result["relevance_score"] for result in ranking["results"]] == sorted(by_index.values(), reverse=True)
    assert [data["score"] for data in scores["data"]] == [by_index[index] for index in range(3)]


async def test_tokens_turn_into_the_text_they_came_from(client: aiohttp.ClientSession) -> None:
    """Four bytes a token."""
    tokens = await post(client, "/tokenize", model="tiny", prompt="twelve bytes")
    assert (tokens["count"], tokens["max_model_len"]) == (3, 4096)
    assert await post(client, "/detokenize", model="tiny", tokens=tokens["tokens"]) == {"prompt": "twelve bytes"}


async def test_an_audio_file_is_transcribed_to_its_digest(client: aiohttp.ClientSession) -> None:
    """The same bytes give the same text; a form without a file is refused."""
    texts = []
    for content in (b"\0\r\n--noise", b"\0\r\n--noise", b"other"):
        form = aiohttp.FormData({"model": "tiny"})
        form.add_field("file", content, filename="a.wav", content_type="audio/wav")
        async with client.post("/v1/audio/transcriptions", data=form) as response:
            texts.append((await response.json())["text"])
    assert texts[0] == texts[1] != texts[2]
    async with client.post("/v1/audio/transcriptions", data={"model": "tiny"}) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "q", "documents": ["d"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ],
)
async def test_an_unknown_model_is_404(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> None:
    """Whatever the API; Anthropic's shape for Anthropic's."""
    error = await post(client, path, 404, model="nope", **body)
    assert "does not exist" in error["error"]["message"]
    assert ("type" in error) == (path == "/v1/messages")


async def test_a_response_is_kept_under_the_id_it_was_asked_under(client: aiohttp.ClientSession) -> None:
    """The body's `request_id` names it, a header does not; it can be had again, cancelled, and gone on from."""
    answer = await post(client, "/v1/responses", model="tiny", input="hi", request_id="resp_mine", max_output_tokens=4)
    assert (answer["id"], answer["object"], answer["status"]) == ("resp_mine", "response", "completed")
    assert len(answer["output"][0]["content"][0]["text"]) == 16
    assert answer["usage"]["output_tokens"] == 4
    async with client.get("/v1/responses/resp_mine") as response:
        assert await response.json() == answer
    assert await post(client, "/v1/responses/resp_mine/cancel") == answer
    more = await post(client, "/v1/responses", model="tiny", input="on", previous_response_id="resp_mine")
    assert more["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    assert more["id"].startswith("resp_")
    assert "rid" not in more["id"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_pooling_and_classes_are_by_input(client: aiohttp.ClientSession, prefix: str) -> None:
    """One entry each, the same whenever asked."""
    body: dict[str, Any] = {"model": "tiny", "input": ["a", "b"]}
    pooled, classes = [await post(client, prefix + path, **body) for path in ("/pooling", "/classify")]
    assert [entry["object"] for entry in pooled["data"]] == ["pooling"] * 2
    assert [sum(entry["probs"]) for entry in classes["data"]] == [1, 1]
    assert (await post(client, f"{prefix}/classify", **body))["data"] == classes["data"]
    await post(client, f"{prefix}/pooling", 400, model="tiny")


async def test_chats_together_have_a_choice_each(client: aiohttp.ClientSession) -> None:
    """In the order asked."""
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    answer = await post(client, "/v1/chat/completions/batch", model="tiny", messages=chats)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


async def test_the_tokens_of_a_message_are_counted(client: aiohttp.ClientSession) -> None:
    """In Anthropic's form, errors too."""
    messages = [{"role": "user", "content": "hi" * 400}]
    answer = await post(client, "/v1/messages/count_tokens", model="tiny", messages=messages)
    assert answer["input_tokens"] > 100
    assert (await post(client, "/v1/messages/count_tokens", 404, model="no", messages=messages))["type"] == "error"


async def test_a_response_that_was_not_kept_is_404(client: aiohttp.ClientSession) -> None:
    """Never given here, or given with `store: false`."""
    await post(client, "/v1/responses", model="tiny", input="hi", request_id="resp_mine", store=False)
    async with client.get("/v1/responses/resp_mine") as response:
        assert response.status == 404
    await post(client, "/v1/responses", 404, model="tiny", input="hi", previous_response_id="resp_other")


async def test_a_response_streams_typed_events(client: aiohttp.ClientSession) -> None:
    """Named events from created to completed, and no [DONE]."""
    body = {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}
    async with client.post("/v1/responses", json=body | {"stream": True}) as response:
        parts = events(await response.text())
    assert [name for name, _ in parts][0::5] == ["response.created", "response.completed"]
    (delta,) = [data["delta"] for name, data in parts if name == "response.output_text.delta"]
    assert delta == parts[-1][1]["response"]["output"][0]["content"][0]["text"]


async def test_a_message_is_answered_in_anthropics_form(client: aiohttp.ClientSession) -> None:
    """Whole and streamed say the same, and the second one is cached."""
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"model": "tiny", "system": "s" * 800, "messages": messages, "max_tokens": 4}
    whole = await post(client, "/v1/messages", **body)
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    async with client.post("/v1/messages", json=body | {"stream": True}) as response:
        parts = events(await response.text())
    assert [name for name, _ in parts] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert parts[2][1]["delta"]["text"] == whole["content"][0]["text"]


async def test_the_prompt_of_a_response_is_cached_as_a_chats(server: SimulatedServer) -> None:
    """It goes through the engine model: the second time its blocks are there."""
    async with aiohttp.ClientSession(server.url) as client:
        body: dict[str, Any] = {"model": "tiny", "instructions": "i" * 1000, "input": "hi"}
        first = await post(client, "/v1/responses", **body)
        second = await post(client, "/v1/responses", **body)
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 200


async def test_a_websocket_says_again_what_it_is_told(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Text and bytes; in flight while it lasts."""
    async with client.ws_connect("/v1/realtime?model=tiny") as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
        await socket.send_bytes(b"\0")
        assert await socket.receive_bytes() == b"\0"
        assert server.books.in_flight == 1
