"""Pods and names that come, drain and go, through a real Envoy and simulated engines on loopback addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually
from kubernetes_server import PODS, POOLS, SLICES, Kubernetes, endpoint, endpoint_slice, inference_pool, pod


class Cluster:
    """A stand-in API server, driven from the test's thread."""

    def __init__(self, server: Kubernetes, call: Callable[..., None]) -> None:
        self.server = server
        self._call = call

    def put(self, path: str, item: dict[str, Any]) -> None:
        """Add or change."""
        self._call(self.server.put, path, item)

    def delete(self, path: str, name: str) -> None:
        """Remove."""
        self._call(self.server.delete, path, name)

    def engine(self, engine: Engine, **how: Any) -> None:
        """The pod of an engine: all are on their host's network, each with a port of its own."""
        self.put(PODS, pod(self.name(engine), "127.0.0.1", ports={"http": engine.port}, **how))

    @staticmethod
    def name(engine: Engine) -> str:
        """Its pod's name."""
        return f"engine-{engine.port}"

    def break_off(self) -> None:
        """Refuse everything from now on, and end what is being watched."""
        self.server.status = 503
        self._call(self.server.end_watches)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """An API server."""
    server = Kubernetes()
    with server.serving() as call:
        yield Cluster(server, call)
        call(server.end_watches)


@pytest.fixture(scope="module")
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines."""
    return make_engines(2, "--speed", "50", "--record", "20")


def found_in(cluster: Cluster, **what: Any) -> dict[str, Any]:
    """A pool whose endpoints the cluster tells."""
    source = {"api_server": cluster.server.url, "namespace": "llm", "retry_max_s": 0.5, **what}
    return {"name": "chat", "models": ["sim"], "endpoints": {"kubernetes": source}}


def ask(system: System) -> httpx.Response:
    """One request."""
    return httpx.post(f"{system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)


def test_a_pod_that_is_deleted_drains_and_finishes_its_stream(
    pair: list[Engine], cluster: Cluster, make_system: Callable[..., System]
) -> None:
    """Terminating: no new request, the stream goes on and Envoy keeps the address. Gone: forgotten. Then it is back."""
    for engine in pair:
        cluster.engine(engine)
    system = make_system(pools=[found_in(cluster, pods={"selector": "app=vllm", "port": "http"})])
    system.wait_pickable(*(engine.address for engine in pair))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        going = next(engine for engine in pair if engine.address == stream.endpoint)
        kept = next(engine for engine in pair if engine is not going)
        cluster.engine(going, terminating=True)
        eventually(lambda: system.fleet()[going.address]["state"] == "draining", "it drains")
        assert system.fleet()[going.address]["drained_by"] == ["pool chat"]
        assert {ask(system).headers["x-pointsman-endpoint"] for _ in range(10)} == {kept.address}
        assert system.in_flight()[going.address] == 1
        assert system.fleet()[going.address]["routable"], "Envoy keeps it"
        going.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
    cluster.delete(PODS, cluster.name(going))
    eventually(lambda: going.address not in system.fleet(), "it is forgotten")
    cluster.engine(going)
    system.wait_pickable(going.address)


def test_a_pod_serves_when_it_is_ready(
    pair: list[Engine], cluster: Cluster, make_system: Callable[..., System]
) -> None:
    """Not before Kubernetes says so, though its engine answers; and no more when it says so no more."""
    first, second = pair
    cluster.engine(first)
    cluster.engine(second, ready=False)
    system = make_system(pools=[found_in(cluster, pods={"selector": "app=vllm", "port": "http"})])
    system.wait_pickable(first.address)
    assert second.address not in system.fleet()
    cluster.engine(second)
    system.wait_pickable(second.address)
    cluster.engine(second, ready=False)
    eventually(lambda: second.address not in system.fleet(), "it is out")
    assert ask(system).headers["x-pointsman-endpoint"] == first.address


def test_the_ports_of_an_inference_pool_are_endpoints(
    pair: list[Engine], cluster: Cluster, make_system: Callable[..., System]
) -> None:
    """Two ranks of one pod; then the pool leads to one port only."""
    ports = [engine.port for engine in pair]
    cluster.put(PODS, pod("ranks", "127.0.0.1"))
    cluster.put(POOLS, inference_pool("sim", *ports, app="vllm"))
    system = make_system(pools=[found_in(cluster, inference_pool={"name": "sim"})])
    system.wait_pickable(*(engine.address for engine in pair))
    cluster.put(POOLS, inference_pool("sim", ports[0], app="vllm"))
    eventually(lambda: list(system.fleet()) == [pair[0].address], "one port is left")
    assert ask(system).headers["x-pointsman-endpoint"] == pair[0].address


def test_an_api_server_that_fails_keeps_the_last_good_list(
    pair: list[Engine], cluster: Cluster, make_system: Callable[..., System]
) -> None:
    """Requests are served meanwhile; the metrics tell; what has changed is seen when it is back."""
    first, second = pair
    cluster.put(SLICES, endpoint_slice("s", endpoint("127.0.0.1", "a"), ports={"http": first.port}))
    system = make_system(pools=[found_in(cluster, endpoint_slices={"service": "vllm"})])
    system.wait_pickable(first.address)
    cluster.break_off()
    eventually(lambda: system.total("pointsman_discovery_stale", 'pool="chat"') == 1, "the list is stale")
    # the watch that breaks off may be noticed first, as a connection lost
    eventually(lambda: system.total("pointsman_discovery_failures_total", 'reason="http_status"') >= 1, "it is told")
    assert ask(system).headers["x-pointsman-endpoint"] == first.address
    cluster.put(SLICES, endpoint_slice("s", endpoint("127.0.0.1", "b"), ports={"http": second.port}))
    cluster.server.status = None
    system.wait_pickable(second.address)
    eventually(lambda: list(system.fleet()) == [second.address], "the first one is gone")
    assert system.total("pointsman_discovery_stale", 'pool="chat"') == 0
