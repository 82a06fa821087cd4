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

_FEW = 64
_TIE: Final = 1e-9
"""Scores closer than this are equal: far below any weight, far above float noise."""


def max_score(scores: Floats, length: int, rng: Random, margin: float = 0.0) -> list[int]:
    """The highest scores, best first."""
    if len(scores) <= _FEW:
        return max_of_few(scores.tolist(), length, rng, margin)
    return _max_of_many(scores, length, rng, margin)


def max_of_few(scores: list[float], length: int, rng: Random, margin: float = 0.0) -> list[int]:
    """The same of scores in a list, which is used up."""
    total = 0.0
    for score in scores:
        total += score
    if isfinite(total):
        return _best_of_few(scores, min(length, len(scores)), rng, margin)
    return _max_of_many(np.array(scores), length, rng, margin)


def _max_of_many(scores: Floats, length: int, rng: Random, margin: float) -> list[int]:
    left = scores.astype(np.float64, copy=True)
    order = []
    for _ in range(min(length, len(left))):
        position = _best(left, rng, margin)
        order.append(position)
        left[position] = -np.inf
    return order


def _best_of_few(left: list[float], length: int, rng: Random, margin: float) -> list[int]:
    """The same for a list of finite scores, in one look for each place."""
    order: list[int] = []
    width = margin + _TIE
    for _ in range(length):
        position, best, second = 0, -inf, -inf
        for place in range(len(left)):
            score = left[place]
            if score > best:
                position, best, second = place, score, best
            elif score > second:
                second = score
        if second >= best - width:  # there is another as good
            position = _one_of(left, best - width, rng)
        left[position] = -inf
        order.append(position)
    return order


def _one_of(scores: list[float], least: float, rng: Random) -> int:
    """By chance, one that is as good as that; the draw is that of a choice from the list of all such."""
    equals = 0
    for score in scores:
        if score >= least:
            equals += 1
    missing: int = rng.choice(range(equals))
    for place in range(len(scores)):
        if scores[place] >= least:
            if not missing:
                return place
            missing -= 1
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
