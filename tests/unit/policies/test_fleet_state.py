"""FleetState: slots with generations, exact counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.fleet_state import FleetState, TooManyEndpoints
from policies.types import Reservation


def test_a_slot_with_requests_on_it_is_not_given_away() -> None:
    """While anything is in flight the slot keeps its address, so a late release books to the right endpoint."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    reservation = state.reserve(slot, prompt_tokens=10, uncached_tokens=5)
    assert not state.remove(slot)
    assert state.add("10.0.0.2:80") != slot
    state.release(reservation)
    assert state.remove(slot)
    assert state.add("10.0.0.3:80") == slot


def test_a_reused_slot_starts_clean_in_a_new_generation() -> None:
    """Nothing the earlier endpoint reported survives, and its generation is over."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    state.waiting[slot] = 7
    state.set_models(slot, frozenset({"m"}))
    generation = state.generation[slot]
    state.remove(slot)
    again = state.add("10.0.0.2:80")
    assert again == slot
    assert state.waiting[slot] == 0
    assert state.generation[slot] == generation + 1
    assert not state.serving("m")[slot]


def test_releasing_into_another_generation_is_an_error() -> None:
    """A release that would book to a stranger is a fault of ours and says so."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    with pytest.raises(AssertionError, match="reused"):
        state.release(Reservation(slot, int(state.generation[slot]) - 1, 1, 1))


def test_the_bound_on_endpoints_holds() -> None:
    """One more than allowed is refused by name of the setting."""
    state = FleetState(max_endpoints=2)
    state.add("10.0.0.1:80")
    state.add("10.0.0.2:80")
    with pytest.raises(TooManyEndpoints, match=r"limits\.endpoints"):
        state.add("10.0.0.3:80")


def test_moving_takes_the_load_along() -> None:
    """The endpoint that really serves carries the request, with its own share of uncached tokens."""
    state = FleetState()
    first, second = state.add("10.0.0.1:80"), state.add("10.0.0.2:80")
    moved = state.move(state.reserve(first, prompt_tokens=100, uncached_tokens=40), second, uncached_tokens=100)
    assert state.in_flight[first] == 0
    assert state.in_flight_uncached_tokens[second] == 100
    state.release(moved)
    assert state.in_flight_prompt_tokens.sum() == 0


def test_a_figure_is_stale_when_never_seen_or_too_old() -> None:
    """Staleness is per endpoint and by the time of the scrape."""
    state = FleetState(stale_after_s=0.6)
    fresh, old, never = (state.add(f"10.0.0.{n}:80") for n in range(3))
    state.observed_at_s[fresh], state.observed_at_s[old] = 9.5, 9.0
    assert state.stale(np.array([fresh, old, never]), 10.0).tolist() == [False, True, True]


