"""Endpoints and configs that change while requests run."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import pytest
import yaml
from envoy.service.discovery.v3 import discovery_pb2
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of, unmeasured

from extproc.config.loading import load
from extproc.control import envoy_config
from extproc.control.ads_session import CDS, EDS
from extproc.launcher import find_envoy


@pytest.fixture(scope="module")
def two_engines(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """For all tests."""
    return make_engines(2, "--speed", "50", "--record", "200")


@pytest.fixture
def pair(two_engines: list[Engine]) -> list[Engine]:
    """Two engines, which count their requests from now on."""
    for engine in two_engines:
        engine.forget_requests()
    return two_engines


@pytest.fixture(scope="module")
def bilingual(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines that serve two models each."""
    return make_engines(2, "--speed", "1000", "--model", "sim", "--model", "sim-2")


OK = (200, "")
UNKNOWN_MODEL = (404, "model_not_found")
NOT_READY = (503, "no_ready_endpoint")


class Load:
    """Clients that send one request after the other, from entering to leaving, and what became of each request."""

    def __init__(self, system: System, *, model: str, clients: int = 6) -> None:
        self._url = f"{system.url}/v1/chat/completions"
        self._body = chat(model=model, max_tokens=1)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        self.outcomes: set[tuple[int, str]] = set()
        self.served: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        with httpx.Client(timeout=HANG_GUARD_S) as client:
            while not self._over.is_set():
                answer = client.post(self._url, json=self._body)
                code = "" if answer.is_success else answer.json()["error"]["code"]
                self.outcomes.add((answer.status_code, code))
                if answer.is_success:
                    self.served.append(answer.headers["x-pointsman-endpoint"])

    def wait_for(self, outcome: tuple[int, str]) -> None:
        """Until a request ends so that was sent after this call."""
        self.outcomes.discard(outcome)
        eventually(lambda: outcome in self.outcomes, f"a request ends with {outcome}; there were {self.outcomes}")


class SlowEnvoy:
    """A second Envoy, which takes over what it is told when the test says so."""

    def __init__(self, system: System) -> None:
        self._channel = grpc.insecure_channel(system.config["listen"]["grpc"])
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        ads = self._channel.stream_stream(
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
        )
        self._responses = ads(iter(self._requests.get, b"never"))
        self.ask(CDS)
        self.ask(CDS, nonce=self.hear().nonce)

    def ask(self, type_url: str, *names: str, nonce: str = "") -> None:
        """Subscribe, or acknowledge."""
        request = discovery_pb2.DiscoveryRequest(type_url=type_url, resource_names=names, response_nonce=nonce)
        self._requests.put(request.SerializeToString())

    def hear(self) -> discovery_pb2.DiscoveryResponse:
        """The next response."""
        return discovery_pb2.DiscoveryResponse.FromString(next(self._responses))

    def leave(self) -> None:
        """Hang up."""
        self._channel.close()


def _static(name: str, model: str, *engines: Engine, **fields: object) -> dict[str, Any]:
    addresses = [engine.address for engine in engines]
    return {"name": name, "models": [model], "endpoints": {"static": addresses}, **fields}


def _acknowledged(system: System) -> float:
    """How many lists of addresses Envoy has taken over."""
    return system.total("pointsman_xds_messages_total", 'event="acked"', 'type="eds"')


def _list_endpoints(file: Path, engines: list[Engine]) -> None:
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps([engine.address for engine in engines]))
    aside.rename(file)


def _by_file(file: Path, **fields: object) -> dict[str, Any]:
    return {"name": "chat", "models": ["sim"], "endpoints": {"file": str(file)}, **fields}


