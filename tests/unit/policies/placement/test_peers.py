"""Peers' rules against plain transcriptions of what they publish, over any figures; and their own defaults.

The transcriptions go one endpoint at a time, as the peers' own code does; the product's are array formulas.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet_state import FleetState
from policies.placement.ledger import Ledger
from policies.placement.peers import (
    AibrixPrefixSpec,
    CacheAwareSpec,
    DynamoKvSpec,
    LlmDSpec,
    LmetricSpec,
    PrebleE2Spec,
    SmgCacheAwareSpec,
)
from policies.placement.policy import FormulaSpec
from policies.placement.prefix_index import PrefixIndex
from policies.placement.view import View
from policies.types import InferenceRequest, Kind

_PROMPT = 1_000


@dataclass(frozen=True)
class Endpoint:
    """What a rule may know of one endpoint. `waiting_tokens` are uncached, of requests without a first token."""

    held: int
    load: int
    queue: int = 0
    kv_used: float = 0.0
    waiting: int = 0
    waiting_tokens: int = 0
    prompt_tokens: int = 0


def _view(endpoints: list[Endpoint], *, stale: bool = False) -> View:
    state, ledger = FleetState(stale_after_s=1.0, max_endpoints=64), Ledger()
    for number, endpoint in enumerate(endpoints):
        slot = state.add(f"10.0.0.{number}:80")
        state.observed_at_s[slot] = -9.0 if stale else 0.0
        state.in_flight[slot] = endpoint.load
        state.in_flight_prompt_tokens[slot] = endpoint.prompt_tokens
        state.waiting[slot], state.kv_used[slot] = endpoint.queue, endpoint.kv_used
    slots = np.arange(len(endpoints), dtype=np.intp)
    ledger.waiting_tokens(slots)  # makes room for the slots
    ledger.pending[slots] = [endpoint.waiting for endpoint in endpoints]
    ledger.pending_tokens[slots] = [endpoint.waiting_tokens for endpoint in endpoints]
    held = np.array([endpoint.held for endpoint in endpoints], np.float64)
    request = InferenceRequest(Kind.CHAT, "m", "m", _PROMPT)
    return View(request, state, slots, held, 0.0, Random(1), PrefixIndex(10_000), ledger)


@st.composite
def _endpoints(draw: st.DrawFn) -> Endpoint:
    load = draw(st.integers(0, 120))
    waiting = draw(st.integers(0, load))
    tokens = draw(st.integers(0, 10_000))
    return Endpoint(
        held=draw(st.sampled_from([0, 100, 300, 301, 304, 309, 500, 600, 1_000])),
        load=load,
        queue=draw(st.integers(0, 9)),
        kv_used=draw(st.integers(0, 10)) / 10,
        waiting=waiting,
        waiting_tokens=tokens if waiting else 0,
        prompt_tokens=tokens + draw(st.integers(0, 10_000)),
    )


Fleet = st.lists(_endpoints(), min_size=1, max_size=9)


def _first(spec: FormulaSpec, endpoints: list[Endpoint]) -> set[int]:
    """Everybody who may come first: the best and those tied with it."""
    scores = spec.scored(_view(endpoints))[0]
    return set(np.flatnonzero(scores >= scores.max() - 1e-9).tolist())


def _least(values: list[float]) -> set[int]:
    return {number for number, value in enumerate(values) if value <= min(values) + 1e-9}


def _among(numbers: set[int], values: list[float]) -> set[int]:
    least = min(values[number] for number in numbers)
    return {number for number in numbers if values[number] <= least + 1e-9}


def _cache_aware(endpoints: list[Endpoint]) -> set[int]:
    loads, most = [float(e.load) for e in endpoints], max(e.held for e in endpoints)
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return _least(loads)
    if most / _PROMPT > 0.3:
        return {number for number, e in enumerate(endpoints) if e.held == most}
    return _least(loads)


def _smg(endpoints: list[Endpoint]) -> set[int]:
    loads, most = [float(e.load) for e in endpoints], max(e.held for e in endpoints)
    if most / _PROMPT <= 0.3:
        return _least(loads)
    chosen = _among({number for number, e in enumerate(endpoints) if e.held == most}, loads)
    load, mean = loads[min(chosen)], statistics.fmean(loads)
    slack = min(64.0, max(4.0, 2 * statistics.pstdev(loads)))
    return _least(loads) if load > 1.5 * mean and load > mean + slack else chosen


def _aibrix(endpoints: list[Endpoint]) -> set[int]:
    loads = [float(e.load) for e in endpoints]
    mean, deviation = statistics.fmean(loads), statistics.pstdev(loads)
    eligible = {number for number, e in enumerate(endpoints) if e.held > 0 and e.load <= mean + 2 * deviation + 1e-9}
    if max(loads) - min(loads) > 16 or not eligible:
        return _least(loads)
    return _among(eligible, [e.load - int(100 * e.held / _PROMPT) * 1e6 for e in endpoints])


def _llm_d(endpoints: list[Endpoint]) -> set[int]:
    most, least = max(e.queue for e in endpoints), min(e.queue for e in endpoints)

    def score(e: Endpoint) -> float:
        queue = (most - e.queue) / (most - least) if most > least else 1.0
        return 2 * queue + 2 * (1 - e.kv_used) + 3 * e.held / _PROMPT

    return _least([-score(e) for e in endpoints])


def _dynamo(endpoints: list[Endpoint]) -> set[int]:
    return _least([max(e.waiting_tokens + _PROMPT - e.held, 0) + e.prompt_tokens + _PROMPT for e in endpoints])


def _lmetric(endpoints: list[Endpoint]) -> set[int]:
    return _least([float((e.waiting_tokens + _PROMPT - e.held) * (e.load + 1)) for e in endpoints])


def _preble(endpoints: list[Endpoint]) -> set[int]:
    costs = [
        e.waiting_tokens + _PROMPT - e.held + (e.prompt_tokens - e.waiting_tokens) * 0.001 * (e.load - e.waiting)
        for e in endpoints
    ]
    most = max(e.held for e in endpoints)
    holders = {number for number, e in enumerate(endpoints) if e.held == most}
    return _among(holders, costs) if most > _PROMPT - most else _least(costs)


@pytest.mark.parametrize(
    ("spec", "published"),
    [
        (CacheAwareSpec(), _cache_aware),
        (SmgCacheAwareSpec(), _smg),
        (AibrixPrefixSpec(), _aibrix),
        (LlmDSpec(), _llm_d),
        (DynamoKvSpec(), _dynamo),
        (LmetricSpec(), _lmetric),
        (PrebleE2Spec(), _preble),
    ],
    ids=lambda part: part.kind if isinstance(part, FormulaSpec) else "",
)
@given(endpoints=Fleet)
def test_a_rule_chooses_whom_its_publication_would(
    spec: FormulaSpec, published: Callable[[list[Endpoint]], set[int]], endpoints: list[Endpoint]
) -> None:
    """Over any loads, queues and caches, ties included."""
    assert _first(spec, endpoints) == published(endpoints)


def test_cache_aware_ignores_load_while_in_balance() -> None:
    """64 requests apart is still in balance; 65 is not, if it is also half as much again."""
    holder, idle = Endpoint(held=900, load=64), Endpoint(held=0, load=0)
    assert _first(CacheAwareSpec(), [holder, idle]) == {0}
    assert _first(CacheAwareSpec(), [Endpoint(held=900, load=65), idle]) == {1}
    assert _first(CacheAwareSpec(), [Endpoint(held=900, load=200), Endpoint(held=0, load=134)]) == {0}


def test_smg_replicates_a_hot_prefix_before_cache_aware_does() -> None:
    """One request above mean + 4 and 1.5 x the mean is enough in a small, otherwise even fleet."""
    endpoints = [Endpoint(held=900, load=12), *[Endpoint(held=0, load=2)] * 7]
    assert _first(SmgCacheAwareSpec(), endpoints) == set(range(1, 8))
    assert _first(CacheAwareSpec(), endpoints) == {0}


def test_llm_d_stretches_the_queue() -> None:
    """One waiting request outweighs two thirds of the prompt, as it would were there five hundred."""
    for queue in (1, 500):
        assert _first(LlmDSpec(), [Endpoint(held=600, load=0, queue=queue), Endpoint(held=0, load=0)]) == {1}


def test_llm_d_goes_by_our_counts_where_the_scrape_is_stale() -> None:
    """An empty queue of long ago is not believed."""
    view = _view([Endpoint(held=0, load=9), Endpoint(held=0, load=0, queue=9)], stale=True)
    assert LlmDSpec().scored(view)[0].argmax() == 1


def test_failing_over_goes_to_the_less_loaded() -> None:
    """The rest of the list, of which the rules say nothing."""
    endpoints = [Endpoint(held=900, load=3), Endpoint(held=0, load=2), Endpoint(held=0, load=1)]
    for spec in (CacheAwareSpec(), SmgCacheAwareSpec(), AibrixPrefixSpec()):
        assert spec.build("p").rank(_view(endpoints), 3).order == [0, 2, 1]
