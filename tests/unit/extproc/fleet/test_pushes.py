"""What the fleet makes of engines that push their figures, and say themselves that they load or shut down."""

from __future__ import annotations

import math
from typing import Any

import pytest
from structlog.testing import capture_logs

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses.inbox import Inbox
from extproc.senses.messages import FellSilent, FromSenses, Heard, Probed, Scraped
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures
from vllm_adapters.pushed import FinishedRequest, Pushed, Totals

A = "10.0.0.1:8000"
LISTING = Listing(frozenset({"m"}), 4_096)


class House:
    """A fleet of one engine that lists its model, and what the senses report of it."""

    def __init__(self, probe: str = "{}") -> None:
        self.now_s = 100.0
        self.state = FleetState(stale_after_s=0.6, max_endpoints=4)
        self.metrics = Metrics()
        self.metrics.observe_state(self.state, dict, lambda: self.now_s)
        self.fleet = Fleet(self.state, self.metrics, lambda: self.now_s)
        text = f"probe: {probe}\npools: [{{name: m, models: [m], endpoints: {{file: m.yaml}}}}]"
        self.fleet.configure(Generation(1, parse(text)))
        self.fleet.set_endpoints("m", [A])
        self.fleet.acknowledged(self.fleet.assignments())
        self.inbox = Inbox(self.fleet, self.metrics, lambda: self.now_s)
        self.inbox.trials = False
        self.seq = 0

    def take(self, *messages: FromSenses) -> None:
        """The senses report."""
        for message in messages:
            self.inbox.take(message)

    def list_model(self) -> None:
        """It answers."""
        self.take(Probed(A, Evidence.PROBE_OK, LISTING))

    def refuse(self) -> None:
        """Nothing answers at its port."""
        self.take(Probed(A, Evidence.PROBE_REFUSED))

    def push(self, phase: Any = "serving", first_tokens: int = 0, kv_peak: float | None = None, **figures: Any) -> None:
        """Its plugin tells."""
        self.seq += 1
        told = EngineFigures(**{"running": 0, "waiting": 0, "started_at_s": 5.0} | figures)
        totals = Totals(first_tokens=first_tokens)
        self.take(Heard(A, Pushed("a1", self.seq, phase, told, kv_peak=kv_peak, totals=totals), taken=1))

    @property
    def slot(self) -> int:
        """Of the engine."""
        slot = self.state.slot_of(A)
        assert slot is not None
        return slot

    @property
    def now(self) -> State:
        """The engine's."""
        return State(self.state.state[self.slot])

    @property
    def told(self) -> dict[str, Any]:
        """What the admin API tells of it."""
        [told] = self.fleet.describe()
        return told

    def value(self, name: str, **labels: str) -> float | None:
        """One sample."""
        return self.metrics.registry.get_sample_value(name, {"endpoint": A} | labels)


@pytest.fixture
def house() -> House:
    """With an engine that takes traffic."""
    made = House()
    made.list_model()
    assert made.now is State.READY
    return made


# -- load


def test_pushed_figures_are_the_engines_figures(house: House) -> None:
    """As if they were scraped."""
    house.push(running=3, waiting=2, kv_used=0.5, kv_capacity_tokens=65_536)
    told = house.told
    assert (told["running"], told["waiting"], told["kv_used"]) == (3, 2, 0.5)
    assert told["kv_capacity_tokens"] == 65_536
    assert (told["source"], told["engine_phase"]) == ("push", "serving")


def test_an_engines_batch_is_known_while_it_pushes(house: House) -> None:
    """For the pool's places; then by the profile again."""
    told = Pushed("a1", 1, "serving", EngineFigures(running=0, waiting=0), most_running=64)
    house.take(Heard(A, told, taken=1))
    assert house.state.most_running[house.slot] == 64
    house.take(FellSilent(A))
    assert house.state.most_running[house.slot] == 0


def test_an_idle_engine_is_not_stale_between_two_heartbeats(house: House) -> None:
    """Silent for seconds, since nothing changes; a scraped one would be. But not for ever."""
    house.push()
    house.now_s += 2.5
    assert house.told["source"] == "push"
    assert house.value("pointsman_endpoint_stale") == 0
    house.now_s += 2.5
    assert house.told["source"] == "none"
    assert house.value("pointsman_endpoint_stale") == 1


def test_where_figures_come_from_is_shown(house: House) -> None:
    """By endpoint: pushed, scraped once it is silent, and none without either."""
    shown = []
    for message in (None, Heard(A, Pushed("a1", 1, "serving", EngineFigures(running=1, waiting=0)))):
        house.take(*[message] if message else [])
        shown.append([house.value("pointsman_endpoint_figures_source", source=s) for s in ("push", "scrape", "none")])
    house.take(FellSilent(A), Scraped(A, EngineFigures(running=1, waiting=0)))
    shown.append([house.value("pointsman_endpoint_figures_source", source=s) for s in ("push", "scrape", "none")])
    assert shown == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_pages_read_while_figures_are_pushed_count_as_read_and_for_nothing_else(house: House) -> None:
    """They are a moment older, and counters that alternate would look like restarts."""
    house.push(running=3, prefix_queries_tokens=100)
    house.take(Scraped(A, EngineFigures(running=1, waiting=0, prefix_queries_tokens=90, started_at_s=5.0), spare=True))
    assert house.told["running"] == 3
    assert house.metrics.registry.get_sample_value("pointsman_scrapes_total", {"result": "ok"}) == 1
    assert house.value("pointsman_endpoint_restarts_total") is None


