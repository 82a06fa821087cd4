"""Idempotency keys: a request that its client sends again under the same key is not done twice.

    free -> held by a request under way -> free again   (it came to nothing, or nobody can tell)
                                        -> answered     (for `window_s`, then free)

A key belongs to its tenant. The same key with another body is a mistake of the client's, and told as one. What came to
nothing gives its key back at once, so that trying again is always safe: what failed, what was refused, what its client
did not wait for. Rejected: keeping answers and repeating them. They are megabytes of what people asked, and a stream
would have to be held back until it is whole.

How a request ended is known a moment after it has; until then its key is held, but for no longer than _UNTOLD_S: where
no access log comes, nobody ever tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from cachetools import TLRUCache

Name: TypeAlias = tuple[str | None, str]
"""The tenant, if requests have any, and its key."""

_UNTOLD_S = 1.0


class Standing(StrEnum):
    """Why a key cannot be had."""

    UNDER_WAY = "under_way"
    ANSWERED = "answered"
    OTHER_BODY = "other_body"
    """Another request has it, whatever became of that."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The key is not free; `request_id` is the request that has it."""

    standing: Standing
    request_id: str


@dataclass(slots=True, eq=False)
class KeyHold:
    """One request's hold on its key; it hangs on its flight. Freed or answered once, in whichever order it is told."""

    name: Name
    fingerprint: bytes
    request_id: str
    _keys: IdempotencyKeys = field(repr=False)
    ended_at_s: float = math.inf
    is_answered: bool = False

    def ended(self, now_s: float) -> None:
        """The request is over; how it went will be told."""
        self.ended_at_s = now_s

    def free(self) -> None:
        """The request came to nothing."""
        self._keys.free(self)

    def answered(self, now_s: float) -> None:
        """Its client has the whole answer."""
        self._keys.answered(self, now_s)


class IdempotencyKeys:
    """All keys in use. `most`: answered ones that are remembered, the longest unused forgotten first.

    Those of requests under way are as many as these. Every call takes the time in seconds of one clock.
    """

    def __init__(self, window_s: float, most: int) -> None:
        self.window_s = window_s
        self.most = most
        self._now_s = -math.inf
        self._under_way: dict[Name, KeyHold] = {}
        self._answered: TLRUCache[Name, KeyHold] = TLRUCache(  # the bounds may change with a reload
            math.inf, ttu=lambda _name, _hold, now_s: now_s + self.window_s, timer=lambda: self._now_s
        )

    def __len__(self) -> int:
        return len(self._under_way) + len(self._answered)

    def take(self, name: Name, fingerprint: bytes, request_id: str, now_s: float) -> KeyHold | Taken:
        """Hold the key for this request, if it is free. `fingerprint`: of all that makes the request what it is."""
        self._now_s = now_s
        holder = self._holder(name, now_s)
        if holder is None:
            hold = self._under_way[name] = KeyHold(name, fingerprint, request_id, self)
            return hold
        if holder.fingerprint != fingerprint:
            return Taken(Standing.OTHER_BODY, holder.request_id)
        return Taken(Standing.ANSWERED if holder.is_answered else Standing.UNDER_WAY, holder.request_id)

    def _holder(self, name: Name, now_s: float) -> KeyHold | None:
        hold = self._under_way.get(name)
        if hold is None:
            return self._answered.get(name)
        return hold if now_s - hold.ended_at_s <= _UNTOLD_S else None

    def free(self, hold: KeyHold) -> None:
        """As `KeyHold.free`."""
        if self._under_way.get(hold.name) is hold:
            del self._under_way[hold.name]

    def answered(self, hold: KeyHold, now_s: float) -> None:
        """As `KeyHold.answered`."""
        if self._under_way.get(hold.name) is not hold:
            return
        del self._under_way[hold.name]
        self._now_s = now_s
        hold.is_answered = True
        self._answered[hold.name] = hold
        while len(self._answered) > self.most:
            self._answered.popitem()
