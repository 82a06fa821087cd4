"""Both ways from a real Envoy to us, held to the same: the lane, which the other tests take too, and gRPC."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, free_ports, pool_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: a socket's address has no room for a long one."""
    made = Path(tempfile.mkdtemp(prefix="lane-"))
    yield made / "sockets"
    shutil.rmtree(made)


Start = Callable[[Path | None], System]


@pytest.fixture
def start(engines: list[Engine], share_system: Callable[..., System]) -> Start:
    """Starts a system with a lane in a folder, or with none."""

    def make(lane: Path | None) -> System:
        system = share_system(pools=[pool_of(engines)], listen={"lane": False if lane is None else str(lane)})
        system.wait_pickable(*(engine.address for engine in engines))
        return system

    return make


@pytest.fixture
def lane(start: Start, folder: Path) -> System:
    """A system whose Envoy comes by the lane."""
    return start(folder)


@pytest.fixture(params=["lane", "grpcio"])
def either(request: pytest.FixtureRequest, start: Start, folder: Path) -> System:
    """A system for either way."""
    return start(folder if request.param == "lane" else None)


def comes_by_lane(system: System) -> bool:
    """By its configuration."""
    return system.config["listen"]["lane"] is not False


def quiet(system: System) -> bool:
    """Nothing is under way, and every access-log entry has come."""
    return not any(system.in_flight().values()) and not system.total("pointsman_requests_unsettled")


def test_answers_and_accounts_are_the_same(either: System) -> None:
    """The SDK's answers, streamed and whole, two messages each; every entry joined."""
    with openai.OpenAI(base_url=f"{either.url}/v1", api_key="none", timeout=HANG_GUARD_S) as client:
        for number in range(20):
            messages = [{"role": "user", "content": f"hello {number}"}]
            streamed = client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=5, stream=True)
            assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in streamed) == 5
            whole = client.chat.completions.create(model="sim", messages=messages, max_tokens=5)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 5
    eventually(lambda: quiet(either), "all is settled")
    assert either.total("pointsman_access_log_entries_total", 'kind="request"', 'result="joined"') == 40
    assert either.total("pointsman_ext_proc_messages_total", 'phase="request_body"') == 40
    assert (either.total("pointsman_lane_connections") >= 2) == comes_by_lane(either)


def test_only_we_may_open_the_sockets(lane: System, folder: Path) -> None:
    """By the modes of the sockets and of their folder."""
    assert comes_by_lane(lane)
    assert {path.name for path in folder.iterdir()} == {"ext_proc.sock", "access_log.sock"}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_large_bodies_and_refusals_come_through(either: System) -> None:
    """A body of 2 MB is read whole and answered; errors of ours are whole JSON; by HTTP/1.1 and HTTP/2."""
    for http2 in (False, True):
        with httpx.Client(http1=not http2, http2=http2, timeout=HANG_GUARD_S, base_url=either.url) as client:
            large = client.post(CHAT, json=chat("word " * 400_000))
            assert large.status_code == 200
            unknown = client.post(CHAT, json=chat(model="x" * 20_000))
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert client.post(CHAT, content=b"{").json()["error"]["code"] == "invalid_json"
            assert client.get("/v1/models").json()["data"]
    eventually(lambda: quiet(either), "all is settled")


def test_clients_that_leave_leave_nothing(either: System, engines: list[Engine]) -> None:
    """Fifty streams cut off in the middle."""
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        for _ in range(50):
            HeldStream(client, either).answer.close()
    eventually(lambda: quiet(either), "all is given back")
    assert either.total("pointsman_ext_proc_streams_open") == 0
    for engine in engines:
        engine.release()


def test_running_answers_survive_our_death(either: System, engines: list[Engine]) -> None:
    """And the next process serves at the same place."""
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, either)
        either.kill_decision_process()
        for engine in engines:
            engine.release()
        assert stream.rest().endswith(b"data: [DONE]\n\n")
        answer = eventually(
            lambda: (found := client.post(f"{either.url}{CHAT}", json=chat())).status_code == 200 and found, "it serves"
        )
    assert answer.json()["usage"]["completion_tokens"] == 4
    if comes_by_lane(either):
        eventually(lambda: either.total("pointsman_lane_connections") >= 1, "by the lane")


def test_another_pointsman_there_is_not_displaced(lane: System, tmp_path: Path) -> None:
    """It says so and ends; the first goes on."""
    grpc, health, metrics, admin = (f"127.0.0.1:{port}" for port in free_ports(4))
    second = lane.config | {
        "listen": lane.config["listen"] | {"grpc": grpc, "health": health},
        "observe": {"metrics": metrics},
        "admin": {"listen": admin},
    }
    config = tmp_path / "second.yaml"
    config.write_text(yaml.safe_dump(second))
    serve = [sys.executable, "-m", "extproc.cli", "serve", str(config)]
    ended = subprocess.run(serve, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert ended.returncode == 2
    assert "another process serves at" in ended.stdout + ended.stderr
    assert httpx.post(f"{lane.url}{CHAT}", json=chat(), timeout=HANG_GUARD_S).status_code == 200
