"""Engines that report more cache than they have, in replays: what calibration makes of them, and of honest ones."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest

from extproc.replay.entrants import entrants
from extproc.replay.formats import conversations
from extproc.replay.offline import Fleet, Replay, Run
from extproc.replay.traces import Trace
from vllm_adapters.simulator.blocks import BlockCache

TRUTH_TOKENS = 60_000
ENGINES = 8
TRACE = conversations.generate(2_000)


class Lying(Replay):
    """Every engine reports `lie` times the cache it has, and tells with each answer what it found."""

    def __init__(self, trace: Trace, lie: float, *, calibrates: bool, rate: float = 4.0) -> None:
        self._lie = lie
        fleet = Fleet(engines=ENGINES, kv_capacity_tokens=round(lie * TRUTH_TOKENS), first_tokens="timed")
        super().__init__(trace.fitted(TRUTH_TOKENS).at_rate(rate, 1), entrants(["default"])[0].spec, fleet)
        self.calibration = self._placement.calibration
        self.calibration.enabled = calibrates
        for node in self._nodes:
            self.calibration.set_capacity(node.slot, fleet.capacity_tokens)
        self.scales: list[float] = []

    def _node(self, number: int) -> Any:
        node = super()._node(number)
        node.engine.cache = BlockCache(TRUTH_TOKENS // self._trace.block_tokens)
        return node

    def _end(self, number: int) -> None:
        outcome = self._outcomes[number]
        reservation, found = outcome.reservation, outcome.running.cached_tokens if outcome.running else 0
        super()._end(number)
        if reservation is not None:
            self.calibration.answered(reservation.slot, reservation.promise, found)
        self.scales.append(self.calibration.scale(number % ENGINES))


def _found(run: Run) -> float:
    """Share of the prompt tokens of the later half that engines found cached."""
    later = range(len(run.outcomes) // 2, len(run.outcomes))
    prompts = sum(run.trace.requests[number].prompt_tokens for number in later)
    return sum(run.outcomes[number].cached_tokens for number in later) / prompts


@pytest.mark.parametrize("lie", [2, 4])
def test_an_index_is_corrected_to_the_cache_there_is(lie: float) -> None:
    """Within a fifth for nearly all of the later half."""
    replay = Lying(TRACE, lie, calibrates=True)
    replay.run()
    later = replay.scales[len(replay.scales) // 2 :]
    near = [scale for scale in later if 0.8 <= scale * lie <= 1.25]
    assert len(near) >= 0.8 * len(later)
    assert abs(sum(log(scale * lie) for scale in later) / len(later)) < log(1.2)


def test_what_a_lie_costs_is_won_back() -> None:
    """More than half of the hits that engines lose to their saying four times what they have."""
    told_truth, told_lies, corrected = (
        _found(Lying(TRACE, lie, calibrates=calibrates).run())
        for lie, calibrates in ((1, False), (4, False), (4, True))
    )
    assert told_truth - told_lies > 0.04
    assert corrected - told_lies > 0.5 * (told_truth - told_lies)


@pytest.mark.parametrize("rate", [4.0, 12.0])
def test_an_honest_engine_is_not_shrunk(rate: float) -> None:
    """Nor in an overloaded fleet, where a third of what was promised is gone by the time a request is let in."""
    replay = Lying(replace(TRACE, requests=TRACE.requests[:1_000]), 1, calibrates=True, rate=rate)
    replay.run()
    assert set(replay.scales) == {1.0}
