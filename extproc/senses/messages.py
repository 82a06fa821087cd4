"""What the decision process and the senses tell each other. Plain data and its encoding; no I/O.

A message is msgpack behind its length. Everything about an endpoint is named by its address, since slots are the
decision process's own and may be reused while a message is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from policies.lifecycle import Evidence
from vllm_adapters.dcgm import GpuLoad
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures
from vllm_adapters.pushed import Pushed


class _Message(msgspec.Struct, frozen=True, tag=True):
    """One message; its class name travels with it."""


# -- to the senses


class Target(msgspec.Struct, frozen=True):
    """One endpoint to watch. `grpc`: it speaks gRPC, and has neither metrics nor a list of models.

    `metrics`: where its metrics are, as `host:port/path`. `exporter`: where its host tells of GPUs, `gpus` which of
    them are its own (none: all), and `exporter_ms` how often it is asked.
    """

    address: str
    grpc: bool = False
    metrics: str = ""
    exporter: str = ""
    exporter_ms: int = 1_000
    gpus: tuple[str, ...] = ()


class Pace(msgspec.Struct, frozen=True):
    """How often endpoints are asked, and how patiently; `scrape` and `probe` of the config.

    `requests`: of engines that push, single requests that have ended are wanted as well.
    """

    scrape_interval_ms: int
    scrape_timeout_ms: int
    scrape_backoff_max_ms: int
    probe_interval_ms: int
    probe_timeout_ms: int
    trial_timeout_ms: int
    pushes: bool = True
    requests: bool = False


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


class KvEvents(msgspec.Struct, frozen=True):
    """Where engines publish KV events. Their own word counts for more than the ports; `bind`: they connect to us."""

    port: int | None = None
    replay_port: int | None = None
    ranks: int = 1
    bind: str | None = None


class PreciseOf(msgspec.Struct, frozen=True):
    """One pool with a precise index. `tokenizer`: a folder; None asks the engines.

    `tiers`: what a block there is worth, 0..1, by name. `max_blocks`: kept per engine.
    """

    pool: str
    endpoints: list[str]
    events: KvEvents
    tokenizer: str | None
    cached_bytes: int
    tiers: dict[str, float]
    max_blocks: int
    patience_ms: int


class Index(_Message, frozen=True):
    """Keep a precise index for exactly these pools."""

    pools: list[PreciseOf]


class Match(_Message, frozen=True):
    """Which endpoint of `pool` holds how much of this request's prompt? `body` is as the client wrote it, inflated."""

    number: int
    pool: str
    path: str
    body: bytes
    adapter: str | None = None
    salt: str | None = None


# -- from the senses


class Alive(_Message, frozen=True):
    """Sent every second. `dropped`: reports not sent since the last one: nobody took those before them."""

    dropped: int = 0


class Scraped(_Message, frozen=True):
    """An endpoint's metrics were read; or could not be, without `figures`. `spare`: fresher ones are pushed."""

    address: str
    figures: EngineFigures | None = None
    spare: bool = False


class Exported(_Message, frozen=True):
    """An endpoint's host told of its GPUs; or did not, without `gpus`."""

    address: str
    gpus: GpuLoad | None = None


class Heard(_Message, frozen=True):
    """Messages came from an endpoint's plugin. `pushed`: the newest, with what happened in all that were taken.

    `lost` never reached us; `ignored` are another server's, or outdated. `deaf`: times that listening failed.
    """

    address: str
    pushed: Pushed | None = None
    taken: int = 0
    lost: int = 0
    malformed: int = 0
    ignored: int = 0
    deaf: int = 0


class FellSilent(_Message, frozen=True):
    """An endpoint that pushed its figures does so no more."""

    address: str


class Probed(_Message, frozen=True):
    """An endpoint was asked how it is. `listing`: its models, if it answered and is one that lists them."""

    address: str
    evidence: Evidence
    listing: Listing | None = None


class Tried(_Message, frozen=True):
    """A trial came to its end: answered with `status`, or not at all."""

    address: str
    status: int | None = None


class Matched(_Message, frozen=True):
    """The answer to Match: the prompt's length, and of it what each endpoint holds, in tokens.

    `blind`: endpoints that may hold more. `why`: why nothing is known; then the rest says nothing.
    """

    number: int
    input_tokens: int = 0
    tokens: dict[str, int] = {}
    blind: list[str] = []
    why: str | None = None


class Indexed(_Message, frozen=True):
    """How a pool's precise index is: blocks in it, endpoints it is blind for, what happened since it was last told."""

    pool: str
    blocks: int
    blind: int
    counts: dict[str, int] = {}


ToSenses: TypeAlias = Watch | ProbeNow | Try | Index | Match
FromSenses: TypeAlias = Alive | Scraped | Exported | Heard | FellSilent | Probed | Tried | Matched | Indexed

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
