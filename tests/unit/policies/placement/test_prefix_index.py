"""PrefixIndex: contiguous matches, exact capacity, tails evicted first."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.placement.prefix_index import Pinned, PrefixIndex
from policies.types import listed_slots


def _slots(*slots: int) -> np.ndarray:
    return np.array(slots, np.intp)


def test_an_endpoint_is_credited_for_the_contiguous_prefix_it_holds() -> None:
    """Slot 0 holds three blocks of the prompt, slot 1 the first only, slot 2 none."""
    index = PrefixIndex(10_000)
    index.insert(0, [1, 2, 3], [64, 64, 64], 0.0)
    index.insert(1, [1, 9], [64, 64], 0.0)
    matched = index.match([1, 2, 3, 4], [64, 64, 64, 64], _slots(0, 1, 2))
    assert matched.tolist() == [192, 64, 0]


@given(st.sets(st.integers(0, 20), min_size=1, max_size=6), st.lists(st.integers(0, 20), max_size=12))
def test_of_listed_slots_the_same_is_known(slots: set[int], holders: list[int]) -> None:
    """Matches, rooms and ages by loops and by arrays, whether or not the slots are neighbours."""
    index = PrefixIndex(1_000)
    for age, holder in enumerate(holders):
        index.insert(holder, [1, 2, 3][: 1 + age % 3], [64, 64, 64][: 1 + age % 3], float(age))
    among = _slots(*sorted(slots))
    some = listed_slots(among)
    assert some is not None
    matched, by_arrays = index.match_listed([1, 2, 3], [64] * 3, some), index.match([1, 2, 3], [64] * 3, among).tolist()
    assert list(matched) == [matched.at(position) for position in range(len(among))] == by_arrays
    assert matched.most == max(by_arrays)
    rooms = index.rooms(some.listed[-1])
    matched.put_down(rooms)
    assert [rooms[slot].matched_tokens for slot in some.listed] == by_arrays
    index.settle()
    assert [rooms[slot].tokens for slot in some.listed] == index.room_tokens(among).tolist()
    assert [rooms[slot].oldest_at_s for slot in some.listed] == index.oldest_at_s(among).tolist()


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


def test_who_holds_a_block_changes_as_it_comes_and_goes() -> None:
    """As bits by slot."""
    index = PrefixIndex(2 * 64)
    assert index.holders(1) == 0
    index.insert(0, [1], [64], 0.0)
    index.insert(5, [1, 2], [64] * 2, 0.0)
    assert index.holders(1) == 0b100001
    index.insert(0, [7, 8], [64] * 2, 1.0)
    assert index.holders(1) == 0b100000


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


def test_many_holders_are_credited_as_few_are() -> None:
    """A system prompt that every second of 100 endpoints holds, and none asked about beyond them."""
    index = PrefixIndex(10_000)
    for slot in range(0, 100, 2):
        index.insert(slot, [1, 2], [64, 64], 0.0)
    index.insert(3, [1], [64], 0.0)
    matched = index.match([1, 2, 3], [64, 64, 64], np.arange(90))
    assert matched.tolist() == [64.0 if slot == 3 else 128.0 * (slot % 2 == 0) for slot in range(90)]


_prompts = st.lists(st.integers(0, 11), min_size=1, max_size=8)


def _chain(path: list[int]) -> list[int]:
    """Chained hashes: equal prefixes, equal blocks."""
    return [hash(tuple(path[: depth + 1])) for depth in range(len(path))]


def test_what_is_in_use_is_not_evicted() -> None:
    """A running request's prompt outlives one that came later and is over; once idle, the longest idle goes first."""
    index = PrefixIndex(256)
    pinned = index.pin(0, [1, 2], [64, 64])
    index.insert(0, [3, 4], [64, 64], 1.0)
    index.insert(0, [5, 6], [64, 64], 2.0)
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [128]
    assert index.match([3, 4], [64, 64], _slots(0)).tolist() == [0]
    index.release(pinned, 3.0)
    index.insert(0, [7, 8], [64, 64], 4.0)
    assert index.match([5, 6], [64, 64], _slots(0)).tolist() == [0]
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [128]


def test_a_block_is_in_use_until_its_last_user_ends() -> None:
    """Two requests with the same head: the second keeps it when the first is over."""
    index = PrefixIndex(128)
    first, second = index.pin(0, [1, 2], [64, 64]), index.pin(0, [1, 9], [64, 64])
    assert index.room_tokens(_slots(0)).tolist() == [-64]
    index.release(first, 1.0)
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [64]
    assert index.match([1, 9], [64, 64], _slots(0)).tolist() == [128]
    index.release(second, 2.0)
    assert index.held_tokens(0) == 128


