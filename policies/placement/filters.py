"""Hard constraints: which endpoints may take this request at all.

A filter only removes; no score brings an endpoint back. Each returns a mask over the view's candidates, or None to
keep them all. `ready`, `model` and `subset` always apply, and so do, after all others, `busy` and `zone`; the rest are
named by the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from policies.lifecycle import State
from policies.placement.view import View
from policies.types import Mask

_READY, _WARMING, _DEGRADED = int(State.READY), int(State.WARMING), int(State.DEGRADED)
"""As numpy compares them: with members of an enum each comparison takes five times as long."""

Filter: TypeAlias = Callable[[View], Mask | None]


def ready(view: View) -> Mask | None:
    """In state Ready, Warming or Degraded, and acknowledged by every connected Envoy.

    The latter two are left out by chance, so that their share of the requests is what they can bear; unless they are
    all there is.
    """
    state, slots = view.state, view.slots
    states = state.state[slots]
    takes: Mask = (states == _READY) & state.routable[slots]
    if np.count_nonzero(takes) == len(takes):  # the usual case; it counts in a tenth of the time of all()
        return None
    in_part = ((states == _WARMING) | (states == _DEGRADED)) & state.routable[slots]
    if not in_part.any():
        return takes
    drawn = np.array([view.rng.random() for _ in range(len(slots))])
    some: Mask = takes | (in_part & (drawn < state.traffic_share[slots]))
    return some if some.any() else in_part


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
    window = view.state.context_tokens[view.slots]
    fits: Mask = window >= view.request.input_tokens
    return fits if fits.any() else window == window.max()


def exceeds_context(view: View) -> bool:
    """By our estimate the request fits none of the candidates' windows."""
    return bool(view.state.context_tokens[view.slots].max() < view.request.input_tokens)


def busy(view: View) -> Mask | None:
    """Has no more requests, ours and others', than an endpoint may have; where all have, the fleet's word decides."""
    state = view.state
    if state.busy_above == np.inf:
        return None
    free: Mask = view.in_flight + view.foreign <= state.busy_above
    return free if free.any() or state.refuses_when_busy else None


def zone(view: View) -> Mask | None:
    """In a zone that is not avoided for its errors, as long as there is one."""
    if not view.state.avoids_zones:
        return None
    kept: Mask = ~view.state.avoided[view.slots]
    return kept if kept.any() else None


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
