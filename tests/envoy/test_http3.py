"""HTTP/3 through a real Envoy, by a client that is not Envoy's: what holds over TCP holds over QUIC."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, ProtocolNegotiated, QuicEvent, StreamReset
from harness import HANG_GUARD_S, Engine, System, chat, eventually, free_ports, held, pool_of

WINDOW = 16 * 1024 * 1024
"""The largest that QUIC has for a stream in Envoy; a buffered body must fit into it."""
BODY_LIMIT = WINDOW + 1024 * 1024


@dataclass
class Answer:
    """One answer as it comes. `begun`: its first piece of a body is there."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int:
        """0 if the connection or the stream was broken off before one."""
        return int(self.headers.get(":status", 0))


class Client(QuicConnectionProtocol):
    """HTTP/3 over one QUIC connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._http: H3Connection | None = None
        self._answers: dict[int, Answer] = {}

    def quic_event_received(self, event: QuicEvent) -> None:
        """Hand on what came."""
        if isinstance(event, ProtocolNegotiated):
            self._http = H3Connection(self._quic)
        elif isinstance(event, ConnectionTerminated):
            for answer in self._answers.values():
                answer.ended.set()
        elif isinstance(event, StreamReset) and event.stream_id in self._answers:
            self._answers[event.stream_id].ended.set()
        for http_event in self._http.handle_event(event) if self._http else []:
            if isinstance(http_event, HeadersReceived | DataReceived):
                self._take(http_event)

    def _take(self, event: HeadersReceived | DataReceived) -> None:
        answer = self._answers[event.stream_id]
        if isinstance(event, HeadersReceived):
            answer.headers |= {name.decode(): value.decode() for name, value in event.headers}
        elif event.data:
            answer.body += event.data
            answer.begun.set()
        if event.stream_ended:
            answer.ended.set()

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Begin one request."""
        assert self._http is not None
        number = self._quic.get_next_available_stream_id()
        answer = self._answers[number] = Answer()
        fields = {":method": method, ":scheme": "https", ":authority": "localhost", ":path": path, **headers}
        if body:
            fields["content-length"] = str(len(body))
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        self._http.send_headers(number, encoded, end_stream=not body)
        if body:
            self._http.send_data(number, body, end_stream=True)
        self.transmit()
        return answer

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request and its whole answer."""
        answer = self.send(method, path, body, **headers)
        await asyncio.wait_for(answer.ended.wait(), HANG_GUARD_S)
        return answer

    async def chat(self, content: str = "hello", **fields: Any) -> Answer:
        """One chat completion."""
        return await self.ask("POST", "/v1/chat/completions", json.dumps(chat(content, **fields)).encode())


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    certificate, key = folder / "front.pem", folder / "front.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


@asynccontextmanager
async def _connection(port: int, trusted: Path, own: tuple[Path, Path] | None = None) -> AsyncIterator[Client]:
    """A QUIC connection; the server's certificate is verified, the client's own one shown if it has any."""
    configuration = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name="localhost")
    configuration.load_verify_locations(cafile=str(trusted))
    if own is not None:
        configuration.load_cert_chain(*own)
    async with connect("127.0.0.1", port, configuration=configuration, create_protocol=Client) as client:
        assert isinstance(client, Client)
        yield client


@dataclass(frozen=True)
class House:
    """A system with HTTP/3, and who believes its certificate."""

    system: System
    port: int
    certificate: Path

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A connection."""
        return _connection(self.port, self.certificate)


