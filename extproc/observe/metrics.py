"""Every Prometheus name of ours. The only module that knows them.

Children of labelled metrics are looked up once and kept; figures that already live in FleetState and Flights are read
when Prometheus asks, at no cost to requests. Label values are bounded: pools and endpoints by the config's limits,
reasons by an enum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.wire.messages import Phase
from policies.fleet_state import FleetState
from policies.lifecycle import State

_STAGE_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 40, 80)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


disable_created_metrics()  # type: ignore[no-untyped-call] # else a second series stands beside every counter


class Metrics:
    """The registry and everything counted in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests()
        self._wire()
        self._fleet()

    # -- the families

    def _requests(self) -> None:
        self._decisions = self._counter("decisions", "Requests routed", "pool", "endpoint", "reason")
        self._refusals = self._counter("refusals", "Requests answered with an error by us", "reason", "status")
        self._answers = self._counter("answers", "Requests answered by us without an engine", "what")
        self._stages = self._histogram("stage_seconds", "Time of one step of the decision", _STAGE_BUCKETS_S, "stage")
        self._prompt_tokens = self._counter("prefix_prompt_tokens", "Estimated prompt tokens routed", "pool")
        self._matched_tokens = self._counter("prefix_matched_tokens", "Of these, believed cached where routed", "pool")
        self._fallbacks = self._counter("fallbacks", "Decisions made on less than full knowledge", "reason")
        self._moved = self._counter("requests_moved", "Requests served elsewhere than first chosen", "pool")
        self._attempts_failed = self._counter("attempts_failed", "Tries an endpoint failed", "endpoint", "why")
        self._no_known_address = self._counter("no_known_address", "503: Envoy knew none of the picked addresses")
        self._completions = self._counter("completions", "Finished requests by outcome", "pool", "outcome")
        self._ttft = self._histogram("ttft_seconds", "First body byte from the engine", _TTFT_BUCKETS_S, "pool")
        self._duration = self._histogram("request_seconds", "Whole request", _DURATION_BUCKETS_S, "pool")
        self._tokens = self._counter("usage_tokens", "Tokens as the engines report them", "pool", "kind")

    def _wire(self) -> None:
        self._messages = self._counter("ext_proc_messages", "ext_proc messages from Envoy", "phase")
        self._malformed = self._counter("malformed_messages", "gRPC payloads that are not protocol messages", "service")
        self._entries = self._counter("access_log_entries", "Access-log entries", "kind", "result")
        self._envoy_answers = self._counter("envoy_answers", "Requests Envoy answered itself, undecided", "status")
        self._missing = self._counter("access_log_missing", "Finished requests whose entry never came")
        self._xds = self._counter("xds_messages", "xDS messages", "event", "type")
        self._xds_sessions = self._gauge("xds_sessions", "Envoys connected for xDS")
        self._reloads = self._counter("config_reloads", "Config reloads", "result")
        self._generation = self._gauge("config_generation", "Generation in force")

    def _fleet(self) -> None:
        self._transitions = self._counter("endpoint_transitions", "Life-cycle changes", "endpoint", "to")
        self._restarts = self._counter("endpoint_restarts", "Engine restarts seen", "endpoint")
        self._refused_endpoints = self._counter("endpoints_refused", "Endpoints beyond limits.endpoints", "pool")
        self._scrapes = self._counter("scrapes", "Reads of an engine's metrics", "result")
        self._probes = self._counter("probes", "Reads of an engine's model list", "result")
        self._discoveries = self._counter("discoveries", "Reads of a discovery source", "pool", "result")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pointsman_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pointsman_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(f"pointsman_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)

    def observe_state(
        self, state: FleetState, streams: Callable[[], dict[str, float]], now: Callable[[], float]
    ) -> None:
        """Expose what FleetState and the stream counts hold whenever Prometheus asks."""
        self.registry.register(_StateCollector(state, streams, now))

    def page(self) -> bytes:
        """The text page."""
        return generate_latest(self.registry)

    # -- requests

    def decided(self, pool: str, endpoint: str, reason: str, prompt_tokens: int, matched_tokens: int) -> None:
        """One request was routed."""
        self._decision_child(pool, endpoint, reason).inc()
        self._pool_child(self._prompt_tokens, pool).inc(prompt_tokens)
        if matched_tokens:
            self._pool_child(self._matched_tokens, pool).inc(matched_tokens)

    @cache  # noqa: B019 - one Metrics lives as long as the process; bounded by pools x endpoints
    def _decision_child(self, pool: str, endpoint: str, reason: str) -> Counter:
        return self._decisions.labels(pool, endpoint, reason)

    @cache  # noqa: B019 - same
    def _pool_child(self, counter: Counter, pool: str) -> Counter:
        return counter.labels(pool)

    @cache  # noqa: B019 - same
    def stage(self, name: str) -> Histogram:
        """The histogram of one step's seconds; hold on to it."""
        return self._stages.labels(name)

    def refused_with(self, reason: str, status: int) -> None:
        """We answered with an error."""
        self._refusals.labels(reason, str(status)).inc()

    def answered(self, what: str) -> None:
        """We answered without an engine."""
        self._answers.labels(what).inc()

    def fell_back(self, reason: str) -> None:
        """A decision rested on less than it should."""
        self._fallbacks.labels(reason).inc()

    def moved(self, pool: str) -> None:
        """Another endpoint serves than the one chosen."""
        self._moved.labels(pool).inc()

    def attempt_failed(self, endpoint: str, why: str) -> None:
        """An endpoint failed a request."""
        self._attempts_failed.labels(endpoint, why).inc()

    def completed(self, pool: str, outcome: str, ttft_s: float | None, duration_s: float | None) -> None:
        """A request's access-log entry came."""
        self._completions.labels(pool, outcome).inc()
        if ttft_s is not None:
            self._ttft.labels(pool).observe(ttft_s)
        if duration_s is not None:
            self._duration.labels(pool).observe(duration_s)

    def used_tokens(self, pool: str, kind: str, tokens: int | None) -> None:
        """Tokens of one kind, as the engine's usage says."""
        if tokens:
            self._tokens.labels(pool, kind).inc(tokens)

    # -- wire

    def message(self, phase: Phase) -> None:
        """One ext_proc message came."""
        self._message_child(phase).inc()

    @cache  # noqa: B019 - one Metrics lives as long as the process; seven phases
    def _message_child(self, phase: Phase) -> Counter:
        return self._messages.labels(phase.name.lower())

    def malformed(self, service: str) -> None:
        """Bytes came that are no message of the protocol."""
        self._malformed.labels(service).inc()

    def entry(self, *, kind: str, result: str) -> None:
        """One access-log entry came."""
        self._entries.labels(kind, result).inc()

    def entry_missing(self) -> None:
        """An access-log entry did not come in time."""
        self._missing.inc()

    def answered_by_envoy(self, status: int) -> None:
        """Envoy answered a request itself."""
        self._envoy_answers.labels(str(status)).inc()

    def no_known_address(self) -> None:
        """Envoy knew none of the picked addresses."""
        self._no_known_address.inc()

    def xds(self, event: str, type_name: str) -> None:
        """One xDS message was pushed, acknowledged or rejected."""
        self._xds.labels(event, type_name).inc()

    def xds_sessions(self, count: int) -> None:
        """How many Envoys are connected."""
        self._xds_sessions.set(count)

    def reloaded(self, *, ok: bool) -> None:
        """A changed config was read."""
        self._reloads.labels("ok" if ok else "rejected").inc()

    def generation_in_force(self, generation: int) -> None:
        """Which generation is in force now."""
        self._generation.set(generation)

    # -- fleet

    def endpoint_changed(self, address: str, before: State, after: State) -> None:  # noqa: ARG002 - FleetEvents
        """An endpoint entered another state."""
        self._transitions.labels(address, after.name.lower()).inc()

    def endpoint_gone(self, address: str) -> None:
        """Drop the endpoint's series, or every address a fleet ever had would stay."""
        for family in (self._decisions, self._attempts_failed, self._transitions, self._restarts):
            for labels in [key for key in family._metrics if address in key]:  # noqa: SLF001 - no public way to list
                family.remove(*labels)
        self._decision_child.cache_clear()

    def endpoint_restarted(self, address: str) -> None:
        """An engine restarted."""
        self._restarts.labels(address).inc()

    def endpoint_refused(self, pool: str) -> None:
        """An endpoint was not taken."""
        self._refused_endpoints.labels(pool).inc()

    def scraped(self, *, ok: bool) -> None:
        """A scrape was tried."""
        self._scrapes.labels(_result(ok=ok)).inc()

    def probed(self, *, ok: bool) -> None:
        """A probe was tried."""
        self._probes.labels(_result(ok=ok)).inc()

    def discovered(self, pool: str, *, ok: bool) -> None:
        """A discovery source was read."""
        self._discoveries.labels(pool, _result(ok=ok)).inc()


def _result(*, ok: bool) -> str:
    return "ok" if ok else "failed"


_ENDPOINT_GAUGES = (
    ("in_flight", "in_flight", "Requests in flight, our own count"),
    ("in_flight_prompt_tokens", "in_flight_prompt_tokens", "Estimated prompt tokens in flight"),
    ("endpoint_waiting", "waiting", "Requests waiting in the engine, scraped"),
    ("endpoint_running", "running", "Requests running in the engine, scraped"),
    ("endpoint_kv_used_ratio", "kv_used", "KV cache in use, scraped"),
    ("endpoint_kv_capacity_tokens", "kv_capacity_tokens", "KV cache size in tokens"),
    ("endpoint_error_ratio", "error_ewma", "Share of failed requests, EWMA"),
)


class _StateCollector(Collector):
    """Gauges read from FleetState and stream counts when asked."""

    def __init__(self, state: FleetState, streams: Callable[[], dict[str, float]], now: Callable[[], float]) -> None:
        self._state = state
        self._streams = streams
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        slots = [(slot, str(self._state.addresses[slot])) for slot in self._state]
        for name, column, text in _ENDPOINT_GAUGES:
            figures = getattr(self._state, column)
            yield _gauge(name, text, ("endpoint",), [((address,), float(figures[slot])) for slot, address in slots])
        yield self._states(slots)
        yield from self._staleness(slots)
        yield from self._stream_counts()

    def _states(self, slots: list[tuple[int, str]]) -> Metric:
        samples = [
            ((address, state.name.lower()), float(self._state.state[slot] == state))
            for slot, address in slots
            for state in State
        ]
        return _gauge("endpoint_state", "1 for the state the endpoint is in", ("endpoint", "state"), samples)

    def _staleness(self, slots: list[tuple[int, str]]) -> Iterable[Metric]:
        now_s = self._now()
        ages = {address: now_s - float(self._state.observed_at_s[slot]) for slot, address in slots}
        seen = [((address,), age) for address, age in ages.items() if age < float("inf")]
        stale = [((address,), float(age > self._state.stale_after_s)) for address, age in ages.items()]
        yield _gauge("endpoint_observed_age_seconds", "Age of the last good scrape", ("endpoint",), seen)
        yield _gauge("endpoint_stale", "1 while scores rest on our own accounting", ("endpoint",), stale)

    def _stream_counts(self) -> Iterable[Metric]:
        for name, value in self._streams().items():
            if name.endswith("_total"):
                family: Metric = CounterMetricFamily(f"pointsman_{name.removesuffix('_total')}", name, value=value)
            else:
                family = GaugeMetricFamily(f"pointsman_{name}", name, value=value)
            yield family


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"pointsman_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
