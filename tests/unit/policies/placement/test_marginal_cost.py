"""Marginal cost: each term in seconds, and which of them tells where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet_state import FleetState
from policies.placement.ledger import Ledger
from policies.placement.marginal_cost import MarginalCost
from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import Profile
from policies.placement.view import View
from policies.types import Decision, InferenceRequest, Kind, Ranking, Reservation

Views = Callable[..., View]
Requests = Callable[..., InferenceRequest]
_PLAIN = Profile(prefill_tokens_per_s=1_000.0, attention_per_token=0.0, request_tokens=0.0, output_tokens=100.0)


def _terms(view: View, **spec: float) -> dict[str, list[float]]:
    view.ledger.profile = _PLAIN
    parts = MarginalCost(MarginalCostSpec(**spec)).rank(view, 1).parts
    return {name: part.tolist() for name, part in parts.items() if name != "band"}


def test_an_empty_fleet_costs_the_prefill_alone(view_of: Views) -> None:
    """1,000 tokens at 1,000 a second; what is cached costs nothing."""
    terms = _terms(view_of((0, 250, 1_000, 0)))
    assert terms["own"] == pytest.approx([1.0, 0.75, 0.0, 1.0])
    assert terms["stall"] == terms["decode"] == terms["eviction"] == terms["overflow"] == [0.0] * 4


def test_backlog_is_waited_for(view_of: Views) -> None:
    """Two seconds' worth of it."""
    view = view_of()
    view.ledger.profile = _PLAIN
    view.ledger.committed(Reservation(1, 1, 2_000, 2_000), 0.0)
    assert _terms(view)["own"] == pytest.approx([1.0, 3.0, 1.0, 1.0])


def test_those_already_there_are_stalled_and_slow_the_answer(view_of: Views, state: FleetState) -> None:
    """0.1 x 5 requests x 1 s; 0.6 x 100 tokens x (5 x 15 us + 2,000 x 49 ns)."""
    state.in_flight[2], state.in_flight_prompt_tokens[2] = 5, 2_000
    terms = _terms(view_of())
    assert terms["stall"] == pytest.approx([0, 0, 0.5, 0])
    assert terms["decode"] == pytest.approx([0, 0, 60 * (5 * 15e-6 + 2_000 * 4.9e-8), 0])


def test_a_short_answer_is_slowed_less(view_of: Views, state: FleetState) -> None:
    """`max_tokens` bounds what is expected."""
    state.in_flight[0] = 10
    long, short = _terms(view_of())["decode"][0], _terms(view_of(max_tokens=10))["decode"][0]
    assert short == pytest.approx(long / 10)


def test_pushing_out_fresh_prefixes_costs_more_than_stale_ones(view_of: Views) -> None:
    """3 x 1 s of prefill, fading with the age of what would go; nothing where there is room."""
    view = view_of(now_s=120.0)
    view.index.insert(0, [1], [9_500], 120.0)
    view.index.insert(1, [2], [9_500], 0.0)
    view.index.insert(2, [3], [9_000], 120.0)
    assert _terms(view)["eviction"] == pytest.approx([3.0, 3.0 * np.exp(-1), 0, 0])


def test_more_than_the_cache_or_the_batch_holds_overflows(view_of: Views, state: FleetState) -> None:
    """10,000 tokens of cache: 11,000 in flight, 1,000 asked, 50 for each running answer and 100 for its own."""
    state.in_flight[0], state.in_flight_prompt_tokens[0] = 2, 11_000
    state.in_flight[1] = 511
    terms = _terms(view_of())
    assert terms["overflow"] == pytest.approx([10 * 0.22, 10 * 1.665, 0, 0])


def test_a_holder_within_the_band_is_preferred(view_of: Views, state: FleetState) -> None:
    """It costs up to three seconds more than the cheapest; beyond that it is passed over."""
    state.in_flight[0] = 5
    for waiting, chosen in ((3_000, 0), (9_000, 1)):
        view = view_of((900, 0, 0, 0))
        view.ledger.profile = _PLAIN
        view.ledger.committed(Reservation(0, 1, waiting, waiting), 0.0)
        view.ledger.committed(Reservation(2, 1, 500, 500), 0.0)
        view.ledger.committed(Reservation(3, 1, 500, 500), 0.0)
        ranking = MarginalCost().rank(view, 3)
        assert ranking.order[0] == chosen
        assert ranking.scores == pytest.approx(-sum(ranking.parts.values()))
        assert ranking.order[0] == ranking.candidates[ranking.scores.argmax()]


