"""The process tree: killed parts come back, streams outlive us, a stop is clean."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of


@pytest.fixture
def trio(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Three engines."""
    return make_engines(3, "--speed", "50")


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
    assert all(answer.json()["error"]["code"] == "router_unavailable" for answer in answers[1:-1] if _refused(answer))
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


def test_health_is_told_over_grpc(trio: list[Engine], make_system: Callable[..., System]) -> None:
    """The names gateways and kubelets ask for are SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    system = make_system(pools=[pool_of(trio)])
    with grpc.insecure_channel(system.health_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=HANG_GUARD_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
