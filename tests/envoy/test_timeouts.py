"""Engines that take too long: what ends a request, what its client sees, and that nothing stays booked."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

from extproc.access.keys import digest_of

NO_PROBES = {"interval_ms": 600_000, "failed_requests": 1_000_000}
"""A slow engine stays a first choice: what is looked at is Envoy's clock, not the life-cycle."""
BRIEFLY = {"allowance_s": 0.5, "least_s": 1, "most_s": 1}


@pytest.fixture(scope="module")
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines; faults are ordered per request, or cleared by the test."""
    return make_engines(2, "--speed", "50", "--record", "50")


@pytest.fixture
def rested(pair: list[Engine]) -> list[Engine]:
    """The same, behaving, and with nothing held."""
    for engine in pair:
        engine.faults()
        engine.release()
    return pair


def ask(system: System, fault: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    """One request, its answer read whole."""
    headers = {} if fault is None else {"x-sim-fault": json.dumps(fault)}
    return httpx.post(f"{system.url}/v1/chat/completions", json=chat(**fields), headers=headers, timeout=HANG_GUARD_S)


def failed(system: System, *labels: str, tries: int) -> None:
    """So many tries are counted as failed: Envoy tells of them by another stream than of the outcome, perhaps later."""

    def counted() -> float:
        return system.total("pointsman_attempts_failed_total", *labels)

    eventually(lambda: counted() >= tries, "the failed tries are counted")
    assert counted() == tries


def all_given_back(system: System) -> None:
    """Nothing is in flight any more, and every request was told of."""
    eventually(lambda: sum(system.in_flight().values()) == 0, "all is given back")
    eventually(lambda: system.total("pointsman_requests_unsettled") == 0, "all is settled")


def is_a_timeout(answer: httpx.Response) -> bool:
    """A 504 in words a program can read."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (504, "server_error", "upstream_timeout")
    assert answer.headers["content-type"] == "application/json"
    assert "did not answer in time" in error["message"]
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_never_begins_is_a_504_in_json(
    rested: list[Engine], share_system: Callable[..., System], *, stream: bool
) -> None:
    """The total limit ends it, the retry included; the engine is charged, the client's place is given back."""
    limits = {"first_byte_s": 0.4, "total": BRIEFLY}
    system = share_system(pools=[pool_of(rested)], probe=NO_PROBES, timeouts=limits)
    system.wait_pickable(*(engine.address for engine in rested))
    answer = ask(system, {"freeze": True}, stream=stream)
    assert is_a_timeout(answer)
    all_given_back(system)
    outcome = system.decision(answer.headers["x-pointsman-request-id"])["outcome"]
    assert outcome["outcome"] == "endpoint_failed"
    assert outcome["failed"] == "upstream_request_timeout"
    assert outcome["attempts"] == (2 if stream else 1)
    failed(system, "upstream_request_timeout", tries=2 if stream else 1)


def test_a_stream_that_does_not_begin_in_time_is_tried_elsewhere(
    rested: list[Engine], make_system: Callable[..., System]
) -> None:
    """The client sees the other engine's answer; a whole answer may take as long as it needs."""
    slow, quick = rested
    system = make_system(pools=[pool_of(rested, policy="round-robin")], probe=NO_PROBES, timeouts={"first_byte_s": 0.3})
    system.wait_pickable(slow.address, quick.address)
    slow.faults(delay_headers_s=1.0)
    streamed = [ask(system, stream=True) for _ in range(4)]
    assert {answer.headers["x-pointsman-endpoint"] for answer in streamed} == {quick.address}
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in streamed)
    assert system.total("pointsman_requests_moved_total") == 2
    whole = [ask(system) for _ in range(2)]
    assert {answer.headers["x-pointsman-endpoint"] for answer in whole} == {slow.address, quick.address}
    all_given_back(system)


def test_a_stream_beyond_its_total_limit_breaks_off_and_is_not_tried_again(
    rested: list[Engine], make_system: Callable[..., System]
) -> None:
    """Tokens have flowed: the client sees the connection break, at once, and no engine gets the request twice."""
    system = make_system(pools=[pool_of(rested)], timeouts={"first_byte_s": None, "total": BRIEFLY})
    system.wait_pickable(*(engine.address for engine in rested))
    asked_before = sum(len(engine.requests()) for engine in rested)
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        with pytest.raises(httpx.RemoteProtocolError):
            stream.rest()
    outcome = system.decision(stream.request_id)["outcome"]
    assert (outcome["status"], outcome["attempts"]) == (200, 1)
    assert outcome["failed"] == "upstream_request_timeout"
    assert sum(len(engine.requests()) for engine in rested) == asked_before + 1
    all_given_back(system)


