"""Other people's gateways, in their shapes: whole answers, right instance, counts that return to zero.

The shapes are settings read in each project's source, run in our Envoy; NGINX's is a client that behaves as its shim
does. None of the gateways themselves is run here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import httpx
import pytest
import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_engine import SERVICE
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, free_ports, pool_of, unmeasured

from extproc.config.loading import load
from extproc.control import envoy_config
from extproc.launcher import find_envoy

DUPLEX_SHAPES = ("istio", "ai-gateway", "agentgateway")
BUFFERED_SHAPES = ("envoy-gateway", "ai-gateway-buffered", "kgateway")
ANSWERS = dict.fromkeys(DUPLEX_SHAPES, 1700) | dict.fromkeys(BUFFERED_SHAPES, 400)
"""More than 5,000 over the gateways that pass both bodies through us, where an answer could be cut."""
CLIENTS = 8

_DUPLEX = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
_HEADER = "x-gateway-destination-endpoint"
_SETTINGS: dict[str, dict[str, Any]] = {
    "istio": {
        "processing_mode": _DUPLEX,
        "failure_mode_allow": True,
        "message_timeout": "1000s",
        "metadata_options": {
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
            "forwarding_namespaces": {"untyped": ["envoy.lb"]},
        },
    },
    "ai-gateway": {"processing_mode": _DUPLEX, "message_timeout": "300s"},
    "agentgateway": {"processing_mode": _DUPLEX, "message_timeout": "300s"},
    # what an EnvoyExtensionPolicy makes of `request: {body: Buffered}` with everything else left alone, but for
    # messageTimeout: its 200 ms are for a router that has a core of its own
    "envoy-gateway": {
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        "message_timeout": "10s",
    },
    # both annotations: processing-body-mode "buffered", allow-mode-override "true"
    "ai-gateway-buffered": {
        "processing_mode": _DUPLEX | {"request_body_mode": "BUFFERED", "response_body_mode": "BUFFERED"},
        "allow_mode_override": True,
        "message_timeout": "300s",
    },
    # its defaults: fails open, waits 200 ms (as above); the body must be asked for
    "kgateway": {
        "processing_mode": {"request_header_mode": "SEND", "request_body_mode": "BUFFERED"}
        | {"response_header_mode": "SKIP", "response_trailer_mode": "SEND"},
        "failure_mode_allow": True,
        "message_timeout": "10s",
    },
}


def _manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    (filter_chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    manager: dict[str, Any] = filter_chain["filters"][0]["typed_config"]
    return manager


def _gateway(config_path: Path, shape: str) -> dict[str, Any]:
    """An Envoy as that gateway would configure it: its own route and cluster, our server as endpoint picker."""
    config = load(config_path)
    bootstrap: dict[str, Any] = yaml.safe_load(envoy_config.to_yaml(envoy_config.bootstrap(config)))
    bootstrap.pop("dynamic_resources")
    manager = _manager(bootstrap)
    for name in ("access_log", "early_header_mutation_extensions", "local_reply_config"):
        manager.pop(name)
    (ext_proc,) = [f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.ext_proc"]
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
    }
    manager["http_filters"] = [ext_proc, router]
    grpc_service = ext_proc["typed_config"]["grpc_service"]
    kind = ext_proc["typed_config"]["@type"]
    ext_proc["typed_config"] = {"@type": kind, "grpc_service": grpc_service, **_SETTINGS[shape]}
    manager["route_config"] = {"name": "r", "virtual_hosts": [_virtual_host(shape)]}
    cluster = _cluster(shape, config.pools[0].endpoints.static or ())
    if config.pools[0].protocol == "grpc":
        cluster = cluster | {"typed_extension_protocol_options": _HTTP2}
    bootstrap["static_resources"]["clusters"].append(cluster)
    return bootstrap


_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def _virtual_host(shape: str) -> dict[str, Any]:
    """One route to the pool; kgateway's, which cannot be told an endpoint, is found by the pool we name."""
    match: dict[str, Any] = {"prefix": "/"}
    routes: list[dict[str, Any]] = []
    if shape == "kgateway":
        match["headers"] = [{"name": "x-pointsman-cluster", "string_match": {"exact": "pool"}}]
        routes = [{"match": {"prefix": "/"}, "direct_response": {"status": 503}}]
    return {
        "name": "v",
        "domains": ["*"],
        "routes": [{"match": match, "route": {"cluster": "pool", "timeout": "0s"}}, *routes],
    }


