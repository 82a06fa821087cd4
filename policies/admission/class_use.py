"""What each class of requests has running on each endpoint. Not here: what a class may have (room.py)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from policies.types import Floats, Slots


class ClassUse:
    """Requests and tokens by class and endpoint slot; requests without a class are not counted."""

    def __init__(self) -> None:
        self._requests: dict[str, list[float]] = {}  # by slot
        self._tokens: dict[str, list[float]] = {}

    def book(self, class_name: str | None, slot: int, requests: float, tokens: float) -> None:
        """Count so many more, or fewer, on `slot`."""
        if class_name is not None:
            _reaching(self._requests, class_name, slot)[slot] += requests
            _reaching(self._tokens, class_name, slot)[slot] += tokens

    def requests(self, class_name: str, slots: Slots) -> Floats:
        """Requests of a class on each of `slots`, shape (n,)."""
        return _of(self._requests, class_name, slots)

    def tokens(self, class_name: str, slots: Slots) -> Floats:
        """What the class's requests take of the KV cache on each of `slots`, shape (n,)."""
        return _of(self._tokens, class_name, slots)

    def keep(self, class_names: Collection[str]) -> None:
        """Let go of all other classes that have nothing running: there are none such any more."""
        for name in [name for name in self._requests if name not in class_names]:
            if not any(self._requests[name]):
                del self._requests[name], self._tokens[name]


def _reaching(figures: dict[str, list[float]], class_name: str, slot: int) -> list[float]:
    by_slot = figures.get(class_name)
    if by_slot is None:
        by_slot = figures[class_name] = [0.0] * 16
    if slot >= len(by_slot):
        by_slot.extend([0.0] * (slot + 1))
    return by_slot


def _of(figures: dict[str, list[float]], class_name: str, slots: Slots) -> Floats:
    if class_name not in figures or not len(slots):
        return np.zeros(len(slots))
    return np.array(_reaching(figures, class_name, int(slots[-1])))[slots]
