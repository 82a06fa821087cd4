"""Which endpoint holds how much of a prompt's prefix, by our own book-keeping: a mirror of the engines' caches.

Per endpoint exactly what its KV cache can hold, in tokens: an index four times too large costs more than any scorer
gains (the engine has long evicted what the index still promises). As in the engine, blocks of prompts in flight are
*pinned*: they cannot be evicted. When the last request that uses a block ends it becomes *idle*, tail of the prompt
first, and the longest idle is evicted first. Answers take room there too; who books a request adds a block of its own
for what is in no block of the prompt (placement.py). Rejected: one LRU aged from the decision on. Near overload it
forgets prompts whose requests still run and keeps others the engine has dropped; by simulation the mirror saves 12 %
of latency end to end at 105 % load, and beats even exact events from the engine, which do not tell of blocks that are
under way.

Beside the shelves one map hash -> bitmask of slots, so that a walk costs one look-up per block however many endpoints
there are. Rejected: a radix tree (hashed blocks need none), sets per endpoint (78 us at 256 endpoints where the masks
take 25), and one shared LRU (a busy endpoint would push a quiet one's entries out).

Only contiguous prefixes count, since that is all an engine can reuse. And a block's hash is of all before it too, so
who uses a block uses all those before it: along a prompt come blocks in use, then idle ones, then those that are not
there. A prompt of half a megabyte has 164 of them, so a block costs one look-up where it is pinned, none where it is
released, and two where it comes or goes. Rejected: tokens, users and an OrderedDict of the idle ones, each by hash: two
to four times the time, a quarter of all that such a request took; and the dictionaries' own loops (map, zip, update)
over a run.

A request's blocks are booked when it is sent, long before the engine has them. *Computed* they are once a request that
used them is over; until then they are gone if those that use them fail, and what failed leaves what others brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Final, TypeAlias

import numpy as np
from mypy_extensions import mypyc_attr

from policies.types import Floats, ListedSlots, Slots, highest, one_by_one

_Block: TypeAlias = Any
"""A block's hash: an int of 64 bits. So named it is never unpacked by compiled code, only to be packed again."""


@mypyc_attr(acyclic=True)  # there are hundreds of thousands, and the collector need not walk them
class _Held:
    """One block on one shelf. `users`: requests in flight that use it; below 0 once it is gone.

    While there are none it is idle, `since_s`. `queued`: how often it stands in the shelf's queue; the last counts.
    `computed_by`: which release was the last of a request that used it; 0 while there was none.
    """

    def __init__(self, block: _Block, tokens: int, users: int) -> None:
        self.block: _Block = block
        self.tokens = tokens
        self.users = users
        self.queued = 0
        self.since_s = 0.0
        self.computed_by = 0


_NOBODY: Final = _Held(0, 0, -1)
"""In the place of what has left a queue."""
_MOST_OVER: Final = 500
"""Requests that are over and whose blocks are remembered, should a failure be told of: those of a twentieth of a second
at 10,000 a second, where logs are 10 ms apart. Of prompts of half a megabyte that is 11 MB, if all blocks are evicted.
"""
_MOST_LEFT: Final = 256
"""A queue is tidied when it is so much longer than twice the blocks there are."""


