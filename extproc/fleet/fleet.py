"""The fleet: which endpoints there are, what they may do, and what Envoy must know of them.

Single writer of FleetState's life-cycle, model and scraped columns. It takes what discovery, probes, scrapes, access
logs and Envoy's acknowledgements say, and answers with the assignments that xDS should publish. It does no I/O and
starts no task: the senses' inbox (senses/inbox.py), discovery and what becomes of requests call it.

    listed -> published to Envoy -> acknowledged by every Envoy -> may be picked
    gone   -> no longer picked    -> after a grace no longer published -> slot freed when nothing runs on it

A known approximation: an endpoint in several pools has one count of load, but a prefix index per pool, each of the
engine's whole capacity. Together they believe in more cache than there is. Rejected: dividing the capacity, which is
wrong as well as soon as one pool is busier, and one index for all, which would take the pools' policies apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import numpy as np
import structlog

from extproc.config.generations import Generation
from extproc.config.pool_policies import build, build_policy, policy_of, profile_of, tenant_policies
from extproc.config.schema import Config, Pool
from extproc.config.sections.breakers import EndpointBreaker
from extproc.config.spaces import sections
from extproc.fleet.discovery.endpoints import Discovered, as_discovered
from policies.fleet_state import FleetState, TooManyEndpoints
from policies.kv_forecast import KvForecast
from policies.lifecycle import FAILURES, TAKE_TRAFFIC, Evidence, Lifecycle, State, Thresholds
from policies.placement.ledger import Ledger
from policies.placement.placement import Placement
from policies.placement.policy import Policy, PolicySpec
from policies.placement.prefix_index import PrefixIndex
from vllm_adapters.dcgm import GpuLoad
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures
from vllm_adapters.pushed import HEARTBEAT_S, Pushed
from vllm_adapters.rates import Change, Counters

log = structlog.get_logger(__name__)

REMOVAL_GRACE_S = 1.0
"""Between unpicking an endpoint or a pool and dropping it from Envoy: longer than any reply is under way to Envoy."""
_FAILURE_COUNTS_AS_S = 10.0
"""A failed request counts as a first byte that took so long: an endpoint that fails fast must not seem fast."""
_ERROR_WEIGHT = 0.1
"""Weight of the newest outcome in an endpoint's error EWMA: the last ten or so requests count."""

_METRICS_PATH = "/metrics"
_OPERATOR = "operator"
_ENGINE = "engine"
_SILENCE_S = 3 * HEARTBEAT_S
"""An engine that pushes its figures and whose figures do not change is heard of so often."""
_ForSome: TypeAlias = tuple[PolicySpec, Policy]
"""A policy that some tenants have in a pool, behind what it was built from."""
_AT_WORK_S = 2.0
"""A step seen so recently says that an engine works: a batch of long prompts takes less."""


class FleetEvents(Protocol):
    """Who wants to know of changes in the fleet."""

    def endpoint_changed(self, address: str, before: State, after: State) -> None:
        """An endpoint entered another state."""

    def endpoint_gone(self, address: str) -> None:
        """An endpoint's slot was freed; its series can go."""

    def endpoint_restarted(self, address: str) -> None:
        """An engine restarted: its cache is empty."""

    def engine_finished(self, address: str, reason: str, count: float) -> None:
        """By its own count an engine ended so many requests since it was last asked."""

    def endpoint_refused(self, pool: str) -> None:
        """An endpoint was not taken, since the fleet is at its bound."""

    def endpoint_tripped(self, address: str, *, spared: bool) -> None:
        """Too many of an endpoint's requests failed; `spared`: its pools cannot do without it."""


class _Member:
    """One endpoint: its life-cycle, its pools, and until when Envoy must still know it."""

    def __init__(self, address: str, slot: int, lifecycle: Lifecycle) -> None:
        self.address = address
        self.slot = slot
        self.lifecycle = lifecycle
        self.pools: set[str] = set()
        self.known_in: set[str] = set()  # pools in whose cluster every Envoy has it
        self.leaving: dict[str, float] = {}  # pool -> when it stops being published
        self.drained_by: set[str] = set()  # the operator, the engine, and pools whose sources say that it shuts down
        self.capacity_tokens: int | None = None  # as the engine reports it
        self.progress: float | None = None  # what the engine counts as it works, when last it changed
        self.progress_at_s = -math.inf
        self.stepped_at_s = -math.inf  # when progress was last seen to grow
        self.zone: str | None = None
        self.gpus: tuple[str, ...] = ()  # its own on its host
        self.counters = Counters()
        self.figures: EngineFigures | None = None  # as last scraped or pushed
        self.pushed: Pushed | None = None  # while it pushes
        self.forecast = KvForecast(1.0)


