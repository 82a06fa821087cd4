"""A light load over HTTP/1.1 from a process of its own: closed loops, or arrivals by a Poisson process.

    python -m benchmarks.http_load PORT --connections 16 --requests 1000
    python -m benchmarks.http_load PORT --per-second 500 --seconds 10

Prints one line of JSON. Requests are rendered before the clock starts, answers are looked at as far as their status and
length; that is about 30 us of CPU a request, in a process that nobody measures. Closed loops measure cost and
throughput; for latencies as clients see them take arrivals: a slow server does not slow them down, and latency counts
from the moment that a request was due.

Rejected: h2load and wrk, which need root to install and have no Poisson arrivals; aiohttp, at ten times the cost.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

import typer
import uvloop

_MOST_CONNECTIONS = 4_000
_PATIENCE_S = 120.0
_SHARERS = 4
"""Prompts that begin alike, for half of their length."""
_MOST_KEPT_BYTES = 32 << 20
_TEXT = "the quick brown fox jumps over the lazy dog and goes on to look for somewhat more to read "


def bodies(size: int) -> list[bytes]:
    """Chat completions of about `size` bytes."""
    count = max(_SHARERS, min(64, _MOST_KEPT_BYTES // size))
    half = size // 2 - 100
    return [
        _body(f"{number // _SHARERS} {_TEXT * (half // len(_TEXT))}", f"{number} ", half) for number in range(count)
    ]


def _body(system: str, own: str, length: int) -> bytes:
    question = (own + _TEXT * (length // len(_TEXT) + 1))[: max(len(own), length)]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return json.dumps({"model": "sim", "messages": messages, "max_tokens": 100, "temperature": 0.3}).encode()


def request_of(body: bytes) -> bytes:
    """One request, with the headers that the OpenAI SDK sends."""
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: gateway.example",
        "content-type: application/json",
        "authorization: Bearer sk-0123456789abcdef0123456789abcdef",
        "user-agent: OpenAI/Python 1.99.0",
        "x-stainless-lang: python",
        "x-stainless-runtime: CPython",
        "accept: application/json",
        f"content-length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Tally:
    """Seconds of every answer from when it was due; how many were no 200."""

    seconds: list[float] = field(default_factory=list)
    bad: int = 0

    def add(self, due_s: float, *, ok: bool) -> None:
        """One answer has come."""
        self.seconds.append(time.perf_counter() - due_s)
        self.bad += not ok

    def told(self, lasted_s: float) -> dict[str, float]:
        """What the caller wants to know."""
        ordered = sorted(self.seconds) or [0.0]
        shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
        times = {name: 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * at))] for name, at in shares.items()}
        return {"count": len(self.seconds), "bad": self.bad, "per_s": len(self.seconds) / lasted_s, **times}


class Connection(asyncio.Protocol):
    """One keep-alive connection: one request at a time. `on_done` is called with whether it was a 200."""

    def __init__(self) -> None:
        self.on_done: Callable[[bool], None]
        self._transport: asyncio.Transport
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes, on_done: Callable[[bool], None]) -> None:
        """Send a request."""
        self.on_done = on_done
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Some of the answer."""
        self._got = got = self._got + data if self._got else data
        end = got.find(b"\r\n\r\n")
        if end < 0 or len(got) < end + 4 + _length(got[:end]):
            return
        self._got = b""
        self.on_done(got.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, _error: Exception | None) -> None:
        """A closed connection is none of the answers that are waited for; the run's time limit ends it."""


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError("an answer without a length; this load is for constant ones")


class Load:
    """Requests to one port."""

    def __init__(self, port: int, requests: list[bytes]) -> None:
        self.tally = Tally()
        self._port = port
        self._requests: Iterator[bytes] = cycle(requests)
        self._idle: list[Connection] = []
        self._open = 0

    async def connect(self, count: int) -> None:
        """Open so many connections."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            _, one = await loop.create_connection(Connection, "127.0.0.1", self._port)
            self._idle.append(one)
            self._open += 1

    async def closed(self, count: int) -> None:
        """`count` requests, on every connection one after the other."""
        finished = asyncio.get_running_loop().create_future()
        left, awaited = count, count

        def go(connection: Connection) -> None:
            nonlocal left
            left -= 1
            due_s = time.perf_counter()
            connection.ask(next(self._requests), lambda ok: done(connection, due_s, ok))

        def done(connection: Connection, due_s: float, ok: bool) -> None:  # noqa: FBT001 - as a callback
            nonlocal awaited
            self.tally.add(due_s, ok=ok)
            awaited -= 1
            if left > 0:
                go(connection)
            elif not awaited:
                finished.set_result(None)

        for connection in self._idle:
            go(connection)
        async with asyncio.timeout(_PATIENCE_S):
            await finished

    async def arrivals(self, per_s: float, for_s: float, seed: int) -> None:
        """A Poisson process of requests, and all of their answers."""
        dice, due_s = random.Random(seed), time.perf_counter()
        until_s = due_s + for_s
        async with asyncio.timeout(for_s + _PATIENCE_S):
            while (due_s := due_s + dice.expovariate(per_s)) < until_s:
                if (early_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(early_s)
                if not self._idle and self._open < _MOST_CONNECTIONS:
                    await self.connect(1)
                self._send(due_s)
            while len(self._idle) < self._open:  # noqa: ASYNC110 - the answers' callbacks know of no event
                await asyncio.sleep(0.01)

    def _send(self, due_s: float) -> None:
        if not self._idle:
            self.tally.bad += 1
            return
        connection = self._idle.pop()

        def done(ok: bool) -> None:  # noqa: FBT001 - as a callback
            self.tally.add(due_s, ok=ok)
            self._idle.append(connection)

        connection.ask(next(self._requests), done)


async def _run(load: Load, connections: int, requests: int, per_s: float, for_s: float, seed: int) -> dict[str, float]:
    await load.connect(connections)
    began = time.perf_counter()
    await (load.arrivals(per_s, for_s, seed) if per_s else load.closed(requests))
    return load.tally.told(time.perf_counter() - began)


def main(
    port: int,
    connections: int = 16,
    requests: int = 1_000,
    body_bytes: int = 2_000,
    per_second: float = 0.0,
    seconds: float = 10.0,
    seed: int = 1,
) -> None:
    """Send, and print what came of it."""
    load = Load(port, [request_of(body) for body in bodies(body_bytes)])
    gc.disable()
    typer.echo(json.dumps(uvloop.run(_run(load, connections, requests, per_second, seconds, seed))))


if __name__ == "__main__":
    typer.run(main)