def test_messages_are_counted_by_what_became_of_them(house: House) -> None:
    """Also when none of them was any good."""
    house.take(Heard(A, None, taken=0, lost=3, malformed=2, ignored=1, deaf=4))
    results = ("taken", "lost", "malformed", "ignored", "deaf")
    assert [house.value("pointsman_pushes_total", result=r) for r in results] == [None, 3, 2, 1, 4]


def test_without_senses_nobody_pushes(house: House) -> None:
    """New ones have to hear it first."""
    house.push()
    house.inbox.forget_all()
    assert house.told["engine_phase"] is None
    assert house.state.silence_s[house.slot] == 0


def test_what_a_plugin_could_not_take_is_counted_once(house: House) -> None:
    """It tells of all since its start, again and again; another run begins anew."""
    for run, troubles in (("a1", 0), ("a1", 3), ("a1", 3), ("a1", 5), ("b2", 2)):
        house.take(Heard(A, Pushed(run, 1, "serving", EngineFigures(), troubles=troubles), taken=1))
    house.take(FellSilent(A), Heard(A, Pushed("b2", 2, "serving", EngineFigures(), troubles=2), taken=1))
    assert house.value("pointsman_push_troubles_total") == 5 + 2
    assert house.told["push_troubles"] == 2


def test_troubles_of_one_that_is_gone_are_not_kept(house: House) -> None:
    """Nobody would forget them."""
    house.take(Heard("10.0.0.9:1", Pushed("a1", 1, "serving", EngineFigures(), troubles=1), taken=1))
    assert house.inbox._troubles == {}


def test_what_requests_need_is_shown(house: House) -> None:
    """Of those that ended since the message before."""
    pushed = Pushed(
        "a1", 1, "serving", EngineFigures(), first_tokens=3, left_out=4, largest_request_tokens=100,
        kv_bytes_per_token=2.5,
    )  # fmt: skip
    house.take(Heard(A, pushed, taken=1))
    told = house.told
    assert (told["first_tokens"], told["requests_not_listed"]) == (3, 4)
    assert (told["largest_request_tokens"], told["kv_bytes_per_token"], told["largest_request_bytes"]) == (
        100,
        2.5,
        250,
    )


def test_requests_that_have_ended_are_passed_on_and_not_kept(house: House) -> None:
    """To whoever settles them."""
    told: list[FinishedRequest] = []
    house.inbox.on_finished = told.extend
    one = FinishedRequest("chatcmpl-a", "stop", 5, 3, 0, 1.0, 0.0)
    house.take(Heard(A, Pushed("a1", 1, "serving", EngineFigures(), finished=(one,)), taken=1))
    assert told == [one]
    assert house.fleet._members[A].pushed == Pushed("a1", 1, "serving", EngineFigures())


def test_unknown_endpoints_are_ignored(house: House) -> None:
    """A message may be under way when its endpoint goes."""
    house.take(Heard("10.0.0.9:1", Pushed("a1", 1, "serving", EngineFigures())), FellSilent("10.0.0.9:1"))
    assert len(house.fleet.describe()) == 1


# -- the end


def test_an_engine_that_says_it_drains_gets_nothing_more(house: House) -> None:
    """Whatever probes find: it lists its model to the end."""
    house.push("draining")
    house.list_model()
    assert house.now is State.DRAINING
    assert house.told["drained_by"] == ["engine"]


def test_an_operator_cannot_take_an_engines_word_back(house: House) -> None:
    """But the engine can, and the operator's own word stays."""
    house.push("draining")
    house.fleet.observe(A, Evidence.UNDRAIN)
    assert house.now is State.DRAINING
    house.fleet.observe(A, Evidence.DRAIN)
    house.push("serving")
    assert (house.now, house.told["drained_by"]) == (State.DRAINING, ["operator"])


def test_a_drained_engine_serves_again_after_its_restart(house: House) -> None:
    """Seen by its refusal, or by the start time on its page, with or without the plugin."""
    house.push("draining")
    house.take(FellSilent(A))
    assert house.now is State.DRAINING
    house.refuse()
    assert (house.now, house.told["drained_by"]) == (State.STARTING, [])
    house.list_model()
    house.push("draining")
    house.take(FellSilent(A), Scraped(A, EngineFigures(running=0, waiting=0, started_at_s=9.0)))
    house.list_model()
    assert house.now is State.READY


def test_one_that_drains_again_after_a_restart_is_held(house: House) -> None:
    """The restart is seen with the very message that says it."""
    house.push()
    house.push("draining", started_at_s=9.0)
    assert house.now is State.DRAINING


# -- the beginning


