"""Marginal cost: each term in seconds, and which of them tells where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from policies.fleet_state import FleetState
from policies.placement.ledger import Ledger
from policies.placement.marginal_cost import MarginalCost, MarginalCostSpec
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import Profile
from policies.placement.view import View
from policies.types import Decision, InferenceRequest, Reservation

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
