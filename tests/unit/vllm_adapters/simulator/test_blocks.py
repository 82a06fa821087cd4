from __future__ import annotations

from vllm_adapters.simulator.blocks import BlockCache


def filled(cache: BlockCache, hashes: list[int]) -> None:
    """Compute `hashes` as one sequence would, and let go of them."""
    hit = cache.holds(hashes)
    assert cache.acquire(hashes[:hit], len(hashes) - hit)
    for block in hashes[hit:]:
        cache.complete(block)
    cache.release(hashes, 0)


def test_a_released_chain_stays_cached_and_counts_as_unused() -> None:
    """Blocks nobody holds are still hits, but take no part in the usage."""
    cache = BlockCache(8)
    filled(cache, [1, 2, 3])
    assert (cache.holds([1, 2, 3, 4]), cache.used, cache.idle, cache.free) == (3, 0, 3, 5)


def test_the_tail_of_the_oldest_chain_goes_first() -> None:
    """Eviction takes the least recently used chain, its last block first, so that what remains is a usable prefix."""
    cache = BlockCache(6)
    filled(cache, [1, 2, 3])
    filled(cache, [10, 11, 12])
    assert cache.acquire((), 2)
    assert (cache.holds([1, 2, 3]), cache.holds([10, 11, 12])) == (1, 3)


def test_a_hit_makes_a_chain_young_again() -> None:
    """Using a chain protects it: the other one is evicted."""
    cache = BlockCache(6)
    filled(cache, [1, 2, 3])
    filled(cache, [10, 11, 12])
    filled(cache, [1, 2, 3])
    assert cache.acquire((), 3)
    assert (cache.holds([1, 2, 3]), cache.holds([10, 11, 12])) == (3, 0)


def test_held_blocks_are_never_evicted() -> None:
    """An acquisition that would need a held block takes nothing at all."""
    cache = BlockCache(4)
    filled(cache, [1, 2, 3])
    assert cache.acquire([1, 2, 3], 1)
    assert not cache.acquire((), 1)
    assert (cache.holds([1, 2, 3]), cache.used) == (3, 4)


def test_room_is_not_counted_twice_for_blocks_about_to_be_revived() -> None:
    """The idle blocks a request hits are not room for its new ones."""
    cache = BlockCache(4)
    filled(cache, [1, 2, 3])
    assert not cache.acquire([1, 2, 3], 2)
    assert (cache.used, cache.idle) == (0, 3)


def test_two_holders_of_one_block_share_it() -> None:
    """A block that two sequences use is there once, and stays until both have let go."""
    cache = BlockCache(4)
    filled(cache, [7])
    assert cache.acquire([7], 0)
    assert cache.acquire([7], 0)
    cache.release([7], 0)
    assert (cache.used, cache.idle) == (1, 0)
    cache.release([7], 0)
    assert (cache.used, cache.idle) == (0, 1)


def test_a_block_computed_twice_is_there_twice() -> None:
    """As in vLLM, which keeps the copy; when the first one is evicted the copy is the hit."""
    cache = BlockCache(4)
    assert cache.acquire((), 2)
    first, copy = cache.complete(7), cache.complete(7)
    assert (cache.used, cache.holds([7]), cache.found([7], 1)) == (2, 1, [first])
    cache.release([first], 0)
    assert cache.acquire((), 3)
    assert (cache.holds([7]), cache.found([7], 1)) == (1, [copy])
    cache.release([copy], 3)
    assert cache.acquire((), 4)
    assert (cache.holds([7]), cache._copies, cache._copied) == (0, {}, {})


def test_room_can_be_asked_for_that_is_not_taken_yet() -> None:
    """What a sequence will need later must be there when it is let in."""
    cache = BlockCache(4)
    assert not cache.acquire((), 2, spare=3)
    assert cache.acquire((), 2, spare=2)
    assert cache.used == 2


def test_holds_stops_at_the_first_gap() -> None:
    """Only a contiguous match from the start counts."""
    cache = BlockCache(4)
    filled(cache, [1])
    filled(cache, [3])
    assert cache.holds([1, 2, 3]) == 1
    assert cache.holds([1, 2, 3], limit=0) == 0
