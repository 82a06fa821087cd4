"""Preferences among the endpoints that may take a request: each scorer gives [0, 1] per candidate, higher is better.

Scores are on absolute scales (a share of a window or capacity), not stretched between the best and the worst
candidate: a stretch makes queues of 0 and 1 look as far apart as 0 and 500.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from policies.placement.view import View
from policies.types import Floats


@dataclass(frozen=True, slots=True)
class Windows:
    """The scales of the scorers; field meanings as in the config's policy section."""

    queue_window: int = 10
    concurrency_window: int = 64
    spill_factor: float = 1.25
    spill_slack_requests: float = 2.0


Scorer: TypeAlias = Callable[[View, Windows], Floats]


def prefix_affinity(view: View, windows: Windows) -> Floats:
    """Square of the share of the prompt that the endpoint already holds; nothing for an overloaded holder.

    Squared, because a short common system prompt must not pull every session to one endpoint, while a long history
    should bind. A holder of the whole prompt may carry `spill_factor` squared times the mean load before it loses its
    affinity, a holder of little only `spill_factor`: so new sessions spill first and running ones last.
    """
    share = np.minimum(1.0, view.matched_tokens / max(1, view.request.input_tokens))
    load = view.state.in_flight[view.slots]
    mean = load.mean()
    factor = 1 + (windows.spill_factor**2 - 1) * share
    overloaded = load > factor * mean + windows.spill_slack_requests * share
    return np.where(overloaded, 0.0, share * share)


def queue_depth(view: View, windows: Windows) -> Floats:
    """Empty share of the queue window: scraped waiting requests, our own in-flight where the scrape is stale."""
    state, slots = view.state, view.slots
    ours = state.in_flight[slots].astype(np.float64) * (windows.queue_window / windows.concurrency_window)
    waiting = view.fresh_or(state.waiting[slots], ours)
    return 1 - np.minimum(1.0, waiting / windows.queue_window)


def kv_usage(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Free share of the KV cache: scraped, or estimated from our prompts in flight where the scrape is stale."""
    state, slots = view.state, view.slots
    return 1 - np.minimum(1.0, view.fresh_or(state.kv_used[slots], _our_kv_share(view)))


def in_flight_tokens(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Share of the KV capacity not claimed by prompts in flight."""
    return 1 - np.minimum(1.0, _our_kv_share(view))


def least_request(view: View, windows: Windows) -> Floats:
    """Free share of the concurrency window, by our own count."""
    return 1 - np.minimum(1.0, view.state.in_flight[view.slots] / windows.concurrency_window)


def _our_kv_share(view: View) -> Floats:
    state, slots = view.state, view.slots
    capacity = state.kv_capacity_tokens[slots]
    return state.in_flight_prompt_tokens[slots] / np.where(capacity > 0, capacity, 131_072)


SCORERS: dict[str, Scorer] = {
    "prefix_affinity": prefix_affinity,
    "queue_depth": queue_depth,
    "kv_usage": kv_usage,
    "in_flight_tokens": in_flight_tokens,
    "least_request": least_request,
}
"""Scorers by the name a config uses."""

AFFINITY_SCORERS = frozenset({"prefix_affinity"})
"""Scorers whose joint share of the total weight is bounded by `max_affinity_share`."""
