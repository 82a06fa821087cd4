"""What holds for every preset that ships, whatever its formula. Exceptions stand here by name, with their reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.pool_policies import presets
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.placement import Placement, Unplaceable
from policies.placement.policy import PolicySpec
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import Profile
from policies.types import Decision, Floats, InferenceRequest, Kind, Ranking, Reservation

_PROMPT = 1_000
_BLOCKS = {"block_hashes": range(1, 11), "block_tokens": [100] * 10}
_TIE = 1e-9

PRESETS = presets()
LOAD_BLIND = {
    "round-robin": "goes by turn alone",
    "weighted-round-robin": "goes by turn and weight alone",
}
"""More load changes nothing for these, which the property allows; they keep state, so they are not asked for it."""
BY_ADDRESS = {"consistent-hash": "the ring is made of addresses: another order of slots is the same ring"}
"""Whose choice is not by slots nor by chance, so that fair ties have no meaning."""


@dataclass(frozen=True)
class Endpoint:
    """One endpoint's figures; `pending` requests of those in flight have no first token yet."""

    held_blocks: int = 0
    in_flight: int = 0
    pending: int = 0
    waiting: float = 0.0
    running: float = 0.0
    kv_used: float = 0.0
    ttft_s: float = 0.0
    errors: float = 0.0
    cost: float = 0.0
    weight: float = 1.0
    remote: bool = False
    ready: bool = True


@st.composite
def _endpoint(draw: st.DrawFn, *, may_be_out: bool = False) -> Endpoint:
    in_flight = draw(st.integers(0, 100))
    return Endpoint(
        held_blocks=draw(st.sampled_from([0, 0, 1, 4, 6, 10])),
        in_flight=in_flight,
        pending=draw(st.integers(0, in_flight)),
        waiting=float(draw(st.integers(0, 20))),
        running=float(draw(st.integers(0, 100))),
        kv_used=draw(st.integers(0, 20)) / 20,
        ttft_s=draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])),
        errors=draw(st.sampled_from([0.0, 0.1, 1.0])),
        cost=draw(st.sampled_from([0.0, 1.0, 3.0])),
        weight=draw(st.sampled_from([0.5, 1.0, 1.0, 3.0])),
        remote=draw(st.booleans()),
        ready=not may_be_out or draw(st.booleans()),
    )


Fleets = st.lists(_endpoint(), min_size=2, max_size=7)


class House:
    """A fleet of such endpoints behind one preset."""

    def __init__(self, spec: PolicySpec, endpoints: list[Endpoint]) -> None:
        self.state = FleetState(stale_after_s=1.0, max_endpoints=64)
        ledger = Ledger(Profile())
        self.placement = Placement(
            "p", spec.build("p"), PrefixIndex(spec.index_tokens or 100_000), ledger, filters=spec.filters
        )
        for number, endpoint in enumerate(endpoints):
            self._add(number, endpoint, ledger)
        self.placement.set_members(range(len(endpoints)))

    def _add(self, number: int, endpoint: Endpoint, ledger: Ledger) -> None:
        state, slot = self.state, self.state.add(f"10.0.0.{number}:80")
        state.state[slot] = State.READY if endpoint.ready else State.DRAINING
        state.routable[slot] = True
        state.kv_capacity_tokens[slot] = 100_000
        state.set_models(slot, frozenset({"m"}))
        state.in_flight[slot], state.in_flight_prompt_tokens[slot] = endpoint.in_flight, 500 * endpoint.in_flight
        _book(ledger, slot, endpoint.pending)
        if endpoint.ttft_s:
            state.timed(slot, endpoint.ttft_s, 0.0)
        state.scraped(slot, waiting=endpoint.waiting, running=endpoint.running, kv_used=endpoint.kv_used, now_s=0.0)
        state.error_ewma[slot], state.cost[slot], state.remote[slot] = endpoint.errors, endpoint.cost, endpoint.remote
        state.weight[slot] = endpoint.weight
        count = endpoint.held_blocks
        self.placement.index.insert(slot, list(_BLOCKS["block_hashes"])[:count], _BLOCKS["block_tokens"][:count], 0.0)

    def busier(self, slot: int, requests: int, pending: int, waiting: float, kv_used: float) -> None:
        """More load, all else equal: requests, those of them still to prefill, and the engine's figures."""
        state = self.state
        state.in_flight[slot] += requests
        state.in_flight_prompt_tokens[slot] += 500 * requests
        _book(self.placement.ledger, slot, min(pending, requests))
        for name, more in (("waiting", waiting), ("running", waiting), ("kv_used", kv_used)):
            getattr(state, name)[slot] += more
            getattr(state, f"{name}_level")[slot] += more

    def choose(self, seed: int = 1, **fields: object) -> Decision | Unplaceable:
        """All candidates in order."""
        values = {"kind": Kind.CHAT, "model": "m", "asked_model": "m", "input_tokens": _PROMPT} | _BLOCKS | fields
        request = InferenceRequest(**values)  # type: ignore[arg-type]
        return self.placement.choose(request, self.state, 0.0, Random(seed), length=64)

    def ranking(self, seed: int = 1, **fields: object) -> Ranking:
        """The same, where somebody is left."""
        decision = self.choose(seed, **fields)
        assert isinstance(decision, Decision)
        return decision.ranking


def _book(ledger: Ledger, slot: int, requests: int) -> None:
    """So many requests without a first token, of which 400 tokens each are not cached."""
    if requests:
        ledger.committed(Reservation(slot, 1, 500 * requests, 400 * requests), 0.0)
        ledger.pending[slot] += requests - 1