def _cluster(shape: str, addresses: tuple[str, ...]) -> dict[str, Any]:
    if shape == "istio":
        return _override_cluster(
            addresses, {"metadata": {"key": "envoy.lb", "path": [{"key": _HEADER}]}}, "round_robin"
        )
    if shape == "envoy-gateway":
        return _override_cluster(addresses, {"header": _HEADER}, "least_request")
    if shape == "kgateway":
        return _static_cluster(addresses)
    return _HEADER_CLUSTER


def _override_cluster(addresses: tuple[str, ...], source: dict[str, Any], fallback: str) -> dict[str, Any]:
    """override_host by one source; where that says nothing, the gateway's own choice."""
    kind = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    message = "".join(word.title() for word in fallback.split("_"))
    other = {"name": fallback, "typed_config": {"@type": f"{kind}.{fallback}.v3.{message}"}}
    override = {
        "@type": f"{kind}.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{_HEADER}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": other}]},
    }
    policy = {"policies": [{"typed_extension_config": {"name": "oh", "typed_config": override}}]}
    return {**_static_cluster(addresses), "load_balancing_policy": policy}


def _static_cluster(addresses: tuple[str, ...]) -> dict[str, Any]:
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in (address.split(":") for address in addresses)
    ]
    return {
        "name": "pool",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": endpoints}]},
    }


_HEADER_CLUSTER: dict[str, Any] = {
    "name": "pool",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": _HEADER},
}


@pytest.fixture(scope="module", params=list(ANSWERS))
def shape(request: pytest.FixtureRequest) -> str:
    """Whose gateway."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def picker(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Us alone, before whom somebody else's gateway comes."""
    with _picking(engines, tmp_path_factory.mktemp("picker")) as system:
        yield system


