"""Every Prometheus name of ours, but of what collectors.py reads elsewhere. No other module knows them.

Children of labelled metrics are looked up once and kept; figures that already live in FleetState and Flights are read
when Prometheus asks, at no cost to requests. Label values are bounded: pools and endpoints by the config's limits,
reasons by an enum; the series of a pool or an endpoint that is gone go too.

Events are counted on the decision loop alone. The page may be made in another thread: Prometheus' own classes lock,
and what every request raises is plain numbers (counting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from extproc import __version__, is_compiled
from extproc.breaking import BreakerFigures
from extproc.observe.collectors import BreakerCollector, StateCollector
from extproc.observe.counting import Series, Times, TimesByValue
from extproc.observe.loop_lag import LoopLag
from extproc.observe.tallies import Counts, Tally, TimesByLabel
from extproc.senses.messages import Indexed
from extproc.wire.messages import Phase
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.pool_load import PoolLoad

_STAGE_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 40, 80)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


_Family = TypeVar("_Family", Counter, Gauge, Histogram)
_Child = tuple[Counter | Gauge | Histogram, tuple[str, ...]]
"""What names a series: its family and the values of its labels."""

disable_created_metrics()  # type: ignore[no-untyped-call] # else a second series stands beside every counter


class Metrics:
    """The registry and everything counted in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU, memory, descriptors; only on Linux
        build = Info("pointsman_build", "What runs here", registry=self.registry)
        build.info({"version": __version__, "compiled": str(is_compiled()).lower()})
        self._label_names: dict[Counter | Gauge | Histogram, tuple[str, ...]] = {}
        self._children: dict[_Child, Counter | Gauge | Histogram] = {}
        self._plain: list[Counts | TimesByLabel] = []
        self._children_of: dict[tuple[str, str], set[_Child]] = {}  # by ("pool", name) and ("endpoint", address)
        self._indexed_pools: frozenset[str] = frozenset()
        self._requests()
        self._wire()
        self._fleet()

    # -- the families

    def _requests(self) -> None:
        self._decisions = self._counts("decisions", "Requests routed", "pool", "endpoint", "reason")
        self._refusals = self._counter("refusals", "Requests answered with an error by us", "reason", "status")
        self._answers = self._counter("answers", "Requests answered by us without an engine", "what")
        self._stages = self._times("stage_seconds", "Time of one step of the decision", "stage", _STAGE_BUCKETS_S)
        self._prompt_tokens = self._counts("prefix_prompt_tokens", "Estimated prompt tokens routed", "pool")
        self._matched_tokens = self._counts("prefix_matched_tokens", "Of these, believed cached where routed", "pool")
        self._predicted_tokens = self._counts(
            "prefix_predicted_tokens", "Prompt tokens believed cached, of answers that tell what was", "pool"
        )
        self._found_tokens = self._counts("prefix_found_tokens", "Prompt tokens found cached, of the same", "pool")
        self._fallbacks = self._counter("fallbacks", "Decisions made on less than full knowledge", "reason")
        self._moved = self._counter("requests_moved", "Requests served elsewhere than first chosen", "pool")
        self._retries = self._counter("retries", "Tries of requests beyond the first", "pool")
        self._attempts_failed = self._counter("attempts_failed", "Tries an endpoint failed", "endpoint", "why")
        self._no_known_address = self._counter("no_known_address", "503: Envoy knew none of the picked addresses")
        self._completions = self._counts("completions", "Finished requests by outcome", "pool", "outcome")
        self._ttft = self._times("ttft_seconds", "First body byte from the engine", "pool", _TTFT_BUCKETS_S)
        self._duration = self._times("request_seconds", "Whole request", "pool", _DURATION_BUCKETS_S)
        self._tenant_tokens = self._counter(
            "tenant_tokens", "Tokens charged to tenants; those not named are one", "tenant", "source"
        )
        self._usage_asked = self._counter(
            "stream_usage", "Streams of tenants, by who asked for their usage, where we do if nobody else", "asked_by"
        )
        self._patterns_found = self._counter(
            "guard_patterns", "Prompts in which a pattern of the guard was found", "pattern", "action"
        )
        self._searched_partly = self._counter("guard_searched_partly", "Prompts longer than what is searched of one")
        self._unknown_clients = self._counter(
            "guard_unknown_clients", "Requests not limited: nobody says whose they are"
        )
        self._queue_requests = self._gauge("queue_requests", "Requests that wait", "pool", "class")
        self._queue_bytes = self._gauge("queue_bytes", "Bodies of those that wait", "pool")
        self._queue_left = self._counter(
            "queue_left", "Requests that wait no more, or could not", "pool", "class", "how"
        )
        self._queue_wait = self._histogram(
            "queue_wait_seconds", "How long they waited", _DURATION_BUCKETS_S, "pool", "class"
        )
        self._tokens = self._counts("usage_tokens", "Tokens as the engines report them", "pool", "kind")

    def _wire(self) -> None:
        phases = [phase.name.lower() for phase in Phase]
        messages = Tally("pointsman_ext_proc_messages", "ext_proc messages from Envoy", "phase", phases)
        self.registry.register(messages)
        self._messages = messages.counts
        self._malformed = self._counter("malformed_messages", "gRPC payloads that are not protocol messages", "service")
        self._lane_connections = self._gauge("lane_connections", "Connections of our own Envoy to the lane's sockets")
        self._lane_failures = self._counter("lane_failures", "Lane connections ended by a broken protocol", "code")
        self._large_bodies = self._counter("large_bodies", "Large bodies, to be read between small ones", "result")
        self._entries = self._counts("access_log_entries", "Access-log entries", "kind", "result")
        self._envoy_answers = self._counter("envoy_answers", "Requests Envoy answered itself, undecided", "status")
        self._missing = self._counter("access_log_missing", "Finished requests whose entry never came")
        self._xds = self._counter("xds_messages", "xDS messages", "event", "type")
        self._xds_sessions = self._gauge("xds_sessions", "Envoys connected for xDS")
        self._reloads = self._counter("config_reloads", "Config reloads", "result")
        for result in ("ok", "rejected"):
            self._reloads.labels(result)  # shown from the start: `increase()` does not see a series appear at 1
        self._key_files = self._counter("api_key_file_reads", "Reads of the API key file", "result")
        self._unlogged = self._counter("request_log_lost", "Lines of the request log not written", "why")
        self._generation = self._gauge("config_generation", "Generation in force")

    def _fleet(self) -> None:
        self._transitions = self._counter("endpoint_transitions", "Life-cycle changes", "endpoint", "to")
        self._endpoint_trips = self._counter(
            "endpoint_breaker_trips", "Times too many requests of an endpoint had failed", "endpoint", "result"
        )
        self._restarts = self._counter("endpoint_restarts", "Engine restarts seen", "endpoint")
        self._engine_finished = self._counter(
            "engine_finished", "Requests engines ended, by their own count", "endpoint", "reason"
        )
        self._refused_endpoints = self._counter("endpoints_refused", "Endpoints beyond limits.endpoints", "pool")
        self._scrapes = self._counts("scrapes", "Reads of an engine's metrics", "result")
        self._exports = self._counter("gpu_reads", "Reads of a host's DCGM exporter", "result")
        self._probes = self._counts("probes", "Reads of an engine's model list", "result")
        self._senses_up = self._gauge("senses_up", "1 while the process that watches the engines can be heard")
        self._senses_losses = self._counter("senses_losses", "Times it fell or hung, and was started again")
        self._senses_dropped = self._counter("senses_dropped", "Reports it could not hand over in time")
        self._index_blocks = self._gauge("precise_index_blocks", "KV blocks known from the engines' events", "pool")
        self._index_blind = self._gauge(
            "precise_index_blind_endpoints", "Endpoints of which it is not known all what they hold", "pool"
        )
        self._kv_events = self._counter(
            "kv_events", "Batches of KV events, and what went wrong with them", "pool", "what"
        )
        self._acquitted = self._counter(
            "endpoints_acquitted", "500s that a second endpoint answered as well: the request's fault", "endpoint"
        )
        self._pushes = self._counter("pushes", "Messages of the engines' plugins", "endpoint", "result")
        self._push_troubles = self._counter(
            "push_troubles", "Figures that an endpoint's plugin could not take from its engine", "endpoint"
        )
        self._trials = self._counter("trials", "Generations asked of endpoints that take no traffic", "result")
        self._discoveries = self._counter("discoveries", "Reads of a discovery source", "pool", "result")
        self._discovery_failures = self._counter("discovery_failures", "Failed reads by reason", "pool", "reason")
        self._discovery_endpoints = self._gauge("discovery_endpoints", "Endpoints of the list in use", "pool")
        self._discovery_skipped = self._gauge("discovery_skipped", "No endpoints for want of address or port", "pool")
        self._discovery_stale = self._gauge("discovery_stale", "1 while the source cannot be read", "pool")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        family = Counter(f"pointsman_{name}", text, labels, registry=self.registry)
        self._label_names[family] = labels
        return family

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        family = Gauge(f"pointsman_{name}", text, labels, registry=self.registry)
        self._label_names[family] = labels
        return family

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        family = Histogram(f"pointsman_{name}", text, labels, buckets=tuple(buckets), registry=self.registry)
        self._label_names[family] = labels
        return family

    def _counts(self, name: str, text: str, *labels: str) -> Series:
        family = Counts(f"pointsman_{name}", text, *labels)
        self._plain.append(family)
        self.registry.register(family)
        return family.series

    def _times(self, name: str, text: str, label: str, buckets_s: Sequence[float]) -> TimesByValue:
        family = TimesByLabel(f"pointsman_{name}", text, label, buckets_s)
        self._plain.append(family)
        self.registry.register(family)
        return family.series

    def observe_state(
        self,
        state: FleetState,
        streams: Callable[[], dict[str, float]],
        now: Callable[[], float],
        loads: Callable[[], dict[str, PoolLoad]] = dict,
    ) -> None:
        """Expose what FleetState, the stream counts and the pools' loads hold whenever Prometheus asks."""
        self.registry.register(StateCollector(state, streams, now, loads))

    def observe_breakers(self, figures: Callable[[], list[BreakerFigures]]) -> None:
        """Expose where breakers of models and zones stand whenever Prometheus asks."""
        self.registry.register(BreakerCollector(figures))

    def observe_loop(self, lag: LoopLag) -> None:
        """Expose how late the loop is whenever Prometheus asks."""
        self.registry.register(lag.times)

    def page(self) -> bytes:
        """The text page."""
        return generate_latest(self.registry)

    # -- children

    def _child(self, family: _Family, *labels: str) -> _Family:
        """The series of these label values. prometheus_client's own look-up checks and locks each time."""
        child = self._children.get((family, labels))
        if child is None:
            child = self._children[family, labels] = family.labels(*labels)
            for owner in self._owners((family, labels)):
                self._children_of.setdefault(owner, set()).add((family, labels))
        return cast("_Family", child)

    def _owners(self, child: _Child) -> list[tuple[str, str]]:
        family, labels = child
        names = self._label_names[family]
        return [(name, value) for name, value in zip(names, labels, strict=True) if name in {"pool", "endpoint"}]

    def _drop(self, label: str, value: str) -> None:
        """Drop every series of one pool or endpoint."""
        for child in self._children_of.pop((label, value), set()):
            self._forget(child)
        for family in self._plain:
            family.drop(label, value)

    def _forget(self, child: _Child) -> None:
        family, labels = child
        family.remove(*labels)
        del self._children[child]
        for owner in self._owners(child):
            self._children_of.get(owner, set()).discard(child)

    def _drop_of_pool(self, pool: str, *families: Counter | Gauge) -> None:
        """Drop a pool's series of these families."""
        for child in [child for child in self._children_of.get(("pool", pool), ()) if child[0] in families]:
            self._forget(child)

    # -- requests

    def decided(self, pool: str, endpoint: str, reason: str, prompt_tokens: int, matched_tokens: int) -> None:
        """One request was routed."""
        of_pool = (pool,)
        self._decisions.add((pool, endpoint, reason), 1)
        self._prompt_tokens.add(of_pool, prompt_tokens)
        if matched_tokens:
            self._matched_tokens.add(of_pool, matched_tokens)

    def stage(self, name: str) -> Times:
        """The histogram of one step's seconds; hold on to it."""
        return self._stages.of(name)

    def refused_with(self, reason: str, status: int) -> None:
        """We answered with an error."""
        self._child(self._refusals, reason, str(status)).inc()

    def answered(self, what: str) -> None:
        """We answered without an engine."""
        self._child(self._answers, what).inc()

    def fell_back(self, reason: str) -> None:
        """A decision rested on less than it should."""
        self._child(self._fallbacks, reason).inc()

    def moved(self, pool: str) -> None:
        """Another endpoint serves than the one chosen."""
        self._child(self._moved, pool).inc()

    def retried(self, pool: str, count: int) -> None:
        """A request was tried so many times more."""
        self._child(self._retries, pool).inc(count)

    def attempt_failed(self, endpoint: str, why: str) -> None:
        """An endpoint failed a request."""
        self._child(self._attempts_failed, endpoint, why).inc()

    def completed(self, pool: str, outcome: str, ttft_s: float | None, duration_s: float | None) -> None:
        """A request's access-log entry came."""
        self._completions.add((pool, outcome), 1)
        if ttft_s is not None:
            self._ttft.of(pool).observe(ttft_s)
        if duration_s is not None:
            self._duration.of(pool).observe(duration_s)

    def used_tokens(self, pool: str, prompt: int, cached: int | None, completion: int) -> None:
        """Tokens of one request, as the engine's usage says; what is none of a kind makes no series."""
        if prompt:
            self._tokens.add((pool, "prompt"), prompt)
        if cached:
            self._tokens.add((pool, "cached"), cached)
        if completion:
            self._tokens.add((pool, "completion"), completion)

    def compared(self, pool: str, predicted_tokens: float, found_tokens: int) -> None:
        """What was believed cached of one prompt, and what the engine found."""
        if predicted_tokens or found_tokens:
            self._predicted_tokens.add((pool,), predicted_tokens)
            self._found_tokens.add((pool,), found_tokens)

    def tenant_used(self, tenant: str, tokens: float, source: str) -> None:
        """A tenant's request was settled, by what this source says that it used."""
        self._child(self._tenant_tokens, tenant, source).inc(tokens)

    def usage_asked(self, by: str) -> None:
        """A tenant's stream was, or was not, asked for its usage."""
        self._child(self._usage_asked, by).inc()

    def pattern_found(self, pattern: str, action: str) -> None:
        """A prompt holds what a pattern of the guard describes."""
        self._child(self._patterns_found, pattern, action).inc()

    def patterns_in_force(self, patterns: Iterable[str]) -> None:
        """Exactly these patterns are searched; drop the series of others."""
        wanted = frozenset(patterns)
        gone = [child for child in self._children if child[0] is self._patterns_found and child[1][0] not in wanted]
        for child in gone:
            self._forget(child)

    def searched_partly(self) -> None:
        """A prompt is longer than what the guard searches of one."""
        self._searched_partly.inc()

    def client_unknown(self) -> None:
        """The guard did not limit a request, since nobody says whose it is."""
        self._unknown_clients.inc()

    # -- queues

    def queue_changed(self, pool: str, class_name: str, waiting: int, held_bytes: int) -> None:
        """So many wait in a class now."""
        self._child(self._queue_requests, pool, class_name).set(waiting)
        self._child(self._queue_bytes, pool).set(held_bytes)

    def queue_left(self, pool: str, class_name: str, how: str, waited_s: float) -> None:
        """A request waits no more, or was not let wait where it asked to."""
        self._child(self._queue_left, pool, class_name, how).inc()
        if how not in _DID_NOT_WAIT:
            self._child(self._queue_wait, pool, class_name).observe(waited_s)

    def queue_class_known(self, pool: str, class_name: str) -> None:
        """Its series begin with 0: the first event of one that appears with it shows in no rate."""
        for how in _WAYS_TO_LEAVE:
            self._child(self._queue_left, pool, class_name, how)

    def queue_class_gone(self, pool: str, class_name: str) -> None:
        """There is no such class any more."""
        gone: list[_Child] = [(self._queue_requests, (pool, class_name)), (self._queue_wait, (pool, class_name))]
        gone += [(self._queue_left, (pool, class_name, how)) for how in _WAYS_TO_LEAVE]
        for child in gone:
            if child in self._children:
                self._forget(child)

    # -- wire

    def message(self, phase: Phase) -> None:
        """One ext_proc message came."""
        self._messages[phase] += 1

    def malformed(self, service: str) -> None:
        """Bytes came that are no message of the protocol."""
        self._child(self._malformed, service).inc()

    def lane_connections(self, change: int) -> None:
        """One connection of the lane more, or less."""
        self._lane_connections.inc(change)

    def lane_failed(self, code: str) -> None:
        """A connection of the lane ended by a fault of the peer's."""
        self._child(self._lane_failures, code).inc()

    def large_body(self, result: str) -> None:
        """A large body was read, left before that, or refused."""
        self._child(self._large_bodies, result).inc()

    def entry(self, *, kind: str, result: str) -> None:
        """One access-log entry came."""
        self._entries.add((kind, result), 1)

    def entry_missing(self) -> None:
        """An access-log entry did not come in time."""
        self._missing.inc()

    def answered_by_envoy(self, status: int) -> None:
        """Envoy answered a request itself."""
        self._child(self._envoy_answers, str(status)).inc()

    def no_known_address(self) -> None:
        """Envoy knew none of the picked addresses."""
        self._no_known_address.inc()

    def xds(self, event: str, type_name: str) -> None:
        """One xDS message was pushed, acknowledged or rejected."""
        self._child(self._xds, event, type_name).inc()

    def xds_sessions(self, count: int) -> None:
        """How many Envoys are connected."""
        self._xds_sessions.set(count)

    def reloaded(self, *, ok: bool) -> None:
        """A changed config was read."""
        self._child(self._reloads, "ok" if ok else "rejected").inc()

    def key_file_read(self, *, ok: bool) -> None:
        """The file of API keys was read."""
        self._child(self._key_files, _result(ok=ok)).inc()

    def request_log_lost(self, why: str) -> Counter:
        """The count of request-log lines lost for one cause; hold on to it, it may be raised in any thread."""
        return self._child(self._unlogged, why)

    def generation_in_force(self, generation: int) -> None:
        """Which generation is in force now."""
        self._generation.set(generation)

    # -- fleet

    def endpoint_changed(self, address: str, before: State, after: State) -> None:  # noqa: ARG002 - FleetEvents
        """An endpoint entered another state."""
        self._child(self._transitions, address, after.name.lower()).inc()

    def endpoint_gone(self, address: str) -> None:
        """Drop the endpoint's series, or every address a fleet ever had would stay."""
        self._drop("endpoint", address)

    def pool_gone(self, pool: str) -> None:
        """Drop the series of a pool that the config no longer has."""
        self._drop("pool", pool)

    def endpoint_restarted(self, address: str) -> None:
        """An engine restarted."""
        self._child(self._restarts, address).inc()

    def engine_finished(self, address: str, reason: str, count: float) -> None:
        """An engine ended requests."""
        self._child(self._engine_finished, address, reason).inc(count)

    def endpoint_tripped(self, address: str, *, spared: bool) -> None:
        """Too many requests of an endpoint had failed."""
        self._child(self._endpoint_trips, address, "spared" if spared else "out").inc()

    def endpoint_refused(self, pool: str) -> None:
        """An endpoint was not taken."""
        self._child(self._refused_endpoints, pool).inc()

    def scraped(self, *, ok: bool) -> None:
        """A scrape was tried."""
        self._scrapes.add((_result(ok=ok),), 1)

    def exported(self, *, ok: bool) -> None:
        """A host was asked for its GPUs."""
        self._child(self._exports, _result(ok=ok)).inc()

    def probed(self, *, ok: bool) -> None:
        """A probe was tried."""
        self._probes.add((_result(ok=ok),), 1)

    def senses_up(self, *, up: bool) -> None:
        """The senses can be heard; or no more, and with them the indexes they kept are gone."""
        self._senses_up.set(float(up))
        for pool in () if up else self._indexed_pools:
            self._drop_of_pool(pool, self._index_blocks, self._index_blind)

    def heard(self, address: str, result: str, messages: int) -> None:
        """Messages of an endpoint's plugin."""
        self._child(self._pushes, address, result).inc(messages)

    def push_troubled(self, address: str, figures: int) -> None:
        """An endpoint's plugin could not take so many figures from its engine."""
        self._child(self._push_troubles, address).inc(figures)

    def senses_lost(self) -> None:
        """The senses fell or hung."""
        self._senses_losses.inc()

    def senses_dropped(self, reports: int) -> None:
        """So many reports were not handed over, since we did not take those before."""
        self._senses_dropped.inc(reports)

    def indexed_pools(self, pools: Iterable[str]) -> None:
        """Exactly these pools have a precise index; drop the series of those that have none any more."""
        wanted = frozenset(pools)
        for pool in self._indexed_pools - wanted:
            self._drop_of_pool(pool, self._index_blocks, self._index_blind, self._kv_events)
        self._indexed_pools = wanted

    def indexed(self, message: Indexed) -> None:
        """How a pool's precise index is. One that is wanted no more may still be told of."""
        if message.pool not in self._indexed_pools:
            return
        self._child(self._index_blocks, message.pool).set(message.blocks)
        self._child(self._index_blind, message.pool).set(message.blind)
        for what, happened in message.counts.items():
            self._child(self._kv_events, message.pool, what).inc(happened)

    def acquitted(self, address: str) -> None:
        """Two endpoints answered one request 500: it was not the first one's fault."""
        self._child(self._acquitted, address).inc()

    def tried(self, *, ok: bool) -> None:
        """A trial was answered."""
        self._child(self._trials, _result(ok=ok)).inc()

    def discovered(self, pool: str, *, ok: bool) -> None:
        """A discovery source was read."""
        self._child(self._discoveries, pool, _result(ok=ok)).inc()

    def discovery_failed(self, pool: str, reason: str) -> None:
        """A discovery source could not be read."""
        self._child(self._discovery_failures, pool, reason).inc()

    def discovery_state(self, pool: str, *, endpoints: int, skipped: int, stale: bool) -> None:
        """What list of endpoints a pool uses."""
        self._child(self._discovery_endpoints, pool).set(endpoints)
        self._child(self._discovery_skipped, pool).set(skipped)
        self._child(self._discovery_stale, pool).set(float(stale))


_DID_NOT_WAIT = frozenset({"full", "overflowed"})
_WAYS_TO_LEAVE = (
    "bound", "detour", "timeout", "client_gone", "shut_down", "reconfigured", "failed", *sorted(_DID_NOT_WAIT),
)  # fmt: skip


def _result(*, ok: bool) -> str:
    return "ok" if ok else "failed"
