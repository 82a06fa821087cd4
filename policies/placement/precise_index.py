"""Which endpoint holds how much of a prompt, by the engines' own events: what they stored and dropped, block by block.

An engine names a block by a hash of its own making, with a seed of its own. We name it by ours: a chain of xxh3 over
the block's tokens and what else sets it apart (adapter, cache salt), so that blocks of all engines compare, whatever
function and seed each uses. Per engine a map from its name of a block to ours; over all engines one map per tier from
our name to a bitmask of who holds it, so that a walk costs a look-up per block however many engines there are.

An engine may hold a block twice (it does not look whether it has one before it fills another): copies are counted.

Several engines behind one address (data parallelism) share out their requests without looking at their caches. So an
address holds of a prompt what a request may *expect* there, the mean over its engines. Rejected: the union, which
promises eight times what comes of it where one of eight ranks holds the prompt; and the least of them, which promises
nothing then, though one request in eight profits.

Not here: where events come from (extproc/senses), how they are encoded (vllm_adapters), and what is under way in an
engine and in no event yet (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

BlockHash: TypeAlias = int | bytes
"""An engine's name of a block."""
TOKEN_BYTES = 4
"""Tokens are kept as unsigned 32-bit numbers in a row."""


class Tier(IntEnum):
    """Where an engine keeps a block, fastest first."""

    GPU = 0
    CPU = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """The engine holds these blocks now, each the parent of the next.

    `tokens`: of all of them, TOKEN_BYTES each, `block_tokens` tokens to a block; empty where not told. `extras[i]`:
    what else sets block i apart, as `extra_of` makes it; none for nothing. `group`: of hybrid models, which kind of
    layer the blocks are for; `whole_prefix`: that kind attends to all that came before, so its blocks say what can be
    reused. `tells_salt`, `tells_adapter`: whether salts and adapters' names would be among the extras.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    block_tokens: int
    extras: Sequence[bytes] = ()
    tier: Tier = Tier.GPU
    group: int = 0
    whole_prefix: bool = True
    tells_salt: bool = True
    tells_adapter: bool = True


@dataclass(frozen=True, slots=True)
class Removed:
    """The engine holds one copy less of each of these blocks."""

    hashes: Sequence[BlockHash]
    tier: Tier = Tier.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine holds nothing any more."""


Event: TypeAlias = Stored | Removed | Cleared

_encode = msgspec.msgpack.Encoder().encode
_hash = xxhash.xxh3_64_intdigest


def extra_of(keys: Sequence[object] | None) -> bytes:
    """What sets a block apart beside its tokens and what came before them; empty for nothing."""
    return _encode(keys) if keys else b""