def test_a_short_shared_head_earns_no_band(view_of: Views) -> None:
    """Half of the prompt or less is not worth seconds."""
    assert "band" not in MarginalCost().rank(view_of((500, 0, 0, 0)), 1).parts
    assert "band" in MarginalCost().rank(view_of((501, 0, 0, 0)), 1).parts


def test_equals_share_alike(view_of: Views) -> None:
    """Chance decides between endpoints of the same cost."""
    rng, counts = Random(3), Counter[int]()
    for _ in range(2_000):
        view = view_of()
        view.rng = rng
        counts[MarginalCost().rank(view, 1).order[0]] += 1
    assert all(400 < counts[slot] < 600 for slot in range(4))


def _one_at_a_time(
    placement: Placement, state: FleetState, count: int, rates: tuple[float, ...], **fields: object
) -> Counter[int]:
    """Who gets so many requests of 1,000 tokens, each when the last has ended, from engines of these true rates.

    As in a running system the first token is told afterwards. Prompts have nothing in common unless `fields` say so.
    """
    rng, counts = Random(3), Counter[int]()
    for number in range(count):
        values = {"block_hashes": [number], "block_tokens": [900]} | fields
        request = InferenceRequest(Kind.CHAT, "m", "m", 1_000, max_tokens=20, **values)  # type: ignore[arg-type]
        decision = placement.choose(request, state, float(number), rng)
        assert isinstance(decision, Decision)
        reservation = placement.commit(decision, request, state, float(number))
        placement.ledger.timed(reservation, reservation.work / rates[reservation.slot] * rng.uniform(0.9, 1.1))
        placement.ended(reservation, number + 0.5)
        state.release(reservation)
        counts[reservation.slot] += 1
    return counts


def _placement(state: FleetState) -> Placement:
    state.kv_capacity_tokens[:] = 10_000_000
    placement = Placement("p", MarginalCost(), PrefixIndex(10_000_000), Ledger(_PLAIN))
    placement.set_members(range(4))
    return placement


@pytest.mark.parametrize("true_rate", [400.0, 1_015.0, 3_000.0], ids=["slower", "as the profile", "faster"])
@pytest.mark.parametrize("most_for_loops", [1_000, 0], ids=["loops", "arrays"])
def test_a_quiet_fleet_of_equals_shares_alike_whoever_learned_first(
    state: FleetState, true_rate: float, most_for_loops: int
) -> None:
    """Rates learned of equal engines differ a little, and one had a start: that is no lead."""
    placement = _placement(state)
    for _ in range(20):
        first = Reservation(2, 1, 1_000, 1_000)
        first.work = 100.0
        placement.ledger.timed(first, 100.0 / (1.02 * true_rate))
    with patch("policies.types._MOST_LISTED", most_for_loops):
        counts = _one_at_a_time(placement, state, 400, (true_rate,) * 4)
        assert min(counts.values()) > 60
        assert len(counts) == 4
        again = _one_at_a_time(placement, state, 400, (true_rate,) * 4, block_tokens=[0])
        assert min(again.values()) > 70
    rates = placement.ledger.rate(np.arange(4)).tolist()
    assert len(set(rates)) == 4
    assert rates == pytest.approx([true_rate] * 4, rel=0.1)


def test_a_quiet_fleet_gives_an_engine_of_half_the_speed_next_to_nothing(state: FleetState) -> None:
    """Once that is learned; the fast ones share alike."""
    placement, rates = _placement(state), (1_000.0, 500.0, 1_000.0, 1_000.0)
    learning = _one_at_a_time(placement, state, 100, rates)
    assert learning[1] < 15
    counts = _one_at_a_time(placement, state, 300, rates, block_tokens=[0])
    assert counts[1] == 0
    assert all(counts[slot] > 60 for slot in (0, 2, 3))


def test_a_newcomer_to_a_fleet_that_is_faster_than_its_profile_gets_its_share(state: FleetState) -> None:
    """It starts as fast as the others were seen to be, and so is tried."""
    placement, rates = _placement(state), (3_000.0,) * 4
    placement.set_members(range(3))
    _one_at_a_time(placement, state, 200, rates)
    placement.set_members(range(4))
    assert _one_at_a_time(placement, state, 200, rates, block_tokens=[0])[3] > 30


