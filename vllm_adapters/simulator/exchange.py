"""One generation request on its connection: what came, what is sent, and how a fault ends it."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

from vllm_adapters.simulator.books import Record
from vllm_adapters.simulator.faults import Faults
from vllm_adapters.simulator.pacing import Ticket


class Cut(Exception):
    """A fault closes the connection."""


class Exchange:
    """One generation request: what came, what was sent, which faults it shows."""

    def __init__(self, request: web.Request, shown: Faults, record: Record | None) -> None:
        self.request = request
        self.faults = shown
        self.record = record
        self.ticket: Ticket | None = None

    def whole(self, status: int, body: bytes) -> web.Response:
        """A JSON answer in one piece."""
        if self.record is not None:
            self.record.sent(body)
        return web.Response(status=status, body=body, content_type="application/json")

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        """A piece of a stream."""
        if self.record is not None:
            self.record.sent(data)
        await response.write(data)

    def close(self, *, reset: bool) -> None:
        """Drop the connection, with a TCP reset or as a dying process does."""
        transport = self.request.transport
        if transport is None:
            return
        if reset:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
