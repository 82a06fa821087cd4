"""The ledger: backlog that fills and leaks, a rate that is learned, and nothing left over."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement.ledger import Ledger
from policies.placement.profiles import Profile
from policies.types import InferenceRequest, Kind, Reservation

_PROFILE = Profile(prefill_tokens_per_s=1_000.0, attention_per_token=0.0, request_tokens=0.0)


def _slots(*slots: int) -> np.ndarray:
    return np.array(slots, np.intp)


def _placed(ledger: Ledger, slot: int, tokens: int, now_s: float, *, cached: int = 0) -> Reservation:
    reservation = Reservation(slot, 1, tokens, tokens - cached)
    ledger.committed(reservation, now_s)
    return reservation


def _backlog(ledger: Ledger, slot: int, now_s: float) -> float:
    return float(ledger.backlog(_slots(slot), now_s)[0])


def test_a_placed_prompt_is_backlog_until_it_is_prefilled() -> None:
    """2,000 tokens at 1,000 a second are gone after two seconds, whether or not anybody says so."""
    ledger = Ledger(_PROFILE)
    _placed(ledger, 3, 2_000, 10.0)
    assert [_backlog(ledger, 3, at_s) for at_s in (10.0, 11.0, 12.0, 20.0)] == [2_000, 1_000, 0, 0]
    assert _backlog(ledger, 0, 10.0) == 0


def test_only_what_is_not_cached_is_work() -> None:
    """Cached tokens are read, not computed."""
    ledger = Ledger(_PROFILE)
    _placed(ledger, 0, 2_000, 0.0, cached=1_500)
    assert _backlog(ledger, 0, 0.0) == 500
    assert ledger.waiting_tokens(_slots(0)).tolist() == [500]


def test_a_first_token_ends_the_backlog_of_its_request() -> None:
    """What was said to take two seconds and took one is not waited for."""
    ledger = Ledger(_PROFILE)
    first, second = _placed(ledger, 0, 2_000, 0.0), _placed(ledger, 0, 500, 0.0)
    ledger.first_token(first, 1.0)
    assert _backlog(ledger, 0, 1.0) == pytest.approx(500)
    ledger.first_token(second, 1.2)
    assert _backlog(ledger, 0, 1.2) == 0


def test_the_rate_is_learned_from_first_tokens() -> None:
    """Twice as fast as the profile says, it is soon believed; and of one that shows it to be true, that as well."""
    ledger = Ledger(_PROFILE)
    for turn in range(30):
        ledger.first_token(_placed(ledger, 0, 2_000, float(turn)), turn + 1.0)
        ledger.first_token(_placed(ledger, 1, 1_000, float(turn)), turn + 1.0)
    assert ledger.rate(_slots(0, 1)).tolist() == pytest.approx([2_000, 1_000], rel=0.1)


def test_of_whom_nothing_is_seen_is_like_those_that_were_seen() -> None:
    """Not like a profile that all others have proved wrong; what it shows itself soon outweighs that."""
    ledger = Ledger(_PROFILE)
    for turn in range(40):
        for slot in (0, 1):
            ledger.first_token(_placed(ledger, slot, 3_000, float(turn)), turn + 1.0)
    assert ledger.rate(_slots(2, 99)).tolist() == pytest.approx([3_000, 3_000], rel=0.1)
    for turn in range(40, 60):
        ledger.first_token(_placed(ledger, 2, 500, float(turn)), turn + 1.0)
    assert ledger.rate(_slots(2))[0] < 900
    ledger.forget(2)
    assert ledger.rate(_slots(2))[0] == pytest.approx(3_000, rel=0.1)
    for slot in (0, 1):
        ledger.forget(slot)
    assert ledger.rate(_slots(0, 2, 99)).tolist() == [1_000] * 3


def test_another_profile_counts_until_rates_are_learned() -> None:
    """For those of whom something is known it counts as little as the old one."""
    ledger = Ledger(_PROFILE)
    ledger.profile = replace(_PROFILE, prefill_tokens_per_s=700.0)
    assert ledger.rate(_slots(0, 1)).tolist() == [700, 700]
    for turn in range(40):
        ledger.first_token(_placed(ledger, 0, 3_000, float(turn)), turn + 1.0)
    ledger.profile = _PROFILE
    assert ledger.rate(_slots(0))[0] == pytest.approx(3_000, rel=0.1)


@pytest.mark.parametrize("true_rate", [300.0, 1_000.0, 4_000.0])
def test_the_rate_is_learned_from_answers_timed_afterwards(true_rate: float) -> None:
    """Requests queue behind each other on an engine of another speed than the profile's."""
    ledger = Ledger(_PROFILE)
    free_at_s = 0.0
    for turn in range(400):
        now_s = turn * 800 / true_rate  # load about 0.6
        reservation = _placed(ledger, 0, 500, now_s)
        free_at_s = max(free_at_s, now_s) + 500 / true_rate
        ledger.timed(reservation, free_at_s - now_s)
        ledger.ended(reservation, free_at_s)
    assert ledger.rate(_slots(0))[0] == pytest.approx(true_rate, rel=0.15)


