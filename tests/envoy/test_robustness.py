"""Clients, connections and Envoys that die in hundreds, and the largest bodies: nothing of them stays.

On the lane and over gRPC. Whatever ends a request, and however far it had come, what it took goes back, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

ABORTS, KILLS, ENVOY_KILLS = 500, 200, 3
_AT_A_TIME = 25
_CHAT = "/v1/chat/completions"
_HOLD = {"x-sim-fault": json.dumps({"hold": 2})}
LARGEST = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def roomy(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Engines that take prompts of any length, at once."""
    return make_engines(2, "--speed", "1000000", "--kv-capacity-tokens", "40000000", "--max-model-len", "30000000")


@pytest.fixture(scope="module", params=["lane", "grpcio"])
def system(
    request: pytest.FixtureRequest, roomy: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """A system whose Envoy comes by the lane, or by gRPC."""
    folder = Path(tempfile.mkdtemp(prefix="lane-"))
    listen = {"lane": str(folder / "sockets") if request.param == "lane" else False}
    system = System(tmp_path_factory.mktemp("system"), {"pools": [pool_of(roomy)], "listen": listen})
    system.start()
    system.wait_pickable(*(engine.address for engine in roomy))
    yield system
    system.stop()
    shutil.rmtree(folder)


def _all_given_back(system: System, engines: list[Engine]) -> None:
    """Nothing is in flight by our count, nor by the engines' own, and no stream is open."""
    for engine in engines:
        engine.release()
    eventually(lambda: not any(system.in_flight().values()), "all reservations are given back")
    eventually(lambda: not system.total("pointsman_ext_proc_streams_open"), "all streams are closed")
    eventually(lambda: not system.total("pointsman_requests_unsettled"), "all is settled")
    eventually(lambda: not any(engine.state()["in_flight"] for engine in engines), "the engines agree")
    figures = system.metrics()
    opened, ended = (figures[f"pointsman_ext_proc_streams_{what}_total"] for what in ("opened", "ended"))
    assert opened == ended


def _serves(system: System) -> bool:
    return httpx.post(f"{system.url}{_CHAT}", json=chat(), timeout=HANG_GUARD_S).status_code == 200


async def test_five_hundred_aborts_and_two_hundred_kills_leave_nothing(system: System, roomy: list[Engine]) -> None:
    """Requests given up at any moment of theirs, and connections reset in the middle of heads, bodies and answers."""
    rng = Random(5)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(system.url, connector=connector) as session:
        jobs = [_abort(session, rng.random() ** 2 * 0.2, rng.choice([10, 10, 100_000])) for _ in range(ABORTS)]
        jobs += [_kill(system, rng) for _ in range(KILLS)]
        rng.shuffle(jobs)
        for begin in range(0, len(jobs), _AT_A_TIME):
            await asyncio.gather(*jobs[begin : begin + _AT_A_TIME])
    await asyncio.to_thread(_all_given_back, system, roomy)
    assert await asyncio.to_thread(_serves, system)


async def _abort(session: aiohttp.ClientSession, patience_s: float, words: int) -> None:
    """A request whose answer would never end, given up after a while."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(patience_s):
            async with session.post(_CHAT, json=chat("word " * words, stream=True), headers=_HOLD) as answer:
                await answer.read()


async def _kill(system: System, rng: Random) -> None:
    """A connection on which some part of a request is sent, and perhaps answered, before it is reset."""
    where = urlsplit(system.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    body = json.dumps(chat("word " * rng.choice([10, 20_000]), stream=True)).encode()
    fault = f"x-sim-fault: {_HOLD['x-sim-fault']}"
    head = f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{fault}\r\n\r\n"
    sent = head.encode() + body
    whole = rng.random() < 0.5
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(sent if whole else sent[: rng.randrange(len(sent))])
        async with asyncio.timeout(rng.random() * 0.1):
            await reader.read(rng.choice([1, 10_000]))
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_envoys_that_die_take_their_requests_with_them(system: System, roomy: list[Engine]) -> None:
    """Killed with ten answers running each time: what they held is given back at once, and the next one serves."""
    for _ in range(ENVOY_KILLS):
        with httpx.Client(timeout=HANG_GUARD_S) as client:
            streams = [HeldStream(client, system) for _ in range(10)]
            assert sum(system.in_flight().values()) == 10
            os.kill(system.child("envoy.yaml"), signal.SIGKILL)
            eventually(lambda: not any(system.in_flight().values()), "all is given back")
            for stream in streams:
                stream.answer.close()
            eventually(lambda: _serves(system), "it serves again")
    _all_given_back(system, roomy)


def test_the_largest_bodies_come_through_and_leave_nothing(system: System, roomy: list[Engine]) -> None:
    """16 MB and 32 MiB are routed and answered; beside them one byte more is refused, one left half sent forgotten."""
    with httpx.Client(timeout=HANG_GUARD_S, base_url=system.url) as client:
        for size in (16_000_000, LARGEST):
            answer = client.post(_CHAT, content=_body_of(size))
            assert answer.status_code == 200, answer.text[:300]
            assert answer.json()["usage"]["prompt_tokens"] > size // 20
        assert client.post(_CHAT, content=_body_of(LARGEST + 1)).status_code == 413
        asyncio.run(_half_sent(system))
    _all_given_back(system, roomy)


async def _half_sent(system: System) -> None:
    where = urlsplit(system.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    body = _body_of(16_000_000)
    writer.write(f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:8_000_000])
    await writer.drain()
    writer.transport.abort()


def _body_of(size: int) -> bytes:
    """A chat's body of exactly so many bytes."""
    frame: dict[str, Any] = chat("")
    room = size - len(json.dumps(frame).encode())
    frame["messages"][0]["content"] = ("word " * (room // 5 + 1))[:room]
    return json.dumps(frame).encode()
