"""Watchers: what an endpoint's answers, and their absence, become for the fleet."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.schema import Config
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses import inbox as inbox_module
from extproc.senses import watchers as module
from extproc.senses.inbox import Inbox
from extproc.senses.link import pace_of
from extproc.senses.messages import Target, Try, Watch
from extproc.senses.watchers import Watcher, Watchers, in_step
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from vllm_adapters.metrics import EngineFigures

HANG_S = 60
LISTING = '{"object":"list","data":[{"id":"m","max_model_len":4096}]}'
PAGE = "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"


def config(**intervals: Any) -> Config:
    """Quick turns, so that a test need not wait."""
    scrape = {"interval_ms": 5, "timeout_ms": 5_000, "backoff_max_ms": 5} | intervals
    text = f"probe: {{interval_ms: 5, timeout_ms: 5000}}\nscrape: {scrape}\n"
    return parse(text + "pools: [{name: p, models: [m], endpoints: {file: none.yaml}}]")


async def eventually(check: Callable[[], bool]) -> None:
    """Until it holds."""
    async with asyncio.timeout(HANG_S):
        while not check():  # noqa: ASYNC110 - what is waited for is in many places
            await asyncio.sleep(0.001)


class Engine:
    """An HTTP server in the place of a vLLM."""

    def __init__(self) -> None:
        self.listing: tuple[int, str] = (200, LISTING)
        self.page: tuple[int, str] = (200, PAGE)
        self.asked: list[str] = []
        self.trial = 200
        self.trials: list[dict[str, Any]] = []
        self.trials_go = asyncio.Event()
        self.trials_go.set()
        self.pages_go = asyncio.Event()
        self.pages_go.set()
        self.page_asked = asyncio.Event()

    async def start(self) -> str:
        """Listen; returns the address."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Nothing listens any more."""
        await self._runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return self._answer("models", *self.listing)

    async def _completions(self, request: web.Request) -> web.Response:
        self.trials.append(await request.json())
        await self.trials_go.wait()
        return self._answer("trial", self.trial, "{}")

    async def _metrics(self, _request: web.Request) -> web.Response:
        answer = self._answer("metrics", *self.page)
        self.page_asked.set()
        await self.pages_go.wait()
        return answer

    def _answer(self, what: str, status: int, text: str) -> web.Response:
        self.asked.append(what)
        headers = {"location": "/elsewhere"} if status == 302 else {}
        return web.Response(status=status, text=text, headers=headers)


class Altered:
    """A fleet some of whose methods are others: compiled, its own cannot be replaced."""

    def __init__(self, fleet: Fleet, **methods: Any) -> None:
        self._fleet = fleet
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


