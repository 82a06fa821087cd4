"""Breakers, under a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.breakers import Breaker, BreakerSpec, Position, Window

SPEC = BreakerSpec(error_ratio=0.1, window_s=120.0, least_requests=20, open_s=180.0)


def fed(good: int, bad: int, now_s: float = 0.0) -> Breaker:
    """A breaker that has seen so many, the good ones first."""
    breaker = Breaker(SPEC)
    for _ in range(good):
        breaker.saw(0, now_s, good=True)
    for _ in range(bad):
        breaker.saw(0, now_s, good=False)
    return breaker


@pytest.mark.parametrize(
    ("good", "bad", "position"),
    [(90, 10, Position.CLOSED), (80, 9, Position.OPEN), (0, 19, Position.CLOSED), (0, 20, Position.OPEN)],
    ids=["a tenth", "more", "too few to tell", "enough"],
)
def test_too_many_errors_among_enough_requests_open_it(good: int, bad: int, position: Position) -> None:
    """More than the share allowed, not just as many."""
    assert fed(good, bad).position(0.0) is position


def test_old_errors_are_forgotten_bit_by_bit() -> None:
    """Those of two minutes ago count no more; those of one still do."""
    breaker = fed(100, 9, now_s=0.0)
    for now_s in (60.0, 60.0):
        breaker.saw(0, now_s, good=False)
    assert breaker.position(60.0) is Position.CLOSED
    for _ in range(20):
        breaker.saw(0, 125.0, good=True)
    for _ in range(2):
        breaker.saw(0, 125.0, good=False)
    assert breaker.position(125.0) is Position.OPEN  # 4 of 24; over all it would have been 13 of 131


def test_it_rests_and_then_lets_one_request_try() -> None:
    """Nothing while it rests; then exactly one, whose outcome decides."""
    breaker = fed(0, 20)
    assert breaker.admit(179.0) is None
    assert breaker.retry_after_s(100.0) == 80.0
    trial = breaker.admit(180.0)
    assert trial is not None
    assert breaker.admit(180.0) is None
    assert breaker.saw(trial, 181.0, good=False)
    assert breaker.admit(360.0) is None
    trial = breaker.admit(361.0)
    assert trial is not None
    assert not breaker.saw(trial, 362.0, good=True)
    assert breaker.position(362.0) is Position.CLOSED
    assert breaker.trips == 2


@pytest.mark.parametrize("good", [True, False])
def test_what_began_before_it_opened_decides_nothing(*, good: bool) -> None:
    """Neither for nor against it, not even while another request is on trial."""
    breaker = Breaker(SPEC)
    early = breaker.admit(0.0)
    assert early is not None
    for _ in range(20):
        breaker.saw(0, 0.0, good=False)
    trial = breaker.admit(190.0)
    assert trial is not None
    assert not breaker.saw(early, 191.0, good=good)
    assert breaker.position(191.0) is Position.HALF_OPEN
    breaker.saw(trial, 192.0, good=True)
    assert breaker.position(192.0) is Position.CLOSED


def test_a_trial_that_tells_nothing_leaves_room_for_another() -> None:
    """Told so at once; beside one that nobody ever tells of another goes after a rest."""
    breaker = fed(0, 20)
    trial = breaker.admit(190.0)
    assert trial is not None
    breaker.forgot(trial)
    lost = breaker.admit(190.0)
    assert lost is not None
    assert breaker.admit(369.0) is None
    assert breaker.admit(370.0) is not None


@pytest.mark.parametrize("good", [True, False])
def test_a_trial_that_takes_longer_than_a_rest_decides(*, good: bool) -> None:
    """Though others were let through meanwhile; what becomes of those then is nothing to a breaker that opened anew."""
    breaker = fed(0, 20)
    trials = [breaker.admit(at_s) for at_s in (180.0, 360.0, 540.0)]
    first, *later = (trial for trial in trials if trial is not None)
    assert breaker.saw(first, 600.0, good=good) is not good
    assert breaker.position(600.0) is (Position.CLOSED if good else Position.OPEN)
    for trial in later:
        breaker.saw(trial, 601.0, good=True)
    assert breaker.position(601.0) is (Position.CLOSED if good else Position.OPEN)


@given(st.floats(0.1, 2_000.0), st.floats(0.1, 60.0))
def test_once_all_goes_well_it_closes_however_long_answers_take(answer_s: float, pause_s: float) -> None:
    """After its rest, as soon as the first request let through is answered: it never takes a second rest for that."""
    breaker, now_s, under_way = fed(0, 20), 0.0, list[tuple[float, int]]()
    while not breaker.is_closed:
        now_s += pause_s
        for end_s, trial in [one for one in under_way if one[0] <= now_s]:
            under_way.remove((end_s, trial))
            breaker.saw(trial, now_s, good=True)
        trial = breaker.admit(now_s)
        if trial is not None:
            under_way.append((now_s + answer_s, trial))
        assert now_s <= SPEC.open_s + answer_s + 2 * pause_s
    assert breaker.trips == 1


def test_after_a_good_trial_it_starts_afresh() -> None:
    """The errors that opened it do not open it again."""
    breaker = fed(0, 20)
    trial = breaker.admit(180.0)
    assert trial is not None
    breaker.saw(trial, 180.0, good=True)
    assert not breaker.saw(0, 180.0, good=False)
    assert breaker.position(180.0) is Position.CLOSED


def outcomes(breaker: Breaker, endpoint: str, *, good: int, bad: int) -> None:
    """What became of requests at one of several endpoints."""
    for _ in range(good):
        breaker.saw(0, 0.0, good=True, by=endpoint)
    for _ in range(bad):
        breaker.saw(0, 0.0, good=False, by=endpoint)


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [
        ((0, 100), (50, 0), Position.CLOSED),
        ((0, 100), (10, 9), Position.CLOSED),
        ((0, 100), (15, 5), Position.OPEN),
        ((60, 40), (60, 40), Position.OPEN),
        ((2_000, 60), (20, 50), Position.CLOSED),
    ],
    ids=["one is down", "of the other is too little known", "both", "both in part", "nearly all went well"],
)
def test_one_endpoint_alone_opens_nothing_for_others(
    first: tuple[int, int], second: tuple[int, int], position: Position
) -> None:
    """Good and bad outcomes of two. The worst one's are its own affair; without them it must be too many as well."""
    breaker = Breaker(BreakerSpec(error_ratio=0.1))
    outcomes(breaker, "a", good=first[0], bad=first[1])
    outcomes(breaker, "b", good=second[0], bad=second[1])
    assert breaker.position(0.0) is position


