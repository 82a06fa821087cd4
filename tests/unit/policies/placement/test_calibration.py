"""How large an endpoint's cache really is, by what it keeps of what the index promises."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.placement.calibration import LEVELS, SMALLEST_SCALE, Calibration, Evidence
from policies.placement.prefix_index import PrefixIndex
from policies.types import Promise

REPORTED = 400_000
PROMPT = 1_024  # tokens of a conversation's prompt, in blocks of
BLOCK = 128
SLOT = 0


class Engine:
    """One engine with a cache of `kept_tokens`, behind an index that believes what it reports."""

    def __init__(self, kept_tokens: float, *, tells: bool = True, counts: bool = False, seed: int = 1) -> None:
        self.index = PrefixIndex(REPORTED)
        self.calibration = Calibration(self.index)
        self.calibration.enabled = True
        self.calibration.set_capacity(SLOT, REPORTED)
        self.kept_tokens = kept_tokens
        self.tells, self.counts = tells, counts
        self.rng = Random(seed)
        self.now_s = 0.0
        self._cache: OrderedDict[int, None] = OrderedDict()

    @property
    def scale(self) -> float:
        """Of the index."""
        return self.calibration.scale(SLOT)

    def serve(self, requests: int, conversations: int = 350) -> None:
        """Each a further turn of one of so many conversations, whichever: reuse at all depths of the cache."""
        for _ in range(requests):
            self.turn(self.rng.randrange(conversations))

    def turn(self, conversation: int) -> None:
        """One request from its promise to its answer."""
        self.now_s += 0.1
        hashes = [conversation * 100 + block for block in range(PROMPT // BLOCK)]
        tokens = [BLOCK] * len(hashes)
        promised = self.index.match(hashes, tokens, np.array([SLOT]))[0]
        self.calibration.promised(SLOT, promised)
        promise = self.promise(hashes, tokens, self.now_s)
        found = self._look_up(hashes)
        if self.tells:
            self.calibration.answered(SLOT, promise, found)
        if self.counts:
            self.calibration.counted(SLOT, found, queues=False)

    def promise(self, hashes: Sequence[int], tokens: Sequence[int], now_s: float) -> Promise | None:
        """One request's; it ends at once."""
        rested: list[float] = []
        pinned = self.index.pin(SLOT, hashes, tokens, rested)
        promise = self.calibration.promise(SLOT, tokens, pinned.in_use, rested, now_s)
        self.index.release(pinned, now_s)
        return promise

    def _look_up(self, hashes: list[int]) -> int:
        found = next((at for at, block in enumerate(hashes) if block not in self._cache), len(hashes))
        for block in reversed(hashes):
            self._cache.pop(block, None)
            self._cache[block] = None
        while len(self._cache) * BLOCK > self.kept_tokens:
            self._cache.popitem(last=False)
        return found * BLOCK


@pytest.mark.parametrize("kept", [1 / 6, 1 / 4, 1 / 3, 1 / 2, 0.7])
def test_an_index_larger_than_the_cache_shrinks_to_its_size(kept: float) -> None:
    """Within a fifth of it, and then stays there."""
    engine = Engine(kept * REPORTED)
    engine.serve(1_500)
    for _ in range(20):
        engine.serve(100)
        assert 0.8 <= engine.scale / kept <= 1.25
    assert engine.index.held_tokens(SLOT) <= 1.25 * kept * REPORTED
    assert engine.calibration.evidence(SLOT) is Evidence.ANSWERS


@pytest.mark.parametrize("kept", [0.95, 1.0, 2.0])
def test_an_honest_engine_is_believed(kept: float) -> None:
    """One of a few less blocks as well, and one that has more than it says: an index is never larger than reported."""
    engine = Engine(kept * REPORTED)
    for _ in range(30):
        engine.serve(100)
        assert engine.scale == 1.0


def test_a_lie_that_costs_nothing_is_let_be() -> None:
    """All reuse is of what any cache keeps: nothing tells how large this one is."""
    engine = Engine(0.5 * REPORTED)
    engine.serve(2_000, conversations=100)
    assert engine.scale == 1.0


def test_a_cache_that_grows_again_is_used_again() -> None:
    """As when others' requests leave it: level by level, back to what it reports."""
    engine = Engine(0.25 * REPORTED)
    engine.serve(1_500)
    assert engine.scale < 0.35
    engine.kept_tokens = REPORTED
    engine.serve(8_000)
    assert engine.scale >= 0.8


