"""A gRPC engine for tests, by generic handlers: every kind of call, messages as plain bytes.

Run as a program, so that it can be killed: `python grpc_engine.py PORT NAME`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE = "generate.Engine"


class Calls:
    """What the service offers; every answer begins with the engine's name."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    async def unary(self, message: bytes, context: Any) -> bytes:
        """The message back; `fail` is refused with a status of ours."""
        if message == b"fail":
            context.set_trailing_metadata((("engine", self._name.decode()),))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as asked")
        return self._name + b" " + message

    async def server_stream(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        """So many messages as it says; `hold` gives one and then waits."""
        context.set_trailing_metadata((("engine", self._name.decode()),))
        if message == b"hold":
            yield self._name + b" 0"
            await asyncio.sleep(3_600)
        for number in range(int(message)):
            yield self._name + b" %d" % number

    async def client_stream(self, messages: AsyncIterator[bytes], _context: Any) -> bytes:
        """How many came."""
        return self._name + b" %d" % len([message async for message in messages])

    async def bidirectional(self, messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        """Each back as it comes."""
        async for message in messages:
            yield self._name + b" " + message


async def serve(port: int, name: str) -> None:
    """Until killed."""
    calls = Calls(name)
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(calls.unary),
        "ServerStream": grpc.unary_stream_rpc_method_handler(calls.server_stream),
        "ClientStream": grpc.stream_unary_rpc_method_handler(calls.client_stream),
        "Bidirectional": grpc.stream_stream_rpc_method_handler(calls.bidirectional),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
