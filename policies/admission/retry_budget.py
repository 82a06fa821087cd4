"""How much may be tried again: a share of the requests, so that a fleet in trouble is left alone.

Whether a request may be retried has to be said before it is sent, and it is Envoy who retries: we hear of a retry when
it happens. So what is left of the budget is compared with the retries still to be expected: where more fails than it
allows, of the requests let go a moment ago as large a part as were retried of the last ten seconds'. While little fails
everybody may be retried; when everything fails, who may be retried counts as retried at once.

Each request brings the share in, each retry takes one out, heard of late or not: over any time the sum is right, and
what was overdrawn is paid back. What nobody uses is worth ten seconds' requests at most. A quiet fleet still fails
over: `floor` retries in ten seconds are always allowed, on credit if need be.

Rejected: comparing the retries and requests of a sliding window alone. All its retries fall into the beginning of each
window, and forty seconds have five beginnings. Rejected: a limit on retries at once (Envoy's own `retry_budget`). It is
a share of the requests at once, of which most are streams that can no longer be retried, and its floor lets three
retries at once go on for ever. Rejected: letting only a fifth of the requests be retried. Then four of five would
notice the first engine that dies.
"""

from __future__ import annotations

import math
from typing import Final

WINDOW_S: Final = 10.0
_SLICES: Final = 20
_SLICE_S: Final = WINDOW_S / _SLICES
_UNDER_WAY: Final = 3
"""Slices whose requests may still be retried without our having heard of it: a connection may take a second to fail."""


class _Count:
    """How many there were in each slice of the window, and in all."""

    def __init__(self) -> None:
        self.by_slice: list[int] = [0] * _SLICES
        self.total = 0

    def add(self, count: int, position: int) -> None:
        self.by_slice[position] += count
        self.total += count

    def empty(self, position: int) -> None:
        self.total -= self.by_slice[position]
        self.by_slice[position] = 0


class RetryBudget:
    """One pool's: `share` of its requests may be retried, or `floor` in WINDOW_S, if that is more.

    Every call takes the time in seconds of one clock.
    """

    def __init__(self, share: float, floor: int) -> None:
        self.share = share
        self.floor = floor
        self._requests = _Count()
        self._allowed = _Count()
        self._retries = _Count()
        self._left = 0.0
        self._newest = -math.inf
        self._ends_s = -math.inf
        self._position = 0

    def admit(self, now_s: float) -> bool:
        """One more request goes out; whether it may be retried."""
        position = self._move(now_s)
        self._requests.add(1, position)
        self._left = min(self._left + self.share, self.share * self._requests.total)
        wanted = self._to_come(position) + 1
        if self._left < wanted and self._retries.total + wanted > self.floor:
            return False
        self._allowed.add(1, position)
        return True

    def retried(self, count: int, now_s: float) -> None:
        """So many retries were seen."""
        self._retries.add(count, self._move(now_s))
        self._left = max(self._left - count, -max(self.floor, self.share * self._requests.total))

    def _to_come(self, position: int) -> float:
        """Retries that will be heard of, if it goes on like this."""
        ratio = self._retries.total / max(self._allowed.total, 1)
        if ratio <= self.share:
            return 0.0
        recent = [position - back for back in range(_UNDER_WAY)]
        allowed, retries = (sum(count.by_slice[one] for one in recent) for count in (self._allowed, self._retries))
        return max(allowed - retries, 0) * min(ratio, 1.0)

    def _move(self, now_s: float) -> int:
        """Empty the slices that have passed since the last look; returns the place of the present one."""
        if now_s < self._ends_s:
            return self._position
        present = now_s // _SLICE_S
        for number in range(int(min(present - self._newest, _SLICES))):
            for count in (self._requests, self._allowed, self._retries):
                count.empty(int(present - number) % _SLICES)
        self._newest, self._ends_s = present, (present + 1) * _SLICE_S
        self._position = int(present) % _SLICES
        return self._position
