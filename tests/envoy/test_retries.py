"""What is tried again and what is not, and that a fleet in trouble is not flooded with second tries."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

NO_PROBES = {"interval_ms": 600_000, "failed_requests": 1_000_000}
"""A failing engine stays a first choice: what is looked at is Envoy's retry, not the life-cycle."""


@pytest.fixture(scope="module")
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines that remember what they were asked."""
    return make_engines(2, "--speed", "50", "--record", "2000")


@pytest.fixture(scope="module")
def shared(pair: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A system over both, whose retries never run out."""
    config = {
        "pools": [pool_of(pair, policy="round-robin")],
        "probe": NO_PROBES,
        "retries": {"budget": 1},
        "breakers": {"endpoint": None, "model": None},
    }
    system = System(tmp_path_factory.mktemp("system"), config)
    system.start()
    system.wait_pickable(*(engine.address for engine in pair))
    yield system
    system.stop()


@pytest.fixture
def rested(pair: list[Engine]) -> list[Engine]:
    """Both engines, behaving."""
    for engine in pair:
        engine.faults()
    return pair


def asked(engines: list[Engine]) -> int:
    """How often any of them was asked."""
    return sum(len(engine.requests()) for engine in engines)


RETRIED = [{"status": 500}, {"status": 502}, {"status": 503}, {"reset_before_headers": True}]
LEFT = [{"status": status} for status in (400, 404, 408, 429, 501, 504)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fault", "attempts"), [*((fault, 2) for fault in RETRIED), *((fault, 1) for fault in LEFT)], ids=str
)
def test_only_what_may_pass_elsewhere_is_tried_again(
    rested: list[Engine], shared: System, fault: dict[str, Any], attempts: int, *, stream: bool
) -> None:
    """Once, where both engines fail alike: the client sees the last one's answer, and none was asked twice."""
    before = asked(rested)
    headers = {"x-sim-fault": json.dumps(fault)}
    answer = httpx.post(
        f"{shared.url}/v1/chat/completions", json=chat(stream=stream), headers=headers, timeout=HANG_GUARD_S
    )
    assert answer.status_code == fault.get("status", 503)
    assert answer.json()["error"]["message"]
    outcome = shared.decision(answer.headers["x-pointsman-request-id"])["outcome"]
    assert outcome["attempts"] == attempts
    assert asked(rested) == before + attempts
    assert max(len(engine.requests()) for engine in rested) - min(len(engine.requests()) for engine in rested) <= 1


@pytest.mark.parametrize(
    ("stream", "attempts"), [(False, 2), (True, 1)], ids=["a whole one had not begun", "of a stream tokens had flowed"]
)
def test_an_answer_that_breaks_is_tried_again_only_before_it_has_begun(
    rested: list[Engine], shared: System, attempts: int, *, stream: bool
) -> None:
    """The engine dies after its second token."""
    before = asked(rested)
    headers = {"x-sim-fault": json.dumps({"cut_after_tokens": 2})}
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        request = client.build_request(
            "POST", f"{shared.url}/v1/chat/completions", json=chat(stream=stream), headers=headers
        )
        answer = client.send(request, stream=True)
        if stream:
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        else:
            assert answer.status_code == 503
    outcome = shared.decision(answer.headers["x-pointsman-request-id"])["outcome"]
    assert (outcome["outcome"], outcome["attempts"]) == ("endpoint_failed", attempts)
    assert asked(rested) == before + attempts


def test_when_everything_fails_a_fifth_is_tried_again(rested: list[Engine], make_system: Callable[..., System]) -> None:
    """300 requests by 8 clients: about 60 are tried again, and each is answered; then all is as before."""
    unbroken = {"endpoint": None, "model": None}  # else the fleet is left alone before the budget is used up
    system = make_system(pools=[pool_of(rested, policy="round-robin")], probe=NO_PROBES, breakers=unbroken)
    system.wait_pickable(*(engine.address for engine in rested))
    for engine in rested:
        engine.faults(status=503)
    before = asked(rested)

    client = httpx.Client(timeout=HANG_GUARD_S)

    def ask(_: int) -> tuple[int, str]:
        answer = client.post(f"{system.url}/v1/chat/completions", json=chat())
        return answer.status_code, answer.headers["x-pointsman-request-id"]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(300)))
    assert {status for status, _ in answers} == {503}
    attempts = asked(rested) - before
    assert 300 < attempts <= 1.2 * 300 + 8  # that many may be under way before the first of them is seen to fail
    eventually(lambda: system.total("pointsman_retries_total") == attempts - 300, "each retry was seen, once")
    assert system.total("pointsman_fallbacks_total", "retry_budget") >= 300 - (attempts - 300) - 10
    records = [system.decision(request_id) for _, request_id in answers[-20:]]
    tries = {(bool(record["fallbacks"]), record["outcome"]["attempts"]) for record in records}
    assert tries == {(True, 1), (False, 2)}
    rested[0].faults()
    statuses = eventually(
        lambda: [s for s, _ in map(ask, range(4))] == [200] * 4, "ten seconds on there is a budget again", pause_s=1.0
    )
    assert statuses
    client.close()
