"""Inflating within a limit."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest

from extproc.request.encodings import Corrupt, TooLarge, inflate

PACKERS: list[Callable[[bytes], bytes]] = [
    gzip.compress,
    zlib.compress,
    lambda body: zlib.compress(body, wbits=-15),
    lambda body: gzip.compress(body[:7]) + gzip.compress(body[7:]),
]


@pytest.mark.parametrize("pack", PACKERS)
def test_what_was_packed_comes_out(pack: Callable[[bytes], bytes]) -> None:
    """Every form that clients send, up to exactly the limit."""
    assert inflate(pack(b"x" * 1_000), 1_000) == b"x" * 1_000


@pytest.mark.parametrize("pack", PACKERS)
def test_one_byte_too_many_is_too_large(pack: Callable[[bytes], bytes]) -> None:
    """Over all members together."""
    with pytest.raises(TooLarge):
        inflate(pack(b"x" * 1_001), 1_000)


@pytest.mark.parametrize(
    "body",
    [b"{}", b"\x1f\x8b", gzip.compress(b"x" * 99)[:-1], gzip.compress(b"x") + b"rest", zlib.compress(b"x")[:-2]],
    ids=["no gzip", "a beginning", "cut off", "followed by something", "cut off deflate"],
)
def test_broken_bytes_are_corrupt(body: bytes) -> None:
    """Cut off, followed by something else, or nothing of the kind."""
    with pytest.raises(Corrupt):
        inflate(body, 1_000)


def test_nothing_is_nothing() -> None:
    """An empty body is for the parser to refuse."""
    assert inflate(b"", 10) == b""