def test_a_prefix_tells_among_idle_equals_however_short(view_of: Views) -> None:
    """Only rates are levelled: a twentieth of the prompt is enough to be chosen each time, by the slowest of them."""
    for seed in range(50):
        view = view_of((0, 0, 50, 0))
        view.ledger.profile, view.rng = _PLAIN, Random(seed)
        for slot, rate in enumerate((1_100.0, 1_000.0, 950.0, 1_150.0)):
            seen = Reservation(slot, 1, 1, 1)
            seen.work = 30.0 * rate
            view.ledger.timed(seen, 30.0)
        assert MarginalCost().rank(view, 1).order == [2]


def test_idle_holders_of_a_prompt_share_alike(view_of: Views) -> None:
    """What all of them hold is no reason for one of them: the band is for each."""
    counts: Counter[int] = Counter()
    for seed in range(400):
        view = view_of((900, 0, 900, 900))
        view.ledger.profile, view.rng = _PLAIN, Random(seed)
        seen = Reservation(2, 1, 1, 1)
        seen.work = 31_000.0
        view.ledger.timed(seen, 30.0)
        counts[MarginalCost().rank(view, 1).order[0]] += 1
    assert sorted(counts) == [0, 2, 3]
    assert min(counts.values()) > 100


def test_a_rate_tells_once_there_is_load(view_of: Views, state: FleetState) -> None:
    """Each has a request: the faster one prefills sooner, if only by a little."""
    state.in_flight[:] = 1
    view = view_of()
    view.ledger.profile = _PLAIN
    seen = Reservation(2, 1, 1, 1)
    seen.work = 31_000.0
    view.ledger.timed(seen, 30.0)
    assert MarginalCost().rank(view, 1).order == [2]


def test_a_burst_spreads_itself(state: FleetState, request_of: Requests) -> None:
    """Each decision sees the ones before it, with nothing scraped in between; one prefix does not draw all."""
    placement = Placement("p", MarginalCost(), PrefixIndex(10_000), Ledger())
    placement.set_members(range(4))
    counts: Counter[int] = Counter()
    for number in range(40):
        request = request_of(block_hashes=[number], block_tokens=[900])
        decision = placement.choose(request, state, 0.0, Random(number))
        assert isinstance(decision, Decision)
        placement.commit(decision, request, state, 0.0)
        counts[decision.order[0]] += 1
    assert max(counts.values()) == min(counts.values()) == 10


def test_requests_of_others_count_as_those_of_ours_do(view_of: Views, state: FleetState) -> None:
    """After our restart the engines still run what we no longer know of: 20 requests, and prompts like ours."""
    state.scraped(1, waiting=5, running=15, kv_used=0.4, now_s=600.0)
    state.in_flight[0], state.in_flight_prompt_tokens[0] = 1, 500
    state.scraped(0, waiting=0, running=1, kv_used=0.0, now_s=600.0)
    terms = _terms(view_of(now_s=600.0))
    assert terms["stall"] == pytest.approx([0.1, 2.0, 0, 0])
    assert terms["decode"][1] == pytest.approx(60 * (20 * 15e-6 + 20 * 500 * 4.9e-8))
    assert MarginalCost().rank(view_of(now_s=600.0), 4).order[-1] == 1


def test_what_others_run_is_not_believed_for_long(view_of: Views, state: FleetState) -> None:
    """A scrape of long ago says nothing of now."""
    state.scraped(1, waiting=5, running=15, kv_used=0.4, now_s=600.0)
    assert _terms(view_of(now_s=600.0))["stall"][1] == pytest.approx(2.0)
    assert _terms(view_of(now_s=700.0))["stall"] == [0.0] * 4


def test_who_finds_an_engine_full_is_marked_as_crowded(state: FleetState, request_of: Requests) -> None:
    """By tokens: 10,000 fit, and the tenth of 1,000 each comes on top of half-written answers; by places, the third."""
    for profile, first in ((_PLAIN, 9), (replace(_PLAIN, max_num_seqs=2), 2)):
        state.in_flight[:] = state.in_flight_prompt_tokens[:] = 0
        placement = Placement("p", MarginalCost(), PrefixIndex(10_000), Ledger(profile))
        placement.set_members([0])
        marks = []
        for number in range(10):
            decision = placement.choose(request_of(), state, 0.0, Random(number))
            assert isinstance(decision, Decision)
            marks.append(placement.commit(decision, request_of(), state, 0.0).crowded)
        assert marks == [False] * first + [True] * (10 - first)


