"""Scorers: higher is better, always within [0, 1], more load never helps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.fleet_state import FleetState
from policies.placement.scorers import (
    SCORERS,
    Windows,
    cost,
    expected_ttft_s,
    kv_usage,
    latency,
    lora_affinity,
    prefix_affinity,
    queue_depth,
    throughput_headroom,
    zone,
)
from policies.placement.view import View
from policies.types import Reservation

Views = Callable[..., View]
_LOADS = {
    "queue_depth": "waiting_level",
    "kv_usage": "kv_used_level",
    "in_flight_tokens": "in_flight_prompt_tokens",
    "least_request": "in_flight",
    "running_batch": "running_level",
    "throughput_headroom": "in_flight",
    "latency": "in_flight",
    "cost": "cost",
    "error_rate": "error_ewma",
}


def test_the_holder_of_the_longest_prefix_scores_highest(view_of: Views) -> None:
    """Affinity grows with the share of the prompt that is held, faster than in proportion."""
    scores = prefix_affinity(view_of((1_000, 500, 100, 0)), Windows())
    assert scores.tolist() == pytest.approx([1.0, 0.25, 0.01, 0.0])


def test_an_overloaded_holder_loses_its_affinity(state: FleetState, view_of: Views) -> None:
    """A hot prefix must spread: beyond its bound over the mean load the holder is one among others."""
    state.in_flight[:4] = [10, 10, 10, 10]
    assert prefix_affinity(view_of((1_000, 0, 0, 0)), Windows())[0] == 1.0
    state.in_flight[:4] = [30, 10, 10, 10]
    assert prefix_affinity(view_of((1_000, 0, 0, 0)), Windows())[0] == 0.0


def test_a_new_session_spills_before_a_running_one(state: FleetState, view_of: Views) -> None:
    """A holder of half the prompt is left at a load that a holder of all of it still carries."""
    state.in_flight[:4] = [18, 10, 10, 10]
    assert prefix_affinity(view_of((500, 0, 0, 0)), Windows())[0] == 0.0
    assert prefix_affinity(view_of((1_000, 0, 0, 0)), Windows())[0] == 1.0


def test_stale_figures_give_way_to_our_own(state: FleetState, view_of: Views) -> None:
    """An old scrape says empty, our own count says busy: busy it is. A fresh one is believed."""
    state.in_flight[:4] = [64, 0, 0, 0]
    state.in_flight_prompt_tokens[:4] = [10_000, 0, 0, 0]
    state.in_flight_level[:4] = state.in_flight[:4]
    assert queue_depth(view_of(now_s=0.5), Windows())[0] == 1.0
    assert queue_depth(view_of(now_s=5.0), Windows())[0] == 0.0
    assert kv_usage(view_of(now_s=5.0), Windows())[0] == 0.0


@pytest.mark.parametrize(("name", "column"), _LOADS.items())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(low=st.integers(0, 100), more=st.integers(0, 100))
def test_more_load_never_raises_a_score(
    name: str, column: str, low: int, more: int, state: FleetState, view_of: Views
) -> None:
    """Whatever the load, adding to it leaves the score or lowers it, within [0, 1]."""
    shares = column in {"kv_used_level", "error_ewma"}
    getattr(state, column)[:2] = [low / 200, (low + more) / 200] if shares else [low, low + more]
    scores = SCORERS[name](view_of(), Windows())
    assert scores[1] <= scores[0]
    assert np.all((scores >= 0) & (scores <= 1))


def test_what_was_sent_since_the_scrape_counts(state: FleetState, view_of: Views) -> None:
    """The level says 2 waiting; three more requests of 1,000 tokens are under way there, and two fewer elsewhere."""
    for slot in range(4):
        state.in_flight[slot] = 3
        state.scraped(slot, waiting=2, running=3, kv_used=0.2, now_s=1e3)
    state.in_flight[0], state.in_flight_prompt_tokens[0], state.in_flight[1] = 6, 3_000, 1
    view = view_of(now_s=1e3)
    assert view.waiting.tolist() == [5, 0, 2, 2]
    assert view.running.tolist() == [6, 1, 3, 3]
    assert view.kv_used.tolist() == pytest.approx([0.5, 0.2, 0.2, 0.2])


def test_the_faster_endpoint_has_more_headroom(view_of: Views) -> None:
    """Twice the learned rate, twice the headroom, until its backlog is the longer one."""
    view = view_of()
    prior = view.ledger.profile.prefill_tokens_per_s
    for _ in range(20):
        for slot, work in enumerate((2_000, 1_000, 1_000, 1_000)):
            view.ledger.timed(Reservation(slot, 1, 0, 0, work=work * prior), 1_000.0)
    scores = throughput_headroom(view, Windows())
    assert scores.tolist() == pytest.approx([1, 0.5, 0.5, 0.5], abs=0.01)
    view.ledger.committed(Reservation(0, 1, 200_000, 200_000), 0.0)
    assert throughput_headroom(view, Windows())[0] < 0.5


def test_latency_is_the_last_minutes_times_the_requests_there(state: FleetState, view_of: Views) -> None:
    """A third of the time, but three requests under way: level with one that is idle."""
    for slot, ttft_s in enumerate((0.5, 1.5, 1.5, 1.5)):
        for _ in range(10_000):
            state.timed(slot, ttft_s, 0.0)
    assert latency(view_of(), Windows()).tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3], abs=0.001)
    state.in_flight[0] = 2
    assert latency(view_of(), Windows()).tolist() == pytest.approx([1, 1, 1, 1], abs=0.001)


def test_a_slow_past_fades_for_want_of_news(state: FleetState, view_of: Views) -> None:
    """Minutes without a request: the longer mean takes over, in the end the fastest one's: it is tried again."""
    for _ in range(20):
        state.timed(0, 10.0, 0.0)
        state.timed(1, 1.0, 0.0)
    at_once, later, an_hour = (expected_ttft_s(view_of(now_s=now_s))[0] for now_s in (0.0, 600.0, 3_600.0))
    assert at_once > later > an_hour
    assert an_hour == pytest.approx(1.0, abs=0.01)


