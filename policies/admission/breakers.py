"""Breakers: when an endpoint, a model or a zone fails so often that it is better left alone for a while.

One state machine for all three; what differs is whose outcomes it sees and what its owner does while it is open: an
endpoint leaves rotation (policies/lifecycle.py has the say there), a model is refused at once, a zone is avoided as
long as there is another. An answer of 4xx is the client's affair and counts as good.

    closed -> open (too many errors among enough requests) -> half-open after a rest -> closed (a trial went well)
                                                                                     -> open  (it did not)

The share of errors is taken over a sliding window, in slices, so that what happened two minutes ago does not vanish at
one stroke. Rejected: consecutive failures alone. A flaky endpoint that fails every fifth request never has three in a
row; and an exponential mean, which can be tripped by a handful of requests after a quiet night.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

_SLICES = 12


@dataclass(frozen=True, slots=True)
class BreakerSpec:
    """More than `error_ratio` of at least `least_requests` within `window_s` opens it, for `open_s`."""

    error_ratio: float
    window_s: float = 120.0
    least_requests: int = 20
    open_s: float = 180.0


class Position(IntEnum):
    """What a breaker lets through."""

    CLOSED = 0
    HALF_OPEN = 1
    """One request, on trial."""
    OPEN = 2


class Window:
    """Good and bad outcomes of the last `window_s`, in slices."""

    __slots__ = ("_bad", "_good", "_newest", "_slice_s")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._good = [0] * _SLICES
        self._bad = [0] * _SLICES
        self._newest = -math.inf

    def saw(self, now_s: float, *, good: bool) -> None:
        """One outcome."""
        self._move(now_s)
        counts = self._good if good else self._bad
        counts[int(self._newest) % _SLICES] += 1

    def counts(self, now_s: float) -> tuple[int, int]:
        """Bad outcomes, and all of them."""
        self._move(now_s)
        bad = sum(self._bad)
        return bad, bad + sum(self._good)

    def clear(self) -> None:
        """Forget everything."""
        self._good = [0] * _SLICES
        self._bad = [0] * _SLICES

    def _move(self, now_s: float) -> None:
        """Empty the slices that have passed since the last look."""
        present = now_s // self._slice_s
        if present <= self._newest:
            return
        passed = int(min(present - self._newest, _SLICES))
        for number in range(passed):
            position = int(present - number) % _SLICES
            self._good[position] = self._bad[position] = 0
        self._newest = present


class Breaker:
    """One breaker. Every call takes the time in seconds of one clock; `trips` counts how often it opened."""

    __slots__ = ("_open_until_s", "_passes", "_trial", "_trial_since_s", "_window", "spec", "trips")

    def __init__(self, spec: BreakerSpec) -> None:
        self.spec = spec
        self.trips = 0
        self._window = Window(spec.window_s)
        self._open_until_s = -math.inf
        self._passes = 0
        self._trial: int | None = None
        self._trial_since_s = -math.inf

    def position(self, now_s: float) -> Position:
        """What it lets through now."""
        if self._open_until_s == -math.inf:
            return Position.CLOSED
        return Position.OPEN if now_s < self._open_until_s else Position.HALF_OPEN

    def admit(self, now_s: float) -> int | None:
        """A pass for one request, to be shown when it has ended; None if it may not go.

        A trial that nothing is heard of for as long as the breaker rests is given up, and another let through.
        """
        position = self.position(now_s)
        on_trial = self._trial is not None and now_s - self._trial_since_s < self.spec.open_s
        if position is Position.OPEN or (position is Position.HALF_OPEN and on_trial):
            return None
        self._passes += 1
        if position is Position.HALF_OPEN:
            self._trial, self._trial_since_s = self._passes, now_s
        return self._passes

    def saw(self, number: int, now_s: float, *, good: bool) -> bool:
        """How the request with this pass ended. True if that has opened it."""
        if self.position(now_s) is Position.CLOSED:
            self._window.saw(now_s, good=good)
            bad, total = self._window.counts(now_s)
            opens = not good and total >= self.spec.least_requests and bad > self.spec.error_ratio * total
        elif number == self._trial:
            self._trial = None
            opens = not good
            self._open_until_s = -math.inf
        else:  # it began before things went wrong, and says nothing of how they are now
            return False
        if opens:
            self._open(now_s)
        return opens

    def forgot(self, number: int) -> None:
        """The request with this pass tells nothing: its client left, say. If it was on trial, another may try."""
        if number == self._trial:
            self._trial = None

    def retry_after_s(self, now_s: float) -> float:
        """How long it lets nothing through."""
        return max(self._open_until_s - now_s, 0.0)

    def _open(self, now_s: float) -> None:
        self._open_until_s = now_s + self.spec.open_s
        self.trips += 1
        self._trial = None
        self._window.clear()
