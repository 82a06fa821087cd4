"""One generation request on its connection: what came, what is sent, and how a fault ends it."""

from __future__ import annotations

import gzip
import socket
import struct
import zlib
from typing import Any

from aiohttp import web

from vllm_adapters.simulator.books import Record
from vllm_adapters.simulator.faults import Faults
from vllm_adapters.simulator.pacing import Ticket

_GZIP = 31  # zlib's wbits: the largest window, and gzip's frame around it


class Cut(Exception):
    """A fault closes the connection."""


class Exchange:
    """One generation request: what came, what was sent, which faults it shows."""

    def __init__(self, request: web.Request, shown: Faults, record: Record | None) -> None:
        self.request = request
        self.faults = shown
        self.record = record
        self.ticket: Ticket | None = None
        self._packer: Any = None  # zlib's class has no public name

    def whole(self, status: int, body: bytes) -> web.Response:
        """A JSON answer in one piece."""
        if self._is_packed:
            body = gzip.compress(body)
        if self.record is not None:
            self.record.sent(body)
        return web.Response(status=status, body=body, content_type="application/json", headers=self._encoding)

    async def begin(self) -> web.StreamResponse:
        """The beginning of a stream of events."""
        headers = {"Content-Type": "text/event-stream; charset=utf-8", **self._encoding}
        response = web.StreamResponse(headers=headers)
        await response.prepare(self.request)
        self._packer = zlib.compressobj(wbits=_GZIP) if self._is_packed else None
        return response

    async def write(self, response: web.StreamResponse, data: bytes, *, last: bool = False) -> None:
        """A piece of a stream."""
        if self._packer is not None:
            data = self._packer.compress(data) + self._packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        if self.record is not None:
            self.record.sent(data)
        await response.write(data)
        if last:
            await response.write_eof()

    @property
    def _is_packed(self) -> bool:
        return self.faults.gzip and "gzip" in self.request.headers.get("Accept-Encoding", "")

    @property
    def _encoding(self) -> dict[str, str]:
        return {"Content-Encoding": "gzip"} if self._is_packed else {}

    def close(self, *, reset: bool) -> None:
        """Drop the connection, with a TCP reset or as a dying process does."""
        transport = self.request.transport
        if transport is None:
            return
        if reset:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