@pytest.mark.parametrize("ttft_s", [0.0, 1e-9, 1e9])
def test_a_time_that_cannot_be_teaches_nothing(ttft_s: float) -> None:
    """An answer from a cache in between, or a clock that jumped; it is counted."""
    ledger = Ledger(_PROFILE)
    ledger.timed(_placed(ledger, 0, 2_000, 0.0), ttft_s)
    assert ledger.rate(_slots(0)).tolist() == [1_000]
    assert ledger.misreadings == 1


def test_a_request_that_waited_for_room_teaches_nothing() -> None:
    """An engine with a full cache is not a slow one."""
    ledger = Ledger(_PROFILE)
    reservation = _placed(ledger, 0, 2_000, 0.0)
    reservation.crowded = True
    ledger.timed(reservation, 30.0)
    assert ledger.rate(_slots(0)).tolist() == [1_000]


def test_what_was_learned_is_a_profile_again() -> None:
    """For another fleet of the same hardware: rate and length as seen, the rest as it was."""
    ledger = Ledger(_PROFILE)
    assert ledger.learned() == _PROFILE
    for turn in range(40):
        for slot in (0, 5):
            ledger.first_token(_placed(ledger, slot, 2_000, float(turn)), turn + 1.0)
            ledger.answered(80)
    learned = ledger.learned()
    assert learned.prefill_tokens_per_s == pytest.approx(2_000, rel=0.1)
    assert learned.output_tokens == pytest.approx((80 * 80 + 20 * 300) / 100, rel=0.02)
    assert replace(learned, prefill_tokens_per_s=1_000.0, output_tokens=300.0) == _PROFILE


def _decoded(ledger: Ledger, tokens: int, upstream_s: float, *, ttft_s: float | None = 0.0, choices: int = 1) -> None:
    reservation = Reservation(0, 1, 100, 100, side_by_side=choices)
    ledger.decoded(reservation, tokens, upstream_s, ttft_s)


def test_the_decode_rate_is_the_profiles_until_it_is_learned() -> None:
    """Then it is what nine answers in ten reach: here they have 20 to 120 tokens a second."""
    ledger, rng = Ledger(replace(_PROFILE, decode_tokens_per_s=200.0)), Random(3)
    assert ledger.decode_rate == 200
    seen = []
    for turn in range(3_000):
        _decoded(ledger, 101, 100 / rng.uniform(20, 120) + 2.0, ttft_s=2.0)
        if turn > 1_000:
            seen.append(ledger.decode_rate)
    assert min(seen) >= 20 * 0.83
    assert sum(seen) / len(seen) == pytest.approx(30, rel=0.2)
    assert ledger.learned().decode_tokens_per_s == pytest.approx(ledger.decode_rate, abs=0.01)


