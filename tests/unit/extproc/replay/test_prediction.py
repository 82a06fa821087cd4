"""How far the router's prefix index can be wrong about an engine, and why.

The index learns of a prompt when it is placed; the engine has its blocks when they are computed. So what is on its way
counts as held. Beyond that, answers and half-full blocks push prefixes out of an engine's cache. The index makes room
for as much of them as it expects; where it expects what comes, it promises a block too many at most for each of the
requests that were there at once. Where answers are longer than expected it can be wrong by the places it does not know
of, and no more: both have the same number.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.replay import offline
from extproc.replay.entrants import entrants
from extproc.replay.offline import Fleet, Replay
from extproc.replay.traces import Trace, TraceRequest
from policies.types import InferenceRequest

EXAMPLES = int(os.environ.get("PREDICTION_EXAMPLES", "50"))
_BLOCK = 16
_NAMES = st.integers(0, 3)
_AsAsked = Callable[[TraceRequest, int], InferenceRequest]


class _Watched(Replay):
    """Compares, at every placement, what the index promises with what the engine holds or is about to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compared: list[tuple[int, int, int, int]] = []
        """(blocks promised, of these held or in flight, blocks there that the index does not know, requests at once)"""
        self._most_at_once: dict[int, int] = {}

    def _arrive(self, number: int) -> None:
        known = {node.slot: self._known(node.slot) for node in self._nodes}
        super()._arrive(number)
        outcome, request = self._outcomes[number], self._trace.requests[number]
        held, unknown = known[outcome.engine]
        at_once = self._most_at_once.get(outcome.engine, 0)
        promised = outcome.predicted_tokens // _BLOCK
        leading = next((i for i, block in enumerate(request.blocks[:promised]) if block not in held), promised)
        self.compared.append((promised, leading, unknown, at_once))
        self._most_at_once[outcome.engine] = max(at_once, len(self._under_way(outcome.engine)))

    def _under_way(self, slot: int) -> list[Any]:
        engine = self._nodes[slot].engine
        return [*engine._waiting.values(), *engine._running.values()]

    def _known(self, slot: int) -> tuple[set[int], int]:
        """Blocks the engine has or is computing; how many places it spends on what the index does not know."""
        cache = self._nodes[slot].engine.cache
        complete = {*cache._holders, *cache._idle}
        coming = {
            block
            for one in self._under_way(slot)
            for block in self._trace.requests[one.request_id].blocks[: self._full(one)]
        }
        shelf = self._placement.index._shelves.get(slot)
        indexed = set(shelf.blocks) if shelf else set()
        return complete | coming, cache.capacity - len(complete & indexed)

    def _full(self, one: Any) -> int:
        return self._trace.requests[one.request_id].prompt_blocks


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Prompts that branch off each other, answers of several blocks, arrivals close together."""
    requests, at_s = [], 0.0
    for number in range(draw(st.integers(5, 40))):
        path = draw(st.lists(_NAMES, min_size=1, max_size=6))
        prompt = [hash(tuple(path[: depth + 1])) & (2**64 - 1) for depth in range(len(path))]
        output = draw(st.integers(1, 80))
        # of no prompt: a path has no name below 0
        answer = [hash((-1, number, block)) & (2**64 - 1) for block in range((1 + output) // _BLOCK)]
        at_s += draw(st.sampled_from([0.0, 0.001, 0.05, 0.5]))
        requests.append(TraceRequest(at_s, _BLOCK * len(path) + 1, output, [*prompt, *answer], len(path)))
    return Trace("random", _BLOCK, requests)


def _compared(trace: Trace, *, blocks: int, policy: str = "default") -> list[tuple[int, int, int, int]]:
    fleet = Fleet(engines=2, kv_capacity_tokens=blocks * _BLOCK)
    replay = _Watched(trace, entrants([policy])[0].spec, fleet)
    replay.run()
    return replay.compared


@settings(max_examples=EXAMPLES, deadline=None)
@given(_traces())
def test_without_evictions_every_promise_is_kept_or_on_its_way(trace: Trace) -> None:
    """The cache holds everything there is: what is promised is there, or in a prompt under way on that engine."""
    assert all(promised == held for promised, held, *_ in _compared(trace, blocks=1000))


@settings(max_examples=EXAMPLES, deadline=None)
@given(_traces(), st.integers(16, 30))
def test_where_answers_are_as_long_as_allowed_promises_exceed_by_the_blocks_in_flight_at_most(
    trace: Trace, blocks: int
) -> None:
    """Evictions all the time, and every request says how long its answer will be: the index makes room for it.

    What it cannot know is how the engine rounds half-full blocks, of which each request has one: what had to go for
    them when there were most is gone.
    """
    for promised, held, at_once in _compared_with_known_answers(trace, blocks=blocks):
        assert promised - held <= at_once


def _compared_with_known_answers(trace: Trace, *, blocks: int) -> list[tuple[int, int, int]]:
    fleet = Fleet(engines=2, kv_capacity_tokens=blocks * _BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "_as_asked", functools.partial(_limited, offline._as_asked))
        replay = _Watched(trace, entrants(["default"])[0].spec, fleet)
        ledger = replay._placement.ledger
        ledger.profile = dataclasses.replace(ledger.profile, output_tokens=1e6)  # no answer is expected to be shorter
        replay.run()
    return [(promised, held, at_once) for promised, held, _, at_once in replay.compared]


def _limited(
    as_asked: Callable[[TraceRequest, int], InferenceRequest], request: TraceRequest, block_tokens: int
) -> InferenceRequest:
    asked = as_asked(request, block_tokens)
    asked.max_tokens = request.output_tokens
    return asked


@settings(max_examples=EXAMPLES, deadline=None)
@given(_traces(), st.integers(16, 30))
def test_with_evictions_promises_exceed_by_what_the_index_cannot_know_at_most(trace: Trace, blocks: int) -> None:
    """Answers, half-full blocks and free places of that engine: never more blocks than it has of these."""
    assert all(promised - held <= unknown for promised, held, unknown, _ in _compared(trace, blocks=blocks))