@pytest.fixture(scope="module")
def house(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of this module."""
    folder = tmp_path_factory.mktemp("http3")
    certificate, key = _certificate(folder)
    (port,) = free_ports(1)
    tls = {"certificate": str(certificate), "key": str(key)}
    parts = {
        "pools": [pool_of(engines)],
        "listen": {"http_tls": tls, "http3": f"127.0.0.1:{port}"},
        "limits": {"request_body_bytes": BODY_LIMIT},
        "verify": str(certificate),
    }
    system = System(folder, parts)
    system.start()
    system.wait_pickable(*(engine.address for engine in engines))
    yield House(system, port, certificate)
    system.stop()


async def test_a_chat_by_alias(house: House) -> None:
    """JSON, edited on its way, by the endpoint that the header names."""
    async with house.client() as client:
        answer = await client.chat(model="gpt-4o")
    assert answer.status == 200
    assert len(json.loads(answer.body)["choices"][0]["message"]["content"]) == 16
    assert answer.headers["x-pointsman-endpoint"] in house.system.in_flight()


async def test_streams_are_whole_and_side_by_side(house: House) -> None:
    """Twenty answers at once over one connection, each to its last event."""
    async with house.client() as client:
        answers = await asyncio.gather(*(client.chat(stream=True, max_tokens=50) for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert all(answer.body.count(b'"content":') >= 50 for answer in answers)
    eventually(lambda: not any(house.system.in_flight().values()), "nothing is in flight")


async def test_tokens_come_as_they_are_made(house: House, engines: list[Engine]) -> None:
    """The first of them while the engine holds back the rest, and counted in flight meanwhile."""
    async with house.client() as client:
        body = json.dumps(chat(stream=True, max_tokens=3)).encode()
        answer = client.send("POST", "/v1/chat/completions", body, **held(1))
        await asyncio.wait_for(answer.begun.wait(), HANG_GUARD_S)
        assert not answer.ended.is_set()
        assert sum(house.system.in_flight().values()) == 1
        while not answer.ended.is_set():
            for engine in engines:
                engine.release()
            await asyncio.sleep(0.05)
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_gives_its_place_back(house: House) -> None:
    """The connection is closed in the middle of a stream."""
    async with house.client() as client:
        body = json.dumps(chat(stream=True, max_tokens=3)).encode()
        answer = client.send("POST", "/v1/chat/completions", body, **held(1))
        await asyncio.wait_for(answer.begun.wait(), HANG_GUARD_S)
    await asyncio.to_thread(
        eventually, lambda: not any(house.system.in_flight().values()), "nothing is in flight any more"
    )


async def test_a_large_body_arrives(house: House) -> None:
    """Of 16 MiB, as much as QUIC lets a stream hold: read to its end, and found to be no JSON."""
    async with house.client() as client:
        answer = await client.ask("POST", "/v1/chat/completions", b"x" * WINDOW)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("size", [WINDOW + 1, BODY_LIMIT + 1])
async def test_too_large_a_body_is_413_in_json(house: House, size: int) -> None:
    """Beyond QUIC's window from Envoy, beyond our limit from us by what its headers say."""
    async with house.client() as client:
        answer = await client.ask("POST", "/v1/chat/completions", b"x" * size)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "body_too_large")


async def test_what_clients_may_not_say_is_removed_here_too(house: House, engines: list[Engine]) -> None:
    """A forged destination, cluster and tenant: the request goes where we say."""
    forged = {
        "x-gateway-destination-endpoint": "192.0.2.1:1",
        "x-pointsman-cluster": "pointsman_grpc",
        "x-pointsman-tenant": "somebody",
    }
    async with house.client() as client:
        answer = await client.ask("POST", "/v1/chat/completions", json.dumps(chat()).encode(), **forged)
    assert answer.status == 200
    request_id = answer.headers["x-pointsman-request-id"]
    (seen,) = [
        request["headers"]
        for engine in engines
        for request in engine.requests()
        if request["headers"].get("x-pointsman-request-id") == request_id
    ]
    assert (seen.get("x-pointsman-tenant"), seen["x-pointsman-cluster"]) == (None, "pool_chat")


def test_tcp_tells_of_quic(house: House) -> None:
    """Clients come by TCP first; its answers say where HTTP/3 is."""
    trust = ssl.create_default_context(cafile=str(house.certificate))
    url = f"{house.system.url}/v1/chat/completions"
    answer = httpx.post(url, json=chat(), verify=trust, timeout=HANG_GUARD_S)
    assert answer.headers["alt-svc"] == f'h3=":{house.port}"; ma=86400'


async def test_clients_must_show_a_certificate_where_one_is_required(
    make_system: Callable[..., System], engines: list[Engine], tmp_path: Path
) -> None:
    """Over QUIC as over TCP: without one, no request."""
    certificate, key = _certificate(tmp_path)
    (port,) = free_ports(1)
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.load_cert_chain(certificate, key)
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(certificate)}
    system = make_system(pools=[pool_of(engines)], listen={"http_tls": tls, "http3": f"127.0.0.1:{port}"}, verify=trust)
    system.wait_pickable(engines[0].address)
    async with _connection(port, certificate, (certificate, key)) as client:
        assert (await client.chat()).status == 200
    opened = system.total("pointsman_ext_proc_streams_opened_total")
    with suppress(ConnectionError):  # whether the handshake already fails depends on who is faster
        async with _connection(port, certificate) as client:
            assert (await client.chat()).status == 0
    assert system.total("pointsman_ext_proc_streams_opened_total") == opened
