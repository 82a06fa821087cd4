"""A guard against a decision that suddenly costs twice as much. Not a benchmark: `make bench-stages` has the figures.

Two yardsticks that a busy machine does not move. How many bytecodes of Python a request takes is a count, the same in
every run; of what is compiled it sees nothing. What compiled code, arrays, parsers and copies take is seen in time
only: in ratios of CPU time of this thread to a fixed piece of work of the same kind, measured in turns in the same
process, of which the median is taken.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from benchmarks.decision_scene import Scene
from benchmarks.stages import fixed_work, thread_us
from extproc import is_compiled

WARM_UP = 60


def warm(endpoints: int, body_bytes: int) -> Scene:
    """A scene that has seen some requests."""
    scene = Scene(endpoints, body_bytes)
    for _ in range(WARM_UP):
        scene.request()
    return scene


@contextmanager
def traced_by(trace: Any) -> Iterator[None]:
    """This instead of what measures coverage, which would cost more than what is measured."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def bytecodes_of(scene: Scene) -> int:
    """Bytecodes that one request takes, whatever calls them."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    with traced_by(trace):
        scene.request()
    return count


def ratio_to_fixed_work(scene: Scene, pairs: int = 60) -> float:
    """How many times as long as the fixed work one request takes: the median of so many pairs side by side."""
    with traced_by(None):
        return statistics.median(thread_us(scene.request, 3) / thread_us(fixed_work, 3) for _ in range(pairs))


@pytest.mark.parametrize(
    ("endpoints", "body_bytes", "most"),
    [(16, 2_000, 15_000), (1_024, 2_000, 10_200), (16, 60_000, 42_000), (16, 480_000, 84_000)],
)
def test_a_request_takes_no_more_bytecodes_than_ever(endpoints: int, body_bytes: int, most: int) -> None:
    """Half as many again as when this was written; more means that something is done twice, or in a new loop."""
    assert bytecodes_of(warm(endpoints, body_bytes)) <= most


@pytest.mark.parametrize(
    ("endpoints", "body_bytes", "most", "most_compiled"),
    [(16, 2_000, 14.0, 4.0), (1_024, 2_000, 24.0, 12.0), (16, 480_000, 56.0, 50.0)],
)
def test_a_request_takes_no_more_time_than_ever(
    endpoints: int, body_bytes: int, most: float, most_compiled: float
) -> None:
    """Twice what it took when this was written, measured against work that never changes."""
    assert ratio_to_fixed_work(warm(endpoints, body_bytes)) <= (most_compiled if is_compiled() else most)
