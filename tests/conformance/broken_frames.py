"""Frames that break HTTP/2's rules, each with the error code that the RFC names for it.

For our own HTTP/2, which must say that code, and for grpcio, which must outlive them.
"""

from __future__ import annotations

from extproc.wire.http2 import PREFACE, ErrorCode, Frame


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def grpc(message: bytes) -> bytes:
    """A message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


HELLO = PREFACE + frame(Frame.SETTINGS)
OPEN = frame(Frame.HEADERS, 0x4, 1, b"\x82")

BROKEN: dict[str, tuple[bytes, ErrorCode]] = {
    "not HTTP/2": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "half a preface, then nonsense": (PREFACE[:10] + b"x" * 20, ErrorCode.PROTOCOL_ERROR),
    "no settings first": (PREFACE + OPEN, ErrorCode.PROTOCOL_ERROR),
    "an answer to settings first": (PREFACE + frame(Frame.SETTINGS, 1), ErrorCode.PROTOCOL_ERROR),
    "settings of a stream": (HELLO + frame(Frame.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "settings of 5 bytes": (HELLO + frame(Frame.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
    "an answer to settings with more": (
        HELLO + frame(Frame.SETTINGS, 1, 0, b"\0\4\0\0\0\1"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "a window beyond 2^31": (HELLO + frame(Frame.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
    "frames of 100 bytes": (HELLO + frame(Frame.SETTINGS, 0, 0, b"\0\5\0\0\0\x64"), ErrorCode.PROTOCOL_ERROR),
    "a frame beyond the limit": (HELLO + b"\xff\xff\xff\0\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
    "data of stream 0": (HELLO + frame(Frame.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data of a stream never opened": (HELLO + frame(Frame.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data of a stream of ours": (HELLO + OPEN + frame(Frame.DATA, 0, 2, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data after the end": (
        HELLO + OPEN + frame(Frame.DATA, 1, 1) + frame(Frame.HEADERS, 4, 3, b"") + frame(Frame.DATA, 0, 5, b"x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "more padding than frame": (HELLO + OPEN + frame(Frame.DATA, 8, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
    "padding without its length": (HELLO + OPEN + frame(Frame.DATA, 8, 1), ErrorCode.FRAME_SIZE_ERROR),
    "headers of stream 0": (HELLO + frame(Frame.HEADERS, 4, 0, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "headers of a stream of ours": (HELLO + frame(Frame.HEADERS, 4, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "headers in the middle": (HELLO + OPEN + OPEN, ErrorCode.PROTOCOL_ERROR),
    "streams backwards": (
        HELLO + frame(Frame.HEADERS, 4, 5, b"\x82") + frame(Frame.HEADERS, 4, 3, b"\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers without their priority": (HELLO + frame(Frame.HEADERS, 0x24, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
    "an interrupted header block": (
        HELLO + frame(Frame.HEADERS, 0, 1, b"\x82") + frame(Frame.PING, 0, 0, b"12345678"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "data within a header block": (
        HELLO + frame(Frame.HEADERS, 0, 1, b"\x82") + frame(Frame.DATA, 0, 1, b"x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "another stream's continuation": (
        HELLO + frame(Frame.HEADERS, 0, 1, b"\x82") + frame(Frame.CONTINUATION, 4, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (HELLO + frame(Frame.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
    "a header block without end": (
        HELLO + frame(Frame.HEADERS, 0, 1) + frame(Frame.CONTINUATION, 0, 1, b"x" * 15_000) * 20,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "empty continuations without end": (
        HELLO + frame(Frame.HEADERS, 0, 1) + frame(Frame.CONTINUATION, 0, 1) * 300_000,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a priority of 3 bytes": (HELLO + frame(Frame.PRIORITY, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a reset of 3 bytes": (HELLO + OPEN + frame(Frame.RST_STREAM, 0, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a reset of stream 0": (HELLO + frame(Frame.RST_STREAM, 0, 0, b"abcd"), ErrorCode.PROTOCOL_ERROR),
    "a reset of a stream never opened": (HELLO + frame(Frame.RST_STREAM, 0, 7, b"abcd"), ErrorCode.PROTOCOL_ERROR),
    "a push": (HELLO + frame(Frame.PUSH_PROMISE, 4, 1, b"abcd"), ErrorCode.PROTOCOL_ERROR),
    "a ping of a stream": (HELLO + frame(Frame.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
    "a ping of 7 bytes": (HELLO + frame(Frame.PING, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
    "pings without end": (HELLO + frame(Frame.PING, 0, 0, b"12345678") * 10_001, ErrorCode.ENHANCE_YOUR_CALM),
    "a farewell of a stream": (HELLO + frame(Frame.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a farewell of 4 bytes": (HELLO + frame(Frame.GOAWAY, 0, 0, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    "a window update of 3 bytes": (HELLO + frame(Frame.WINDOW_UPDATE, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a window that grows by nothing": (HELLO + frame(Frame.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a window that overflows": (
        HELLO + frame(Frame.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a stream's window that overflows": (
        HELLO + OPEN + frame(Frame.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a stream's window that settings overflow": (
        HELLO + OPEN + frame(Frame.WINDOW_UPDATE, 0, 1, b"\x00\x01\x00\x00")
        + frame(Frame.SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff"),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a window of a stream never opened": (
        HELLO + frame(Frame.WINDOW_UPDATE, 0, 9, b"\0\0\0\1"),
        ErrorCode.PROTOCOL_ERROR,
    ),
}  # fmt: skip