class _Shelf:
    """One endpoint's blocks. `stay` counts how often it was emptied: what was pinned before is not released after.

    The queue has the idle ones, the longest first, from `first` on. What is used again stays in it and counts no more,
    since to look for it would take longer than to pass over it.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.blocks: dict[_Block, _Held] = {}
        self.queue: list[_Held] = []
        self.first = 0
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0
        self.stay = 0

    def oldest(self) -> _Held | None:
        """The longest idle one, which then stands first in the queue."""
        queue, first = self.queue, self.first
        while first < len(queue):
            held = queue[first]
            if held.queued == 1 and not held.users:
                self.first = first
                return held
            queue[first] = _NOBODY
            held.queued -= 1
            first += 1
        self.first = first
        return None

    def tidy(self) -> None:
        """Leave none in the queue but those that count."""
        waiting: list[_Held] = []
        for held in self.queue[self.first :]:
            held.queued -= 1
            if not held.queued and not held.users:
                waiting.append(held)
        for held in waiting:
            held.queued = 1
        self.queue, self.first = waiting, 0


class Pinned:
    """Blocks that one request in flight uses on one shelf, in that `stay`: it is released with this.

    The first `in_use` of them others were using as well. `release` is the number of its own, 0 while it is in flight;
    the first `computed` were computed without it, as was seen then.
    """

    def __init__(self, slot: int, stay: int) -> None:
        self.slot = slot
        self.stay = stay
        self.in_use = 0
        self.computed = 0
        self.release = 0
        self.blocks: list[_Held] = []


class Room:
    """Of one endpoint the tokens that fit before something is evicted; since when what would be is idle, else endless.

    Written by the PrefixIndex alone; but `matched_tokens` is paper to write on, for who reads it at once and leaves 0.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.oldest_at_s = inf
        self.matched_tokens = 0.0


class Matched:
    """What each of some slots holds of a prompt, in tokens. Never changed.

    Every decision keeps one, so it is small: `depths` has slots, as bits, and what they hold, the most last. Or
    `listed` has it in the slots' order, where that is how it was found.
    """

    def __init__(self, slots: ListedSlots, depths: list[tuple[int, float]], listed: list[float] | None = None) -> None:
        self._slots = slots
        self._depths = depths
        self._listed = listed
        self.most: float = highest(listed) if listed is not None else depths[-1][1] if depths else 0.0

    def __iter__(self) -> Iterator[float]:
        return iter(self.array().tolist())

    def at(self, position: int) -> float:
        """What the slot at this position holds."""
        if self._listed is not None:
            return self._listed[position]
        slot = self._slots.listed[position]
        for holders, tokens in self._depths:
            if holders >> slot & 1:
                return tokens
        return 0.0

    def array(self) -> Floats:
        """What each holds, shape (n,)."""
        if self._listed is not None:
            return np.array(self._listed)
        listed = self._slots.listed
        matched = np.zeros(listed[-1] + 1)
        for holders, tokens in self._depths:
            _credit(matched, holders, tokens)
        return matched if len(matched) == len(listed) else matched[listed]

    def put_down(self, rooms: list[Room]) -> None:
        """Write it on the paper of those that hold any."""
        if self._listed is not None:
            for position, slot in enumerate(self._slots.listed):
                rooms[slot].matched_tokens = self._listed[position]
        for holders, tokens in self._depths:
            _credit_rooms(rooms, holders, tokens)


