"""A caller of ext_proc without an HTTP proxy around it: open a stream, write messages, read answers until it ends.

`Caller` and `Stream` are what the table needs of a client; a transport that plain gRPC cannot reach brings its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

HANG_S = 30.0
"""How long anything may take before a test gives up: a guard against hanging, not a yardstick."""
_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@dataclass(frozen=True)
class Ended:
    """How a stream ended: gRPC's name of the status, and the words with it."""

    code: str
    details: str = ""


class Stream(Protocol):
    """One call of the method, as the gateway sees it."""

    async def send(self, message: ext_proc.ProcessingRequest | bytes) -> None:
        """Write one message; bytes go out as they are. An end that is already there is left for `receive` to tell."""

    async def half_close(self) -> None:
        """Write no more."""

    def cancel(self) -> None:
        """Reset."""

    async def receive(self) -> ext_proc.ProcessingResponse | Ended:
        """The next answer, or how the stream ended. Raises TimeoutError at the hang guard."""


class Caller(Protocol):
    """One connection."""

    def open(self) -> Stream:
        """Begin a call."""

    async def close(self) -> None:
        """Leave, with whatever is open."""


class GrpcCaller:
    """Plain gRPC to a target such as `127.0.0.1:9004` or `unix:/run/router.sock`."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            target, options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        )

    def open(self) -> GrpcStream:
        """Begin a call."""
        return GrpcStream(self._channel.stream_stream(_METHOD)())

    async def close(self) -> None:
        """Leave, with whatever is open."""
        await self._channel.close()


class GrpcStream:
    """One call over grpc.aio, in raw bytes."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: ext_proc.ProcessingRequest | bytes) -> None:
        """Write one message."""
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        async with asyncio.timeout(HANG_S):
            try:
                await self._call.write(raw)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def half_close(self) -> None:
        """Write no more."""
        async with asyncio.timeout(HANG_S):
            await self._call.done_writing()

    def cancel(self) -> None:
        """Reset."""
        self._call.cancel()

    async def receive(self) -> ext_proc.ProcessingResponse | Ended:
        """The next answer, or how the stream ended."""
        async with asyncio.timeout(HANG_S):
            try:
                raw = await self._call.read()
            except grpc.aio.AioRpcError as error:
                return Ended(error.code().name, error.details() or "")
            except asyncio.CancelledError:
                if not self._call.cancelled():
                    raise
                return Ended("CANCELLED")
            if raw is grpc.aio.EOF:
                return Ended((await self._call.code()).name, await self._call.details() or "")
            return ext_proc.ProcessingResponse.FromString(raw)
