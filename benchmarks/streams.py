"""Thousands of slow streams through a real Envoy: what each costs in memory, and whether new requests notice.

    make bench-streams [ARGS='--streams 2000']

By each transport: short requests alone, then beside so many streams that bring a token every 20 seconds, and the memory
of both processes before, during and after. As many streams as descriptors allow: Envoy needs two for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import typer
from harness import System, chat, eventually, free_ports

from benchmarks.rig import TRANSPORTS, Cost, LightEngines, cost, pids, prepare, system_over

_TOKEN_EVERY_S = 20.0
_SPARE_FILES = 1_000
_AT_A_TIME = 100
_PROBES_PER_S = 50.0
_CHAT = "/v1/chat/completions"


@dataclass
class Found:
    """Of one transport. Latencies in ms; costs by process: at rest before, with all streams, and after them."""

    opened: int
    before_ms: list[float]
    during_ms: list[float]
    costs: dict[str, tuple[Cost, Cost, Cost]]
    idle: dict[str, float]
    left_open: float


def _request(tokens: int, number: int) -> bytes:
    body = json.dumps(chat(f"stream {number} " + "word " * 60, stream=bool(tokens))).encode()
    extra = f"x-tokens: {tokens}\r\n" if tokens else ""
    head = f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{extra}\r\n".encode() + body


class _Reader(asyncio.Protocol):
    """One connection; tells when the first token, or all of a short answer, has come."""

    def __init__(self) -> None:
        self.came: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.cut = False

    def data_received(self, data: bytes) -> None:
        """Something has come."""
        if not self.came.done() and (b"data: " in data or b"usage" in data):
            self.came.set_result(time.perf_counter())
        self.cut = self.cut or b" 503 " in data[:16]

    def connection_lost(self, _error: Exception | None) -> None:
        """It is over."""
        if not self.came.done():
            self.came.set_exception(ConnectionError("no answer"))


async def _ask(port: int, tokens: int, number: int) -> tuple[asyncio.Transport, float]:
    """Send one, wait for the first token; returns the connection and the time it took."""
    transport, reader = await asyncio.get_running_loop().create_connection(_Reader, "127.0.0.1", port)
    began = time.perf_counter()
    transport.write(_request(tokens, number))
    async with asyncio.timeout(60):
        return transport, await reader.came - began


async def _probe(port: int, for_s: float, seed: int) -> list[float]:
    """Short requests at random times: their latencies in ms."""
    dice, found = random.Random(seed), []

    async def one(number: int) -> None:
        transport, took = await _ask(port, 0, number)
        transport.close()
        found.append(1000 * took)

    until = time.monotonic() + for_s
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < until:
            await asyncio.sleep(dice.expovariate(_PROBES_PER_S))
            tasks.create_task(one(dice.randrange(10**9)))
    return found


async def _open(port: int, count: int) -> list[asyncio.Transport]:
    """So many streams, each with its first token."""
    found: list[asyncio.Transport] = []
    for begin in range(0, count, _AT_A_TIME):
        numbers = range(begin, min(begin + _AT_A_TIME, count))
        opened = await asyncio.gather(*(_ask(port, 1_000_000, number) for number in numbers))
        found += [transport for transport, _ in opened]
    return found


async def _measure(system: System, count: int, for_s: float) -> Found:
    port, of = int(system.url.rpartition(":")[2]), pids(system)
    await _probe(port, 2.0, 1)  # warm
    before_ms = await _probe(port, for_s, 2)
    rest = {name: cost(pid) for name, pid in of.items()}
    streams = await _open(port, count)
    full = {name: cost(pid) for name, pid in of.items()}
    await asyncio.sleep(for_s)
    idle = {name: (cost(pid).cpu_s - full[name].cpu_s) / for_s for name, pid in of.items()}
    during_ms = await _probe(port, for_s, 3)
    for transport in streams:
        transport.abort()
    await asyncio.sleep(0)
    await asyncio.to_thread(_all_closed, system)
    await asyncio.sleep(2)
    after = {name: cost(pid) for name, pid in of.items()}
    costs = {name: (rest[name], full[name], after[name]) for name in of}
    left = await asyncio.to_thread(system.total, "pointsman_ext_proc_streams_open")
    return Found(len(streams), before_ms, during_ms, costs, idle, left)


def _all_closed(system: System) -> None:
    eventually(lambda: not system.total("pointsman_ext_proc_streams_open"), "all streams are closed")
    eventually(lambda: not any(system.in_flight().values()), "all is given back")


def _quantiles(times_ms: list[float]) -> str:
    ordered = sorted(times_ms)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return f"{at[0]:6.2f} / {at[1]:6.1f}"


def report(transport: str, found: Found) -> None:
    """A row for each process."""
    for name, (rest, full, after) in found.costs.items():
        per_stream = (full.rss_kb - rest.rss_kb) / found.opened
        memory = f"{rest.rss_kb / 1024:6.0f} {full.rss_kb / 1024:6.0f} {after.rss_kb / 1024:6.0f}"
        opening_us = 1e6 * (full.cpu_s - rest.cpu_s) / found.opened
        idle = 100 * found.idle[name]
        typer.echo(
            f"{transport:8}{name:10}{found.opened:8} {per_stream:10.1f}   {memory}{opening_us:11.0f}{idle:8.1f} %"
        )
    latency = f"before {_quantiles(found.before_ms)} ms, during {_quantiles(found.during_ms)} ms"
    typer.echo(f"{transport:8}new requests, p50 / p99: {latency}; streams left open: {found.left_open:.0f}")


def main(streams: int = 10_000, seconds: float = 10.0) -> None:
    """Both transports, one after the other."""
    files = prepare()
    count = min(streams, (files - _SPARE_FILES) // 2)
    typer.echo(f"{count} streams of {streams} wanted: {files} descriptors; load {os.getloadavg()[0]:.1f}")
    typer.echo("by      process    streams  KB/stream   MB rest, full, after    open us idle CPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = LightEngines(folder, free_ports(4), _TOKEN_EVERY_S)
        try:
            for transport in TRANSPORTS:
                with system_over(folder, transport, [engines]) as system:
                    report(transport, asyncio.run(_measure(system, count, seconds)))
        finally:
            engines.kill()


if __name__ == "__main__":
    typer.run(main)
