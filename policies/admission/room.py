"""Which endpoints have room for one more request, as seen from here: what any more would get is a wait in there.

By our own accounts: the work an endpoint has still to prefill, the requests it runs, the KV cache their prompts take.
Of the engine's own figures only two count: requests that are not ours, and a KV cache about to be full. Rejected:
thresholds on scraped queue lengths. They tell of an engine's queue when it is there already, and a scrape late.

Not here: who goes where there is room (binding.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.admission.class_use import ClassUse
from policies.admission.queue import ClassSpec
from policies.placement.view import View
from policies.types import Floats, Mask


@dataclass(frozen=True, slots=True)
class RoomSpec:
    """An endpoint has room while it has less than `busy_s` of prefill to do, and its batch and cache have places.

    `endpoint_requests`: no more at once, beside what the profile says of the engine's batch. `kv_full_in_s`: a cache
    that will be full so soon has no room. One that warms up or is degraded has its share of all that.
    """

    busy_s: float = 1.0
    endpoint_requests: float = math.inf
    kv_full_in_s: float = 2.0


def with_room(view: View, spec: RoomSpec) -> Mask:
    """Which candidates have room for any request at all, shape (n,)."""
    ledger, slots = view.ledger, view.slots
    _, wait_s = ledger.prefill(slots, view.now_s)
    at_leisure = wait_s < spec.busy_s * _shares(view)
    filling = (view.state.kv_full_in_s[slots] < spec.kv_full_in_s) & (_running(view) > 0)
    room: Mask = with_places(view, spec) & at_leisure & ~filling
    return room


def with_places(view: View, spec: RoomSpec) -> Mask:
    """Whose batch has a place for one more, shape (n,), though its prefill may have to wait."""
    places: Mask = _running(view) < min(spec.endpoint_requests, view.ledger.profile.max_num_seqs) * _shares(view)
    return places


def _running(view: View) -> Floats:
    return view.in_flight + view.foreign


def _shares(view: View) -> Floats:
    """Of what the best of them may have: where all are cold nobody waits for a warm one."""
    shares = view.state.traffic_share[view.slots]
    relative: Floats = shares / shares.max(initial=0.0)
    return relative


def cache_holds(view: View, prompt_tokens: float | Floats) -> Mask:
    """Whose KV cache has a place for so long a prompt: an empty one for any. (n,), or (w, n) for prompts (w, 1)."""
    holds: Mask = view.prompt_tokens_in_flight + prompt_tokens <= view.kv_capacity
    held: Mask = holds | (view.in_flight == 0)
    return held


def class_has_room(view: View, spec: ClassSpec, use: ClassUse, tokens: float | Floats) -> Mask:
    """Where a class has not yet all that it may have, for a request of so many tokens: (n,), or (w, n) for (w, 1).

    What has nothing of the class takes one request of it, however long.
    """
    running = use.requests(spec.name, view.slots)
    claimed = use.tokens(spec.name, view.slots) + tokens
    in_share = (claimed <= spec.endpoint_kv_share * view.kv_capacity) | (running == 0)
    room: Mask = (running < spec.endpoint_requests) & in_share
    return room
