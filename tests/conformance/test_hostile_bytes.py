"""Bytes that no gateway would send, over both transports: any cut of good frames, and frames that break the rules.

On Unix sockets alone: where the frames come from makes no difference to who reads them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest
from broken_frames import BROKEN
from callers import HANG_S, Caller
from cases import EQUAL, chat, post
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from gateways import OWN
from house import House
from raw_client import RawClient
from transports import TRANSPORTS

from extproc.names import EXT_PROC_SOCKET

SESSIONS = int(os.environ.get("FUZZ_SESSIONS", "100"))
STREAMS = 30
_AT_A_TIME = 50
_SIZES = [1, 50, 3_000, 40_000, 200_000]

Served: TypeAlias = tuple[House, Caller, Path]


@pytest.fixture(params=["lane", "grpc-unix"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    """A router, a well-behaved caller of it, and where it listens."""
    house = House(EQUAL, {})
    make: Callable[[House, Path], AbstractAsyncContextManager[Caller]] = TRANSPORTS[request.param]
    async with AsyncExitStack() as open_now:
        caller = await open_now.enter_async_context(make(house, tmp_path))
        yield house, caller, _socket_in(tmp_path)


def _socket_in(folder: Path) -> Path:
    return next(path for path in folder.rglob("*.sock") if path.name in {EXT_PROC_SOCKET, "grpc.sock"})


async def _still_serves(house: House, caller: Caller) -> None:
    """A good request is answered as if nothing had been, and nothing stays of what was."""
    stream = caller.open()
    answers = await OWN.ask(stream, post(chat()))
    assert answers[-1].HasField("request_body")
    stream.cancel()
    await house.is_empty()


async def test_any_cut_and_any_order_are_answered(served: Served) -> None:
    """Sessions of thirty streams from python-h2, frames of any size cut anywhere, some reset in the middle.

    Each stream that was not reset has its two answers and ends well; all is given back.
    """
    house, caller, path = served
    for first in range(0, SESSIONS, _AT_A_TIME):
        for seed in range(first, min(first + _AT_A_TIME, SESSIONS)):
            await _session(path, Random(seed))
        await house.is_empty()
    await _still_serves(house, caller)


async def _session(path: Path, rng: Random) -> None:
    client = RawClient(rng)
    await client.connect(path)
    streams = []
    for _ in range(STREAMS):
        asked = post(chat(content="x" * rng.choice(_SIZES)))
        streams.append(await client.call([message.SerializeToString() for message in OWN.request(asked)]))
    kept = [stream for stream in streams if stream not in client.dropped]
    await client.finish(kept)
    for stream in kept:
        answers = [ext_proc.ProcessingResponse.FromString(raw) for raw in client.messages(stream)]
        assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_body"]
        assert client.status[stream] == "0"
    await client.close()


async def test_frames_that_break_the_rules_do_no_harm(served: Served) -> None:
    """Each, whole and cut in two, then silence: it is hung up on or left alone, and others are served as ever.

    Which error code our own HTTP/2 says is for its own tests; grpcio need only survive.
    """
    house, caller, path = served
    for number, (data, _) in enumerate(BROKEN.values()):
        for at in (len(data), len(data) // 2):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(data[:at])
            await asyncio.sleep(0)
            writer.write(data[at:])
            writer.write_eof()
            async with asyncio.timeout(HANG_S):
                while await _more(reader):
                    pass
            writer.transport.abort()
        if number % 10 == 0:
            await _still_serves(house, caller)
    await _still_serves(house, caller)
    if path.name == EXT_PROC_SOCKET:
        counted = (house.count("lane_failures", code=name) for name in _CODES)
        assert sum(counted) >= len(BROKEN)


_CODES = ("protocol_error", "frame_size_error", "flow_control_error", "enhance_your_calm", "stream_closed")


async def _more(reader: asyncio.StreamReader) -> bool:
    """Whether anything more comes before it hangs up."""
    try:
        return bool(await reader.read(65_536))
    except ConnectionError:
        return False
