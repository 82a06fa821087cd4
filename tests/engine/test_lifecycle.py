"""Real engines that drain, are told to stop, die, freeze: what clients see, and when the engine is back."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, System, eventually
from real_engines import START_GUARD_S, Vllm

pytestmark = pytest.mark.timeout(1_800)  # a hang guard; the first run makes the environment: 3 GB

LONG_TOKENS = 400
"""Several seconds of answer at this model's speed."""


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "mid", "messages": [{"role": "user", "content": "which way"}], "temperature": 0, **fields}


class Stream(threading.Thread):
    """A streamed answer, read in a thread of its own. `endpoint` is known once it has begun."""

    def __init__(self, url: str, tokens: int = LONG_TOKENS) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._tokens = tokens
        self.begun = threading.Event()
        self.endpoint = ""
        self.status = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        """Read to the end, or to what ends it."""
        try:
            self._read()
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.begun.set()

    def _read(self) -> None:
        body = _body(max_tokens=self._tokens, stream=True)
        url = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=4 * HANG_GUARD_S) as answer:
            self.status = answer.status_code
            self.endpoint = answer.headers.get("x-pointsman-endpoint", "")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        self.begun.set()
        for choice in chunk["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    @property
    def whole(self) -> bool:
        """It ended as it should."""
        return self.status == 200 and self.finish_reason == "length" and self.error is None


def _streams_on_both(system: System, servers: list[Vllm]) -> dict[str, list[Stream]]:
    """Streams under way, until each server has two."""
    found: dict[str, list[Stream]] = {server.address: [] for server in servers}
    for _ in range(20):
        stream = Stream(system.url)
        assert stream.begun.wait(HANG_GUARD_S)
        assert stream.error is None
        found[stream.endpoint].append(stream)
        if all(len(streams) >= 2 for streams in found.values()):
            return found
    raise AssertionError("one server gets no streams")


def _join(streams: list[Stream]) -> None:
    for stream in streams:
        stream.join(4 * HANG_GUARD_S)
        assert not stream.is_alive()


def _asks(system: System, count: int) -> Iterator[httpx.Response]:
    for number in range(count):
        body = _body(max_tokens=2, messages=[{"role": "user", "content": f"train {number}"}])
        yield httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)


def _state(system: System, server: Vllm) -> str:
    state: str = system.fleet()[server.address]["state"]
    return state


def test_an_announced_drain_cuts_nothing(two_servers: list[Vllm], make_real_system: Callable[..., System]) -> None:
    """Running streams end whole, new requests go elsewhere, nobody sees an error; taken back it serves again."""
    system = make_real_system(two_servers)
    leaving = two_servers[0]
    streams = _streams_on_both(system, two_servers)
    httpx.post(f"{system.admin_url}/v1/endpoints/{leaving.address}:drain").raise_for_status()
    answers = list(_asks(system, 10))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert {answer.headers["x-pointsman-endpoint"] for answer in answers} == {two_servers[1].address}
    _join([stream for both in streams.values() for stream in both])
    assert all(stream.whole for both in streams.values() for stream in both)
    httpx.post(f"{system.admin_url}/v1/endpoints/{leaving.address}:undrain").raise_for_status()
    eventually(lambda: _state(system, leaving) == "ready", "the drained server serves again")


def test_a_server_told_to_stop_is_left_alone(two_servers: list[Vllm], make_real_system: Callable[..., System]) -> None:
    """SIGTERM comes unannounced: its streams end whole, and requests it answers 500 get their one retry elsewhere."""
    system = make_real_system(two_servers)
    leaving = two_servers[0]
    streams = _streams_on_both(system, two_servers)
    leaving.terminate()
    statuses, served = [], set()
    while not all(stream.finish_reason or stream.error for stream in streams[leaving.address]):
        [answer] = _asks(system, 1)
        statuses.append(answer.status_code)
        served.add(answer.headers.get("x-pointsman-endpoint"))
    _join([stream for both in streams.values() for stream in both])
    print(f"{len(statuses)} requests while it shut down, {system.total('pointsman_requests_moved_total')} moved")
    assert all(stream.whole for both in streams.values() for stream in both)
    assert set(statuses) == {200}
    assert served == {two_servers[1].address}
    assert _state(system, leaving) == "unhealthy"


def test_a_lost_server_takes_only_its_own_streams_along(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """SIGKILL: the others end whole. Started again, it serves only after it has answered a generation of ours."""
    system = make_real_system(two_servers)
    lost, other = two_servers
    streams = _streams_on_both(system, two_servers)
    trials = system.total("pointsman_trials_total", 'result="ok"')
    lost.kill()
    _join(streams[lost.address])
    assert not any(stream.whole for stream in streams[lost.address])
    assert [answer.status_code for answer in _asks(system, 5)] == [200] * 5
    _join(streams[other.address])
    assert all(stream.whole for stream in streams[other.address])
    eventually(lambda: _state(system, lost) == "unhealthy", "the lost server is out")
    lost.start()
    eventually(lambda: _state(system, lost) == "ready", "the lost server is back", within_s=START_GUARD_S)
    assert system.total("pointsman_trials_total", 'result="ok"') == trials + 1
    assert _streams_on_both(system, two_servers)[lost.address]


def test_a_frozen_server_is_left_until_it_thaws(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """SIGSTOP under load: out of rotation, its requests end by the stream's idle limit, others are served; and back."""
    system = make_real_system(two_servers, timeouts={"stream_idle_s": 10})
    frozen = two_servers[0]
    streams = _streams_on_both(system, two_servers)
    frozen.send(signal.SIGSTOP)
    try:
        eventually(lambda: _state(system, frozen) == "unhealthy", "the frozen server is out")
        answers = list(_asks(system, 5))
        assert [answer.status_code for answer in answers] == [200] * 5
        _join([stream for both in streams.values() for stream in both])
        assert not any(stream.whole for stream in streams[frozen.address])
        assert all(stream.whole for stream in streams[two_servers[1].address])
    finally:
        frozen.send(signal.SIGCONT)
    eventually(lambda: _state(system, frozen) == "ready", "the thawed server is back")