class PrefixIndex:
    """Prefix blocks per endpoint slot. `default_capacity_tokens` applies until `set_capacity` is told better."""

    def __init__(self, default_capacity_tokens: int) -> None:
        self.default_capacity_tokens = default_capacity_tokens
        self._shelves: dict[int, _Shelf] = {}
        self._holders: dict[_Block, int] = {}
        self._rooms: list[Room] = []  # by slot, and the same in arrays
        self._room_tokens: Floats = np.empty(0)
        self._oldest_at_s: Floats = np.empty(0)
        self._stirred: set[int] = set()  # whose oldest may be another by now
        self._releases = 0
        self._over: deque[Pinned] = deque()
        self._reach(15)

    def match(self, hashes: Sequence[int], tokens: Sequence[int], slots: Slots) -> Floats:
        """Contiguous tokens that each of `slots`, which rise, holds of the prompt, shape (n,)."""
        size = slots.item(-1) + 1 if len(slots) else 0
        matched = np.zeros(size)
        for holders, depth_tokens in self._depths(hashes, tokens):
            _credit(matched, holders, depth_tokens)
        return matched if size == len(slots) else matched[slots]

    def match_listed(self, hashes: Sequence[int], tokens: Sequence[int], slots: ListedSlots) -> Matched:
        """The same of listed slots."""
        depths: list[tuple[int, float]] = []
        for holders, depth_tokens in self._depths(hashes, tokens):
            there = holders & slots.bits
            if there:
                depths.append((there, float(depth_tokens)))
        return Matched(slots, depths)

    def _depths(self, hashes: Sequence[_Block], tokens: Sequence[int]) -> list[tuple[int, int]]:
        """How far down a prompt its blocks are held: slots, as bits, and the tokens that these and no others hold."""
        depths: list[tuple[int, int]] = []
        holders = -1
        holders_of = self._holders
        for depth, block in enumerate(hashes):
            still = holders & holders_of.get(block, 0)
            if still != holders:
                if depth:  # tokens are added up here only: holders change once or twice, of hundreds of blocks
                    depths.append((holders ^ still, sum(tokens[:depth])))
                holders = still
                if not still:
                    break
        if holders > 0:
            depths.append((holders, sum(tokens)))
        return depths

    def holders(self, block: int) -> int:
        """The slots that hold this block, as bits."""
        return self._holders.get(block, 0)

    def in_use_tokens(self, hashes: Sequence[int], tokens: Sequence[int], slots: Slots) -> Floats:
        """Contiguous tokens of the prompt that requests in flight use on each of `slots`, shape (n,)."""
        found = np.zeros(len(slots))
        for position, slot in enumerate(slots.tolist()):
            shelf = self._shelves.get(slot)
            if shelf is not None:
                found[position] = sum(tokens[: _in_use(shelf, hashes)])
        return found

    def pin(self, slot: int, hashes: Sequence[int], tokens: Sequence[int], rested: list[float] | None = None) -> Pinned:
        """A request with this prompt goes to `slot`. Of the blocks that rested there, `rested` is told since when."""
        if len(hashes) != len(tokens):
            raise ValueError("as many tokens as hashes, one of each per block")
        shelf = self._shelf(slot)
        pinned = Pinned(slot, shelf.stay)
        held_of, used = shelf.blocks, pinned.blocks
        blocks: Sequence[_Block] = hashes
        for block in blocks:
            held = held_of.get(block)
            if held is None:
                break
            if held.users:
                pinned.in_use += 1
            elif rested is not None:
                rested.append(held.since_s)
            held.users += 1
            used.append(held)
        there = len(used)
        if there < len(blocks):
            self._bring(slot, shelf, blocks[there:], tokens[there:], used)
        if shelf.held_tokens > shelf.capacity_tokens:
            self._evict(slot, shelf)
        self._note(slot, shelf)
        return pinned

    def _bring(
        self, slot: int, shelf: _Shelf, hashes: Sequence[_Block], tokens: Sequence[int], used: list[_Held]
    ) -> None:
        """Pin these blocks, which are not there, but for one that has another's hash."""
        held_of, holders, bit, brought = shelf.blocks, self._holders, 1 << slot, 0
        for block, block_tokens in zip(hashes, tokens):  # noqa: B905 - as many, and strict zip is slow when compiled
            held = held_of.get(block)
            if held is not None:
                held.users += 1
                used.append(held)
                continue
            brings = held_of[block] = _Held(block, block_tokens, 1)
            used.append(brings)
            brought += block_tokens
            holders[block] = holders.get(block, 0) | bit
        shelf.held_tokens += brought

    def release(self, pinned: Pinned, now_s: float) -> None:
        """The request is over: what no other uses is idle from now on, the tail of the prompt longest.

        Once only; what it used is remembered for a while, for a failure that is told of later.
        """
        shelf = self._shelves.get(pinned.slot)
        if shelf is None or shelf.stay != pinned.stay or pinned.release:
            return
        self._releases += 1
        pinned.release = release = self._releases
        queue, blocks, computed = shelf.queue, pinned.blocks, 0
        for position in range(len(blocks) - 1, -1, -1):
            held = blocks[position]
            if held.computed_by:
                computed += 1
            held.computed_by = release
            held.users -= 1
            if not held.users:
                held.since_s = now_s
                held.queued += 1
                queue.append(held)
        pinned.computed = computed
        self._over.append(pinned)
        if len(self._over) > _MOST_OVER:
            self._over.popleft().blocks = []
        if shelf.held_tokens > shelf.capacity_tokens:
            self._evict(pinned.slot, shelf)
        if len(queue) > 2 * len(shelf.blocks) + _MOST_LEFT:
            shelf.tidy()
        self._note(pinned.slot, shelf)

    def discard(self, pinned: Pinned) -> None:
        """The endpoint did not get what it lacked of the prompt: gone, unless another request uses or computed it.

        Nor did it get what it was only about to get with other requests: if they fail too, nobody brought it. Before
        or after the release; the rest is still to be released.
        """
        shelf = self._shelves.get(pinned.slot)
        if shelf is None or shelf.stay != pinned.stay:
            return
        kept = pinned.blocks[: pinned.computed]
        for held in pinned.blocks[pinned.computed :]:
            if pinned.release:
                self._take_back(held, pinned, shelf)
            elif held.computed_by:
                kept.append(held)
            else:
                held.users -= 1
                if not held.users:
                    self._remove(held, pinned.slot, shelf)
        pinned.blocks, pinned.computed = kept, len(kept)
        self._note(pinned.slot, shelf)

    def _take_back(self, held: _Held, pinned: Pinned, shelf: _Shelf) -> None:
        """Of a request that is over: nobody else's that is over used it after that, and whoever still does may fail."""
        if held.computed_by == pinned.release:
            held.computed_by = 0
            if not held.users:
                self._remove(held, pinned.slot, shelf)

    def let_go(self, pinned: Pinned) -> None:
        """No failure will be told of that. Blocks in memory that are of no use are cold places for the next ones."""
        pinned.blocks = []

    def _remove(self, held: _Held, slot: int, shelf: _Shelf) -> None:
        held.users = -1
        del shelf.blocks[held.block]
        shelf.held_tokens -= held.tokens
        self._unhold(held.block, slot)

    def insert(self, slot: int, hashes: Sequence[int], tokens: Sequence[int], now_s: float) -> None:
        """A request with this prompt was served and is over."""
        self.release(self.pin(slot, hashes, tokens), now_s)

    def set_capacity(self, slot: int, capacity_tokens: int) -> None:
        """Use the KV capacity the engine reports, in tokens; shrinking evicts at once."""
        shelf = self._shelf(slot)
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
            shelf.queue, shelf.first = [], 0
            shelf.held_tokens = 0
            shelf.stay += 1
            self._note(slot, shelf)

    def held_tokens(self, slot: int) -> int:
        """Tokens the index believes `slot` holds: at most its capacity, or what is pinned if that is more."""
        shelf = self._shelves.get(slot)
        return shelf.held_tokens if shelf else 0

    def room_tokens(self, slots: Slots) -> Floats:
        """Tokens that fit before something is evicted, shape (n,)."""
        self._reach(slots.item(-1))
        room: Floats = self._room_tokens.take(slots)
        return room

    def rooms(self, slot: int) -> list[Room]:
        """Both by slot, at least up to this one; but since when the oldest is idle only once it is settled."""
        self._reach(slot)
        return self._rooms

    def oldest_at_s(self, slots: Slots) -> Floats:
        """Since when the next block to be evicted is idle, shape (n,); endless where none is."""
        self._reach(slots.item(-1))
        self.settle()
        since_s: Floats = self._oldest_at_s.take(slots)
        return since_s

    def resting_since(self, slot: int, depths_tokens: Sequence[float]) -> list[float]:
        """Since when the block rests that has so many tokens before it, most recently used first.

        `depths_tokens` ascending. Endless where a block in use lies so deep, for ever (minus that) where none does.
        """
        shelf = self._shelf(slot)
        since = [-np.inf] * len(depths_tokens)
        at, left = len(depths_tokens) - 1, shelf.held_tokens
        shelf.tidy()
        for held in shelf.queue:
            while at >= 0 and depths_tokens[at] >= left - held.tokens:
                if depths_tokens[at] < left:
                    since[at] = held.since_s
                at -= 1
            left -= held.tokens
        return [np.inf if depth < left else known for depth, known in zip(depths_tokens, since, strict=True)]

    def __len__(self) -> int:
        return len(self._holders)

    def settle(self) -> None:
        """Find the oldest again where it may be another."""
        for slot in self._stirred:
            oldest = self._shelves[slot].oldest()
            oldest_at_s = inf if oldest is None else oldest.since_s
            self._rooms[slot].oldest_at_s = self._oldest_by_slot[slot] = oldest_at_s
        self._stirred.clear()

    def _reach(self, slot: int) -> None:
        missing = slot + 1 - len(self._rooms)
        if missing > 0:
            self._rooms += [Room(float(self.default_capacity_tokens)) for _ in range(missing + 16)]
            self._room_tokens = np.array([room.tokens for room in self._rooms])
            self._oldest_at_s = np.array([room.oldest_at_s for room in self._rooms])
            self._room_by_slot: Any = one_by_one(self._room_tokens)
            self._oldest_by_slot: Any = one_by_one(self._oldest_at_s)

    def _note(self, slot: int, shelf: _Shelf) -> None:
        room = float(shelf.capacity_tokens - shelf.held_tokens)
        self._rooms[slot].tokens = self._room_by_slot[slot] = room
        self._stirred.add(slot)

    def _shelf(self, slot: int) -> _Shelf:
        shelf = self._shelves.get(slot)
        if shelf is None:
            shelf = self._shelves[slot] = _Shelf(self.default_capacity_tokens)
            self._reach(slot)
        return shelf

    def _evict(self, slot: int, shelf: _Shelf) -> None:
        held_of, holders, others = shelf.blocks, self._holders, ~(1 << slot)
        capacity, held_tokens = shelf.capacity_tokens, shelf.held_tokens
        while held_tokens > capacity:
            oldest = shelf.oldest()
            if oldest is None:
                break
            block = oldest.block
            oldest.users = -1  # so that its place counts no more
            held_tokens -= oldest.tokens
            del held_of[block]
            left = holders.pop(block) & others  # as _unhold, which a call a block would double the time of
            if left:
                holders[block] = left
        shelf.held_tokens = held_tokens

    def _unhold(self, block: _Block, slot: int) -> None:
        left = self._holders[block] & ~(1 << slot)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _in_use(shelf: _Shelf, hashes: Sequence[int]) -> int:
    """How many blocks of a prompt, from its start, requests in flight use."""
    for depth, block in enumerate(hashes):
        held = shelf.blocks.get(block)
        if held is None or not held.users:
            return depth
    return len(hashes)