@pytest.mark.parametrize("upstream_s", [0.0, 1e-9, 1e9])
def test_a_single_misreading_hardly_moves_the_decode_rate(upstream_s: float) -> None:
    """A clock that jumped, a client that read slowly: at most a sixth."""
    ledger = Ledger(replace(_PROFILE, decode_tokens_per_s=50.0))
    _decoded(ledger, 1_000, upstream_s)
    assert 50 * 0.83 <= ledger.decode_rate <= 50 * 1.03


def test_a_fleet_that_slows_down_is_believed_sooner_than_one_that_speeds_up() -> None:
    """A limit that is too short cuts answers; one that is too long only waits."""
    slowed, sped = (Ledger(replace(_PROFILE, decode_tokens_per_s=rate)) for rate in (50.0, 5.0))
    for _ in range(15):
        _decoded(slowed, 101, 20.0)
        _decoded(sped, 101, 2.0)
    assert slowed.decode_rate < 6
    assert sped.decode_rate < 7


@pytest.mark.parametrize(("tokens", "ttft_s"), [(8, 0.0), (64, None), (0, 0.0)], ids=["streamed", "whole", "none"])
def test_a_short_answer_says_nothing_of_the_decode_rate(tokens: int, ttft_s: float | None) -> None:
    """Its time is the network's, or the prefill's where the first token was not seen."""
    ledger = Ledger(replace(_PROFILE, decode_tokens_per_s=50.0))
    _decoded(ledger, tokens, 1_000.0, ttft_s=ttft_s)
    assert ledger.decode_rate == 50


def test_of_a_whole_answer_what_was_expected_of_its_prefill_is_taken_off() -> None:
    """2,000 tokens at 1,000 a second before it: 100 tokens in 12 s are 10 a second, not 8; and it counts half."""
    ledgers = [Ledger(replace(_PROFILE, decode_tokens_per_s=9.0)) for _ in range(2)]
    for ledger, ttft_s in zip(ledgers, (2.0, None), strict=True):
        ledger.decoded(_placed(ledger, 0, 2_000, 0.0), 101, 12.0, ttft_s)
    seen, whole = (math.log(ledger.decode_rate / 9.0) for ledger in ledgers)
    assert seen > 0
    assert whole == pytest.approx(seen / 2)


def test_answers_made_side_by_side_are_not_one_fast_answer() -> None:
    """`n: 4` brings four times the tokens in the same time."""
    ledger = Ledger(replace(_PROFILE, decode_tokens_per_s=50.0))
    for _ in range(20):
        _decoded(ledger, 404, 20.0, choices=4)
    assert ledger.decode_rate < 6


@given(st.lists(st.tuples(st.integers(0, 2**31), st.floats(0, 1e12), st.none() | st.floats(0, 1e12)), max_size=50))
def test_the_decode_rate_is_always_one_that_can_be(answers: list[tuple[int, float, float | None]]) -> None:
    """Whatever the access log says."""
    ledger = Ledger(_PROFILE)
    for tokens, upstream_s, ttft_s in answers:
        _decoded(ledger, tokens, upstream_s, ttft_s=ttft_s)
        assert 1e-2 <= ledger.decode_rate <= 1e6


def test_the_length_of_answers_is_the_profiles_until_it_is_known() -> None:
    """Then the mean of the last thousand or so, without a jump: the profile's counts as twenty answers."""
    ledger = Ledger(_PROFILE)
    assert ledger.expected_output_tokens == 300
    for _ in range(20):
        ledger.answered(50)
    assert ledger.expected_output_tokens == pytest.approx(175, rel=0.01)
    for _ in range(5_000):
        ledger.answered(50)
    assert ledger.expected_output_tokens == pytest.approx(50, rel=0.1)


