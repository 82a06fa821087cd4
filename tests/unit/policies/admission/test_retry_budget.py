"""The retry budget, under a virtual clock: never more than a share, and never nothing."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.retry_budget import WINDOW_S, RetryBudget

SLICE_S = WINDOW_S / 20
ROUNDING = 1e-6


def all_fail(budget: RetryBudget, arrivals_s: list[float], lag_s: float = 0.0) -> list[float]:
    """Every request that may be retried is, and we hear of it `lag_s` later. When those retries were allowed."""
    allowed_s: list[float] = []
    coming: list[float] = []
    for now_s in arrivals_s:
        while coming and coming[0] <= now_s:
            budget.retried(1, heapq.heappop(coming))
        if budget.admit(now_s):
            allowed_s.append(now_s)
            heapq.heappush(coming, now_s + lag_s)
    return allowed_s


def test_while_nothing_fails_everything_may_be_retried() -> None:
    """The budget is about retries, not about permission."""
    budget = RetryBudget(0.2, 10)
    assert all(budget.admit(turn * 0.001) for turn in range(20_000))


def test_a_quiet_fleet_fails_over() -> None:
    """Ten in ten seconds, though that is every request there is; and ten more when they are over."""
    assert len(all_fail(RetryBudget(0.2, 10), [turn * 0.1 for turn in range(60)])) == 12
    assert len(all_fail(RetryBudget(0.2, 10), [float(turn) for turn in range(100)])) == 100


def test_when_everything_fails_a_fifth_is_retried() -> None:
    """A hundred requests a second for a minute."""
    arrivals_s = [turn * 0.01 for turn in range(6_000)]
    assert len(all_fail(RetryBudget(0.2, 10), arrivals_s)) == pytest.approx(1_200, abs=20)


def test_one_engine_of_many_that_fails_is_retried_every_time() -> None:
    """Each tenth request fails and is retried: less than the share, so nobody is left without."""
    budget = RetryBudget(0.2, 10)
    for turn in range(10_000):
        assert budget.admit(turn * 0.01)
        if turn % 10 == 0:
            budget.retried(1, turn * 0.01 + 0.005)


def test_when_it_is_over_everything_may_be_retried_again() -> None:
    """The window slides on."""
    budget = RetryBudget(0.2, 5)
    all_fail(budget, [turn * 0.01 for turn in range(1_000)])
    assert not budget.admit(10.0)
    assert budget.admit(10.0 + WINDOW_S)


def test_the_limits_may_change() -> None:
    """What was seen stays."""
    budget = RetryBudget(0.2, 5)
    all_fail(budget, [0.0] * 25)
    assert not budget.admit(0.0)
    budget.share = 1.0
    assert budget.admit(0.0)


@given(share=st.floats(0, 1), floor=st.integers(0, 20), gaps_s=st.lists(st.floats(0, 3), min_size=1, max_size=300))
def test_retries_never_exceed_the_share_or_the_floor(share: float, floor: int, gaps_s: list[float]) -> None:
    """Whatever comes when: of all requests so far, or in the ten seconds before a retry; counted afresh."""
    budget = RetryBudget(share, floor)
    now_s, requests, retries_s = 0.0, 0, []
    for gap_s in gaps_s:
        now_s += gap_s
        requests += 1
        if not budget.admit(now_s):
            continue
        budget.retried(1, now_s)
        retries_s.append(now_s)
        recent = sum(at_s > now_s - WINDOW_S + SLICE_S for at_s in retries_s)
        assert recent <= floor or len(retries_s) <= share * requests + ROUNDING


@given(share=st.floats(0.01, 1), idle_s=st.floats(0, 100), calm=st.integers(0, 2_000))
def test_what_was_not_used_is_worth_ten_seconds_at_most(share: float, idle_s: float, calm: int) -> None:
    """A calm hour does not pay for a storm."""
    budget = RetryBudget(share, 0)
    for turn in range(calm):
        budget.admit(turn * 0.05)
    begins_s = calm * 0.05 + idle_s
    allowed = len(all_fail(budget, [begins_s] * 100))
    of_late = min(calm, max(WINDOW_S - idle_s, 0.0) / 0.05 + 1) + 100
    assert allowed <= share * of_late + ROUNDING


@given(
    per_s=st.integers(1, 300), lag_s=st.floats(0, 1.0), floor=st.integers(0, 20), share=st.sampled_from([0.1, 0.2, 0.5])
)
def test_of_what_is_heard_late_only_the_first_burst_is_more(per_s: int, lag_s: float, floor: int, share: float) -> None:
    """Everything fails for forty seconds: beside the share, what was sent before the first was heard of.

    The same in each ten seconds where the floor is what allows most.
    """
    arrivals_s = [turn / per_s for turn in range(40 * per_s)]
    allowed_s = all_fail(RetryBudget(share, floor), arrivals_s, lag_s)
    unheard, windows = lag_s * per_s + 1, 40 / WINDOW_S + 1
    assert len(allowed_s) <= max(share * len(arrivals_s) + unheard, (floor + unheard) * windows)
    assert len(allowed_s) >= min(floor, len(arrivals_s))


@pytest.mark.parametrize("lag_s", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("per_s", [10, 50, 1_000])
def test_what_is_heard_of_soon_keeps_attempts_at_a_fifth_more(per_s: int, lag_s: float) -> None:
    """As a connection refused is, in milliseconds: 1.2 attempts per request."""
    arrivals_s = [turn / per_s for turn in range(40 * per_s)]
    assert len(all_fail(RetryBudget(0.2, 10), arrivals_s, lag_s)) <= 0.2 * len(arrivals_s) + lag_s * per_s + 1
