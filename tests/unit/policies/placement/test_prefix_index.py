"""PrefixIndex: contiguous matches, exact capacity, tails evicted first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.placement.prefix_index import PrefixIndex


def _slots(*slots: int) -> np.ndarray:
    return np.array(slots, np.intp)


def test_an_endpoint_is_credited_for_the_contiguous_prefix_it_holds() -> None:
    """Slot 0 holds three blocks of the prompt, slot 1 the first only, slot 2 none."""
    index = PrefixIndex(10_000)
    index.insert(0, [1, 2, 3], [64, 64, 64], 0.0)
    index.insert(1, [1, 9], [64, 64], 0.0)
    matched = index.match([1, 2, 3, 4], [64, 64, 64, 64], _slots(0, 1, 2))
    assert matched.tolist() == [192, 64, 0]


def test_a_hole_ends_the_match() -> None:
    """Blocks behind a missing one are of no use to an engine."""
    index = PrefixIndex(10_000)
    index.insert(0, [1], [64], 0.0)
    index.insert(0, [3], [64], 0.0)
    assert index.match([1, 2, 3], [64, 64, 64], _slots(0)).tolist() == [64]


def test_the_tail_of_the_oldest_prompt_goes_first() -> None:
    """Room for three blocks: a second prompt of one block pushes out the first prompt's last."""
    index = PrefixIndex(3 * 64)
    index.insert(0, [1, 2, 3], [64] * 3, 0.0)
    index.insert(0, [7], [64], 1.0)
    assert index.match([1, 2, 3], [64] * 3, _slots(0)).tolist() == [128]
    assert index.match([7], [64], _slots(0)).tolist() == [64]


def test_touching_a_prompt_saves_it_from_eviction() -> None:
    """The prompt used again outlives the one that was not."""
    index = PrefixIndex(2 * 64)
    index.insert(0, [1], [64], 0.0)
    index.insert(0, [2], [64], 1.0)
    index.insert(0, [1], [64], 2.0)
    index.insert(0, [3], [64], 3.0)
    assert index.match([1], [64], _slots(0)).tolist() == [64]
    assert index.match([2], [64], _slots(0)).tolist() == [0]


def test_a_smaller_capacity_evicts_at_once() -> None:
    """The engine's own figure, once known, cuts what was believed before."""
    index = PrefixIndex(1_000)
    index.insert(4, [1, 2, 3], [100] * 3, 0.0)
    index.set_capacity(4, 200)
    assert index.held_tokens(4) == 200


def test_forgetting_one_endpoint_leaves_the_others_and_its_capacity() -> None:
    """A restarted engine loses its credit, not its size."""
    index = PrefixIndex(1_000)
    index.set_capacity(0, 100)
    index.insert(0, [1], [64], 0.0)
    index.insert(1, [1], [64], 0.0)
    index.forget(0)
    assert index.match([1], [64], _slots(0, 1)).tolist() == [0, 64]
    index.insert(0, [1, 2], [64, 64], 0.0)
    assert index.held_tokens(0) <= 100


def test_the_age_is_that_of_the_least_recently_touched_block() -> None:
    """What would be evicted next tells how warm the cache is."""
    index = PrefixIndex(1_000)
    assert index.oldest_at_s(np.array([0])) == np.inf
    index.insert(0, [1], [64], 1.0)
    index.insert(0, [2], [64], 4.0)
    assert index.oldest_at_s(np.array([0])) == 1.0


_prompts = st.lists(st.integers(0, 11), min_size=1, max_size=8)


def _chain(path: list[int]) -> list[int]:
    """Chained hashes: equal prefixes, equal blocks."""
    return [hash(tuple(path[: depth + 1])) for depth in range(len(path))]


@given(st.lists(st.tuples(st.integers(0, 3), _prompts), max_size=40), st.integers(64, 64 * 12), _prompts)
def test_the_index_never_exceeds_capacity_and_never_credits_what_was_not_inserted(
    inserts: list[tuple[int, list[int]]], capacity: int, asked: list[int]
) -> None:
    """Whatever is inserted: the bound holds, masks and shelves agree, and a match is a prefix some insert had."""
    index = PrefixIndex(capacity)
    for position, (slot, path) in enumerate(inserts):
        index.insert(slot, _chain(path), [64] * len(path), float(position))
    for slot in range(4):
        assert index.held_tokens(slot) <= capacity
    held = dict.fromkeys(index._holders, 0)
    for slot, shelf in index._shelves.items():
        assert shelf.held_tokens == sum(tokens for tokens, _ in shelf.blocks.values())
        for block in shelf.blocks:
            held[block] |= 1 << slot
    assert held == index._holders
    matched = index.match(_chain(asked), [64] * len(asked), _slots(0, 1, 2, 3))
    for slot, tokens in enumerate(matched):
        shared = max((_shared(asked, path) for s, path in inserts if s == slot), default=0)
        assert tokens <= 64 * shared


def _shared(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