def test_an_engine_that_never_tells_is_not_judged_by_its_answers() -> None:
    """All zero is what an engine without the option says; without counters its word stands."""
    engine = Engine(0.0)
    engine.serve(2_000)
    assert (engine.scale, engine.calibration.evidence(SLOT)) == (1.0, Evidence.NONE)


def test_hit_counters_stand_in_for_answers() -> None:
    """More coarsely: smaller where half of what was promised is found, and never for an honest engine."""
    lying, honest = (Engine(kept * REPORTED, tells=False, counts=True) for kept in (0.25, 1.0))
    for engine in (lying, honest):
        engine.serve(3_000)
        assert engine.calibration.evidence(SLOT) is Evidence.COUNTERS
    assert lying.scale < 0.5
    assert honest.scale == 1.0


def test_counters_say_nothing_while_requests_queue() -> None:
    """What was promised to who waits is counted late."""
    engine = Engine(REPORTED, tells=False)
    for _ in range(100):
        engine.calibration.counted(SLOT, 0.0, queues=True)
        engine.calibration.promised(SLOT, 150_000)
    assert engine.scale == 1.0
    engine.calibration.counted(SLOT, 0.0, queues=False)
    assert engine.scale < 1.0


def test_answers_tell_more_than_counters() -> None:
    """Once an engine tells of cached tokens, its counters, others' requests among them, are not asked."""
    engine = Engine(REPORTED, counts=True)
    engine.serve(100)
    for _ in range(50):
        engine.calibration.promised(SLOT, 500_000)
        engine.calibration.counted(SLOT, 0.0, queues=False)
    assert (engine.scale, engine.calibration.evidence(SLOT)) == (1.0, Evidence.ANSWERS)


def test_another_size_is_believed_anew() -> None:
    """A restarted engine reports the same and lies the same; one that was given other memory does not."""
    engine = Engine(0.25 * REPORTED)
    engine.serve(1_500)
    found_out = engine.scale
    engine.calibration.forget(SLOT)
    engine.calibration.set_capacity(SLOT, REPORTED)
    assert engine.scale == found_out
    engine.calibration.set_capacity(SLOT, 2 * REPORTED)
    assert engine.scale == 1.0


def test_a_promise_from_before_a_restart_is_not_held_against_it() -> None:
    """The cache was emptied in between."""
    engine = Engine(REPORTED)
    engine.serve(400)
    hashes = list(range(PROMPT // BLOCK))
    for _ in range(200):
        engine.now_s += 1.0
        engine.index.insert(SLOT, hashes, [BLOCK] * len(hashes), engine.now_s)
        promise = engine.promise(hashes, [BLOCK] * len(hashes), engine.now_s)
        engine.calibration.forget(SLOT)
        engine.calibration.answered(SLOT, None, 1.0)
        engine.calibration.answered(SLOT, promise, 0.0)
    assert promise is not None
    assert engine.scale == 1.0


def test_what_others_are_just_bringing_is_not_promised() -> None:
    """Blocks in use may be on their way still: if not even they were there, the answer is no evidence at all."""
    engine = Engine(REPORTED)
    hashes, tokens = list(range(20)), [BLOCK] * 20
    engine.index.insert(SLOT, hashes, tokens, 0.0)
    engine.index.pin(SLOT, hashes[:10], tokens[:10])
    assert engine.promise(hashes, tokens, 0.5) is None  # before the first answer
    engine.calibration.answered(SLOT, None, 1.0)
    promise = engine.promise(hashes, tokens, 1.0)
    assert promise is not None
    assert (promise.pinned_tokens, sum(part for _, part in promise.parts)) == (10 * BLOCK, 10 * BLOCK)
    engine.calibration.answered(SLOT, None, 1.0)
    for _ in range(2_000):
        engine.calibration.answered(SLOT, promise, 5 * BLOCK)
    assert engine.scale == 1.0


def test_promises_are_noted_a_few_times_a_second() -> None:
    """Each costs a walk; and a prompt of a few tokens says nothing beside rounding."""
    engine = Engine(REPORTED)
    hashes, tokens = [1, 2, 3], [BLOCK] * 3
    engine.index.insert(SLOT, hashes, tokens, 0.0)
    engine.promise(hashes, tokens, 0.0)
    engine.calibration.answered(SLOT, None, 1.0)
    promises = [engine.promise(hashes, tokens, 1.0 + 0.001 * turn) for turn in range(100)]
    assert 4 <= sum(promise is not None for promise in promises) <= 6
    assert engine.promise([1], [100], 9.0) is None


def test_nothing_is_corrected_unless_asked_for() -> None:
    """Switched off, an endpoint's word stands and no promise is noted."""
    engine = Engine(0.25 * REPORTED)
    engine.calibration.enabled = False
    engine.serve(1_500)
    assert (engine.scale, engine.calibration.evidence(SLOT)) == (1.0, Evidence.NONE)
    assert engine.promise([1], [BLOCK], 1e6) is None


_EVENT = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 200)),
    st.tuples(st.just("found"), st.integers(0, 40_000)),
    st.tuples(st.just("counted"), st.integers(0, 10**6)),
    st.tuples(st.just("promised"), st.integers(0, 10**6)),
    st.tuples(st.just("size"), st.sampled_from([1, 50_000, REPORTED])),
    st.tuples(st.just("forget"), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(_EVENT, max_size=60), st.floats(0.0, 2.0))