class House:
    """A fleet of one engine, watched."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.turns: dict[str, asyncio.Queue[bool]] = {"scrape": asyncio.Queue(), "probe": asyncio.Queue()}
        self.turns["export"] = asyncio.Queue()
        self.tries: list[bool] = []
        self.state = FleetState()
        self.fleet = Fleet(self.state, Metrics(), asyncio.get_running_loop().time)
        self.fleet.configure(Generation(1, config()))
        self.inbox = Inbox(self.fleet, self, asyncio.get_running_loop().time)
        self.watchers = Watchers(self.inbox.take)
        self.inbox.tell = self._order
        self.config = config()

    def _order(self, order: Try) -> None:
        self.watchers.try_generation(order.address, order.model)

    def order_watch(self, *addresses: str) -> None:
        """Watch exactly these."""
        self.watchers.watch(Watch([Target(address) for address in addresses], pace_of(self.config, len(addresses))))

    def scraped(self, *, ok: bool) -> None:
        """WatchEvents."""
        self.turns["scrape"].put_nowait(ok)

    def probed(self, *, ok: bool) -> None:
        """WatchEvents."""
        self.turns["probe"].put_nowait(ok)

    def exported(self, *, ok: bool) -> None:
        """WatchEvents."""
        self.turns["export"].put_nowait(ok)

    def tried(self, *, ok: bool) -> None:
        """WatchEvents."""
        self.tries.append(ok)

    async def watch(self) -> None:
        """List the engine and watch it."""
        self.address = await self.engine.start()
        self.fleet.set_endpoints("p", [self.address])
        self.fleet.on_suspicion = self.watchers.probe_now
        self.order_watch(self.address)

    async def until_tried(self, *, ok: bool) -> None:
        """A trial that ended after this call ended so."""
        tries = len(self.tries)
        await eventually(lambda: ok in self.tries[tries:])

    async def until_ready(self) -> None:
        """It takes traffic."""
        await eventually(lambda: self.now is State.READY)

    async def until(self, what: str, *, ok: bool) -> None:
        """A whole turn of one loop that began after this call ended so."""
        turns = self.turns[what]
        async with asyncio.timeout(HANG_S):
            while not turns.empty():
                turns.get_nowait()
            await turns.get()  # may have begun before
            while await turns.get() is not ok:
                pass

    @property
    def slot(self) -> int:
        """The engine's."""
        slot = self.state.slot_of(self.address)
        assert slot is not None
        return slot

    @property
    def now(self) -> State:
        """The engine's state."""
        return State(self.state.state[self.slot])


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Watching, until the test is over."""
    house = House()
    await house.watch()
    yield house
    await house.watchers.close()
    await house.engine.stop()


async def test_an_engine_that_answers_is_ready_and_its_figures_are_known(house: House) -> None:
    """By its model list and its metrics page."""
    await house.until_ready()
    await house.until("scrape", ok=True)
    assert house.state.models(house.slot) == {"m"}
    assert house.state.context_tokens[house.slot] == 4_096
    figures = (house.state.running[house.slot], house.state.waiting[house.slot], house.state.kv_used[house.slot])
    assert figures == (3, 2, 0.5)


@pytest.mark.parametrize(
    "listing",
    [(500, LISTING), (404, "{}"), (302, "moved"), (200, "OK"), (200, '{"error":"loading"}')],
    ids=["500", "404", "redirect", "not JSON", "no list"],
)
async def test_an_engine_that_answers_wrongly_falls_out(house: House, listing: tuple[int, str]) -> None:
    """After three in a row, and returns with the first good one."""
    await house.until_ready()
    house.engine.listing = listing
    for _ in range(3):
        await house.until("probe", ok=False)
    assert house.now is State.UNHEALTHY
    house.engine.listing = (200, LISTING)
    await house.until_ready()


async def test_an_engine_takes_traffic_only_after_a_generation(house: House) -> None:
    """One token of ours, once: an engine in service is not asked to generate again."""
    await house.until_ready()
    await house.until("probe", ok=True)
    await house.until("probe", ok=True)
    assert house.engine.trials == [{"model": "m", "prompt": "a", "max_tokens": 1}]
    assert house.tries == [True]


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_lists_its_model_and_does_not_generate_stays_out(house: House, status: int) -> None:
    """As vLLM's does while it shuts down. It is back with the first generation it answers."""
    await house.until_ready()
    house.engine.trial = status
    house.fleet.observe(house.address, Evidence.UNFIT)
    assert house.now is State.UNHEALTHY
    await house.until_tried(ok=False)
    assert house.now is State.UNHEALTHY
    house.engine.trial = 200
    await house.until_ready()


async def test_an_engine_that_refuses_to_generate_is_at_work(house: House) -> None:
    """It may be one for embeddings."""
    house.engine.trial = 404
    await house.until_ready()


async def test_a_trial_that_waits_behind_others_is_passed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is at work and has not refused it; one that hangs is not at work."""
    monkeypatch.setattr(inbox_module, "_TRIAL_PATIENCE_S", 0.05)
    await house.until_ready()
    house.engine.trials_go.clear()
    for steps in range(1, 4):
        house.fleet.scraped(house.address, EngineFigures(running=4, waiting=3, progress=float(steps)))
    house.engine.page = (200, PAGE + "vllm:iteration_tokens_total_count 9.0\n")
    house.fleet.observe(house.address, Evidence.UNFIT)
    await house.until_ready()
    assert house.tries[-1] is True
    house.engine.trials_go.set()


async def test_an_engine_found_at_work_needs_no_trial() -> None:
    """After our restart a saturated fleet is in service as soon as its metrics have been read twice."""
    house = House()
    house.engine.trials_go.clear()
    house.address = await house.engine.start()
    house.fleet.set_endpoints("p", [house.address])
    for steps in (1, 2):
        house.fleet.scraped(house.address, EngineFigures(running=4, waiting=3, progress=float(steps)))
    house.order_watch(house.address)
    try:
        await house.until("probe", ok=True)
        assert house.now is State.READY
        assert house.engine.trials == []
    finally:
        house.engine.trials_go.set()
        await house.watchers.close()
        await house.engine.stop()


async def test_a_suspect_is_asked_at_once() -> None:
    """A failed request does not wait for the next turn, which here would come in ten minutes."""
    house = House()
    rare = config().probe.model_copy(update={"interval_ms": 600_000})
    house.config = config().model_copy(update={"probe": rare})
    await house.watch()
    try:
        await house.until_ready()
        house.fleet.observe(house.address, Evidence.UNFIT)
        await house.until_ready()
        assert len(house.engine.trials) == 2
    finally:
        await house.watchers.close()
        await house.engine.stop()


async def test_an_engine_that_is_gone_is_out_at_once(house: House) -> None:
    """Nothing listens: one refused probe suffices."""
    await house.until_ready()
    await house.engine.stop()
    await house.until("probe", ok=False)
    assert house.now is State.UNHEALTHY
    await house.until("scrape", ok=False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENETUNREACH, errno.EADDRNOTAVAIL])
async def test_a_connection_that_fails_on_our_side_is_not_a_refusal(
    house: House, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No descriptors, no route: aiohttp has one exception for all. It takes a row of them, as with any failed probe."""
    await house.until("probe", ok=True)
    key = aiohttp.client_reqrep.ConnectionKey("10.0.0.1", 80, False, True, None, None, None)
    seen: list[Evidence] = []

    async def unable(*_args: object, **_kwargs: object) -> bytes:
        raise aiohttp.ClientConnectorError(key, OSError(number, "on our side"))

    with monkeypatch.context() as patch:
        patch.setattr(house.inbox, "_fleet", Altered(house.fleet, observe=lambda _address, told: seen.append(told)))
        patch.setattr(Watcher, "_get", unable)
        await house.until("probe", ok=False)
    assert set(seen) == {Evidence.PROBE_FAILED}


