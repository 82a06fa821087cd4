"""`Idempotency-Key` through a real Envoy, with the real SDK: nothing is done twice, what failed can be tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, held, pool_of

ASKED = {"model": "sim", "messages": [{"role": "user", "content": "once"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines that remember what they were asked."""
    return make_engines(2, "--speed", "50", "--record", "500")


@pytest.fixture(scope="module")
def shared(pair: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system over both; failures have no consequences here but their retries."""
    unbroken = {"endpoint": None, "model": None, "zone": None}
    probe = {"failed_requests": 1_000_000}
    config = {"pools": [pool_of(pair)], "breakers": unbroken, "probe": probe, "limits": {"open_requests": 50}}
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
        engine.release()
    return pair


def arrived(engines: list[Engine], key: str) -> int:
    """How many requests with this key reached an engine."""
    return sum(r["headers"].get("idempotency-key") == key for engine in engines for r in engine.requests())


def post(system: System, key: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """One request with this key."""
    return httpx.post(
        f"{system.url}/v1/chat/completions",
        json=chat("once", **fields),
        headers={"idempotency-key": key, **(headers or {})},
        timeout=HANG_GUARD_S,
    )


def sdk(system: System, *, retries: int, **options: Any) -> openai.OpenAI:
    """The openai SDK, which sends a key only if it is told one, and the same one with each of its retries."""
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=retries, **options)


def create(client: openai.OpenAI, key: str, **options: Any) -> Any:
    """One completion under this key."""
    return client.chat.completions.create(**ASKED, extra_headers={"Idempotency-Key": key}, **options)  # type: ignore[call-overload]


def test_what_was_answered_is_not_done_again(rested: list[Engine], shared: System) -> None:
    """The key goes on to the engine; the second request names the first, and never gets there."""
    first, second = post(shared, "answered"), post(shared, "answered")
    assert first.status_code == 200
    assert second.status_code == 409
    error = second.json()["error"]
    assert first.headers["x-pointsman-request-id"] in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "Idempotency-Key")
    settled = eventually(
        lambda: (answer := post(shared, "answered")).json()["error"]["code"] == "duplicate_answered" and answer,
        "it is known to have been answered",
    )
    assert settled.headers["x-should-retry"] == "false"
    assert post(shared, "answered", max_tokens=5).status_code == 422
    assert arrived(rested, "answered") == 1
    assert post(shared, "another").status_code == 200


def test_while_the_first_is_under_way_the_second_is_told_to_wait(rested: list[Engine], shared: System) -> None:
    """A held stream; when it has ended well, the key stays taken."""
    headers = {"idempotency-key": "slow", **held(2)}
    body = chat("once", stream=True, max_tokens=3)
    with httpx.stream(
        "POST", f"{shared.url}/v1/chat/completions", json=body, headers=headers, timeout=HANG_GUARD_S
    ) as first:
        chunks = first.iter_raw()
        next(chunks)
        second = post(shared, "slow", stream=True, max_tokens=3)
        assert (second.status_code, second.headers["retry-after"]) == (409, "1")
        assert second.json()["error"]["code"] == "duplicate_under_way"
        assert second.headers["x-should-retry"] == "true"
        for engine in rested:
            engine.release()
        assert b"[DONE]" in b"".join(chunks)
    eventually(
        lambda: post(shared, "slow", stream=True, max_tokens=3).json()["error"]["code"] == "duplicate_answered",
        "it is answered",
    )
    assert arrived(rested, "slow") == 1


def test_after_a_client_has_left_the_same_key_works(rested: list[Engine], shared: System) -> None:
    """It hung up in the middle of its answer, and asks again."""
    headers = {"idempotency-key": "left", **held(2)}
    body = chat("once", stream=True)
    with httpx.stream(
        "POST", f"{shared.url}/v1/chat/completions", json=body, headers=headers, timeout=HANG_GUARD_S
    ) as first:
        next(first.iter_raw())
    eventually(lambda: post(shared, "left", stream=True).status_code == 200, "the key is free again")
    assert arrived(rested, "left") == 2


def test_after_a_refusal_of_ours_the_same_key_works(rested: list[Engine], shared: System) -> None:
    """Nobody can take it: the pool is drained. Then it is not."""
    for engine in rested:
        httpx.post(f"{shared.admin_url}/v1/endpoints/{engine.address}:drain").raise_for_status()
    assert post(shared, "refused").status_code == 503
    for engine in rested:
        httpx.post(f"{shared.admin_url}/v1/endpoints/{engine.address}:undrain").raise_for_status()
    shared.wait_pickable(*(engine.address for engine in rested))
    assert post(shared, "refused").status_code == 200


def test_the_sdks_retry_after_a_failure_works(rested: list[Engine], shared: System) -> None:
    """Both engines fail; they recover before the SDK asks again, with the same key, half a second later."""
    failures: list[int] = []

    def recover(answer: Any) -> None:
        if answer.status_code == 503:
            failures.append(answer.status_code)
            for engine in rested:
                engine.faults()

    for engine in rested:
        engine.faults(status=503)
    http_client = openai.DefaultHttpxClient(event_hooks={"response": [recover]})
    with sdk(shared, retries=2, http_client=http_client) as client:
        assert create(client, "failed").usage.completion_tokens == 4
    assert failures == [503]
    assert arrived(rested, "failed") == 3


def test_the_sdks_retry_after_its_own_timeout_works(rested: list[Engine], shared: System) -> None:
    """It did not wait for the first answer. Its second try finds the key free, or waits for it as it is told."""
    for engine in rested:
        engine.faults(delay_headers_s=2.0)
    with sdk(shared, retries=0, timeout=0.5) as client:
        with pytest.raises(openai.APITimeoutError):
            create(client, "impatient")
        for engine in rested:
            engine.faults()
        patient = client.with_options(max_retries=5, timeout=HANG_GUARD_S)
        assert create(patient, "impatient").usage.completion_tokens == 4


def test_the_sdk_does_not_try_in_vain_what_was_answered(rested: list[Engine], shared: System) -> None:
    """It retries each 409 unless it is told that it is of no use."""
    with sdk(shared, retries=3) as client:
        create(client, "twice")
        eventually(
            lambda: post(shared, "twice").json()["error"]["code"] != "duplicate_under_way", "it is known how it ended"
        )
        refused_before = shared.total("pointsman_refusals_total", "duplicate_answered")
        with pytest.raises(openai.ConflictError) as refused:
            create(client, "twice")
    assert refused.value.code == "duplicate_answered"
    assert shared.total("pointsman_refusals_total", "duplicate_answered") == refused_before + 1
    assert arrived(rested, "twice") == 1