class SlotMachine(RuleBasedStateMachine):
    """Random additions, removals, reservations and releases, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = FleetState(initial_slots=2)
        self.taken: list[tuple[str, Reservation]] = []

    @rule(number=st.integers(0, 9))
    def add(self, number: int) -> None:
        """List an endpoint."""
        self.state.add(f"10.0.0.{number}:80")

    @precondition(lambda self: len(self.state))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Try to free a slot."""
        self.state.remove(data.draw(st.sampled_from(sorted(self.state))))

    @precondition(lambda self: len(self.state))
    @rule(data=st.data(), tokens=st.integers(0, 1000))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        """Book a request."""
        slot = data.draw(st.sampled_from(sorted(self.state)))
        address = self.state.addresses[slot]
        assert address is not None
        self.taken.append((address, self.state.reserve(slot, prompt_tokens=tokens, uncached_tokens=tokens // 2)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give one back."""
        entry = data.draw(st.sampled_from(self.taken))
        self.taken.remove(entry)
        self.state.release(entry[1])

    @invariant()
    def counts_are_exact(self) -> None:
        """Every endpoint carries exactly what is out on it, under its own address."""
        for slot in self.state:
            here = [r for address, r in self.taken if address == self.state.addresses[slot]]
            assert self.state.in_flight[slot] == len(here)
            assert self.state.in_flight_prompt_tokens[slot] == sum(r.prompt_tokens for r in here)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)


def test_others_requests_are_believed_slowly_and_their_end_soon() -> None:
    """Two hundred of another router's that have ended keep none of ours waiting."""
    state = FleetState()
    slot = state.add("10.0.0.1:8000")
    for tick in range(100):
        state.scraped(slot, waiting=192, running=8, kv_used=0.5, now_s=tick / 5)
    assert state.foreign[slot] == pytest.approx(200, rel=0.02)
    state.scraped(slot, waiting=0, running=0, kv_used=0, now_s=20)
    assert state.foreign[slot] == 0
    state.in_flight[slot] = 8
    for tick in range(15):
        state.scraped(slot, waiting=0, running=8, kv_used=0, now_s=20.2 + tick / 5)
    assert state.foreign[slot] == 0


def test_a_level_follows_its_figure_with_time() -> None:
    """The first scrape is believed whole; later ones by how long it is since the one before."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    state.scraped(slot, waiting=4, running=8, kv_used=0.5, now_s=10.0)
    assert (state.waiting_level[slot], state.kv_used_level[slot]) == (4, 0.5)
    state.scraped(slot, waiting=9, running=8, kv_used=0.5, now_s=15.0)
    assert state.waiting[slot] == 9
    assert state.waiting_level[slot] == pytest.approx(9 - 5 * math.exp(-1))


def test_our_own_counts_are_smoothed_by_the_same_measure() -> None:
    """So that their difference from the level is what has changed since."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    state.scraped(slot, waiting=0, running=0, kv_used=0, now_s=0.0)
    state.reserve(slot, prompt_tokens=100, uncached_tokens=100)
    assert (state.in_flight_level[slot], state.in_flight_prompt_tokens_level[slot]) == (0, 0)
    state.scraped(slot, waiting=0, running=1, kv_used=0, now_s=1e3)
    assert (state.in_flight_level[slot], state.in_flight_prompt_tokens_level[slot]) == pytest.approx((1, 100))


def test_the_last_minutes_first_bytes_count_most() -> None:
    """Five at once make a plain mean; a minute later they count 1/e beside a new one, in the five-minute mean more."""
    state = FleetState()
    slot = state.add("10.0.0.1:80")
    for ttft_s in (1.0, 2.0, 3.0):
        state.timed(slot, ttft_s, 100.0)
    assert state.ttft_1m_s[slot] == state.ttft_5m_s[slot] == pytest.approx(2.0)
    state.timed(slot, 0.0, 160.0)
    assert state.ttft_1m_s[slot] == pytest.approx(6 / (3 + math.e))
    assert state.ttft_5m_s[slot] == pytest.approx(6 / (3 + math.exp(0.2)))


def test_adapters_are_forgotten_with_the_endpoint() -> None:
    """Whoever gets the slot next runs none of them."""
    state = FleetState(max_endpoints=1)
    slot = state.add("10.0.0.1:80")
    state.running_adapters.put(slot, frozenset({"fr"}))
    assert state.running_adapters.having("fr", 1).tolist() == [True]
    state.remove(slot)
    assert state.running_adapters.having("fr", 1).tolist() == [False]


def test_what_only_we_make_sense_of_is_not_shown() -> None:
    """The admin API shows figures, not the weights behind them."""
    state = FleetState()
    shown = state.snapshot(state.add("10.0.0.1:80"))
    assert {"waiting", "ttft_1m_s", "weight"} <= set(shown)
    assert not {name for name in shown if name.endswith(("_level", "_weight"))}


def test_load_is_taken_from_the_columns_however_large_the_fleet_grows() -> None:
    """Requests, their prompt tokens and the KV capacity of some slots; and outside, counts are whole numbers."""
    state = FleetState(initial_slots=2)
    slots = [state.add(f"10.0.0.{number}:80") for number in range(9)]
    for slot in slots:
        state.reserve(slot, prompt_tokens=100 + slot, uncached_tokens=7)
        state.kv_capacity_tokens[slot] = 1_000 + slot
    assert state.load(np.array([0, 8])).tolist() == [[1, 1], [100, 108], [1_000, 1_008]]
    shown = state.snapshot(8)
    assert [repr(shown[name]) for name in ("in_flight", "in_flight_prompt_tokens")] == ["1", "108"]