def _ahead(ranking: Ranking, slot: int) -> tuple[int, int]:
    """How many are surely ahead of `slot`, and how many are ahead or level with it."""
    scores = ranking.scores
    own = scores[int(np.flatnonzero(ranking.candidates == slot)[0])]
    return int((scores > own + _TIE).sum()), int((scores >= own - _TIE).sum())


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(LOAD_BLIND)))
@settings(max_examples=50)
@given(
    endpoints=Fleets,
    pick=st.integers(0, 6),
    more=st.tuples(
        st.integers(0, 40),
        st.sampled_from([0, 0, 1, 40]),
        st.sampled_from([0.0, 0.0, 1.0, 20.0]),
        st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    ),
)
def test_more_load_never_raises_an_endpoint(
    name: str, endpoints: list[Endpoint], pick: int, more: tuple[int, int, float, float]
) -> None:
    """Whoever was ahead of it stays ahead of it, and who was level with it does not fall behind."""
    house, slot = House(PRESETS[name], endpoints), pick % len(endpoints)
    before = _ahead(house.ranking(session_key="s"), slot)
    house.busier(slot, *more)
    after = _ahead(house.ranking(session_key="s"), slot)
    assert after[0] >= before[0]
    assert after[1] >= before[1]


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(BY_ADDRESS)))
@settings(max_examples=25)
@given(endpoints=Fleets, data=st.data())
def test_slots_are_only_names(name: str, endpoints: list[Endpoint], data: st.DataObject) -> None:
    """The same endpoints in other slots get the same scores, so the same one is chosen, up to chance."""
    order = data.draw(st.permutations(range(len(endpoints))))
    scores = House(PRESETS[name], endpoints).ranking().scores
    renamed = House(PRESETS[name], [endpoints[number] for number in order]).ranking().scores
    if name == "round-robin":  # its turns begin at the lowest slot, whoever has it
        assert (scores == renamed).all()
        assert (np.diff(scores) < 0).all()
    else:
        assert renamed == pytest.approx(scores[list(order)])


@settings(max_examples=25)
@given(endpoints=Fleets)
def test_turns_go_by_weight_alone(endpoints: list[Endpoint]) -> None:
    """In six turns a head by round robin each is first six times; by weight as often as its share, whatever it does."""
    turns, weights = 6 * len(endpoints), np.array([endpoint.weight for endpoint in endpoints])
    assert (_firsts("round-robin", endpoints, turns) == 6).all()
    shares = turns * weights / weights.sum()
    assert (abs(_firsts("weighted-round-robin", endpoints, turns) - shares) < 1.5).all()


def _firsts(name: str, endpoints: list[Endpoint], turns: int) -> Floats:
    """How often each endpoint was first in so many turns."""
    house, firsts = House(PRESETS[name], endpoints), np.zeros(len(endpoints))
    for seed in range(turns):
        decision = house.choose(seed)
        assert isinstance(decision, Decision)
        house.placement.policy.committed(decision)
        firsts[decision.order[0]] += 1
    return firsts


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(BY_ADDRESS)))
def test_equals_share_alike(name: str) -> None:
    """Four endpoints of which nothing is known: each is first about as often as any other."""
    firsts = _firsts(name, [Endpoint()] * 4, 400)
    assert all(60 <= firsts[slot] <= 140 for slot in range(4))


@pytest.mark.parametrize("name", sorted(PRESETS))
@settings(max_examples=20)
@given(endpoints=st.lists(_endpoint(may_be_out=True), min_size=1, max_size=7))
def test_no_score_brings_a_filtered_endpoint_back(name: str, endpoints: list[Endpoint]) -> None:
    """Whatever it holds and however idle it is; and all that are left are on the list, once."""
    there = {number for number, endpoint in enumerate(endpoints) if endpoint.ready}
    decision = House(PRESETS[name], endpoints).choose()
    if isinstance(decision, Unplaceable):
        assert not there
    else:
        assert sorted(decision.order) == sorted(there)


@pytest.mark.parametrize("name", sorted(PRESETS))
@settings(max_examples=20)
@given(endpoints=Fleets, prompt=st.sampled_from([0, 1, 999, 50_000]))
def test_explanations_are_finite(name: str, endpoints: list[Endpoint], prompt: int) -> None:
    """Nothing that JSON cannot say; one figure per candidate."""
    ranking = House(PRESETS[name], endpoints).ranking(input_tokens=prompt)
    for figures in (ranking.scores, *ranking.parts.values()):
        assert figures.shape == ranking.candidates.shape
        assert np.isfinite(figures).all()


def test_exceptions_are_presets() -> None:
    """A list of names that nobody has is no reason."""
    assert {*LOAD_BLIND, *BY_ADDRESS} <= set(PRESETS)


def test_a_prompt_beyond_every_cache_has_a_finite_cost() -> None:
    """It will be refused by the engine, not by arithmetic."""
    ranking = House(PRESETS["default"], [Endpoint(), Endpoint()]).ranking(input_tokens=10**7)
    assert np.isfinite(ranking.scores).all()


def test_equal_holders_share_alike() -> None:
    """Two endpoints with the whole prompt and nothing to do: chance decides between them, under the default too."""
    house = House(PRESETS["default"], [Endpoint(held_blocks=10), Endpoint(held_blocks=10), Endpoint()])
    firsts = Counter(house.ranking(seed).order[0] for seed in range(200))
    assert all(60 <= firsts[slot] <= 140 for slot in (0, 1))