def test_a_hot_prefix_spreads_once_its_holder_is_loaded(state: FleetState, request_of: Requests) -> None:
    """48 requests with the same 2,000 tokens before a tail of their own: the first holder gets no more than half."""
    state.kv_capacity_tokens[:] = 400_000
    placement = Placement("p", MarginalCost(), PrefixIndex(400_000), Ledger())
    placement.set_members(range(4))
    counts: Counter[int] = Counter()
    for number in range(48):
        request = request_of(
            input_tokens=2_060, max_tokens=40, block_hashes=[1, 100 + number], block_tokens=[2_000, 60]
        )
        decision = placement.choose(request, state, 0.2 * number, Random(number))
        assert isinstance(decision, Decision)
        placement.commit(decision, request, state, 0.2 * number)
        counts[decision.order[0]] += 1
    assert max(counts.values()) <= 24
    assert len(counts) >= 2


# -- against the page's formula, calculated from nothing for one endpoint at a time

_NOW_S = 1_000.0


@dataclass(frozen=True)
class _Endpoint:
    """What an endpoint runs, waits for and holds; `idle_tokens` rest since `idle_s`. `seen_rate`: if any was."""

    running: int
    held: int
    capacity: int
    backlog: int
    matched: int
    idle_tokens: int
    idle_s: float
    others: int
    seen_rate: float | None


@dataclass(frozen=True)
class _Asked:
    prompt: int
    answer: int


_endpoints = st.builds(
    _Endpoint,
    running=st.just(0) | st.integers(0, 300),
    held=st.integers(0, 12_000),
    capacity=st.sampled_from([5_000, 10_000, 100_000]),
    backlog=st.sampled_from([0, 0, 10, 5_000]),
    matched=st.sampled_from([0, 0, 400, 900, 950, 1_000, 2_500]),
    idle_tokens=st.sampled_from([0, 100, 4_500, 9_900]),
    idle_s=st.sampled_from([-60.0, 0.0, 60.0, 900.0]),
    others=st.sampled_from([0, 0, 0, 7]),
    seen_rate=st.sampled_from([None, 24_000.0, 26_000.0, 16_000.0, 60_000.0]),
)
_asked = st.builds(_Asked, prompt=st.sampled_from([1, 1_000, 20_000]), answer=st.sampled_from([1, 100, 5_000]))


def _fleet(endpoints: list[_Endpoint]) -> tuple[FleetState, PrefixIndex, Ledger]:
    state, index, ledger = FleetState(stale_after_s=1.0), PrefixIndex(10_000), Ledger(Profile(output_tokens=400.0))
    for number, one in enumerate(endpoints):
        slot = state.add(f"10.0.0.{number}:80")
        state.in_flight[slot], state.in_flight_prompt_tokens[slot] = one.running, one.held
        state.kv_capacity_tokens[slot], state.observed_at_s[slot] = one.capacity, _NOW_S
        state.foreign[slot] = one.others
        index.set_capacity(slot, one.capacity)
        if one.idle_tokens:
            index.insert(slot, [slot], [one.idle_tokens], _NOW_S - one.idle_s)
        if one.seen_rate is not None:
            seen = Reservation(slot, 1, 1, 1)
            seen.work = 30.0 * one.seen_rate
            ledger.timed(seen, 30.0)
        if one.backlog:
            ledger.committed(Reservation(slot, 1, one.backlog, one.backlog), _NOW_S - 0.01)
    return state, index, ledger


def _by_the_page(asked: _Asked, endpoints: list[_Endpoint], index: PrefixIndex, ledger: Ledger) -> list[float]:
    """What each costs, without the band."""
    profile, rates = ledger.profile, ledger.rate(np.arange(len(endpoints))).tolist()
    fastest_idle = max((rates[slot] for slot, one in enumerate(endpoints) if not one.running), default=0.0)
    ours = sum(one.running for one in endpoints)
    each = sum(one.held for one in endpoints) / ours if ours else asked.prompt
    costs = []
    for slot, one in enumerate(endpoints):
        n, tokens = one.running + one.others, one.held + each * one.others
        answer, own_rate = min(asked.answer, profile.output_tokens), rates[slot]
        rate = fastest_idle if not n - one.others and own_rate >= 0.8 * fastest_idle else own_rate
        u = max(0, asked.prompt - one.matched)
        attention = profile.attention_per_token * (asked.prompt - u / 2)
        work = u * (1 + attention) + profile.request_tokens
        own_work = one.backlog * (1 + profile.attention_per_token * one.backlog / 2) + profile.request_tokens
        wait_s = max(0.0, own_work / own_rate - 0.01) if one.backlog else 0.0
        pushed_out = u > one.capacity - index.held_tokens(slot) and index.oldest_at_s(np.array([slot]))[0] < math.inf
        lost = 3 * u / rate * math.exp(-max(one.idle_s, 0) / 120) if pushed_out else 0.0
        memory = (tokens + answer * n / 2 + asked.prompt + answer - one.capacity) / one.capacity
        places = (n + 1 - profile.max_num_seqs) / profile.max_num_seqs
        decode = 0.6 * answer * (profile.sequence_s * n + profile.kv_token_s * tokens)
        overflow = 10 * max(memory, places, 0)
        costs.append(wait_s + work / rate + 0.1 * n * work / rate + decode + lost + overflow)
    return costs


