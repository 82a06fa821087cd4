"""What engines tell of themselves in their metrics, under whatever names, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

PROMPT = "switch signal rail sleeper " * 2_000


@pytest.mark.parametrize("dialect", ["sglang", "triton-trtllm"])
def test_an_engine_of_another_kind_is_scored_by_its_figures(
    make_system: Callable[..., System], make_engines: Callable[..., list[Engine]], dialect: str
) -> None:
    """One is full of others' requests, which only its metrics tell: a policy that goes by these avoids it."""
    sizes = ("--kv-capacity-tokens", "60000", "--max-model-len", "60000")
    busy, free = engines = make_engines(2, "--metrics", dialect, *sizes)
    never_stale = {"stale_after_intervals": 1_000}  # a policy that goes by figures must have them on a busy machine too
    system = make_system(pools=[pool_of(engines, policy="llm-d-default")], scrape=never_stale)
    system.wait_pickable(busy.address, free.address)
    with httpx.Client(base_url=f"http://{busy.address}", timeout=HANG_GUARD_S) as client:
        body = chat(PROMPT, max_tokens=20_000, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body):
            eventually(lambda: system.fleet()[busy.address]["kv_used"] > 0.1, "another's request is seen")
            told = system.fleet()[busy.address]
            assert (told["dialect"], told["kv_capacity_tokens"]) == (dialect, 60_000)
            for number in range(8):
                answer = httpx.post(
                    f"{system.url}/v1/chat/completions",
                    json=chat(f"hello {number}", max_tokens=2),
                    timeout=HANG_GUARD_S,
                )
                assert answer.headers["x-pointsman-endpoint"] == free.address


def test_an_engine_that_gives_its_requests_up_is_counted_and_tried(
    make_system: Callable[..., System], make_engines: Callable[..., list[Engine]]
) -> None:
    """To the client it is a 200. The engine has to answer a generation of ours, which it does: it goes on."""
    [engine] = make_engines(1)
    system = make_system(pools=[pool_of([engine])])
    system.wait_pickable(engine.address)
    scraped = system.total("pointsman_scrapes_total")
    eventually(lambda: system.total("pointsman_scrapes_total") >= scraped + 2, "what our trial ended is counted apart")
    url = f"{system.url}/v1/chat/completions"
    with ThreadPoolExecutor(1) as executor:
        request = executor.submit(httpx.post, url, json=chat("all", max_tokens=50_000), timeout=HANG_GUARD_S)
        eventually(lambda: engine.state()["running"] == 1, "it runs")
        httpx.post(f"http://{engine.address}/sim/abort", timeout=HANG_GUARD_S).raise_for_status()
        answer = request.result()
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    eventually(lambda: system.total("pointsman_engine_finished_total", 'reason="abort"') == 1, "it is counted")
    left = 'to="unhealthy"'
    eventually(lambda: system.total("pointsman_endpoint_transitions_total", left) == 1, "it has to answer first")
    eventually(lambda: system.fleet()[engine.address]["state"] == "ready", "it is back")
    assert httpx.post(url, json=chat("hello", max_tokens=2), timeout=HANG_GUARD_S).status_code == 200