def test_many_answers_are_foretold_as_one_is() -> None:
    """Late binding asks for all that wait at once."""
    ledger = Ledger(_PROFILE)
    ledger.answered(50)
    requests = [
        InferenceRequest(kind, "m", "m", 1_000, max_tokens=most)
        for kind in (Kind.CHAT, Kind.EMBEDDING)
        for most in (None, 10, 5_000)
    ]
    assert ledger.answers_tokens(requests).tolist() == [[ledger.answer_tokens(one)] for one in requests]


def test_an_endpoint_that_starts_anew_is_learned_anew() -> None:
    """The slot may belong to other hardware now."""
    ledger = Ledger(_PROFILE)
    ledger.first_token(_placed(ledger, 0, 20_000, 0.0), 2.0)
    ledger.forget(0)
    assert ledger.rate(_slots(0)).tolist() == [1_000]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50_000), st.booleans(), st.booleans()), max_size=60))
def test_when_everything_has_ended_nothing_is_left(requests: list[tuple[int, int, bool, bool]]) -> None:
    """Whatever the order, and whether or not first tokens were seen; the backlog never exceeds what is pending."""
    ledger, open_requests, now_s = Ledger(), [], 0.0
    for slot, tokens, seen, ends in requests:
        now_s += 0.1
        reservation = _placed(ledger, slot, tokens, now_s)
        open_requests.append(reservation)
        if seen:
            ledger.first_token(reservation, now_s + 0.05)
        if ends:
            ledger.ended(open_requests.pop(len(open_requests) // 2), now_s + 0.07)
        slots = np.arange(41)
        assert (ledger.backlog(slots, now_s) <= np.array(ledger.pending_work)[slots] + 1e-6).all()
    for reservation in open_requests:
        ledger.ended(reservation, now_s)
        ledger.ended(reservation, now_s)
    for column in (ledger.pending, ledger.pending_work, ledger.pending_tokens, ledger.bucket):
        assert not any(column)


_EVENTS = st.sampled_from(["placed", "first token", "ended", "timed", "restarted", "other profile"])


@given(st.lists(st.tuples(_EVENTS, st.integers(0, 20), st.integers(0, 50_000), st.floats(0, 3)), max_size=40))
def test_what_policies_read_follows_from_the_accounts(events: list[tuple[str, int, int, float]]) -> None:
    """After whatever happened: the bucket less what has leaked since, at most what is pending, in seconds."""
    ledger, running, now_s = Ledger(_PROFILE), [Reservation(0, 1, 1, 1)], 1_000.0
    for what, slot, tokens, passed_s in events:
        now_s += passed_s
        if what == "placed":
            running.append(_placed(ledger, slot, tokens, now_s))
        elif what == "first token":
            ledger.first_token(running[slot % len(running)], now_s)
        elif what == "ended":
            ledger.ended(running[slot % len(running)], now_s)
        elif what == "timed":
            ledger.timed(running[slot % len(running)], passed_s)
        elif what == "restarted":
            ledger.forget(slot)
        else:
            ledger.profile = replace(_PROFILE, prefill_tokens_per_s=tokens + 1.0)
    prior = ledger.profile.prefill_tokens_per_s
    of_all = (sum(ledger.rate_work) + 2 * prior) / (sum(ledger.rate_time_s) + 2)
    assert ledger.pool_rate == pytest.approx(of_all, rel=0.051)
    assert ledger.learned().prefill_tokens_per_s == pytest.approx(of_all, abs=0.051)
    rates, waits_s = ledger.prefill(np.arange(21), now_s)
    for slot in range(21):
        rate = (ledger.rate_work[slot] + 2 * ledger.pool_rate) / (ledger.rate_time_s[slot] + 2)
        left = ledger.bucket[slot] - rate * (now_s - ledger.bucket_at_s[slot])
        assert rates[slot] == pytest.approx(rate)
        assert waits_s[slot] == pytest.approx(min(max(left, 0.0), ledger.pending_work[slot]) / rate, abs=1e-9)
    assert ledger.rate(np.arange(21)).tolist() == rates.tolist()
    assert ledger.backlog(np.arange(21), now_s) == pytest.approx(rates * waits_s)
