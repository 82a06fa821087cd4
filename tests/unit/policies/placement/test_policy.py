"""Policies: weights and their bound, turns, rings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.marginal_cost import MarginalCost
from policies.placement.placement import Placement, Unplaceable
from policies.placement.policy import BadScore, FormulaSpec, Scored
from policies.placement.prefix_index import PrefixIndex
from policies.placement.rotation import ConsistentHash, RoundRobin, WeightedRoundRobin
from policies.placement.view import View
from policies.placement.weighted import ScorerWeight, Weighted, WeightedSpec, bounded_weights
from policies.types import Choice, Decision, InferenceRequest, Kind

Requests = Callable[..., InferenceRequest]
_BLOCKS = {"block_hashes": [1, 2, 3], "block_tokens": [300, 300, 300]}


def _weighing(**weights: float) -> WeightedSpec:
    return WeightedSpec(scorers=tuple(ScorerWeight(name=name, weight=weight) for name, weight in weights.items()))


_DEFAULT = _weighing(prefix_affinity=3, queue_depth=3, least_request=4)


def _placement(policy: object, *, filters: tuple[str, ...] = ("excluded", "context")) -> Placement:
    placement = Placement("p", policy, PrefixIndex(10_000), filters=filters)  # type: ignore[arg-type]
    placement.set_members(range(4))
    return placement


def _place(placement: Placement, request: InferenceRequest, state: FleetState, rng: Random) -> Decision:
    decision = placement.choose(request, state, 0.0, rng)
    assert isinstance(decision, Decision)
    placement.commit(decision, request, state, 0.0)
    return decision


def test_affinity_never_exceeds_its_share() -> None:
    """A weight of 9 to 1 is cut to 30 %; the rest is scaled to fill."""
    spec = _weighing(prefix_affinity=9, queue_depth=1)
    assert dict(bounded_weights(spec)) == pytest.approx({"prefix_affinity": 0.3, "queue_depth": 0.7})


def test_affinity_alone_may_have_it_all() -> None:
    """With nothing to weigh against there is nothing to bound."""
    assert bounded_weights(_weighing(prefix_affinity=2)) == [("prefix_affinity", 1.0)]


def test_unknown_scorers_are_refused_with_the_known_ones() -> None:
    """The message lists what there is."""
    with pytest.raises(ValueError, match="least_request"):
        Weighted(_weighing(no_such=1))


@pytest.mark.parametrize("scores", [[1.0, float("nan"), 0.0, 0.0], [float("nan")] * 4, [1.0, float("inf"), 0.0, 0.0]])
def test_a_score_that_is_no_number_is_refused_by_name(
    scores: list[float], state: FleetState, request_of: Requests
) -> None:
    """Before anything is taken; another package's formula may divide by nothing."""

    class Broken(FormulaSpec):
        def scored(self, view: View) -> Scored:  # noqa: ARG002 - as it is
            return np.array(scores), {}

    with pytest.raises(BadScore, match=r"policy 'broken' ranks 10\.0\.0\.\d:80 with a score of (nan|inf); "):
        _placement(Broken().build("broken")).choose(request_of(), state, 0.0, Random(1))


def test_the_second_turn_follows_the_first(state: FleetState, request_of: Requests) -> None:
    """The same prefix goes where it went before, and is counted as matched there."""
    placement = _placement(Weighted(_DEFAULT))
    first = _place(placement, request_of(**_BLOCKS), state, Random(1))
    second = _place(placement, request_of(**_BLOCKS), state, Random(2))
    assert second.order[0] == first.order[0]
    assert second.chosen_matched_tokens == 900


def test_choosing_changes_nothing(state: FleetState, request_of: Requests) -> None:
    """`choose` may be asked any number of times: same answer for the same draw, nothing booked."""
    placement = _placement(RoundRobin())
    orders = {placement.choose(request_of(**_BLOCKS), state, 0.0, Random(5)).order for _ in range(5)}  # type: ignore[union-attr]
    assert len(orders) == 1
    assert state.in_flight.sum() == 0
    assert len(placement.index) == 0


