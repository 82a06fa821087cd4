"""When memory is given back, on a clock of the test's own."""

from __future__ import annotations

import mmap

from extproc.memory import SpareMemory, resident_bytes

MB = 1024 * 1024


class Process:
    """A process that grows, and shrinks to 120 MB when trimmed."""

    def __init__(self) -> None:
        self.now_s, self.bytes, self.trims = 0.0, 100 * MB, 0
        self.spare = SpareMemory(lambda: self.now_s, lambda: self.bytes, self._trim)

    def _trim(self) -> None:
        self.bytes, self.trims = 120 * MB, self.trims + 1

    def due(self, count: int = 0, *, busy: bool = False, after_s: float = 6.0) -> bool:
        """Whether it is time, some seconds on."""
        self.now_s += after_s
        return self.spare.tick(count, busy=busy)


async def test_it_is_given_back_once_it_is_quiet_after_a_flood() -> None:
    """Not while large bodies come, nor at once after them, and not again for what was there when it was quiet."""
    process = Process()
    assert not process.due()
    process.bytes = 400 * MB
    assert not process.due(1, busy=True)
    assert not process.due(2)
    assert not process.due(2, after_s=1.0)
    assert process.due(2)
    await process.spare.give_back()
    assert (process.trims, process.bytes) == (1, 120 * MB)
    assert not process.due(2)
    process.bytes += 20 * MB
    assert not process.due(2)


async def test_a_flood_at_the_start_is_no_measure() -> None:
    """A process restarted under load has never been quiet; and what sinks by itself is the new measure."""
    process = Process()
    process.bytes = 400 * MB
    assert not process.due(1, busy=True)
    assert process.due(1)
    await process.spare.give_back()
    process.bytes = 60 * MB
    assert not process.due(1)
    process.bytes = 130 * MB
    assert process.due(1)


def test_the_size_is_the_systems_own() -> None:
    """What grows by 50 MB is seen to."""
    before = resident_bytes()
    with mmap.mmap(-1, 50 * MB) as fresh:  # pages of its own: an object might lie where another was freed
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
        assert resident_bytes() > before + 40 * MB