@dataclass(slots=True)
class Tally:
    """What did not go smoothly, in blocks, since the start.

    `orphans`: stored after a block we do not know, so nobody can be matched with them. `odd`: of another size than the
    engine's blocks have. `evicted`: forgotten for want of room.
    """

    orphans: int = 0
    odd: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens per endpoint. `blind`: endpoints that may hold more than that, or anything."""

    tokens: dict[str, int]
    blind: tuple[str, ...] = ()


_Name = TypeVar("_Name")
_WHOLE_WEIGHT = 1.0
_SPARE = 64
"""One in so many blocks is forgotten in advance. One at a time costs a hundred times as much as storing one does."""
_TIERS = tuple(Tier)


class _Shelf:
    """What one engine holds in one tier: its names -> ours, in the order they came."""

    __slots__ = ("copies", "keys", "twins")

    def __init__(self) -> None:
        self.keys: dict[BlockHash, int] = {}
        self.copies: dict[BlockHash, int] = {}  # beyond the first
        self.twins: dict[int, int] = {}  # ours -> names of the engine's for it, beyond the first


@dataclass(slots=True)
class _Engine:
    """One engine: its bit in the masks, and what is known of it.

    `known`: we have all of its events since its cache was empty. `turned_over`: known blocks it dropped since there was
    a sign of one we do not know; once that is as many as it holds, what we do not know is gone. `behind`: it is saying
    again what we missed, and holds more than we have heard.
    """

    bit: int
    known: bool = False
    behind: bool = False
    block_tokens: int = 0
    group: int | None = None
    tells_salt: bool = True
    tells_adapter: bool = True
    turned_over: int = 0
    shelves: tuple[_Shelf, ...] = field(default_factory=lambda: tuple(_Shelf() for _ in _TIERS))

    def key_of(self, block: BlockHash) -> int | None:
        """Our name of a block it holds in any tier."""
        for shelf in self.shelves:
            key = shelf.keys.get(block)
            if key is not None:
                return key
        return None

    @property
    def blocks(self) -> int:
        """Different blocks that it holds, each tier for itself."""
        return sum(len(shelf.keys) for shelf in self.shelves)


class PreciseIndex:
    """The blocks of one pool's engines. `max_blocks`: kept per engine; `weights`: what a hit in each tier is worth."""

    def __init__(self, max_blocks: int, weights: Mapping[Tier, float] | None = None) -> None:
        self.max_blocks = max_blocks
        self.tally = Tally()
        self._weights = dict.fromkeys(_TIERS, _WHOLE_WEIGHT) | dict(weights or {})
        self._engines: dict[str, dict[int, _Engine]] = {}
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in _TIERS)
        self._free_bits: list[int] = []
        self._bits = 0

    # -- what engines report

    def apply(self, endpoint: str, rank: int, events: Iterable[Event]) -> None:
        """The engine `rank` behind `endpoint` reports these, in this order. One we do not keep is not heard."""
        engine = self._engines.get(endpoint, {}).get(rank)
        if engine is None:
            return
        for event in events:
            if isinstance(event, Stored):
                self._stored(engine, event)
            elif isinstance(event, Removed):
                self._removed(engine, event)
            else:
                self._clear(engine)
                engine.known = True

    def forget(self, endpoint: str, rank: int, *, empty: bool) -> None:
        """Drop what is known of an engine. `empty`: because it is; else because we lost track of it."""
        engine = self._engines.get(endpoint, {}).get(rank)
        if engine is not None:
            self._clear(engine)
            engine.known = empty

    def fall_behind(self, endpoint: str, rank: int, *, behind: bool) -> None:
        """Whether the engine has told more than we have heard yet: until then it may hold more."""
        engine = self._engines.get(endpoint, {}).get(rank)
        if engine is not None:
            engine.behind = behind

    def remove(self, endpoint: str) -> None:
        """The endpoint is gone, with all its engines."""
        for engine in self._engines.pop(endpoint, {}).values():
            self._clear(engine)
            self._free_bits.append(engine.bit)

    def keep_ranks(self, endpoint: str, ranks: Iterable[int]) -> None:
        """Exactly these engines are behind the endpoint; of those we have not heard, nothing is known.

        The only way in: what is still under way from an engine that has left must not bring it back, for nobody would
        remove it again.
        """
        engines, wanted = self._engines.setdefault(endpoint, {}), set(ranks)
        for rank in engines.keys() - wanted:
            gone = engines.pop(rank)
            self._clear(gone)
            self._free_bits.append(gone.bit)
        for rank in wanted - engines.keys():
            engines[rank] = _Engine(self._free_bit())

    def __len__(self) -> int:
        """Blocks kept, each engine and tier for itself."""
        return sum(engine.blocks for engines in self._engines.values() for engine in engines.values())

    def is_known(self, endpoint: str) -> bool:
        """Whether all that the endpoint holds is known."""
        engines = self._engines.get(endpoint)
        return engines is not None and _sees(engines, None, None)

    def _free_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._bits += 1
        return self._bits - 1

    def _stored(self, engine: _Engine, event: Stored) -> None:
        if not self._counts(engine, event):
            return
        key = self._root(engine) if event.parent is None else engine.key_of(event.parent)
        step = engine.block_tokens * TOKEN_BYTES
        for position, block in enumerate(event.hashes):
            own = engine.key_of(block)
            if own is None and key is not None and event.tokens:
                extra = event.extras[position] if event.extras else b""
                own = _hash(event.tokens[position * step : (position + 1) * step] + extra, key)
            key = own
            if own is None:
                self._orphan(engine)
            else:
                self._hold(engine, event.tier, block, own)
        self._shrink(engine, event.tier)

    def _counts(self, engine: _Engine, event: Stored) -> bool:
        """Whether the blocks say what can be reused, and are of the engine's size. Learns what the engine is like."""
        if not event.whole_prefix or not event.hashes:
            return False
        if event.tier is Tier.GPU and event.tokens:
            self._learn(engine, event)
        if event.group != (engine.group or 0):
            return False
        size = len(event.hashes) * engine.block_tokens * TOKEN_BYTES
        if event.tokens and (event.block_tokens != engine.block_tokens or len(event.tokens) != size):
            self.tally.odd += len(event.hashes)
            return False
        return True

    def _learn(self, engine: _Engine, event: Stored) -> None:
        """The first layers heard of stand for all. A smaller block is a part of one, which says nothing of the size."""
        engine.group = event.group if engine.group is None else engine.group
        engine.tells_salt = event.tells_salt
        engine.tells_adapter = engine.tells_adapter and event.tells_adapter
        if event.group == engine.group and event.block_tokens > engine.block_tokens:
            self._clear(engine)
            engine.known = engine.known and not engine.block_tokens
            engine.block_tokens = event.block_tokens

    def _orphan(self, engine: _Engine) -> None:
        self.tally.orphans += 1
        engine.known = False
        engine.turned_over = 0

    def _hold(self, engine: _Engine, tier: Tier, block: BlockHash, key: int) -> None:
        shelf, holders = engine.shelves[tier], self._holders[tier]
        if block in shelf.keys:
            shelf.copies[block] = shelf.copies.get(block, 0) + 1
            return
        shelf.keys[block] = key
        before = holders.get(key, 0)
        if before >> engine.bit & 1:
            shelf.twins[key] = shelf.twins.get(key, 0) + 1
        else:
            holders[key] = before | 1 << engine.bit

    def _removed(self, engine: _Engine, event: Removed) -> None:
        if event.group != (engine.group or 0):
            return
        shelf = engine.shelves[event.tier]
        for block in event.hashes:
            if block not in shelf.keys:
                engine.turned_over = 0
            elif block in shelf.copies:
                _count_down(shelf.copies, block)
            else:
                self._unhold(engine, event.tier, block)
                engine.turned_over += event.tier is Tier.GPU
        if not engine.known and 0 < len(engine.shelves[Tier.GPU].keys) <= engine.turned_over:
            engine.known = True

    def _unhold(self, engine: _Engine, tier: Tier, block: BlockHash) -> None:
        shelf, holders = engine.shelves[tier], self._holders[tier]
        key = shelf.keys.pop(block)
        if key in shelf.twins:
            _count_down(shelf.twins, key)
            return
        left = holders[key] & ~(1 << engine.bit)
        if left:
            holders[key] = left
        else:
            del holders[key]

    def _shrink(self, engine: _Engine, tier: Tier) -> None:
        """Keep to the bound, with some room to spare: the way to a dict's first entry leads past all removed ones."""
        excess, shelf = engine.blocks - self.max_blocks, engine.shelves[tier]
        if excess <= 0 or not shelf.keys:
            return
        for oldest in list(islice(shelf.keys, excess + len(shelf.keys) // _SPARE)):
            shelf.copies.pop(oldest, None)
            self._unhold(engine, tier, oldest)
            self.tally.evicted += 1
        engine.known = False
        engine.turned_over = 0

    def _clear(self, engine: _Engine) -> None:
        for tier, shelf in zip(_TIERS, engine.shelves, strict=True):
            for block in list(shelf.keys):
                self._unhold(engine, tier, block)
            shelf.copies.clear()
        engine.turned_over = 0

    # -- what a prompt finds

    def match(self, tokens: bytes, adapter: str | None, salt: str | None, endpoints: Iterable[str]) -> Match:
        """Tokens of the prompt that each endpoint can be expected to reuse.

        `tokens`: TOKEN_BYTES each. The last token is always computed, so the block it is in is never reused.
        """
        asked = {endpoint: self._engines.get(endpoint, {}) for endpoint in endpoints}
        sizes: dict[int, int] = {}
        for engines in asked.values():
            for engine in engines.values():
                sizes[engine.block_tokens] = sizes.get(engine.block_tokens, 0) | 1 << engine.bit
        found: dict[int, float] = {}
        for size, mask in sizes.items():
            if size:
                self._walk(tokens, size, mask, _extras(adapter, salt), found)
        return Match(
            {endpoint: _expected(engines, found) for endpoint, engines in asked.items()},
            tuple(endpoint for endpoint, engines in asked.items() if not _sees(engines, adapter, salt)),
        )

    def _walk(
        self, tokens: bytes, block_tokens: int, mask: int, extras: tuple[bytes, bytes], found: dict[int, float]
    ) -> None:
        """Add to `found` what each engine of the mask holds from the start on, without a gap."""
        gpu, *slower = self._holders
        key, step, (extra, later) = _seed(block_tokens), block_tokens * TOKEN_BYTES, extras
        reusable = (len(tokens) // TOKEN_BYTES - 1) // block_tokens
        depth = 0.0
        for position in range(reusable):
            key = _hash(tokens[position * step : (position + 1) * step] + extra, key)
            extra = later
            fast = gpu.get(key, 0)
            still = mask & (fast | slower[0].get(key, 0) | slower[1].get(key, 0))
            if still != mask:
                _settle(found, mask ^ still, depth)
                mask = still
                if not mask:
                    return
            depth += block_tokens
            if mask & ~fast:
                self._discount(found, mask & ~fast, key, block_tokens)
        _settle(found, mask, depth)

    def _discount(self, found: dict[int, float], mask: int, key: int, block_tokens: int) -> None:
        """A block from a slower tier is worth less than one that needs no copying."""
        for tier in (Tier.CPU, Tier.DISK):
            here = mask & self._holders[tier].get(key, 0)
            _settle(found, here, -block_tokens * (_WHOLE_WEIGHT - self._weights[tier]))
            mask ^= here

    @staticmethod
    def _root(engine: _Engine) -> int:
        return _seed(engine.block_tokens)


def _seed(block_tokens: int) -> int:
    """Chains of blocks of different sizes have nothing in common."""
    return _hash(block_tokens.to_bytes(TOKEN_BYTES, "little"))


def _extras(adapter: str | None, salt: str | None) -> tuple[bytes, bytes]:
    """What sets the first block of a prompt apart, and the later ones: the salt is in the first alone."""
    adapters = [adapter] if adapter else []
    return extra_of([*adapters, salt] if salt else adapters), extra_of(adapters)


def _settle(found: dict[int, float], mask: int, tokens: float) -> None:
    while mask:
        lowest = mask & -mask
        bit = lowest.bit_length() - 1
        found[bit] = found.get(bit, 0.0) + tokens
        mask ^= lowest


def _expected(engines: Mapping[int, _Engine], found: Mapping[int, float]) -> int:
    if not engines:
        return 0
    return int(sum(found.get(engine.bit, 0.0) for engine in engines.values()) / len(engines))


def _sees(engines: Mapping[int, _Engine], adapter: str | None, salt: str | None) -> bool:
    """Whether what the engines report tells all there is to know for such a prompt."""
    return bool(engines) and all(
        engine.known and not engine.behind and (engine.tells_salt or not salt) and (engine.tells_adapter or not adapter)
        for engine in engines.values()
    )


def _count_down(counts: dict[_Name, int], name: _Name) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
