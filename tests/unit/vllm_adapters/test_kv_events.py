"""KV events as vLLM sends them, now and formerly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement.precise_index import Cleared, Removed, Stored, Tier, extra_of
from vllm_adapters.kv_events import (
    END_OF_REPLAY,
    BadEvents,
    Place,
    address_in,
    parse_frames,
    places_told,
    replay_request,
    replayed,
    token_bytes,
)

DEEP = b'{"0": {"endpoint": "tcp://*:1", "more": ' + b"[" * 100_000

CAPTURED = bytes.fromhex(  # vLLM 0.32.0, sequence number 0
    "93cb41dac30c17932d7a918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf4527907fc7d50a27cf7a92d89d"
    "1d56aa89b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00400a0b0c0d0e0f101112131415161718191a1b1c1d1e"
    "1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f40414243444546474849aa626c6f636b5f73697a6520a76c"
    "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b76"
    "5f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)


def _frames(*events: Any, rank: int | None = None, sequence: int = 0) -> list[bytes]:
    batch = [12.5, list(events)] if rank is None else [12.5, list(events), rank]
    return [b"kv-events", sequence.to_bytes(8, "big"), msgspec.msgpack.encode(batch)]


def _only(*events: Any) -> Any:
    (event,) = parse_frames(_frames(*events)).events
    return event


def test_a_captured_message_is_read() -> None:
    """What vLLM 0.32 really sent: two blocks of 32 tokens, in memory of the GPU."""
    batch = parse_frames([b"kv-events", bytes(8), CAPTURED])
    assert (batch.topic, batch.sequence, batch.rank) == ("kv-events", 0, 0)
    assert batch.events == (
        Stored([4983110391196617255, 8832359988540648073], None, token_bytes(range(10, 74)), 32, [b"", b""]),
    )


def test_adapters_and_salts_set_blocks_apart() -> None:
    """By name, in the order the engine publishes them."""
    stored = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": 9, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": 1, "medium": "GPU", "lora_name": "l1", "extra_keys": [["l1", "pepper"], ["l1"]],
    }  # fmt: skip
    event = _only(stored)
    assert event.extras == [extra_of(["l1", "pepper"]), extra_of(["l1"])]
    assert event.tells_salt
    assert event.tells_adapter


FORMER = {
    "0.9 to 0.10": ["BlockStored", [1], None, [5, 6], 2, None],
    "0.11": ["BlockStored", [b"\x01" * 32], b"\x02" * 32, [5, 6], 2, None, "GPU"],
    "0.13": ["BlockStored", [1], None, [5, 6], 2, 1, "CPU", "l1"],
    "0.16": ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [["pepper"]], 0],
    "one to come": ["BlockStored", [1], None, [5, 6], 2, None, "GPU", None, [None], 1, "sliding_window", 64, "LOCAL"],
}  # fmt: skip
EXPECTED = {
    "0.9 to 0.10": Stored([1], None, token_bytes([5, 6]), 2, [b""], tells_salt=False),
    "0.11": Stored([b"\x01" * 32], b"\x02" * 32, token_bytes([5, 6]), 2, [b""], tells_salt=False),
    "0.13": Stored([1], None, token_bytes([5, 6]), 2, [extra_of(["l1"])], tier=Tier.CPU, tells_salt=False),
    "0.16": Stored([1], None, token_bytes([5, 6]), 2, [extra_of(["pepper"])]),
    "one to come": Stored([1], None, token_bytes([5, 6]), 2, [b""], group=1, whole_prefix=False),
}


@pytest.mark.parametrize("release", FORMER)
def test_arrays_of_former_releases_are_read(release: str) -> None:
    """The type comes first, then the fields that the release had."""
    assert _only(FORMER[release]) == EXPECTED[release]


def test_an_adapter_known_by_number_alone_is_told() -> None:
    """Requests name adapters, so such blocks cannot be matched with them, nor with anything else."""
    event = _only(["BlockStored", [1], None, [5, 6], 2, 7])
    assert not event.tells_adapter
    assert event.extras == [extra_of([7])]


@pytest.mark.parametrize(
    ("sent", "event"),
    [
        ({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 1}, Removed([3], Tier.GPU, 1)),
        (["BlockRemoved", [3], "CPU_PINNED"], Removed([3], Tier.CPU)),
        (["BlockRemoved", [3]], Removed([3])),
        ({"type": "BlockRemoved", "block_hashes": [3], "medium": "STORAGE"}, Removed([3], Tier.DISK)),
        ({"type": "AllBlocksCleared"}, Cleared()),
        (["AllBlocksCleared"], Cleared()),
    ],
)
def test_what_an_engine_drops(sent: Any, event: object) -> None:
    """In either encoding, from any tier."""
    assert _only(sent) == event


def test_ranks_are_told_apart() -> None:
    """By the third item of the batch; older releases send none."""
    assert parse_frames(_frames(rank=3, sequence=7)).rank == 3
    assert parse_frames(_frames(sequence=7)).rank == 0


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [b"", b"", b""],
        [b"kv", bytes(8)],
        [b"kv", bytes(8), b"\x93"],
        _frames({"type": "BlockEaten"}),
        _frames(["BlockStored", [1]]),
        _frames(["BlockStored", [bytes(65)], None, [1], 1, None]),
        _frames(["BlockRemoved", [bytes(65)], None]),
        _frames(["BlockStored", [1], None, [-1], 1, None]),
        _frames(["BlockStored", [1], None, [1 << 32], 1, None]),
        _frames(["BlockStored", [1], None, [1], -1, None]),
        _frames(["BlockStored", [1], None, [1], 1, None, None, None, []]),
        _frames(["BlockStored", [1], None, [1], 1, None, None, None, ["l1"]]),
        _frames(rank=-1),
        _frames(rank=100_000),
        [b"kv", bytes(8), b"\x91" * 100_000],
        [b"kv", bytes(8), b"\x92\x01\x91" + b"\x91" * 100_000],
        [b"kv", bytes(8), msgspec.msgpack.encode([1.0, [""]])],
    ],
)
def test_what_no_engine_sends_is_refused(bad: list[bytes]) -> None:
    """With the one error that says so."""
    with pytest.raises(BadEvents):
        parse_frames(bad)


@given(st.binary(max_size=200), st.integers(0, len(CAPTURED)))
def test_no_bytes_raise_anything_else(noise: bytes, at: int) -> None:
    """Neither noise nor a message that noise has got into."""
    for payload in (noise, CAPTURED[:at] + noise, CAPTURED[:at] + noise + CAPTURED[at:]):
        try:
            parse_frames([noise, bytes(8), payload])
        except BadEvents:
            continue


def test_a_topic_may_name_the_engine() -> None:
    """As `kv@address@model`, which is how engines that connect to us are told apart."""
    assert address_in("kv@10.0.0.1:8000@org/model@v2") == "10.0.0.1:8000"
    assert address_in("kv-events") is None
    assert address_in("kv@10.0.0.1:8000") is None


def test_a_replay_is_asked_for_and_ends() -> None:
    """From a sequence number on, until the mark; SGLang leaves out the topic."""
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\x01\x02"]
    batch = replayed([b"", *_frames(sequence=4)])
    assert batch is not None
    assert batch.sequence == 4
    assert replayed([b"", *_frames(sequence=4)[1:]]) == replace(batch, topic="")
    assert replayed([b"", b"", END_OF_REPLAY, b""]) is None
    with pytest.raises(BadEvents):
        replayed(_frames())


def test_an_engine_says_where_its_events_come_out() -> None:
    """By rank; one that publishes none, or no port, is no source."""
    told = (
        b'{"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6000"},'
        b' "1": {"endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": null, "topic": ""},'
        b' "2": {"enable_kv_cache_events": false, "endpoint": "tcp://*:5559"}}'
    )
    assert places_told(told) == {0: Place(5557, 6000), 1: Place(5558, None)}
    for bad in (b"", b"[]", b'{"a": {}}', b'{"0": {"endpoint": 5}}', DEEP):
        with pytest.raises(ValueError):  # noqa: PT011 - msgspec's is one
            places_told(bad)
