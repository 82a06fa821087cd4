"""How late the decision loop is: a timer that notes by how much it was late, twenty times a second.

That is what a request coming just then would have waited, and it covers every callback, whoever wrote it: requests,
reports of the senses, wakes of the queue, xDS, grpcio's. A callback of 50 ms or more is always met, a shorter one as
often as requests meet it. On a small or throttled machine most of it is waiting for a core; so a second figure, `own`,
counts no more of the lateness than the CPU time that the loop's thread has used since shortly before the timer was due:
another timer, 2 ms ahead, reads it. Where that one is as late, it is the CPU time since the last look.

Rejected: the CPU time of each callback. Reading a thread's clock twice is a system call each, up to 4 us where a whole
request costs 20, and uvloop has no place to do it but in each handler. Here it is 0.1 % of a core at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from extproc.observe.tallies import TimesByLabel

EVERY_S = 0.05
_AHEAD_S = 0.002
BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LoopLag:
    """The timers; `clock` and `cpu` are seconds of the world and of the loop's thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self.times = TimesByLabel("pointsman_loop_lag_seconds", "How late the decision loop was", "of", BOUNDS_S)
        self.all, self.own = self.times.of("all"), self.times.of("own")
        self._clock, self._cpu = clock, cpu
        self._due_s = self._used_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on the running loop."""
        self._due_s, self._used_s = self._clock() + EVERY_S, self._cpu()
        self._timer = asyncio.get_running_loop().call_later(EVERY_S - _AHEAD_S, self._come_near)

    def _come_near(self) -> None:
        left_s = self.near()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._fire)

    def near(self) -> float:
        """The timer is due soon: in how many seconds, and below 0 if it is late already."""
        left_s = self._due_s - self._clock()
        if left_s >= 0:
            self._used_s = self._cpu()
        return left_s

    def _fire(self) -> None:
        self.tick()
        self.start()

    def tick(self) -> None:
        """The timer has fired."""
        late_s = max(0.0, self._clock() - self._due_s)
        self.all.observe(late_s)
        self.own.observe(min(late_s, self._cpu() - self._used_s))

    def stop(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