@pytest.fixture(scope="module")
def running_gateway(shape: str, engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Somebody's gateway in front of us."""
    folder = tmp_path_factory.mktemp(shape)
    with _picking(engines, folder) as system, _in_front(system, shape, folder):
        yield system


@pytest.fixture
def gateway(running_gateway: System) -> Iterator[System]:
    """The same, which counts from zero and has nothing in flight at the end."""
    running_gateway.count_from_now()
    yield running_gateway
    running_gateway.wait_settled()


@contextmanager
def _picking(engines: list[Engine], folder: Path) -> Iterator[System]:
    with _serving(System(folder, {"pools": [{**pool_of(engines), "cluster": "pool"}]})) as system:
        system.wait_pickable(*(engine.address for engine in engines))
        yield system


@contextmanager
def _serving(system: System) -> Iterator[System]:
    with system.log.open("ab") as log:
        system.process = subprocess.Popen(
            [sys.executable, "-m", "extproc.cli", "serve", str(system.config_path)], stderr=log, env=unmeasured()
        )
    yield system
    if system.process.poll() is None:
        system.stop()
    print(system.log.read_text()[-4000:])


@contextmanager
def _in_front(picker: System, shape: str, folder: Path) -> Iterator[None]:
    (folder / "envoy.yaml").write_text(yaml.safe_dump(_gateway(picker.config_path, shape)))
    with picker.log.open("ab") as log:
        envoy = subprocess.Popen(
            [find_envoy(), "-c", str(folder / "envoy.yaml"), "--disable-hot-restart", "-l", "error"], stderr=log
        )
    eventually(lambda: httpx.get(f"{picker.url}/v1/models").status_code == 200, "the gateway serves")
    yield
    envoy.terminate()
    envoy.wait(HANG_GUARD_S)


def _question(number: int, model: str = "gpt-4o") -> dict[str, Any]:
    """One request, for JSON or SSE in turn."""
    return chat(f"question {number % 50} " * 20, model=model, stream=bool(number % 2), max_tokens=8)


def _whole(number: int, status: int, text: bytes) -> bool:
    """The answer to that request is complete."""
    if status != 200:
        return False
    if number % 2:
        return text.endswith(b"data: [DONE]\n\n") and text.count(b'"content":') >= 8
    return len(json.loads(text)["choices"][0]["message"]["content"]) == 32


async def _cut(answers: int, ask: Callable[[aiohttp.ClientSession, int], Awaitable[bool]]) -> list[int]:
    """The numbers of the requests, sent by 8 clients, whose answers were not whole."""
    cut: list[int] = []

    async def client(first: int) -> None:
        async with aiohttp.ClientSession() as session:
            cut.extend([n for n in range(first, answers, CLIENTS) if not await ask(session, n)])

    await asyncio.gather(*(client(first) for first in range(CLIENTS)))
    return cut


@pytest.mark.timeout(400)
async def test_no_answer_is_cut_or_empty(gateway: System, shape: str) -> None:
    """Thousands of JSON and SSE answers at 8 clients: every one is whole, and every count returns to zero."""

    async def ask(session: aiohttp.ClientSession, number: int) -> bool:
        async with session.post(f"{gateway.url}/v1/chat/completions", json=_question(number)) as answer:
            return _whole(number, answer.status, await answer.read())

    assert await _cut(ANSWERS[shape], ask) == []
    eventually(lambda: gateway.total("pointsman_ext_proc_streams_open") == 0, "every stream has ended")
    assert set(gateway.in_flight().values()) == {0}
    assert gateway.total("pointsman_decisions_total") == ANSWERS[shape]


@pytest.mark.parametrize("shape", BUFFERED_SHAPES, indirect=True)
def test_who_buffers_requests_pays_nothing_per_token(gateway: System) -> None:
    """A stream of 2,000 tokens: two messages, and none of the answer, mode override or not."""
    before = gateway.total("pointsman_ext_proc_messages_total")
    body = chat(max_tokens=2_000, stream=True)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.text.count('"content":') >= 2_000
    eventually(lambda: gateway.total("pointsman_ext_proc_streams_open") == 0, "the stream has ended")
    assert gateway.total("pointsman_ext_proc_messages_total") - before == 2


def test_large_bodies_pass_both_ways(gateway: System, engines: list[Engine]) -> None:
    """A prompt of 1 MB by alias reaches the engine edited and whole; a long answer comes back byte for byte."""
    body = chat("long " * 200_000, model="gpt-4o", stream=True, max_tokens=2_000)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200
    sent = [r for e in engines for r in e.requests() if r["sent_sha256"] == hashlib.sha256(answer.content).hexdigest()]
    assert len(sent) == 1


def test_refusals_arrive_in_this_mode_too(gateway: System) -> None:
    """Broken JSON, an unknown model and an unknown path: our status and OpenAI's error object."""
    url = f"{gateway.url}/v1/chat/completions"
    for content, status in ((b"{", 400), (b'{"model":"nope","messages":[]}', 404)):
        answer = httpx.post(url, content=content, timeout=HANG_GUARD_S)
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
    assert httpx.post(f"{gateway.url}/nothing", content=b"{}", timeout=HANG_GUARD_S).status_code == 404


def test_an_aborted_request_gives_its_place_back(gateway: System) -> None:
    """The client leaves in the middle of its stream."""
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, gateway)
        eventually(lambda: sum(gateway.in_flight().values()) == 1, "it is counted")
        stream.answer.close()
    eventually(lambda: sum(gateway.in_flight().values()) == 0, "it is given back")


def test_two_turns_meet_on_one_instance(gateway: System) -> None:
    """Affinity holds here as well: the second turn's prefix is found where the first one went."""
    history = "a long story that both turns share " * 60
    for turn in ("one", "two"):
        httpx.post(f"{gateway.url}/v1/chat/completions", json=chat(f"{history}{turn}"), timeout=HANG_GUARD_S)
    assert gateway.total("pointsman_prefix_matched_tokens_total") > 400


@pytest.mark.parametrize(
    ("mortal", "runs_on", "new"),
    [("kgateway", True, {503}), ("envoy-gateway", False, {500}), ("istio", False, {200, 500})],
)
def test_our_death_ends_what_passes_through_us_or_fails_closed(
    engines: list[Engine], tmp_path: Path, mortal: str, *, runs_on: bool, new: set[int]
) -> None:
    """Open and buffered, a running answer goes on. In full duplex open means: until a piece of the body was sent."""
    text = ""
    body = chat(max_tokens=2_000, stream=True)
    with _picking(engines, tmp_path) as gateway, _in_front(gateway, mortal, tmp_path):
        url = f"{gateway.url}/v1/chat/completions"
        with (
            suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", url, json=body, timeout=HANG_GUARD_S) as answer,
        ):
            for piece in answer.iter_text():
                text += piece
                gateway.process.kill()
        assert text.endswith("data: [DONE]\n\n") == runs_on
        gateway.process.wait(HANG_GUARD_S)
        assert httpx.post(url, json=chat(), timeout=HANG_GUARD_S).status_code in new


