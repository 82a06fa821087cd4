"""The Envoy lane: ext_proc and access logs over Unix sockets that only our own Envoy reaches, one method per socket.

The protocol is http2.py's; here are the sockets and the two methods. An exchange that is decided at once is answered
within the callback that brought it; where a reply is pending (a queue, a tokenizer) the stream waits for its future,
without a task of its own.

Safety is the file system's: sockets of mode 0600 in a folder of mode 0700, never TCP. Who may connect to them is the
user we run as, and could do worse.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import structlog

from extproc.flight import Flights
from extproc.names import ACCESS_LOG_SOCKET, EXT_PROC_SOCKET
from extproc.reply import Pending, Reply
from extproc.wire.access_log import AccessLog
from extproc.wire.grpc_server import PortTaken
from extproc.wire.http2 import Call, Connection, GrpcStatus, Limits, Message, Stream
from extproc.wire.messages import Malformed, UnknownKind
from extproc.wire.processor import Decider, Exchange, Sending, WireEvents

log = structlog.get_logger(__name__)

_MOST_QUEUED = 64
"""Messages of a stream that may come while its reply is pending; Envoy sends none before it has it."""
_ENDS_WITHIN_S = 0.005
"""How long the end of a stream waits for something else to write. It saves a third of all writes, and Envoy wakes."""
_HEADROOM_BYTES = 1 << 20
"""Over the largest body, for headers and framing; also what Envoy's first access-log message (its node) needs."""


class LaneEvents(WireEvents, Protocol):
    """Who counts what happens on the lane."""

    def lane_connections(self, change: int) -> None:
        """One more, or less."""

    def lane_failed(self, code: str) -> None:
        """A connection ended by a fault of the peer's."""


class ExtProcCall:
    """One ext_proc stream: the life of one HTTP request."""

    __slots__ = ("_ends", "_events", "_exchange", "_flight", "_pending", "_queued", "_stream")

    def __init__(self, stream: Stream, flights: Flights, decider: Decider, events: LaneEvents, hold_s: float) -> None:
        self._stream = stream
        self._events = events
        self._flight = flights.open()
        self._exchange = Exchange(self._flight, decider, events, hold_s)
        self._pending: asyncio.Future[Reply] | None = None
        self._queued: list[Message] = []
        self._ends = False

    def message(self, raw: Message) -> None:
        """One message of Envoy's."""
        if self._pending is None:
            try:
                self._send(self._exchange.receive(raw))
            except Exception as error:  # noqa: BLE001 - it is told of
                self._fail(error)
        elif len(self._queued) < _MOST_QUEUED:
            self._queued.append(raw)
        else:
            self._stream.finish(GrpcStatus.RESOURCE_EXHAUSTED, "too many messages before the answer to the first")

    def ended(self) -> None:
        """The HTTP request is over; or all of it has been said, by a caller that still awaits the answer."""
        if self._pending is None:
            self._stream.finish()
        else:
            self._ends = True

    def closed(self) -> None:
        """Give back what it took."""
        if self._pending is not None:
            self._pending.cancel()
        self._flight.close()

    def _fail(self, error: Exception) -> None:
        """End the stream in words; ours do not leave the house."""
        if isinstance(error, Malformed):
            self._events.malformed("ext_proc")
            log.warning("malformed ext_proc message", error=str(error))
            self._stream.finish(_status_of(error), str(error))
        else:
            log.error("ext_proc stream failed", exc_info=error)
            self._stream.finish(GrpcStatus.INTERNAL, "internal error")

    def _send(self, said: Sending) -> None:
        if isinstance(said, Pending):
            self._pending = said.ready
            said.ready.add_done_callback(self._resolved)
            return
        for message in said:
            self._stream.send(message)

    def _resolved(self, ready: asyncio.Future[Reply]) -> None:
        self._pending = None
        if self._stream.over or ready.cancelled():
            return
        try:
            self._send(self._exchange.resolve(ready.result()))
        except Exception as error:  # noqa: BLE001 - it is told of
            self._fail(error)
        queued, self._queued = self._queued, []
        for raw in queued:
            self.message(raw)
        if self._ends:
            self.ended()


def _status_of(error: Malformed) -> GrpcStatus:
    return GrpcStatus.UNIMPLEMENTED if isinstance(error, UnknownKind) else GrpcStatus.INVALID_ARGUMENT


