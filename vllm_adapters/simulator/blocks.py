"""The paged KV cache of one engine: blocks shared between sequences, least recently used ones evicted first.

A block is known by the hash of the text up to its end, so equal hashes mean equal content. Three kinds share the
capacity: *private* blocks (taken by a sequence, content not complete yet), *held* ones (complete, used by at least
one sequence) and *idle* ones (complete, used by nobody: a hit if asked for again, evicted when room is needed).
A block that was computed although it is here already is kept as a copy, as vLLM keeps it; copies have negative names,
hashes are not negative. Not modelled: tiers of memory below the GPU's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Counts and content of the blocks; `capacity` in blocks. It trusts its callers to give back what they took."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._copies: dict[int, list[int]] = {}  # by hash, oldest first
        self._copied: dict[int, int] = {}  # copy -> its hash
        self._last_copy = 0

    @property
    def used(self) -> int:
        """Blocks that sequences hold, complete or not."""
        return self.private + len(self._holders)

    @property
    def free(self) -> int:
        """Blocks with no content worth keeping."""
        return self.capacity - self.used - len(self._idle)

    @property
    def idle(self) -> int:
        """Complete blocks nobody uses now."""
        return len(self._idle)

    def holds(self, hashes: Sequence[int], limit: int | None = None) -> int:
        """How many blocks from the start of `hashes` (of its first `limit`) are here without a gap."""
        limit = len(hashes) if limit is None else min(limit, len(hashes))
        holders, idle, copies = self._holders, self._idle, self._copies
        for position in range(limit):
            block = hashes[position]
            if block not in holders and block not in idle and block not in copies:
                return position
        return limit

    def found(self, hashes: Sequence[int], count: int) -> list[int]:
        """The blocks to hold for the first `count` of `hashes`, which must be here: themselves, or their copies."""
        blocks = list(hashes[:count])
        if not self._copies:
            return blocks
        return [block if self._has(block) else self._copies[block][0] for block in blocks]

    def _has(self, block: int) -> bool:
        return block in self._holders or block in self._idle

    def acquire(self, blocks: Sequence[int], private: int, spare: int = 0) -> bool:
        """Hold all of `blocks`, which must be here, and take `private` new ones. All or nothing: False if no room.

        `spare`: so many more must be there to be taken later.
        """
        revived = sum(block in self._idle for block in blocks)
        if self.capacity - self.used - revived < private + spare:
            return False
        for block in blocks:
            self._hold(block)
        self._evict(private - self.free)
        self.private += private
        return True

    def complete(self, block: int) -> int:
        """Turn a private block into one of this hash that others can hit; what its holder has to call it."""
        self.private -= 1
        if self._has(block) or block in self._copies:
            self._last_copy -= 1
            self._copies.setdefault(block, []).append(self._last_copy)
            self._copied[self._last_copy] = block
            block = self._last_copy
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[int], private: int) -> None:
        """Give back one hold on each of `blocks` and `private` ones. The last of `blocks` will be evicted first."""
        self.private -= private
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
            else:
                del self._holders[block]
                self._idle[block] = None

    def _hold(self, block: int) -> None:
        holders = self._holders.get(block, 0)
        if not holders:
            self._idle.pop(block, None)
        self._holders[block] = holders + 1

    def _evict(self, blocks: int) -> None:
        for _ in range(blocks):
            block, _ = self._idle.popitem(last=False)
            if block in self._copied:
                self._forget_copy(block)

    def _forget_copy(self, copy: int) -> None:
        block = self._copied.pop(copy)
        self._copies[block].remove(copy)
        if not self._copies[block]:
            del self._copies[block]
