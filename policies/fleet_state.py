"""FleetState: what is known of every endpoint, as numpy arrays indexed by slot.

One writer (the decision loop), many readers. Scraped figures carry the time they were observed, so a scorer can
tell a stale one; our own in-flight counts are exact and never stale. The few figures that every decision reads stand in
an object per endpoint as well, since compiled loops over these beat arrays; all others do not, since interpreted ones
are slow (14 us at 256 endpoints where arrays take 2.3). Set aside: shared memory between workers (no single authority
for counts and queues).

Slots carry a generation. A slot is handed to another address only when nothing is in flight on it, so a late
release can never be booked to a stranger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.lifecycle import State
from policies.past import Moment, Past
from policies.types import Floats, Reservation, one_by_one

_FIGURES: tuple[tuple[str, type[np.generic], float], ...] = (
    # name, dtype, value of a slot nobody has observed yet
    ("generation", np.int64, 0),
    ("state", np.int8, State.STOPPED),
    ("routable", np.bool_, False),
    ("traffic_share", np.float64, 1),
    ("waiting", np.float64, 0),
    ("running", np.float64, 0),
    ("kv_used", np.float64, 0),
    ("kv_capacity_tokens", np.float64, 131_072),
    ("context_tokens", np.float64, np.inf),
    ("in_flight", np.float64, 0),
    ("in_flight_prompt_tokens", np.float64, 0),
    ("in_flight_uncached_tokens", np.int64, 0),
    ("error_ewma", np.float64, 0),
    ("ttft_1m_s", np.float64, 0),
    ("ttft_1m_weight", np.float64, 0),
    ("ttft_5m_s", np.float64, 0),
    ("ttft_5m_weight", np.float64, 0),
    ("ttft_at_s", np.float64, 0),
    ("prefix_hit_ratio", np.float64, 0),
    ("generated_tokens_per_s", np.float64, 0),
    ("prefilled_tokens_per_s", np.float64, 0),
    ("preemptions_per_s", np.float64, 0),
    ("observed_at_s", np.float64, -np.inf),
    ("silence_s", np.float64, 0),
    ("kv_full_in_s", np.float64, np.inf),
    ("kv_alarm", np.bool_, False),
    ("has_metrics", np.bool_, True),
    ("foreign", np.float64, 0),
    ("others_lately", np.float64, 0),
    ("waiting_level", np.float64, 0),
    ("running_level", np.float64, 0),
    ("kv_used_level", np.float64, 0),
    ("in_flight_level", np.float64, 0),
    ("in_flight_prompt_tokens_level", np.float64, 0),
    ("weight", np.float64, 1),
    ("cost", np.float64, 0),
    ("remote", np.bool_, False),
    ("avoided", np.bool_, False),
    ("max_adapters", np.float64, 0),
    ("most_running", np.float64, 0),
    ("index_scale", np.float64, 1),
    ("gpu_used", np.float64, np.nan),
    ("gpu_memory_used", np.float64, np.nan),
)
_KEPT_ON_REUSE = ("generation",)
_LOAD = ("in_flight", "in_flight_prompt_tokens", "kv_capacity_tokens", "foreign")
"""Rows of one array: nearly every decision takes the first three or all of them, of the same slots."""
_GUARDED = (*_LOAD, "state", "routable", "context_tokens")
"""Whoever takes these arrays may write to them; see FleetState."""
_COUNTS = ("in_flight", "in_flight_prompt_tokens")
"""Whole numbers, though policies calculate with them as floats."""


_INTERNAL = {"ttft_1m_weight", "ttft_5m_weight", "ttft_at_s", "silence_s", "most_running", "others_lately"} | {
    name for name, _, _ in _FIGURES if name.endswith("_level")
}
_LEVELS = tuple(
    (name, f"{name}_level") for name in ("waiting", "running", "kv_used", "in_flight", "in_flight_prompt_tokens")
)
_FEWEST_FOREIGN = 1.0
"""Fewer are a difference between two counts taken at different moments, not requests."""
_LEVEL_S = 5.0
"""Seconds over which levels are smoothed: about as late as figures come where scrapes are slow."""
_OTHERS_S = 0.5
"""And over which others' requests are seen to have gone, or ours would wait for room that is there."""
SOURCES = ("push", "scrape", "none")
"""Where an endpoint's figures come from."""
MINUTE_S, FIVE_MINUTES_S = 60.0, 300.0
"""After so long an observed TTFT counts 1/e."""


