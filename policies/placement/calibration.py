"""Whether an endpoint's cache is as large as it says, by what it finds of what the prefix index promised.

An index larger than the cache behind it promises what was evicted long ago: a fleet told twice the truth sends requests
after prefixes that are gone. Others' requests in the same cache, or a figure of another kind of memory, look the same.

What is compared is *how deep* in the index a promise lay. A block that rests there behind others is evicted once its
depth, in tokens more recently used, exceeds the cache. So where promises at some depth and beyond are mostly broken,
the cache ends there; how many are broken in all says little, since most reuse is recent and found in any cache. Depths
are told in levels, shares of the reported size; the level chosen is the one that separates kept promises from broken
ones best. The index shrinks to it at once. It grows a level at a time when its deepest promises are kept: nothing else
can tell what lies beyond.

Not counted as broken: what another request is just bringing (it may not be there yet), and less than a block or two (an
engine rounds down). An engine that never tells of cached tokens in its answers is judged by its counters of hits, more
coarsely: all promises against all hits, and not while requests queue there. Of one that tells neither nothing is known,
and its word stands.

Rejected: going by the share of kept promises alone. Where queues delay what was promised, an honest engine keeps fewer
(0.37 of them in a replay of an overloaded fleet) than one that has half of what it says (0.79). Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Final

import numpy as np

from policies.placement.prefix_index import PrefixIndex
from policies.types import Floats, Promise

SMALLEST_SCALE = 1 / 8
_STEPS: Final = 15
LEVELS = tuple(SMALLEST_SCALE ** (1 - step / _STEPS) for step in range(_STEPS + 1))
"""Shares of the reported size that an index may have, each a seventh above the one before. The last is the whole."""
_TOP: Final = 15

_BETWEEN_PROMISES_S: Final = 0.02
"""A promise costs microseconds to note; fifty a second and endpoint are evidence enough."""
_BETWEEN_MARKS_S = 2.0
"""How long what is known of depths is used: an index of 400,000 tokens turns over in a minute at best, and a walk over
its 3,400 blocks takes 0.4 ms. So it is done as an answer comes, not while a request waits for its decision."""
_BETWEEN_WALKS_S = 0.04
"""Over all endpoints of the pool: a hundredth of the loop for 25 walks a second, however many there are."""
_OLDEST_MARKS_S: Final = 10.0
"""Where walks are put off for that, older marks say nothing: what they mark lies a level deeper by now."""
_LEAST_TOKENS: Final = 128
"""A promise of fewer says nothing beside what rounding takes."""
_ROUNDING_TOKENS = 64
"""An engine finds whole blocks, and never the prompt's last token."""
_EVIDENCE_SHARE = 0.1
_LEAST_EVIDENCE_TOKENS = 16_384
"""Judged anew after promises of so much: a share of the reported size, or so many tokens if that is more."""
_MEMORY = 0.8
"""Of the evidence, what is left after a judgement."""
_BROKEN, _KEPT = 0.5, 0.8
"""Promises of which less is found are broken, of which more is found are kept."""
_MARGIN = 0.1
"""Of the evidence needed, how much more must speak for a smaller index than for the one there is."""
_COUNTED_SHARE = 0.25
"""Counters tell of all requests alike, so they are judged over more of them."""
_FEW_HITS, _MANY_HITS = 0.85, 0.95
"""Hits by the counters per promise; an honest engine that does not queue has more than promised."""
_COUNTED_STEP = 2
"""Levels down at a time: counters say that there is less, not how much."""
_KEPT_IN_A_ROW = 3
"""Judgements before the index grows: what was measured once holds longer than what was guessed once."""


class Evidence(StrEnum):
    """What an endpoint's calibration rests on."""

    ANSWERS = "answers"
    """Cached tokens in its answers' usage."""
    COUNTERS = "counters"
    """Its own counters of hits."""
    NONE = "none"


class _Endpoint:
    """What is known of one endpoint. `marks[level]`: since when the block rests that lies that deep in the index."""

    def __init__(self) -> None:
        self.promised: Floats = np.zeros(_STEPS + 1)
        self.found: Floats = np.zeros(_STEPS + 1)
        self.marks = [-inf] * (_STEPS + 1)
        self.capacity_tokens = 0
        self.level = _TOP
        self.stay = 0
        self.kept_in_a_row = 0
        self.fresh_tokens = 0.0
        self.marked_at_s = -inf
        self.noted_at_s = -inf
        self.put_off = False
        self.tells = False
        self.counts = False
        self.hit_tokens = 0.0

    def forget_evidence(self) -> None:
        self.promised[:] = self.found[:] = 0.0
        self.fresh_tokens = self.hit_tokens = 0.0
        self.kept_in_a_row = 0

    @property
    def evidence_tokens(self) -> float:
        return max(_LEAST_EVIDENCE_TOKENS, _EVIDENCE_SHARE * self.capacity_tokens)