def test_a_burst_of_one_prefix_sees_itself_and_spreads(state: FleetState, request_of: Requests) -> None:
    """40 equal requests at once: the holder is preferred but no endpoint gets more than half."""
    placement = _placement(Weighted(_DEFAULT))
    rng = Random(3)
    firsts = Counter(_place(placement, request_of(**_BLOCKS), state, rng).order[0] for _ in range(40))
    assert max(firsts.values()) <= 20


def test_no_score_brings_a_filtered_endpoint_back(state: FleetState, request_of: Requests) -> None:
    """The holder of the whole prompt is draining: it is in no list, and the decision says why."""
    placement = _placement(Weighted(_DEFAULT))
    holder = _place(placement, request_of(**_BLOCKS), state, Random(1)).order[0]
    state.state[holder] = State.DRAINING
    decision = _place(placement, request_of(**_BLOCKS), state, Random(1))
    assert holder not in decision.order
    assert decision.filtered == (("ready", (state.addresses[holder],)),)


def test_an_empty_fleet_is_a_value_not_an_error(state: FleetState, request_of: Requests) -> None:
    """Nobody ready: the answer names the filter and whom it removed."""
    state.state[:4] = State.UNHEALTHY
    nowhere = _placement(RoundRobin()).choose(request_of(), state, 0.0, Random(1))
    assert isinstance(nowhere, Unplaceable)
    assert [name for name, _ in nowhere.filtered] == ["ready"]


def test_a_pool_without_members_is_unplaceable(state: FleetState, request_of: Requests) -> None:
    """No endpoint was ever listed."""
    placement = Placement("p", RoundRobin(), PrefixIndex(1_000))
    assert isinstance(placement.choose(request_of(), state, 0.0, Random(1)), Unplaceable)


def test_as_many_others_as_there_were_are_others(state: FleetState, request_of: Requests) -> None:
    """A pool of two that becomes another pool of two: who left holds nothing of a prompt and is no candidate."""
    placement = Placement("p", MarginalCost(), PrefixIndex(10_000))
    placement.set_members([0, 1])
    request = request_of(block_hashes=[1, 2], block_tokens=[400, 400])
    placement.index.insert(2, [1, 2], [400, 400], 0.0)
    assert _place(placement, request, state, Random(1)).order[0] in {0, 1}
    placement.set_members([1, 2])
    assert _place(placement, request, state, Random(1)).order[0] == 2


def test_round_robin_takes_turns_and_skips_who_is_out(state: FleetState, request_of: Requests) -> None:
    """In slot order, around, without the one that is not ready."""
    placement = _placement(RoundRobin())
    state.state[1] = State.UNHEALTHY
    rng = Random(1)
    assert [_place(placement, request_of(), state, rng).order[0] for _ in range(6)] == [0, 2, 3, 0, 2, 3]


def test_turns_by_weight_are_interleaved(state: FleetState, request_of: Requests) -> None:
    """5, 1, 1 as nginx serves them: a a b a c a a, with chance between the two equals, and again from the start."""
    state.weight[:4] = [5, 1, 1, 1]
    state.state[3] = State.UNHEALTHY
    placement, rng = _placement(WeightedRoundRobin()), Random(1)
    turns = [_place(placement, request_of(), state, rng).order[0] for _ in range(14)]
    assert Counter(turns) == {0: 10, 1: 2, 2: 2}
    assert [turn == 0 for turn in turns[:7]] == [True, True, False, True, False, True, True]
    assert turns[:7] != [0] * 5 + [1, 2]


def test_choosing_takes_no_turn(state: FleetState, request_of: Requests) -> None:
    """Only what is carried out is paid for."""
    placement = _placement(WeightedRoundRobin())
    state.weight[:4] = [2, 1, 1, 1]
    for _ in range(5):
        decision = placement.choose(request_of(), state, 0.0, Random(1))
        assert isinstance(decision, Decision)
        assert decision.order[0] == 0


