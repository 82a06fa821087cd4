from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from vllm_adapters.simulator.faults import NONE, Faults
from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.server import SimulatedServer, serve

CHAT = "/v1/chat/completions"
FAST = SimOptions(port=0, models=("tiny", "alias"), speed=1000, max_model_len=4096, record=4)


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


def chat(text: str = "hello there, engine", **fields: object) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def fault(**fields: object) -> dict[str, str]:
    """The header with a fault of this request alone."""
    return {"x-sim-fault": json.dumps(fields)}


def events(stream: str) -> list[dict[str, Any]]:
    """The documents of a stream, which must end with [DONE]."""
    lines = stream.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the server under test announces nothing
        await asyncio.sleep(0.002)


# -- answers


async def test_a_chat_is_answered_whole(client: aiohttp.ClientSession) -> None:
    """Body and headers are vLLM's."""
    async with client.post(CHAT, json=chat(), headers={"X-Request-Id": "rid"}) as response:
        answer = await response.json()
        assert (response.status, response.headers["server"]) == (200, "uvicorn")
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-rid", "chat.completion", "tiny")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["message"]["content"]) == 32
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]) == (8, {"cached_tokens": 0})
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


async def test_a_stream_says_the_same_token_by_token(client: aiohttp.ClientSession) -> None:
    """Role first, one event per token, usage last when asked for."""
    async with client.post(CHAT, json=chat()) as response:
        whole = (await response.json())["choices"][0]["message"]["content"]
    body = chat(stream=True, stream_options={"include_usage": True})
    async with client.post(CHAT, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = events(await response.text())
    deltas = [part["choices"][0]["delta"]["content"] for part in parts[:-1]]
    assert len(deltas) == 9
    assert "".join(deltas) == whole
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert (parts[-1]["choices"], parts[-1]["usage"]["completion_tokens"]) == ([], 8)


async def test_a_stream_has_no_usage_unless_asked(client: aiohttp.ClientSession) -> None:
    """Every event has a choice."""
    async with client.post(CHAT, json=chat(stream=True)) as response:
        assert all(part["choices"] for part in events(await response.text()))


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_are_served_too(client: aiohttp.ClientSession, stream: bool) -> None:  # noqa: FBT001
    """Text in, text out."""
    async with client.post("/v1/completions", json={"prompt": "say", "max_tokens": 4, "stream": stream}) as response:
        assert response.status == 200
        parts = events(await response.text()) if stream else [await response.json()]
    assert len("".join(part["choices"][0]["text"] for part in parts)) == 16


async def test_the_next_turn_hits_the_cache(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Sending the answer back makes it part of the prefix; the response says how much was cached."""
    body = chat("x" * 1000, max_tokens=64)
    async with client.post(CHAT, json=body) as response:
        first = await response.json()
    said = first["choices"][0]["message"]["content"]
    body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    expected = server.cached_tokens(json.dumps(body).encode())
    async with client.post(CHAT, json=body) as response:
        second = await response.json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == expected > first["usage"]["prompt_tokens"]


async def test_a_salt_shares_nothing(client: aiohttp.ClientSession) -> None:
    """The same prompt under another cache_salt is cold."""
    cached = []
    for salt in ("a", "a", "b"):
        async with client.post(CHAT, json=chat("x" * 1000, cache_salt=salt)) as response:
            cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 240, 0]


async def test_errors_have_their_shape(client: aiohttp.ClientSession) -> None:
    """OpenAI's object for requests, FastAPI's for unknown paths and methods."""
    for body, status in (
        ({"model": "nope", "messages": []}, 404),
        (chat("x" * 50_000), 400),
        (chat(max_tokens=0), 400),
    ):
        async with client.post(CHAT, json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, status)
    async with client.post(CHAT, data=b"{nonsense") as response:
        assert response.status == 400
    async with client.get(CHAT) as response:
        assert (response.status, await response.json()) == (405, {"detail": "Method Not Allowed"})
    async with client.get("/nope") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})


async def test_models_version_and_health(client: aiohttp.ClientSession) -> None:
    """What discovery and probes ask for."""
    async with client.get("/v1/models") as response:
        models = (await response.json())["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 4096), ("alias", 4096)]
    async with client.get("/version") as response:
        assert (await response.json())["version"]
    async with client.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_metrics_tell_what_the_engine_did(client: aiohttp.ClientSession) -> None:
    """VLLM's names, labels and units."""
    async with client.post(CHAT, json=chat()) as response:
        prompt_tokens = (await response.json())["usage"]["prompt_tokens"]
    async with client.get("/metrics") as response:
        assert response.content_type == "text/plain"
        page = await response.text()
    labels = 'engine="0",model_name="tiny"'
    assert f"vllm:prompt_tokens_total{{{labels}}} {float(prompt_tokens)}\n" in page
    assert f"vllm:generation_tokens_total{{{labels}}} 8.0\n" in page
    assert f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n" in page
    assert f'vllm:request_success_total{{{labels},finished_reason="length"}} 1.0\n' in page
    assert 'block_size="16"' in page
    assert 'num_gpu_blocks="27500"' in page
    assert "process_start_time_seconds " in page


async def test_requests_are_recorded_byte_for_byte(client: aiohttp.ClientSession) -> None:
    """The last ones only: headers, the body as it came, and a digest of what was sent."""
    for name in ("dropped", "a", "b", "c", "d"):
        body = json.dumps(chat(name, stream=True), indent=2).encode()
        async with client.post(CHAT, data=body, headers={"X-Name": name}) as response:
            sent = await response.read()
    async with client.get("/sim/requests") as response:
        records = await response.json()
    assert [record["headers"]["x-name"] for record in records] == ["a", "b", "c", "d"]
    assert base64.b64decode(records[-1]["body_base64"]) == body
    assert records[-1]["sent_bytes"] == len(sent)
    assert records[-1]["sent_sha256"] == hashlib.sha256(sent).hexdigest()


# -- life


async def test_a_client_that_leaves_frees_its_place(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Disconnecting aborts the request in the engine and ends it in the books."""
    for stream in (True, False):
        asking = asyncio.create_task(_text(client, chat(stream=stream), fault(hold=2)))
        await until(lambda: server.books.held == 1)
        asking.cancel()
        await until(lambda: server.books.in_flight == 0)
    assert (server.books.aborted, server.books.served, server.books.held) == (2, 0, 0)
    assert (server.engine.running, server.engine.waiting, server.engine.kv_used) == (0, 0, 0.0)


async def test_leaving_in_the_middle_of_generation_aborts_in_the_engine() -> None:
    """Blocks and batch slot are free at once; the rest is never generated."""
    server = SimulatedServer(SimOptions(port=0, speed=0.1))
    await server.start()
    async with aiohttp.ClientSession(server.url) as client:
        response = await client.post(CHAT, json={**chat(max_tokens=5000, stream=True), "model": "sim"})
        await response.content.readline()
        assert server.engine.running == 1
        response.close()
        await until(lambda: server.books.in_flight == 0)
    assert (server.engine.running, server.engine.kv_used, server.books.aborted) == (0, 0.0, 1)
    assert server.engine.generation_tokens_total < 5000
    await server.stop()


async def test_stopping_ends_running_requests_as_vllm_does() -> None:
    """200 and finish_reason "abort", in a stream and whole; then the port is closed."""
    server = SimulatedServer(SimOptions(port=0, speed=0.1))
    await server.start()
    async with aiohttp.ClientSession(server.url) as client:
        bodies = [{**chat(max_tokens=5000, stream=stream), "model": "sim"} for stream in (True, False)]
        asking = [asyncio.create_task(_text(client, body)) for body in bodies]
        await until(lambda: server.engine.generation_tokens_total > 1)
        await server.stop()
        stream, whole = await asyncio.gather(*asking)
        assert events(stream)[-1]["choices"][0]["finish_reason"] == "abort"
        assert json.loads(whole)["choices"][0]["finish_reason"] == "abort"
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")


async def _text(client: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    async with client.post(CHAT, json=body, headers=headers) as response:
        assert response.status == 200
        return await response.text()


async def test_draining_finishes_what_runs_and_refuses_the_rest(
    server: SimulatedServer, client: aiohttp.ClientSession
) -> None:
    """While draining /health stays 200, new requests get 500, and running ones their whole answer."""
    asking = asyncio.create_task(client.post(CHAT, json=chat(), headers=fault(hold=2)))
    await until(lambda: server.books.held == 1)
    stopping = asyncio.create_task(server.stop(drain_s=60))
    await asyncio.sleep(0)
    async with client.get("/health") as response:
        assert response.status == 200
    async with client.post(CHAT, json=chat()) as response:
        assert response.status == 500
    server.release()
    async with await asking as response:
        assert (await response.json())["choices"][0]["finish_reason"] == "length"
    await stopping


async def test_killing_drops_every_connection(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """A request under way ends without an answer."""
    asking = asyncio.create_task(client.post(CHAT, json=chat(), headers=fault(hold=2)))
    await until(lambda: server.books.held == 1)
    await server.kill()
    with pytest.raises(aiohttp.ClientError):
        await asking


def _two_free_ports() -> int:
    """The first of two, below the range from which outgoing connections take theirs."""
    for port in range(23_000, 31_000, 2):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two ports are free")


async def test_serve_runs_a_fleet_until_cancelled() -> None:
    """Consecutive ports, independent engines."""
    port = _two_free_ports()
    said: list[str] = []
    task = asyncio.create_task(serve(SimOptions(port=port, count=2, speed=1000), said.append))
    async with aiohttp.ClientSession() as client:
        for offset in (0, 1):
            await _answers(client, f"http://127.0.0.1:{port + offset}/health")
        assert said == [f"2 engines at 127.0.0.1:{port}-{port + 1}, model sim"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(f"http://127.0.0.1:{port}/health")


async def _answers(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with client.get(url) as response:
                assert response.status == 200
                return
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.01)


# -- faults


async def test_a_status_fault_answers_at_once(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """In vLLM's error shape, sticky until cleared; a request's own faults replace the server's."""
    async with client.post("/sim/faults", json={"status": 503}) as response:
        assert response.status == 200
    async with client.post(CHAT, json=chat()) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (503, "Service Unavailable")
    async with client.post(CHAT, json=chat(), headers=fault()) as response:
        assert response.status == 200
    async with client.post("/sim/faults", json={}) as response:
        assert response.status == 200
    async with client.post(CHAT, json=chat()) as response:
        assert response.status == 200
    assert (server.books.failed, server.books.served) == (1, 2)


@pytest.mark.parametrize("document", [{"unknown": 1}, {"status": 200}, {"hold": 0}])
async def test_faults_that_do_not_exist_are_refused(client: aiohttp.ClientSession, document: dict[str, Any]) -> None:
    """A typo in a test shows, on the control endpoint and in the header."""
    async with client.post("/sim/faults", json=document) as response:
        assert response.status == 400
    async with client.post(CHAT, json=chat(), headers=fault(**document)) as response:
        assert response.status == 400


async def test_a_reset_before_the_headers(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """The client sees its connection die without a byte."""
    with pytest.raises(aiohttp.ClientOSError):
        await client.post(CHAT, json=chat(), headers=fault(reset_before_headers=True))
    await until(lambda: server.books.failed == 1)
    assert (server.books.aborted, server.engine.prompt_tokens_total) == (0, 0)


async def test_an_answer_cut_short(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Exactly so many tokens arrive, then the connection ends; a whole answer never starts."""
    received: list[bytes] = []
    async with client.post(CHAT, json=chat(stream=True), headers=fault(cut_after_tokens=3)) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await _read_into(received, response)
    assert b"".join(received).count(b'"content":') == 1 + 3
    with pytest.raises(aiohttp.ClientError):
        await client.post(CHAT, json=chat(), headers=fault(cut_after_tokens=3))
    await until(lambda: server.books.failed == 2)
    assert (server.engine.running, server.books.in_flight, server.books.aborted) == (0, 0, 0)


async def _read_into(received: list[bytes], response: aiohttp.ClientResponse) -> None:
    while chunk := await response.content.readany():
        received.append(chunk)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_gzip(client: aiohttp.ClientSession, *, stream: bool) -> None:
    """For who accepts it: smaller on the wire, the same to read; for others plain."""
    packed = fault(gzip=True) | {"X-Request-Id": "rid"}
    texts = []
    for accepted, encoding in (("gzip, br", "gzip"), ("br", None)):
        headers = packed | {"Accept-Encoding": accepted}
        async with client.post(CHAT, json=chat(stream=stream), headers=headers) as response:
            assert response.headers.get("Content-Encoding") == encoding
            texts.append(re.sub('"created":[0-9]+', "", await response.text()))
    assert texts[0] == texts[1]


async def test_a_stream_in_gzip_comes_event_by_event(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Not only once the compressor has enough."""
    headers = fault(gzip=True, hold=2)
    async with client.post(CHAT, json=chat(stream=True), headers=headers) as response:
        assert await response.content.readuntil(b"\n\n")
        server.release()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_held_answer_stays_open_until_released(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """So many tokens, then silence; it counts as running; after the release it ends properly."""
    responses = [await client.post(CHAT, json=chat(stream=True), headers=fault(hold=2)) for _ in range(3)]
    await until(lambda: server.books.held == 3)
    async with client.get("/sim/state") as response:
        state = await response.json()
    assert (state["in_flight"], state["running"], state["served"]) == (3, 3, 0)
    async with client.post("/sim/release") as response:
        assert response.status == 200
    for response in responses:
        parts = events(await response.text())
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, None, "length"]
    await until(lambda: server.books.served == 3)
    assert (server.books.in_flight, server.books.held) == (0, 0)


async def test_a_frozen_server_accepts_and_never_answers(
    server: SimulatedServer, client: aiohttp.ClientSession
) -> None:
    """Nothing but /sim answers until it is thawed, then everything does; leaving meanwhile counts as aborted."""
    server.set_faults(Faults(freeze=True))
    leaving = asyncio.create_task(client.post(CHAT, json=chat()))
    staying = [asyncio.create_task(client.post(CHAT, json=chat())), asyncio.create_task(client.get("/health"))]
    await until(lambda: server.books.in_flight == 2)
    leaving.cancel()
    await until(lambda: server.books.in_flight == 1)
    assert not any(task.done() for task in staying)
    async with client.post("/sim/faults", json={}) as response:
        assert response.status == 200
    for task in staying:
        async with await task as response:
            assert response.status == 200
    assert (server.books.aborted, server.books.served) == (1, 1)


async def test_one_frozen_request_does_not_stop_the_others(
    server: SimulatedServer, client: aiohttp.ClientSession
) -> None:
    """It is in flight, but not in the engine."""
    frozen = asyncio.create_task(client.post(CHAT, json=chat(), headers=fault(freeze=True)))
    await until(lambda: server.books.in_flight == 1)
    async with client.post(CHAT, json=chat()) as response:
        assert response.status == 200
    assert (server.books.in_flight, server.engine.running, frozen.done()) == (1, 0, False)
    frozen.cancel()


async def test_delayed_headers_delay_nothing_else(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """The request waits before it reaches the engine; others pass it."""
    delayed = asyncio.create_task(client.post(CHAT, json=chat(), headers=fault(delay_headers_s=3600)))
    await until(lambda: server.books.in_flight == 1)
    await _text(client, chat())
    assert (delayed.done(), server.books.in_flight, server.engine.running) == (False, 1, 0)
    delayed.cancel()
    await until(lambda: server.books.in_flight == 0)
    async with client.post(CHAT, json=chat(), headers=fault(delay_headers_s=0.001)) as response:
        assert response.status == 200


async def test_a_refusing_server_comes_back_by_itself(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """Idle connections are closed and new ones refused for the time given; then the same port answers again."""
    async with client.post("/sim/faults", json={"refuse_s": 0.05}) as response:
        assert response.status == 200
    assert server._outage is not None
    await server._outage
    await _answers(client, f"{server.url}/health")


async def test_clearing_the_faults_ends_a_refusal(server: SimulatedServer, client: aiohttp.ClientSession) -> None:
    """From Python; over HTTP there is nothing left to talk to."""
    async with client.post("/sim/faults", json={"refuse_s": 3600}) as response:
        assert response.status == 200
    await until(lambda: server._site is None)
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("/health")
    server.set_faults(NONE)
    await _answers(client, f"{server.url}/health")


async def test_metrics_can_fail_alone(client: aiohttp.ClientSession) -> None:
    """Scrapes get the status, requests are served."""
    async with client.post("/sim/faults", json={"metrics_status": 500}) as response:
        assert response.status == 200
    async with client.get("/metrics") as response:
        assert response.status == 500
    async with client.post(CHAT, json=chat()) as response:
        assert response.status == 200
