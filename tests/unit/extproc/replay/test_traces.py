"""Traces: faster and slower, cut to an engine's size, and what could be found cached at best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from extproc.replay.formats import conversations
from extproc.replay.scenarios import flood
from extproc.replay.traces import Trace, TraceRequest


def test_a_rate_is_what_is_asked_for() -> None:
    """Arrivals are stretched; a seed moves each by the trace's jitter, so that no two seeds are alike."""
    trace = conversations.generate(500)
    paced, other = trace.at_rate(20.0, 1), trace.at_rate(20.0, 2)
    assert paced.requests_per_s == pytest.approx(20.0, rel=0.02)
    assert [one.arrives_s for one in paced.requests] != [one.arrives_s for one in other.requests]


def test_the_rate_of_waiting_sessions_counts_their_starts() -> None:
    """The others come when answers do."""
    requests = [TraceRequest(float(10 * (n // 2)), 20, 1, [n], 1, after=n - 1 if n % 2 else None) for n in range(20)]
    trace = Trace("closed", 16, requests)
    assert trace.closed
    paced = trace.at_rate(2.0, 1)
    assert paced.sessions_per_s == pytest.approx(2.0)
    assert [one.after for one in paced.requests] == [one.after for one in requests]


def test_requests_are_cut_to_what_an_engine_can_run() -> None:
    """60 % of its cache for the prompt, 90 % with the answer; blocks and the router's view of them follow."""
    long = TraceRequest(0.0, 2000, 2000, list(range(250)), 125, asked_blocks=[1, 2, 3], asked_tokens=[400, 600, 1000])
    (cut,) = Trace("long", 16, [long]).fitted(1600).requests
    assert (cut.prompt_tokens, cut.output_tokens) == (960, 480)
    assert (cut.prompt_blocks, len(cut.blocks)) == (60, 90)
    assert (cut.asked_blocks, cut.asked_tokens) == ([1], [400])


def test_the_ideal_counts_whole_leading_blocks_and_never_the_last_token(make_trace: Any) -> None:
    """A gap ends a prefix; what warms up the cache is not counted."""
    trace = make_trace([1, 2], [1, 2], [1, 9, 2])
    assert trace.ideal_hit_rate() == pytest.approx((32 + 16) / (33 + 33 + 49))
    assert trace.ideal_hit_rate(first=1) == pytest.approx((32 + 16) / (33 + 49))
    exact = replace(trace, requests=[replace(one, prompt_tokens=32) for one in trace.requests[:2]])
    assert exact.ideal_hit_rate() == pytest.approx(16 / 64)


def test_a_digest_tells_traces_apart_by_what_is_in_them(make_trace: Any) -> None:
    """Not by name."""
    trace = make_trace([1, 2], [3])
    assert trace.digest == replace(trace, name="other").digest
    others = [make_trace([1, 2], [4]), make_trace([1, 2], [3], output_tokens=5), make_trace([1, 2], [3], gap_s=2.0)]
    assert len({trace.digest, *(one.digest for one in others)}) == 4


def test_a_flood_is_one_prefix_for_a_fifth_of_the_time() -> None:
    """Three times the trace's own rate, and in order."""
    trace = conversations.generate(1000)
    flooded = flood(trace)
    hot = [one for one in flooded.requests if one.prompt_tokens == 8492]
    assert len(hot) == pytest.approx(0.2 * 3 * 1000, rel=0.15)
    assert len({tuple(one.blocks[:64]) for one in hot}) == 1
    arrivals = [one.arrives_s / trace.span_s for one in hot]
    assert min(arrivals) >= 0.4
    assert max(arrivals) <= 0.61
    assert len(flooded.requests) == 1000 + len(hot)
