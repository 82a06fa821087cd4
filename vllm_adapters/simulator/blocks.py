"""The paged KV cache of one engine: blocks shared between sequences, least recently used ones evicted first.

A block is known by the hash of the text up to its end, so equal hashes mean equal content. Three kinds share the
capacity: *private* blocks (taken by a sequence, content not complete yet), *held* ones (complete, used by at least
one sequence) and *idle* ones (complete, used by nobody: a hit if asked for again, evicted when room is needed).
Not modelled: tiers of memory below the GPU's, and duplicates (two sequences that computed the same block at the
same time are given one).
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
        holders, idle = self._holders, self._idle
        for position in range(limit):
            block = hashes[position]
            if block not in holders and block not in idle:
                return position
        return limit

    def acquire(self, hashes: Sequence[int], private: int) -> bool:
        """Hold all of `hashes`, which must be here, and take `private` new blocks. All or nothing: False if no room."""
        revived = sum(block in self._idle for block in hashes)
        if self.free + len(self._idle) - revived < private:
            return False
        for block in hashes:
            self._hold(block)
        self._evict(private - self.free)
        self.private += private
        return True

    def complete(self, block: int) -> None:
        """Turn one private block into the shared block of this hash: from now on others can hit it."""
        self.private -= 1
        self._hold(block)

    def release(self, hashes: Sequence[int], private: int) -> None:
        """Give back one hold on each of `hashes` and `private` blocks. The last of `hashes` will be evicted first."""
        self.private -= private
        for block in reversed(hashes):
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
            self._idle.popitem(last=False)
