"""Hard constraints: which endpoints may take this request at all.

A filter only removes; no score brings an endpoint back. Each returns a mask over the view's candidates, or None to
keep them all. `ready`, `model` and `subset` always apply, and so do, after all others, `busy` and `zone`; the rest are
named by the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.view import View
from policies.types import Filtered, InferenceRequest, Mask, Slots

_READY, _WARMING, _DEGRADED = int(State.READY), int(State.WARMING), int(State.DEGRADED)
"""As numpy compares them: with members of an enum each comparison takes five times as long."""

Filter: TypeAlias = Callable[[View], Mask | None]


def ready(view: View) -> Mask | None:
    """In state Ready, Warming or Degraded, and acknowledged by every connected Envoy.

    The latter two are left out by chance, so that their share of the requests is what they can bear; unless they are
    all there is.
    """
    state, slots = view.state, view.slots
    takes: Mask = (state.states_of(slots) == _READY) & state.routable_of(slots)
    if np.count_nonzero(takes) == len(takes):  # the usual case; it counts in a tenth of the time of all()
        return None
    in_part = _in_part(view)
    if not in_part.any():
        return takes
    drawn = np.array([view.rng.random() for _ in range(len(slots))])
    some: Mask = takes | (in_part & (drawn < state.traffic_share[slots]))
    return some if some.any() else in_part


def _in_part(view: View) -> Mask:
    """Takes a share of the requests."""
    states = view.state.states_of(view.slots)
    some: Mask = ((states == _WARMING) | (states == _DEGRADED)) & view.state.routable_of(view.slots)
    return some


def model(view: View) -> Mask:
    """Lists the request's model."""
    return view.state.serving(view.request.model)[view.slots]


def excluded(view: View) -> Mask | None:
    """Not named by the request as one to avoid."""
    unwanted = view.request.excluded
    if not unwanted:
        return None
    addresses = view.state.addresses
    return np.fromiter((addresses[slot] not in unwanted for slot in view.slots), np.bool_, len(view.slots))


def subset(view: View) -> Mask | None:
    """Among the addresses the gateway allows; an entry without a port allows every port of its host."""
    allowed = view.request.subset
    if allowed is None:
        return None
    addresses = [str(view.state.addresses[slot]) for slot in view.slots]
    return np.array([address in allowed or address.rpartition(":")[0] in allowed for address in addresses], np.bool_)


def context(view: View) -> Mask:
    """Has a context window that holds the estimated prompt; an answer may be cut at its end, as vLLM does.

    The estimate is ours, the verdict the engine's: when no window is large enough the largest stay, and the engine
    answers with its exact count.
    """
    window = view.state.windows_of(view.slots)
    fits: Mask = window >= view.request.input_tokens
    return fits if fits.any() else window == window.max()


def exceeds_context(view: View) -> bool:
    """By our estimate the request fits none of the candidates' windows."""
    return bool(view.state.windows_of(view.slots).max() < view.request.input_tokens)


def busy(view: View) -> Mask | None:
    """Has no more requests, ours and others', than an endpoint may have; where all have, the fleet's word decides.

    One that waits for room finds none too busy.
    """
    state = view.state
    if view.request.may_wait or state.busy_above == np.inf:
        return None
    free: Mask = view.in_flight + view.foreign <= state.busy_above
    return free if free.any() or state.refuses_when_busy else None


def zone(view: View) -> Mask | None:
    """In a zone that is not avoided for its errors, as long as there is one."""
    if not view.state.avoids_zones:
        return None
    kept: Mask = ~view.state.avoided[view.slots]
    return kept if kept.any() else None


STANDING: tuple[tuple[str, Filter], ...] = (("ready", ready), ("model", model))
"""Filters that look at the fleet and the model alone; they come first."""


@dataclass(init=False, eq=False)
class Standing:
    """Which endpoints of a pool may take requests for a model, as the fleet stands: None for all; and who may not.

    `serving`: who listed the model when that was found. `window_tokens`: the smallest context window of those left.
    """

    serving: Mask
    mask: Mask | None
    filtered: Filtered
    window_tokens: float

    def __init__(self, serving: Mask, mask: Mask | None, filtered: Filtered, window_tokens: float) -> None:
        self.serving = serving
        self.mask = mask
        self.filtered = filtered
        self.window_tokens = window_tokens

    def suffices(self, request: InferenceRequest, state: FleetState) -> bool:
        """No other filter has anything to say of such a request. To be kept true for whatever FILTERS has."""
        return (
            not request.excluded
            and request.subset is None
            and request.input_tokens <= self.window_tokens
            and state.busy_above == inf
            and not state.avoids_zones
        )


class Roll:
    """The first two filters' verdicts on a pool, kept until something changes that they depend on.

    They cost as much as all else that is done to choose, and change a few times a minute. Who writes what they depend
    on need not tell: FleetState counts who takes its arrays (`FleetState.standing`).
    """

    def __init__(self) -> None:
        self._seen = -1
        self._slots: Slots | None = None
        self._addresses: tuple[str | None, ...] = ()
        self._by_model: dict[str, Standing] = {}
        self._by_chance = False

    def standing(self, view: View) -> Standing | None:
        """By the view over the whole pool. None where chance is to decide each time, as for those that warm up."""
        state, name = view.state, view.request.model
        if view.slots is not self._slots or state.addresses is not self._addresses or state.standing != self._seen:
            self._slots, self._addresses, self._seen = view.slots, state.addresses, state.standing
            self._by_chance = bool(_in_part(view).any())
            self._by_model.clear()
        if self._by_chance:
            return None
        known = self._by_model.get(name)
        if known is None or known.serving is not state.serving(name):
            known = self._by_model[name] = _standing(view)
        return known


def _standing(view: View) -> Standing:
    there, filtered = sift(view, STANDING)
    mask = None if there is view else np.isin(view.slots, there.slots)
    window = view.state.windows_of(there.slots).min(initial=np.inf)
    return Standing(view.state.serving(view.request.model), mask, filtered, float(window))


def sift(view: View, filters: Iterable[tuple[str, Filter]], filtered: Filtered = ()) -> tuple[View, Filtered]:
    """The view over those that all filters keep, and who was left out by which, added to `filtered`."""
    for name, keep in filters:
        if not len(view.slots):
            break
        mask = keep(view)
        if mask is None or np.count_nonzero(mask) == len(mask):
            continue
        filtered = (*filtered, *named(name, view.take(~mask)))
        view = view.take(mask)
    return view, filtered


def named(name: str, removed: View) -> Filtered:
    """What an explanation says of those that a filter removed; nothing if there are none."""
    addresses = removed.state.addresses
    return ((name, tuple([str(addresses[slot]) for slot in removed.slots])),) if len(removed.slots) else ()


FILTERS: dict[str, Filter] = {
    "ready": ready,
    "model": model,
    "subset": subset,
    "excluded": excluded,
    "context": context,
    "busy": busy,
    "zone": zone,
}
"""Filters by the name a config uses."""
