"""Endpoints and configs that change while requests run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

from extproc.config.loading import load
from extproc.control import envoy_config
from extproc.launcher import find_envoy


@pytest.fixture
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines."""
    return make_engines(2, "--speed", "50", "--record", "20")


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
    pair: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Added under load: every request is answered, and it is picked only after Envoy has acknowledged it."""
    file = tmp_path / "endpoints.json"
    _list_endpoints(file, pair[:1])
    system = make_system(pools=[_by_file(file, policy="round-robin")])
    system.wait_pickable(pair[0].address)
    _list_endpoints(file, pair)
    served = set()

    def until_both() -> bool:
        answer = httpx.post(f"{system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
        assert answer.status_code == 200
        served.add(answer.headers["x-pointsman-endpoint"])
        return len(served) == 2

    eventually(until_both, "both serve", pause_s=0)
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


def test_a_reload_adds_a_pool_and_loses_nothing(pair: list[Engine], make_system: Callable[..., System]) -> None:
    """A new pool and alias serve without a restart; the first pool's counts and index stay; generation goes up."""
    first, second = pair
    system = make_system(pools=[pool_of([first])])
    system.wait_pickable(first.address)
    url = f"{system.url}/v1/chat/completions"
    httpx.post(url, json=chat("a prompt to remember " * 60), timeout=HANG_GUARD_S)
    indexed = system.fleet()[first.address]["indexed_tokens"]["chat"]
    assert indexed > 0
    system.config["pools"] = [
        pool_of([first], aliases={"new-alias": "sim"}),
        {"name": "more", "models": ["sim-2"], "endpoints": {"static": [second.address]}},
    ]
    system.write_config()
    eventually(lambda: system.total("pointsman_config_generation") == 2, "the new generation is in force")
    assert system.fleet()[first.address]["indexed_tokens"]["chat"] == indexed
    assert httpx.post(url, json=chat(model="new-alias"), timeout=HANG_GUARD_S).status_code == 200
    assert httpx.post(url, json=chat(model="gpt-4o"), timeout=HANG_GUARD_S).status_code == 404
    # The engine lists `sim` only: reachable and ready, but not for this model.
    refused = httpx.post(url, json=chat(model="sim-2"), timeout=HANG_GUARD_S)
    assert refused.status_code == 503
    assert "1 model" in refused.json()["error"]["message"] or "1 ready" in refused.json()["error"]["message"]


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
        serve = subprocess.Popen([sys.executable, "-m", "extproc.cli", "serve", str(system.config_path)], stderr=log)
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
