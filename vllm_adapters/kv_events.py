"""vLLM's KV events as they travel: ZMQ frames in, the events of policies/placement/precise_index.py out. No I/O.

A message is `[topic, sequence number, msgpack]`, the last an array `[time, [events], data-parallel rank]`. An event is
a map with a key `type` (vLLM 0.26 and 0.32), or an array whose first item is the type (releases before, and engines
that took over the format then, as SGLang did). Fields were only ever added at the end, so both encodings have the same
fields in the same order. What is not in an older release is told by its absence: `lora_name` (adapters by number
alone), `extra_keys` (salted blocks look like any others), `group_idx` (models with one kind of layer).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from policies.placement.precise_index import TOKEN_BYTES, BlockHash, Cleared, Event, Removed, Stored, Tier, extra_of

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
"""-1: what a replay ends with."""
MOST_RANKS = 256
"""Data-parallel ranks behind one address; a larger number is no rank."""

SOURCES_PATH = "/kv_event_sources"
"""Where an engine says where its events come out."""

_FRAMES = 3
_BOTTOM_UP = frozenset({"full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""Kinds of layers that attend to everything before: their blocks are reused from the start on, without a gap."""
_TIERS = {"GPU": Tier.GPU, "CPU": Tier.CPU, "CPU_PINNED": Tier.CPU}
"""Anything else is slower than these: a disk, or storage that engines share."""


class BadEvents(Exception):
    """The frames are not what an engine sends."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One message. `sequence` counts them from the engine's start; `time_s`: Unix time there."""

    topic: str
    sequence: int
    time_s: float
    rank: int
    events: tuple[Event, ...]


_Name = Annotated[bytes, msgspec.Meta(max_length=64)]
"""A block's, which the index keeps: no hash is longer."""


class _Stored(msgspec.Struct):
    block_hashes: list[int | _Name]
    parent_block_hash: int | _Name | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | _Name]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct):
    pass


class _StoredMap(_Stored, tag="BlockStored"): ...


class _RemovedMap(_Removed, tag="BlockRemoved"): ...


class _ClearedMap(_Cleared, tag="AllBlocksCleared"): ...


class _StoredArray(_Stored, tag="BlockStored", array_like=True): ...


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True): ...


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True): ...


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


def parse_frames(frames: Sequence[bytes]) -> Batch:
    """Read one message. Raises BadEvents, and nothing else, for anything that is none."""
    if len(frames) != _FRAMES or len(frames[1]) != SEQUENCE_BYTES:
        raise BadEvents(f"not topic, sequence number and events, but {[len(frame) for frame in frames[:9]]} bytes")
    topic, sequence, payload = frames
    try:
        batch = _decode_batch(payload)
        events = tuple(_events(batch))
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise BadEvents(str(error)) from error
    rank = batch.data_parallel_rank or 0
    if not 0 <= rank < MOST_RANKS:
        raise BadEvents(f"{rank} is no data-parallel rank")
    return Batch(topic.decode("utf-8", "replace"), int.from_bytes(sequence, "big"), batch.ts, rank, events)


def address_in(topic: str) -> str | None:
    """The address that a topic of the form `kv@<ip:port>@<model>` names."""
    kind, _, rest = topic.partition("@")
    address, _, model = rest.partition("@")
    return address if kind == "kv" and address and model else None


def replay_request(first: int) -> list[bytes]:
    """What a DEALER sends to hear everything from this sequence number on again."""
    return [b"", first.to_bytes(SEQUENCE_BYTES, "big")]


def replayed(frames: Sequence[bytes]) -> Batch | None:
    """One answer to a replay request; None for its end. SGLang leaves the topic out. Raises BadEvents."""
    if len(frames) == _FRAMES and not frames[0]:
        frames = [b"", *frames]
    if len(frames) != _FRAMES + 1 or frames[0]:
        raise BadEvents(f"not a replayed message: {len(frames)} frames")
    return None if frames[2] == END_OF_REPLAY else parse_frames(frames[1:])


# -- where an engine's events come out


class _Told(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True


_decode_told = msgspec.json.Decoder(dict[int, _Told]).decode


class Place(msgspec.Struct, frozen=True):
    """One engine's ports. `events` is None where it connects to us."""

    events: int | None
    replay: int | None


Places: TypeAlias = dict[int, Place]
"""By rank."""


def places_told(answer: bytes) -> Places:
    """What an engine says of itself. Raises ValueError."""
    try:
        told = _decode_told(answer)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return {
        rank: Place(_port(one.endpoint), _port(one.replay_endpoint))
        for rank, one in told.items()
        if one.enable_kv_cache_events and 0 <= rank < MOST_RANKS
    }


def _port(endpoint: str | None) -> int | None:
    port = (endpoint or "").rpartition(":")[2]
    return int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else None


# -- what a message has


def _events(batch: _Batch) -> Iterator[Event]:
    for raw in batch.events:
        encoded = bytes(raw)
        event = (_decode_map if _is_map(encoded[0]) else _decode_array)(encoded)
        if isinstance(event, _Stored):
            yield _stored(event)
        elif isinstance(event, _Removed):
            yield Removed(event.block_hashes, _tier(event.medium), event.group_idx or 0)
        else:
            yield Cleared()


def _is_map(first: int) -> bool:
    return first & 0xF0 == 0x80 or first in {0xDE, 0xDF}


def _tier(medium: str | None) -> Tier:
    return Tier.GPU if medium is None else _TIERS.get(medium.upper(), Tier.DISK)


def _stored(event: _Stored) -> Stored:
    return Stored(
        hashes=event.block_hashes,
        parent=event.parent_block_hash,
        tokens=token_bytes(event.token_ids),
        block_tokens=event.block_size,
        extras=_extras(event),
        tier=_tier(event.medium),
        group=event.group_idx or 0,
        whole_prefix=event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in _BOTTOM_UP,
        tells_salt=event.extra_keys is not None,
        tells_adapter=event.lora_id is None or event.lora_name is not None,
    )


def _extras(event: _Stored) -> list[bytes]:
    """What sets each block apart."""
    if event.extra_keys is not None:
        if len(event.extra_keys) != len(event.block_hashes):
            raise BadEvents(f"{len(event.extra_keys)} extra keys for {len(event.block_hashes)} blocks")
        return [extra_of(_listed(keys)) for keys in event.extra_keys]
    adapter = event.lora_id if event.lora_name is None else event.lora_name
    return [extra_of(None if adapter is None else [adapter])] * len(event.block_hashes)


def _listed(keys: object) -> list[object] | None:
    if keys is None or isinstance(keys, list):
        return keys
    raise BadEvents("extra keys are no list")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as the index takes them, the same on every machine. Raises OverflowError for what is no token."""
    packed = array("I", tokens)
    if packed.itemsize != TOKEN_BYTES:
        raise AssertionError("an unsigned int has four bytes wherever vLLM runs")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


__all__ = [
    "SOURCES_PATH", "BadEvents", "Batch", "BlockHash", "Place", "Places", "address_in", "parse_frames", "places_told",
    "replay_request", "replayed", "token_bytes",
]  # fmt: skip