class Calibration:
    """One pool's. It sets the capacities of the pool's index: what an endpoint reports, scaled to what it keeps.

    `walks`: how often it has looked through the index of an endpoint.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.enabled = False
        self.walks = 0
        self._index = index
        self._endpoints: dict[int, _Endpoint] = {}
        self._now_s = -inf
        self._walked_at_s = -inf

    def set_capacity(self, slot: int, tokens: int) -> None:
        """The endpoint reports this size. Another than before is believed anew."""
        endpoint = self._endpoint(slot)
        if tokens != endpoint.capacity_tokens:
            endpoint.capacity_tokens, endpoint.level = tokens, _TOP
            endpoint.marked_at_s = -inf
            endpoint.forget_evidence()
        self._apply(slot, endpoint)

    def forget(self, slot: int) -> None:
        """Its cache is empty, or the slot is another endpoint's: what was promised of it will not be kept."""
        endpoint = self._endpoints.get(slot)
        if endpoint is not None:
            endpoint.stay += 1
            endpoint.marked_at_s = -inf
            endpoint.forget_evidence()
            endpoint.tells = False

    def let_go(self, slot: int) -> None:
        """The endpoint left the pool."""
        self._endpoints.pop(slot, None)

    def scale(self, slot: int) -> float:
        """The index's size as a share of the reported one."""
        endpoint = self._endpoints.get(slot)
        return LEVELS[endpoint.level] if endpoint is not None and self.enabled else 1.0

    def evidence(self, slot: int) -> Evidence:
        """What that rests on."""
        endpoint = self._endpoints.get(slot)
        if endpoint is None or not self.enabled:
            return Evidence.NONE
        if endpoint.tells:
            return Evidence.ANSWERS
        return Evidence.COUNTERS if endpoint.counts else Evidence.NONE

    # -- evidence from answers

    def promise(
        self, slot: int, tokens: Sequence[int], in_use: int, rested: Sequence[float], now_s: float
    ) -> Promise | None:
        """What the index promised of a prompt, for comparison when it is answered; None if that would say little.

        `tokens`: of the prompt's blocks; which of these were in use or at rest is the index's word as it pinned them.
        """
        self._now_s = now_s
        endpoint = self._endpoints.get(slot)
        if not self.enabled or endpoint is None or now_s - endpoint.noted_at_s < _BETWEEN_PROMISES_S:
            return None
        endpoint.noted_at_s = now_s  # also where little rests: requests are taken as they come
        resting = tokens[in_use : in_use + len(rested)]
        if sum(resting) < _LEAST_TOKENS or not self._knows_depths(endpoint):
            return None
        runs = groupby(zip(rested, resting, strict=True), key=itemgetter(0))
        parts = tuple((_depth(endpoint.marks, since_s), sum(part for _, part in run)) for since_s, run in runs)
        return Promise(endpoint.stay, sum(tokens[:in_use]), parts)

    def _knows_depths(self, endpoint: _Endpoint) -> bool:
        """Not before the first answer, which finds out how deep things lie."""
        oldest_s = _OLDEST_MARKS_S if endpoint.put_off else inf
        return endpoint.marked_at_s > -inf and self._now_s - endpoint.marked_at_s <= oldest_s

    def _mark(self, slot: int, endpoint: _Endpoint) -> None:
        if endpoint.noted_at_s < endpoint.marked_at_s + _BETWEEN_MARKS_S:
            return
        endpoint.put_off = self._now_s < self._walked_at_s + _BETWEEN_WALKS_S
        if not endpoint.put_off:
            self.walks += 1
            endpoint.marked_at_s, self._walked_at_s = endpoint.noted_at_s, self._now_s
            endpoint.marks = self._index.resting_since(slot, [level * endpoint.capacity_tokens for level in LEVELS])

    def answered(self, slot: int, promise: Promise | None, found_tokens: float) -> None:
        """A prompt was answered, and the engine says what it found cached of it, in the tokens that we count in."""
        endpoint = self._endpoints.get(slot)
        if not self.enabled or endpoint is None:
            return
        endpoint.tells |= found_tokens > 0
        self._mark(slot, endpoint)
        if promise is None or promise.stay != endpoint.stay or not endpoint.tells:
            return
        rest = found_tokens - promise.pinned_tokens
        if rest < -_ROUNDING_TOKENS:
            return  # not even what others were using: it was still on its way there
        self._compare(endpoint, promise, max(0.0, rest) + _ROUNDING_TOKENS)
        if endpoint.fresh_tokens >= endpoint.evidence_tokens:
            self._judge(slot, endpoint)

    @staticmethod
    def _compare(endpoint: _Endpoint, promise: Promise, found_tokens: float) -> None:
        for depth, tokens in promise.parts:
            endpoint.promised[depth] += tokens
            endpoint.found[depth] += min(tokens, found_tokens)
            endpoint.fresh_tokens += tokens
            found_tokens = max(0.0, found_tokens - tokens)

    def _judge(self, slot: int, endpoint: _Endpoint) -> None:
        """Shrink to where promises begin to be broken, or grow by a level."""
        gains = np.cumsum(endpoint.found - _BROKEN * endpoint.promised)
        best = _TOP - int(np.argmax(gains[::-1]))  # of equal ones the largest
        fewest = 2 if endpoint.level == _TOP else 1  # an honest engine is not shrunk for a level's worth of noise
        wins = gains[best] - gains[endpoint.level] >= _MARGIN * endpoint.evidence_tokens
        if best <= endpoint.level - fewest and wins:
            endpoint.level, endpoint.kept_in_a_row = best, 0
            self._apply(slot, endpoint)
        elif self._keeps_its_deepest(endpoint):
            self._grow(slot, endpoint)
        endpoint.promised *= _MEMORY
        endpoint.found *= _MEMORY
        endpoint.fresh_tokens = 0.0

    @staticmethod
    def _keeps_its_deepest(endpoint: _Endpoint) -> bool:
        deepest = slice(max(0, endpoint.level - 1), endpoint.level + 1)
        promised = float(endpoint.promised[deepest].sum())
        kept = float(endpoint.found[deepest].sum()) >= _KEPT * promised
        return kept and promised >= _MARGIN * endpoint.evidence_tokens

    def _grow(self, slot: int, endpoint: _Endpoint) -> None:
        endpoint.kept_in_a_row += 1
        if endpoint.level < _TOP and endpoint.kept_in_a_row >= _KEPT_IN_A_ROW:
            endpoint.level, endpoint.kept_in_a_row = endpoint.level + 1, 0
            self._apply(slot, endpoint)

    # -- evidence from counters

    def promised(self, slot: int, tokens: float) -> None:
        """So much of a prompt that is sent there is believed cached, whatever its answer will tell of it."""
        endpoint = self._endpoints.get(slot)
        if self.enabled and endpoint is not None and endpoint.counts and not endpoint.tells:
            endpoint.fresh_tokens += tokens

    def counted(self, slot: int, hit_tokens: float, *, queues: bool) -> None:
        """By its counter the endpoint found so much cached since it was last asked.

        `queues`: requests wait there. What was promised them is counted late, and may be gone by then.
        """
        endpoint = self._endpoints.get(slot)
        if not self.enabled or endpoint is None or endpoint.tells:
            return
        endpoint.counts = True
        endpoint.hit_tokens += hit_tokens
        promised = endpoint.fresh_tokens
        if queues:
            endpoint.fresh_tokens = endpoint.hit_tokens = 0.0
        elif promised >= max(_LEAST_EVIDENCE_TOKENS, _COUNTED_SHARE * endpoint.capacity_tokens):
            self._judge_counts(slot, endpoint, endpoint.hit_tokens / promised)
            endpoint.fresh_tokens = endpoint.hit_tokens = 0.0

    def _judge_counts(self, slot: int, endpoint: _Endpoint, found_share: float) -> None:
        if found_share < _FEW_HITS and endpoint.level:
            endpoint.level, endpoint.kept_in_a_row = max(0, endpoint.level - _COUNTED_STEP), 0
            self._apply(slot, endpoint)
        elif found_share >= _MANY_HITS:
            self._grow(slot, endpoint)

    # -- inside

    def _endpoint(self, slot: int) -> _Endpoint:
        endpoint = self._endpoints.get(slot)
        if endpoint is None:
            endpoint = self._endpoints[slot] = _Endpoint()
        return endpoint

    def _apply(self, slot: int, endpoint: _Endpoint) -> None:
        scale = LEVELS[endpoint.level] if self.enabled else 1.0
        self._index.set_capacity(slot, round(scale * endpoint.capacity_tokens))


def _depth(marks: Sequence[float], since_s: float) -> int:
    """The level that holds a block resting since then: how many levels' ends rest since later."""
    depth = 0
    while depth < _TOP and marks[depth] > since_s:
        depth += 1
    return depth