def _banded(asked: _Asked, endpoints: list[_Endpoint], costs: list[float]) -> list[float]:
    most = max(one.matched for one in endpoints)
    if most <= asked.prompt / 2:
        return costs
    holders = [slot for slot, one in enumerate(endpoints) if one.matched >= 0.9 * most]
    cheapest = min(costs[slot] for slot in holders)
    usual = 1.5 * sum(one.running for one in endpoints) / len(endpoints) + 4
    level = [slot for slot in holders if costs[slot] <= cheapest + 1e-9 and endpoints[slot].running <= usual]
    return [cost - 3 * (slot in level) for slot, cost in enumerate(costs)]


def _rank(view: View, most_for_loops: int) -> tuple[Ranking, float]:
    """All candidates in order, with loops over so many at most; and what chance says next."""
    rng = Random(5)
    with patch("policies.types._MOST_LISTED", most_for_loops):
        again = View(
            view.request, view.state, view.slots, view.matched_tokens, view.now_s, rng, view.index, view.ledger
        )  # fmt: skip
        return MarginalCost().rank(again, len(view.slots)), rng.random()


@given(st.lists(_endpoints, min_size=1, max_size=12), _asked)
def test_loops_and_arrays_agree_to_the_last_bit(endpoints: list[_Endpoint], asked: _Asked) -> None:
    """In the cost of every endpoint, in the order and in what is left to chance; the parts told are the arrays'.

    Where something is evicted the last bit may differ: on some processors numpy's exp is not the C library's.
    """
    state, index, ledger = _fleet(endpoints)
    slots, matched = np.arange(len(endpoints)), np.array([float(one.matched) for one in endpoints])
    request = InferenceRequest(Kind.CHAT, "m", "m", asked.prompt, max_tokens=asked.answer)
    view = View(request, state, slots, matched, _NOW_S, Random(1), index, ledger)
    for one in [view, *(view.take(slots == slot) for slot in slots)]:
        (few, drawn), (many, drawn_by_many) = _rank(one, 1_000), _rank(one, 0)
        assert (few.order, few.first, drawn) == (many.order, many.first, drawn_by_many)
        if not many.parts["eviction"].any():
            assert few.best_score == many.best_score
        assert few.best_score == pytest.approx(few.scores[few.first], rel=1e-14)
        assert few.scores.tolist() == many.scores.tolist()
        assert {name: part.tolist() for name, part in few.parts.items()} == {
            name: part.tolist() for name, part in many.parts.items()
        }


@given(st.lists(_endpoints, min_size=1, max_size=5), st.lists(_asked, min_size=1, max_size=3))
def test_the_cost_is_the_pages_formula(endpoints: list[_Endpoint], asked: list[_Asked]) -> None:
    """Ranked one by one or priced together, and the terms told add up to it."""
    state, index, ledger = _fleet(endpoints)
    slots, matched = np.arange(len(endpoints)), np.array([float(one.matched) for one in endpoints])
    requests = [InferenceRequest(Kind.CHAT, "m", "m", one.prompt, max_tokens=one.answer) for one in asked]
    views = [View(request, state, slots, matched, _NOW_S, Random(1), index, ledger) for request in requests]
    costs, liked = MarginalCost().price(views[0], requests, np.tile(matched, (len(asked), 1)))
    for row, (one, view) in enumerate(zip(asked, views, strict=True)):
        ranking = MarginalCost().rank(view, 1)
        if not any(endpoint.others for endpoint in endpoints) or row == 0:  # others' prompts are like the first's
            expected = _by_the_page(one, endpoints, index, ledger)
            assert costs[row] == pytest.approx(expected)
            assert liked[row] == pytest.approx(_banded(one, endpoints, expected))
            assert -ranking.scores == pytest.approx(liked[row])
        assert sum(ranking.parts.values()) == pytest.approx(-ranking.scores)
