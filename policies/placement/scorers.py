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


Scorer: TypeAlias = Callable[[View, Windows], Floats]

_SPILL_SLACK_REQUESTS = 2.0
"""On top of the factor: at a mean load of one or two, a multiple of it would spill at every second request."""


def prefix_affinity(view: View, windows: Windows) -> Floats:
    """Square of the share of the prompt that the endpoint already holds; nothing for an overloaded holder.

    Squared, because a short common system prompt must not pull every session to one endpoint, while a long history
    should bind. A holder of the whole prompt may carry `spill_factor` squared times the mean load (and two requests)
    before it loses its affinity; a holder of little hardly more than the mean. So new sessions spill first and
    running ones last.
    """
    if not view.matched_tokens.any():
        return view.matched_tokens
    share = np.minimum(1.0, view.matched_tokens / max(1, view.request.input_tokens))
    load = view.in_flight
    mean = load.sum() / len(load)
    allowed = mean + share * ((windows.spill_factor**2 - 1) * mean + _SPILL_SLACK_REQUESTS)
    return np.where(load > allowed, 0.0, share * share)


def queue_depth(view: View, windows: Windows) -> Floats:
    """Empty share of the queue window: scraped waiting requests, our own in-flight where the scrape is stale."""
    waiting = view.state.waiting[view.slots]
    if view.any_stale:
        waiting = view.fresh_or(waiting, view.in_flight * (windows.queue_window / windows.concurrency_window))
    return 1 - np.minimum(1.0, waiting / windows.queue_window)


def kv_usage(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Free share of the KV cache: scraped, or estimated from our prompts in flight where the scrape is stale."""
    used = view.state.kv_used[view.slots]
    if view.any_stale:
        used = view.fresh_or(used, view.kv_claimed)
    return 1 - np.minimum(1.0, used)


def in_flight_tokens(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Share of the KV capacity not claimed by prompts in flight."""
    return 1 - np.minimum(1.0, view.kv_claimed)


def least_request(view: View, windows: Windows) -> Floats:
    """Free share of the concurrency window, by our own count."""
    return 1 - np.minimum(1.0, view.in_flight / windows.concurrency_window)


def running_batch(view: View, windows: Windows) -> Floats:
    """Room in the engine's running batch: scraped, our own count where the scrape is stale."""
    running = view.state.running[view.slots]
    if view.any_stale:
        running = view.fresh_or(running, view.in_flight)
    return 1 - np.minimum(1.0, running / windows.concurrency_window)


SCORERS: dict[str, Scorer] = {
    "prefix_affinity": prefix_affinity,
    "queue_depth": queue_depth,
    "kv_usage": kv_usage,
    "in_flight_tokens": in_flight_tokens,
    "least_request": least_request,
    "running_batch": running_batch,
}
"""Scorers by the name a config uses."""

AFFINITY_SCORERS = frozenset({"prefix_affinity"})
"""Scorers whose joint share of the total weight is bounded by `max_affinity_share`."""
