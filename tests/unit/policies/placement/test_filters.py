"""Filters remove, and only for their own reason."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement import filters
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.view import View
from policies.placement.weighted import ScorerWeight, Weighted, WeightedSpec
from policies.types import Decision, InferenceRequest, Kind, Mask

Views = Callable[..., View]


def test_only_ready_and_acknowledged_endpoints_take_traffic(state: FleetState, view_of: Views) -> None:
    """Draining, unhealthy, starting and unacknowledged ones are out."""
    state.state[0] = State.DRAINING
    state.state[1] = State.UNHEALTHY
    state.routable[2] = False
    assert filters.ready(view_of()).tolist() == [False, False, False, True]


def test_a_degraded_endpoint_is_a_candidate_now_and_then(state: FleetState, view_of: Views) -> None:
    """By its share; and always where it is all there is."""
    state.state[0], state.traffic_share[0] = State.DEGRADED, 0.1
    view = view_of()
    among = sum(bool(mask[0]) for mask in (filters.ready(view) for _ in range(1_000)))
    assert 50 < among < 150
    state.state[1:4] = State.UNHEALTHY
    assert all(filters.ready(view)[0] for _ in range(100))


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
    assert filters.subset(view_of()) is None


def test_busy_endpoints_are_left_alone_while_there_are_others(state: FleetState, view_of: Views) -> None:
    """By ours and others' requests; those of others only as long as the figures are fresh."""
    state.in_flight[:4] = [9, 8, 10, 0]
    state.foreign[1] = 2
    assert filters.busy(view_of()) is None
    state.busy_above = 9.0
    assert mask_of(filters.busy(view_of())) == [True, False, False, True]
    assert mask_of(filters.busy(view_of(now_s=60.0))) == [True, True, False, True]


@pytest.mark.parametrize("refuses", [False, True])
def test_where_all_are_busy_the_config_decides(state: FleetState, view_of: Views, *, refuses: bool) -> None:
    """Nobody is left, or everybody."""
    state.in_flight[:4] = 10
    state.busy_above, state.refuses_when_busy = 9.0, refuses
    assert mask_of(filters.busy(view_of())) == [not refuses] * 4


def test_an_avoided_zone_takes_what_no_other_can(state: FleetState, view_of: Views) -> None:
    """As long as another zone has a candidate it gets nothing; and where none has, all there is."""
    assert filters.zone(view_of()) is None
    state.avoids_zones = True
    state.avoided[:2] = True
    assert mask_of(filters.zone(view_of())) == [False, False, True, True]
    state.avoided[:4] = True
    assert mask_of(filters.zone(view_of())) == [True] * 4


def mask_of(mask: Mask | None) -> list[bool]:
    """What a filter keeps of four."""
    return [True] * 4 if mask is None else [bool(kept) for kept in mask]


def test_busy_and_zone_come_last_and_show_in_the_explanation(state: FleetState, view_of: Views) -> None:
    """So that they see only who could take the request, wherever a policy names them."""
    policy = Weighted(WeightedSpec(scorers=(ScorerWeight(name="least_request", weight=1),)))
    placement = Placement("pool", policy, PrefixIndex(1_000), filters=("zone", "excluded"))
    placement.set_members(range(4))
    state.avoids_zones, state.busy_above = True, 9.0
    state.avoided[:3], state.in_flight[:4] = True, [10, 0, 0, 0]
    request = view_of(excluded=frozenset({"10.0.0.3:80"})).request
    decision = placement.choose(request, state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    assert set(decision.addresses) == {"10.0.0.1:80", "10.0.0.2:80"}  # the zone that is not avoided has nobody
    assert decision.filtered == (("excluded", ("10.0.0.3:80",)), ("busy", ("10.0.0.0:80",)))
    free = placement.choose(view_of().request, state, 0.0, Random(1))
    assert isinstance(free, Decision)
    assert free.addresses == ("10.0.0.3:80",)
    assert free.filtered[-1] == ("zone", ("10.0.0.1:80", "10.0.0.2:80"))


_SLOT = st.integers(0, 3)
_CHANGE = st.one_of(
    st.tuples(st.just("state"), _SLOT, st.sampled_from([State.READY, State.DRAINING, State.UNHEALTHY, State.WARMING])),
    st.tuples(st.just("routable"), _SLOT, st.booleans()),
    st.tuples(st.just("models"), _SLOT, st.sampled_from(["m", "other"])),
    st.tuples(st.just("window"), _SLOT, st.sampled_from([500, 1_500, np.inf])),
    st.tuples(st.just("members"), _SLOT, st.booleans()),
    st.tuples(st.just("load"), _SLOT, st.sampled_from([0, 20])),
    st.tuples(st.just("busy"), _SLOT, st.sampled_from([10.0, np.inf])),
    st.tuples(st.just("zone"), _SLOT, st.booleans()),
    st.tuples(st.just("moved in"), _SLOT, st.booleans()),
)
_ASKED = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["m", "m", "other"]),
        "input_tokens": st.sampled_from([100, 1_000, 2_000]),
        "excluded": st.sampled_from([frozenset(), frozenset({"10.0.0.1:80"})]),
        "subset": st.sampled_from([None, None, ("10.0.0.2",)]),
        "may_wait": st.booleans(),
    }
)


def _four() -> FleetState:
    state = FleetState(stale_after_s=1.0)
    for number in range(4):
        slot = state.add(f"10.0.0.{number}:80")
        state.state[slot], state.routable[slot] = State.READY, True
        state.set_models(slot, frozenset({"m"}))
    return state


def _change(state: FleetState, placement: Placement, what: str, slot: int, to: object) -> None:
    if what == "models":
        state.set_models(slot, frozenset({str(to)}))
    elif what == "members":
        there = set(placement.members.tolist())
        placement.set_members(there | {slot} if to else there - {slot})
    elif what == "busy":
        state.busy_above = float(str(to))
    elif what == "zone":
        state.avoided[slot], state.avoids_zones = to, bool(to)
    elif what == "moved in":
        state.remove(slot)
        state.add(f"10.0.1.{slot}:80")
    else:
        columns = {"state": state.state, "routable": state.routable, "window": state.context_tokens}
        columns.get(what, state.in_flight)[slot] = to


@given(st.lists(st.tuples(_CHANGE, _ASKED), max_size=30))
def test_a_verdict_that_is_kept_is_the_one_that_would_be_found(
    steps: list[tuple[tuple[str, int, object], dict[str, object]]],
) -> None:
    """Whatever changes between two requests: who is left, who was left out by what, and the chances are the same."""
    state = _four()
    policy = Weighted(WeightedSpec())
    placement = Placement("pool", policy, PrefixIndex(1_000), filters=("excluded", "context"))
    placement.set_members(range(4))
    for number, (change, asked) in enumerate(steps):
        _change(state, placement, *change)
        request = InferenceRequest(Kind.CHAT, asked_model="m", **asked)  # type: ignore[arg-type]
        kept, filtered = placement.filter(placement.view(request, state, 0.0, Random(number)))
        order = ("ready", "model", "subset", "excluded", "context", "busy", "zone")
        anew = [(name, filters.FILTERS[name]) for name in order]
        found, by_whom = filters.sift(placement.view(request, state, 0.0, Random(number)), anew)
        assert (kept.slots.tolist(), filtered) == (found.slots.tolist(), by_whom)
        assert kept.rng.random() == found.rng.random()
