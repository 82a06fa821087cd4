"""Bad requests get a clear OpenAI-style error from us or from Envoy, and a count."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import h2.connection
import h2.events
import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, free_ports, pool_of

CASES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "empty body": (b"", {}, 400, "empty_body"),
    "no JSON": (b"hello", {}, 400, "invalid_json"),
    "an array": (b"[]", {}, 400, "invalid_json"),
    "cut off": (b'{"model": "sim", "messages": [', {}, 400, "invalid_json"),
    "not UTF-8": (b"\xff\xfe{}", {}, 400, "invalid_json"),
    "byte order mark": (b'\xef\xbb\xbf{"model":"sim","messages":[]}', {}, 400, "invalid_json"),
    "deep nesting": (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, {}, 400, "invalid_json"),
    "NaN": (b'{"model":"sim","messages":NaN}', {}, 400, "invalid_json"),
    "no model": (b'{"messages":[]}', {}, 400, "invalid_request"),
    "model is a number": (b'{"model":1,"messages":[]}', {}, 400, "invalid_request"),
    "no messages": (b'{"model":"sim"}', {}, 400, "invalid_request"),
    "unknown model": (b'{"model":"nope","messages":[]}', {}, 404, "unknown_model"),
    "compressed": (b"\x1f\x8b123", {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
}


def _post(system: System, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{system.url}/v1/chat/completions", content=body, headers=headers, timeout=HANG_GUARD_S)


def _assert_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("case", CASES)
def test_a_bad_body_gets_its_status_and_reason(system: System, case: str) -> None:
    """Status, OpenAI's error object, and one more on the counter of exactly that reason."""
    body, headers, status, reason = CASES[case]
    before = system.total("pointsman_refusals_total", f'reason="{reason}"')
    _assert_error(_post(system, body, **headers), status)
    assert system.total("pointsman_refusals_total", f'reason="{reason}"') == before + 1


def test_the_sdk_raises_not_found_for_an_unknown_model(system: System) -> None:
    """As OpenAI itself would: NotFoundError with the code clients look for."""
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/chat/completions/../load_lora_adapter", 404),
        ("POST", "/v1/%63hat/completions%2f..%2f..%2fsleep", 404),
    ],
)
def test_other_methods_and_paths_are_refused(system: System, method: str, path: str, status: int) -> None:
    """Nothing but the served paths reaches an engine, however it is spelled."""
    content = b"{}" if method == "POST" else None
    _assert_error(httpx.request(method, system.url + path, content=content, timeout=HANG_GUARD_S), status)


def test_forged_routing_headers_never_win(system: System, engines: list[Engine]) -> None:
    """A client cannot name its endpoint or cluster, nor pass for one of our requests."""
    (nowhere,) = free_ports(1)
    forged = {
        "x-gateway-destination-endpoint": f"127.0.0.1:{nowhere}",
        "x-gateway-destination-endpoint-served": f"127.0.0.1:{nowhere}",
        "x-pointsman-cluster": "pointsman_grpc",
        "x-pointsman-endpoint": f"127.0.0.1:{nowhere}",
        "x-pointsman-request-id": "forged",
        "x-pointsman-model": "forged",
    }
    for body in (json.dumps(chat()).encode(), json.dumps(chat(model="gpt-4o")).encode()):
        answer = _post(system, body, **forged)
        assert answer.status_code == 200
        assert answer.headers["x-pointsman-endpoint"] in {engine.address for engine in engines}
        assert answer.headers["x-pointsman-request-id"] != "forged"
    models = httpx.get(f"{system.url}/v1/models", headers=forged, timeout=HANG_GUARD_S)
    assert models.status_code == 200
    assert models.json()["object"] == "list"


@pytest.fixture
def strict(share_system: Callable[..., System], engines: list[Engine]) -> System:
    """A system that takes bodies of 200,000 bytes at most."""
    system = share_system(pools=[pool_of(engines)], limits={"request_body_bytes": 200_000})
    system.wait_pickable(engines[0].address)
    return system


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413_in_json(strict: System, *, chunked: bool) -> None:
    """Declared or found out while it comes, the client reads why; what fits goes through."""
    for size, status in ((400_000, 413), (150_000, 200)):
        body = json.dumps(chat("x" * size)).encode()
        answer = httpx.post(
            f"{strict.url}/v1/chat/completions", content=iter([body]) if chunked else body, timeout=HANG_GUARD_S
        )
        assert answer.status_code == status
        if status == 413:
            assert _assert_error(answer, 413)["code"] == "body_too_large"


def test_a_body_over_the_limit_is_refused_at_its_headers_over_http2(strict: System) -> None:
    """Before any of the body is sent; by h2 itself, since httpx and older curls drop an answer this early."""
    host, port = strict.url.removeprefix("http://").split(":")
    client = h2.connection.H2Connection()
    client.initiate_connection()
    names = (":method", ":path", ":authority", ":scheme", "content-length")
    client.send_headers(1, list(zip(names, ("POST", "/v1/chat/completions", "x", "http", "400000"), strict=True)))
    status, body = b"", b""
    with socket.create_connection((host, int(port)), timeout=HANG_GUARD_S) as connection:
        connection.sendall(client.data_to_send())
        ended = False
        while not ended:
            for event in client.receive_data(connection.recv(65_536)):
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[b":status"]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                ended = ended or isinstance(event, h2.events.StreamEnded)
            connection.sendall(client.data_to_send())
    assert status == b"413"
    assert json.loads(body)["error"]["code"] == "body_too_large"


def test_no_ready_endpoint_is_503_with_retry_after(make_system: Callable[..., System]) -> None:
    """A pool whose only endpoint does not answer: 503 JSON at once, with Retry-After and a count."""
    (nowhere,) = free_ports(1)
    pool = {"name": "chat", "models": ["sim"], "endpoints": {"static": [f"127.0.0.1:{nowhere}"]}}
    system = make_system(pools=[pool])
    answer = _post(system, json.dumps(chat()).encode())
    assert "ready" in _assert_error(answer, 503)["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert system.total("pointsman_refusals_total", 'reason="no_ready_endpoint"') == 1


def test_an_engines_own_error_passes_untouched(system: System) -> None:
    """What the engine says about a request is for the client, not for us to reword."""
    fault = {"x-sim-fault": json.dumps({"status": 422})}
    answer = _post(system, json.dumps(chat()).encode(), **fault)
    assert answer.status_code == 422
    assert answer.headers["server"] == "uvicorn"


def test_prompts_are_not_in_the_logs(system: System) -> None:
    """Neither of a served request nor of a refused one."""
    _post(system, json.dumps(chat("s3cret prompt words")).encode())
    _post(system, b'{"model":"sim","messages":"s3cret prompt words"')
    eventually(lambda: system.log.stat().st_size, "something is logged")
    assert "s3cret" not in system.log.read_text()
