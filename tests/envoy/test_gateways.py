"""Full-duplex gateways in the shapes of Istio, Envoy AI Gateway and agentgateway: whole answers, right instance."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

from extproc.config.loading import load
from extproc.control import envoy_config
from extproc.launcher import find_envoy

SHAPES = ("istio", "ai-gateway", "agentgateway")
ANSWERS = 5_000
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
    settings = ext_proc["typed_config"]
    settings["processing_mode"] = _DUPLEX
    settings["failure_mode_allow"] = shape == "istio"
    settings.pop("forward_rules")
    settings.pop("mutation_rules", None)
    if shape == "istio":
        settings["metadata_options"] = {
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
            "forwarding_namespaces": {"untyped": ["envoy.lb"]},
        }
    else:
        settings.pop("metadata_options")
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}
    manager["route_config"] = {"name": "r", "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]}
    cluster = _metadata_cluster(config.pools[0].endpoints.static or ()) if shape == "istio" else _HEADER_CLUSTER
    bootstrap["static_resources"]["clusters"].append(cluster)
    return bootstrap


def _metadata_cluster(addresses: tuple[str, ...]) -> dict[str, Any]:
    """Istio's: override_host by metadata alone, round robin where it says nothing."""
    kind = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    fallback = {"name": "rr", "typed_config": {"@type": f"{kind}.round_robin.v3.RoundRobin"}}
    override = {
        "@type": f"{kind}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": _HEADER}]}}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{_HEADER}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in (address.split(":") for address in addresses)
    ]
    return {
        "name": "pool",
        "type": "STATIC",
        "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "oh", "typed_config": override}}]},
        "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": endpoints}]},
    }


_HEADER_CLUSTER: dict[str, Any] = {
    "name": "pool",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": _HEADER},
}


@pytest.fixture(params=SHAPES)
def gateway(request: pytest.FixtureRequest, engines: list[Engine], tmp_path: Path) -> Iterator[System]:
    """Somebody's gateway in front of us."""
    shape: str = request.param
    system = System(tmp_path, {"pools": [{**pool_of(engines), "cluster": "pool"}]})
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(_gateway(system.config_path, shape)))
    with system.log.open("ab") as log:
        system.process = subprocess.Popen(
            [sys.executable, "-m", "extproc.cli", "serve", str(system.config_path)], stderr=log
        )
        envoy = subprocess.Popen(
            [find_envoy(), "-c", str(tmp_path / "envoy.yaml"), "--disable-hot-restart", "-l", "error"], stderr=log
        )
    eventually(lambda: httpx.get(f"{system.url}/v1/models").status_code == 200, "the gateway serves")
    system.wait_pickable(*(engine.address for engine in engines))
    yield system
    for process in (envoy, system.process):
        process.terminate()
        process.wait(HANG_GUARD_S)
    print(system.log.read_text()[-4000:])


async def _whole(client: aiohttp.ClientSession, system: System, number: int) -> bool:
    """One answer, JSON or SSE in turn, is complete."""
    stream = bool(number % 2)
    body = chat(f"question {number % 50} " * 20, model="gpt-4o", stream=stream, max_tokens=8)
    async with client.post(f"{system.url}/v1/chat/completions", json=body) as answer:
        text = await answer.read()
    if answer.status != 200:
        return False
    if stream:
        return text.endswith(b"data: [DONE]\n\n") and text.count(b'"content":') >= 8
    return len(json.loads(text)["choices"][0]["message"]["content"]) == 32


@pytest.mark.timeout(400)
async def test_no_answer_is_cut_or_empty(gateway: System) -> None:
    """Thousands of JSON and SSE answers at 8 clients: every one is whole, and every count returns to zero."""
    share = ANSWERS // len(SHAPES)
    cut: list[int] = []

    async def client(first: int) -> None:
        async with aiohttp.ClientSession() as session:
            cut.extend([n for n in range(first, share, CLIENTS) if not await _whole(session, gateway, n)])

    await asyncio.gather(*(client(first) for first in range(CLIENTS)))
    assert cut == []
    eventually(lambda: gateway.total("pointsman_ext_proc_streams_open") == 0, "every stream has ended")
    assert set(gateway.in_flight().values()) == {0}
    decided = gateway.total("pointsman_decisions_total")
    assert decided == share


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