def test_what_did_not_get_there_is_not_held() -> None:
    """Unless another request brought it."""
    index = PrefixIndex(10_000)
    index.insert(0, [1], [64], 0.0)
    pinned = index.pin(0, [1, 2, 3], [64, 64, 64])
    index.pin(0, [1, 2], [64, 64])
    index.discard(pinned)
    index.release(pinned, 1.0)
    index.discard(pinned)  # once more, by another log: nothing is left of it
    assert index.match([1, 2, 3], [64, 64, 64], _slots(0)).tolist() == [128]


def test_a_request_from_before_a_restart_releases_nothing() -> None:
    """What it pinned is gone; what others have pinned since is theirs."""
    index = PrefixIndex(10_000)
    before = index.pin(0, [1, 2], [64, 64])
    index.forget(0)
    index.pin(0, [1, 2], [64, 64])
    index.discard(before)
    index.release(before, 1.0)
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [128]
    assert index.oldest_at_s(_slots(0)).tolist() == [np.inf]


def test_what_other_requests_have_only_pinned_may_never_come() -> None:
    """Only what was computed before stays if all fail that use it."""
    index = PrefixIndex(10_000)
    index.insert(0, [1, 2], [64, 64], 0.0)
    first, second = index.pin(0, [1, 2, 3], [64, 64, 64]), index.pin(0, [1, 2, 3, 4], [64] * 4)
    assert (first.in_use, second.in_use) == (0, 3)
    for pinned in (first, second):
        index.discard(pinned)
        index.release(pinned, 1.0)
    assert index.match([1, 2, 3, 4], [64] * 4, _slots(0)).tolist() == [128]


def test_a_failed_turn_leaves_the_history_though_others_use_its_beginning() -> None:
    """A system prompt in use, nine blocks of earlier turns at rest behind it, and a turn that fails."""
    index = PrefixIndex(10_000)
    history = list(range(1, 11))
    index.insert(0, history, [64] * 10, 0.0)
    index.pin(0, [1], [64])
    turn = index.pin(0, [*history, 11], [64] * 11)
    index.discard(turn)
    index.release(turn, 1.0)
    assert index.match([*history, 11], [64] * 11, _slots(0)).tolist() == [640]


def test_what_one_has_computed_stays_if_another_fails_that_waited_for_it() -> None:
    """And what rests behind it stays in reach."""
    index = PrefixIndex(10_000)
    index.insert(0, [1, 2, 3], [64] * 3, 0.0)
    index.forget(0)
    first, second = index.pin(0, [1, 2, 3], [64] * 3), index.pin(0, [1, 2, 3, 4], [64] * 4)
    index.release(first, 1.0)
    index.discard(second)
    index.release(second, 2.0)
    assert index.match([1, 2, 3, 4], [64] * 4, _slots(0)).tolist() == [192]
    assert index.oldest_at_s(_slots(0)).tolist() == [2.0]


def test_a_failure_told_of_after_the_end_takes_back_what_rests_since_then() -> None:
    """But not what another has used in the meantime, or computed before; and once only."""
    index = PrefixIndex(10_000)
    index.insert(0, [1], [64], 0.0)
    late = index.pin(0, [1, 2, 3], [64] * 3)
    index.release(late, 1.0)
    index.insert(0, [1, 2], [64, 64], 2.0)
    for _ in range(2):
        index.discard(late)
        index.release(late, 3.0)
    assert index.match([1, 2, 3], [64] * 3, _slots(0)).tolist() == [128]
    _check_books(index, 10_000)


def test_a_failure_told_of_late_leaves_what_another_computed_before_the_end() -> None:
    """The other, with a longer prompt, began after it and ended before it."""
    index = PrefixIndex(10_000)
    late, other = index.pin(0, [1, 2], [64, 64]), index.pin(0, [1, 2, 3], [64] * 3)
    index.release(other, 1.0)
    index.release(late, 2.0)
    index.discard(late)
    assert index.match([1, 2, 3], [64] * 3, _slots(0)).tolist() == [192]


def test_of_two_that_fail_nothing_stays_though_one_was_over_before_that_was_told() -> None:
    """What the first seemed to have computed the second only waited for."""
    index = PrefixIndex(10_000)
    late, other = index.pin(0, [1, 2], [64, 64]), index.pin(0, [1, 2, 3], [64] * 3)
    index.release(late, 1.0)
    for pinned in (late, other):
        index.discard(pinned)
    index.release(other, 2.0)
    assert len(index) == 0


def test_what_requests_used_is_not_remembered_for_ever() -> None:
    """Where no log ever tells of them, blocks that were evicted would stay in memory with each."""
    index = PrefixIndex(128)
    over = []
    for number in range(600):
        over.append(index.pin(0, [number], [64]))
        index.release(over[-1], float(number))
    assert [len(pinned.blocks) for pinned in over] == [0] * 100 + [1] * 500
    index.discard(over[0])
    assert index.held_tokens(0) == 128


