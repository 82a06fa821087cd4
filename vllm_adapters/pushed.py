"""Messages of the stat-logger plugin -> the figures routing needs. Pure: bytes in, plain data or NotPushed out.

Whoever can reach us may have sent them, so nothing is taken on trust: lengths, ranges and kinds are checked as they are
read, and no figure is endless or NaN. The form is that of stat_logger/wire.py; it is written down twice, since the
plugin is installed alone and what it sends is not what we have to believe. With data parallelism a message has a part
per engine: counts and capacities are summed, KV usage is averaged, as metrics.py does with a page.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from vllm_adapters.metrics import EngineFigures, EngineLoad

VERSION = 1
HEARTBEAT_S = 1.0
"""The plugin sends at least so often."""
LARGEST_MESSAGE_BYTES = 256 * 1024
"""What the plugin can fill: a hundred ended requests, and for each of a dozen engines 128 names of adapters."""

_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Name = Annotated[str, Meta(max_length=128)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 40)]
_Adapters = Annotated[dict[_Name, _Count], Meta(max_length=64)]
Phase: TypeAlias = Literal["loading", "serving", "draining"]


class NotPushed(Exception):
    """The bytes are no message of the plugin, or one that cannot be true."""


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended. `request_id` is the engine's own; counts are tokens."""

    request_id: _Name
    reason: _Name
    prompt: _Count
    generated: _Count
    cached: _Count
    e2e_s: _Seconds
    queued_s: Annotated[float, Meta(ge=-1e9, le=1e9)]  # clocks of two processes


class Totals(msgspec.Struct, frozen=True):
    """Since the start: requests with a first token, requests ended, by how they did, and the tokens of those."""

    first_tokens: _Count = 0
    finished: Annotated[dict[_Name, _Count], Meta(max_length=8)] = {}
    prompt: _Count = 0
    generated: _Count = 0


class _Engine(msgspec.Struct, frozen=True):
    index: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    running: _Count = 0
    waiting: _Count = 0
    kv_used: _Share | None = None
    kv_peak: _Share | None = None
    steps: _Count = 0
    prefix_queries: _Count = 0
    prefix_hits: _Count = 0
    prompt: _Count = 0
    generated: _Count = 0
    preemptions: _Count = 0
    lora_running: _Adapters = {}
    lora_waiting: _Adapters = {}
    max_loras: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_num_seqs: _Count | None = None
    kv_capacity_tokens: _Tokens | None = None


class _Message(msgspec.Struct, frozen=True):
    v: int
    run: Annotated[str, Meta(min_length=1, max_length=64)]
    seq: Annotated[int, Meta(ge=1, le=1 << 53)]
    phase: Phase
    started_at_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    server_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    engines: Annotated[list[_Engine], Meta(max_length=256)] = []
    first_tokens: _Count = 0
    ttfts_s: Annotated[list[_Seconds], Meta(max_length=100)] = []
    finished: Annotated[list[FinishedRequest], Meta(max_length=100)] = []
    left_out: _Count = 0
    largest_request_tokens: _Count = 0
    kv_bytes_per_token: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    totals: Totals = Totals()
    troubles: _Count = 0


class Pushed(msgspec.Struct, frozen=True):
    """One message. `run` names the server's process, `seq` counts its messages from 1, `server_port` is its API's.

    `figures`: what a scrape would have told. `kv_peak`: 0..1, at most since the message before. Since the message
    before as well: `first_tokens`, `ttfts_s`, `finished`, `left_out` (ended, not listed), `largest_request_tokens`.
    `most_running`: requests that the engines run at once. `troubles`: figures the plugin could not take, in all.
    """

    run: str
    seq: int
    phase: Phase
    figures: EngineFigures
    server_port: int | None = None
    kv_peak: float | None = None
    most_running: int | None = None
    first_tokens: int = 0
    ttfts_s: tuple[float, ...] = ()
    finished: tuple[FinishedRequest, ...] = ()
    left_out: int = 0
    largest_request_tokens: int = 0
    kv_bytes_per_token: float | None = None
    totals: Totals = Totals()
    troubles: int = 0

    @property
    def largest_request_bytes(self) -> float | None:
        """KV memory of the largest request that has ended since the message before; None where it is not known."""
        return None if self.kv_bytes_per_token is None else self.largest_request_tokens * self.kv_bytes_per_token


_decode = msgspec.msgpack.Decoder(_Message).decode


def parse_pushed(data: bytes) -> Pushed:
    """Read one message. Raises NotPushed, and nothing else, whatever the bytes are."""
    if len(data) > LARGEST_MESSAGE_BYTES:
        raise NotPushed(f"{len(data)} bytes")
    try:
        message = _decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotPushed(str(error)) from error
    if message.v != VERSION:
        raise NotPushed(f"version {message.v}")
    return Pushed(
        run=message.run,
        seq=message.seq,
        phase=message.phase,
        figures=_figures(message),
        server_port=message.server_port,
        kv_peak=_mean([engine.kv_peak for engine in message.engines]),
        most_running=_sum([engine.max_num_seqs for engine in message.engines]),
        first_tokens=message.first_tokens,
        ttfts_s=tuple(message.ttfts_s),
        finished=tuple(message.finished),
        left_out=message.left_out,
        largest_request_tokens=message.largest_request_tokens,
        kv_bytes_per_token=message.kv_bytes_per_token,
        totals=message.totals,
        troubles=message.troubles,
    )


def _figures(message: _Message) -> EngineFigures:
    """As a scrape would give them; none of a server whose engines are not there yet."""
    engines = message.engines
    if not engines:
        return EngineFigures(started_at_s=message.started_at_s)
    return EngineFigures(
        waiting=sum(engine.waiting for engine in engines),
        running=sum(engine.running for engine in engines),
        kv_used=_mean([engine.kv_used for engine in engines]),
        running_adapters=_names([engine.lora_running for engine in engines]),
        waiting_adapters=_names([engine.lora_waiting for engine in engines]),
        max_adapters=max((engine.max_loras for engine in engines if engine.max_loras is not None), default=None),
        kv_capacity_tokens=_sum([engine.kv_capacity_tokens for engine in engines]),
        engines=_each(engines),
        prefix_queries_tokens=sum(engine.prefix_queries for engine in engines),
        prefix_hits_tokens=sum(engine.prefix_hits for engine in engines),
        prefilled_tokens=sum(engine.prompt for engine in engines),
        generated_tokens=sum(engine.generated for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
        finished={reason: float(count) for reason, count in message.totals.finished.items()},
        started_at_s=message.started_at_s,
        progress=sum(engine.steps for engine in engines),
    )


def _each(engines: list[_Engine]) -> tuple[EngineLoad, ...]:
    """Each one's load, where there are several."""
    if len(engines) == 1:
        return ()
    in_order = sorted(engines, key=lambda engine: engine.index)
    return tuple(EngineLoad(str(e.index), e.waiting, e.running, e.kv_used) for e in in_order)


def _names(adapters: list[dict[str, int]]) -> frozenset[str]:
    return frozenset(name for counts in adapters for name, count in counts.items() if count)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
