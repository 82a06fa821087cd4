"""HTTP/2 as far as one gRPC method over a socket of its own needs it: bytes in, bytes out, no I/O.

A `Connection` serves streams of one method to one kind of client, Envoy. What comes is read frame by frame in one pass,
and all answers to it leave in one piece. Header blocks of requests are not even decoded: the socket says which method
it is, and since we announce a header table of size 0 and answer with constants, no state hangs on them.

Why not a library: grpc.aio costs 360 to 430 us of CPU per request of two messages each way, whatever is done with them,
and pure Python over h2 (grpclib) three quarters of that; this costs 16 us. It is worth its lines on the one path that
every request takes. The price is that it is not general: no HPACK decoding, no request headers, no priorities, no push,
no compression, nothing but gRPC's length-prefixed messages. On TCP, where anybody may connect, grpcio serves.

All else is as RFC 9113 has it: windows both ways, frame sizes, settings that change, CONTINUATION and padding, GOAWAY;
whoever breaks the rules gets the error code they name, and the connection ends. Numbers of sections are that RFC's.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES: Final = 9
"""Of a frame: three of length, type, flags, four of stream; section 4.1. By hand, since compiled that is faster."""
_SETTING = struct.Struct(">HI")
_SETTING_BYTES: Final = 6
_UINT_BYTES: Final = 4
_LARGEST_WINDOW: Final = 2**31 - 1
_DEFAULT_WINDOW: Final = 65_535
_LARGEST_FRAME: Final = 2**24 - 1
_DEFAULT_FRAME: Final = 16_384
_REPLENISH_AFTER: Final = _DEFAULT_FRAME * 1024
"""Bytes received until the connection's window is opened again; it is far larger."""
_VIEWED: Final = 4_096
"""Smaller pieces of messages are copied: that takes no longer than a view of them."""
_HELD_PER_BYTE: Final = 4
"""Of what came with the pieces of a message, so much may stay with them until it is whole."""
_PREFIX: Final = 5
"""gRPC's before each message: a flag and four bytes of length."""


class Frame(IntEnum):
    """Types of frames, section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


# Of most frames: finding a member of an enum takes longer than reading a header
_DATA: Final = 0
_HEADERS: Final = 1
_SETTINGS: Final = 4
_WINDOW_UPDATE: Final = 8
_CONTINUATION: Final = 9


class ErrorCode(IntEnum):
    """Why a stream or a connection ends, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    ENHANCE_YOUR_CALM = 11


class GrpcStatus(IntEnum):
    """How a call ends; gRPC's numbers."""

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITIZED: Final = 0x20
_HEADER_TABLE_SIZE: Final = 1
_MAX_STREAMS: Final = 3
_INITIAL_WINDOW: Final = 4
_MAX_FRAME: Final = 5


class Violation(Exception):
    """The peer broke the protocol, and the connection must end."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(init=False)
class Limits:
    """What one connection may take; never changed.

    `message_bytes`: of one gRPC message; `header_bytes`: of one header block.

    `control_frames`: that want an answer (PING, SETTINGS), within one read: more is no conversation.
    """

    message_bytes: int
    streams: int
    header_bytes: int
    control_frames: int

    def __init__(
        self,
        message_bytes: int,
        streams: int = 100_000,
        header_bytes: int = 256 * 1024,
        control_frames: int = 10_000,
    ) -> None:
        self.message_bytes = message_bytes
        self.streams = streams
        self.header_bytes = header_bytes
        self.control_frames = control_frames


Message: TypeAlias = bytes | list[bytes | memoryview]
"""Of one that came in several frames the pieces, to be joined: whoever wants but a part of it copies no more."""


class Call(Protocol):
    """One call of the method, as the connection sees it."""

    def message(self, raw: Message) -> None:
        """One message of the client's."""

    def ended(self) -> None:
        """The client sends no more; the stream stays open until it is finished."""

    def closed(self) -> None:
        """The stream is over, however. Called once, and last."""


# -- what is sent


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (len(payload) << 16 | kind << 8 | flags).to_bytes(5, "big") + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing, RFC 7541 section 6.2.2; both are shorter than 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def _around_id(flags: int, block: bytes) -> tuple[bytes, bytes]:
    """A HEADERS frame that is always the same but for its stream: what stands before and after that."""
    frame = _frame(Frame.HEADERS, flags, 0, block)
    return frame[: _HEADER_BYTES - _UINT_BYTES], block