_steps = st.tuples(st.integers(0, 3), _prompts, st.sampled_from(["serve", "begin", "end", "fail", "tell", "forget"]))


@given(st.lists(_steps, max_size=40), st.integers(64, 64 * 12), _prompts)
def test_the_bound_holds_and_nothing_is_credited_that_was_not_there(
    steps: list[tuple[int, list[int], str]], capacity: int, asked: list[int]
) -> None:
    """Whatever happens: what is idle fits, masks and shelves agree, and a match is a prefix that some prompt had."""
    index, running, over = PrefixIndex(capacity), list[Pinned](), list[Pinned]()
    for position, (slot, path, what) in enumerate(steps):
        chain = _chain(path)
        if what == "serve":
            index.insert(slot, chain, [64] * len(path), float(position))
        elif what == "begin":
            running.append(index.pin(slot, chain, [64] * len(path)))
        elif what == "forget":
            index.forget(slot)
        elif what == "tell" and over:
            index.discard(over.pop(len(over) // 2))
        elif running:
            pinned = running.pop(len(running) // 2)
            if what == "fail":
                index.discard(pinned)
            index.release(pinned, float(position))
            over.append(pinned)
        _check_books(index, capacity)
        _check_no_hole(index, [_chain(path) for _, path, _ in steps])
    matched = index.match(_chain(asked), [64] * len(asked), _slots(0, 1, 2, 3))
    for slot, tokens in enumerate(matched):
        shared = max((_shared(asked, path) for s, path, _ in steps if s == slot), default=0)
        assert tokens <= 64 * shared
    for pinned in running:
        index.release(pinned, 99.0)
    assert not any(held.users for shelf in index._shelves.values() for held in shelf.blocks.values())
    _check_books(index, capacity)


def _check_books(index: PrefixIndex, capacity: int) -> None:
    held = dict.fromkeys(index._holders, 0)
    for slot, shelf in index._shelves.items():
        assert shelf.held_tokens == sum(block.tokens for block in shelf.blocks.values())
        idle = [block.block for block in shelf.blocks.values() if not block.users]
        assert not idle or shelf.held_tokens <= capacity
        shelf.tidy()
        assert sorted(block.block for block in shelf.queue) == sorted(idle)
        for block in shelf.blocks:
            held[block] |= 1 << slot
    assert held == index._holders


def _check_no_hole(index: PrefixIndex, chains: list[list[int]]) -> None:
    for shelf in index._shelves.values():
        for chain in chains:
            users = [held.users if (held := shelf.blocks.get(block)) else -1 for block in chain]
            assert users == sorted(users, reverse=True)


def test_a_queue_does_not_grow_with_every_use() -> None:
    """A prompt that is used again and again waits in one place, and the order is that of its last use."""
    index = PrefixIndex(3 * 64)
    index.insert(0, [7], [64], 0.0)
    for turn in range(5_000):
        index.insert(0, [1, 2], [64, 64], 1.0 + turn)
    assert len(index._shelves[0].queue) < 500
    index.insert(0, [8], [64], 9_000.0)
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [128]
    assert index.match([7], [64], _slots(0)).tolist() == [0]
    index.insert(0, [9], [64], 9_001.0)
    assert index.match([1, 2], [64, 64], _slots(0)).tolist() == [64]


def _shared(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_what_rests_of_a_prompt_is_told_apart_from_what_is_in_use() -> None:
    """From its start: in use, then at rest and since when, up to the first block that is not there."""
    index = PrefixIndex(10_000)
    index.insert(0, [1, 2, 3, 4], [10, 20, 30, 40], 5.0)
    index.insert(0, [1, 2, 3], [10, 20, 30], 7.0)
    index.pin(0, [1], [10])
    assert _rested(index, 0, [1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]) == (1, [7.0, 7.0, 5.0])
    assert _rested(index, 0, [9, 1], [10, 10]) == (0, [])
    assert _rested(index, 3, [1], [10]) == (0, [])


def _rested(index: PrefixIndex, slot: int, hashes: list[int], tokens: list[int]) -> tuple[int, list[float]]:
    rested: list[float] = []
    pinned = index.pin(slot, hashes, tokens, rested)
    return pinned.in_use, rested


def test_depths_are_told_by_since_when_their_blocks_rest() -> None:
    """Most recently used first, blocks in use before all; for ever where nothing lies so deep."""
    index = PrefixIndex(10_000)
    for number in range(1, 6):
        index.insert(0, [number], [100], float(number))
    index.pin(0, [9], [100])
    assert index.resting_since(0, [50, 150, 250, 599, 600, 9_000]) == [math.inf, 5.0, 4.0, 1.0, -math.inf, -math.inf]
    assert index.resting_since(3, [0, 10]) == [-math.inf, -math.inf]
