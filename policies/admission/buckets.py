"""Token buckets, and a mean that forgets: what limits over time are made of. Seconds of one clock throughout.

Rejected: a sliding window of past requests. It needs memory for each of them, and tells nobody when to come again; a
bucket knows both in two numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """So much per second on average, and so much at once."""

    per_s: float
    burst: float


class Bucket:
    """Fills at a rate up to its burst; may be in debt."""

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: Rate, now_s: float) -> None:
        self.rate = rate
        self._level = rate.burst
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until it holds so much; more than it can ever hold is let out of a full one."""
        missing = min(amount, self.rate.burst) - self.level(now_s)
        if missing <= _ROUNDING * self.rate.burst:
            return 0.0
        return missing / self.rate.per_s if self.rate.per_s else math.inf

    def take(self, amount: float, now_s: float) -> None:
        """Take so much, or give back a negative amount."""
        self._level = min(self.level(now_s) - amount, self.rate.burst)

    def is_full(self, now_s: float) -> bool:
        """It holds all it can."""
        return self.level(now_s) >= self.rate.burst

    def level(self, now_s: float) -> float:
        """What it holds. It fills on from now where the clock was set back, and not only once the old time has come."""
        self._level = min(self._level + max(now_s - self._at_s, 0.0) * self.rate.per_s, self.rate.burst)
        self._at_s = now_s
        return self._level


_ROUNDING = 1e-9


class Mean:
    """The mean of the last ten or so; 1 before the first."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0

    def saw(self, value: float) -> None:
        """One more."""
        self.value += 0.1 * (value - self.value)
