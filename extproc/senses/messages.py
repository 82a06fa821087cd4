"""What the decision process and the senses tell each other. Plain data and its encoding; no I/O.

A message is msgpack behind its length. Everything about an endpoint is named by its address, since slots are the
decision process's own and may be reused while a message is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from policies.lifecycle import Evidence
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures


class _Message(msgspec.Struct, frozen=True, tag=True):
    """One message; its class name travels with it."""


# -- to the senses


class Target(msgspec.Struct, frozen=True):
    """One endpoint to watch. `grpc`: it speaks gRPC, and has neither metrics nor a list of models."""

    address: str
    grpc: bool = False


class Pace(msgspec.Struct, frozen=True):
    """How often endpoints are asked, and how patiently; `scrape` and `probe` of the config."""

    scrape_interval_ms: int
    scrape_timeout_ms: int
    scrape_backoff_max_ms: int
    probe_interval_ms: int
    probe_timeout_ms: int
    trial_timeout_ms: int


class Watch(_Message, frozen=True):
    """Watch exactly these endpoints, at this pace."""

    targets: list[Target]
    pace: Pace


class ProbeNow(_Message, frozen=True):
    """Ask this one at once: a request has just shown that something is wrong with it."""

    address: str


class Try(_Message, frozen=True):
    """Ask this endpoint for one generation of `model`."""

    address: str
    model: str


# -- from the senses


class Alive(_Message, frozen=True):
    """Sent every second. `dropped`: figures not sent since the last one, since nobody took what was sent before."""

    dropped: int = 0


class Scraped(_Message, frozen=True):
    """An endpoint's metrics were read; or could not be, without `figures`."""

    address: str
    figures: EngineFigures | None = None


class Probed(_Message, frozen=True):
    """An endpoint was asked how it is. `listing`: its models, if it answered and is one that lists them."""

    address: str
    evidence: Evidence
    listing: Listing | None = None


class Tried(_Message, frozen=True):
    """A trial came to its end: answered with `status`, or not at all."""

    address: str
    status: int | None = None


ToSenses: TypeAlias = Watch | ProbeNow | Try
FromSenses: TypeAlias = Alive | Scraped | Probed | Tried

encode_body = msgspec.msgpack.Encoder().encode
to_senses = msgspec.msgpack.Decoder(ToSenses).decode
from_senses = msgspec.msgpack.Decoder(FromSenses).decode

_LENGTH_BYTES = 4


def encode(message: ToSenses | FromSenses) -> bytes:
    """The message as it travels."""
    body = encode_body(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Frames:
    """Cuts what a stream brings into the bodies of messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now."""
        rest = self._rest
        rest += data
        start = 0
        while len(rest) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(rest[start : start + _LENGTH_BYTES], "big")
            if end > len(rest):
                break
            yield bytes(rest[start + _LENGTH_BYTES : end])
            start = end
        del rest[:start]
