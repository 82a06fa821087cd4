"""Breakers: when an endpoint, a model or a zone fails so often that it is better left alone for a while.

One measure for all three, the share of errors over a sliding window; what differs is whose outcomes it sees and what
its owner does once it is exceeded: an endpoint leaves rotation (policies/lifecycle.py has the say there, and keeps its
own rest), a model is refused at once, a zone is avoided as long as there is another. For these two there is the
`Breaker`. An answer of 4xx is the client's affair and counts as good.

    closed -> open (too many errors among enough requests) -> half-open after a rest -> closed (a trial went well)
                                                                                     -> open  (it did not)

Whatever a single endpoint does is no reason to leave a model or a zone alone: it has a breaker of its own. So outcomes
may be told with the name of the endpoint, and then the worst one's are left out of the account.

The window goes by slices, so that what happened two minutes ago does not vanish at one stroke. Rejected: consecutive
failures alone. A flaky endpoint that fails every fifth request never has three in a row; and an exponential mean, which
can be tripped by a handful of requests after a quiet night.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

_SLICES: Final = 12


@dataclass(init=False)
class BreakerSpec:
    """More than `error_ratio` of at least `least_requests` within `window_s` opens it, for `open_s`. Never changed."""

    error_ratio: float
    window_s: float
    least_requests: int
    open_s: float

    def __init__(
        self, error_ratio: float, window_s: float = 120.0, least_requests: int = 20, open_s: float = 180.0
    ) -> None:
        self.error_ratio = error_ratio
        self.window_s = window_s
        self.least_requests = least_requests
        self.open_s = open_s

    def exceeded_by(self, bad: int, total: int) -> bool:
        """Whether so many errors among so many requests are too many."""
        return total >= self.least_requests and bad > self.error_ratio * total


class Position(IntEnum):
    """What a breaker lets through."""

    CLOSED = 0
    HALF_OPEN = 1
    """One request, on trial."""
    OPEN = 2


class Window:
    """Good and bad outcomes of the last `window_s`, in slices; those told with a name also by whose they were."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._slice_s = window_s / _SLICES
        self._newest = -math.inf
        self._position = 0  # of the newest slice
        self._good: list[int] = []
        self._bad: list[int] = []
        self._named: list[dict[str, list[int]]] = []
        self.clear()

    def saw(self, now_s: float, *, good: bool, by: str | None = None) -> None:
        """One outcome."""
        if now_s // self._slice_s > self._newest:  # seldom, and this is asked with every request
            self._move(now_s)
        position = self._position
        counts = self._good if good else self._bad
        counts[position] += 1
        if by is not None:
            named = self._named[position]
            tally = named.get(by)
            if tally is None:
                tally = named[by] = [0, 0]
            tally[0] += not good
            tally[1] += 1

    def take_back(self) -> None:
        """The newest bad outcome was none."""
        for age in range(_SLICES):
            position = int(max(self._newest, 0.0) - age) % _SLICES
            if self._bad[position]:
                self._bad[position] -= 1
                return

    def counts(self, now_s: float) -> tuple[int, int]:
        """Bad outcomes, and all of them."""
        self._move(now_s)
        bad = sum(self._bad)
        return bad, bad + sum(self._good)

    def counts_but_for_the_worst(self, now_s: float) -> tuple[int, int]:
        """The same without those of the name that has most bad ones."""
        bad, total = self.counts(now_s)
        tallies: dict[str, tuple[int, int]] = {}
        for named in self._named:
            for name, tally in named.items():
                its_bad, its_total = tallies.get(name, (0, 0))
                tallies[name] = its_bad + tally[0], its_total + tally[1]
        worst_bad, worst_total = max(tallies.values(), default=(0, 0))
        return bad - worst_bad, total - worst_total

    def clear(self) -> None:
        """Forget everything."""
        self._good = [0] * _SLICES
        self._bad = [0] * _SLICES
        self._named = [{} for _ in range(_SLICES)]

    def _move(self, now_s: float) -> None:
        """Empty the slices that have passed since the last look."""
        present = now_s // self._slice_s
        if present <= self._newest:
            return
        passed = int(min(present - self._newest, _SLICES))
        for number in range(passed):
            position = int(present - number) % _SLICES
            self._good[position] = self._bad[position] = 0
            self._named[position].clear()
        self._newest, self._position = present, int(present) % _SLICES