@pytest.fixture
def grpc_engine() -> Iterator[int]:
    """The port of an engine that speaks gRPC."""
    (port,) = free_ports(1)
    engine = subprocess.Popen([sys.executable, str(Path(__file__).with_name("grpc_engine.py")), str(port), "a"])
    yield port
    engine.kill()
    engine.wait()


async def test_grpc_talks_pass_through_a_full_duplex_gateway(grpc_engine: int, tmp_path: Path) -> None:
    """Decided at once: each message is answered by the engine before the client sends its next."""
    port = grpc_engine
    pool = {"name": "p", "models": ["m"], "protocol": "grpc", "cluster": "pool"}
    pool |= {"endpoints": {"static": [f"127.0.0.1:{port}"]}}
    parts = {"pools": [pool], "routing": {"paths": [{"prefix": f"/{SERVICE}", "pool": "p"}]}}
    with _serving(System(tmp_path, parts)) as system, _in_front(system, "istio", tmp_path):
        system.wait_pickable(f"127.0.0.1:{port}")
        async with grpc.aio.insecure_channel(system.url.removeprefix("http://")) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Bidirectional")(timeout=HANG_GUARD_S)
            for number in range(100):
                await call.write(b"%d" % number)
                assert await call.read() == b"a %d" % number
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        await asyncio.to_thread(eventually, lambda: set(system.in_flight().values()) == {0}, "nothing is in flight")


# -- NGINX Gateway Fabric, which is no Envoy


async def _endpoint_by_shim(address: str, body: bytes) -> str:
    """What NGINX's shim learns: a connection of its own, headers without pseudo headers, the body whole, then EOF.

    Of all that comes back it reads the answer to the headers; without an endpoint there it knows none: "".
    """
    headers, whole = ext_proc.ProcessingRequest(), ext_proc.ProcessingRequest()
    for name, value in (("content-type", "application/json"), ("content-length", str(len(body)))):
        headers.request_headers.headers.headers.add(key=name, value=value)
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")(
            iter([headers.SerializeToString(), whole.SerializeToString()]), timeout=HANG_GUARD_S
        )
        answers = [ext_proc.ProcessingResponse.FromString(raw) async for raw in call]
    options = [o for a in answers for o in a.request_headers.response.header_mutation.set_headers]
    return next((option.header.raw_value.decode() for option in options if option.header.key == _HEADER), "")


async def test_nginx_finds_an_endpoint_for_every_request(picker: System, engines: list[Engine]) -> None:
    """A few hundred, JSON and SSE in turn, at 8 clients: one address each, whole answers, nothing left in flight."""
    addresses = {engine.address for engine in engines}
    picker.count_from_now()

    async def ask(session: aiohttp.ClientSession, number: int) -> bool:
        body = json.dumps(_question(number, "sim")).encode()
        endpoint = await _endpoint_by_shim(picker.config["listen"]["grpc"], body)
        if endpoint not in addresses:
            return False
        close = {"connection": "close"}  # NGINX's proxy keeps none open either
        async with session.post(f"http://{endpoint}/v1/chat/completions", data=body, headers=close) as answer:
            return _whole(number, answer.status, await answer.read())

    assert await _cut(300, ask) == []
    assert set(picker.in_flight().values()) == {0}
    assert picker.total("pointsman_decisions_total") == 300
    assert picker.total("pointsman_ext_proc_messages_total") == 600


@pytest.mark.parametrize("body", [b"{", b'{"model":"nope","messages":[]}'])
async def test_nginx_finds_no_endpoint_for_a_refused_request(picker: System, body: bytes) -> None:
    """Its shim knows no refusals: what is left is the pool's failureMode."""
    assert await _endpoint_by_shim(picker.config["listen"]["grpc"], body) == ""
    assert set(picker.in_flight().values()) == {0}
