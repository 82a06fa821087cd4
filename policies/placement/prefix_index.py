"""Which endpoint holds how much of a prompt's prefix, by our own book-keeping.

Per endpoint an exact LRU over block hashes, measured in tokens and bounded by the engine's own KV capacity: an index
four times too large costs more than any scorer gains (the engine has long evicted what the index still promises).
Beside it one map hash -> bitmask of slots, so that a walk costs one look-up per block however many endpoints there
are. Rejected: a radix tree (hashed blocks need none), sets per endpoint (78 us at 256 endpoints where the masks take
25), and one shared LRU (a busy endpoint would push a quiet one's entries out).

Only contiguous prefixes count, since that is all an engine can reuse. Blocks are touched tail first, so the tails of
long prompts are evicted before the heads that several prompts share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from policies.types import Floats, Slots


class _Shelf:
    """One endpoint's blocks, least recently used first: hash -> (tokens, touched_at_s)."""

    __slots__ = ("blocks", "capacity_tokens", "held_tokens")

    def __init__(self, capacity_tokens: int) -> None:
        self.blocks: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0


class PrefixIndex:
    """Prefix blocks per endpoint slot. `default_capacity_tokens` applies until `set_capacity` is told better."""

    def __init__(self, default_capacity_tokens: int) -> None:
        self.default_capacity_tokens = default_capacity_tokens
        self._shelves: dict[int, _Shelf] = {}
        self._holders: dict[int, int] = {}
        # the shelves' figures as arrays by slot, for policies that weigh them over many endpoints at once
        self._room_tokens = np.full(16, float(default_capacity_tokens))
        self._oldest_at_s = np.full(16, np.inf)

    def match(self, hashes: Sequence[int], tokens: Sequence[int], slots: Slots) -> Floats:
        """Contiguous tokens that each of `slots` holds of the prompt, shape (n,)."""
        size = int(slots.max()) + 1 if len(slots) else 0
        matched = np.zeros(size)
        depth_tokens = 0
        holders = -1
        holders_of = self._holders.get
        for block, block_tokens in zip(hashes, tokens, strict=True):
            still = holders & holders_of(block, 0)
            if still != holders:
                if depth_tokens:
                    _credit(matched, holders ^ still, depth_tokens)
                holders = still
                if not still:
                    break
            depth_tokens += block_tokens
        if holders > 0:
            _credit(matched, holders, depth_tokens)
        return matched[slots]

    def insert(self, slot: int, hashes: Sequence[int], tokens: Sequence[int], now_s: float) -> None:
        """Note that `slot` will hold this prompt, and evict what no longer fits."""
        shelf = self._shelf(slot)
        blocks = shelf.blocks
        bit = 1 << slot
        holders = self._holders
        for position in range(len(hashes) - 1, -1, -1):
            block = hashes[position]
            if block in blocks:
                blocks.move_to_end(block)
                blocks[block] = (blocks[block][0], now_s)
            else:
                blocks[block] = (tokens[position], now_s)
                shelf.held_tokens += tokens[position]
                holders[block] = holders.get(block, 0) | bit
        self._evict(slot, shelf)
        self._note(slot, shelf)

    def discard(self, slot: int, hashes: Sequence[int]) -> None:
        """Take back blocks that `slot` was believed to get and did not."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            return
        for block in hashes:
            held = shelf.blocks.pop(block, None)
            if held is not None:
                shelf.held_tokens -= held[0]
                self._unhold(block, slot)
        self._note(slot, shelf)

    def set_capacity(self, slot: int, capacity_tokens: int) -> None:
        """Use the KV capacity the engine reports, in tokens; shrinking evicts at once."""
        shelf = self._shelf(slot)
        if shelf.capacity_tokens != capacity_tokens:
            shelf.capacity_tokens = capacity_tokens
            self._evict(slot, shelf)
        self._note(slot, shelf)

    def forget(self, slot: int) -> None:
        """Drop everything `slot` was believed to hold: it restarted, or is gone."""
        shelf = self._shelves.get(slot)
        if shelf is not None:
            for block in shelf.blocks:
                self._unhold(block, slot)
            shelf.blocks.clear()
            shelf.held_tokens = 0
            self._note(slot, shelf)

    def held_tokens(self, slot: int) -> int:
        """Tokens the index believes `slot` holds; never more than its capacity."""
        shelf = self._shelves.get(slot)
        return shelf.held_tokens if shelf else 0

    def room_tokens(self, slots: Slots) -> Floats:
        """Tokens that fit before something is evicted, shape (n,)."""
        self._reach(int(slots[-1]))
        return self._room_tokens[slots]

    def oldest_at_s(self, slots: Slots) -> Floats:
        """When the next block to be evicted was last touched, shape (n,); endless for an empty shelf."""
        self._reach(int(slots[-1]))
        return self._oldest_at_s[slots]

    def __len__(self) -> int:
        return len(self._holders)

    def _reach(self, slot: int) -> None:
        missing = slot + 1 - len(self._room_tokens)
        if missing > 0:
            room = np.full(missing + 16, float(self.default_capacity_tokens))
            self._room_tokens = np.concatenate((self._room_tokens, room))
            self._oldest_at_s = np.concatenate((self._oldest_at_s, np.full(missing + 16, np.inf)))

    def _note(self, slot: int, shelf: _Shelf) -> None:
        self._reach(slot)
        self._room_tokens[slot] = shelf.capacity_tokens - shelf.held_tokens
        blocks = shelf.blocks
        self._oldest_at_s[slot] = next(iter(blocks.values()))[1] if blocks else np.inf

    def _shelf(self, slot: int) -> _Shelf:
        shelf = self._shelves.get(slot)
        if shelf is None:
            shelf = self._shelves[slot] = _Shelf(self.default_capacity_tokens)
        return shelf

    def _evict(self, slot: int, shelf: _Shelf) -> None:
        while shelf.held_tokens > shelf.capacity_tokens:
            block, (tokens, _) = shelf.blocks.popitem(last=False)
            shelf.held_tokens -= tokens
            self._unhold(block, slot)

    def _unhold(self, block: int, slot: int) -> None:
        left = self._holders[block] & ~(1 << slot)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _credit(matched: Floats, holders: int, tokens: int) -> None:
    """Write `tokens` for every slot whose bit is set and that the caller asked about."""
    holders &= (1 << len(matched)) - 1
    while holders:
        lowest = holders & -holders
        matched[lowest.bit_length() - 1] = tokens
        holders ^= lowest