class _NamesBySlot:
    """A set of names per slot, and which slots have a name. The masks are kept until any set changes."""

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str]] = {}
        self._slots_having: dict[str, npt.NDArray[np.bool_]] = {}
        self._counts: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def put(self, slot: int, names: frozenset[str]) -> None:
        """`slot` has exactly these."""
        if self._names.get(slot, frozenset()) != names:
            self._names[slot] = names
            self._slots_having.clear()
            self._counts = np.empty(0, np.int64)

    def of(self, slot: int) -> frozenset[str]:
        """What `slot` has."""
        return self._names.get(slot, frozenset())

    def having(self, name: str, size: int) -> npt.NDArray[np.bool_]:
        """Which of the first `size` slots have `name`, shape (size,)."""
        mask = self._slots_having.get(name)
        if mask is None or len(mask) != size:
            mask = np.array([name in self.of(slot) for slot in range(size)], np.bool_)
            self._slots_having[name] = mask
        return mask

    def count(self, size: int) -> npt.NDArray[np.int64]:
        """How many each of the first `size` slots has, shape (size,)."""
        if len(self._counts) != size:
            self._counts = np.array([len(self.of(slot)) for slot in range(size)], np.int64)
        return self._counts


class Load:
    """Of one endpoint what every decision reads. Written by FleetState alone."""

    def __init__(self) -> None:
        self.in_flight = 0.0
        self.prompt_tokens = 0.0
        self.kv_capacity_tokens = 0.0
        self.foreign = 0.0


class TooManyEndpoints(Exception):
    """The fleet has more endpoints than `limits.endpoints` allows."""