def test_leads_within_the_margin_are_none(state: FleetState, request_of: Requests) -> None:
    """One request of 64 more is 0.016: within 0.02 chance decides, and it decides by the score beyond."""
    state.in_flight[:4] = [0, 1, 1, 2]

    def firsts(margin: float) -> set[int]:
        spec = WeightedSpec(scorers=(ScorerWeight(name="least_request"),), switch_margin=margin)
        placement = _placement(Weighted(spec))
        chosen = (placement.choose(request_of(), state, 0.0, Random(n)) for n in range(60))
        return {decision.order[0] for decision in chosen if isinstance(decision, Decision)}

    assert firsts(0.0) == {0}
    assert firsts(0.02) == {0, 1, 2}


def test_the_overfull_come_last(state: FleetState, request_of: Requests) -> None:
    """Six of ten waiting is more than half the window: behind one that scores less, but still on the list."""
    for slot in range(4):
        state.scraped(slot, waiting=6 if slot == 0 else 0, running=0, kv_used=0.1 if slot == 0 else 0.9, now_s=1e3)

    def first(demote_above: float | None) -> int:
        spec = WeightedSpec(scorers=(ScorerWeight(name="kv_usage"),), demote_above=demote_above)
        decision = _placement(Weighted(spec)).choose(request_of(), state, 1e3, Random(1), length=4)
        assert isinstance(decision, Decision)
        assert set(decision.order) == {0, 1, 2, 3}
        return decision.order.index(0)

    assert (first(None), first(0.5)) == (0, 3)


def test_a_session_stays_on_its_place_on_the_ring(state: FleetState, request_of: Requests) -> None:
    """Same key, same endpoint, as long as it is within its bound."""
    placement = _placement(ConsistentHash(load_factor=10))
    placed = {_place(placement, request_of(session_key="s-1"), state, Random(n)).order[0] for n in range(8)}
    assert len(placed) == 1


def test_few_sessions_move_when_an_endpoint_leaves(state: FleetState, request_of: Requests) -> None:
    """Only those of the endpoint that left: the others keep their place."""
    policy = ConsistentHash(load_factor=1_000)

    def places() -> dict[int, int]:
        placement = _placement(policy)
        return {
            n: placement.choose(request_of(session_key=f"s-{n}"), state, 0.0, Random(1)).order[0]  # type: ignore[union-attr]
            for n in range(200)
        }

    before = places()
    state.state[2] = State.UNHEALTHY
    after = places()
    assert all(after[n] == place for n, place in before.items() if place != 2)


def test_the_ring_bounds_load(state: FleetState, request_of: Requests) -> None:
    """One hot session over four endpoints: nobody exceeds ceil(1.25 x mean)."""
    placement = _placement(ConsistentHash(load_factor=1.25))
    for _ in range(40):
        _place(placement, request_of(session_key="hot"), state, Random(1))
    assert state.in_flight[:4].max() <= 13


