"""Engines that fail: before the answer the next one serves, after it nobody pretends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

UNWATCHED: dict[str, Any] = {
    "probe": {"interval_ms": 600_000, "failed_requests": 1_000_000},
    "breakers": {"endpoint": None, "model": None},
    "retries": {"budget": 1},
}
"""A dead engine stays a first choice: what happens then is Envoy's retry and our accounting, not the life-cycle's.

All may be tried again: these tests share a system, and one after the other fail more than a budget allows."""


@pytest.fixture(scope="module")
def engines_in_use(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines that may be killed."""
    return make_engines(2, "--speed", "50", "--record", "500")


@pytest.fixture
def pair(engines_in_use: list[Engine]) -> list[Engine]:
    """Both of them up and behaving, whatever the test before did to them."""
    for engine in engines_in_use:
        if engine.process.poll() is not None:
            engine.start()
            engine.wait_ready()
        engine.faults()
        engine.release()
    return engines_in_use


def asked(*engines: Engine) -> int:
    """How often any of them was asked."""
    return sum(len(engine.requests()) for engine in engines)


def test_a_dead_first_choice_is_replaced_and_the_reservation_moves_while_the_stream_runs(
    pair: list[Engine], share_system: Callable[..., System]
) -> None:
    """Round robin offers the dead engine first every second time: the other answers, and carries the count at once."""
    dead, alive = pair
    system = share_system(pools=[pool_of(pair, policy="round-robin")], **UNWATCHED)
    system.wait_pickable(dead.address, alive.address)
    dead.kill()
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        streams = [HeldStream(client, system) for _ in range(4)]
        assert {stream.endpoint for stream in streams} == {alive.address}
        eventually(lambda: system.in_flight() == {dead.address: 0, alive.address: 4}, "the live engine carries all 4")
        assert system.total("pointsman_requests_moved_total") == 2
        assert system.total("pointsman_attempts_failed_total", dead.address) == 2
        alive.release()
        for stream in streams:
            assert b"[DONE]" in stream.rest()
    eventually(lambda: sum(system.in_flight().values()) == 0, "all is given back")
    records = [system.decision(stream.request_id) for stream in streams]
    assert {record["served_by"] for record in records} == {alive.address}
    assert sorted(record["outcome"]["attempts"] for record in records) == [1, 1, 2, 2]


@pytest.mark.parametrize("fault", [{"reset_before_headers": True}, {"status": 503}, {"status": 502}])
def test_a_transient_failure_is_retried_once_elsewhere(
    pair: list[Engine], share_system: Callable[..., System], fault: dict[str, object]
) -> None:
    """A reset before the answer, 502 and 503: the other engine's answer is what the client sees."""
    bad, good = pair
    system = share_system(pools=[pool_of(pair, policy="round-robin")], **UNWATCHED)
    system.wait_pickable(bad.address, good.address)
    bad.faults(**fault)
    before = asked(bad)
    for _ in range(4):
        answer = httpx.post(f"{system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
        assert answer.status_code == 200
        assert answer.headers["x-pointsman-endpoint"] == good.address
    assert asked(bad) == before + 2


def test_after_one_retry_the_client_gets_the_error(pair: list[Engine], share_system: Callable[..., System]) -> None:
    """Both engines busy: two attempts in all, and the engine's own 503 comes through."""
    system = share_system(pools=[pool_of(pair, policy="round-robin")], **UNWATCHED)
    system.wait_pickable(*(engine.address for engine in pair))
    before = asked(*pair)
    for engine in pair:
        engine.faults(status=503)
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]
    assert asked(*pair) == before + 2


def test_an_engine_killed_mid_stream_breaks_the_stream_and_nothing_is_retried(
    pair: list[Engine], share_system: Callable[..., System]
) -> None:
    """The client sees the break; the other engine never hears of the request."""
    system = share_system(pools=[pool_of(pair)])
    system.wait_pickable(*(engine.address for engine in pair))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        victim = next(e for e in pair if e.address == stream.endpoint)
        other = next(e for e in pair if e is not victim)
        before = asked(other)
        victim.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            stream.rest()
    assert asked(other) == before
    record = system.decision(stream.request_id)
    assert record["outcome"]["attempts"] == 1
    assert record["outcome"]["outcome"] == "endpoint_failed"
    eventually(lambda: system.fleet()[victim.address]["state"] == "unhealthy", "the dead engine is taken out")
    for _ in range(6):
        answer = httpx.post(f"{system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
        assert answer.headers["x-pointsman-endpoint"] == other.address
    victim.start()
    system.wait_pickable(victim.address)
    assert system.total("pointsman_endpoint_restarts_total", victim.address) == 1


def test_a_drained_endpoint_gets_nothing_new_and_finishes_what_it_has(
    pair: list[Engine], share_system: Callable[..., System]
) -> None:
    """Drain by the admin API: the running stream completes, new requests go elsewhere; undrain brings it back."""
    system = share_system(pools=[pool_of(pair)])
    system.wait_pickable(*(engine.address for engine in pair))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        address = stream.endpoint
        httpx.post(f"{system.admin_url}/v1/endpoints/{address}:drain").raise_for_status()
        answers = [client.post(f"{system.url}/v1/chat/completions", json=chat()) for _ in range(6)]
        assert address not in {answer.headers["x-pointsman-endpoint"] for answer in answers}
        for engine in pair:
            engine.release()
        assert b"[DONE]" in stream.rest()
    assert system.fleet()[address]["state"] == "draining"
    httpx.post(f"{system.admin_url}/v1/endpoints/{address}:undrain").raise_for_status()
    system.wait_pickable(address)


def test_explain_tells_what_would_happen_and_changes_nothing(
    pair: list[Engine], share_system: Callable[..., System]
) -> None:
    """/v1/explain names candidates and scores; asking leaves no trace in counts or index."""
    system = share_system(pools=[pool_of(pair)])
    system.wait_pickable(*(engine.address for engine in pair))
    body = json.dumps(chat("a question worth explaining " * 40))
    indexed = [engine["indexed_tokens"] for engine in system.fleet().values()]
    said = [httpx.post(f"{system.admin_url}/v1/explain", content=body).json() for _ in range(3)]
    assert {candidate["endpoint"] for candidate in said[0]["candidates"]} == {engine.address for engine in pair}
    assert said[0]["candidates"][0]["parts"].keys() >= {"own", "stall", "decode"}
    assert said[0] == said[1] == said[2]
    assert system.total("pointsman_decisions_total") == 0
    assert [engine["indexed_tokens"] for engine in system.fleet().values()] == indexed
