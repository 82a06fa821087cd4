"""The process tree: killed parts come back, streams outlive us, a stop is clean."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, free_ports, pool_of


@pytest.fixture(scope="module")
def three_engines(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """For all tests."""
    return make_engines(3, "--speed", "50")


@pytest.fixture
def trio(three_engines: list[Engine]) -> Iterator[list[Engine]]:
    """Three engines, with nothing held at the end."""
    yield three_engines
    for engine in three_engines:
        engine.release()


def test_running_streams_outlive_the_decision_process_and_the_fleet_is_not_emptied(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """SIGKILL mid-stream: the stream ends whole; meanwhile new requests get 503 JSON; then all engines serve again."""
    system = make_system(pools=[pool_of(trio, policy="round-robin")])
    system.wait_pickable(*(engine.address for engine in trio))
    url = f"{system.url}/v1/chat/completions"
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        system.kill_decision_process()
        refused = eventually(lambda: _refused(client.post(url, json=chat())), "a new request is refused")
        assert refused.headers["content-type"] == "application/json"
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "server_error"
        answers = [refused]
        eventually(lambda: answers.append(client.post(url, json=chat())) or answers[-1].status_code == 200, "back")
        for engine in trio:
            engine.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
    assert {answer.status_code for answer in answers} == {200, 503}
    # Envoy's own answer until we are back, and then ours until the first probes are.
    codes = {answer.json()["error"]["code"] for answer in answers if _refused(answer)}
    assert {"router_unavailable"} <= codes <= {"router_unavailable", "no_ready_endpoint"}
    system.wait_pickable(*(engine.address for engine in trio))
    served = {httpx.post(url, json=chat()).headers["x-pointsman-endpoint"] for _ in range(6)}
    assert served == {engine.address for engine in trio}


def _refused(answer: httpx.Response) -> httpx.Response | None:
    return answer if answer.status_code == 503 else None


def test_envoy_is_started_again(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """SIGKILL to Envoy: the launcher brings it back and it learns its clusters anew."""
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(trio[0].address)
    os.kill(system.child("envoy.yaml"), signal.SIGKILL)
    eventually(lambda: httpx.post(f"{system.url}/v1/chat/completions", json=chat()).status_code == 200, "serves again")
    eventually(lambda: system.total("pointsman_ext_proc_streams_open") == 0, "streams of the dead Envoy have ended")


def _kill_and_wait(system: System) -> None:
    """Until another decision process answers."""
    old = system.child(" serve ")
    system.kill_decision_process()
    eventually(lambda: not _alive(old), "it is dead")
    eventually(lambda: httpx.get(f"{system.admin_url}/readyz").status_code == 200, "it is ready again")


def _answers(system: System, **fields: object) -> bool:
    url = f"{system.url}/v1/chat/completions"
    return httpx.post(url, json=chat(**fields), timeout=HANG_GUARD_S).status_code == 200


def test_a_broken_config_file_and_a_crash_are_no_outage(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """The decision process comes back with the last accepted config, endpoints file and all, and follows the file."""
    system = make_system(pools=[pool_of(trio[:1])])
    file = system.config_path.with_name("endpoints.json")
    file.write_text(json.dumps([engine.address for engine in trio]))
    pool = pool_of(trio, aliases={"accepted": "sim"}, endpoints={"file": file.name})
    system.config["pools"] = [pool]
    system.write_config()
    eventually(lambda: _answers(system, model="accepted"), "the change is in force")
    system.config["pools"] = [{**pool, "nmae": "typo"}]
    system.write_config()
    eventually(lambda: system.total("pointsman_config_reloads_total", 'result="rejected"') == 1, "it is rejected")
    _kill_and_wait(system)
    eventually(lambda: _answers(system, model="accepted"), "the last good config is in force")
    assert set(system.fleet()) == {engine.address for engine in trio}
    assert system.total("pointsman_config_reloads_total", 'result="rejected"') == 1
    assert "started with the last good one" in system.log.read_text()
    system.config["pools"] = [{**pool, "aliases": {"mended": "sim"}}]
    system.write_config()
    eventually(lambda: _answers(system, model="mended"), "the mended file is followed")


def _of_envoy(system: System, stat: str) -> int:
    """A figure of Envoy's own."""
    command = Path(f"/proc/{system.child('envoy.yaml')}/cmdline").read_text().split("\0")
    [settings] = [Path(word) for word in command if word.endswith("envoy.yaml")]
    transport = httpx.HTTPTransport(uds=str(settings.with_name("envoy-admin.sock")))
    with httpx.Client(transport=transport, base_url="http://envoy", timeout=HANG_GUARD_S) as admin:
        return int(admin.get("/stats", params={"filter": f"^{re.escape(stat)}$"}).text.rpartition(" ")[2])


