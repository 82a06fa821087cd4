"""Figures of a moment: they stay as they were, whoever wrote afterwards and however."""

from __future__ import annotations

import numpy as np
import pytest

from policies.fleet_state import FleetState
from policies.past import Moment, Past
from policies.placement.ledger import Ledger
from policies.types import Reservation

SLOTS = np.array([0, 2], np.intp)


def test_a_moment_stays_as_it_was() -> None:
    """However much is written afterwards."""
    past, figures, moments = Past(), np.zeros((3, 3)), list[Moment]()
    for number in range(600):  # more than two pages
        moments.append(past.now(figures))
        slot = number % 3
        figures[:, slot] = number, number + 0.5, -number
        past.write(slot, number, number + 0.5, -number)
    assert moments[0].of(SLOTS).tolist() == [[0, 0], [0, 0], [0, 0]]
    for number in (3, 255, 256, 257, 599):
        last = {slot: max(n for n in range(number) if n % 3 == slot) for slot in (0, 2)}
        assert moments[number].of(SLOTS).tolist() == [
            [last[0], last[2]], [last[0] + 0.5, last[2] + 0.5], [-last[0], -last[2]]
        ]  # fmt: skip


def test_what_was_written_otherwise_counts_from_the_next_moment_on() -> None:
    """Who may have written the figures in any other way says so."""
    past, figures = Past(), np.zeros((3, 3))
    before = past.now(figures)
    figures[0] = 7.0
    past.lose()
    assert past.now(figures).of(SLOTS)[0].tolist() == [7.0, 7.0]
    assert before.of(SLOTS)[0].tolist() == [0.0, 0.0]


def test_a_fleet_and_a_ledger_tell_what_was() -> None:
    """As their arrays said then, whatever was booked, written or learned since, and however many slots came."""
    state, ledger = FleetState(), Ledger()
    taken: list[Reservation] = []
    for number in range(40):
        state.add(f"10.0.0.{number}:1")
        slots = np.arange(number + 1)
        ledger.paces(number)
        before = [state.load(slots), ledger.paces_of(slots)]
        moments = [state.moment(), ledger.moment()]
        taken.append(state.reserve(number // 3, prompt_tokens=100 + number, uncached_tokens=50))
        ledger.committed(taken[-1], float(number))
        if number % 3 == 0:
            state.release(taken[0])
            ledger.first_token(taken.pop(0), number + 0.5)
        if number % 5 == 0:
            state.kv_capacity_tokens[number] = 1_000.0 + number
        for moment, figures in zip(moments, before, strict=True):
            assert moment.of(slots).tolist() == figures.tolist()


@pytest.mark.parametrize("changes", [255, 256, 257])
def test_nothing_is_kept_where_nobody_asks(changes: int) -> None:
    """A fleet that ends its requests and places none gathers no memory."""
    past, figures = Past(), np.zeros((3, 3))
    asked = past.now(figures)
    for _ in range(changes * 3):
        past.write(0, 1.0, 1.0, 1.0)
    assert len(asked._page.written) <= 256
