"""Every API through a real Envoy: the right pool, the prefix counted, the bytes as the client sent them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, System, eventually, pool_of

from extproc.request.apis import BY_PATH, ModelIn

LONG = "the same words again and again " * 100


@dataclass(frozen=True)
class House:
    """A system over a pool that chats (two engines) and one that embeds, ranks and listens (two more)."""

    system: System
    chat: list[Engine]
    other: list[Engine]

    def post(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        """A body, as it is."""
        return httpx.post(self.system.url + path, content=content, headers=headers, timeout=HANG_GUARD_S)

    def served(self, headers: Mapping[str, str]) -> tuple[Engine, dict[str, Any]]:
        """Who served the request whose answer has these headers, and what that engine remembers of it."""
        request_id = headers["x-pointsman-request-id"]
        found = [
            (engine, request)
            for engine in (*self.chat, *self.other)
            for request in engine.requests()
            if request["headers"].get("x-pointsman-request-id") == request_id
        ]
        assert len(found) == 1
        return found[0]

    def matched_tokens(self, pool: str) -> float:
        """Of the prompts routed to the pool, what was believed cached."""
        return self.system.total("pointsman_prefix_matched_tokens_total", f'pool="{pool}"')


@pytest.fixture(scope="module")
def house(make_engines: Callable[..., list[Engine]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of this module."""
    chat = make_engines(2, "--speed", "100", "--record", "50")
    other = make_engines(2, "--speed", "100", "--record", "50", "--model", "bge")
    pools = [
        pool_of(chat),
        pool_of(other, name="other", models=["bge"], aliases={"text-embedding-3-small": "bge", "whisper-1": "bge"}),
    ]
    routing = {
        "default_model": "bge",
        "paths": [{"prefix": "/custom", "pool": "other"}, {"prefix": "/", "pool": "chat"}],
    }
    system = System(tmp_path_factory.mktemp("apis"), {"pools": pools, "routing": routing})
    system.start()
    system.wait_pickable(*(engine.address for engine in (*chat, *other)))
    yield House(system, chat, other)
    system.stop()


@pytest.fixture
def client(house: House) -> openai.OpenAI:
    """The openai SDK, without its own retries."""
    return openai.OpenAI(base_url=f"{house.system.url}/v1", api_key="none", max_retries=0, timeout=HANG_GUARD_S)


def body_of(request: dict[str, Any]) -> bytes:
    """What the engine got."""
    return base64.b64decode(request["body_base64"])


# -- every API with a JSON body

_INPUT = b'{"model":"bge", "input" : ["%s"]}'
_CHATS = b'{"model":"sim","messages":[{"role":"user","content":"%s"}] ,"max_tokens":2}'
_RANK = b'{"documents":["a","b"],"query":"%s","model":"bge"}'
_SCORE = b'{"text_1":"%s","text_2":["a"], "model":"bge"}'
_MESSAGE = b'{"model":"sim","max_tokens":2,"system":"%s","messages":[{"role":"user","content":"hi"}]}'
WITH_PROMPTS: dict[str, tuple[str, bytes]] = {
    "/v1/chat/completions": ("chat", _CHATS),
    "/v1/chat/completions/batch": ("chat", b'{"messages":[[{"role":"user","content":"%s"}]],"model" : "sim"}'),
    "/v1/completions": ("chat", b'{"prompt":"%s", "model":"sim","max_tokens":2}'),
    "/v1/responses": ("chat", b'{"model":"sim", "store":false,"input":"%s", "max_output_tokens":2}'),
    "/v1/messages": ("chat", _MESSAGE),
    "/v1/embeddings": ("other", _INPUT),
    **dict.fromkeys(("/pooling", "/v1/pooling", "/classify", "/v1/classify"), ("other", _INPUT)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ("other", _RANK)),
    **dict.fromkeys(("/score", "/v1/score"), ("other", _SCORE)),
}
"""Path -> pool, and a body for a text."""
WITHOUT_PROMPTS: dict[str, tuple[str, bytes]] = {
    "/v1/messages/count_tokens": ("chat", _MESSAGE),
    "/tokenize": ("chat", b'{"prompt": "%s","model":"sim"}'),
    "/detokenize": ("chat", b'{"tokens":[1],"model":"sim", "x":"%s"}'),
}


