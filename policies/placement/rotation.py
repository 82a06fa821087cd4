"""Policies that go round: each in turn, by weight or without, and a hash ring with bounded load.

They need no figures of the engines; the ring needs no memory either.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import xxhash
from annotated_types import Ge, Le

from policies.placement.pickers import max_score
from policies.placement.policy import PolicySpec, ranking
from policies.placement.view import View
from policies.types import Decision, Floats, Mask, Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinSpec(PolicySpec):
    """Nothing to say."""

    kind: Literal["round_robin"] = "round_robin"

    def build(self, name: str) -> RoundRobin:
        """The policy."""
        return RoundRobin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRoundRobinSpec(PolicySpec):
    """Nothing to say: the weights are the endpoints'."""

    kind: Literal["weighted_round_robin"] = "weighted_round_robin"

    def build(self, name: str) -> WeightedRoundRobin:
        """The policy."""
        return WeightedRoundRobin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistentHashSpec(PolicySpec):
    """`load_factor`: an endpoint above this multiple of the mean load is passed over."""

    kind: Literal["consistent_hash"] = "consistent_hash"
    load_factor: Annotated[float, Ge(1), Le(1e6)] = 1.25

    def build(self, name: str) -> ConsistentHash:
        """The policy."""
        return ConsistentHash(name, load_factor=self.load_factor)


class RoundRobin:
    """Each candidate in turn, by slot."""

    def __init__(self, name: str = "round_robin") -> None:
        self.name = name
        self._last_slot = -1

    def rank(self, view: View, length: int) -> Ranking:
        """Start with the slot after the one served last."""
        start = int(np.searchsorted(view.slots, self._last_slot, side="right"))
        count = len(view.slots)
        positions = [(start + step) % count for step in range(min(length, count))]
        turn = (np.arange(count) - start) % count
        return ranking(view, 1 - turn / count, {}, positions)

    def committed(self, decision: Decision) -> None:
        """Remember whose turn it was."""
        self._last_slot = decision.order[0]


class WeightedRoundRobin:
    """Smooth weighted round robin, as nginx does it: shares by weight, and no endpoint several times on end for it.

    Each turn every candidate's credit grows by its weight; the highest is served and pays the sum of the weights.
    """

    def __init__(self, name: str = "weighted_round_robin") -> None:
        self.name = name
        self._credit: Floats = np.zeros(0)  # by slot

    def rank(self, view: View, length: int) -> Ranking:
        """Highest credit first."""
        weights = view.state.weight[view.slots]
        known = view.slots[view.slots < len(self._credit)]  # the slots rise, so these are the first
        credit = weights.copy()
        credit[: len(known)] += self._credit[known]
        return ranking(view, credit, {"weight": weights}, max_score(credit, length, view.rng))

    def committed(self, decision: Decision) -> None:
        """Take over the candidates' credit; who was no candidate starts anew when it is one again."""
        made = decision.ranking
        self._credit = np.zeros(int(made.candidates[-1]) + 1)
        self._credit[made.candidates] = made.scores
        self._credit[decision.order[0]] -= float(made.parts["weight"].sum())


_POINTS_PER_ENDPOINT = 64
"""Ring points per endpoint: keeps the shares within about 12 % (1/sqrt(64)) of even."""


class ConsistentHash:
    """A hash ring over addresses, with bounded load (Mirrokni, Thorup, Zadimoghaddam 2016).

    The key is the session if the request names one, else the head of the prompt. An endpoint above `load_factor` times
    the mean load is passed over for the next on the ring. A request without either key goes to the least loaded.
    """

    def __init__(self, name: str = "consistent_hash", *, load_factor: float = 1.25) -> None:
        self.name = name
        self._load_factor = load_factor

    def rank(self, view: View, length: int) -> Ranking:
        """Walk the ring from the key; those within their bound first."""
        load = view.in_flight
        key = _key(view)
        if key is None:
            return ranking(view, 1 / (1 + load), {}, max_score(-load, length, view.rng))
        bound = math.ceil(self._load_factor * (load.sum() + 1) / len(load))
        members = tuple([str(view.state.addresses[slot]) for slot in view.slots.tolist()])
        positions = _walk(_ring(members), key, load + 1 <= bound, length)
        scores = np.zeros(len(view.slots))
        scores[positions] = 1 - np.arange(len(positions)) / len(positions)
        return ranking(view, scores, {}, positions)

    def committed(self, decision: Decision) -> None:
        """Nothing to remember: the ring follows from the members."""


def _walk(ring: list[tuple[int, int]], key: int, has_room: Mask, length: int) -> list[int]:
    """Up to `length` positions in ring order from `key`: those with room, then those without."""
    start = bisect.bisect_left(ring, (key, 0))
    passed: dict[int, None] = {}
    found: dict[int, None] = {}
    for step in range(len(ring)):
        position = ring[(start + step) % len(ring)][1]
        (found if has_room[position] else passed)[position] = None
        if len(found) == length:
            break
    return [*found, *passed][:length]


@lru_cache(maxsize=64)
def _ring(members: tuple[str, ...]) -> list[tuple[int, int]]:
    """A function of the members alone: remembering it changes nothing, and there are few sets at once."""
    return sorted(
        (xxhash.xxh3_64_intdigest(f"{address}#{point}".encode()), position)
        for position, address in enumerate(members)
        for point in range(_POINTS_PER_ENDPOINT)
    )


_HEAD_BLOCKS = 4
"""Without a session the first KiB (4 blocks of 256 B) is the key: enough to tell system prompts apart."""


def _key(view: View) -> int | None:
    request = view.request
    if request.session_key is not None:
        return xxhash.xxh3_64_intdigest(request.session_key.encode())
    if request.block_hashes:
        return request.block_hashes[min(_HEAD_BLOCKS, len(request.block_hashes)) - 1]
    return None
