"""Large bodies are read in steps, one body after the other, so that small requests pass between the steps.

What takes time in proportion to a body's length is inflating, decoding, hashing and measuring it. 4 MB are some ten
milliseconds, and many of them at once would hold everybody for as long as all of them take. Here each turn of the loop
does one step of one body, a millisecond or two (plans.py cuts them; the longest is the decoder's, 3 ms per 10 MB), and
inflating, which does not need the interpreter's lock, is a thread's. Decisions are made as for all others, when the
body has been read. One below the bound is read where it is decided.

Rejected: reading in a thread. Whoever computes in Python there holds the lock for 5 ms at a time, and the loop has to
wait for it at every turn: small requests waited for seconds. A process: bodies would have to be copied to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from extproc.config.generations import Generation
from extproc.names import RETRY_AFTER_S
from extproc.request.plans import Incoming, Read, encoding_of, plain_body, read_steps
from policies.types import Reason, Refusal

READ_AT_ONCE_BYTES = 1 << 20
"""What is read in one turn: one to two milliseconds."""


class ReadingEvents(Protocol):
    """Who counts what becomes of large bodies."""

    def large_body(self, result: str) -> None:
        """One was read, left by its client before that, refused, not read in time, or we failed at it."""


class BodyReader:
    """Reads one body at a time. `most_bytes`: how much may wait for that; it can change."""

    def __init__(self, most_bytes: Callable[[], int], events: ReadingEvents) -> None:
        self._most_bytes = most_bytes
        self._events = events
        self._turn = asyncio.Lock()
        self._inflating = ThreadPoolExecutor(1, thread_name_prefix="inflate")
        self.held_bytes = 0
        self.taken = 0

    def read(
        self, generation: Generation, incoming: Incoming, most_wait_s: float | None = None
    ) -> asyncio.Task[Read | Refusal] | Refusal:
        """What is found in it, in its turn; cancelled, it is read no further. A refusal if too much waits already.

        `most_wait_s`: after so long there is a refusal, for a gateway that would give up; None if that is not known.
        """
        size = len(incoming.body)
        if self.held_bytes and self.held_bytes + size > self._most_bytes():
            self._events.large_body("refused")
            return _NO_ROOM
        self.held_bytes += size
        self.taken += 1
        reading = asyncio.ensure_future(self._read_in_time(generation, incoming, most_wait_s))
        reading.add_done_callback(partial(self._over, size))
        return reading

    def _over(self, size: int, reading: asyncio.Task[Read | Refusal]) -> None:
        self.held_bytes -= size
        if reading.cancelled():
            self._events.large_body("left")
        elif reading.exception() is not None:
            self._events.large_body("failed")
        else:
            self._events.large_body("late" if reading.result() is _TOO_LATE else "read")

    async def _read_in_time(
        self, generation: Generation, incoming: Incoming, most_wait_s: float | None
    ) -> Read | Refusal:
        try:
            async with asyncio.timeout(most_wait_s), self._turn:
                return await self._read(generation, incoming)
        except TimeoutError:
            return _TOO_LATE

    async def _read(self, generation: Generation, incoming: Incoming) -> Read | Refusal:
        plain: bytes | Refusal = incoming.body
        if encoding_of(incoming.headers):
            loop = asyncio.get_running_loop()
            inflate = loop.run_in_executor(self._inflating, plain_body, generation, incoming.headers, incoming.body)
            plain = await inflate
        if isinstance(plain, Refusal):
            return plain
        steps = read_steps(generation, incoming, plain)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return] # StopIteration knows no types
            await asyncio.sleep(0)

    def close(self) -> None:
        """Inflate nothing more."""
        self._inflating.shutdown(wait=False, cancel_futures=True)


def _too_many(message: str) -> Refusal:
    return Refusal(503, "server_error", message, Reason.TOO_MANY_LARGE_BODIES, retry_after_s=RETRY_AFTER_S)


_NO_ROOM = _too_many("too many large bodies at once; try again")
_TOO_LATE = _too_many("too many large bodies at once: this one could not be read in time; try again")