_FEW_HOLDERS: Final = 16
"""Up to so many a loop over set bits is faster than unpacking them all."""


def _credit(matched: Floats, holders: int, tokens: float) -> None:
    """Write `tokens` for every slot whose bit is set and that the caller asked about."""
    holders &= (1 << len(matched)) - 1
    if holders.bit_count() > _FEW_HOLDERS:
        octets = np.frombuffer(holders.to_bytes(-(-len(matched) // 8), "little"), np.uint8)
        matched[np.unpackbits(octets, count=len(matched), bitorder="little").view(np.bool_)] = tokens
        return
    while holders:
        lowest = holders & -holders
        matched[lowest.bit_length() - 1] = tokens
        holders ^= lowest


def _credit_rooms(rooms: list[Room], holders: int, tokens: float) -> None:
    """The same on the paper of their Rooms."""
    if holders.bit_count() <= _FEW_HOLDERS:
        while holders:
            lowest = holders & -holders
            rooms[lowest.bit_length() - 1].matched_tokens = tokens
            holders ^= lowest
        return
    first = 0
    for octet in holders.to_bytes(-(-holders.bit_length() // 8), "little"):
        if octet == _ALL:
            for slot in range(first, first + 8):
                rooms[slot].matched_tokens = tokens
        elif octet:
            for bit in range(8):
                if octet >> bit & 1:
                    rooms[first + bit].matched_tokens = tokens
        first += 8


_ALL: Final = 255
"""An octet of slots that all hold it."""