@pytest.mark.parametrize("page", [(500, PAGE), (200, "<html>"), (200, "")], ids=["500", "HTML", "empty"])
async def test_a_bad_metrics_page_leaves_the_last_figures_and_the_state(house: House, page: tuple[int, str]) -> None:
    """They grow stale; the endpoint stays ready."""
    await house.until("scrape", ok=True)
    await house.until_ready()
    house.engine.page = page
    await house.until("scrape", ok=False)
    observed_at_s = house.state.observed_at_s[house.slot]
    await house.until("scrape", ok=False)
    assert house.state.running[house.slot] == 3
    assert house.state.observed_at_s[house.slot] == observed_at_s
    assert house.now is State.READY


async def test_a_page_without_end_is_not_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound it is no metrics page."""
    monkeypatch.setattr(module, "_MAX_PAGE_BYTES", 1_000)
    house.engine.page = (200, PAGE + "#" * 100_000)
    await house.until("scrape", ok=False)
    house.engine.page = (200, PAGE + "#" * 100)
    await house.until("scrape", ok=True)


async def test_a_page_that_trips_us_ends_neither_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn counts as failed, the next one is taken."""
    await house.until_ready()

    def broken(*_args: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(module, "parse_models", broken)
        patch.setattr(module, "parse_metrics", broken)
        await house.until("probe", ok=False)
        await house.until("scrape", ok=False)
    await house.until("probe", ok=True)
    await house.until("scrape", ok=True)


async def test_a_trial_that_was_lost_is_made_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was heard of it for longer than it may take: those who made it may be gone."""
    await house.until_ready()
    monkeypatch.setattr(inbox_module, "_TRIAL_GRACE_S", 0.0)
    house.inbox.trial_timeout_s = 0.02
    lost: list[Try] = []
    house.inbox.tell = lost.append
    house.fleet.observe(house.address, Evidence.UNFIT)
    await eventually(lambda: len(lost) == 2)
    assert house.now is State.UNHEALTHY
    house.inbox.tell = house._order
    await house.until_ready()


async def test_not_even_a_report_that_fails_ends_a_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong outside of reading and judging a page is logged, and the next turn is taken."""
    monkeypatch.setattr(module, "_LONGEST_SPREAD_S", 0.0)
    faults: asyncio.Queue[str] = asyncio.Queue()

    def broken(*, ok: bool) -> None:
        faults.put_nowait(f"counting {ok}")
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(house, "probed", broken)
        patch.setattr(house, "scraped", broken)
        async with asyncio.timeout(HANG_S):
            for _ in range(4):
                await faults.get()
    await house.until("probe", ok=True)
    await house.until("scrape", ok=True)


async def test_an_engine_that_answers_again_is_scraped_at_once() -> None:
    """Its scrape must not wait out a back-off of hours."""
    house = House()
    house.config = config(interval_ms=3_600_000, backoff_max_ms=3_600_000)
    house.engine.listing = house.engine.page = (500, "")
    await house.watch()
    assert await asyncio.wait_for(house.turns["scrape"].get(), HANG_S) is False
    await house.until("probe", ok=False)
    house.engine.listing, house.engine.page = (200, LISTING), (200, PAGE)
    assert await asyncio.wait_for(house.turns["scrape"].get(), HANG_S) is True
    await house.watchers.close()
    await house.engine.stop()


async def test_an_engine_that_answers_again_while_a_scrape_hangs_is_scraped_after_it() -> None:
    """The hanging one asked the engine from before; the wake-up is for the next."""
    house = House()
    house.config = config(interval_ms=3_600_000, backoff_max_ms=3_600_000)
    house.engine.page = (500, "")
    house.engine.pages_go.clear()
    await house.watch()
    async with asyncio.timeout(HANG_S):
        await house.engine.page_asked.wait()
        await house.until("probe", ok=True)  # begun after the scrape: the wake-up came while it hung
        house.engine.page = (200, PAGE)
        house.engine.pages_go.set()
        assert await house.turns["scrape"].get() is False
        assert await house.turns["scrape"].get() is True
    await house.watchers.close()
    await house.engine.stop()


async def test_endpoints_found_together_do_not_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread over an interval; a single new one waits for nobody, nor anyone for longer than a second."""
    house, delays = House(), []
    monkeypatch.setattr(Watcher, "start", lambda _self, delay_s: delays.append(delay_s))
    house.config = config(interval_ms=200)
    house.order_watch(*(f"10.0.0.{n}:80" for n in range(4)))
    assert delays == pytest.approx([0, 0.05, 0.1, 0.15])
    house.order_watch(*(f"10.0.0.{n}:80" for n in range(5)))
    assert delays[4:] == [0]
    house.config = config(interval_ms=3_600_000)
    house.order_watch(*(f"10.0.0.{n}:80" for n in range(9)))
    assert delays[5:] == pytest.approx([0, 0.25, 0.5, 0.75])
    await house.watchers.close()


async def test_only_what_is_listed_is_watched(house: House) -> None:
    """Watching the same again changes nothing; an unlisted endpoint is asked no more."""
    await house.until_ready()
    tasks = set(asyncio.all_tasks())
    house.order_watch(house.address)
    assert set(asyncio.all_tasks()) == tasks
    watching = [task for watcher in house.watchers._watchers.values() for task in watcher._loops]
    house.order_watch()
    await asyncio.wait_for(asyncio.gather(*watching, return_exceptions=True), HANG_S)
    asked = len(house.engine.asked)
    assert house.watchers._watchers == {}
    assert len(house.engine.asked) == asked
    assert all(task.cancelled() for task in watching)


async def test_a_page_that_takes_long_to_read_is_read_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one engine's megabytes of lines would leave no time for the others' pages."""
    house = House()
    await house.watch()
    [watcher] = house.watchers._watchers.values()
    watcher.cancel()
    used_s = iter(range(0, 100, 2))  # two seconds a page
    monkeypatch.setattr(module, "thread_time", lambda: next(used_s))
    assert await watcher._scrape() is not None
    assert watcher._pause_s(0) == 20.0
    assert watcher._pause_s(3) == 20.0
    await house.watchers.close()
    await house.engine.stop()


async def test_a_back_off_grows_to_its_bound() -> None:
    """Twice as long each time, never longer than configured and never shorter than the interval."""
    house = House()
    house.config = config(interval_ms=200, backoff_max_ms=1_000)
    await house.watch()
    [watcher] = house.watchers._watchers.values()
    assert [watcher._pause_s(failures) for failures in (0, 1, 2, 3, 50)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    watcher.pace = pace_of(config(interval_ms=2_000, backoff_max_ms=1_000), 1)
    assert [watcher._pause_s(failures) for failures in (0, 50)] == [2.0, 2.0]
    await house.watchers.close()
    await house.engine.stop()


@given(st.floats(0.0, 1e7), st.floats(0.05, 60.0))
def test_pauses_end_together(ends_s: float, interval_s: float) -> None:
    """At one of four moments of an interval, and no more than an eighth of it away from when they should."""
    chosen_s = in_step(ends_s, interval_s)
    assert abs(chosen_s - ends_s) <= interval_s / 8 + 1e-6
    assert chosen_s / interval_s * 4 == pytest.approx(round(chosen_s / interval_s * 4))


async def test_no_more_than_a_few_pauses_end_together() -> None:
    """A large fleet has more moments, or the pages of hundreds would be one long turn of the loop."""
    watchers = Watchers(lambda _: None)
    watchers.watch(Watch([Target(f"127.0.0.1:{port}") for port in range(1, 1_025)], pace_of(config(), 1)))
    assert {watcher.steps for watcher in watchers._watchers.values()} == {64}
    await watchers.close()
    ends = Counter(in_step(0.2 * number / 1_024, 0.2, 64) for number in range(1_024))
    assert max(ends.values()) <= 17
