"""A client of ext_proc in HTTP/2's own terms: it cuts, mixes and resets what a gRPC library would keep in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import h2.config
import h2.connection
import h2.events
import h2.settings
from broken_frames import grpc
from callers import HANG_S

HEADERS = [
    (":method", "POST"), (":scheme", "http"), (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc"),
]  # fmt: skip


class RawClient:
    """One connection to a Unix socket. Every choice is the dice's."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        window = rng.choice([1_000, 65_535, 1_000_000])
        codes = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=codes)
        self.answers: dict[int, bytearray] = {}
        self.status: dict[int, str] = {}
        self.dropped: set[int] = set()

    async def connect(self, path: Path) -> None:
        """Connect, and agree on settings."""
        self._reader, self._writer = await asyncio.open_unix_connection(str(path))
        self._h2.initiate_connection()
        await self._flush()
        await self._hear()

    async def call(self, messages: list[bytes]) -> int:
        """Open a stream; send all, or a part and then a reset."""
        rng, stream = self._rng, self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream, HEADERS)
        drop = rng.random() < 0.15
        data = b"".join(map(grpc, messages))
        await self._send(stream, data[: rng.randrange(len(data))] if drop else data)
        if drop:
            self._h2.reset_stream(stream, 8)
            self.dropped.add(stream)
        elif rng.random() < 0.8:
            self._h2.end_stream(stream)
        else:
            await self._flush()
            self._h2.end_stream(stream)
        if rng.random() < 0.2:
            self._h2.ping(rng.randbytes(8))
        if rng.random() < 0.5:
            await self._flush()
        return stream

    async def _send(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            most = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size, len(view))
            if not most:
                await self._flush()
                await self._hear()
                continue
            size = self._rng.choice([1, 5, most, most, most])
            size = min(size, most)
            self._h2.send_data(stream, view[:size])
            view = view[size:]

    async def finish(self, streams: list[int]) -> None:
        """Until each of them has ended."""
        async with asyncio.timeout(HANG_S):
            await self._flush()
            while not all(stream in self.status for stream in streams):
                await self._hear()

    async def _flush(self) -> None:
        """Write, cut anywhere."""
        data = self._h2.data_to_send()
        while data:
            size = self._rng.choice([1, 9, 1_000, 100_000])
            self._writer.write(data[:size])
            data = data[size:]
            if self._rng.random() < 0.05:
                await self._writer.drain()

    async def _hear(self) -> None:
        async with asyncio.timeout(HANG_S):
            data = await self._reader.read(self._rng.choice([50, 65_536]))
        if not data:
            raise ConnectionError("the server hung up")
        for event in self._h2.receive_data(data):
            self._take(event)
        await self._flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.answers.setdefault(event.stream_id, bytearray()).extend(event.data)
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            told = dict(event.headers)
            if "grpc-status" in told:
                self.status[event.stream_id] = told["grpc-status"]
        elif isinstance(event, h2.events.ConnectionTerminated) and event.error_code:
            raise ConnectionError(f"the server gave up: {event.error_code!r} {event.additional_data!r}")

    def messages(self, stream: int) -> list[bytes]:
        """What came on a stream."""
        data, found = bytes(self.answers.get(stream, b"")), []
        while data:
            size = int.from_bytes(data[1:5], "big")
            found.append(data[5 : 5 + size])
            data = data[5 + size :]
        return found

    async def close(self) -> None:
        """Hang up, with whatever is open."""
        self._writer.transport.abort()
