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
from policies.types import Floats, Mask

Filter: TypeAlias = Callable[[View], Mask]


def ready(view: View) -> Mask:
    """In state Ready and acknowledged by every connected Envoy."""
    state = view.state
    mask: Mask = (state.state[view.slots] == State.READY) & state.routable[view.slots]
    return mask


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


def context(view: View) -> Mask:
    """Has a context window that holds the estimated prompt.

    The estimate is ours, the verdict the engine's: when no window is large enough the largest stay, and the engine
    answers with its exact count.
    """
    window = _windows(view)
    fits: Mask = window >= _needed_tokens(view)
    return fits if fits.any() else window == window.max()


def exceeds_context(view: View) -> bool:
    """By our estimate the request fits none of the candidates' windows."""
    return bool(_windows(view).max() < _needed_tokens(view))


def _windows(view: View) -> Floats:
    """Context windows in tokens; unknown ones count as endless."""
    window = view.state.context_tokens[view.slots]
    return np.where(window > 0, window, np.inf)


def _needed_tokens(view: View) -> int:
    # An answer may be cut at the window's end, as vLLM does; only the prompt must fit whole.
    return view.request.input_tokens


FILTERS: dict[str, Filter] = {"ready": ready, "model": model, "excluded": excluded, "context": context}
"""Filters by the name a config uses."""
