"""FleetState: what is known of every endpoint, as numpy arrays indexed by slot.

One writer (the decision loop), many readers. Scraped figures carry the time they were observed, so a scorer can
tell a stale one; our own in-flight counts are exact and never stale. Alternatives set aside: an object per endpoint
(a Python loop per decision: 14 us at 256 endpoints where the arrays take 2.3) and shared memory between workers
(no single authority for counts and queues).

Slots carry a generation. A slot is handed to another address only when nothing is in flight on it, so a late
release can never be booked to a stranger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.lifecycle import State
from policies.types import Reservation

_FIGURES: tuple[tuple[str, type[np.generic], float], ...] = (
    # name, dtype, value of a slot nobody has observed yet
    ("generation", np.int64, 0),
    ("state", np.int8, State.STOPPED),
    ("routable", np.bool_, False),
    ("waiting", np.float64, 0),
    ("running", np.float64, 0),
    ("kv_used", np.float64, 0),
    ("kv_capacity_tokens", np.float64, 131_072),
    ("context_tokens", np.float64, np.inf),
    ("in_flight", np.int64, 0),
    ("in_flight_prompt_tokens", np.int64, 0),
    ("in_flight_uncached_tokens", np.int64, 0),
    ("error_ewma", np.float64, 0),
    ("ttft_ewma_s", np.float64, 0),
    ("prefix_hit_ratio", np.float64, 0),
    ("observed_at_s", np.float64, -np.inf),
)
_KEPT_ON_REUSE = ("generation",)


class TooManyEndpoints(Exception):
    """The fleet has more endpoints than `limits.endpoints` allows."""


class FleetState:
    """Named arrays over endpoint slots; see the module's page for who writes them.

    `waiting`, `running`: requests in the engine, scraped. `kv_used`: 0..1. `kv_capacity_tokens`: the pool's figure
    until the engine reports its own. `context_tokens`: endless while unknown. `in_flight*`: ours, exact.
    `ttft_ewma_s`: of requests served, 0 before the first. `prefix_hit_ratio`: the engine's own since its start, 0..1.
    `observed_at_s`: time of the last good scrape.
    `routable`: every connected Envoy has acknowledged the address.
    """

    generation: npt.NDArray[np.int64]
    state: npt.NDArray[np.int8]
    routable: npt.NDArray[np.bool_]
    waiting: npt.NDArray[np.float64]
    running: npt.NDArray[np.float64]
    kv_used: npt.NDArray[np.float64]
    kv_capacity_tokens: npt.NDArray[np.float64]
    context_tokens: npt.NDArray[np.float64]
    in_flight: npt.NDArray[np.int64]
    in_flight_prompt_tokens: npt.NDArray[np.int64]
    in_flight_uncached_tokens: npt.NDArray[np.int64]
    error_ewma: npt.NDArray[np.float64]
    ttft_ewma_s: npt.NDArray[np.float64]
    prefix_hit_ratio: npt.NDArray[np.float64]
    observed_at_s: npt.NDArray[np.float64]

    def __init__(self, *, stale_after_s: float = 0.6, max_endpoints: int = 4096, initial_slots: int = 16) -> None:
        self.stale_after_s = stale_after_s
        self.max_endpoints = max_endpoints
        self.addresses: tuple[str | None, ...] = ()  # replaced, never changed: a decision may keep the one it saw
        self._slot_of: dict[str, int] = {}
        self._models: dict[int, frozenset[str]] = {}
        self._serving: dict[str, npt.NDArray[np.bool_]] = {}
        for name, dtype, default in _FIGURES:
            setattr(self, name, np.full(initial_slots, default, dtype))

    # -- slots

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slot_of.values())

    def slot_of(self, address: str) -> int | None:
        """The slot that holds `address` now, or None."""
        return self._slot_of.get(address)

    def add(self, address: str) -> int:
        """Give `address` a slot (its old one if it still has it). Raises TooManyEndpoints at the bound."""
        slot = self._slot_of.get(address)
        if slot is not None:
            return slot
        slot = self._free_slot()
        for name, _, default in _FIGURES:
            if name not in _KEPT_ON_REUSE:
                getattr(self, name)[slot] = default
        self.generation[slot] += 1
        self._name(slot, address)
        self._slot_of[address] = slot
        self.set_models(slot, frozenset())
        return slot

    def remove(self, slot: int) -> bool:
        """Free a stopped slot. False, and nothing changes, while anything is in flight on it."""
        if self.in_flight[slot]:
            return False
        address = self.addresses[slot]
        if address is not None:
            self._name(slot, None)
            del self._slot_of[address]
            self.state[slot] = State.STOPPED
            self.routable[slot] = False
            self.set_models(slot, frozenset())
        return True

    def _free_slot(self) -> int:
        for slot, address in enumerate(self.addresses):
            if address is None:
                return slot
        if len(self.addresses) >= self.max_endpoints:
            raise TooManyEndpoints(f"more than {self.max_endpoints} endpoints (limits.endpoints)")
        self.addresses += (None,)
        if len(self.addresses) > len(self.generation):
            self._grow()
        return len(self.addresses) - 1

    def _name(self, slot: int, address: str | None) -> None:
        self.addresses = (*self.addresses[:slot], address, *self.addresses[slot + 1 :])

    def _grow(self) -> None:
        size = 2 * len(self.generation)
        for name, dtype, default in _FIGURES:
            old = getattr(self, name)
            new = np.full(size, default, dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    # -- models

    def set_models(self, slot: int, models: frozenset[str]) -> None:
        """The names `slot` lists, adapters included."""
        if self._models.get(slot) != models:
            self._models[slot] = models
            self._serving.clear()

    def models(self, slot: int) -> frozenset[str]:
        """The names `slot` lists."""
        return self._models.get(slot, frozenset())

    def serving(self, model: str) -> npt.NDArray[np.bool_]:
        """Which slots list `model`, shape (slots,). Cached until any list changes; ask for configured names only."""
        serving = self._serving.get(model)
        if serving is None or len(serving) != len(self.generation):
            serving = np.array([model in self.models(slot) for slot in range(len(self.generation))], np.bool_)
            self._serving[model] = serving
        return serving

    # -- what requests take and give back

    def reserve(self, slot: int, *, prompt_tokens: int, uncached_tokens: int) -> Reservation:
        """Book one request on `slot`."""
        self._book(slot, 1, prompt_tokens, uncached_tokens)
        return Reservation(slot, int(self.generation[slot]), prompt_tokens, uncached_tokens)

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back. The caller (the Flight) makes sure it happens once."""
        if self.generation[reservation.slot] != reservation.generation:
            raise AssertionError("a slot was reused while a request was in flight on it")
        self._book(reservation.slot, -1, -reservation.prompt_tokens, -reservation.uncached_tokens)

    def move(self, reservation: Reservation, slot: int, *, uncached_tokens: int) -> Reservation:
        """Move a running request to the endpoint that really serves it."""
        self.release(reservation)
        return self.reserve(slot, prompt_tokens=reservation.prompt_tokens, uncached_tokens=uncached_tokens)

    def _book(self, slot: int, requests: int, prompt_tokens: int, uncached_tokens: int) -> None:
        self.in_flight[slot] += requests
        self.in_flight_prompt_tokens[slot] += prompt_tokens
        self.in_flight_uncached_tokens[slot] += uncached_tokens

    # -- reading

    def stale(self, slots: npt.NDArray[np.intp], now_s: float) -> npt.NDArray[np.bool_]:
        """Which of `slots` have no scrape younger than `stale_after_s`, shape (n,)."""
        return (now_s - self.observed_at_s[slots]) > self.stale_after_s

    def snapshot(self, slot: int) -> dict[str, Any]:
        """Every figure of one slot as plain Python values, for the admin API."""
        return {name: getattr(self, name)[slot].item() for name, _, _ in _FIGURES}