_STATUS_200 = b"\x88"
"""`:status: 200`, the static table's entry 8."""
_ANSWER_HEADERS: Final = _STATUS_200 + _literal(b"content-type", b"application/grpc")
_ANSWER_BEGINS: Final = _around_id(_END_HEADERS, _ANSWER_HEADERS)
_LONGEST_TEXT = 100


def _trailers(status: GrpcStatus, text: str) -> bytes:
    block = _literal(b"grpc-status", str(int(status)).encode())
    told = "".join(letter if " " <= letter <= "~" and letter != "%" else "?" for letter in text[:_LONGEST_TEXT])
    return block + _literal(b"grpc-message", told.encode()) if told else block


_WELL: Final = _trailers(GrpcStatus.OK, "")
_ENDS_WELL: Final = _around_id(_END_HEADERS | _END_STREAM, _WELL)


class _Pieces:
    """What has come of one message, cut anywhere.

    A view of a piece saves the copy, but holds all that was read with it; other streams' frames, perhaps, which are
    many times as long. Then the piece is copied after all.
    """

    def __init__(self) -> None:
        self.so_far: list[bytes | memoryview] = []
        self._bytes = 0
        self._held_bytes = 0
        self._viewed = b""

    def add(self, data: bytes, begin: int, end: int) -> None:
        """The next one."""
        size = end - begin
        self._bytes += size
        held_bytes = self._held_bytes + (0 if data is self._viewed else len(data))
        if size >= _VIEWED and held_bytes <= _HELD_PER_BYTE * self._bytes:
            self._held_bytes, self._viewed = held_bytes, data
            self.so_far.append(memoryview(data)[begin:end])
        else:
            self._held_bytes += size
            self.so_far.append(data[begin:end])


_NO_PIECES: Final = _Pieces()
"""Of a stream that lacks none; nobody adds to it."""
_ALL_SENT: Final[deque[memoryview]] = deque()
"""Of one that keeps nothing back; as well."""


class _Gone:
    """Whose stream is over."""

    def message(self, raw: Message) -> None:
        """Too late."""

    def ended(self) -> None:
        """As well."""

    def closed(self) -> None:
        """It is."""


_GONE: Final = _Gone()


