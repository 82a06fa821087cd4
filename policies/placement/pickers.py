"""From scores to an ordered short list. Ties are broken by chance, fairly: order of discovery must not matter."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from random import Random
from typing import Final, TypeAlias

import numpy as np

from policies.types import Floats

Picker: TypeAlias = Callable[[Floats, int, Random, float], list[int]]
"""(scores, length, rng, margin) -> positions into `scores`, best first, at most `length`, no position twice.

Scores within `margin` of the best are equal to it.
"""

_MOST_BY_LOOP = 64
_TIE: Final = 1e-9
"""Scores closer than this are equal: far below any weight, far above float noise."""


class Score:
    """One candidate's. As an attribute compiled code reads and writes it four times as fast as in a list of floats."""

    def __init__(self, value: float) -> None:
        self.value = value


def max_score(scores: Floats, length: int, rng: Random, margin: float = 0.0) -> list[int]:
    """The highest scores, best first."""
    if len(scores) <= _MOST_BY_LOOP:
        return max_by_loop([Score(value) for value in scores.tolist()], length, rng, margin)
    return _max_of_many(scores, length, rng, margin)


def max_by_loop(scores: list[Score], length: int, rng: Random, margin: float = 0.0) -> list[int]:
    """The same of scores in a list."""
    order: list[int] = []
    taken: list[float] = []
    if not _take_best(scores, min(length, len(scores)), rng, margin + _TIE, order, taken):
        return _max_of_many(np.array([score.value for score in scores]), length, rng, margin)
    for number in range(len(order)):
        scores[order[number]].value = taken[number]
    return order


def _max_of_many(scores: Floats, length: int, rng: Random, margin: float) -> list[int]:
    left = scores.astype(np.float64, copy=True)
    order = []
    for _ in range(min(length, len(left))):
        position = _best(left, rng, margin)
        order.append(position)
        left[position] = -np.inf
    return order


def _take_best(left: list[Score], length: int, rng: Random, width: float, order: list[int], taken: list[float]) -> bool:
    """Put the best into `order`, and their scores, which are endlessly low then, into `taken`.

    False, and nothing is done, where any score is endless or none at all.
    """
    while len(order) < length:
        position, best, equals, second = 0, -inf, 0, -inf  # the highest, how many are just that, and what comes next
        total = 0.0
        for place, score in enumerate(left):
            value = score.value
            total += value
            if value > best:
                position, second, best, equals = place, best, value, 1
            elif value == best:
                equals += 1
            elif value > second:
                second = value
        if not order and not isfinite(total):
            return False
        if second >= best - width:  # there are others nearly as good
            _take(left, _one_of(left, best - width, _count(left, best - width), rng), order, taken)
            continue
        while equals > 1 and len(order) < length:
            _take(left, _one_of(left, best - width, equals, rng), order, taken)
            equals -= 1
            position = -1
        if position >= 0:
            _take(left, position, order, taken)
    return True


def _take(left: list[Score], position: int, order: list[int], taken: list[float]) -> None:
    order.append(position)
    taken.append(left[position].value)
    left[position].value = -inf


def _count(scores: list[Score], least: float) -> int:
    enough = 0
    for score in scores:
        if score.value >= least:
            enough += 1
    return enough


def _one_of(scores: list[Score], least: float, equals: int, rng: Random) -> int:
    """By chance, one that is as good as that; the draw is that of a choice from the list of all such."""
    before: int = rng.choice(range(equals))
    for place, score in enumerate(scores):
        if score.value >= least:
            if not before:
                return place
            before -= 1
    raise AssertionError("fewer scores than were counted")


def power_of_two(scores: Floats, length: int, rng: Random, margin: float = 0.0) -> list[int]:
    """The better of two drawn at random, then the highest of the rest as fallbacks."""
    if len(scores) < 2:
        return list(range(len(scores)))[:length]
    first, second = rng.sample(range(len(scores)), 2)
    best = first if scores[first] >= scores[second] - margin else second
    rest = scores.astype(np.float64, copy=True)
    rest[best] = -np.inf
    return [best, *max_score(rest, min(length, len(scores)) - 1, rng, margin)][:length]


def _best(scores: Floats, rng: Random, margin: float) -> int:
    best = int(scores.argmax())  # of a NaN, if there is one, so that it is picked and refused
    tied = scores >= scores[best] - (margin + _TIE)
    count = int(np.count_nonzero(tied))
    return best if count <= 1 else int(np.flatnonzero(tied)[rng.randrange(count)])


PICKERS: dict[str, Picker] = {"max_score": max_score, "power_of_two": power_of_two}
"""Pickers by the name a config uses."""
