"""Figures that are kept elsewhere, as samples: read from FleetState, the flights, the pools, the breakers when asked.

Not here: what is counted (metrics.py, tallies.py). The page may be made in another thread: FleetState is read by its
tuple of addresses, which is replaced and never changed, and never by taking an array that it may be written by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.breaking import BreakerFigures
from policies.fleet_state import SOURCES, FleetState
from policies.lifecycle import State
from policies.pool_load import PoolLoad

_ENDPOINT_GAUGES = (
    ("in_flight", "in_flight", "Requests in flight, our own count"),
    ("in_flight_prompt_tokens", "in_flight_prompt_tokens", "Estimated prompt tokens in flight"),
    ("endpoint_waiting", "waiting", "Requests waiting in the engine, scraped"),
    ("endpoint_running", "running", "Requests running in the engine, scraped"),
    ("endpoint_kv_used_ratio", "kv_used", "KV cache in use, scraped"),
    ("endpoint_kv_full_in_seconds", "kv_full_in_s", "Until the KV cache is full, by its trend; +Inf if never"),
    ("endpoint_kv_alarm", "kv_alarm", "1 while the KV cache is fuller than scrape.kv_alarm"),
    ("endpoint_kv_capacity_tokens", "kv_capacity_tokens", "KV cache size in tokens"),
    ("endpoint_error_ratio", "error_ewma", "Share of failed requests, EWMA"),
    ("endpoint_ttft_seconds", "ttft_1m_s", "First byte from the engine, mean fading over a minute"),
    ("endpoint_prefix_hit_ratio", "prefix_hit_ratio", "Prompt tokens the engine found cached, of late"),
    ("endpoint_gpu_used_ratio", "gpu_used", "Its GPUs' time at work, by the DCGM exporter"),
    ("endpoint_gpu_memory_used_ratio", "gpu_memory_used", "Its GPUs' memory in use, by the DCGM exporter"),
    ("prefix_index_scale", "index_scale", "Size of its prefix index, as a share of the cache it reports"),
    ("endpoint_generation_tokens_per_second", "generated_tokens_per_s", "Tokens generated, by the engine's count"),
    ("endpoint_prompt_tokens_per_second", "prefilled_tokens_per_s", "Prompt tokens taken in, by the engine's count"),
    ("endpoint_preemptions_per_second", "preemptions_per_s", "Requests pushed out of a full cache"),
)


_POOL_GAUGES = (
    ("pool_requests", "requests", "Requests in flight and waiting, our own count"),
    ("pool_places", "places", "Requests that its endpoints in service can run at once"),
    ("pool_load_ratio", "ratio", "The one over the other"),
)


class StateCollector(Collector):
    """Gauges read from FleetState and stream counts when asked."""

    def __init__(
        self,
        state: FleetState,
        streams: Callable[[], dict[str, float]],
        now: Callable[[], float],
        loads: Callable[[], dict[str, PoolLoad]],
    ) -> None:
        self._state = state
        self._loads = loads
        self._streams = streams
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        slots = [(slot, address) for slot, address in enumerate(self._state.addresses) if address is not None]
        for name, column, text in _ENDPOINT_GAUGES:
            figures = self._state.figures(column)
            known = [(slot, address) for slot, address in slots if figures[slot] == figures[slot]]  # else not a number
            yield _gauge(name, text, ("endpoint",), [((address,), float(figures[slot])) for slot, address in known])
        yield self._states(slots)
        yield from self._staleness(slots)
        yield from self._stream_counts()
        yield from self._pool_loads()

    def _pool_loads(self) -> Iterable[Metric]:
        loads = self._loads().items()
        for name, figure, text in _POOL_GAUGES:
            yield _gauge(name, text, ("pool",), [((pool,), float(getattr(load, figure))) for pool, load in loads])

    def _states(self, slots: list[tuple[int, str]]) -> Metric:
        states = self._state.figures("state")
        samples = [
            ((address, state.name.lower()), float(states[slot] == state)) for slot, address in slots for state in State
        ]
        return _gauge("endpoint_state", "1 for the state the endpoint is in", ("endpoint", "state"), samples)

    def _staleness(self, slots: list[tuple[int, str]]) -> Iterable[Metric]:
        now_s = self._now()
        ages = {address: now_s - float(self._state.observed_at_s[slot]) for slot, address in slots}
        seen = [((address,), age) for address, age in ages.items() if age < float("inf")]
        is_stale = self._state.stale(np.array([slot for slot, _ in slots], np.intp), now_s)
        stale = [
            ((address,), float(late))
            for (slot, address), late in zip(slots, is_stale, strict=True)
            if self._state.has_metrics[slot]
        ]
        yield _gauge("endpoint_observed_age_seconds", "Age of the newest figures", ("endpoint",), seen)
        yield _gauge("endpoint_stale", "1 while scores rest on our own accounting", ("endpoint",), stale)
        yield self._sources(slots, now_s)

    def _sources(self, slots: list[tuple[int, str]], now_s: float) -> Metric:
        told = [(address, self._state.source(slot, now_s)) for slot, address in slots]
        samples = [((address, one), float(one == source)) for address, source in told for one in SOURCES]
        return _gauge("endpoint_figures_source", "1 for where figures come from", ("endpoint", "source"), samples)

    def _stream_counts(self) -> Iterable[Metric]:
        for name, value in self._streams().items():
            if name.endswith("_total"):
                family: Metric = CounterMetricFamily(f"pointsman_{name.removesuffix('_total')}", name, value=value)
            else:
                family = GaugeMetricFamily(f"pointsman_{name}", name, value=value)
            yield family


class BreakerCollector(Collector):
    """Where breakers stand, and how often they opened, when asked."""

    def __init__(self, figures: Callable[[], list[BreakerFigures]]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Two families for each kind."""
        figures = self._figures()
        for kind, label in (("model", "pool"), ("zone", "zone")):
            text = "0 closed, 1 half-open, 2 open"
            position = GaugeMetricFamily(f"pointsman_{kind}_breaker", text, labels=(label,))
            trips = CounterMetricFamily(f"pointsman_{kind}_breaker_trips", "Times it opened", labels=(label,))
            for one in figures:
                if one.kind == kind:
                    position.add_metric((one.name,), one.position)
                    trips.add_metric((one.name,), one.trips)
            yield from (position, trips)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"pointsman_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
