"""What streams cost their tenants, through a real Envoy: asked for in the client's place, and settled by it."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, System, eventually, pool_of

from extproc.access.keys import digest_of

KEY = "pm-acme-0123456789abcdef"
ACCESS = {"api_keys": [{"name": "acme-1", "tenant": "acme", "sha256": digest_of(KEY)}]}
TENANTS = {"usage": "inject", "named": {"acme": {"tokens": {"per_s": 1e-6, "burst": 1e9}, "budget": {"tokens": 1e9}}}}
BEARER = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
INJECTED = b'"stream_options":{"include_usage":true},'


@pytest.fixture(scope="module")
def engine(make_engines: Callable[..., list[Engine]]) -> Engine:
    """One that remembers what reached it."""
    return make_engines(1, "--speed", "100", "--record", "20")[0]


@pytest.fixture(scope="module")
def asking(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system that asks streams for their usage."""
    folder: Path = tmp_path_factory.mktemp("asking")
    config = {"pools": [pool_of([engine])], "access": ACCESS, "tenants": TENANTS, "headers": BEARER}
    system = System(folder, config)
    system.start()
    system.wait_pickable(engine.address)
    yield system
    system.stop()


def _sent(engine: Engine) -> bytes:
    """The body that reached the engine last."""
    return base64.b64decode(engine.requests()[-1]["body_base64"])


def _post(system: System, path: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(system.url + path, content=body, headers=BEARER | headers, timeout=HANG_GUARD_S)


def _chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "asks"),
    [("/v1/chat/completions", b'"messages":[{"role":"user","content":"h\xc3\xa4 \\u0041"}]'),
     ("/v1/completions", b'"prompt":"h\xc3\xa4 \\u0041"')],
)  # fmt: skip
def test_a_stream_is_asked_for_its_usage_and_else_nothing_changes(
    asking: System, engine: Engine, path: str, asks: bytes
) -> None:
    """The engine gets the client's bytes, unknown fields and spaces included, and the wish before them."""
    body = b'{ "model":"sim",  "stream": true, "max_tokens":3, "x-unknown": 1.50, ' + asks + b"}"
    answer = _post(asking, path, body)
    assert answer.status_code == 200
    assert _sent(engine) == body[:1] + INJECTED + body[1:]
    last = _chunks(answer)[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


def test_a_compressed_stream_is_asked_as_well(asking: System, engine: Engine) -> None:
    """It goes on as it would have been without the compression."""
    body = b'{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
    answer = _post(asking, "/v1/chat/completions", gzip.compress(body), **{"content-encoding": "gzip"})
    assert answer.status_code == 200
    assert _sent(engine) == body[:1] + INJECTED + body[1:]


@pytest.mark.parametrize("options", [b'{"include_usage":false}', b'{ "include_usage" : true }'])
def test_a_client_that_says_what_it_wants_gets_that(asking: System, engine: Engine, options: bytes) -> None:
    """Also a no: it is charged by what was predicted, and counted."""
    before = asking.total("pointsman_stream_usage_total", 'asked_by="nobody"')
    body = b'{"model":"sim","stream":true,"max_tokens":2,"messages":[],"stream_options":' + options + b"}"
    answer = _post(asking, "/v1/chat/completions", body.replace(b"[]", b'[{"role":"user","content":"hi"}]'))
    assert answer.status_code == 200
    assert options in _sent(engine)
    declined = b"false" in options
    assert any(chunk.get("usage") for chunk in _chunks(answer)) is not declined
    assert asking.total("pointsman_stream_usage_total", 'asked_by="nobody"') - before == declined


def test_openais_client_streams_as_before(asking: System) -> None:
    """Its iteration, and what its helper puts together, stand one chunk more without choices."""
    client = openai.OpenAI(base_url=f"{asking.url}/v1", api_key=KEY)
    messages: Any = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="sim", messages=messages, max_tokens=5, stream=True)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(model="sim", messages=messages, max_tokens=5)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    with client.chat.completions.stream(model="sim", messages=messages, max_tokens=5) as helper:
        assert "content.done" in {event.type for event in helper}
        assert helper.current_completion_snapshot.choices[0].message.content == text


def test_buckets_settle_to_what_streams_really_used(engine: Engine, make_system: Callable[..., System]) -> None:
    """A hundred streams whose clients ask for no usage, of any length: charged within 1 % of the engine's own count."""
    system = make_system(pools=[pool_of([engine])], access=ACCESS, tenants=TENANTS, headers=BEARER)
    system.wait_pickable(engine.address)
    rng, used = random.Random(3), 0
    with httpx.Client(base_url=system.url, timeout=HANG_GUARD_S, headers=BEARER) as client:
        for number in range(100):
            messages = [{"role": "user", "content": f"{number} " * rng.randrange(1, 200)}]
            body = {"model": "sim", "stream": True, "max_tokens": rng.randrange(1, 100), "messages": messages}
            used += _chunks(client.post("/v1/chat/completions", json=body))[-1]["usage"]["total_tokens"]
    eventually(lambda: system.total("pointsman_requests_unsettled") == 0, "all are settled")
    account = httpx.get(f"{system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]["acme"]
    assert account["budget_spent_tokens"] == pytest.approx(used, rel=0.01)
    assert account["tokens_left"] == pytest.approx(1e9 - used, abs=0.01 * used)
    assert system.total("pointsman_tenant_tokens_total", 'source="estimate"') == 0
    assert system.total("pointsman_stream_usage_total", 'asked_by="us"') == 100


def test_where_nobody_asks_the_engines_plugin_tells_what_streams_used(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """No chunk more, and yet charged to the token: chats and completions, with an id of the client's or none."""
    [engine] = make_engines(1, "--speed", "100", "--stats-port", "0")
    tenants = {**TENANTS, "usage": "as_asked"}
    system = make_system(pools=[pool_of([engine])], access=ACCESS, tenants=tenants, headers=BEARER)
    eventually(lambda: system.fleet()[engine.address]["source"] == "push", "figures are pushed")
    used = 0
    with httpx.Client(base_url=system.url, timeout=HANG_GUARD_S, headers=BEARER) as client:
        for number in range(40):
            path, asks = "/v1/completions", {"prompt": "hello " * number + "."}
            if number % 2:
                path, asks = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * number}]}
            body = {"model": "sim", "max_tokens": number + 1, **asks}
            headers = {"x-request-id": f"mine-{number}"} if number % 3 else {}
            answer = client.post(path, json={**body, "stream": True}, headers=headers)
            assert not any(chunk.get("usage") for chunk in _chunks(answer))
            used += httpx.post(f"http://{engine.address}{path}", json=body).json()["usage"]["total_tokens"]

    def settled() -> bool:
        told = httpx.get(f"{system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]["acme"]
        return bool(told["budget_spent_tokens"] == used)

    eventually(settled, "all are settled by what they used")
    assert system.total("pointsman_tenant_tokens_total", 'source="report"') == used
    assert system.total("pointsman_tenant_tokens_total", 'source="estimate"') == 0
