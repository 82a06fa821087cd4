"""Scorers: higher is better, always within [0, 1], more load never helps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.fleet_state import FleetState
from policies.placement.scorers import SCORERS, Windows, kv_usage, prefix_affinity, queue_depth
from policies.placement.view import View

Views = Callable[..., View]
_LOADS = {
    "queue_depth": "waiting",
    "kv_usage": "kv_used",
    "in_flight_tokens": "in_flight_prompt_tokens",
    "least_request": "in_flight",
    "running_batch": "running",
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
    """An old scrape says empty, our own count says busy: busy it is."""
    state.in_flight[:4] = [64, 0, 0, 0]
    state.in_flight_prompt_tokens[:4] = [10_000, 0, 0, 0]
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
    getattr(state, column)[:2] = [low / 50, (low + more) / 50] if column == "kv_used" else [low, low + more]
    scores = SCORERS[name](view_of(), Windows())
    assert scores[1] <= scores[0]
    assert np.all((scores >= 0) & (scores <= 1))