def test_a_limit_that_passes_costs_its_tenant_what_was_done(
    rested: list[Engine], make_system: Callable[..., System]
) -> None:
    """Nothing where no byte of an answer came, the prediction where it broke off; and its place is given back."""
    token = "a-key"
    key = {"name": "k", "tenant": "acme", "sha256": digest_of(token)}
    system = make_system(
        pools=[pool_of(rested)],
        probe=NO_PROBES,
        timeouts={"first_byte_s": None, "total": BRIEFLY},
        access={"api_keys": [key]},
        tenants={"default": {"tokens": {"per_s": 1e-9, "burst": 1000}, "concurrency": 5}},
        headers={"authorization": f"Bearer {token}"},
    )
    system.wait_pickable(*(engine.address for engine in rested))

    def account() -> dict[str, float]:
        found: dict[str, float] = httpx.get(f"{system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"][
            "acme"
        ]
        return found

    with httpx.Client(timeout=HANG_GUARD_S, headers=system.headers) as client:
        never = client.post(
            f"{system.url}/v1/chat/completions", json=chat(), headers={"x-sim-fault": json.dumps({"freeze": True})}
        )
        assert is_a_timeout(never)
        all_given_back(system)
        eventually(lambda: (account()["running"], account()["tokens_left"]) == (0, 1000), "nothing was charged")
        stream = HeldStream(client, system, max_tokens=50)
        with pytest.raises(httpx.RemoteProtocolError):
            stream.rest()
    all_given_back(system)
    eventually(lambda: account()["running"] == 0 and 900 < account()["tokens_left"] < 950, "the prediction was charged")


def test_more_tokens_get_more_time(rested: list[Engine], make_system: Callable[..., System]) -> None:
    """Two held streams: the one that asked for little is cut, the one that asked for much goes on."""
    hardware = {"decode_tokens_per_s": 100.0}
    total = {"allowance_s": 0.5, "least_s": 1, "most_s": 600}
    system = make_system(pools=[pool_of(rested, hardware=hardware)], timeouts={"first_byte_s": None, "total": total})
    system.wait_pickable(*(engine.address for engine in rested))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        long, short = HeldStream(client, system, max_tokens=2_000), HeldStream(client, system)
        with pytest.raises(httpx.RemoteProtocolError):
            short.rest()
        for engine in rested:
            engine.release()
        assert b"[DONE]" in long.rest()
    all_given_back(system)


def test_the_pace_of_answers_is_learned_and_shown(rested: list[Engine], make_system: Callable[..., System]) -> None:
    """From streams with usage: engines fifty times as fast as their hardware are soon believed to be faster."""
    system = make_system(pools=[pool_of(rested)])
    system.wait_pickable(*(engine.address for engine in rested))

    def shown() -> float:
        profiles = httpx.get(f"{system.admin_url}/v1/profiles", timeout=HANG_GUARD_S).json()["profiles"]
        return float(profiles["chat"]["decode_tokens_per_s"])

    assert shown() == 50
    for _ in range(20):
        ask(system, stream=True, max_tokens=60, stream_options={"include_usage": True})
    eventually(lambda: shown() > 60, "twenty answers have taught it")
    ask(system, max_tokens=20)
    all_given_back(system)


@pytest.mark.parametrize(
    ("timeouts", "why"),
    [({"silence_s": 1}, "upstream_request_timeout"), ({"stream_idle_s": 1}, "stream_idle_timeout")],
    ids=["silence_s", "stream_idle_s"],
)
def test_a_stream_that_falls_silent_is_cut(
    rested: list[Engine], make_system: Callable[..., System], timeouts: dict[str, Any], why: str
) -> None:
    """Bytes stop in the middle of an answer: its client sees the break, the engine is charged, nobody hangs."""
    system = make_system(pools=[pool_of(rested)], timeouts=timeouts)
    system.wait_pickable(*(engine.address for engine in rested))
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, system)
        with pytest.raises(httpx.RemoteProtocolError):
            stream.rest()
    outcome = system.decision(stream.request_id)["outcome"]
    assert (outcome["outcome"], outcome["failed"], outcome["attempts"]) == ("endpoint_failed", why, 1)
    failed(system, stream.endpoint, why, tries=1)
    all_given_back(system)


def test_a_client_that_does_not_read_takes_no_engine_out(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """To Envoy its engine is silent, since nobody takes what it writes: the stream is cut, the engine not charged."""
    [engine] = make_engines(1, "--speed", "5000", "--kv-capacity-tokens", "1000000", "--max-model-len", "900000")
    system = make_system(
        pools=[pool_of([engine])], timeouts={"silence_s": 1}, limits={"request_body_bytes": 70_000}
    )  # small bodies, so small buffers
    system.wait_pickable(engine.address)
    body = json.dumps(chat(stream=True, max_tokens=200_000)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = system.url.removeprefix("http://").rpartition(":")
        client.connect((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        eventually(lambda: system.total("pointsman_completions_total", "timed_out") == 1, "its stream is cut")
    assert system.total("pointsman_attempts_failed_total") == 0
    all_given_back(system)


def test_a_stream_that_is_silent_from_the_start_is_tried_elsewhere(
    rested: list[Engine], make_system: Callable[..., System]
) -> None:
    """`silence_s` before the headers: as `first_byte_s`. Whole answers are not under it."""
    slow, quick = rested
    system = make_system(
        pools=[pool_of(rested, policy="round-robin")],
        probe=NO_PROBES,
        timeouts={"silence_s": 0.3, "first_byte_s": None},
    )
    system.wait_pickable(slow.address, quick.address)
    slow.faults(delay_headers_s=1.0)
    streamed = [ask(system, stream=True) for _ in range(4)]
    assert {answer.headers["x-pointsman-endpoint"] for answer in streamed} == {quick.address}
    whole = [ask(system) for _ in range(2)]
    assert {answer.headers["x-pointsman-endpoint"] for answer in whole} == {slow.address, quick.address}
    forged = httpx.post(
        f"{system.url}/v1/chat/completions", json=chat(), headers={"x-pointsman-streamed": "1"}, timeout=HANG_GUARD_S
    )
    assert forged.status_code == 200
    all_given_back(system)
