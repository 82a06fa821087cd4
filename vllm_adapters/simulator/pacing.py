"""Lets an engine model live in real time: steps last as long as they should, requests hear of their tokens.

Asyncio cannot sleep for microseconds, so steps due within a millisecond are ended together; that way a fast model
keeps its pace on average instead of drifting. Idle costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm_adapters.simulator.engine import Engine, RequestId, Running

_TICK_S = 1e-3  # the shortest sleep worth asking asyncio for
_MOST_STEPS = 64  # ended in one go, so that the tokens of a fast model still get written in between
_MOST_DEBT_S = 0.1  # how far behind we try to catch up; a process stopped for longer has lost that time


class Ticket:
    """One request on its way: how far it is, and a way to wait for more."""

    def __init__(self, request: Running) -> None:
        self.request = request
        self.produced = 0
        self.cancelled = False
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.cancelled or self.produced >= self.request.output_tokens

    async def more(self, seen: int) -> int:
        """Wait until more than `seen` tokens are there, or there will be no more; their number."""
        while self.produced <= seen and not self.done:
            self._news.clear()
            await self._news.wait()
        return self.produced

    def tell(self, produced: int) -> None:
        """Note progress."""
        if produced != self.produced:
            self.produced = produced
            self._news.set()

    def cancel(self) -> None:
        """End it here, with what there is."""
        self.cancelled = True
        self._news.set()


class PacedEngine:
    """An engine that runs. `speed` divides every duration. `run` is its life; cancel it to stop."""

    def __init__(self, engine: Engine, speed: float) -> None:
        self.engine = engine
        self.speed = speed
        self.moving = asyncio.Event()  # clear it and time stands still
        self.moving.set()
        self._work = asyncio.Event()
        self._tickets: dict[RequestId, Ticket] = {}
        self._last_id = 0

    def submit(self, block_hashes: Sequence[int], prompt_tokens: int, output_tokens: int) -> Ticket:
        """Queue a request; raises PromptTooLarge as the engine does."""
        self._last_id += 1
        ticket = Ticket(self.engine.submit(self._last_id, block_hashes, prompt_tokens, output_tokens))
        self._tickets[self._last_id] = ticket
        self._work.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Drop a request if it is still running."""
        if self._tickets.pop(ticket.request.request_id, None) is not None:
            self.engine.abort(ticket.request.request_id)

    def cancel_all(self) -> None:
        """Abort everything, and tell those who wait."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
            ticket.cancel()

    async def run(self) -> None:
        """Step while there is work, wait while there is none."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._work.wait()
            due_s = self._begin(clock())
            while due_s is not None:
                await asyncio.sleep(max(0.0, due_s - clock()))
                await self.moving.wait()
                due_s = self._end_due(due_s, clock())
                self._deliver()
            self._work.clear()

    def _begin(self, at_s: float) -> float | None:
        duration_s = self.engine.start_step()
        return None if duration_s is None else at_s + duration_s / self.speed

    def _end_due(self, due_s: float, now_s: float) -> float | None:
        """End the step in progress and those due by now; when the next is due, None if there is none."""
        due: float | None = max(due_s, now_s - _MOST_DEBT_S)
        for _ in range(_MOST_STEPS):
            if due is None or due > now_s + _TICK_S:
                break
            self.engine.end_step()
            due = self._begin(due)
        return due

    def _deliver(self) -> None:
        finished = []
        for request_id, ticket in self._tickets.items():
            ticket.tell(self.engine.generated(ticket.request))
            if ticket.done:
                finished.append(request_id)
        for request_id in finished:
            del self._tickets[request_id]
