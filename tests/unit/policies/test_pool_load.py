"""The load of a pool: what counts as asked for, and what as there."""

from __future__ import annotations

import pytest

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import Profile
from policies.placement.rotation import RoundRobinSpec
from policies.pool_load import PoolLoad, pool_load


def house(*states: State) -> tuple[FleetState, Placement]:
    """A pool of engines in these states, each of which runs ten at once; known to Envoy."""
    state = FleetState()
    slots = [state.add(f"10.0.0.{n}:80") for n in range(len(states))]
    for slot, one in zip(slots, states, strict=True):
        state.state[slot], state.routable[slot] = one, True
    ledger = Ledger(Profile(max_num_seqs=10))
    placement = Placement("p", RoundRobinSpec().build("p"), PrefixIndex(1_000), ledger)
    placement.set_members(slots)
    return state, placement


def test_requests_in_flight_and_waiting_are_set_against_the_places_in_service() -> None:
    """Warming engines are in service; starting and unhealthy ones are not, and nor is one that Envoy does not know."""
    state, placement = house(State.READY, State.WARMING, State.STARTING, State.UNHEALTHY, State.READY)
    state.routable[4] = False
    state.in_flight[:2] = 4, 3
    load = pool_load(placement, state, waiting=8)
    assert load == PoolLoad(requests=15, places=20.0, places_of_one=10.0)
    assert load.ratio == pytest.approx(0.75)


def test_what_runs_on_an_endpoint_that_drains_needs_no_place_elsewhere() -> None:
    """Else scaling in would look like load. On one that has just fallen ill it may: its requests are tried again."""
    state, placement = house(State.READY, State.DRAINING, State.UNHEALTHY)
    state.in_flight[:3] = 1, 9, 2
    assert pool_load(placement, state, 0) == PoolLoad(3, 10.0, 10.0)


def test_an_engine_that_tells_the_size_of_its_batch_is_believed() -> None:
    """Before the pool's profile."""
    state, placement = house(State.READY, State.READY)
    state.most_running[0] = 64
    assert pool_load(placement, state, 0).places == 74.0


def test_without_an_endpoint_the_ratio_is_as_if_there_were_one() -> None:
    """A rule that reads it must get a number, and see that somebody is needed."""
    state, placement = house(State.STARTING)
    assert pool_load(placement, state, 0).ratio == 0.0
    assert pool_load(placement, state, 25).ratio == pytest.approx(2.5)


def test_others_endpoints_are_not_counted() -> None:
    """Only the pool's members."""
    state, placement = house(State.READY)
    stranger = state.add("10.9.9.9:80")
    state.state[stranger], state.routable[stranger], state.in_flight[stranger] = State.READY, True, 50
    assert pool_load(placement, state, 0) == PoolLoad(0, 10.0, 10.0)
