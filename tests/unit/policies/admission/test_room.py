"""Which endpoints have room, by our own accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from policies.admission.class_use import ClassUse
from policies.admission.queue import ClassSpec
from policies.admission.room import RoomSpec, cache_holds, class_has_room, with_places, with_room
from policies.fleet_state import FleetState
from policies.placement.view import View
from policies.types import Reservation

Views = Callable[..., View]
ALL, NONE = [True] * 4, [False] * 4


def prefilling(view: View, slot: int, tokens: int) -> None:
    """So much is still to be prefilled there, at 1,000 tokens a second."""
    view.ledger.profile = replace(
        view.ledger.profile, prefill_tokens_per_s=1_000, attention_per_token=0, request_tokens=0
    )
    view.ledger.committed(Reservation(slot, 1, tokens, tokens), 0.0)


def test_an_idle_fleet_has_room(view_of: Views) -> None:
    """Everywhere."""
    assert with_room(view_of(), RoomSpec()).tolist() == ALL


def test_an_endpoint_with_a_second_of_prefill_to_do_has_none_until_it_is_done(view_of: Views) -> None:
    """The work is done with time, though nobody tells."""
    view = view_of()
    prefilling(view, 1, 1_500)
    assert with_room(view, RoomSpec(busy_s=1.0)).tolist() == [True, False, True, True]
    later = view_of(now_s=0.6)
    later.ledger = view.ledger
    assert with_room(later, RoomSpec(busy_s=1.0)).tolist() == ALL


def test_a_full_batch_has_no_room(view_of: Views, state: FleetState) -> None:
    """As many requests as the batch has places, whoever sent them."""
    view = view_of()
    view.ledger.profile = replace(view.ledger.profile, max_num_seqs=3)
    state.in_flight[0], state.in_flight[1], state.foreign[2] = 3, 2, 3
    assert with_room(view, RoomSpec()).tolist() == [False, True, False, True]
    assert with_room(view, RoomSpec(endpoint_requests=2)).tolist() == [False, False, False, True]


def test_a_busy_endpoint_has_a_place_but_no_room(view_of: Views, state: FleetState) -> None:
    """What it has to prefill keeps no place from anybody; a full batch does."""
    view = view_of()
    prefilling(view, 1, 1_500)
    state.in_flight[0] = 2
    assert with_places(view, RoomSpec(endpoint_requests=2)).tolist() == [False, True, True, True]
    assert with_room(view, RoomSpec(endpoint_requests=2)).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("running", "room"), [(0, ALL), (1, [False, True, True, True])])
def test_an_endpoint_that_gets_a_share_has_a_share_of_the_room(
    view_of: Views, state: FleetState, running: int, room: list[bool]
) -> None:
    """One that is degraded or warms up is not filled like any other just because requests wait."""
    state.traffic_share[0] = 0.1
    state.in_flight[:4] = running
    assert with_room(view_of(), RoomSpec(endpoint_requests=10)).tolist() == room


def test_a_cache_about_to_be_full_has_no_room(view_of: Views, state: FleetState) -> None:
    """By its trend; but not one that nothing runs on, whose figures must be old."""
    state.kv_full_in_s[:4] = [1.0, 5.0, 1.0, np.inf]
    state.in_flight[:3] = [1, 1, 0]
    assert with_room(view_of(), RoomSpec(kv_full_in_s=2.0)).tolist() == [False, True, True, True]


def test_a_prompt_needs_a_place_in_the_cache(view_of: Views, state: FleetState) -> None:
    """Beside those that are there; an empty cache takes any, or a long one would wait for ever."""
    state.in_flight[:3] = 1
    state.in_flight_prompt_tokens[:3] = [2_000, 9_500, 9_000]
    assert cache_holds(view_of(), 1_000).tolist() == [True, False, True, True]
    many = cache_holds(view_of(), np.array([[500.0], [1_000.0], [50_000.0]]))
    assert many.tolist() == [[True] * 4, [True, False, True, True], [False, False, False, True]]


def test_a_class_has_no_more_than_it_may(view_of: Views) -> None:
    """Requests, and tokens of the cache; where it has nothing yet, one of any length."""
    use = ClassUse()
    for slot, tokens in ((0, 100), (0, 100), (1, 2_900)):
        use.book("batch", slot, 1, tokens)
    few = ClassSpec("batch", endpoint_requests=2)
    assert class_has_room(view_of(), few, use, 1_000).tolist() == [False, True, True, True]
    small = ClassSpec("batch", endpoint_kv_share=0.3)
    assert class_has_room(view_of(), small, use, 1_000).tolist() == [True, False, True, True]
    assert class_has_room(view_of(), small, use, np.array([[50.0], [9_000.0]])).tolist() == [
        [True, True, True, True],
        [False, False, True, True],
    ]
    assert class_has_room(view_of(), replace(small, name="other"), use, 1_000).tolist() == ALL


def test_what_a_class_has_is_counted_by_slot() -> None:
    """High slots too; classes that are no more are let go of once nothing of theirs runs."""
    use, slots = ClassUse(), np.array([0, 40], np.intp)
    use.book("a", 40, 1, 70)
    use.book("b", 0, 1, 5)
    use.book(None, 0, 1, 5)
    assert use.requests("a", slots).tolist() == [0, 1]
    assert use.tokens("a", slots).tolist() == [0, 70]
    use.keep({"b"})
    assert use.requests("a", slots).tolist() == [0, 1]
    use.book("a", 40, -1, -70)
    use.keep({"b"})
    assert use.requests("a", slots).tolist() == [0, 0]
    assert use.requests("b", slots).tolist() == [1, 0]
    assert use.requests("b", np.empty(0, np.intp)).tolist() == []


@pytest.mark.parametrize(
    ("spec", "limited"), [({}, False), ({"endpoint_requests": 3}, True), ({"endpoint_kv_share": 0.5}, True)]
)
def test_a_class_without_limits_costs_no_look(spec: dict[str, float], limited: bool) -> None:  # noqa: FBT001 - a case
    """It says so itself."""
    assert ClassSpec("c", **spec).limited is limited  # type: ignore[arg-type]