def test_a_short_minute_leads_a_long_past(state: FleetState, view_of: Views) -> None:
    """Half an hour at one second, then a minute at five: five it is, nearly."""
    for second in range(1_800):
        state.timed(0, 1.0, float(second))
    for second in range(1_800, 1_920):
        state.timed(0, 5.0, float(second))
    assert expected_ttft_s(view_of(now_s=1_920.0))[0] > 4.2


def test_another_zone_and_a_dear_endpoint_score_less(state: FleetState, view_of: Views) -> None:
    """0 for another zone; the saving against the dearest; nothing to choose where nobody costs."""
    state.remote[1] = True
    assert zone(view_of(), Windows()).tolist() == [1, 0, 1, 1]
    assert cost(view_of(), Windows()).tolist() == [1, 1, 1, 1]
    state.cost[:4] = [4, 2, 1, 0]
    assert cost(view_of(), Windows()).tolist() == [0, 0.5, 0.75, 1]


def test_an_adapter_goes_where_it_runs(state: FleetState, view_of: Views) -> None:
    """Runs, waits, has room, is full; a base model does not care."""
    assert lora_affinity(view_of(), Windows()).tolist() == [1, 1, 1, 1]
    for slot, running, waiting in (
        (0, {"fr", "de"}, ()),
        (1, {"de", "es"}, {"fr"}),
        (2, {"de"}, ()),
        (3, {"de", "es"}, ()),
    ):
        state.set_models(slot, frozenset({"m", "fr"}), frozenset({"fr"}))
        state.running_adapters.put(slot, frozenset(running))
        state.waiting_adapters.put(slot, frozenset(waiting))
        state.max_adapters[slot] = 2
    assert lora_affinity(view_of(model="fr"), Windows()).tolist() == [1, 0.8, 0.6, 0]
    assert lora_affinity(view_of(model="m"), Windows()).tolist() == [1, 1, 1, 1]


def test_room_for_an_adapter_is_assumed_until_told(state: FleetState, view_of: Views) -> None:
    """An engine says nothing of adapters before it has served one."""
    state.set_models(0, frozenset({"m", "fr"}), frozenset({"fr"}))
    assert lora_affinity(view_of(model="fr"), Windows())[0] == 0.6
