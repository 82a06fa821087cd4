"""Preferences among the endpoints that may take a request: each scorer gives [0, 1] per candidate, higher is better.

Scores are on absolute scales (a share of a window or capacity), not stretched between the best and the worst
candidate: a stretch makes queues of 0 and 1 look as far apart as 0 and 500. The exceptions have no scale of their own:
latency, throughput and cost are told as a share of the best or dearest candidate's.

Scraped figures are late. They are used as a level that our own requests since then are added to (View), so that no
scorer sends everybody to whom the last scrape found empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from policies.fleet_state import FIVE_MINUTES_S, MINUTE_S
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
    """Empty share of the queue window: waiting in the engine; by our own in-flight where the scrape is stale."""
    window: Floats | float = windows.queue_window
    if view.any_stale:
        window = np.where(view.stale, windows.concurrency_window, windows.queue_window)
    return 1 - np.minimum(1.0, view.waiting / window)


def kv_usage(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Free share of the KV cache."""
    return 1 - np.minimum(1.0, view.kv_used)


def in_flight_tokens(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Share of the KV capacity not claimed by prompts in flight."""
    return 1 - np.minimum(1.0, view.kv_claimed)


def least_request(view: View, windows: Windows) -> Floats:
    """Free share of the concurrency window, by our own count."""
    return 1 - np.minimum(1.0, view.in_flight / windows.concurrency_window)


def running_batch(view: View, windows: Windows) -> Floats:
    """Room in the engine's running batch."""
    return 1 - np.minimum(1.0, view.running / windows.concurrency_window)


def throughput_headroom(view: View, windows: Windows) -> Floats:
    """Prefill tokens a second that the endpoint can still take, as a share of what the fastest one does at all.

    Its learned rate, less the part it needs for its backlog within the horizon, less the occupied part of its batch.
    """
    rate, wait_s = view.ledger.prefill(view.slots, view.now_s)
    free = 1 - np.minimum(1.0, wait_s / _HORIZON_S)
    batch = 1 - np.minimum(1.0, view.in_flight / windows.concurrency_window)
    headroom: Floats = rate * free * batch / rate.max()
    return headroom


_HORIZON_S = 5.0
"""Backlog that takes this long leaves no headroom."""


def latency(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """The best expected time to first token over the endpoint's own; see `expected_ttft_s`."""
    expected_s = expected_ttft_s(view)
    score: Floats = expected_s.min() / expected_s
    return score


def expected_ttft_s(view: View) -> Floats:
    """What the first token took of late, times requests in flight and this one: "peak EWMA", as in Finagle.

    The last minute leads; the less happened in it, the more count the last five, and in the end what the fastest
    candidate takes: an endpoint that was slow, or failed, an hour ago must get a chance to show what it is now. The
    requests in flight are there because the observed times are late by their own length: without them everybody
    follows the fastest of a minute ago.
    """
    state, slots = view.state, view.slots
    passed_s = np.maximum(view.now_s - state.ttft_at_s[slots], 0.0)
    recent = state.ttft_1m_weight[slots] * np.exp(-passed_s / MINUTE_S)
    longer = state.ttft_5m_weight[slots] * np.exp(-passed_s / FIVE_MINUTES_S)
    known = longer > 0
    fastest = float(state.ttft_5m_s[slots][known].min()) if known.any() else 1.0
    backstop = (longer * state.ttft_5m_s[slots] + fastest) / (longer + 1)
    leading = (recent * state.ttft_1m_s[slots] + backstop) / (recent + 1)
    expected: Floats = np.maximum(leading, _SHORTEST_TTFT_S) * (1 + view.in_flight)
    return expected


_SHORTEST_TTFT_S = 1e-3
"""A shorter one is not told from another."""


def error_rate(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Share of the last ten or so requests that went well."""
    return 1 - view.state.error_ewma[view.slots]


def warm_up(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """How warm the endpoint is."""
    return view.state.traffic_share[view.slots]


def zone(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """1 in our own zone or where zones are not known, 0 in another."""
    return np.where(view.state.remote[view.slots], 0.0, 1.0)


def cost(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """Saving against the dearest candidate, as a share of what that one costs; 1 for all where nobody costs."""
    costs = view.state.cost[view.slots]
    dearest = costs.max()
    saving: Floats = 1 - costs / (dearest or 1.0)
    return saving


def lora_affinity(view: View, windows: Windows) -> Floats:  # noqa: ARG001 - one signature for every scorer
    """For an adapter: runs there 1, waits for a place there 0.8, a place is free 0.6, none is 0.

    A free place means loading the adapter, none means that another must go first. 1 for all if it is no adapter.
    """
    state, slots, name, size = view.state, view.slots, view.request.model, len(view.state.generation)
    listed = state.adapters.having(name, size)[slots]
    if not listed.any():
        return np.ones(len(slots))
    running = state.running_adapters.having(name, size)[slots]
    waiting = state.waiting_adapters.having(name, size)[slots]
    taken = state.running_adapters.count(size)[slots]
    full = (state.max_adapters[slots] > 0) & (taken >= state.max_adapters[slots])
    score: Floats = np.select([running, waiting, ~full], [1.0, 0.8, 0.6], 0.0)
    return score


SCORERS: dict[str, Scorer] = {
    "prefix_affinity": prefix_affinity,
    "queue_depth": queue_depth,
    "kv_usage": kv_usage,
    "in_flight_tokens": in_flight_tokens,
    "least_request": least_request,
    "running_batch": running_batch,
    "throughput_headroom": throughput_headroom,
    "latency": latency,
    "error_rate": error_rate,
    "warm_up": warm_up,
    "zone": zone,
    "cost": cost,
    "lora_affinity": lora_affinity,
}
"""Scorers by the name a config uses."""

AFFINITY_SCORERS = frozenset({"prefix_affinity", "lora_affinity"})
"""Scorers whose joint share of the total weight is bounded by `max_affinity_share`."""