def test_the_index_stays_within_its_bounds(events: list[tuple[str, int]], kept: float) -> None:
    """Whatever is told: a share of what was reported last, an eighth to the whole, and the index holds no more."""
    engine, reported = Engine(kept * REPORTED, counts=True), REPORTED
    calibration = engine.calibration
    promise = None
    for what, figure in events:
        if what == "turn":
            engine.turn(figure)
            hashes = [figure * 100 + block for block in range(8)]
            promise = engine.promise(hashes, [BLOCK] * 8, engine.now_s + 0.05) or promise
        elif what == "found":
            for _ in range(30):
                calibration.answered(SLOT, promise, float(figure))
        elif what == "counted":
            calibration.counted(SLOT, float(figure), queues=False)
        elif what == "promised":
            calibration.promised(SLOT, float(figure))
        elif what == "size":
            reported = figure
            calibration.set_capacity(SLOT, reported)
        else:
            engine.index.forget(SLOT)
            calibration.forget(SLOT)
        assert engine.scale in LEVELS
        assert SMALLEST_SCALE <= engine.scale <= 1.0
        assert engine.index.held_tokens(SLOT) <= max(1, round(engine.scale * reported))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(50, 600))
def test_kept_promises_never_shrink_an_index(seed: int, conversations: int) -> None:
    """However the reuse is spread."""
    engine = Engine(REPORTED, seed=seed)
    engine.serve(500, conversations)
    assert engine.scale == 1.0


# -- what it costs


class Busy:
    """Many endpoints that serve the same prompt."""

    def __init__(self, endpoints: int) -> None:
        self.index = PrefixIndex(REPORTED)
        self.calibration = Calibration(self.index)
        self.calibration.enabled = True
        self.hashes, self.tokens = list(range(PROMPT // BLOCK)), [BLOCK] * (PROMPT // BLOCK)
        self.slots = range(endpoints)
        self.promises: dict[int, int] = dict.fromkeys(self.slots, 0)
        for slot in self.slots:
            self.calibration.set_capacity(slot, REPORTED)
            self.index.insert(slot, self.hashes, self.tokens, 0.0)

    @property
    def walks(self) -> int:
        """How often it was looked through."""
        return self.calibration.walks

    def serve(self, from_s: float, seconds: float) -> None:
        """Each endpoint answers ten requests a second."""
        for turn in range(round(10 * seconds)):
            for slot in self.slots:
                now_s = from_s + turn / 10 + slot / 10 / len(self.slots)
                promise = self.calibration.promise(slot, self.tokens, 0, [0.0] * len(self.tokens), now_s)
                self.promises[slot] += promise is not None
                self.calibration.answered(slot, promise, PROMPT)


def test_walks_over_the_index_are_bounded_however_many_endpoints_there_are() -> None:
    """Twenty-five a second over the pool, and in time everybody's turn comes."""
    busy = Busy(200)
    busy.serve(1.0, 1.0)
    assert 20 <= busy.walks <= 26
    busy.serve(2.0, 15.0)
    assert min(busy.promises.values()) > 0


def test_a_few_endpoints_are_walked_as_often_as_before() -> None:
    """Once in two seconds each."""
    busy = Busy(4)
    busy.serve(1.0, 10.0)
    assert busy.walks == 4 * 5


def test_depths_that_are_long_out_of_date_promise_nothing() -> None:
    """Where a walk is put off for long: what rests has sunk, and would be held against a shallower depth."""
    busy = Busy(1_000)
    busy.serve(1.0, 15.0)
    first = next(slot for slot in busy.slots if busy.promises[slot])
    walked_again = busy.calibration._endpoints[first].marked_at_s > 11.0
    assert 90 <= busy.promises[first] <= 110
    assert not walked_again
