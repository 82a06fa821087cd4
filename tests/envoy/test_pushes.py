"""Engines that push their figures beside those that are scraped, through the whole system."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of


def _source(system: System, engine: Engine) -> str:
    source: str = system.fleet()[engine.address]["source"]
    return source


def test_pushes_are_preferred_and_scraping_takes_over_for_each_engine(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """Found by the page alone; silent, it is scraped; heard again, it is preferred. The other is scraped throughout."""
    [pushing], [scraped] = make_engines(1, "--stats-port", "0"), make_engines(1)
    system = make_system(pools=[pool_of([pushing, scraped])])
    eventually(lambda: _source(system, pushing) == "push", "figures are pushed")
    eventually(lambda: _source(system, scraped) == "scrape", "the other is scraped")
    pushing.faults(silent_pushes=True)
    eventually(lambda: _source(system, pushing) == "scrape", "it is scraped")
    pushing.faults()
    eventually(lambda: _source(system, pushing) == "push", "figures are pushed again")
    assert _source(system, scraped) == "scrape"
    assert system.total("pointsman_pushes_total", 'result="lost"') > 0
    assert system.total("pointsman_endpoint_restarts_total") == 0


def test_pushes_can_be_left_aside(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """`scrape.pushes: false`: the page is all that is read."""
    engines = make_engines(1, "--stats-port", "0")
    system = make_system(pools=[pool_of(engines)], scrape={"pushes": False})
    eventually(lambda: _source(system, engines[0]) == "scrape", "it is scraped")
    assert system.total("pointsman_pushes_total") == 0


def test_an_engine_that_says_it_drains_is_sent_nothing_that_it_would_refuse(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """Told to stop under load: it drains before its first 500, so nothing fails, and nothing is tried twice."""
    leaving, staying = make_engines(2, "--stats-port", "0", "--record", "1")
    system = make_system(pools=[pool_of([leaving, staying])])
    for engine in (leaving, staying):
        eventually(lambda engine=engine: _source(system, engine) == "push", "figures are pushed")
    statuses: list[int] = []
    gone = Event()

    def ask() -> None:
        while not gone.is_set():
            answer = httpx.post(f"{system.url}/v1/chat/completions", json=chat(max_tokens=1), timeout=HANG_GUARD_S)
            statuses.append(answer.status_code)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        eventually(lambda: leaving.state()["served"] > 5, "it is used")
        leaving.process.terminate()
        leaving.process.wait(HANG_GUARD_S)
        gone.set()
        for one in asking:
            one.result()
    assert set(statuses) == {200}
    assert system.total("pointsman_attempts_failed_total") == system.total("pointsman_requests_moved_total") == 0