def test_an_engine_that_says_it_loads_is_loading_though_its_port_refuses(house: House) -> None:
    """A new process: no more dead, not yet alive; no state changes with each refusal."""
    house.refuse()
    assert house.now is State.UNHEALTHY
    house.push("loading", running=None, waiting=None)
    house.refuse()
    assert (house.now, house.told["state_reason"]) == (State.LOADING, "says that it loads")
    assert house.value("pointsman_endpoint_transitions_total", to="loading") == 1
    assert house.value("pointsman_endpoint_transitions_total", to="starting") is None


def test_one_that_loads_and_falls_silent_is_gone_again(house: House) -> None:
    """It died while it loaded."""
    house.push("loading")
    house.take(FellSilent(A))
    house.refuse()
    assert house.now is State.STARTING


def test_an_engine_that_has_loaded_serves_once_it_answers(house: House) -> None:
    """Its word alone opens no port."""
    house.push("loading")
    house.push("serving")
    assert house.now is State.LOADING
    house.list_model()
    assert house.now is State.READY


def test_what_an_engine_has_served_counts_as_warm_up() -> None:
    """Whoever sent it: part of it raises the share, all of it ends the warm-up."""
    house = House("{warm_up_requests: 10}")
    house.list_model()
    assert (house.now, house.state.traffic_share[house.slot]) == (State.WARMING, 0.1)
    house.push(first_tokens=5)
    assert (house.now, house.state.traffic_share[house.slot]) == (State.WARMING, 0.5)
    house.push(first_tokens=12)
    assert (house.now, house.state.traffic_share[house.slot]) == (State.READY, 1.0)


def test_an_engine_that_has_served_for_long_is_not_warmed_up_again() -> None:
    """We have restarted, it has not."""
    house = House("{warm_up_requests: 10}")
    house.push(first_tokens=1_000)
    house.list_model()
    assert house.now is State.READY


def test_a_restarted_engine_warms_up_anew() -> None:
    """What the one before has served counts no more."""
    house = House("{warm_up_requests: 10}")
    house.push(first_tokens=1_000)
    house.list_model()
    house.refuse()
    house.push("loading")
    house.push("serving", first_tokens=0, started_at_s=9.0)
    house.list_model()
    assert house.now is State.WARMING


# -- the KV cache


def test_a_cache_that_fills_up_is_foreseen_shown_and_logged_once(house: House) -> None:
    """From pushes and scrapes alike."""
    with capture_logs() as logs:
        for step in range(100):
            house.now_s += 0.2
            used = 0.4 + 0.004 * step
            if step % 2:
                house.push(kv_used=used, kv_peak=used)
            else:
                house.take(Scraped(A, EngineFigures(running=1, waiting=0, kv_used=used, started_at_s=5.0)))
    assert [(log["endpoint"], log["used"]) for log in logs if log["event"] == "KV cache fills up"] == [(A, 0.752)]
    assert house.value("pointsman_endpoint_kv_alarm") == 1
    assert house.value("pointsman_endpoint_kv_full_in_seconds") == pytest.approx((1 - 0.796) / 0.02, rel=0.1)
    assert house.told["kv_alarm"] is True


def test_a_restart_empties_the_forecast_too(house: House) -> None:
    """Another process, an empty cache."""
    for step in range(60):
        house.now_s += 0.2
        house.push(kv_used=0.01 * step, kv_peak=0.01 * step)
    assert house.told["kv_full_in_s"] < math.inf
    house.push(kv_used=0.1, kv_peak=0.1, started_at_s=9.0)
    assert (house.told["kv_full_in_s"], house.told["kv_alarm"]) == (math.inf, False)


def fill_up(house: House) -> None:
    """Until the alarm is on."""
    for step in range(60):
        house.now_s += 0.2
        house.push(kv_used=0.9 + 0.001 * step, kv_peak=0.9 + 0.001 * step)
    assert house.value("pointsman_endpoint_kv_alarm") == 1
    assert house.told["kv_full_in_s"] < math.inf


def test_a_dead_engines_cache_fills_up_no_more(house: House) -> None:
    """Neither when it is no longer heard of; late figures go on where they were, and log nothing again."""
    fill_up(house)
    house.fleet.tick()
    assert house.told["kv_alarm"] is True
    house.now_s += 30
    house.fleet.tick()
    assert (house.told["kv_full_in_s"], house.told["kv_alarm"]) == (math.inf, False)
    with capture_logs() as logs:
        house.push(kv_used=0.96, kv_peak=0.96)
    assert house.told["kv_alarm"] is True
    assert [log for log in logs if log["event"] == "KV cache fills up"] == []


@pytest.mark.parametrize("gone", [True, False])
def test_a_forecast_ends_with_its_engine(house: House, *, gone: bool) -> None:
    """It has left, though a request still runs there; or another one is in its place and has not told yet."""
    fill_up(house)
    if gone:
        house.fleet.set_endpoints("m", [])
    else:
        house.take(Scraped(A, EngineFigures(running=0, waiting=0, started_at_s=9.0)))
    assert (house.told["kv_full_in_s"], house.told["kv_alarm"]) == (math.inf, False)
