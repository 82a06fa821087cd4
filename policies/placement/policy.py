"""Policies: how candidates are ranked. Weighted scorers, round robin, consistent hash with bounded load.

A policy ranks candidates that the filters left; it reads and never writes. What it must remember (whose turn it is)
changes in `committed`, so the same `rank` serves live decisions, explanations and replays.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import xxhash

from policies.placement.pickers import PICKERS
from policies.placement.scorers import AFFINITY_SCORERS, SCORERS, Windows
from policies.placement.view import View
from policies.types import Decision, Floats, Mask, Ranking


class Policy(Protocol):
    """What every policy offers. `name` appears in metrics and decisions."""

    name: str

    def rank(self, view: View, length: int) -> Ranking:
        """Order at most `length` candidates, best first. Reads only; the view has at least one candidate."""
        ...

    def committed(self, decision: Decision) -> None:
        """The decision was carried out."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedSpec:
    """A weighted policy in plain data: scorer name -> weight, picker name, scales, bound on affinity."""

    name: str
    weights: tuple[tuple[str, float], ...]
    picker: str = "max_score"
    windows: Windows = field(default_factory=Windows)
    max_affinity_share: float = 0.3


class Weighted:
    """The weighted mean of scorers, with affinity's share of the weight bounded (no hot spots by configuration)."""

    def __init__(self, spec: WeightedSpec) -> None:
        """Raise ValueError for an unknown scorer or picker."""
        _refuse_unknown("scorer", [name for name, _ in spec.weights], SCORERS)
        _refuse_unknown("picker", [spec.picker], PICKERS)
        self.name = spec.name
        self._windows = spec.windows
        self._pick = PICKERS[spec.picker]
        self._scorers = [(name, weight, SCORERS[name]) for name, weight in bounded_weights(spec)]

    def rank(self, view: View, length: int) -> Ranking:
        """Sum the weighted scores and pick; with no scorers every candidate is equal."""
        total = np.zeros(len(view.slots))
        parts = {}
        for name, weight, score in self._scorers:
            part = score(view, self._windows)
            parts[name] = part
            total += weight * part
        return _ranking(view, total, parts, self._pick(total, length, view.rng))

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""


def bounded_weights(spec: WeightedSpec) -> list[tuple[str, float]]:
    """Weights that sum to 1, the affinity scorers' sum at most `max_affinity_share` (if anything else scores)."""
    affinity = sum(weight for name, weight in spec.weights if name in AFFINITY_SCORERS)
    others = sum(weight for name, weight in spec.weights if name not in AFFINITY_SCORERS)
    total = affinity + others
    if not total:
        return [(name, 0.0) for name, _ in spec.weights]
    share = min(affinity / total, spec.max_affinity_share) if others else 1.0
    scale = {True: share / affinity if affinity else 0.0, False: (1 - share) / others if others else 0.0}
    return [(name, weight * scale[name in AFFINITY_SCORERS]) for name, weight in spec.weights]


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
        return _ranking(view, 1 - turn / count, {}, positions)

    def committed(self, decision: Decision) -> None:
        """Remember whose turn it was."""
        self._last_slot = decision.order[0]


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
            return _ranking(view, 1 / (1 + load), {}, PICKERS["max_score"](-load, length, view.rng))
        bound = math.ceil(self._load_factor * (load.sum() + 1) / len(load))
        members = tuple([str(view.state.addresses[slot]) for slot in view.slots.tolist()])
        positions = _walk(_ring(members), key, load + 1 <= bound, length)
        scores = np.zeros(len(view.slots))
        scores[positions] = 1 - np.arange(len(positions)) / len(positions)
        return _ranking(view, scores, {}, positions)

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


def _ranking(view: View, scores: Floats, parts: dict[str, Floats], positions: list[int]) -> Ranking:
    order = [int(view.slots[position]) for position in positions]
    return Ranking(order=order, candidates=view.slots, scores=scores, parts=parts)


def _refuse_unknown(what: str, names: list[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(sorted(known))}")
