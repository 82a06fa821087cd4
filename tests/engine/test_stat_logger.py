"""The plugin in a real vLLM: its pushes reach the fleet, scraping takes over, a drain is told before the first 500."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, System, eventually, free_ports
from real_engines import START_GUARD_S, Vllm, plugin

from extproc.access.keys import digest_of

pytestmark = pytest.mark.timeout(1_800)  # a hang guard; the first run makes the environment: 3 GB

LONG_TOKENS = 300
"""Several seconds of answer at this model's speed."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """One with the plugin, one without."""
    folder = tmp_path_factory.mktemp("vllm-plugin")
    options = ("--shutdown-timeout", "120", "--kv-cache-memory-bytes", "512M")
    first, second = free_ports(2)
    made = [Vllm(folder, first, "mid", *options, PYTHONPATH=str(plugin())), Vllm(folder, second, "mid", *options)]
    try:
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.stop()


@pytest.fixture
def two_servers(servers: list[Vllm]) -> list[Vllm]:
    """Both up, the first with the plugin, whatever the test before did to them."""
    servers[0].set("PYTHONPATH", str(plugin()))
    for server in servers:
        if server.leaving or server.process.poll() is not None:
            server.kill()
            server.start()
    for server in servers:
        server.wait_ready()
    return servers


def _ask(url: str, tokens: int, content: str = "which way") -> httpx.Response:
    body = {"model": "mid", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=4 * HANG_GUARD_S)


def _told(system: System, server: Vllm) -> dict[str, Any]:
    return system.fleet()[server.address]


def _source(system: System, server: Vllm) -> str:
    source: str = _told(system, server)["source"]
    return source


def _pushes(system: System, server: Vllm, result: str) -> float:
    return system.total("pointsman_pushes_total", f'endpoint="{server.address}"', f'result="{result}"')


def test_pushes_reach_the_fleet_beside_an_engine_that_is_scraped(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """Found by the page alone, with the same figures as a scrape; no change of source is taken for a restart."""
    pushing, scraped = two_servers
    system = make_real_system(two_servers)
    eventually(lambda: _source(system, pushing) == "push", "figures are pushed")
    assert _source(system, scraped) == "scrape"
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(_ask, f"http://{pushing.address}", LONG_TOKENS, f"way {n}") for n in range(4)]
        eventually(lambda: _told(system, pushing)["running"] == 4, "four requests run", pause_s=0)
        assert [answer.result().status_code for answer in answers] == [200] * 4
    eventually(lambda: _told(system, pushing)["running"] == 0, "nothing runs")
    told = _told(system, pushing)
    assert (told["engine_phase"], told["drained_by"]) == ("serving", [])
    assert told["kv_capacity_tokens"] == _told(system, scraped)["kv_capacity_tokens"]
    assert _told(system, scraped)["engine_phase"] is None
    assert _pushes(system, pushing, "taken") > 4
    assert _pushes(system, pushing, "malformed") == _pushes(system, pushing, "ignored") == 0
    assert system.total("pointsman_endpoint_restarts_total") == 0


def test_a_restart_is_heard_of_while_it_loads_and_without_the_plugin_it_is_scraped(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """Killed and started anew it says that it loads, long before its port answers; then without the plugin."""
    server, other = two_servers
    system = make_real_system(two_servers)
    eventually(lambda: _source(system, server) == "push", "figures are pushed")
    server.kill()
    eventually(lambda: _source(system, server) == "none", "nobody pushes")
    assert _source(system, other) == "scrape"
    server.start()
    eventually(lambda: _told(system, server)["state"] == "loading", "it says that it loads", within_s=START_GUARD_S)
    with pytest.raises(httpx.ConnectError):
        server.get("/health")
    system.wait_pickable(server.address, within_s=START_GUARD_S)
    eventually(lambda: _source(system, server) == "push", "figures are pushed again")
    server.kill()
    server.set("PYTHONPATH", "")
    server.start()
    system.wait_pickable(server.address, within_s=START_GUARD_S)
    eventually(lambda: _source(system, server) == "scrape", "it is scraped")
    assert _told(system, server)["engine_phase"] is None
    server.kill()  # the next test is to have it with the plugin again


def test_streams_are_charged_by_what_the_plugin_tells_of_them(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """Chats with several choices and completions of several prompts, none of which tells its usage: to the token."""
    server = two_servers[0]
    key = "pm-acme-0123456789abcdef"
    system = make_real_system(
        [server],
        access={"api_keys": [{"name": "acme-1", "tenant": "acme", "sha256": digest_of(key)}]},
        tenants={"named": {"acme": {"budget": {"tokens": 1e9}}}},
        headers={"authorization": f"Bearer {key}"},
    )
    eventually(lambda: _source(system, server) == "push", "figures are pushed")
    used = 0
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "which way"}], "n": 2}),
        ("/v1/completions", {"prompt": ["which way", "and how far is it"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a longer way " * 20}]}),
    ):
        asked = {"model": "mid", "max_tokens": 5, "ignore_eos": True, **body}
        used += server.post(path, asked).json()["usage"]["total_tokens"]
        streamed = httpx.post(
            system.url + path, json={**asked, "stream": True}, headers=system.headers, timeout=4 * HANG_GUARD_S
        )
        assert streamed.status_code == 200
        assert '"usage":{' not in streamed.text

    def spent() -> bool:
        told = httpx.get(f"{system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]["acme"]
        return bool(told["budget_spent_tokens"] == used)

    eventually(spent, f"{used} tokens are charged")
    assert system.total("pointsman_tenant_tokens_total", 'source="report"') == used


def test_a_server_told_to_stop_gets_no_request_that_it_would_refuse(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """SIGTERM under load: it drains before it answers any 500, so nothing is retried; what it has begun ends whole."""
    leaving, staying = two_servers
    system = make_real_system(two_servers)
    eventually(lambda: _source(system, leaving) == "push", "figures are pushed")
    refused = _refusals(leaving)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(_ask, f"http://{leaving.address}", LONG_TOKENS, f"way {n}") for n in range(2)]
        eventually(lambda: _told(system, leaving)["running"] == 2, "two requests run")
        statuses: list[int] = []
        ended = Event()
        asking = [pool.submit(_ask_until, system.url, statuses, ended) for _ in range(3)]
        eventually(lambda: len(statuses) > 3, "requests flow")
        leaving.terminate()
        eventually(lambda: _told(system, leaving)["state"] == "draining", "it says that it drains", pause_s=0)
        assert _told(system, leaving)["drained_by"] == ["engine"]
        finished = [one.result().json()["choices"][0]["finish_reason"] for one in running]
        told = len(statuses)
        eventually(lambda: len(statuses) > told + 3, "requests flow on")
        ended.set()
        for one in asking:
            one.result()
    assert finished == ["length"] * 2
    assert set(statuses) == {200}
    assert _refusals(leaving) == refused
    assert system.total("pointsman_requests_moved_total") == system.total("pointsman_attempts_failed_total") == 0
    assert _told(system, staying)["state"] == "ready"


def _ask_until(url: str, statuses: list[int], ended: Event) -> None:
    """One request after the other."""
    for number in itertools.count():
        if ended.is_set():
            return
        statuses.append(_ask(url, 1, f"train {number}").status_code)


def _refusals(server: Vllm) -> int:
    """500s that the server has answered, by its own log."""
    return Path(server.log).read_text().count('HTTP/1.1" 500')