def _after_silence(lifecycle: Lifecycle) -> bool:
    """Whether this is the moment to say, once, that an endpoint has never answered."""
    silent = lifecycle.failed_probes == lifecycle.thresholds.failed_probes
    return silent and lifecycle.state is State.STARTING


class Fleet:
    """All endpoints of all pools.

    `on_assignments` is called whenever what Envoy should know has changed, `on_suspicion` with the address of an
    endpoint that should be asked at once how it is.
    """

    def __init__(
        self,
        state: FleetState,
        events: FleetEvents,
        clock: Callable[[], float],
        on_assignments: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self.placements: dict[str, Placement] = {}
        self._events = events
        self._clock = clock
        self.on_assignments = on_assignments
        self.on_suspicion: Callable[[str], None] = lambda _address: None
        self._members: dict[str, _Member] = {}
        self._pools: dict[str, Pool] = {}
        self._synced: set[str] = set()
        self._unread: set[str] = set()
        self._leaving_clusters: dict[str, tuple[float, frozenset[str]]] = {}
        self._thresholds = Thresholds()
        self._no_progress_s = math.inf
        self._kv_alarm = 1.0
        self._asks_gpus = False
        self._zone: str | None = None
        self._for_some: dict[tuple[str, str], _ForSome] = {}
        self._most_out = 1.0
        self._avoided_zones: frozenset[str] = frozenset()
        self._zone_sizes: Counter[str] | None = None  # None: to be counted again

    # -- configuration and discovery

    def configure(self, generation: Generation) -> None:
        """Take a new generation: pools come and go, policies change, indexes and counts stay."""
        config = generation.config
        policies = [build_policy(pool) for pool in config.pools]  # first, since a third party's may fail
        for_some = self._built_for_some(config)
        self._thresholds = _thresholds_of(config)
        self._configure_bounds(config)
        self._no_progress_s = config.probe.no_progress_ms / 1000
        self._kv_alarm = config.scrape.kv_alarm
        self._zone = config.zone
        self._asks_gpus = config.scrape.dcgm is not None
        if not self._asks_gpus:
            self.gpus_fell_silent()
        for member in self._members.values():
            member.lifecycle.configure(self._thresholds)
            member.forecast.alarm_share = self._kv_alarm
            self._apply_zone(member)
        published = self.assignments()
        for pool, policy in zip(config.pools, policies, strict=True):
            self._configure_pool(pool, policy)
            self.placements[pool.name].use_for_some(
                {name: (built, spec.filters) for (at, name), (spec, built) in for_some.items() if at == pool.name}
            )
        self._for_some = for_some
        for name in set(self._pools) - {pool.name for pool in config.pools}:
            self._remove_pool(name)
        self._let_clusters_leave(published)
        for member in self._members.values():
            self._apply_capacity(member)
        self.on_assignments()

    def _built_for_some(self, config: Config) -> dict[tuple[str, str], _ForSome]:
        """The policies that tenants have instead of pools'. One that has not changed stays, with what it remembers."""
        built = {}
        for where, quota in sections(config.tenants):
            for one in tenant_policies(quota, where):
                kept = self._for_some.get((one.pool, one.name))
                if kept is None or kept[0] != one.spec:
                    kept = one.spec, build(one.spec, one.name)
                built[one.pool, one.name] = kept
        return built

    def _configure_bounds(self, config: Config) -> None:
        """How many endpoints breakers may keep out, and how many requests are too many at one."""
        endpoint, model = config.breakers.endpoint, config.breakers.model
        self._most_out = 1.0 if endpoint is None else endpoint.most_out
        self.state.busy_above = math.inf if endpoint is None else endpoint.busy_above
        self.state.refuses_when_busy = model is not None and model.all_busy

    def _remove_pool(self, name: str) -> None:
        for member in [member for member in self._members.values() if name in member.pools]:
            self._leave(name, member.address)
        self._zone_sizes = None
        del self.placements[name], self._pools[name]
        self._synced.discard(name)
        self._unread.discard(name)
        log.info("pool removed", pool=name)

    def _let_clusters_leave(self, published: Mapping[str, frozenset[str]]) -> None:
        """Keep clusters that are no longer ours for a grace, with the addresses they had."""
        until = self._clock() + REMOVAL_GRACE_S
        ours = {pool.cluster_name for pool in self._pools.values() if pool.cluster is None}
        for cluster, addresses in published.items():
            self._leaving_clusters.setdefault(cluster, (until, addresses))
        for cluster in ours & self._leaving_clusters.keys():
            del self._leaving_clusters[cluster]

    def _configure_pool(self, pool: Pool, policy: Policy) -> None:
        spec, placement = policy_of(pool), self.placements.get(pool.name)
        if placement is None:
            index, ledger = PrefixIndex(pool.kv_capacity_tokens), Ledger(profile_of(pool))
            placement = self.placements[pool.name] = Placement(pool.name, policy, index, ledger)
        placement.index.default_capacity_tokens = pool.kv_capacity_tokens
        placement.ledger.profile = profile_of(pool)
        if self._pools.get(pool.name) != pool:
            placement.use(policy, filters=spec.filters, index_tokens=spec.index_tokens)
        placement.calibration.enabled = pool.calibrate_index
        self._pools[pool.name] = pool

    def set_endpoints(self, pool: str, endpoints: Iterable[Discovered | str]) -> None:
        """What discovery lists for `pool` now. New ones start unprobed; missing ones are picked no more at once."""
        listed = as_discovered(endpoints)
        wanted = set(listed)
        current = {m.address for m in self._members.values() if pool in m.pools}
        for address in sorted(wanted - current):
            self._join(pool, address)
        for address in sorted(current - wanted):
            self._leave(pool, address)
        for endpoint in listed.values():
            self._heed_shutdown(pool, endpoint)
            self._note_attributes(endpoint)
        self._synced.add(pool)
        self._zone_sizes = None
        self._refresh_members(pool)
        if wanted != current:
            log.info("endpoints changed", pool=pool, added=len(wanted - current), removed=len(current - wanted))
        self.on_assignments()

    def _heed_shutdown(self, pool: str, endpoint: Discovered) -> None:
        """One that a source says is shutting down drains, for all pools: it is one process."""
        member = self._members.get(endpoint.address)  # None: refused, beyond the bound
        if member is not None:
            self._hold(member, f"pool {pool}", drain=endpoint.terminating)

    def _note_attributes(self, endpoint: Discovered) -> None:
        """What policies may go by; where pools differ, the last one told."""
        member = self._members.get(endpoint.address)
        if member is not None:
            self.state.weight[member.slot], self.state.cost[member.slot] = endpoint.weight, endpoint.cost
            member.zone, member.gpus = endpoint.zone, endpoint.gpus
            self._apply_zone(member)

    def _apply_zone(self, member: _Member) -> None:
        """An endpoint or a Pointsman that does not say where it is is not remote."""
        self.state.remote[member.slot] = None not in (member.zone, self._zone) and member.zone != self._zone
        self.state.avoided[member.slot] = member.zone in self._avoided_zones

    def avoid_zones(self, zones: frozenset[str]) -> None:
        """Pass over the endpoints of exactly these zones, as long as there are others."""
        if zones == self._avoided_zones:
            return
        self._avoided_zones = zones
        self.state.avoids_zones = bool(zones)
        for member in self._members.values():
            self._apply_zone(member)
        (log.warning if zones else log.info)("zones avoided", zones=sorted(zones))

    @property
    def zone_sizes(self) -> Mapping[str, int]:
        """How many endpoints each zone has."""
        if self._zone_sizes is None:
            self._zone_sizes = Counter(m.zone for m in self._members.values() if m.pools and m.zone is not None)
        return self._zone_sizes

    def zone_of(self, address: str) -> str | None:
        """Where an endpoint is, if that is known."""
        member = self._members.get(address)
        return None if member is None else member.zone

    def _hold(self, member: _Member, who: str, *, drain: bool) -> None:
        """Note that `who` wants it drained, or no more. It serves again when nobody does."""
        if drain:
            member.drained_by.add(who)
            self._observe(member, Evidence.DRAIN)
        elif who in member.drained_by:
            member.drained_by.discard(who)
            if not member.drained_by:
                self._observe(member, Evidence.UNDRAIN)

    def _join(self, pool: str, address: str) -> None:
        member = self._members.get(address)
        if member is None:
            try:
                slot = self.state.add(address)
            except TooManyEndpoints as error:
                log.warning("endpoint refused", address=address, pool=pool, error=str(error))
                self._events.endpoint_refused(pool)
                return
            member = _Member(address, slot, Lifecycle(self._thresholds, since_s=self._clock()))
            member.forecast.alarm_share = self._kv_alarm
            self._members[address] = member
            self.state.state[slot] = member.lifecycle.state
        member.pools.add(pool)
        member.leaving.pop(pool, None)
        self.state.has_metrics[member.slot] = self.assumed_by_grpc(address) is None
        # a late move of a request may have credited whoever had the slot before
        self.placements[pool].forget(member.slot)
        self.placements[pool].calibration.let_go(member.slot)
        self._apply_capacity(member)
        self._observe(member, Evidence.LISTED)

    def _leave(self, pool: str, address: str) -> None:
        member = self._members[address]
        member.pools.discard(pool)
        member.leaving[pool] = self._clock() + REMOVAL_GRACE_S
        self._apply_capacity(member)
        if not member.pools:
            member.drained_by.clear()
            member.forecast.forget()
            self._show_no_forecast(member.slot)
            self._observe(member, Evidence.REMOVED)
        else:
            self._hold(member, f"pool {pool}", drain=False)

    def _refresh_members(self, pool: str) -> None:
        # What is routable for another pool's sake is not for this one's. What is not routable at all stays: a refusal
        # can then name it.
        self.placements[pool].set_members(
            m.slot for m in self._members.values() if pool in m.pools and (pool in m.known_in or not m.known_in)
        )

    def could_not_read(self, pool: str) -> None:
        """Discovery has tried to read the pool's source and could not. Of no effect once it has reported."""
        if pool in self._pools and pool not in self._synced and pool not in self._unread:
            self._unread.add(pool)
            self.on_assignments()

    def synced(self, pool: str) -> bool:
        """The pool's discovery has reported once."""
        return pool in self._synced

    # -- what Envoy knows

    def assignments(self) -> dict[str, frozenset[str]]:
        """Cluster -> addresses Envoy should know: members and leavers, clusters of ours and leaving ones.

        A pool whose discovery has not reported yet is left out, so that a restart never empties an Envoy's cluster.
        """
        leaving = {cluster: addresses for cluster, (_, addresses) in self._leaving_clusters.items()}
        return leaving | {
            pool.cluster_name: frozenset(
                m.address for m in self._members.values() if name in m.pools or name in m.leaving
            )
            for name, pool in self._pools.items()
            if pool.cluster is None and name in self._synced
        }

    def unread_clusters(self) -> frozenset[str]:
        """Clusters of ours that are left out of `assignments` because their sources could not be read."""
        return frozenset(
            self._pools[name].cluster_name for name in self._unread - self._synced if self._pools[name].cluster is None
        )

    def acknowledged(self, by_cluster: Mapping[str, frozenset[str]]) -> None:
        """The addresses that every connected Envoy has acknowledged, per cluster of ours.

        Per pool: an endpoint that a new pool lists as well goes on serving the old one, whatever becomes of the new.
        """
        changed: set[str] = set()
        for member in self._members.values():
            known_in = {pool for pool in member.pools if self._is_known(member.address, self._pools[pool], by_cluster)}
            if known_in != member.known_in:
                member.known_in = known_in
                self.state.routable[member.slot] = bool(known_in)
                changed |= member.pools
        for pool in changed:
            self._refresh_members(pool)

    @staticmethod
    def _is_known(address: str, pool: Pool, by_cluster: Mapping[str, frozenset[str]]) -> bool:
        return pool.cluster is not None or address in by_cluster.get(pool.cluster_name, frozenset())

    def tick(self) -> None:
        """Let go of leavers whose grace is over. Called a few times a second."""
        now_s = self._clock()
        over = [cluster for cluster, (until, _) in self._leaving_clusters.items() if until <= now_s]
        for cluster in over:
            del self._leaving_clusters[cluster]
        published_less = bool(over)
        for member in list(self._members.values()):
            for pool in [pool for pool, until in member.leaving.items() if until <= now_s]:
                del member.leaving[pool]
                published_less = True
            if not member.pools and not member.leaving and self.state.remove(member.slot):
                del self._members[member.address]
                self._events.endpoint_gone(member.address)
        if published_less:
            self.on_assignments()
        self._end_old_forecasts(now_s)

    def _end_old_forecasts(self, now_s: float) -> None:
        """A dead engine's cache fills up no more. Its figures' history stays: they may only be late."""
        state = self.state
        told = np.flatnonzero(state.kv_alarm | np.isfinite(state.kv_full_in_s))
        self._show_no_forecast(told[state.stale(told, now_s)])

    def _show_no_forecast(self, slots: np.ndarray[tuple[int], np.dtype[np.intp]] | int) -> None:
        self.state.kv_alarm[slots], self.state.kv_full_in_s[slots] = False, math.inf

    # -- evidence

    def observe(self, address: str, evidence: Evidence) -> None:
        """Something was seen of an endpoint; unknown addresses are ignored."""
        member = self._members.get(address)
        if member is None:
            return
        if evidence in (Evidence.DRAIN, Evidence.UNDRAIN):
            self._hold(member, _OPERATOR, drain=evidence is Evidence.DRAIN)
            return
        if evidence is Evidence.PROBE_REFUSED:
            evidence = self._refused(member)
        failed = evidence in FAILURES
        if failed or evidence in (Evidence.SERVED, Evidence.ACQUITTED):
            self._follow_errors(member.slot, failed=failed)
        self._observe(member, evidence)
        if failed:
            self.state.timed(member.slot, _FAILURE_COUNTS_AS_S, self._clock())
            if member.lifecycle.errs_too_much(self._clock()):
                self._trip(member)

    def _trip(self, member: _Member) -> None:
        """Take out an endpoint of whose requests too many fail, unless a pool would be left with too few."""
        spared = not all(self._can_spare(member, pool) for pool in member.pools)
        self._events.endpoint_tripped(member.address, spared=spared)
        self._observe(member, Evidence.SPARED if spared else Evidence.TRIPPED)

    def _can_spare(self, member: _Member, pool: str) -> bool:
        """Enough others take traffic: no more than a share of the pool is out then, for whatever reason."""
        states = [one.lifecycle.state for one in self._members.values() if pool in one.pools and one is not member]
        may_be_out = max(1, int(self._most_out * (len(states) + 1)))
        return sum(state in TAKE_TRAFFIC for state in states) >= max(1, len(states) + 1 - may_be_out)

    def _refused(self, member: _Member) -> Evidence:
        """What it means that nothing answers at its port: it has gone, unless it says that it is on its way."""
        if member.pushed is not None and member.pushed.phase == "loading":
            return Evidence.LOADING
        self._hold(member, _ENGINE, drain=False)  # what drained has ended
        return Evidence.PROBE_REFUSED

    def served(self, address: str, ttft_s: float | None) -> None:
        """A request was answered, its first byte after `ttft_s` if that is told. Unknown addresses are ignored."""
        member = self._members.get(address)
        if member is None:
            return
        self._follow_errors(member.slot, failed=False)
        now_s = self._clock()
        if not member.lifecycle.still_serves(now_s):
            self._observe(member, Evidence.SERVED)
        if ttft_s is not None:
            self.state.timed(member.slot, ttft_s, now_s)

    def _follow_errors(self, slot: int, *, failed: bool) -> None:
        before = self.state.error_ewma.item(slot)
        if before or failed:
            self.state.error_ewma[slot] = before + _ERROR_WEIGHT * (failed - before)

    def _observe(self, member: _Member, evidence: Evidence) -> None:
        before = member.lifecycle.state
        changed = member.lifecycle.observe(evidence, self._clock())
        self.state.traffic_share[member.slot] = member.lifecycle.share
        if changed:
            after = member.lifecycle.state
            self.state.state[member.slot] = after
            self._events.endpoint_changed(member.address, before, after)
            tell = log.warning if after is State.UNHEALTHY else log.info
            tell(
                "endpoint state", endpoint=member.address, before=before.name, after=after.name,
                reason=member.lifecycle.reason,
            )  # fmt: skip
            if evidence is Evidence.UNFIT:
                self.on_suspicion(member.address)
        elif _after_silence(member.lifecycle):
            log.warning("endpoint does not answer", endpoint=member.address, reason=member.lifecycle.reason)

    def listed_models(self, address: str, listing: Listing) -> None:
        """An endpoint answered its model list."""
        member = self._members.get(address)
        if member is not None:
            self.state.set_models(member.slot, listing.models, listing.adapters)
            window = listing.context_tokens or math.inf
            if window != self.state.window(member.slot):  # to write is to have all verdicts on filters found again
                self.state.context_tokens[member.slot] = window
            known = self.served_models(address, listing)
            if member.lifecycle.state is State.UNHEALTHY:
                member.progress_at_s = self._clock()  # what it generated for us is a step, whatever its figures say
            self._observe(member, Evidence.PROBE_OK if known else Evidence.NO_MODEL)

    def served_models(self, address: str, listing: Listing) -> list[str]:
        """The models of its pools that an endpoint lists."""
        member = self._members.get(address)
        pools = member.pools if member is not None else ()
        return [model for pool in pools for model in self._pools[pool].models if model in listing.models]

    def wants_trial(self, address: str) -> bool:
        """A generation of ours is what stands between the endpoint and traffic.

        One that was not in service yet and is seen at work needs none: we have restarted, or another router uses it.
        """
        member = self._members.get(address)
        if member is None or not member.lifecycle.wants_trial(self._clock()):
            return False
        return member.lifecycle.state is State.UNHEALTHY or not self.at_work(address)

    def at_work(self, address: str) -> bool:
        """Its engine has just been seen doing steps."""
        member = self._members.get(address)
        return member is not None and self._clock() - member.stepped_at_s <= _AT_WORK_S

    def assumed_by_grpc(self, address: str) -> Listing | None:
        """What an endpoint that speaks gRPC is taken to serve: it lists nothing. None for one that does."""
        member = self._members.get(address)
        pools = [] if member is None else [self._pools[name] for name in member.pools]
        spoken = [pool for pool in pools if pool.protocol == "grpc"]
        return Listing(frozenset(model for pool in spoken for model in pool.models), None) if spoken else None

    def scraped(self, address: str, figures: EngineFigures) -> None:
        """An endpoint's metrics were read."""
        member = self._members.get(address)
        if member is not None:
            self._take_figures(member, figures, figures.kv_used)

    def exported(self, address: str, gpus: GpuLoad | None) -> None:
        """An endpoint's host told of its GPUs, or no more."""
        slot = self.state.slot_of(address)
        if slot is not None and self._asks_gpus:
            memory_used = None if gpus is None else gpus.memory_used
            self.state.gpu_used[slot] = math.nan if gpus is None else gpus.used
            self.state.gpu_memory_used[slot] = math.nan if memory_used is None else memory_used

    def pushed(self, address: str, pushed: Pushed) -> None:
        """An endpoint's plugin told how it is."""
        member = self._members.get(address)
        if member is None:
            return
        member.pushed, self.state.silence_s[member.slot] = pushed, _SILENCE_S
        self.state.most_running[member.slot] = pushed.most_running or 0
        self._hold(member, _ENGINE, drain=pushed.phase == "draining")
        if pushed.phase == "loading":
            self._observe(member, Evidence.LOADING)
            return
        self._take_figures(member, pushed.figures, pushed.kv_peak)
        member.lifecycle.warmed_by(pushed.totals.first_tokens)
        if member.lifecycle.state is State.WARMING:
            self._observe(member, Evidence.WARMED)

    def push_fell_silent(self, address: str) -> None:
        """An endpoint that pushed its figures is scraped again. Whether it drains is as it was last told."""
        member = self._members.get(address)
        if member is not None:
            member.pushed, self.state.silence_s[member.slot] = None, 0.0
            self.state.most_running[member.slot] = 0

    def pushes_fell_silent(self) -> None:
        """Nobody is listened to any more."""
        for address in self._members:
            self.push_fell_silent(address)

    def gpus_fell_silent(self) -> None:
        """No host is asked for its GPUs any more."""
        self.state.gpu_used[:] = self.state.gpu_memory_used[:] = math.nan

    def _take_figures(self, member: _Member, figures: EngineFigures, kv_peak: float | None) -> None:
        """What an engine tells of itself. `kv_peak`: the highest usage since it was last told."""
        state, slot = self.state, member.slot
        state.scraped(
            slot,
            waiting=figures.waiting or 0,
            running=figures.running or 0,
            kv_used=figures.kv_used or 0,
            now_s=self._clock(),
        )
        if figures.max_adapters is not None:
            state.max_adapters[slot] = figures.max_adapters
            state.running_adapters.put(slot, figures.running_adapters)
            state.waiting_adapters.put(slot, figures.waiting_adapters)
        if figures.kv_capacity_tokens and figures.kv_capacity_tokens != member.capacity_tokens:
            member.capacity_tokens = figures.kv_capacity_tokens
            self._apply_capacity(member)
        member.figures = figures
        change = member.counters.take(figures, self._clock())
        if change.restarted:
            self._restarted(member)
        if kv_peak is not None:
            self._foresee(member, kv_peak)
        if change.closed:
            self._tell_rates(member)
        self._calibrate(member, figures, change)
        self._note_finished(member, change)
        self._note_progress(member, figures)

    def _foresee(self, member: _Member, kv_used: float) -> None:
        forecast, slot = member.forecast, member.slot
        begins = forecast.observe(kv_used, self._clock())
        self.state.kv_full_in_s[slot], self.state.kv_alarm[slot] = forecast.full_in_s, forecast.alarm
        if begins:
            log.warning(
                "KV cache fills up", endpoint=member.address, used=round(kv_used, 3),
                full_in_s=None if math.isinf(forecast.full_in_s) else round(forecast.full_in_s, 1),
            )  # fmt: skip

    def _calibrate(self, member: _Member, figures: EngineFigures, change: Change) -> None:
        """What it found cached by its own count. Of several pools nobody knows whose promises those were."""
        placements = [self.placements[pool] for pool in member.pools]
        if len(placements) == 1 and change.hit_tokens is not None and not change.restarted:
            placements[0].calibration.counted(member.slot, change.hit_tokens, queues=bool(figures.waiting))
        scales = [placement.calibration.scale(member.slot) for placement in placements]
        self.state.index_scale[member.slot] = min(scales, default=1.0)

    def _tell_rates(self, member: _Member) -> None:
        rates, state, slot = member.counters.rates, self.state, member.slot
        state.generated_tokens_per_s[slot] = rates.generated_tokens_per_s or 0
        state.prefilled_tokens_per_s[slot] = rates.prefilled_tokens_per_s or 0
        state.preemptions_per_s[slot] = rates.preemptions_per_s or 0
        state.prefix_hit_ratio[slot] = rates.hit_ratio or 0

    def _note_finished(self, member: _Member, change: Change) -> None:
        """An engine that ends nothing but by giving it up, shuts down or was paused: to clients that is a 200.

        As bad as a 500, and told the same way: out until a generation of ours is answered, which is soon where it was
        no more than somebody's abort. Only vLLM's count leaves out the clients that left.
        """
        for reason, count in change.finished.items():
            self._events.engine_finished(member.address, reason, count)
        if set(change.finished) == {"abort"} and member.figures is not None and member.figures.dialect == "vllm":
            log.info("engine gives up its requests", endpoint=member.address, aborted=change.finished["abort"])
            self.observe(member.address, Evidence.UNFIT)

    def _note_progress(self, member: _Member, figures: EngineFigures) -> None:
        """An engine that has requests and does no step is stuck, though its server may answer every question."""
        now_s = self._clock()
        if not figures.running or figures.progress is None or figures.progress != member.progress:
            if None not in (figures.progress, member.progress) and (figures.progress or 0) > (member.progress or 0):
                member.stepped_at_s = now_s
            member.progress, member.progress_at_s = figures.progress, now_s
        elif now_s - member.progress_at_s > self._no_progress_s:
            self._observe(member, Evidence.STUCK)

    def _apply_capacity(self, member: _Member) -> None:
        """As the engine reports it; until then as configured, by the smallest figure where pools differ."""
        if not member.pools:
            return
        configured = min(self._pools[pool].kv_capacity_tokens for pool in member.pools)
        tokens = member.capacity_tokens or configured
        self.state.kv_capacity_tokens[member.slot] = tokens
        for pool in member.pools:
            placement = self.placements[pool]
            if placement.index_tokens:
                placement.calibration.let_go(member.slot)
                placement.index.set_capacity(member.slot, placement.index_tokens)
            else:
                placement.calibration.set_capacity(member.slot, tokens)

    def _restarted(self, member: _Member) -> None:
        for pool in member.pools:
            self.placements[pool].forget(member.slot)
        member.forecast.forget()
        self._show_no_forecast(member.slot)
        self._hold(member, _ENGINE, drain=member.pushed is not None and member.pushed.phase == "draining")
        self._observe(member, Evidence.RESTARTED)
        self._events.endpoint_restarted(member.address)
        log.info("engine restarted", endpoint=member.address)

    # -- reading

    def addresses(self) -> Iterator[str]:
        """Every address worth watching: listed by at least one pool."""
        return (member.address for member in self._members.values() if member.pools)

    def addresses_of(self, pool: str) -> list[str]:
        """The endpoints that a pool lists."""
        return [member.address for member in self._members.values() if pool in member.pools]

    def metrics_of(self, address: str) -> tuple[int | None, str]:
        """Port (None: its own) and path of an endpoint's metrics; by the first of its pools that says otherwise."""
        pools = [self._pools[name] for name in sorted(self._members[address].pools)]
        path = next((pool.metrics_path for pool in pools if pool.metrics_path != _METRICS_PATH), _METRICS_PATH)
        return next((pool.metrics_port for pool in pools if pool.metrics_port is not None), None), path

    def gpus_of(self, address: str) -> tuple[str, ...]:
        """Which of its host's GPUs are the endpoint's own; none: all."""
        return self._members[address].gpus

    def describe(self) -> list[dict[str, Any]]:
        """Every endpoint with all its figures, for the admin API."""
        now_s = self._clock()
        return [self._describe(member, now_s) for member in self._members.values()]

    def _describe(self, member: _Member, now_s: float) -> dict[str, Any]:
        figures = self.state.snapshot(member.slot)
        observed_at_s = figures.pop("observed_at_s")
        told = {
            "endpoint": member.address,
            "pools": sorted(member.pools),
            "models": sorted(self.state.models(member.slot)),
            **figures,
            "state": member.lifecycle.state.name.lower(),
            "state_reason": member.lifecycle.reason,
            "drained_by": sorted(member.drained_by),
            "zone": member.zone,
            "busy": bool(figures["in_flight"] + figures["foreign"] > self.state.busy_above),
            **_describe_errors(member.lifecycle, now_s),
            "state_age_s": round(now_s - member.lifecycle.since_s, 3),
            "observed_age_s": round(now_s - observed_at_s, 3) if observed_at_s > -1e18 else None,
            "source": self.state.source(member.slot, now_s),
            **_describe_push(member.pushed),
            **_describe_engine(member.figures),
            **self._describe_placements(member, now_s),
        }
        return {name: _legible(value) for name, value in told.items()}

    def _describe_placements(self, member: _Member, now_s: float) -> dict[str, Mapping[str, float | str]]:
        """What each of its pools makes of an endpoint."""
        slots = np.array([member.slot], np.intp)
        placements = {pool: self.placements[pool] for pool in sorted(member.pools)}
        rates = {pool: placement.ledger.rate(slots) for pool, placement in placements.items()}
        backlogs = {p: placement.ledger.backlog(slots, now_s) for p, placement in placements.items()}
        return {
            "indexed_tokens": {
                pool: placement.index.held_tokens(member.slot) for pool, placement in placements.items()
            },
            "index_evidence": {
                pool: placement.calibration.evidence(member.slot) for pool, placement in placements.items()
            },
            "prefill_tokens_per_s": {pool: round(float(rate[0]), 1) for pool, rate in rates.items()},
            "backlog_tokens": {pool: round(float(backlog[0])) for pool, backlog in backlogs.items()},
        }


_NO_BREAKER = EndpointBreaker.model_validate({"error_ratio": None, "timeouts": None})


def _thresholds_of(config: Config) -> Thresholds:
    probe, endpoint = config.probe, config.breakers.endpoint or _NO_BREAKER
    return Thresholds(
        failed_probes=probe.failed_probes,
        failed_requests=probe.failed_requests,
        cooldown_s=probe.cooldown_ms / 1000,
        warm_up_requests=probe.warm_up_requests,
        timeouts=endpoint.timeouts,
        breaker=endpoint.spec,
    )


def _describe_errors(lifecycle: Lifecycle, now_s: float) -> dict[str, float]:
    """What its breaker goes by, and for how long it rests."""
    failed, requests = lifecycle.errors.counts(now_s)
    rests_s = max(lifecycle.rests_until_s - now_s, 0.0)
    return {"failed_requests": failed, "recent_requests": requests, "rests_s": round(rests_s, 3)}


_PUSHED_ALONE = {
    "engine_phase": "phase",
    "max_running": "most_running",
    "first_tokens": "first_tokens",
    "requests_not_listed": "left_out",
    "largest_request_tokens": "largest_request_tokens",
    "largest_request_bytes": "largest_request_bytes",
    "kv_bytes_per_token": "kv_bytes_per_token",
    "push_troubles": "troubles",
}
"""Names in the admin API -> fields of Pushed."""


def _describe_push(pushed: Pushed | None) -> dict[str, Any]:
    """What only an engine that pushes tells."""
    if pushed is None:
        return dict.fromkeys(_PUSHED_ALONE)
    return {name: getattr(pushed, figure) for name, figure in _PUSHED_ALONE.items()}


def _describe_engine(figures: EngineFigures | None) -> dict[str, Any]:
    """What kind of engine it is, and each of several behind one endpoint."""
    if figures is None:
        return {"dialect": None, "engines": []}
    engines = [{name: _legible(value) for name, value in asdict(engine).items()} for engine in figures.engines]
    return {"dialect": figures.dialect, "engines": engines}


def _legible(value: object) -> object:
    """A fraction with as many digits as people read: four after the point, and four that count if it is below 1."""
    if not isinstance(value, float) or value.is_integer():
        return value
    return round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}")
