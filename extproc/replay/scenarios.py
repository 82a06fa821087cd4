"""What is compared under: steady loads, and five disturbances of a fleet or its traffic.

A disturbance must not be won at the price of calm days, nor a calm day at the price of disturbances: each is one group
of the same table form. Loads are shares of a capacity that is measured on the group's own engines and trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.offline import Disturbance, Fleet
from extproc.replay.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What all policies are put through alike. `rate`: requests per second, or sessions of a trace that has them."""

    title: str
    trace: Trace
    fleet: Fleet
    rate: float


Capacity = Callable[[Trace, Fleet], float]
"""(trace, fleet) -> requests per second that it can take."""


def at_load(title: str, trace: Trace, fleet: Fleet, load: float, capacity: Capacity) -> Group:
    """A share of what the fleet can take."""
    return Group(title=title, trace=trace, fleet=fleet, rate=load * capacity(trace, fleet))


def disturbances(trace: Trace, fleet: Fleet, capacity: Capacity) -> list[Group]:
    """The five. The trace's requests must not wait for answers: half its span is where things happen."""
    half = fleet.engines // 2
    slowed = replace(fleet, speeds=(1.0,) * (fleet.engines - half) + (0.5,) * half)
    stale = replace(fleet, scrape_interval_s=5.0)
    flooded = flood(trace)
    groups = [
        at_load("half of the fleet at half speed, load 0.8", trace, slowed, 0.8, capacity),
        at_load("scraped figures 5 s stale, load 0.95", trace, stale, 0.95, capacity),
        _halfway("one engine joins cold, load 0.8", "join", trace, fleet, capacity),
        _halfway("one engine dies, load 0.8", "kill", trace, fleet, capacity),
        at_load("a flood on one prefix, load 0.4", flooded, fleet, 0.4, capacity),
    ]
    return [group for group in groups if fleet.engines > 1 or not group.fleet.disturbances]


def _halfway(title: str, what: str, trace: Trace, fleet: Fleet, capacity: Capacity) -> Group:
    group = at_load(title, trace, fleet, 0.8, capacity)
    at_s = 0.5 * len(trace.requests) / group.rate
    event = Disturbance(at_s=at_s, what="join" if what == "join" else "kill", engine=fleet.engines - 1)
    return replace(group, fleet=replace(fleet, disturbances=(event,)))


_HOT_TOKENS = 8192
_HOT_TAIL_TOKENS = 300
_HOT_OUTPUT_TOKENS = 100
_HOT_TIMES_BASE = 3.0
_HOT_FROM, _HOT_UNTIL = 0.4, 0.6


def flood(trace: Trace, seed: int = 0) -> Trace:
    """The trace, and for a fifth of its span three times as many requests more that all begin with the same 8k."""
    rng, names, size = Random(seed), BlockNames(f"flood {seed}"), trace.block_tokens
    hot = [names.of("hot", block) for block in range(_HOT_TOKENS // size)]
    prompt = _HOT_TOKENS + _HOT_TAIL_TOKENS
    at_s, more = _HOT_FROM * trace.span_s, []
    while at_s < _HOT_UNTIL * trace.span_s:
        at_s += rng.expovariate(_HOT_TIMES_BASE * trace.requests_per_s)
        blocks, full = names.fill(hot, (), prompt, _HOT_OUTPUT_TOKENS, size)
        more.append(TraceRequest(at_s, prompt, _HOT_OUTPUT_TOKENS, blocks, full))
    together = sorted([*trace.requests, *more], key=lambda request: request.arrives_s)
    return replace(trace, name=f"{trace.name} with a flood", requests=together)
