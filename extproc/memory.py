"""Memory goes back to the system after a flood of large bodies or streams, once it is quiet again.

The launcher has glibc keep what is freed (launcher.py says why); without more, a flood's peak would stay for ever. So
when no large body has come for a while and the process is much larger than it last was when quiet, glibc is told to
give back what it does not use: whole pages anywhere, not only at the heap's end. That takes milliseconds per hundred
megabytes, in a thread; the loop may have to wait for the allocator meanwhile, which is why it is done when it is quiet.
The next flood pays for its pages again.

Rejected: MALLOC_ARENA_MAX and lower thresholds, which give back at each request what the next one needs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_QUIET_S = 5.0
_MUCH_BYTES = 32 * 1024 * 1024
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What the process occupies; 0 where that cannot be told."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _trim() -> None:
    """Have glibc give back what it does not use; elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class SpareMemory:
    """`tick` it now and then; `clock` is in seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = _trim,
    ) -> None:
        self._clock, self._resident, self._trim = clock, resident, trim
        self._busy_count = 0
        self._look_s = clock() + _QUIET_S
        self._when_quiet_bytes = resident()

    def tick(self, busy_count: int, *, busy: bool) -> bool:
        """Whether it is time to give back. `busy_count` grows with every large body; `busy`: there are some now."""
        now_s = self._clock()
        if busy or busy_count != self._busy_count:
            self._busy_count, self._look_s = busy_count, now_s + _QUIET_S
            return False
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _QUIET_S
        now = self._resident()
        self._when_quiet_bytes = min(self._when_quiet_bytes, now)
        return now > self._when_quiet_bytes + _MUCH_BYTES

    async def give_back(self) -> None:
        """Do it."""
        before = self._resident()
        await asyncio.to_thread(self._trim)
        self._when_quiet_bytes = self._resident()
        log.info("memory given back", from_mb=before >> 20, to_mb=self._when_quiet_bytes >> 20)
