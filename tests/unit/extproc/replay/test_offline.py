"""The replay's driver: what it tells the policy, what it reads off the engines, and what befalls them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from extproc.replay.entrants import entrants
from extproc.replay.formats import conversations
from extproc.replay.offline import Disturbance, Fleet, Replay, Run, Stuck
from policies.placement.policy import PolicySpec


def _spec(name: str) -> PolicySpec:
    return entrants([name])[0].spec


def _replayed(trace: Any, policy: str = "round-robin", fleet: Fleet | None = None, **options: Any) -> Run:
    return Replay(trace, _spec(policy), fleet or Fleet(engines=2), **options).run()


def test_what_the_engine_found_cached_is_read_off_it(make_trace: Any) -> None:
    """Beside what the router's index promised: here both know the first prompt's three blocks."""
    run = _replayed(make_trace([1, 2, 3], [1, 2, 3, 4]), fleet=Fleet(engines=1))
    assert [(one.cached_tokens, one.predicted_tokens) for one in run.outcomes] == [(0, 0), (48, 48)]


def test_an_exact_index_knows_answers_that_the_routers_own_does_not(make_trace: Any) -> None:
    """The first answer fills a block that the second prompt begins with."""
    trace = make_trace([1], [1, 2, 3], output_tokens=40)
    first = replace(trace.requests[0], blocks=[1, 2, 3])
    trace = replace(trace, requests=[first, trace.requests[1]])
    own = _replayed(trace, fleet=Fleet(engines=1)).outcomes[1]
    exact = _replayed(trace, fleet=Fleet(engines=1), exact=True).outcomes[1]
    assert (own.predicted_tokens, own.cached_tokens) == (16, 48)
    assert (exact.predicted_tokens, exact.cached_tokens) == (48, 48)


def test_an_exact_index_promises_nothing_that_was_evicted(make_trace: Any) -> None:
    """A cache of ten blocks: the second prompt pushes the first one out, whatever the router's index thinks."""
    prompts = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5]]
    fleet = Fleet(engines=1, kv_capacity_tokens=160)
    spec = replace(_spec("round-robin"), index_tokens=1_000_000)
    own = Replay(make_trace(*prompts), spec, fleet).run().outcomes[2]
    exact = Replay(make_trace(*prompts), spec, fleet, exact=True).run().outcomes[2]
    assert own.predicted_tokens == 80
    assert exact.predicted_tokens == exact.cached_tokens < 80


def test_requests_on_a_dead_engine_start_again_elsewhere(make_trace: Any) -> None:
    """After the notice; what is sent there in between is lost as well. Nothing goes there afterwards."""
    trace = make_trace(*([number] for number in range(8)), output_tokens=300)
    death = Disturbance(at_s=2.5, what="kill", engine=1)
    run = _replayed(trace, fleet=Fleet(engines=2, notice_s=2.0, disturbances=(death,)))
    assert all(one.ended_s > one.first_token_s > one.arrived_s for one in run.outcomes)
    assert {one.engine for one in run.outcomes} == {0}
    late = [one.arrived_s for one in run.outcomes if one.first_token_s >= 4.5 and one.arrived_s < 4.5]
    assert late == [
        1.0,
        3.0,
    ]  # ran on engine 1 at 2.5 s; was sent there before the notice at 4.5 s


def test_an_engine_that_joins_is_used_from_then_on(make_trace: Any) -> None:
    """And not before."""
    trace = make_trace(*([number] for number in range(8)))
    run = _replayed(trace, fleet=Fleet(engines=2, disturbances=(Disturbance(at_s=3.5, what="join", engine=1),)))
    assert [one.engine for one in run.outcomes[:4]] == [0, 0, 0, 0]
    assert 1 in {one.engine for one in run.outcomes[4:]}


def test_requests_wait_for_an_engine_that_joins(make_trace: Any) -> None:
    """Where there is none else."""
    run = _replayed(
        make_trace([1], [2]), fleet=Fleet(engines=1, disturbances=(Disturbance(at_s=5.0, what="join", engine=0),))
    )
    assert all(one.first_token_s > 5.0 for one in run.outcomes)


def test_a_fleet_that_died_out_is_reported_and_not_waited_for(make_trace: Any) -> None:
    """Scrapes alone would go on for ever."""
    fleet = Fleet(engines=1, scrape_interval_s=600.0, disturbances=(Disturbance(at_s=0.5, what="kill", engine=0),))
    with pytest.raises(Stuck, match="1 requests are left"):
        _replayed(make_trace([1], [2]), fleet=fleet)


def test_a_slow_engine_takes_as_much_longer(make_trace: Any) -> None:
    """Half the speed, twice the time."""
    trace = make_trace([1], [2], gap_s=100.0)
    full, half = _replayed(trace, fleet=Fleet(engines=2, speeds=(1.0, 0.5))).outcomes
    assert (half.ended_s - half.arrived_s) == pytest.approx(2 * (full.ended_s - full.arrived_s))


def test_the_router_sees_the_engines_as_often_as_it_scrapes() -> None:
    """A policy that lives by scrapes places otherwise when they are five seconds old; one that does not, the same."""
    trace = conversations.generate(200).at_rate(40, 1)
    fresh, stale = (Fleet(engines=2, scrape_interval_s=interval) for interval in (0.05, 5.0))
    placed = {
        (policy, fleet.scrape_interval_s): [one.engine for one in _replayed(trace, policy, fleet).outcomes]
        for policy in ("llm-d-default", "least-request")
        for fleet in (fresh, stale)
    }
    assert placed["llm-d-default", 0.05] != placed["llm-d-default", 5.0]
    assert placed["least-request", 0.05] == placed["least-request", 5.0]


@pytest.mark.parametrize("told", ["seen", "timed", "never"])
def test_prefill_rates_are_learned_where_first_tokens_are_told(told: Any) -> None:
    """As they come or afterwards; where they never are, the profile's rate stays."""
    trace = conversations.generate(300).at_rate(20, 1)
    replay = Replay(trace, _spec("default"), Fleet(engines=2, first_tokens=told))
    replay.run()
    learned = replay._placement.ledger.rate_time_s[:2]
    assert all(seconds > 0 for seconds in learned) is (told != "never")


def test_a_seed_decides_everything() -> None:
    """Twice the same, to the last digit; another seed, another outcome."""
    trace = conversations.generate(200).at_rate(40, 1)
    one, again, other = (_replayed(trace, "power-of-two", seed=seed).outcomes for seed in (1, 1, 2))
    assert [(a.engine, a.ended_s) for a in one] == [(a.engine, a.ended_s) for a in again]
    assert [a.engine for a in one] != [a.engine for a in other]


def test_a_fixed_number_in_flight_measures_what_a_fleet_can_take() -> None:
    """Twice the engines, about twice the throughput."""
    trace = conversations.generate(1200)
    runs = [_replayed(trace, "least-request", Fleet(engines=count), in_flight=32 * count) for count in (1, 2)]
    one, two = (run.drained_count / run.drained_s for run in runs)
    assert 1.6 < two / one < 2.4


def test_samples_tell_load_and_hits_over_time(make_trace: Any) -> None:
    """A request a second, each over at the half; the second finds three blocks of the first."""
    run = _replayed(make_trace([1, 2, 3], [1, 2, 3, 4], [9]), fleet=Fleet(engines=1), sample_s=0.5)
    seen = [(sample.at_s, sample.load, sample.hit_tokens) for sample in run.samples]
    assert seen == [(0.0, (1,), (0,)), (0.5, (0,), (0,)), (1.0, (1,), (48,)), (1.5, (0,), (48,)), (2.0, (1,), (48,))]