class FleetState:
    """Named arrays over endpoint slots; see the module's page for who writes them.

    `waiting`, `running`: requests in the engine, scraped. `kv_used`: 0..1. `kv_capacity_tokens`: the pool's figure
    until the engine reports its own. `context_tokens`: endless while unknown. `in_flight*`: ours, exact.
    `ttft_1m_s`, `ttft_5m_s`: means of requests served, fading over one minute and five; 0 before the first. Their
    weights are in requests, as of `ttft_at_s`. `prefix_hit_ratio`: of the prompt tokens an engine was asked for in its
    last seconds at work, the share it found cached, 0..1; `*_per_s`: its own counters over the last seconds.
    `observed_at_s`: time of the newest figures. `silence_s`: so long an engine that pushes them may be silent, since
    nothing changes; 0 for one that is scraped. `kv_full_in_s`, `kv_alarm`: see kv_forecast.py.
    `*_level`: the same figures smoothed, the engine's and, by the same measure, ours: what has changed since shows in
    the difference of ours (see `scraped`).
    `weight`, `cost`: the operator's, of the endpoint. `remote`: it is in another zone than we are. `avoided`: too many
    requests failed in its zone. `max_adapters`, `most_running`: adapters and requests that it runs at once, at most; 0
    while it has not said. `index_scale`: of the cache it reports, what its index holds.
    `gpu_used`, `gpu_memory_used`: 0..1, of the engine's GPUs; not a number where nobody tells.
    `routable`: every connected Envoy has acknowledged the address. `traffic_share`: below 1 while it warms up, or is
    degraded.
    `foreign`: requests in the engine that are none of ours: another router's, or ours from before our restart;
    `others_lately`: the same by the last half second alone, and below 0 where our count is ahead of the figures.
    `has_metrics`: false for an engine that has none to scrape.
    What every decision reads stands in a Load by slot as well, which compiled code reads in a hundredth of the time.
    Who takes one of these arrays may write to it: so the Loads are filled anew then, at the next decision, and what
    follows from states is found again (`standing`). Take it anew to write again, and do not take it to decide.
    Of all: `busy_above`: requests at one endpoint, and what is above it is left alone; `refuses_when_busy`: also where
    all are. `avoids_zones`: some endpoints are `avoided`.
    """

    generation: npt.NDArray[np.int64]
    _state: npt.NDArray[np.int8]
    _routable: npt.NDArray[np.bool_]
    traffic_share: npt.NDArray[np.float64]
    waiting: npt.NDArray[np.float64]
    running: npt.NDArray[np.float64]
    kv_used: npt.NDArray[np.float64]
    _kv_capacity_tokens: npt.NDArray[np.float64]
    _context_tokens: npt.NDArray[np.float64]
    _in_flight: npt.NDArray[np.float64]
    _in_flight_prompt_tokens: npt.NDArray[np.float64]
    in_flight_uncached_tokens: npt.NDArray[np.int64]
    error_ewma: npt.NDArray[np.float64]
    ttft_1m_s: npt.NDArray[np.float64]
    ttft_1m_weight: npt.NDArray[np.float64]
    ttft_5m_s: npt.NDArray[np.float64]
    ttft_5m_weight: npt.NDArray[np.float64]
    ttft_at_s: npt.NDArray[np.float64]
    prefix_hit_ratio: npt.NDArray[np.float64]
    generated_tokens_per_s: npt.NDArray[np.float64]
    prefilled_tokens_per_s: npt.NDArray[np.float64]
    preemptions_per_s: npt.NDArray[np.float64]
    observed_at_s: npt.NDArray[np.float64]
    silence_s: npt.NDArray[np.float64]
    kv_full_in_s: npt.NDArray[np.float64]
    kv_alarm: npt.NDArray[np.bool_]
    has_metrics: npt.NDArray[np.bool_]
    _foreign: npt.NDArray[np.float64]
    others_lately: npt.NDArray[np.float64]
    waiting_level: npt.NDArray[np.float64]
    running_level: npt.NDArray[np.float64]
    kv_used_level: npt.NDArray[np.float64]
    in_flight_level: npt.NDArray[np.float64]
    in_flight_prompt_tokens_level: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]
    cost: npt.NDArray[np.float64]
    remote: npt.NDArray[np.bool_]
    avoided: npt.NDArray[np.bool_]
    max_adapters: npt.NDArray[np.float64]
    most_running: npt.NDArray[np.float64]
    index_scale: npt.NDArray[np.float64]
    gpu_used: npt.NDArray[np.float64]
    gpu_memory_used: npt.NDArray[np.float64]

    def __init__(self, *, stale_after_s: float = 0.6, max_endpoints: int = 4096, initial_slots: int = 16) -> None:
        self.stale_after_s = stale_after_s
        self.standing = 0  # of states, addresses known to Envoy and context windows: another with each change
        self.max_endpoints = max_endpoints
        self.busy_above = math.inf
        self.refuses_when_busy = False
        self.avoids_zones = False
        self.addresses: tuple[str | None, ...] = ()  # replaced, never changed: a decision may keep the one it saw
        self._slot_of: dict[str, int] = {}
        self._models = _NamesBySlot()
        self.adapters = _NamesBySlot()
        """Adapters listed, running, and waiting for a place, by slot."""
        self.running_adapters = _NamesBySlot()
        self.waiting_adapters = _NamesBySlot()
        self._size = 0
        self._loads: list[Load] = []
        self._loaded = False  # these say what the arrays say
        self._past = Past()
        self._foreign_slots = 0
        self._grow(initial_slots)

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
        self._forget_names(slot)
        return slot

    def remove(self, slot: int) -> bool:
        """Free a stopped slot. False, and nothing changes, while anything is in flight on it."""
        if self._in_flight[slot]:
            return False
        address = self.addresses[slot]
        if address is not None:
            self._name(slot, None)
            del self._slot_of[address]
            self.state[slot] = State.STOPPED
            self.routable[slot] = False
            self._forget_names(slot)
        return True

    def _free_slot(self) -> int:
        for slot, address in enumerate(self.addresses):
            if address is None:
                return slot
        if len(self.addresses) >= self.max_endpoints:
            raise TooManyEndpoints(f"more than {self.max_endpoints} endpoints (limits.endpoints)")
        self.addresses += (None,)
        if len(self.addresses) > self._size:
            self._grow(2 * self._size)
        return len(self.addresses) - 1

    def _name(self, slot: int, address: str | None) -> None:
        self.addresses = (*self.addresses[:slot], address, *self.addresses[slot + 1 :])

    def _grow(self, size: int) -> None:
        load = np.empty((len(_LOAD), size))
        rows = dict(zip(_LOAD, load, strict=True))
        for name, dtype, default in _FIGURES:
            attribute = f"_{name}" if name in _GUARDED else name
            new = rows[name] if name in rows else np.empty(size, dtype)
            new[:] = default
            old = getattr(self, attribute, new[:0])
            new[: len(old)] = old
            setattr(self, attribute, new)
        self._size = size
        self._load: npt.NDArray[np.float64] = load
        self._generations: Any = one_by_one(self.generation)
        self._booked: Any = one_by_one(self._in_flight)
        self._booked_prompt_tokens: Any = one_by_one(self._in_flight_prompt_tokens)
        self._booked_uncached_tokens: Any = one_by_one(self.in_flight_uncached_tokens)
        self._foreign_at: Any = one_by_one(self._foreign)
        self._levels: list[tuple[Any, Any]] = [
            (getattr(self, f"_{name}" if name in _GUARDED else name), getattr(self, level)) for name, level in _LEVELS
        ]
        self._loaded = False

    def _forget_names(self, slot: int) -> None:
        for names in (self._models, self.adapters, self.running_adapters, self.waiting_adapters):
            names.put(slot, frozenset())

    # -- models

    def set_models(self, slot: int, models: frozenset[str], adapters: frozenset[str] = frozenset()) -> None:
        """The names `slot` lists, and which of them are adapters."""
        self._models.put(slot, models)
        self.adapters.put(slot, adapters)

    def models(self, slot: int) -> frozenset[str]:
        """The names `slot` lists."""
        return self._models.of(slot)

    def serving(self, model: str) -> npt.NDArray[np.bool_]:
        """Which slots list `model`, shape (slots,). Ask for configured names only: the answers are kept."""
        return self._models.having(model, self._size)

    # -- what is observed

    def scraped(self, slot: int, *, waiting: float, running: float, kv_used: float, now_s: float) -> None:
        """An engine's figures, as they were at best `now_s`.

        Beside the figures themselves their smoothed level is kept, and that of our own counts by the same measure. A
        figure is late, and by how much nobody knows; a policy that sent everybody to the apparently emptier endpoint
        would fill it until the next figures, and swing. Level plus what our own counts have changed against theirs is
        what the figure is now, to the best of our knowledge, and moves with the very request that is sent.
        """
        age_s = now_s - self.observed_at_s.item(slot)
        share = 1 - math.exp(-age_s / _LEVEL_S)  # the first time it is the whole
        self.waiting[slot], self.running[slot], self.kv_used[slot] = waiting, running, kv_used
        self.observed_at_s[slot] = now_s
        for figures, levels in self._levels:  # by Python's floats: numpy's scalars take three times as long
            before = levels.item(slot)
            levels[slot] = before + share * (figures.item(slot) - before)
        self._see_others(slot, waiting + running, age_s)

    def _see_others(self, slot: int, total: float, age_s: float) -> None:
        """What of an engine's requests is none of ours. It is believed slowly, and its end soon.

        One count is late against the other, so levels are compared; but those of a flood that is over stay high for
        long. So it is never more than the engine's `total`, nor than the difference of the last few figures.
        """
        before, now = self.others_lately.item(slot), total - self._in_flight.item(slot)
        lately = before + (1 - math.exp(-age_s / _OTHERS_S)) * (now - before)
        self.others_lately[slot] = lately
        levels = self.waiting_level.item(slot) + self.running_level.item(slot) - self.in_flight_level.item(slot)
        others = min(levels, lately, total)
        foreign = others if others >= _FEWEST_FOREIGN else 0.0
        load = self.loads()[slot]
        self._foreign_slots += (foreign > 0.0) - (load.foreign > 0.0)
        load.foreign = self._foreign_at[slot] = foreign

    def timed(self, slot: int, ttft_s: float, now_s: float) -> None:
        """A request's first byte came after `ttft_s`."""
        passed_s = max(0.0, now_s - self.ttft_at_s.item(slot))
        self.ttft_at_s[slot] = now_s
        _follow(self.ttft_1m_s, self.ttft_1m_weight, slot, ttft_s, math.exp(-passed_s / MINUTE_S))
        _follow(self.ttft_5m_s, self.ttft_5m_weight, slot, ttft_s, math.exp(-passed_s / FIVE_MINUTES_S))

    # -- what requests take and give back

    def reserve(self, slot: int, *, prompt_tokens: int, uncached_tokens: int) -> Reservation:
        """Book one request on `slot`."""
        self._book(slot, 1, prompt_tokens, uncached_tokens)
        return Reservation(slot, self._generations[slot], prompt_tokens, uncached_tokens)

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back. The caller (the Flight) makes sure it happens once."""
        if self._generations[reservation.slot] != reservation.generation:
            raise AssertionError("a slot was reused while a request was in flight on it")
        self._book(reservation.slot, -1, -reservation.prompt_tokens, -reservation.uncached_tokens)

    def move(self, reservation: Reservation, slot: int, *, uncached_tokens: int) -> Reservation:
        """Move a running request to the endpoint that really serves it."""
        self.release(reservation)
        return self.reserve(slot, prompt_tokens=reservation.prompt_tokens, uncached_tokens=uncached_tokens)

    def _book(self, slot: int, requests: int, prompt_tokens: int, uncached_tokens: int) -> None:
        load = self.loads()[slot]
        load.in_flight += requests
        load.prompt_tokens += prompt_tokens
        self._past.write(slot, load.in_flight, load.prompt_tokens, load.kv_capacity_tokens)
        self._booked[slot] = load.in_flight
        self._booked_prompt_tokens[slot] = load.prompt_tokens
        self._booked_uncached_tokens[slot] += uncached_tokens

    # -- reading

    def load(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Of each of `slots` requests and prompt tokens in flight and KV capacity in tokens, shape (3, n)."""
        return self._load[:3].take(slots, 1)

    def moment(self) -> Moment:
        """The same figures of all slots, to be read later as they are now."""
        if not self._loaded:
            self._fill_loads()
        return self._past.now(self._load[:3])

    def foreign_of(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Of each of `slots` the requests that are none of ours, shape (n,)."""
        return self._foreign[slots]

    def loads(self) -> list[Load]:
        """What the next decision reads, by slot."""
        if not self._loaded:
            self._fill_loads()
        return self._loads

    def _fill_loads(self) -> None:
        while len(self._loads) < self._size:
            self._loads.append(Load())
        columns: list[list[float]] = self._load.T.tolist()
        self._foreign_slots = 0
        for load, column in zip(self._loads, columns, strict=True):
            load.in_flight, load.prompt_tokens = column[0], column[1]
            load.kv_capacity_tokens, load.foreign = column[2], column[3]
            self._foreign_slots += load.foreign > 0.0
        self._loaded = True
        self._past.lose()

    @property
    def has_foreign(self) -> bool:
        """Some engine has requests that are none of ours."""
        if not self._loaded:
            self._fill_loads()
        return self._foreign_slots > 0

    # -- arrays that are read in Loads, or by what follows from them

    @property
    def in_flight(self) -> npt.NDArray[np.float64]:
        """Our requests."""
        self._loaded = False
        return self._in_flight

    @property
    def in_flight_prompt_tokens(self) -> npt.NDArray[np.float64]:
        """Tokens of their prompts."""
        self._loaded = False
        return self._in_flight_prompt_tokens

    @property
    def kv_capacity_tokens(self) -> npt.NDArray[np.float64]:
        """Size of the KV cache."""
        self._loaded = False
        return self._kv_capacity_tokens

    @property
    def foreign(self) -> npt.NDArray[np.float64]:
        """Requests that are none of ours."""
        self._loaded = False
        return self._foreign

    @property
    def state(self) -> npt.NDArray[np.int8]:
        """State of the endpoint."""
        self.standing += 1
        return self._state

    @property
    def routable(self) -> npt.NDArray[np.bool_]:
        """Every connected Envoy knows its address."""
        self.standing += 1
        return self._routable

    @property
    def context_tokens(self) -> npt.NDArray[np.float64]:
        """Size of the context window."""
        self.standing += 1
        return self._context_tokens

    def states_of(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int8]:
        """The states of these, to read."""
        return self._state[slots]

    def routable_of(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of these every connected Envoy knows, to read."""
        return self._routable[slots]

    def windows_of(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """The context windows of these, to read."""
        return self._context_tokens[slots]

    def window(self, slot: int) -> float:
        """The context window of one slot."""
        return self._context_tokens.item(slot)

    def stale(self, slots: npt.NDArray[np.intp], now_s: float) -> npt.NDArray[np.bool_]:
        """Which of `slots` have no figures younger than `stale_after_s` or their silence, shape (n,)."""
        return (now_s - self.observed_at_s[slots] - self.silence_s[slots]) > self.stale_after_s

    def source(self, slot: int, now_s: float) -> str:
        """Where an endpoint's figures come from now: push, scrape, or none."""
        if self.stale(np.array([slot], np.intp), now_s)[0]:
            return "none"
        return "push" if self.silence_s[slot] else "scrape"

    def figures(self, name: str) -> npt.NDArray[Any]:
        """All of one kind, to read: where that matters, taking the attribute counts as writing."""
        found: npt.NDArray[Any] = getattr(self, f"_{name}" if name in _GUARDED else name)
        return found

    def snapshot(self, slot: int) -> dict[str, Any]:
        """Every figure of one slot that means something outside, as plain values, for the admin API; None: unknown."""
        figures = {name: self.figures(name)[slot].item() for name, _, _ in _FIGURES if name not in _INTERNAL}
        figures |= {name: int(figures[name]) for name in _COUNTS}
        return {name: None if figure != figure else figure for name, figure in figures.items()}


def _follow(means: Floats, weights: Floats, slot: int, seen: float, kept: float) -> None:
    """One more of what a slot's mean is of; of the weight of those before so much is `kept`."""
    weights[slot] = answers = weights.item(slot) * kept + 1
    before = means.item(slot)
    means[slot] = before + (seen - before) / answers