class AccessLogCall:
    """One stream of access-log messages."""

    __slots__ = ("_access_log", "_stream")

    def __init__(self, stream: Stream, access_log: AccessLog) -> None:
        self._stream = stream
        self._access_log = access_log

    def message(self, raw: Message) -> None:
        """Some entries."""
        self._access_log.receive(raw if isinstance(raw, bytes) else b"".join(raw))

    def ended(self) -> None:
        """Envoy closes the stream; the answer is an empty message."""
        self._stream.send(b"")
        self._stream.finish()

    def closed(self) -> None:
        """Nothing hangs on it."""


class _Wire(asyncio.Protocol):
    """One connection on its transport."""

    def __init__(self, lane: EnvoyLane, open_call: Callable[[Stream], Call]) -> None:
        self._lane = lane
        self._open_call = open_call
        self._transport: asyncio.Transport
        self._payment: asyncio.TimerHandle | None = None
        self.connection: Connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Envoy has connected."""
        self._transport = cast("asyncio.Transport", transport)
        self.connection = Connection(self._open_call, self._transport.write, self._lane.limits)
        self._lane.wires.add(self)
        self._lane.events.lane_connections(+1)

    def data_received(self, data: bytes) -> None:
        """Some frames, cut anywhere."""
        connection = self.connection
        connection.receive(data)
        if connection.owes_ends and self._payment is None:
            self._payment = asyncio.get_running_loop().call_later(_ENDS_WITHIN_S, self._pay)
        if connection.failed is not None:
            self._lane.events.lane_failed(connection.failed.name.lower())
            log.warning("lane connection ended", code=connection.failed.name, why=connection.why)
            self._transport.close()

    def _pay(self) -> None:
        self._payment = None
        self.connection.pay()

    def pause_writing(self) -> None:
        """Envoy does not read as fast as it asks: it must not ask on."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It does again."""
        self._transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """Gone, and all its streams with it."""
        if self._payment is not None:
            self._payment.cancel()
        self._lane.wires.discard(self)
        self._lane.events.lane_connections(-1)
        self.connection.lost()

    def close(self) -> None:
        """Hang up, once what was written has left."""
        self.connection.pay()
        self._transport.close()


class EnvoyLane:
    """The two sockets. Raises PortTaken on `start` if another process serves there."""

    def __init__(
        self,
        folder: Path,
        flights: Flights,
        decider: Decider,
        access_log: AccessLog,
        events: LaneEvents,
        *,
        hold_s: float,
    ) -> None:
        """`hold_s`: how long our Envoy waits for an answer."""
        self.limits = Limits(decider.largest_body_bytes + _HEADROOM_BYTES)
        self.events = events
        self.wires: set[_Wire] = set()
        self._folder = folder
        self._calls: dict[str, Callable[[Stream], Call]] = {
            EXT_PROC_SOCKET: lambda stream: ExtProcCall(stream, flights, decider, events, hold_s),
            ACCESS_LOG_SOCKET: lambda stream: AccessLogCall(stream, access_log),
        }
        self._servers: list[asyncio.AbstractServer] = []

    async def start(self) -> None:
        """Listen."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        for name, open_call in self._calls.items():
            path = self._folder / name
            _make_way(path)
            loop = asyncio.get_running_loop()
            before = os.umask(0o177)  # from the first moment on: chmod afterwards leaves a gap
            try:
                bound = _bound(path)
            finally:
                os.umask(before)
            self._servers.append(await loop.create_unix_server(self._wire_for(open_call), sock=bound))

    def _wire_for(self, open_call: Callable[[Stream], Call]) -> Callable[[], _Wire]:
        return lambda: _Wire(self, open_call)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections and streams; let open ones end within the grace, then hang up."""
        for server in self._servers:
            server.close()
        for wire in list(self.wires):
            wire.connection.go_away()
        try:
            async with asyncio.timeout(grace_s):
                while any(wire.connection.open_streams for wire in self.wires):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        for wire in list(self.wires):
            wire.close()
        for name in self._calls:
            (self._folder / name).unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener


def _make_way(path: Path) -> None:
    """Remove the socket of a process that is gone. Raises PortTaken if one serves there, or it is no socket."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise PortTaken(f"listen.lane: {path} is there and no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise PortTaken(f"listen.lane: another process serves at {path}; does another Pointsman run?")
