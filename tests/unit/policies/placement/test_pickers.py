"""Pickers: best first, no position twice, fair among equals."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement import pickers
from policies.placement.pickers import PICKERS, max_score, power_of_two

_scores = st.lists(st.floats(-1, 1), min_size=1, max_size=12).map(np.array)


@given(_scores, st.integers(1, 8), st.integers(0, 99), st.sampled_from(sorted(PICKERS)))
def test_a_list_has_no_repeats_and_is_as_long_as_it_can_be(
    scores: np.ndarray, length: int, seed: int, name: str
) -> None:
    """Whatever the scores: distinct positions, `length` of them if there are so many."""
    order = PICKERS[name](scores, length, Random(seed))
    assert len(order) == len(set(order)) == min(length, len(scores))


@given(_scores, st.integers(1, 8), st.integers(0, 99), st.sampled_from([0.0, 0.1, 5.0]))
def test_few_scores_are_picked_from_as_many_are(scores: np.ndarray, length: int, seed: int, margin: float) -> None:
    """By lists or by arrays, with the same dice: the same order."""
    many = np.concatenate((scores, np.full(pickers._MOST_BY_LOOP, -np.inf)))
    length = min(length, len(scores))
    assert max_score(scores, length, Random(seed), margin) == max_score(many, length, Random(seed), margin)


@given(_scores, st.integers(0, 99))
def test_max_score_is_in_descending_order(scores: np.ndarray, seed: int) -> None:
    """Best first; equal within the tie's width."""
    picked = scores[max_score(scores, 5, Random(seed))]
    assert np.all(np.diff(picked) <= 1e-9)
    assert picked[0] >= scores.max() - 1e-9


@pytest.mark.parametrize("name", sorted(PICKERS))
def test_ties_are_fair(name: str) -> None:
    """Four equals each win a quarter of 4,000 draws, give or take six standard deviations."""
    rng = Random(7)
    wins = Counter(PICKERS[name](np.zeros(4), 1, rng)[0] for _ in range(4_000))
    assert all(abs(wins[position] - 1_000) < 6 * 27.4 for position in range(4))


def test_power_of_two_avoids_the_worst() -> None:
    """The worst of three is never first: whatever it is drawn with is better."""
    rng = Random(3)
    assert all(power_of_two(np.array([0.9, 0.5, 0.1]), 1, rng)[0] != 2 for _ in range(200))