class Stream:
    """One stream, as its call sees it: what it sends and how it ends."""

    def __init__(self, connection: Connection, stream_id: int, send_window: int, receive_window: int) -> None:
        self._connection = connection
        self._id = stream_id
        self.call: Call
        # What comes: a message that is not whole yet, and before that its prefix
        self._prefix = b""
        self._pieces = _NO_PIECES
        self._lacking = 0
        self.receive_window = receive_window
        self.half_closed = False
        # What goes
        self._answered = False
        self._unsent = _ALL_SENT
        self._finishing: bytes | None = None
        self.send_window = send_window
        self.over = False

    # -- for the call

    def send(self, message: bytes) -> None:
        """Send one message; kept back where the client's windows do not take it yet."""
        if self.over or self._finishing is not None:
            return
        connection, size = self._connection, len(message) + _PREFIX
        if not self._answered:
            self._answered = True
            before, after = _ANSWER_BEGINS
            connection.put(before + self._id.to_bytes(4, "big") + after)
        fits = size <= self.send_window and size <= connection.send_window and size <= connection.peer_frame
        if fits and not self._unsent:
            self.send_window -= size
            connection.send_window -= size
            # a frame of DATA, which is type 0, without flags, and in it the prefix, whose flag is 0
            head = (size << 16).to_bytes(5, "big") + (self._id << 8).to_bytes(5, "big")
            connection.put(head + (size - _PREFIX).to_bytes(4, "big") + message)
        else:
            if self._unsent is _ALL_SENT:
                self._unsent = deque()
            self._unsent.append(memoryview((size - _PREFIX).to_bytes(_PREFIX, "big") + message))
            self.pump()
        connection.flush()

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the call, after all that was sent."""
        if not self.over and self._finishing is None:
            self._finishing = _trailers(status, text) if status or text else _WELL
            self._lacking, self._pieces = 0, _NO_PIECES
            if self._unsent:
                self.pump()
            else:
                self._put_end(self._finishing)
            self._connection.flush()

    # -- for the connection

    @property
    def wants_more(self) -> bool:
        """Its call has neither ended nor begun to."""
        return self._finishing is None and not self.over

    def pump(self) -> None:
        """Send as much of what was kept back as the windows take, and the end once that is all."""
        connection = self._connection
        while self._unsent:
            most = min(self.send_window, connection.send_window, connection.peer_frame)
            if most <= 0:
                connection.blocked[self._id] = self
                return
            piece, rest = self._unsent[0][:most], self._unsent[0][most:]
            self.send_window -= len(piece)
            connection.send_window -= len(piece)
            connection.put(_frame(Frame.DATA, 0, self._id, bytes(piece)))
            if len(rest):
                self._unsent[0] = rest
            else:
                self._unsent.popleft()
        if self._finishing is not None and not self.over:
            self._put_end(self._finishing)

    def _put_end(self, trailers: bytes) -> None:
        connection = self._connection
        if trailers is _WELL and self._answered and self.half_closed:
            before, after = _ENDS_WELL
            connection.put_late(before + self._id.to_bytes(4, "big") + after)
        else:
            block = trailers if self._answered else _ANSWER_HEADERS + trailers
            connection.put(_frame(Frame.HEADERS, _END_HEADERS | _END_STREAM, self._id, block))
            if not self.half_closed:  # it need not go on sending, section 8.1
                connection.put(_frame(Frame.RST_STREAM, 0, self._id, ErrorCode.NO_ERROR.to_bytes(4, "big")))
        connection.drop(self._id)

    def take(self, data: bytes, begin: int, end: int) -> None:
        """Some bytes of messages, cut anywhere; usually it is one message. Of a call that ends they are passed over."""
        if end - begin < self._lacking:  # as of most pieces of a large message
            self._keep(data, begin, end)
            return
        while begin < end and self._finishing is None:
            if not self._lacking and not self._prefix:
                begin = self._take_whole(data, begin, end)
            if begin < end:
                begin = self._gather(data, begin, end)

    def _take_whole(self, data: bytes, begin: int, end: int) -> int:
        """Hand on the messages that are whole. Returns where the first begins that is not, or wants a closer look."""
        most = self._connection.limits.message_bytes
        while end - begin >= _PREFIX and self._finishing is None:
            length = _uint(data, begin + 1)
            after = begin + _PREFIX + length
            if data[begin] or after > end or length > most:
                break
            self.call.message(data[begin + _PREFIX : after])
            begin = after
        return begin

    def _gather(self, data: bytes, begin: int, end: int) -> int:
        """Keep what there is of one message, and hand it on if that is all. Returns where it ends."""
        if not self._lacking:
            begin = self._read_prefix(data, begin, end)
        after = min(end, begin + self._lacking)
        if after > begin:
            self._keep(data, begin, after)
            if not self._lacking:
                pieces, self._pieces = self._pieces, _NO_PIECES
                self.call.message(pieces.so_far)
        return after

    def _keep(self, data: bytes, begin: int, end: int) -> None:
        self._pieces.add(data, begin, end)
        self._lacking -= end - begin

    def _read_prefix(self, data: bytes, begin: int, end: int) -> int:
        """Learn how long the message is, once that is all here. Returns where it begins."""
        after = min(end, begin + _PREFIX - len(self._prefix))
        self._prefix += data[begin:after]
        if len(self._prefix) < _PREFIX:
            return after
        flag, length = self._prefix[0], _uint(self._prefix, 1)
        self._prefix = b""
        if flag:
            self.finish(GrpcStatus.UNIMPLEMENTED, "compressed messages are not understood")
        elif length > self._connection.limits.message_bytes:
            self.finish(GrpcStatus.RESOURCE_EXHAUSTED, f"a message of {length} bytes is too large")
        elif length:
            self._lacking, self._pieces = length, _Pieces()
        else:
            self.call.message(b"")
        return after

    def close(self) -> None:
        """It is over. What it held goes now: a call and its stream refer to each other, and a body may be 32 MiB.

        The collector would find the two in the end; but it is told to wait, since requests make no such cycles.
        """
        call, self.call = self.call, _GONE
        self.over = True
        self._pieces = _NO_PIECES
        self._unsent = _ALL_SENT
        call.closed()


class Connection:
    """One connection. `receive` what comes; what is to be written is handed to `write` in one piece per turn.

    The end of a call that its client has ended too is nothing that anybody waits for, and a write of its own costs as
    much as the rest of it: it goes with what is written next. While `owes_ends`, see to it that this is soon.

    `open_call` makes the call of a new stream. `failed`: the connection is over by a fault, told in the last bytes
    written; close it.
    """

    def __init__(self, open_call: Callable[[Stream], Call], write: Callable[[bytes], None], limits: Limits) -> None:
        self.limits = limits
        self.failed: ErrorCode | None = None
        self.why = ""
        # What goes
        self.send_window = _DEFAULT_WINDOW
        self.peer_frame = _DEFAULT_FRAME
        self.blocked: dict[int, Stream] = {}
        self._write = write
        self._output: list[bytes] = []
        self._is_due = False
        self._reading = False
        self._peer_window = _DEFAULT_WINDOW
        # What comes
        self._open_call = open_call
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._going_away = False
        self._frame_limit = min(limits.message_bytes + _PREFIX, _LARGEST_FRAME)
        self._window = min(max(2 * limits.message_bytes, _DEFAULT_WINDOW), _LARGEST_WINDOW)
        self._low_window = self._window // 2
        self._received = 0
        self._rest = bytearray()
        self._needed = len(PREFACE)
        self._greeted = False
        self._settled = False
        self._control_frames = 0
        # A header block in several frames: of which stream, whether that ends, and how long it is so far
        self._continues = 0
        self._continued_ends = False
        self._continued_bytes = 0
        self._greet()

    def _greet(self) -> None:
        settings = (
            (_HEADER_TABLE_SIZE, 0),
            (_MAX_STREAMS, self.limits.streams),
            (_INITIAL_WINDOW, self._window),
            (_MAX_FRAME, max(self._frame_limit, _DEFAULT_FRAME)),
        )
        self._frame_limit = max(self._frame_limit, _DEFAULT_FRAME)
        self.put(_frame(Frame.SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings)))
        self.put(_frame(Frame.WINDOW_UPDATE, 0, 0, (_LARGEST_WINDOW - _DEFAULT_WINDOW).to_bytes(4, "big")))
        self.flush()

    # -- for the transport

    @property
    def open_streams(self) -> int:
        """Streams that are not over."""
        return len(self._streams)

    def receive(self, data: bytes) -> None:
        """Take what came."""
        if self.failed is not None:
            return
        self._reading, self._control_frames = True, 0
        try:
            at = self._complete(data) if self._rest else 0
            if not self._rest:
                at = self._read(data, at)
                if at < len(data):
                    self._rest += data[at:]
        except Violation as violation:
            self._fail(violation)
        finally:
            self._reading = False
        if self._received >= _REPLENISH_AFTER:
            self._replenish()
        if self._is_due:
            self.pay()

    @property
    def owes_ends(self) -> bool:
        """Ends of calls wait for something to be written with: `pay` soon."""
        return bool(self._output)

    def go_away(self) -> None:
        """Take no more streams; those that are open go on."""
        if not self._going_away and self.failed is None:
            self._going_away = True
            self.put(
                _frame(Frame.GOAWAY, 0, 0, self._last_id.to_bytes(4, "big") + ErrorCode.NO_ERROR.to_bytes(4, "big"))
            )
            self.flush()

    def lost(self) -> None:
        """The transport is gone: so are all streams."""
        for stream_id in list(self._streams):
            self.drop(stream_id)

    # -- for streams

    def put(self, frame: bytes) -> None:
        """Write this with the rest of the turn."""
        self._output.append(frame)
        self._is_due = True

    def put_late(self, frame: bytes) -> None:
        """Write this with whatever is written next; at once if that may be nothing, or if nobody would see it wait."""
        self._output.append(frame)
        self._is_due |= self._going_away or not self._reading

    def flush(self) -> None:
        """Write at once what was put, unless we are in the middle of reading: then all of it leaves afterwards."""
        if self._is_due and not self._reading:
            self.pay()

    def pay(self) -> None:
        """Write all that was put."""
        if self._output:
            output, self._output, self._is_due = self._output, [], False
            self._write(b"".join(output))

    def drop(self, stream_id: int) -> None:
        """A stream is over."""
        stream = self._streams.pop(stream_id, None)
        if self.blocked:
            self.blocked.pop(stream_id, None)
        if stream is not None:
            stream.close()

    # -- frames

    def _complete(self, data: bytes) -> int:
        """Read the frame that was cut, with what it lacked alone: the rest may be large. Returns where that begins."""
        at = 0
        while self._rest:
            lacking = self._needed - len(self._rest)
            self._rest += data[at : at + lacking]
            at += lacking
            if at > len(data):
                break
            if self._read(bytes(self._rest)):  # else that was its header alone
                self._rest.clear()
        return at

    def _read(self, data: bytes, at: int = 0) -> int:
        """Read all whole frames from there on. Returns where the first begins that is not whole."""
        if not self._greeted:
            at = self._read_preface(data)
        size = len(data)
        if not self._greeted:
            return 0
        while size - at >= _HEADER_BYTES:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > self._frame_limit:
                raise Violation(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            begin = at + _HEADER_BYTES
            end = begin + length
            if end > size:
                self._needed = end - at
                return at
            kind, flags, stream_id = data[at + 3], data[at + 4], _uint(data, at + 5) & _LARGEST_WINDOW
            if kind == _DATA and not self._continues:
                self._on_data(flags, stream_id, data, begin, end)
            else:
                self._on_other(kind, flags, stream_id, data[begin:end])
            at = end
        self._needed = _HEADER_BYTES
        return at

    def _read_preface(self, data: bytes) -> int:
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
        self._greeted = len(data) >= len(PREFACE)
        return len(PREFACE)

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._continues and (kind != _CONTINUATION or stream_id != self._continues):
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._settled and kind != _SETTINGS:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == _HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == _WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == _CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == _SETTINGS:
            self._on_settings(flags, stream_id, payload)
        else:
            self._on_rare(kind, flags, stream_id, payload)

    def _on_rare(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == Frame.RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == Frame.PING:
            self._on_ping(flags, stream_id, payload)
        elif kind == Frame.GOAWAY:
            self._on_goaway(stream_id, payload)
        elif kind == Frame.PRIORITY:
            self._on_priority(payload)
        elif kind == Frame.PUSH_PROMISE:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a client pushes nothing")
        # unknown ones are passed over, section 5.5

    def _on_data(self, flags: int, stream_id: int, data: bytes, begin: int, end: int) -> None:
        stream, length = self._streams.get(stream_id), end - begin
        self._received += length
        if stream is None:
            self._must_have_been(stream_id, "DATA")
            return
        if stream.half_closed:
            raise Violation(ErrorCode.STREAM_CLOSED, "DATA after the end of a stream")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "more than the stream's window")
        if flags & _PADDED:
            begin, end = _unpadded(data, begin, end)
        if end > begin:
            stream.take(data, begin, end)
        if stream.receive_window < self._low_window and stream.wants_more:
            self.put(
                _frame(Frame.WINDOW_UPDATE, 0, stream_id, (self._window - stream.receive_window).to_bytes(4, "big"))
            )
            stream.receive_window = self._window
        if flags & _END_STREAM:
            self._half_close(stream)

    def _half_close(self, stream: Stream) -> None:
        stream.half_closed = True
        if not stream.over:
            stream.call.ended()

    def _must_have_been(self, stream_id: int, what: str) -> None:
        """A frame of a stream that is over is passed over: it was under way when we ended it. Others never were."""
        if not stream_id or stream_id > self._last_id or not stream_id % 2:
            raise Violation(ErrorCode.PROTOCOL_ERROR, f"{what} on a stream that was never opened")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id % 2:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream of ours")
        begin, end = _unpadded(payload, 0, len(payload)) if flags & _PADDED else (0, len(payload))
        if flags & _PRIORITIZED and end - begin < _PREFIX:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without their priority")
        ends = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            self._on_header_block(stream_id, ends=ends)
        else:
            self._continues, self._continued_ends, self._continued_bytes = stream_id, ends, 0
            self._count_header_bytes(end - begin)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._continues:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._count_header_bytes(len(payload) or 1)  # empty ones must not go on for ever either
        if flags & _END_HEADERS:
            self._continues = 0
            self._on_header_block(stream_id, ends=self._continued_ends)

    def _count_header_bytes(self, more: int) -> None:
        self._continued_bytes += more
        if self._continued_bytes > self.limits.header_bytes:
            raise Violation(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")

    def _on_header_block(self, stream_id: int, *, ends: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            if not ends or stream.half_closed:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "HEADERS in the middle of a stream")
            self._half_close(stream)
        elif stream_id <= self._last_id:
            if not ends:
                raise Violation(ErrorCode.PROTOCOL_ERROR, "a stream was opened again")
        else:
            self._open(stream_id, ends=ends)

    def _open(self, stream_id: int, *, ends: bool) -> None:
        self._last_id = stream_id
        if self._going_away or len(self._streams) >= self.limits.streams:
            self.put(_frame(Frame.RST_STREAM, 0, stream_id, ErrorCode.REFUSED_STREAM.to_bytes(4, "big")))
            return
        stream = Stream(self, stream_id, self._peer_window, self._window)
        stream.call = self._open_call(stream)
        self._streams[stream_id] = stream
        if ends:
            self._half_close(stream)

    def _on_priority(self, payload: bytes) -> None:
        if len(payload) != _PREFIX:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of another length")

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != _UINT_BYTES:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length")
        if stream_id in self._streams:
            self.drop(stream_id)
        else:
            self._must_have_been(stream_id, "RST_STREAM")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % _SETTING_BYTES or (flags & _ACK and payload):
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of another length")
        if not self._settled and flags & _ACK:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "the first SETTINGS are an answer")
        self._settled = True
        if flags & _ACK:
            return
        for name, value in _SETTING.iter_unpack(payload):
            self._set(name, value)
        self._answer(_frame(Frame.SETTINGS, _ACK, 0))
        self._pump()  # only now: until it has our answer the client goes by its old windows

    def _set(self, name: int, value: int) -> None:
        if name == _MAX_FRAME:
            if not _DEFAULT_FRAME <= value <= _LARGEST_FRAME:
                raise Violation(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
            self.peer_frame = value
        elif name == _INITIAL_WINDOW:
            if value > _LARGEST_WINDOW:
                raise Violation(ErrorCode.FLOW_CONTROL_ERROR, f"windows of {value} bytes")
            more, self._peer_window = value - self._peer_window, value
            for stream in list(self._streams.values()):
                _widen(stream, more)  # may become negative, section 6.9.2

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "PING of another length")
        if not flags & _ACK:
            self._answer(_frame(Frame.PING, _ACK, 0, payload))

    def _on_goaway(self, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of another length")

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != _UINT_BYTES:
            raise Violation(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length")
        more = _uint(payload, 0) & _LARGEST_WINDOW
        if not more:
            raise Violation(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        if not stream_id:
            self.send_window += more
            if self.send_window > _LARGEST_WINDOW:
                raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overflows")
            self._pump()
        elif (stream := self._streams.get(stream_id)) is not None:
            _widen(stream, more)
            stream.pump()
        else:
            self._must_have_been(stream_id, "WINDOW_UPDATE")

    def _pump(self) -> None:
        """Windows have grown: let those go on that were kept back, in the order in which they were."""
        blocked, self.blocked = self.blocked, {}
        for stream in blocked.values():
            if not stream.over:
                stream.pump()

    def _answer(self, frame: bytes) -> None:
        self._control_frames += 1
        if self._control_frames > self.limits.control_frames:
            raise Violation(ErrorCode.ENHANCE_YOUR_CALM, "more questions than sense")
        self.put(frame)

    def _replenish(self) -> None:
        """Open the connection's window again, long before it is used up."""
        if self.failed is None:
            self.put(_frame(Frame.WINDOW_UPDATE, 0, 0, self._received.to_bytes(4, "big")))
            self._received = 0

    def _fail(self, violation: Violation) -> None:
        self.failed, self.why = violation.code, str(violation)
        goodbye = self._last_id.to_bytes(4, "big") + violation.code.to_bytes(4, "big") + self.why.encode()
        self.put(_frame(Frame.GOAWAY, 0, 0, goodbye))
        self._rest.clear()
        self.lost()


def _unpadded(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Where the payload of a padded frame begins and ends."""
    if end == begin:
        raise Violation(ErrorCode.FRAME_SIZE_ERROR, "no room for the length of the padding")
    padding = data[begin]
    if padding >= end - begin:
        raise Violation(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return begin + 1, end - padding


def _widen(stream: Stream, more: int) -> None:
    stream.send_window += more
    if stream.send_window > _LARGEST_WINDOW:
        raise Violation(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window overflows")


def _uint(data: bytes, at: int) -> int:
    return data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
