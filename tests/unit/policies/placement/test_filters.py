"""Filters remove, and only for their own reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement import filters
from policies.placement.view import View

Views = Callable[..., View]


def test_only_ready_and_acknowledged_endpoints_take_traffic(state: FleetState, view_of: Views) -> None:
    """Draining, unhealthy, starting and unacknowledged ones are out."""
    state.state[0] = State.DRAINING
    state.state[1] = State.UNHEALTHY
    state.routable[2] = False
    assert filters.ready(view_of()).tolist() == [False, False, False, True]


def test_an_endpoint_must_list_the_model(state: FleetState, view_of: Views) -> None:
    """An engine that does not serve the name would answer 404."""
    state.set_models(2, frozenset({"other"}))
    assert filters.model(view_of()).tolist() == [True, True, False, True]


def test_excluded_addresses_are_left_out(view_of: Views) -> None:
    """By address, whatever their score."""
    assert filters.excluded(view_of(excluded=frozenset({"10.0.0.1:80"}))).tolist() == [True, False, True, True]


def test_a_prompt_goes_where_its_context_fits(state: FleetState, view_of: Views) -> None:
    """Windows smaller than the prompt are out; an unknown window counts as large enough."""
    state.context_tokens[:4] = [500, 2_000, 999, np.inf]
    assert filters.context(view_of()).tolist() == [False, True, False, True]


def test_when_no_window_fits_the_largest_stay_and_the_engine_judges(state: FleetState, view_of: Views) -> None:
    """Our count is an estimate; the engine answers with the exact one."""
    state.context_tokens[:4] = [500, 800, 800, 100]
    assert filters.context(view_of()).tolist() == [False, True, True, False]
    assert filters.exceeds_context(view_of())


def test_a_subset_allows_by_address_or_by_host(view_of: Views) -> None:
    """`IP:port` means that endpoint, `IP` every port of it; an empty subset allows nobody."""
    assert filters.subset(view_of(subset=("10.0.0.1:80", "10.0.0.3"))).tolist() == [False, True, False, True]
    assert filters.subset(view_of(subset=("10.0.0.1:81",))).tolist() == [False] * 4
    assert filters.subset(view_of(subset=())).tolist() == [False] * 4
    assert filters.subset(view_of()).tolist() == [True] * 4
