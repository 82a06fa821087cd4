"""A simulated engine that pushes its figures as one with our plugin does: the same messages, from the same encoder.

For tests of who listens. What the plugin hears step by step is looked at here as often as it may be sent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from vllm_adapters.simulator.books import Books
from vllm_adapters.simulator.engine import Engine
from vllm_adapters.stat_logger.accumulator import MOST_LISTED
from vllm_adapters.stat_logger.publisher import bind
from vllm_adapters.stat_logger.wire import (
    DRAINING,
    HEARTBEAT_S,
    PORT_GAUGE,
    SERVING,
    VERSION,
    Finished,
    Message,
    Totals,
    encode,
)
from vllm_adapters.stat_logger.wire import Engine as EngineTold

_GAP_S = 0.02
HOLD_S = 0.5
"""As the plugin's default: how long a shutdown waits for subscribers to hear of it."""


class Pusher:
    """One engine's socket. `silent`: nothing is sent, though the engine lives on."""

    def __init__(self, address: str, engine: Engine, books: Books, server_port: Callable[[], int]) -> None:
        self.silent = False
        self.phase = SERVING
        self._engine = engine
        self._books = books
        self._server_port = server_port
        self._run = secrets.token_hex(8)
        self._sent = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._port = bind(self._socket, address)

    @property
    def exposition(self) -> str:
        """The line of the metrics page that leads here."""
        return f'# TYPE {PORT_GAUGE} gauge\n{PORT_GAUGE}{{run="{self._run}"}} {self._port}.0\n'

    async def run(self) -> None:
        """Send what has changed, and a heartbeat when nothing has."""
        before, since_s = None, 0.0
        while True:
            told = self._told()
            if told != before or self._books.ended or since_s >= HEARTBEAT_S:
                self.send(msgspec.structs.replace(told, finished=self._ended()))
                before, since_s = told, 0.0
            await asyncio.sleep(_GAP_S)
            since_s += _GAP_S

    async def drain(self) -> None:
        """Say that the engine shuts down, and hold until that was heard."""
        self.phase = DRAINING
        self.send(self._told())
        await asyncio.sleep(HOLD_S)

    def close(self) -> None:
        """Nothing more."""
        self._socket.close(linger=0)
        self._context.term()

    def send(self, told: Message) -> None:
        """The next message."""
        self._sent += 1
        if not self.silent:
            self._socket.send(encode(msgspec.structs.replace(told, seq=self._sent)), zmq.DONTWAIT)

    def _ended(self) -> list[Finished]:
        """Requests that have ended and were not told of yet, as many as a message lists."""
        ended = self._books.ended
        return [ended.popleft() for _ in range(min(len(ended), MOST_LISTED))]

    def _told(self) -> Message:
        """The state, as yet without a number."""
        engine, books = self._engine, self._books
        told = EngineTold(
            running=engine.running + books.held, waiting=engine.waiting, kv_used=engine.kv_used,
            kv_peak=engine.kv_used, steps=engine.generation_tokens_total + engine.prompt_tokens_total,
            prefix_queries=engine.prefix_queries_tokens_total, prefix_hits=engine.prefix_hits_tokens_total,
            prompt=engine.prompt_tokens_total, generated=engine.generation_tokens_total,
            preemptions=engine.preemptions_total, max_num_seqs=engine.max_num_seqs,
            kv_capacity_tokens=engine.cache.capacity * engine.block_size_tokens,
        )  # fmt: skip
        return Message(
            v=VERSION, run=self._run, phase=self.phase, started_at_s=books.started_at_s,
            server_port=self._server_port(), engines=[told],
            totals=Totals(first_tokens=books.served, finished=dict(books.finished)),
        )  # fmt: skip
