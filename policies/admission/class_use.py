"""What each class of requests has running on each endpoint. Not here: what a class may have (room.py)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from policies.types import Floats, Slots


class ClassUse:
    """Requests and tokens by class and endpoint slot; requests without a class are not counted."""

    def __init__(self) -> None:
        self._requests: dict[str, Floats] = {}
        self._tokens: dict[str, Floats] = {}

    def book(self, class_name: str | None, slot: int, requests: float, tokens: float) -> None:
        """Count so many more, or fewer, on `slot`."""
        if class_name is not None:
            for figures, more in ((self._requests, requests), (self._tokens, tokens)):
                figures[class_name] = _reaching(figures.get(class_name), slot)
                figures[class_name][slot] += more

    def requests(self, class_name: str, slots: Slots) -> Floats:
        """Requests of a class on each of `slots`, shape (n,)."""
        return _of(self._requests, class_name, slots)

    def tokens(self, class_name: str, slots: Slots) -> Floats:
        """What the class's requests take of the KV cache on each of `slots`, shape (n,)."""
        return _of(self._tokens, class_name, slots)

    def keep(self, class_names: Collection[str]) -> None:
        """Let go of all other classes that have nothing running: there are none such any more."""
        for name in [name for name in self._requests if name not in class_names]:
            if not self._requests[name].any():
                del self._requests[name], self._tokens[name]


def _reaching(figures: Floats | None, slot: int) -> Floats:
    if figures is None:
        return np.zeros(max(16, slot + 1))
    return figures if slot < len(figures) else np.concatenate([figures, np.zeros(slot + 1)])


def _of(figures: dict[str, Floats], class_name: str, slots: Slots) -> Floats:
    found = figures.get(class_name)
    if found is None or not len(slots):
        return np.zeros(len(slots))
    return _reaching(found, int(slots[-1]))[slots]