def test_the_worst_endpoint_is_the_one_of_the_window() -> None:
    """Who was the worst before may be well by now."""
    breaker = Breaker(BreakerSpec(error_ratio=0.1))
    outcomes(breaker, "a", good=300, bad=30)
    for _ in range(25):
        for endpoint in ("b", "c"):
            breaker.saw(0, 200.0, good=False, by=endpoint)
    assert breaker.position(200.0) is Position.OPEN


def test_a_trial_tells_when_to_come_again() -> None:
    """While it rests, at its end; then when the trial is expected to be over."""
    breaker = fed(0, 20)
    assert breaker.retry_after_s(100.0, 5.0) == 80.0
    assert breaker.retry_after_s(180.0, 5.0) == 0.0
    assert breaker.admit(181.0) is not None
    assert breaker.retry_after_s(183.0, 5.0) == 3.0
    assert breaker.retry_after_s(190.0, 5.0) == 0.0
    assert breaker.is_shut(190.0)


def test_new_limits_apply_at_once_and_keep_what_was_seen() -> None:
    """A rest that has begun goes on; another window begins empty."""
    breaker = fed(80, 8)
    breaker.configure(BreakerSpec(error_ratio=0.05))
    assert breaker.saw(0, 0.0, good=False)
    breaker.configure(BreakerSpec(error_ratio=0.5, open_s=1.0))
    assert breaker.retry_after_s(0.0) == 180.0
    other = fed(0, 19)
    other.configure(BreakerSpec(error_ratio=0.1, window_s=60.0))
    assert other.counts(0.0) == (0, 0)


def test_a_bad_outcome_can_be_taken_back() -> None:
    """Where there is one."""
    window = Window(120.0)
    window.take_back()
    window.saw(0.0, good=False)
    window.saw(30.0, good=True)
    window.take_back()
    window.take_back()
    assert window.counts(30.0) == (0, 1)


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=200))
def test_a_window_holds_what_a_plain_list_would(outcomes: list[tuple[float, bool]]) -> None:
    """But for the width of a slice."""
    window, now_s, seen = Window(120.0), 0.0, list[tuple[float, bool]]()
    for pause_s, good in outcomes:
        now_s += pause_s
        window.saw(now_s, good=good)
        seen.append((now_s, good))
        bad, total = window.counts(now_s)
        recent = [one for at_s, one in seen if at_s > now_s - 110.0]
        reaching = [one for at_s, one in seen if at_s > now_s - 120.0]
        assert len(recent) <= total <= len(reaching)
        assert recent.count(False) <= bad <= reaching.count(False)
