"""Messages between the decision loop and the senses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.senses.messages import (
    Alive,
    Frames,
    Pace,
    Probed,
    ProbeNow,
    Scraped,
    Target,
    Tried,
    Try,
    Watch,
    encode,
    from_senses,
    to_senses,
)
from policies.lifecycle import Evidence
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures

ORDERS = [Watch([Target("10.0.0.1:80", grpc=True)], Pace(1, 2, 3, 4, 5, 6)), ProbeNow("a:1"), Try("a:1", "m")]
REPORTS = [
    Alive(3),
    Scraped("a:1", EngineFigures(1.0, 2.0, 0.5, running_adapters=frozenset({"x"}))),
    Scraped("a:1"),
    Probed("a:1", Evidence.PROBE_REFUSED),
    Probed("a:1", Evidence.PROBE_OK, Listing(frozenset({"m", "n"}), 4_096, frozenset({"n"}))),
    Tried("a:1", 200),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_given(order: Watch | ProbeNow | Try) -> None:
    """Encoded, framed, cut out and decoded."""
    [body] = Frames().feed(encode(order))
    assert to_senses(body) == order


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_arrives_as_it_was_made(report: Alive | Scraped | Probed | Tried) -> None:
    """In the same way; sets and enumerations too."""
    [body] = Frames().feed(encode(report))
    assert from_senses(body) == report


@given(st.lists(st.integers(1, 40), max_size=30))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    """Whatever pieces arrive, the same messages come out, each once and in order."""
    stream, frames, found = b"".join(encode(report) for report in REPORTS), Frames(), []
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        found += [from_senses(body) for body in frames.feed(piece)]
    assert found == REPORTS
