"""Tenants' quotas through a real Envoy: a flood of one's is refused, another's requests pass, accounts stay true."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

from extproc.access.keys import digest_of

FLOOD, CALM = "pm-flood-0123456789abcdef", "pm-calm-0123456789abcdef"
ACCESS = {
    "api_keys": [
        {"name": f"{tenant}-1", "tenant": tenant, "sha256": digest_of(key)}
        for tenant, key in (("flood", FLOOD), ("calm", CALM))
    ]
}
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    """As OpenAI's clients send it."""
    return {"authorization": f"Bearer {key}"}


def account(system: System, tenant: str) -> dict[str, Any]:
    """What the admin API says of a tenant."""
    told = httpx.get(f"{system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]
    return dict(told.get(tenant, {"running": 0}))


@pytest.fixture(scope="module")
def pair(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines."""
    return make_engines(2, "--speed", "50")


def test_a_flood_is_refused_and_others_pass(pair: list[Engine], make_system: Callable[..., System]) -> None:
    """Twenty times the quota: what is over it gets 429 in JSON and the wait its rate needs; others notice nothing."""
    tenants = {"named": {"flood": {"requests": {"per_s": 0.05, "burst": 5}}}}
    system = make_system(pools=[pool_of(pair)], access=ACCESS, tenants=tenants, headers=bearer(CALM))
    system.wait_pickable(*(engine.address for engine in pair))
    with httpx.Client(base_url=system.url, timeout=HANG_GUARD_S) as client:
        flood = [client.post(CHAT, json=chat(), headers=bearer(FLOOD)) for _ in range(100)]
        calm = [client.post(CHAT, json=chat(), headers=bearer(CALM)) for _ in range(20)]
    passed = [answer for answer in flood if answer.status_code == 200]
    refused = [answer for answer in flood if answer.status_code == 429]
    assert len(passed) + len(refused) == 100
    assert 5 <= len(passed) <= 10  # the burst, and what comes back while a busy machine sends the rest
    for answer in refused:
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 20
    assert [answer.status_code for answer in calm] == [200] * 20
    assert system.total("pointsman_refusals_total", 'reason="quota_requests"') == len(refused)


def test_tokens_are_charged_as_the_engines_count_them(pair: list[Engine], make_system: Callable[..., System]) -> None:
    """Streamed and whole answers: the account has exactly what their `usage` says, and the metric too."""
    tenants = {"named": {"calm": {"tokens": {"per_s": 1e-6, "burst": 1e6}, "budget": {"tokens": 1e9}}}}
    system = make_system(pools=[pool_of(pair)], access=ACCESS, tenants=tenants, headers=bearer(CALM))
    system.wait_pickable(*(engine.address for engine in pair))
    used = 0
    with httpx.Client(base_url=system.url, timeout=HANG_GUARD_S, headers=bearer(CALM)) as client:
        for number in range(60):
            streamed = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
            answer = client.post(CHAT, json=chat("hello " * number, max_tokens=number + 1, **streamed))
            used += _usage(answer)["total_tokens"]
    eventually(lambda: account(system, "calm")["budget_spent_tokens"] == used, "all are settled")
    assert account(system, "calm")["tokens_left"] == pytest.approx(1e6 - used, abs=0.01)
    assert system.total("pointsman_tenant_tokens_total", 'tenant="calm"', 'source="usage"') == used
    assert system.total("pointsman_tenant_tokens_total", 'tenant="calm"', 'source="estimate"') == 0


def _usage(answer: httpx.Response) -> dict[str, int]:
    if answer.headers["content-type"].startswith("application/json"):
        return dict(answer.json()["usage"])
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(next(chunk["usage"] for chunk in chunks if chunk.get("usage")))


def test_nothing_is_left_behind_by_clients_that_leave_and_engines_that_die(
    pair: list[Engine], make_system: Callable[..., System]
) -> None:
    """Two hundred streams, a third abandoned, an engine killed among them: then nobody has anything running."""
    tenants = {"default": {"concurrency": 1_000, "requests": {"per_s": 1e-6, "burst": 1e6}}}
    system = make_system(pools=[pool_of(pair)], access=ACCESS, tenants=tenants, headers=bearer(CALM))
    system.wait_pickable(*(engine.address for engine in pair))
    asyncio.run(_disturbed(system, pair[0]))
    for tenant in ("flood", "calm"):
        eventually(lambda tenant=tenant: account(system, tenant)["running"] == 0, f"{tenant} has nothing running")
    eventually(lambda: not sum(system.in_flight().values()), "nothing is in flight")
    assert pair[1].state()["running"] == 0
    pair[0].start()
    system.wait_pickable(pair[0].address)


async def _disturbed(system: System, victim: Engine) -> None:
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=40)
    async with httpx.AsyncClient(base_url=system.url, timeout=HANG_GUARD_S, limits=limits) as client:

        async def one(number: int) -> None:
            key = FLOOD if number % 2 else CALM
            body = chat(f"{number}", stream=True, max_tokens=rng.randrange(5, 60))
            leaves_after = rng.randrange(1, 5) if number % 3 == 0 else None
            try:
                async with client.stream("POST", CHAT, json=body, headers=bearer(key)) as answer:
                    read = 0
                    async for _ in answer.aiter_raw():
                        read += 1
                        if read == leaves_after:
                            return
            except httpx.HTTPError:
                pass  # cut by the death of its engine
            if number == 100:
                victim.kill()

        await asyncio.gather(*(one(number) for number in range(200)))


def test_with_a_queue_accounts_hold_through_aborts_and_a_killed_engine(
    pair: list[Engine], make_system: Callable[..., System]
) -> None:
    """Clients leave while they wait and while they are answered, and an engine dies: everybody has paid what he used.

    That is the usage that whole answers told and an estimate for those that began; who only waited has paid nothing.
    """
    quota = {"tokens": {"per_s": 1e-6, "burst": 1e6}, "concurrency": 1_000}
    tenants = {"named": {"flood": quota, "calm": quota}, "usage": "inject"}
    queue = {"classes": [{"name": "only", "max_wait_s": 60}], "endpoint_requests": 4}
    system = make_system(pools=[pool_of(pair, queue=queue)], access=ACCESS, tenants=tenants, headers=bearer(CALM))
    system.wait_pickable(*(engine.address for engine in pair))
    told = asyncio.run(_told(system, pair[0]))
    eventually(lambda: not sum(system.in_flight().values()), "nothing is in flight")
    eventually(lambda: not system.total("pointsman_requests_unsettled"), "all are settled")
    assert system.total("pointsman_queue_left_total", 'how="client_gone"') > 0
    assert system.total("pointsman_queue_requests") == 0
    for tenant in ("flood", "calm"):
        label = f'tenant="{tenant}"'
        used = {
            source: system.total("pointsman_tenant_tokens_total", label, f'source="{source}"')
            for source in ("usage", "estimate")
        }
        assert account(system, tenant)["running"] == 0
        assert account(system, tenant)["tokens_left"] == pytest.approx(1e6 - sum(used.values()), abs=1)
        assert used["usage"] == pytest.approx(told[tenant], rel=0.01)
        assert told[tenant] > 0
    pair[0].start()
    system.wait_pickable(pair[0].address)


def _leaves(number: int) -> bool:
    """Whether this client leaves before his answer has ended: a third does."""
    return number % 3 == 0


async def _told(system: System, victim: Engine) -> dict[str, int]:
    """By tenant, the tokens that the usage of whole answers told."""
    told = {"flood": 0, "calm": 0}
    rng = random.Random(11)
    limits = httpx.Limits(max_connections=None)
    some_wait = asyncio.Event()

    async with httpx.AsyncClient(base_url=system.url, timeout=HANG_GUARD_S, limits=limits) as client:

        async def ask(number: int) -> None:
            tenant = "flood" if number % 2 else "calm"
            # who leaves asks for more than he can get, or we could not say whether his answer was whole
            body = chat(f"{number} " * 50, stream=True, max_tokens=50_000 if _leaves(number) else rng.randrange(5, 60))
            answer = await client.post(CHAT, json=body, headers=bearer(FLOOD if number % 2 else CALM))
            if answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"):
                told[tenant] += _usage(answer)["total_tokens"]

        async def one(number: int) -> None:
            # a fast system would have answered, a slow one not have heard of, whoever left after a fixed time
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                if _leaves(number):
                    asking = asyncio.create_task(ask(number))
                    await some_wait.wait()
                    await asyncio.wait([asking], timeout=rng.random())
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                else:
                    await ask(number)
                if number == 100:
                    victim.kill()

        # those who leave hold every place until they do, so that most of them wait
        leaving = asyncio.gather(*(one(number) for number in range(200) if _leaves(number)))
        await asyncio.to_thread(
            eventually, lambda: system.total("pointsman_queue_requests") > 20, "some of those who leave wait"
        )
        some_wait.set()
        await asyncio.gather(leaving, *(one(number) for number in range(200) if not _leaves(number)))
    return told