class Breaker:
    """One breaker. Every call takes the time in seconds of one clock; `trips` counts how often it opened."""

    def __init__(self, spec: BreakerSpec) -> None:
        self.spec = spec
        self.trips = 0
        self._window = Window(spec.window_s)
        self._open_until_s = -math.inf
        self._passes = 0
        self._passes_before = 0  # it opened
        self._trial: int | None = None
        self._trial_since_s = -math.inf

    def configure(self, spec: BreakerSpec) -> None:
        """Go by this from now on; a rest that has begun goes on. What was seen is forgotten if the window changes."""
        if spec.window_s != self._window.window_s:
            self._window = Window(spec.window_s)
        self.spec = spec

    @property
    def is_closed(self) -> bool:
        """It lets everything through."""
        return self._open_until_s == -math.inf

    def position(self, now_s: float) -> Position:
        """What it lets through now."""
        if self.is_closed:
            return Position.CLOSED
        return Position.OPEN if now_s < self._open_until_s else Position.HALF_OPEN

    def is_shut(self, now_s: float) -> bool:
        """It lets nothing through now: it rests, or a request is on trial.

        When nothing is heard of a trial for as long as the breaker rests, another is let through. What becomes of the
        first still counts: where answers take longer than a rest, no trial would ever come to anything otherwise.
        """
        position = self.position(now_s)
        on_trial = self._trial is not None and now_s - self._trial_since_s < self.spec.open_s
        return position is Position.OPEN or (position is Position.HALF_OPEN and on_trial)

    def admit(self, now_s: float) -> int | None:
        """A pass for one request, to be shown when it has ended; None if it may not go."""
        if self.is_shut(now_s):
            return None
        self._passes += 1
        if self.position(now_s) is Position.HALF_OPEN:
            self._trial, self._trial_since_s = self._passes, now_s
        return self._passes

    def saw(self, number: int, now_s: float, *, good: bool, by: str | None = None) -> bool:
        """How the request with this pass ended, and at which endpoint. True if that has opened it.

        Passes of requests that are not on trial need not be asked for: any number that is no pass will do.
        """
        if self.is_closed:
            self._window.saw(now_s, good=good, by=by)
            opens = not good and self._is_exceeded(now_s)
        elif number > self._passes_before:
            opens = not good
            self._open_until_s, self._trial = -math.inf, None
        else:  # it began before things went wrong, and says nothing of how they are now
            return False
        if opens:
            self._open(now_s)
        return opens

    def forgot(self, number: int) -> None:
        """The request with this pass tells nothing: its client left, say. If it was on trial, another may try."""
        if number == self._trial:
            self._trial = None

    def retry_after_s(self, now_s: float, trial_s: float = 0.0) -> float:
        """How long it lets nothing through, if a trial takes `trial_s`."""
        if self.position(now_s) is Position.HALF_OPEN and self.is_shut(now_s):
            return max(self._trial_since_s + trial_s - now_s, 0.0)
        return max(self._open_until_s - now_s, 0.0)

    def counts(self, now_s: float) -> tuple[int, int]:
        """Errors in the window, and requests."""
        return self._window.counts(now_s)

    def _is_exceeded(self, now_s: float) -> bool:
        """Over all, and without the worst endpoint as well; the second takes longer to count."""
        bad, total = self._window.counts(now_s)
        if not self.spec.exceeded_by(bad, total):
            return False
        bad, total = self._window.counts_but_for_the_worst(now_s)
        return self.spec.exceeded_by(bad, total)

    def _open(self, now_s: float) -> None:
        self._open_until_s = now_s + self.spec.open_s
        self.trips += 1
        self._trial, self._passes_before = None, self._passes
        self._window.clear()