def test_an_endpoint_removed_from_the_file_finishes_its_stream_and_gets_nothing_new(
    pair: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Removed while it streams: the stream completes, Envoy forgets the address, no request reaches the engine."""
    file = tmp_path / "endpoints.json"
    _list_endpoints(file, pair)
    system = make_system(pools=[_by_file(file)])
    system.wait_pickable(*(engine.address for engine in pair))
    url = f"{system.url}/v1/chat/completions"
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        gone = next(e for e in pair if e.address == stream.endpoint)
        kept = next(e for e in pair if e is not gone)
        _list_endpoints(file, [kept])
        eventually(lambda: system.fleet()[gone.address]["state"] == "stopped", "the removal is seen")
        before = len(gone.requests())
        answers = [client.post(url, json=chat()) for _ in range(20)]
        assert {answer.headers["x-pointsman-endpoint"] for answer in answers} == {kept.address}
        assert system.in_flight()[gone.address] == 1
        gone.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
    assert len(gone.requests()) == before
    eventually(lambda: gone.address not in system.fleet(), "its slot is free once nothing runs on it")
    assert not [name for name in system.metrics() if gone.address in name], "its series are gone"


def test_an_endpoint_added_to_the_file_takes_traffic_without_a_failed_request(
    bilingual: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Added under load, and ready at once since another pool serves by it: it is picked once every Envoy has it.

    Each reply names one address only and nothing is retried, so that a pick before that would be a failed request. Of
    two Envoys the one that carries the requests is quick, and the other one decides when the endpoint may be picked.
    """
    first, second = bilingual
    file = tmp_path / "endpoints.json"
    _list_endpoints(file, [first])
    system = make_system(
        pools=[_by_file(file, policy="round-robin"), _static("other", "sim-2", second)],
        wire={"endpoint_list": "single"},
        retries={"attempts": 0},
    )
    system.wait_pickable(first.address, second.address)
    slow = SlowEnvoy(system)
    slow.ask(EDS, "pool_chat")
    slow.ask(EDS, "pool_chat", nonce=slow.hear().nonce)
    with Load(system, model="sim") as load:
        load.wait_for(OK)
        before = _acknowledged(system)
        _list_endpoints(file, bilingual)
        late = slow.hear()
        eventually(lambda: _acknowledged(system) > before, "the quick Envoy has it")
        sent = len(load.served)
        eventually(lambda: len(load.served) >= sent + 50, "requests go on")
        assert set(load.served) == {first.address}
        slow.ask(EDS, "pool_chat", nonce=late.nonce)
        eventually(lambda: second.address in load.served, "the new one serves")
    slow.leave()
    assert load.outcomes == {OK}
    assert system.total("pointsman_no_known_address_total") == 0


def test_a_broken_endpoints_file_keeps_the_last_good_list(
    pair: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Garbage, then nothing at all: the fleet stays, and the failed reads are counted."""
    file = tmp_path / "endpoints.json"
    _list_endpoints(file, pair)
    system = make_system(pools=[_by_file(file)])
    system.wait_pickable(*(engine.address for engine in pair))
    file.write_text("not: [a, list")
    eventually(lambda: system.total("pointsman_discoveries_total", 'result="failed"') >= 1, "the fault is counted")
    file.unlink()
    eventually(lambda: system.total("pointsman_discoveries_total", 'result="failed"') >= 2, "so is the missing file")
    assert set(system.fleet()) == {engine.address for engine in pair}
    assert httpx.post(f"{system.url}/v1/chat/completions", json=chat()).status_code == 200


def test_a_reload_adds_a_pool_and_loses_nothing(bilingual: list[Engine], make_system: Callable[..., System]) -> None:
    """A new pool and alias serve without a restart; the first pool's counts and index stay; generation goes up.

    Requests for the new pool are refused by us until it serves: none reaches an Envoy that does not know it yet.
    """
    first, second = bilingual
    system = make_system(pools=[_static("chat", "sim", first)])
    system.wait_pickable(first.address)
    url = f"{system.url}/v1/chat/completions"
    httpx.post(url, json=chat("a prompt to remember " * 60), timeout=HANG_GUARD_S)
    indexed = system.fleet()[first.address]["indexed_tokens"]["chat"]
    assert indexed > 0
    with Load(system, model="sim-2") as load:
        load.wait_for(UNKNOWN_MODEL)
        _reload(
            system, _static("chat", "sim", first, aliases={"new-alias": "sim"}), _static("more", "sim-2", second, first)
        )
        load.wait_for(OK)
    assert load.outcomes <= {UNKNOWN_MODEL, NOT_READY, OK}
    assert system.total("pointsman_config_generation") == 2
    assert system.fleet()[first.address]["indexed_tokens"]["chat"] >= indexed
    assert httpx.post(url, json=chat(model="new-alias"), timeout=HANG_GUARD_S).status_code == 200
    assert httpx.post(url, json=chat(model="gpt-4o"), timeout=HANG_GUARD_S).status_code == 404


def test_pools_that_come_and_go_cost_no_request_of_the_others(
    bilingual: list[Engine], make_system: Callable[..., System]
) -> None:
    """Added, renamed and removed under load: what is sent to the pool fails by our word only, beside it nothing fails.

    All pools have the same engines, so that the new one's are ready before Envoy knows its cluster.
    """
    kept = _static("chat", "sim", *bilingual)
    system = make_system(pools=[kept])
    system.wait_pickable(*(engine.address for engine in bilingual))
    with Load(system, model="sim", clients=2) as beside, Load(system, model="sim-2", clients=4) as load:
        for _ in range(3):
            _reload(system, kept, _static("more", "sim-2", *bilingual))
            load.wait_for(OK)
            _reload(system, kept, _static("renamed", "sim-2", *bilingual))
            load.wait_for(OK)
            _reload(system, kept)
            load.wait_for(UNKNOWN_MODEL)
    assert beside.outcomes == {OK}
    assert load.outcomes <= {UNKNOWN_MODEL, NOT_READY, OK}


def _reload(system: System, *pools: dict[str, Any]) -> None:
    """Put these pools in force."""
    before = system.total("pointsman_config_generation")
    system.config["pools"] = list(pools)
    system.write_config()
    eventually(lambda: system.total("pointsman_config_generation") > before, "the new generation is in force")


def test_an_envoy_that_was_killed_holds_no_newcomer_up(
    pair: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Its session ends with it, and the next Envoy's counts."""
    file = tmp_path / "endpoints.json"
    _list_endpoints(file, pair[:1])
    system = make_system(pools=[_by_file(file)])
    system.wait_pickable(pair[0].address)
    os.kill(system.child("envoy.yaml"), signal.SIGKILL)
    _list_endpoints(file, pair)
    system.wait_pickable(*(engine.address for engine in pair))
    eventually(lambda: httpx.get(f"{system.url}/v1/models").status_code == 200, "the next Envoy serves")
    eventually(lambda: system.total("pointsman_xds_sessions") == 1, "only the next Envoy is connected")


def test_a_bad_reload_changes_nothing_and_is_reported(pair: list[Engine], make_system: Callable[..., System]) -> None:
    """An unknown key: counted, logged with its path, and the old generation serves on."""
    system = make_system(pools=[pool_of(pair)])
    system.wait_pickable(pair[0].address)
    system.config["pools"][0]["modells"] = ["typo"]
    system.write_config()
    eventually(lambda: system.total("pointsman_config_reloads_total", 'result="rejected"') == 1, "it is rejected")
    assert "pools[0].modells" in system.log.read_text()
    assert system.total("pointsman_config_generation") == 1
    assert httpx.post(f"{system.url}/v1/chat/completions", json=chat()).status_code == 200


@pytest.fixture
def foreign_envoy(pair: list[Engine], tmp_path: Path) -> Iterator[System]:
    """Somebody else's Envoy with a static cluster that knows only the first engine; our pool lists only the second."""
    pool = {**pool_of(pair[1:]), "cluster": "theirs"}
    system = System(tmp_path, {"pools": [pool]})
    bootstrap = yaml.safe_load(envoy_config.to_yaml(envoy_config.bootstrap(load(system.config_path))))
    ours = load(system.config_path).model_copy()
    cluster = yaml.safe_load(envoy_config.to_yaml(envoy_config.pool_cluster(ours, ours.pools[0])))
    host, port = pair[0].address.split(":")
    address = {"socket_address": {"address": host, "port_value": int(port)}}
    cluster.pop("eds_cluster_config")
    cluster["type"] = "STATIC"
    cluster["load_assignment"] = {
        "cluster_name": "theirs",
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
    }
    bootstrap.pop("dynamic_resources")
    bootstrap["static_resources"]["clusters"].append(cluster)
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(bootstrap))
    with system.log.open("ab") as log:
        serve = subprocess.Popen(
            [sys.executable, "-m", "extproc.cli", "serve", str(system.config_path)], stderr=log, env=unmeasured()
        )
        envoy = subprocess.Popen(
            [find_envoy(), "-c", str(tmp_path / "envoy.yaml"), "--disable-hot-restart", "-l", "error"], stderr=log
        )
    system.process = serve
    eventually(lambda: httpx.get(f"{system.url}/v1/models").status_code == 200, "the foreign Envoy serves")
    yield system
    for process in (envoy, serve):
        process.terminate()
        process.wait(HANG_GUARD_S)


def test_a_pick_that_envoy_does_not_know_is_503_and_counted(foreign_envoy: System, pair: list[Engine]) -> None:
    """Strict pin: Envoy does not choose behind our back, the client gets JSON, the counter says why."""
    foreign_envoy.wait_pickable(pair[1].address)
    answer = httpx.post(f"{foreign_envoy.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["type"] == "server_error"
    assert int(answer.headers["retry-after"]) >= 1
    eventually(lambda: foreign_envoy.total("pointsman_no_known_address_total") == 1, "it is counted")
    assert pair[0].requests() == []
    assert pair[1].requests() == []
    eventually(lambda: sum(foreign_envoy.in_flight().values()) == 0, "the reservation is given back")