def test_moving_a_request_moves_its_credit(state: FleetState, request_of: Requests) -> None:
    """After a failover the endpoint that serves is the one the next turn goes to."""
    placement = _placement(Weighted(_DEFAULT))
    request = request_of(**_BLOCKS)
    decision = placement.choose(request, state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    reservation = placement.commit(decision, request, state, 0.0)
    state.state[decision.order[0]] = State.UNHEALTHY
    moved = placement.moved(request, reservation, decision.order[1], state, 0.0)
    assert moved.slot == decision.order[1]
    assert _place(placement, request_of(**_BLOCKS), state, Random(9)).chosen_matched_tokens == 900


def test_credit_leaves_the_endpoint_that_failed(state: FleetState, request_of: Requests) -> None:
    """It never saw the prompt, so the next turn must not be drawn to it; what it held before stays."""
    placement = _placement(Weighted(_DEFAULT))
    held = request_of(block_hashes=[1], block_tokens=[300], input_tokens=300, kind=Kind.EMBEDDING)
    first = _place(placement, held, state, Random(1)).order[0]
    state.in_flight[:4] = 0
    request = request_of(**_BLOCKS, input_tokens=900, kind=Kind.EMBEDDING)
    decision = placement.choose(request, state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    assert decision.order[0] == first
    reservation = placement.commit(decision, request, state, 0.0)
    assert placement.index.held_tokens(first) == 900
    placement.moved(request, reservation, decision.order[1], state, 0.0)
    assert placement.index.held_tokens(first) == 300
    assert placement.index.held_tokens(decision.order[1]) == 900


def test_an_engine_writes_so_many_answers_at_once_as_it_says(state: FleetState, request_of: Requests) -> None:
    """What it cannot run at once takes turns; until it has said how many, its pool's profile holds."""
    placement = _placement(Weighted(_DEFAULT))
    told, silent = 0, 1
    state.most_running[told] = 8
    many = request_of(choices=10_000)
    assert placement.waves(many, told, state) == 1_250
    assert placement.waves(many, silent, state) == math.ceil(10_000 / placement.ledger.profile.max_num_seqs)
    assert placement.waves(request_of(), told, state) == 1


def test_a_stranger_to_the_pool_gets_no_credit(state: FleetState, request_of: Requests) -> None:
    """An endpoint that left while it took over a request: nobody would ever take the credit back."""
    placement = _placement(Weighted(_DEFAULT))
    request = request_of(**_BLOCKS)
    decision = placement.choose(request, state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    reservation = placement.commit(decision, request, state, 0.0)
    left = decision.order[1]
    placement.set_members(set(range(4)) - {left})
    placement.moved(request, reservation, left, state, 0.0)
    assert placement.index.held_tokens(left) == 0


@pytest.mark.parametrize(
    ("matched", "loads", "choice"),
    [
        ((), (0, 0, 0, 0), Choice.LOAD),
        ((0,), (0, 0, 0, 0), Choice.AFFINITY),
        ((0,), (40, 0, 0, 0), Choice.SPILLED),
    ],
)
def test_a_decision_says_what_told_for_it(
    state: FleetState, request_of: Requests, matched: tuple[int, ...], loads: tuple[int, ...], choice: Choice
) -> None:
    """Nobody holds the prompt; the holder is chosen; the holder is passed over for its load."""
    placement = _placement(Weighted(_DEFAULT))
    for slot in matched:
        placement.index.insert(slot, _BLOCKS["block_hashes"], _BLOCKS["block_tokens"], 0.0)
    state.in_flight[:4] = loads
    decision = placement.choose(request_of(**_BLOCKS), state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    assert decision.choice is choice


def test_the_only_candidate_needs_no_other_reason(state: FleetState, request_of: Requests) -> None:
    """Three of four are draining."""
    state.state[1:4] = State.DRAINING
    decision = _placement(Weighted(_DEFAULT)).choose(request_of(**_BLOCKS), state, 0.0, Random(1))
    assert isinstance(decision, Decision)
    assert decision.choice is Choice.ONLY_CANDIDATE


def test_answers_take_room_in_the_index(state: FleetState, request_of: Requests) -> None:
    """What they and the ends of prompts fill is lost to prefixes; an embedding has no answer."""
    for kind, max_tokens, held in ((Kind.CHAT, None, 1_300), (Kind.CHAT, 40, 1_040), (Kind.EMBEDDING, None, 1_000)):
        placement = _placement(RoundRobin())
        request = request_of(**_BLOCKS, kind=kind, max_tokens=max_tokens)
        slot = _place(placement, request, state, Random(1)).order[0]
        assert placement.index.held_tokens(slot) == held
        other = request_of(**_BLOCKS, kind=kind)
        assert placement.index.match(other.block_hashes, other.block_tokens, np.array([slot])).tolist() == [900]
