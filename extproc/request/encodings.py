"""Compressed request bodies, inflated for reading and never beyond a limit."""

from __future__ import annotations

import zlib

SUPPORTED = frozenset({"gzip", "x-gzip", "deflate"})
"""Names in `content-encoding` that can be read."""

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_BARE_DEFLATE = -zlib.MAX_WBITS


class TooLarge(Exception):
    """More comes out than may."""


class Corrupt(Exception):
    """The bytes are not what their encoding says."""


def inflates_beyond(body: bytes, most_bytes: int) -> bool:
    """Whether more than `most_bytes` come out; broken bytes do not get that far."""
    try:
        inflate(body, most_bytes)
    except TooLarge:
        return True
    except Corrupt:
        pass
    return False


def inflate(body: bytes, most_bytes: int) -> bytes:
    """The plain body. Raises TooLarge as soon as more than `most_bytes` come out, Corrupt for broken bytes."""
    try:
        return _inflate(body, most_bytes, _GZIP_OR_ZLIB)
    except zlib.error:
        pass
    try:
        # some clients send deflate without zlib's frame, and servers have always taken it
        return _inflate(body, most_bytes, _BARE_DEFLATE)
    except zlib.error as error:
        raise Corrupt(str(error)) from error


def _inflate(body: bytes, most_bytes: int, form: int) -> bytes:
    pieces: list[bytes] = []
    left = most_bytes
    while body:
        inflater = zlib.decompressobj(form)
        piece = inflater.decompress(body, left + 1)
        if len(piece) > left:
            raise TooLarge
        if not inflater.eof:
            raise zlib.error("the compressed body ends too early")
        pieces.append(piece)
        left -= len(piece)
        body = inflater.unused_data  # gzip may be several members, one after the other
    return b"".join(pieces)
