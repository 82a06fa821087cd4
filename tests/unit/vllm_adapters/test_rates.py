"""Counters as rates: over what interval, and across restarts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapters.metrics import EngineFigures
from vllm_adapters.rates import INTERVAL_S, Change, Counters, Rates


def page(tokens: float, **others: float | dict[str, float] | None) -> EngineFigures:
    """A page of an engine that has generated so many tokens."""
    return EngineFigures(1.0, 0.0, generated_tokens=tokens, **others)  # type: ignore[arg-type]


def test_a_rate_is_over_an_interval_of_scrapes() -> None:
    """Not over the fifth of a second between two; none before the first interval is over."""
    counters = Counters()
    for turn in range(25):
        assert counters.take(page(100.0 * turn), 0.2 * turn) == Change()
        assert counters.rates == Rates()
    assert counters.take(page(3_000.0), INTERVAL_S).closed
    assert counters.rates.generated_tokens_per_s == pytest.approx(600.0)
    counters.take(page(3_000.0), 2 * INTERVAL_S)
    assert counters.rates.generated_tokens_per_s == 0.0


def test_every_counter_has_its_own_rate() -> None:
    """What the engine does not count stays unknown."""
    counters = Counters()
    counters.take(EngineFigures(prefilled_tokens=10.0, preemptions=1.0), 0.0)
    counters.take(EngineFigures(prefilled_tokens=110.0, preemptions=6.0), 10.0)
    assert counters.rates == Rates(None, 10.0, 0.5, None)


def test_the_hit_ratio_is_of_the_last_interval_that_had_prompts() -> None:
    """An engine that served well for a week and badly for a minute serves badly; an idle one says nothing new."""
    counters = Counters()
    for turn, (queried, hits) in enumerate([(1e9, 9e8), (1e9 + 1_000, 9e8 + 100), (1e9 + 1_000, 9e8 + 100)]):
        counters.take(EngineFigures(prefix_queries_tokens=queried, prefix_hits_tokens=hits), turn * INTERVAL_S)
    assert counters.rates.hit_ratio == pytest.approx(0.1)


def test_a_ratio_that_is_told_stands_where_counters_do_not() -> None:
    """As some engines have it."""
    counters = Counters()
    for turn in range(2):
        counters.take(EngineFigures(hit_ratio=0.25), turn * INTERVAL_S)
    assert counters.rates.hit_ratio == 0.25


def test_a_restart_gives_no_negative_rate_and_is_told() -> None:
    """By another start time: the interval begins anew."""
    counters = Counters()
    counters.take(page(9_000.0, started_at_s=1.0), 0.0)
    assert counters.take(page(50.0, started_at_s=2.0), INTERVAL_S) == Change(restarted=True)
    assert counters.rates == Rates()
    assert not counters.take(page(50.0, started_at_s=2.0), INTERVAL_S + 1).restarted
    counters.take(page(550.0, started_at_s=2.0), 2 * INTERVAL_S)
    assert counters.rates.generated_tokens_per_s == pytest.approx(100.0)


@pytest.mark.parametrize("counter", ["prefix_queries_tokens", "prefix_hits_tokens"])
def test_a_counter_that_fell_is_a_restart_too(counter: str) -> None:
    """Of engines that tell no start time; a page that leaves it out in between is none."""
    counters = Counters()
    for value in (500.0, 700.0, None, 700.0):
        assert not counters.take(page(1.0, **{counter: value}), 0.0).restarted
    assert counters.take(page(1.0, **{counter: 699.0}), 0.0).restarted


def test_steps_that_fell_are_a_restart_where_there_is_nothing_else() -> None:
    """Triton tells no start and no cache hits. vLLM does, and may tell its progress otherwise from page to page."""
    for dialect, restarted in (("triton-trtllm", True), ("vllm", False)):
        counters = Counters()
        counters.take(EngineFigures(progress=500.0, dialect=dialect), 0.0)
        assert counters.take(EngineFigures(progress=20.0, dialect=dialect), 1.0).restarted is restarted


def test_what_ended_is_told_once() -> None:
    """From the second page on; after a restart all that the new run has ended."""
    counters = Counters()
    pages = [({"stop": 5.0}, 1.0), ({"stop": 7.0, "abort": 1.0}, 1.0), ({}, 1.0), ({"stop": 7.0, "abort": 1.0}, 1.0)]
    ended = [counters.take(page(1.0, finished=done, started_at_s=run), 0.0).finished for done, run in pages]
    assert ended == [{}, {"stop": 2.0, "abort": 1.0}, {}, {}]
    assert counters.take(page(1.0, finished={"stop": 3.0}, started_at_s=2.0), 0.0).finished == {"stop": 3.0}


def test_cached_tokens_found_since_the_last_page_are_told() -> None:
    """Of an engine that counts them, from the second page on; a page without says nothing of them."""
    counters = Counters()
    pages = [5.0, 8.0, None, 9.0, 2.0]
    told = [counters.take(EngineFigures(prefix_hits_tokens=hits), 0.0).hit_tokens for hits in pages]
    assert told == [None, 3.0, None, 1.0, 2.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=40))
def test_rates_are_of_what_was_done(steps: list[tuple[int, bool]]) -> None:
    """Whatever an engine does and however often it restarts: no rate is negative, none above the fastest second."""
    counters, tokens, run = Counters(), 0.0, 1.0
    for second, (done, restarts) in enumerate(steps):
        tokens, run = (0.0, run + 1) if restarts else (tokens + done, run)
        change = counters.take(page(tokens, started_at_s=run), float(second))
        assert change.restarted == (restarts and second > 0)
        assert 0 <= (counters.rates.generated_tokens_per_s or 0.0) <= 9


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30))
def test_nothing_that_ended_is_lost_or_told_twice(counts: list[int]) -> None:
    """Of a counter that grows and begins anew at will, all of its growth after the first page."""
    counters = Counters()
    told = [counters.take(page(1.0, finished={"stop": float(count)}), 0.0).finished for count in counts]
    grown = sum(now - before if now >= before else now for before, now in pairwise(counts))
    assert sum(one.get("stop", 0.0) for one in told) == grown
