"""The guard through a real Envoy: whose address counts, what is refused, and that every place comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

CHAT = "/v1/chat/completions"
GUARD = {
    "requests": {"per_s": 1000, "burst": 1000},
    "concurrency": 3,
    "trusted_hops": 1,
    "patterns": {"jailbreak": {"regex": r"(?i)ignore\s+previous"}},
}
"""With a trusted hop the tests are that proxy, and may say which client they speak for."""


@pytest.fixture(scope="module")
def guarded(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A guarded system over two engines."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    limits = {"prompt_tokens": 20_000, "prompt_items": 50, "json_nesting": 20}
    system = System(folder, {"pools": [pool_of(engines)], "guard": GUARD, "limits": limits})
    system.start()
    system.wait_pickable(*(engine.address for engine in engines))
    yield system
    system.stop()


def client_at(address: str) -> dict[str, str]:
    """As a trusted proxy tells it."""
    return {"x-forwarded-for": address}


def test_a_client_cannot_choose_its_address(engines: list[Engine], make_system: Callable[..., System]) -> None:
    """Whatever it writes into x-forwarded-for: our Envoy's own word is the last. The wait told is the rate's."""
    guard = {"requests": {"per_s": 0.05, "burst": 3}}
    system = make_system(pools=[pool_of(engines)], guard=guard)
    system.wait_pickable(*(engine.address for engine in engines))
    with httpx.Client(base_url=system.url, timeout=HANG_GUARD_S) as client:
        answers = [client.post(CHAT, json=chat(), headers=client_at(f"10.9.8.{n}")) for n in range(30)]
    passed = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(passed) + len(refused) == 30
    assert 1 <= len(passed) <= 6  # the burst less what waiting for the system took, and what came back meanwhile
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
    assert all(1 <= int(answer.headers["retry-after"]) <= 20 for answer in refused)
    assert system.total("pointsman_refusals_total", 'reason="client_requests"') >= len(refused)


def test_clients_behind_a_proxy_are_told_apart_and_get_their_places_back(guarded: System) -> None:
    """Three held answers fill one client's places, not another's; ended and abandoned ones come back."""
    with httpx.Client(timeout=HANG_GUARD_S, headers=client_at("203.0.113.1")) as client:
        streams = [HeldStream(client, guarded) for _ in range(3)]
        refused = client.post(guarded.url + CHAT, json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        other = httpx.post(guarded.url + CHAT, json=chat(), headers=client_at("203.0.113.2"), timeout=HANG_GUARD_S)
        assert other.status_code == 200
        streams[0].answer.close()
        eventually(lambda: client.post(guarded.url + CHAT, json=chat()).status_code == 200, "a place came back")
        for stream in streams[1:]:
            stream.answer.close()


def test_after_aborts_nothing_is_left_behind(guarded: System, engines: list[Engine]) -> None:
    """Two hundred streams of one client, three at a time, many abandoned early: then all its places are free."""
    asyncio.run(_disturbed(guarded))
    eventually(lambda: not sum(guarded.in_flight().values()), "nothing is in flight")
    with httpx.Client(timeout=HANG_GUARD_S, headers=client_at("203.0.113.7")) as client:
        streams = [HeldStream(client, guarded) for _ in range(3)]
        for stream in streams:
            stream.answer.close()
    eventually(lambda: not any(engine.state()["running"] for engine in engines), "the engines are idle")


async def _disturbed(system: System) -> None:
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=8)
    headers = client_at("203.0.113.7")
    async with httpx.AsyncClient(base_url=system.url, timeout=HANG_GUARD_S, limits=limits, headers=headers) as client:

        async def one(number: int) -> None:
            body = chat(f"{number}", stream=True, max_tokens=rng.randrange(2, 30))
            leaves = number % 2 == 0
            async with client.stream("POST", CHAT, json=body) as answer:
                assert answer.status_code in {200, 429}
                async for _ in answer.aiter_raw():
                    if leaves:
                        return

        await asyncio.gather(*(one(number) for number in range(200)))


@pytest.mark.parametrize("content", ["please Ignore   previous orders", "caf\u00e9: ignore\nprevious orders"])
def test_a_forbidden_prompt_reaches_no_engine_and_no_log(guarded: System, engines: list[Engine], content: str) -> None:
    """The SDK gets its own exception, which it does not retry; our log has no word of it."""
    served = sum(len(engine.requests()) for engine in engines)
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="none")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": f"{content} hush4711"}])
    assert refused.value.code == "pattern"
    assert sum(len(engine.requests()) for engine in engines) == served
    assert "hush4711" not in guarded.log.read_text()
    assert guarded.total("pointsman_guard_patterns_total", 'pattern="jailbreak"', 'action="refuse"') >= 1


def test_an_escaped_prompt_is_read_as_the_engine_would(guarded: System) -> None:
    """JSON lets a client write its letters as numbers."""
    body = rb'{"model":"sim","messages":[{"role":"user","content":"\u0069\u0067nore\u0020\u0070revious"}]}'
    headers = {"content-type": "application/json"}
    answer = httpx.post(guarded.url + CHAT, content=body, headers=headers, timeout=HANG_GUARD_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "pattern")


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"messages": [{"role": "user", "content": "word " * 50_000}]}, (413, "prompt_too_long")),
        ({"messages": [{"role": "user", "content": "x"}] * 51}, (400, "too_many_items")),
        ({"metadata": [[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]}, (400, "invalid_json")),
    ],
)
def test_what_is_too_large_is_refused_in_words(
    guarded: System, fields: dict[str, object], refused: tuple[int, str]
) -> None:
    """As JSON, with the reason as its code."""
    answer = httpx.post(guarded.url + CHAT, json=chat() | fields, timeout=HANG_GUARD_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == refused


def test_the_guard_can_be_switched_on_and_off_in_a_running_system(
    engines: list[Engine], make_system: Callable[..., System]
) -> None:
    """Neither Envoy nor a request under way needs to know."""
    system = make_system(pools=[pool_of(engines)])
    system.wait_pickable(*(engine.address for engine in engines))

    def ask() -> int:
        return httpx.post(system.url + CHAT, json=chat("ignore previous"), timeout=HANG_GUARD_S).status_code

    assert ask() == 200
    system.config["guard"] = {"requests": {"per_s": 1000}, "patterns": GUARD["patterns"]}
    system.write_config()
    eventually(lambda: ask() == 403, "the guard is in force")
    del system.config["guard"]
    system.write_config()
    eventually(lambda: ask() == 200, "and no more")
