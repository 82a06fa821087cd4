"""Passing over quiet steps changes no outcome: held against the same replay that takes every step."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.replay.entrants import entrants
from extproc.replay.formats import conversations
from extproc.replay.offline import Disturbance, Fleet, Replay
from extproc.replay.quiet_engine import QuietEngine

_CROWDED = Fleet(engines=2, kv_capacity_tokens=20_000)
_SMALL_BATCH = Fleet(engines=2, max_num_seqs=4)
_DEATH = Fleet(engines=3, speeds=(1.0, 0.5), disturbances=(Disturbance(at_s=3.0, what="kill", engine=0),))


def _replayed(fleet: Fleet) -> tuple[list[Any], int, int]:
    """(outcomes, preemptions, tokens generated): the last says that skipped steps were counted as well."""
    trace = conversations.generate(150).at_rate(25.0, 1)
    replay = Replay(trace, entrants(["default"])[0].spec, fleet, sample_s=0.5)
    run = replay.run()
    outcomes = [(one.engine, one.first_token_s, one.ended_s, one.cached_tokens) for one in run.outcomes]
    tokens = sum(node.engine.generation_tokens_total for node in replay._nodes if node.up)
    return [*outcomes, *run.samples], run.preemptions, tokens


@pytest.mark.parametrize("fleet", [Fleet(engines=2), _CROWDED, _SMALL_BATCH, _DEATH])
def test_outcomes_are_the_same_to_the_last_digit(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With preemptions, full batches, slow engines and a death in the middle of what is passed over."""
    quick = _replayed(fleet)
    monkeypatch.setattr(QuietEngine, "quiet_steps", lambda _: 0)
    assert _replayed(fleet) == quick
    assert (fleet is _CROWDED) == (quick[1] > 0)


def test_most_steps_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would not be worth having."""
    taken = skipped = 0
    start, skip = QuietEngine.start_step, QuietEngine.skip

    def counted_start(engine: QuietEngine) -> float | None:
        nonlocal taken
        taken += 1
        return start(engine)

    def counted_skip(engine: QuietEngine, steps: int) -> None:
        nonlocal skipped
        skipped += steps
        skip(engine, steps)

    monkeypatch.setattr(QuietEngine, "start_step", counted_start)
    monkeypatch.setattr(QuietEngine, "skip", counted_skip)
    _replayed(Fleet(engines=2))
    assert skipped > taken
