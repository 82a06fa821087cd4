"""Hostile and broken input through a real Envoy: the right status, an error a client can read, nothing left behind."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

CHAT = "/v1/chat/completions"
MOST_BYTES = 500_000
GOOD = b'{"model":"sim", "messages":[{"role":"user","content":"hi"}], "max_tokens":1}'
ALIASED = GOOD.replace(b"sim", b"gpt-4o")


@pytest.fixture(scope="module")
def engine(make_engines: Callable[..., list[Engine]]) -> Engine:
    """One engine that remembers what it got."""
    return make_engines(1, "--speed", "1000", "--record", "20")[0]


@pytest.fixture(scope="module")
def system(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system over it that takes half a megabyte, and has nothing in flight when all is done."""
    limits = {"request_body_bytes": MOST_BYTES}
    system = System(tmp_path_factory.mktemp("hostile"), {"pools": [pool_of([engine])], "limits": limits})
    system.start()
    system.wait_pickable(engine.address)
    yield system
    eventually(lambda: not any(system.in_flight().values()), "nothing is in flight")
    assert system.total("pointsman_refusals_total", 'reason="internal_error"') == 0
    system.stop()


def _post(system: System, body: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
    return httpx.post(system.url + path, content=body, headers=headers, timeout=HANG_GUARD_S)


def _error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def _got(engine: Engine, answer: httpx.Response) -> tuple[bytes, dict[str, str]]:
    """Body and headers that the engine got for the request with this answer."""
    (found,) = _of(engine, answer)
    return base64.b64decode(found["body_base64"]), found["headers"]


def _of(engine: Engine, answer: httpx.Response) -> list[dict[str, Any]]:
    """What the engine remembers of the request with this answer."""
    request_id = answer.headers["x-pointsman-request-id"]
    return [r for r in engine.requests() if r["headers"].get("x-pointsman-request-id") == request_id]


# -- what is refused

REFUSED: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "empty body": (b"", {}, 400, "empty_body"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, {}, 400, "invalid_json"),
    "UTF-16": (GOOD.decode().encode("utf-16"), {}, 400, "invalid_json"),
    "NaN": (b'{"model":"sim","messages":[],"temperature":NaN}', {}, 400, "invalid_json"),
    "a lone surrogate": (GOOD.replace(b"hi", b"\\ud800"), {}, 400, "invalid_json"),
    "messages nested too deeply": (
        b'{"model":"sim","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        {},
        400,
        "invalid_json",
    ),
    "an unknown field nested too deeply": (GOOD[:-1] + b',"x":' + b"[" * 200_000, {}, 400, "invalid_json"),
    "the model is an object": (b'{"model":{"a":1},"messages":[]}', {}, 400, "invalid_request"),
    "the model is not UTF-8": (b'{"model":"\xff","messages":[]}', {}, 400, "invalid_json"),
    "the model is very long": (b'{"model":"%s","messages":[]}' % (b"m" * 100_000), {}, 404, "model_not_found"),
    "the last of two models is unknown": (GOOD[:-1] + b',"model":"nope"}', {}, 404, "model_not_found"),
    "a list": (b"[" + GOOD + b"]", {}, 400, "invalid_json"),
    "two documents": (GOOD + GOOD, {}, 400, "invalid_json"),
    "a form": (GOOD, {"content_type": "multipart/form-data; boundary=x"}, 415, "unsupported_content_type"),
    "brotli": (GOOD, {"content_encoding": "br"}, 415, "unsupported_encoding"),
    "compressed twice": (
        gzip.compress(gzip.compress(GOOD)),
        {"content_encoding": "gzip, gzip"},
        415,
        "unsupported_encoding",
    ),
    "not gzip at all": (GOOD, {"content_encoding": "gzip"}, 415, "unsupported_encoding"),
    "half of a gzip": (gzip.compress(GOOD)[:-9], {"content_encoding": "gzip"}, 415, "unsupported_encoding"),
    "a zip bomb": (gzip.compress(b" " * 200_000_000), {"content_encoding": "gzip"}, 413, "body_too_large"),
    "a zip bomb of many members": (
        gzip.compress(b" " * 400_000) * 200,
        {"content_encoding": "gzip"},
        413,
        "body_too_large",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_body_is_refused(system: System, case: str) -> None:
    """With its status, OpenAI's error object and the code that names the fault."""
    body, headers, status, code = REFUSED[case]
    assert _error(_post(system, body, **headers), status)["code"] == code


FORM_TYPE = {"content_type": "multipart/form-data; boundary=b"}
FORMS: dict[str, tuple[bytes, dict[str, str], int]] = {
    "JSON": (GOOD, {}, 415),
    "no boundary": (b"--b--\r\n", {"content_type": "multipart/form-data"}, 400),
    "another boundary": (b"--c\r\n\r\nx\r\n--c--\r\n", FORM_TYPE, 400),
    "no parts": (b"--b--\r\n", FORM_TYPE, 400),
    "no model": (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n', FORM_TYPE, 400),
    "cut off": (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim', FORM_TYPE, 400),
    "endless part headers": (b"--b\r\n" + b"x: y\r\n" * 10_000, FORM_TYPE, 400),
    "endless parts": (b"--b\r\n\r\n\r\n" * 10_000 + b"--b--\r\n", FORM_TYPE, 400),
    "a huge model": (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + b"m" * 100_000 + b"\r\n--b--\r\n",
        FORM_TYPE,
        400,
    ),
    "an unknown model": (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n--b--\r\n', FORM_TYPE, 404),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_bad_form_is_refused(system: System, case: str) -> None:
    """In JSON all the same."""
    body, headers, status = FORMS[case]
    _error(_post(system, body, "/v1/audio/transcriptions", **headers), status)


# -- what is the engine's to judge

PASSED: dict[str, tuple[bytes, dict[str, str], int]] = {
    "another content type": (GOOD, {"content_type": "text/plain"}, 200),
    "no UTF-8 inside messages": (GOOD.replace(b"hi", b"\xff\xfe"), {}, 400),
    "a huge number": (GOOD.replace(b'"max_tokens":1', b'"max_tokens":1' + b"0" * 400), {}, 200),
    "a huge number in an unknown field": (GOOD[:-1] + b',"x":-1' + b"0" * 4_000 + b"}", {}, 200),
    "messages given twice": (b'{"model":"sim","messages":[],' + GOOD[1:], {}, 200),
    "numbers where text belongs": (GOOD[:-1] + b',"user":7,"cache_salt":"","prompt_cache_key":{}}', {}, 200),
    "zero bytes": (GOOD.replace(b"hi", b"\\u0000"), {}, 200),
}


@pytest.mark.parametrize("case", PASSED)
def test_what_is_odd_but_routable_is_passed_on_untouched(system: System, engine: Engine, case: str) -> None:
    """The engine gets the client's bytes, and the client the engine's verdict."""
    body, headers, status = PASSED[case]
    answer = _post(system, body, **headers)
    assert (answer.status_code, answer.headers["server"]) == (status, "uvicorn"), answer.text
    assert _got(engine, answer)[0] == body


# -- compressed bodies

ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a frame": ("deflate", lambda body: zlib.compress(body, wbits=-15)),
    "gzip in two members": ("GZIP", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_a_compressed_body_goes_on_as_it_came(system: System, engine: Engine, case: str) -> None:
    """Read for routing only. The simulator's aiohttp inflates what it gets, so lengths on the wire are compared."""
    encoding, compress = ENCODERS[case]
    packed = compress(GOOD)
    answer = _post(system, packed, content_encoding=encoding)
    _, headers = _got(engine, answer)
    assert headers["content-encoding"] == encoding
    assert int(headers["content-length"]) == len(packed)


@pytest.mark.parametrize("case", ENCODERS)
def test_a_compressed_body_with_an_alias_goes_on_plain(system: System, engine: Engine, case: str) -> None:
    """Edited as any, without the header that would no longer be true."""
    encoding, compress = ENCODERS[case]
    answer = _post(system, compress(ALIASED), content_encoding=encoding)
    assert answer.status_code == 200, answer.text
    body, headers = _got(engine, answer)
    assert body == GOOD
    assert "content-encoding" not in headers
    assert int(headers["content-length"]) == len(GOOD)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_compressed_comes_as_it_is(system: System, engine: Engine, *, stream: bool) -> None:
    """What the client accepts is passed on, header and bytes come back; the usage in it is not seen, nor made up."""
    body = json.dumps(chat(stream=stream, stream_options={"include_usage": True} if stream else None)).encode()
    headers = {"accept-encoding": "br;q=0.1, gzip", "x-sim-fault": '{"gzip": true}'}
    with httpx.stream("POST", system.url + CHAT, content=body, headers=headers, timeout=HANG_GUARD_S) as answer:
        sent = b"".join(answer.iter_raw())
    assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip")
    (got,) = _of(engine, answer)
    assert got["headers"]["accept-encoding"] == headers["accept-encoding"]
    assert (got["sent_bytes"], got["sent_sha256"]) == (len(sent), hashlib.sha256(sent).hexdigest())
    assert gzip.decompress(sent).endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert b'"completion_tokens":4' in gzip.decompress(sent)
    assert system.decision(answer.headers["x-pointsman-request-id"])["outcome"]["usage"] is None


# -- HTTP itself


def _raw(system: System, request: bytes) -> bytes:
    """Everything that comes back for these bytes, until the server closes."""
    url = httpx.URL(system.url)
    with socket.create_connection((url.host, url.port or 80), timeout=HANG_GUARD_S) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65_536):
            answer += data
        return answer


def _assert_json_error(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status), answer
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"y" * 100_000 + b"\r\n", b"".join(b"x-%d: y\r\n" % n for n in range(200))],
    ids=["one huge header", "many headers"],
)
def test_a_header_bomb_is_431_in_json(system: System, headers: bytes) -> None:
    """Envoy's own limits, in our words."""
    _assert_json_error(_raw(system, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n"), 431)


def test_a_hundred_headers_are_no_bomb(system: System) -> None:
    """Envoy's usual limit is a client's to use up: what we add on the way does not count against it."""
    more = b"".join(b"x-%d: y\r\n" % n for n in range(96))
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    )
    answer = _raw(system, head % (CHAT.encode(), len(GOOD)) + more + b"\r\n" + GOOD)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_that_expects_100_continue_gets_it(system: System) -> None:
    """Before its body, and then the answer."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    answer = _raw(system, head % (CHAT.encode(), len(GOOD)) + GOOD)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert b"\r\n\r\nHTTP/1.1 200 OK\r\n" in answer


def test_a_client_that_expects_100_continue_may_be_refused_before(system: System) -> None:
    """What the headers alone condemn needs no body."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: 9000000\r\n\r\n"
    )
    answer = _raw(system, head % CHAT.encode())
    _assert_json_error(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"), 413)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"CONNECT 127.0.0.1:80 HTTP/1.1", 404),
        (b"POST /%s HTTP/1.1" % (b"x" * 20_000), 404),
        (b"POST /\xff\xfe HTTP/1.1", 400),
        (b"POST /v1/responses/%00/cancel HTTP/1.1", 400),
        (b"POST /v1/responses/%2e%2e/cancel HTTP/1.1", 404),
        (b"GET http://evil/v1/nothing HTTP/1.1", 404),
    ],
)
def test_an_odd_request_line_is_refused_in_json(system: System, request_line: bytes, status: int) -> None:
    """Whoever refuses it."""
    answer = _raw(system, request_line + b"\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
    _assert_json_error(answer, status)


def test_an_empty_chunked_body_is_an_empty_body(system: System) -> None:
    """The headers do not say so; the end does."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        % CHAT.encode()
    )
    _assert_json_error(_raw(system, head), 400)


def test_a_length_and_chunks_together_are_refused(system: System) -> None:
    """Two ways to say where a body ends are how requests are smuggled."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    assert _raw(system, head % CHAT.encode() + b"0\r\n\r\n").startswith(b"HTTP/1.1 400")
