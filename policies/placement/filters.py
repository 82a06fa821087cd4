"""Hard constraints: which endpoints may take this request at all.

A filter only removes; no score brings an endpoint back. Each returns a mask over the view's candidates. `ready` and
`model` always apply; the rest are named by the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from policies.lifecycle import State
from policies.placement.view import View
from policies.types import Mask

Filter: TypeAlias = Callable[[View], Mask]


def ready(view: View) -> Mask:
    """In state Ready or Warming, and acknowledged by every connected Envoy.

    A warming one is left out by chance, so that its share of the requests is what it can bear; unless it is all there
    is.
    """
    state, slots = view.state, view.slots
    states = state.state[slots]
    takes: Mask = (states == State.READY) & state.routable[slots]
    warming = (states == State.WARMING) & state.routable[slots]
    if not warming.any():
        return takes
    drawn = np.array([view.rng.random() for _ in range(len(slots))])
    some: Mask = takes | (warming & (drawn < state.traffic_share[slots]))
    return some if some.any() else warming


def model(view: View) -> Mask:
    """Lists the request's model."""
    return view.state.serving(view.request.model)[view.slots]


def excluded(view: View) -> Mask:
    """Not named by the request as one to avoid."""
    unwanted = view.request.excluded
    if not unwanted:
        return np.ones(len(view.slots), np.bool_)
    addresses = view.state.addresses
    return np.fromiter((addresses[slot] not in unwanted for slot in view.slots), np.bool_, len(view.slots))


def subset(view: View) -> Mask:
    """Among the addresses the gateway allows; an entry without a port allows every port of its host."""
    allowed = view.request.subset
    if allowed is None:
        return np.ones(len(view.slots), np.bool_)
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


FILTERS: dict[str, Filter] = {
    "ready": ready,
    "model": model,
    "subset": subset,
    "excluded": excluded,
    "context": context,
}
"""Filters by the name a config uses."""