def test_an_endpoints_file_that_is_not_there_keeps_no_other_pool_waiting(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """A new Envoy is told that the cluster is empty, instead of waiting for it; once the file comes it serves."""
    late = {"name": "late", "models": ["late"], "aliases": {}, "endpoints": {"file": "late.json"}}
    system = make_system(pools=[pool_of(trio[:1]), late])
    system.wait_pickable(trio[0].address)
    assert _answers(system)
    assert _of_envoy(system, "cluster.pool_late.init_fetch_timeout") == 0
    assert _of_envoy(system, "cluster.pool_late.update_success") == 1
    ready = httpx.get(f"{system.admin_url}/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "discovery has not reported for: late")
    assert "late.json: there is no such file" in system.log.read_text()
    aside = system.config_path.with_name("late.new")
    aside.write_text(json.dumps([trio[1].address]))
    aside.rename(system.config_path.with_name("late.json"))
    eventually(lambda: httpx.get(f"{system.admin_url}/readyz").status_code == 200, "it is ready")
    eventually(lambda: system.fleet()[trio[1].address]["routable"], "Envoy has its address")
    assert _of_envoy(system, "cluster.pool_late.membership_total") == 1


def test_a_crash_while_an_endpoints_file_is_gone_empties_no_cluster(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """The decision process that comes back knows no address of the pool; Envoy has them still, and keeps them."""
    system = make_system(pools=[pool_of(trio[:1])])
    file = system.config_path.with_name("list.json")
    file.write_text(json.dumps([engine.address for engine in trio[1:]]))
    late = {"name": "late", "models": ["late"], "endpoints": {"file": file.name}}
    system.config["pools"].append(late)
    system.write_config()
    eventually(lambda: trio[1].address in system.fleet(), "the file is read")
    system.wait_pickable(trio[0].address)
    eventually(lambda: system.fleet()[trio[1].address]["routable"], "Envoy has its addresses")
    file.unlink()
    old = system.child(" serve ")
    system.kill_decision_process()
    eventually(lambda: not _alive(old), "it is dead")
    eventually(lambda: _answers(system), "another one decides")
    eventually(lambda: system.total("pointsman_discoveries_total", 'result="failed"') > 0, "it has looked for the file")
    acked = ("pointsman_xds_messages_total", 'event="acked"', 'type="eds"')
    eventually(lambda: system.total(*acked) > 0, "Envoy has heard of the other pool")
    assert "late" in httpx.get(f"{system.admin_url}/readyz").json()["reason"]
    assert _of_envoy(system, "cluster.pool_late.membership_total") == 2


def test_a_change_of_addresses_and_a_crash_are_no_outage(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """What Envoy was started with holds until the whole is started again; the rest of the change is in force."""
    system = make_system(pools=[pool_of(trio)])
    before = json.loads(json.dumps(system.config))
    ports = [f"127.0.0.1:{port}" for port in free_ports(5)]
    system.config["listen"] = dict(zip(("http", "grpc", "health"), ports, strict=False))
    system.config["admin"], system.config["observe"] = {"listen": ports[3]}, {"metrics": ports[4]}
    system.config["wire"]["response_headers"] = []
    system.config["pools"][0]["aliases"] = {"renamed": "sim"}
    system.write_config()
    eventually(lambda: _answers(system, model="renamed"), "the change is in force")
    _kill_and_wait(system)
    eventually(lambda: _answers(system, model="renamed"), "it serves where it did")
    assert system.total("pointsman_config_generation") == 1
    in_force = httpx.get(f"{system.admin_url}/v1/config").json()["config"]
    assert in_force["listen"] | before["listen"] == in_force["listen"]
    assert in_force["wire"]["response_headers"] == before["wire"]["response_headers"]


def test_while_a_stop_waits_new_connections_are_refused(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """And the answer that it waits for ends whole."""
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(*(engine.address for engine in trio))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        system.process.send_signal(signal.SIGTERM)
        eventually(lambda: _refuses_connections(system), "a new connection is refused")
        assert system.process.poll() is None
        for engine in trio:
            engine.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
    assert system.process.wait(HANG_GUARD_S) == 0


def _refuses_connections(system: System) -> bool:
    try:
        httpx.get(f"{system.url}/v1/models")
    except httpx.ConnectError:
        return True
    return False


def test_a_stop_under_steady_traffic_ends_and_cuts_no_request(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """Clients that never pause on connections they keep: every request is answered whole until there is no door."""
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(*(engine.address for engine in trio))
    warm = [Event() for _ in range(4)]

    def ask(under_way: Event) -> int:
        answers = 0
        with httpx.Client(timeout=HANG_GUARD_S) as client:
            while True:
                try:
                    answer = client.post(f"{system.url}/v1/chat/completions", json=chat(max_tokens=64))
                except httpx.ConnectError:
                    return answers
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] > 0
                answers += 1
                under_way.set()

    with ThreadPoolExecutor(len(warm)) as pool:
        asking = [pool.submit(ask, event) for event in warm]
        assert all(event.wait(HANG_GUARD_S) for event in warm)
        system.process.send_signal(signal.SIGTERM)
        assert all(future.result(HANG_GUARD_S) > 0 for future in asking)
    assert system.process.wait(HANG_GUARD_S) == 0


def test_a_stop_is_clean_and_lets_a_running_answer_finish(
    trio: list[Engine], make_system: Callable[..., System]
) -> None:
    """SIGTERM: exit code 0, no child left, and a stream that ends within the grace ends whole."""
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(*(engine.address for engine in trio))
    children = [system.child("envoy.yaml"), system.child(" serve ")]
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        system.process.send_signal(signal.SIGTERM)
        eventually(lambda: "stopping" in system.log.read_text(), "the launcher stops")
        for engine in trio:
            engine.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
    assert system.process.wait(HANG_GUARD_S) == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in system.log.read_text()


def test_the_tree_dies_with_its_launcher(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """SIGKILL to the launcher: no orphan keeps the ports."""
    system = make_system(pools=[pool_of(trio)])
    children = [system.child("envoy.yaml"), system.child(" serve ")]
    system.process.kill()
    system.process.wait()
    eventually(lambda: not any(_alive(pid) for pid in children), "no child is left")


def test_the_next_launcher_removes_what_a_killed_one_left(
    trio: list[Engine], make_system: Callable[..., System], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run folder, told by the process id in the name; the living one's stays and goes at its stop."""
    monkeypatch.setenv("TMPDIR", str(short_path))  # where no other launcher looks
    killed = make_system(pools=[pool_of(trio)])
    assert len(_run_folders(short_path, killed)) == 1
    killed.process.kill()
    killed.process.wait()
    assert len(_run_folders(short_path, killed)) == 1
    living = make_system(pools=[pool_of(trio)])
    assert [len(_run_folders(short_path, system)) for system in (killed, living)] == [0, 1]
    assert living.stop() == 0
    assert _run_folders(short_path, living) == []


def _run_folders(folder: Path, system: System) -> list[Path]:
    return list(folder.glob(f"pointsman-{system.process.pid}-*"))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_config_that_does_not_fit_the_machine_ends_the_launcher(
    trio: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """A second system on the same ports: exit code 2 and the reason in the log, not a restart loop."""
    first = make_system(pools=[pool_of(trio)])
    second = System(tmp_path, {"pools": [pool_of(trio)]})
    second.config = first.config
    second.write_config()
    with pytest.raises(AssertionError, match="ended with 2"):
        second.start()
    assert "cannot listen" in second.log.read_text() or "address already in use" in second.log.read_text()


NAMES = ("", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
"""What gateways and kubelets ask for before they send anything."""


def _serving(system: System) -> dict[str, bool]:
    with grpc.insecure_channel(system.health_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answers = {
            name: check(health_pb2.HealthCheckRequest(service=name), timeout=HANG_GUARD_S, wait_for_ready=True)
            for name in (*NAMES, "liveness")
        }
    return {name: answer.status == health_pb2.HealthCheckResponse.SERVING for name, answer in answers.items()}


def test_health_is_told_over_grpc(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """The names gateways and kubelets ask for are SERVING."""
    system = make_system(pools=[pool_of(trio)])
    eventually(lambda: all(_serving(system).values()), "everything serves")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[System]:
    """`pointsman serve` without an Envoy, started with few file descriptors; its endpoints file is not there yet."""
    pool = {"name": "chat", "models": ["sim"], "endpoints": {"file": "endpoints.json"}}
    system = System(tmp_path, {"pools": [pool]})
    command = [sys.executable, "-m", "extproc.cli", "serve", str(system.config_path)]
    with system.log.open("ab") as log:
        system.process = subprocess.Popen(["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *command], stderr=log)
    eventually(lambda: httpx.get(f"{system.admin_url}/livez").status_code == 200, "it lives")
    yield system
    system.stop()
    print(system.log.read_text()[-8000:])


def test_grpc_health_and_readyz_agree(alone: System) -> None:
    """Alive, but not ready, until discovery has reported for every pool."""
    ready = f"{alone.admin_url}/readyz"
    assert httpx.get(ready).status_code == 503
    assert "not reported for: " in httpx.get(ready).json()["reason"]
    assert _serving(alone) == {**dict.fromkeys(NAMES, False), "liveness": True}
    aside = alone.config_path.with_name("endpoints.new")
    aside.write_text("[]")
    aside.rename(alone.config_path.with_name("endpoints.json"))
    eventually(lambda: httpx.get(ready).status_code == 200, "it is ready")
    eventually(lambda: all(_serving(alone).values()), "gRPC health says so too")


def test_serve_alone_raises_the_limit_on_files_as_well(alone: System) -> None:
    """Envoy's connections are not the only ones: each engine is watched over one, and each stream may need one."""
    soft, hard = resource.prlimit(alone.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_an_endpoint_no_longer_listed_cannot_be_drained(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """404, also while its last answer still runs: a drain would be forgotten if it were listed again."""
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(*(engine.address for engine in trio))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        system.config["pools"] = [pool_of([engine for engine in trio if engine.address != stream.endpoint])]
        system.write_config()
        eventually(lambda: system.fleet()[stream.endpoint]["state"] == "stopped", "the removal is seen")
        answers = [_post(system, f"{stream.endpoint}:{verb}") for verb in ("drain", "undrain")]
        for engine in trio:
            engine.release()
        stream.rest()
    assert [answer.status_code for answer in answers] == [404, 404]
    listed = next(engine.address for engine in trio if engine.address != stream.endpoint)
    assert _post(system, f"{listed}:drain").json() == {"endpoint": listed, "done": "drain"}


def _post(system: System, what: str) -> httpx.Response:
    return httpx.post(f"{system.admin_url}/v1/endpoints/{what}", timeout=HANG_GUARD_S)


def test_a_front_port_that_another_envoy_holds_ends_the_launcher(
    trio: list[Engine], make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Not two Envoys that share the port: the kernel would deal each of them half of the connections."""
    first = make_system(pools=[pool_of(trio)])
    second = System(tmp_path, {"pools": [pool_of(trio)]})
    second.config["listen"]["http"] = first.config["listen"]["http"]
    second.write_config()
    command = [sys.executable, "-m", "extproc.cli", "up", str(second.config_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_GUARD_S)
    assert done.returncode == 2
    assert "listen.http" in done.stderr
    assert '"event": "listening"' not in done.stderr


def test_files_in_the_working_directory_are_not_imported(
    trio: list[Engine], make_system: Callable[..., System], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or module there that is named like one of ours stays out of the decision process."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "yaml.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # for the launcher itself; the installed script has the same effect
    system = make_system(pools=[pool_of(trio)])
    system.wait_pickable(trio[0].address)
    assert "imported from" not in system.log.read_text()