def _post_to_its_pool(house: House, path: str, pool: str, body: bytes) -> Engine:
    """Post it; the engine of that pool that got these very bytes."""
    answer = house.post(path, body, **{"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    engine, request = house.served(answer.headers)
    assert engine in (house.chat if pool == "chat" else house.other)
    assert (request["path"], body_of(request)) == (path, body)
    return engine


@pytest.mark.parametrize("path", WITH_PROMPTS)
def test_an_api_goes_to_its_models_pool_untouched_and_meets_its_prefix_again(house: House, path: str) -> None:
    """Both times the same engine of the right pool; the first time nothing is known of its text, the second most."""
    pool, body = WITH_PROMPTS[path]
    body %= f"{path} {LONG}".encode()
    before = house.matched_tokens(pool)
    engine = _post_to_its_pool(house, path, pool, body)
    assert house.matched_tokens(pool) == before
    assert _post_to_its_pool(house, path, pool, body) is engine
    assert house.matched_tokens(pool) >= before + 500


@pytest.mark.parametrize("path", WITHOUT_PROMPTS)
def test_an_api_without_a_prompt_goes_to_its_models_pool_untouched(house: House, path: str) -> None:
    """Each time without a prefix: there is nothing to cache."""
    pool, body = WITHOUT_PROMPTS[path]
    before = house.matched_tokens(pool)
    for _ in range(2):
        _post_to_its_pool(house, path, pool, body % LONG.encode())
    assert house.matched_tokens(pool) == before


def test_every_api_with_a_json_body_is_in_the_tables() -> None:
    """And every one that has a prompt in the table of those that have one."""
    apis = {path: api for path, api in BY_PATH.items() if api.model_in is ModelIn.JSON}
    assert set(WITH_PROMPTS) == {path for path, api in apis.items() if api.prompt}
    assert set(WITHOUT_PROMPTS) == {path for path, api in apis.items() if not api.prompt}


def test_the_sdks_embeddings_by_alias(client: openai.OpenAI) -> None:
    """Its base64 is read, and the engine sees the name it serves."""
    answer = client.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
    assert [len(data.embedding) for data in answer.data] == [8, 8]
    assert answer.model == "bge"


@pytest.mark.parametrize("model", ["bge", "whisper-1"])
def test_the_sdks_audio(client: openai.OpenAI, house: House, model: str) -> None:
    """A form: by name and by alias the whole file arrives, and only the model's part differs."""
    audio = bytes(range(256)) * 4_000
    answer = client.audio.transcriptions.with_raw_response.create(model=model, file=("a.wav", audio))
    _, request = house.served(answer.headers)
    body = body_of(request)
    assert audio in body
    assert b'name="model"\r\n\r\nbge\r\n' in body
    assert int(request["headers"]["content-length"]) == len(body)
    assert client.audio.transcriptions.create(model="bge", file=("a.wav", audio)).text == answer.parse().text


def test_a_missing_model_is_the_default_and_written_into_the_body(house: House) -> None:
    """In front of the fields, and of the parts of a form."""
    answer = house.post("/v1/embeddings", b' {"input":"x"}')
    assert body_of(house.served(answer.headers)[1]) == b' {"model":"bge","input":"x"}'
    form = httpx.post(
        f"{house.system.url}/v1/audio/translations", files={"file": ("a.wav", b"RIFF")}, timeout=HANG_GUARD_S
    )
    assert form.status_code == 200, form.text
    assert b'name="model"\r\n\r\nbge\r\n--' in body_of(house.served(form.headers)[1])


def test_anthropics_errors_have_anthropics_shape(house: House) -> None:
    """From us as from the engine."""
    for content in (b'{"model":"nope","messages":[]}', b'{"model":"sim"}'):
        error = house.post("/v1/messages", content).json()
        assert error["type"] == "error"
        assert set(error["error"]) == {"type", "message"}


# -- answers asked for again


def test_a_response_is_found_again_where_it_was_made(client: openai.OpenAI) -> None:
    """By the SDK: got, cancelled, gone on from; each time at the engine that has it, wherever load would send it."""
    made = [client.responses.create(model="gpt-4o", input=f"question {n}", max_output_tokens=4) for n in range(6)]
    for answer in made:
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        assert client.responses.cancel(answer.id).id == answer.id
        follow_up = client.responses.create(model="sim", input="go on", previous_response_id=answer.id)
        assert client.responses.retrieve(follow_up.id).id == follow_up.id
    assert len({answer.id for answer in made}) == 6


def test_a_stored_response_keeps_the_clients_bytes_but_for_its_id(house: House) -> None:
    """The id is added in front; a client's own id is kept and found."""
    answer = house.post("/v1/responses", b'{ "input":"x", "model":"sim" }')
    own = answer.json()["id"]
    assert own == f"resp_{answer.headers['x-pointsman-request-id']}"
    assert (
        body_of(house.served(answer.headers)[1]) == b'{"request_id":"%s", "input":"x", "model":"sim" }' % own.encode()
    )
    named = b'{"model":"sim","input":"x","request_id":"resp_chosen"}'
    assert body_of(house.served(house.post("/v1/responses", named).headers)[1]) == named
    assert httpx.get(f"{house.system.url}/v1/responses/resp_chosen", timeout=HANG_GUARD_S).json()["id"] == "resp_chosen"


def test_an_unknown_response_is_404(client: openai.OpenAI) -> None:
    """As from OpenAI."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve("resp_unheard_of")
    assert caught.value.code == "unknown_response"


def test_a_streamed_response_comes_whole(client: openai.OpenAI) -> None:
    """Typed events, to the last one."""
    with client.responses.create(model="sim", input="x", max_output_tokens=3, stream=True) as stream:
        events = list(stream)
    assert events[-1].type == "response.completed"


# -- paths


def test_a_path_rule_leads_to_its_pool(house: House) -> None:
    """The longest prefix; the body is not looked at. The engine's own 404 says that it got there."""
    for path, engines in {"/custom/api": house.other, "/v1/else": house.chat}.items():
        answer = house.post(path, b"\0not JSON")
        assert answer.status_code == 404
        assert answer.headers["server"] == "uvicorn"
        assert answer.headers["x-pointsman-endpoint"] in {engine.address for engine in engines}


@pytest.mark.parametrize("path", ["/sleep", "/metrics", "/v1/load_lora_adapter", "/%73leep", "/v1/../sleep", "/sleep/"])
def test_a_rule_for_everything_does_not_open_the_engines_administration(house: House, path: str) -> None:
    """However it is spelled; in words that say what it is."""
    answer = house.post(path, b"{}")
    assert answer.status_code == 404
    assert "administration" in answer.json()["error"]["message"]


# -- WebSocket


def test_a_websocket_reaches_the_pool_of_its_query(house: House) -> None:
    """Both ways, in flight while it lasts and not longer."""
    asyncio.run(_talk(house))
    eventually(lambda: not any(house.system.in_flight().values()), "nothing is in flight")


async def _talk(house: House) -> None:
    async with (
        aiohttp.ClientSession(house.system.url) as session,
        session.ws_connect("/v1/realtime?model=bge", timeout=aiohttp.ClientWSTimeout(ws_close=5)) as socket,
    ):
        for text in ("one", "two", "x" * 100_000):
            await socket.send_str(text)
            assert await socket.receive_str(timeout=HANG_GUARD_S) == text
        counts = await asyncio.to_thread(house.system.in_flight)
        assert sum(counts[engine.address] for engine in house.other) == 1


def test_a_websocket_without_a_pool_is_refused(house: House) -> None:
    """In words, before the upgrade."""
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    url = f"{house.system.url}/v1/realtime?model=nope"
    answer = httpx.get(url, headers=headers, timeout=HANG_GUARD_S)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
