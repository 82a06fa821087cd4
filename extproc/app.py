"""The composition root: a Config becomes a running system. Start, reload, drain, stop; no decisions of its own.

What outlives a config generation (fleet state, prefix indexes, flights, counts) is made once here; a reload swaps the
generation and tells everyone. A file that does not validate changes nothing and is reported.

Nor does it after a crash: `pointsman up` gives us a file beside Envoy's configuration (`last_good`) that holds the
config in force. A decision process that is started again falls back on it, and takes from it what only a restart of
the whole may change, since Envoy still runs with that.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel

from extproc import is_compiled
from extproc.access.gate import gate_of
from extproc.access.key_file import KeyFile
from extproc.admin.server import AdminServer
from extproc.breaking import Breaking
from extproc.config.generations import Generation
from extproc.config.loading import ConfigError, load
from extproc.config.schema import Config
from extproc.config.sections.queueing import HOLD_S
from extproc.control.snapshots import Publisher, clusters_of
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.files import follow_file
from extproc.fleet.discovery.sources import Discovery
from extproc.fleet.fleet import Fleet
from extproc.flight import Flights
from extproc.guard import guard_of
from extproc.idempotency import Idempotency
from extproc.launcher import write_last_good
from extproc.memory import SpareMemory
from extproc.observe.decisions import DecisionLog
from extproc.observe.loop_lag import LoopLag
from extproc.observe.metrics import Metrics
from extproc.observe.request_log import RequestLog
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.precise import index_order
from extproc.quotas import Quotas
from extproc.retries import RetryBudgets
from extproc.senses.inbox import Inbox
from extproc.senses.link import Senses
from extproc.senses.targets import targets_of
from extproc.wire.access_log import AccessLog
from extproc.wire.envoy_lane import EnvoyLane
from extproc.wire.grpc_server import (
    ACCESS_LOG,
    ADS,
    EDS,
    EXT_PROC,
    HealthServer,
    bidirectional,
    client_streaming,
    envoy_server,
)
from extproc.wire.processor import Processor
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from policies.pool_load import PoolLoad, pool_load

log = structlog.get_logger(__name__)

_Section = TypeVar("_Section", bound=BaseModel)

_TICK_S = 0.25
"""How often overdue access-log entries, leaving endpoints and our own readiness are looked at."""
_STOP_GRACE_S = 0.2
"""Decisions take microseconds; what is still open then are streams, and those outlive us (failure_mode_allow)."""


_GARBAGE_AFTER = 50_000
"""Objects in cycles that may gather; requests make none, and looking for them costs milliseconds with many streams."""


class App:
    """One running system. `config_path` is followed for changes; `last_good` is kept at the config in force."""

    def __init__(
        self,
        config: Config,
        config_path: Path | None = None,
        *,
        last_good: Path | None = None,
        lane: Path | None = None,
    ) -> None:
        """`lane`: its folder, where the config names none."""
        self._config_path = config_path
        self._last_good = last_good
        self.generation = Generation(1, config)
        self.metrics = Metrics()
        self._state = FleetState(max_endpoints=config.limits.endpoints)
        self.fleet = Fleet(self._state, self.metrics, time.monotonic)
        self.decision_log = DecisionLog(config.observe.decisions)
        self._request_log = _request_log(config, self.metrics)
        self._quotas = Quotas(config, self.metrics, time.time)
        self._retry_budgets = RetryBudgets(config, time.monotonic)
        self._breaking = Breaking(config, self.fleet, time.monotonic)
        self._idempotency = Idempotency(config, time.monotonic)
        self._outcomes = Outcomes(
            self.fleet,
            self.metrics,
            self.decision_log,
            self._request_log,
            self._quotas,
            self._breaking,
            self._idempotency,
        )
        self.flights = Flights(
            self._state,
            self._outcomes,
            time.monotonic,
            max_open=config.limits.open_requests,
            max_unsettled=config.limits.unsettled_requests,
            access_log_timeout_s=config.wire.access_log_timeout_s,
        )
        self.pipeline = Pipeline(
            self.generation,
            self.fleet,
            self.flights,
            self.decision_log,
            self.metrics,
            clock=time.monotonic,
            wall_clock=time.time,
            rng=Random(),
            request_log=self._request_log,
            quotas=self._quotas,
            breaking=self._breaking,
            retry_budgets=self._retry_budgets,
            idempotency=self._idempotency,
        )
        self._outcomes.on_retry = self._retry_budgets.retried
        self._outcomes.on_release = self.pipeline.rooms.wake
        self._key_file = KeyFile(self._set_gate, self.metrics)
        self._publisher = Publisher(self.fleet, self.metrics)
        inbox = Inbox(self.fleet, self.metrics, time.monotonic, self.pipeline.matcher)
        inbox.on_finished = self._quotas.reports.take
        self._senses = Senses(inbox, self.metrics, config)
        self.pipeline.matcher.tell = self._senses.tell
        self.pipeline.matcher.on_indexed = self.metrics.indexed
        self.fleet.on_suspicion = self._senses.probe_now
        self._access_log = AccessLog(self.flights, self.metrics, self._outcomes.stray)
        self._lane = self._make_lane(config.listen.lane_folder or lane)
        self._discovery = Discovery(self._discovered, self.metrics, self.fleet.could_not_read)
        self._admin = AdminServer(self, admin=config.admin.listen, metrics=config.observe.metrics)
        self._loop_lag = LoopLag()
        self._memory = SpareMemory(time.monotonic)
        self._tasks: list[asyncio.Task[None]] = []

    # -- start and stop

    async def start(self) -> None:
        """Listen, find the fleet, begin to watch. Raises OSError or PortTaken if an address is taken."""
        config = self.generation.config
        self.metrics.observe_state(self._state, self._stream_counts, time.monotonic, self._pool_loads)
        self.metrics.observe_breakers(self._breaking.figures)
        self.metrics.observe_loop(self._loop_lag)
        self.metrics.generation_in_force(self.generation.number)
        self._health = HealthServer(config.listen.health)
        self._server = envoy_server(
            config.listen, self._handlers(), largest_body_bytes=config.limits.request_body_bytes
        )
        self._senses.start()  # first, since it has to import what it needs while we go on
        await self._admin.start()
        await self._health.start()
        self._apply(self.generation)
        await self._server.start()
        if self._lane is not None:
            await self._lane.start()
        self._tasks.append(asyncio.create_task(self._tick(), name="tick"))
        if self._config_path is not None:
            self._tasks.append(asyncio.create_task(follow_file(self._config_path, self._on_config), name="config"))
        # Everything made so far stays: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE_AFTER)
        gc.enable()  # `serve` has it wait until here
        self._loop_lag.start()
        told = {"grpc": config.listen.grpc, "admin": config.admin.listen, "metrics": config.observe.metrics}
        log.info("serving", **told, compiled=is_compiled())

    def _make_lane(self, folder: Path | None) -> EnvoyLane | None:
        if folder is None:
            return None
        return EnvoyLane(folder, self.flights, self.pipeline, self._access_log, self.metrics, hold_s=HOLD_S)

    def _handlers(self) -> dict[tuple[str, str], Any]:
        processor = Processor(self.flights, self.pipeline, self.metrics)
        return {
            (EXT_PROC, "Process"): bidirectional(processor.process),
            (ACCESS_LOG, "StreamAccessLogs"): client_streaming(self._access_log.stream),
            (ADS, "StreamAggregatedResources"): bidirectional(self._publisher.stream),
            # For an Envoy whose ADS is somebody else's: our clusters in `envoy --format filters` ask here.
            (EDS, "StreamEndpoints"): bidirectional(self._publisher.stream),
        }

    async def stop(self) -> None:
        """Stop taking requests, then listening. Running streams go on without us."""
        self.pipeline.stop()
        self._loop_lag.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.set_serving(serving=False)  # after the tick is gone, which says so too
        await self._discovery.close()
        await self._senses.close()
        lane = [] if self._lane is None else [self._lane.stop(_STOP_GRACE_S)]
        await asyncio.gather(self._server.stop(_STOP_GRACE_S), *lane)
        await self._health.stop()
        await self._admin.stop()
        await self._key_file.close()
        self.pipeline.reader.close()
        if self._request_log is not None:
            await asyncio.to_thread(self._request_log.close)
        log.info("stopped", open_streams=self.flights.open_count)

    async def _tick(self) -> None:
        while True:
            try:
                self.fleet.tick()
                self._breaking.tick()
                self.flights.expire()
                self._quotas.tick()
                if self._memory.tick(self.pipeline.reader.taken, busy=self.pipeline.reader.held_bytes > 0):
                    await self._memory.give_back()
                await self._health.set_serving(serving=self.ready()[0])
            except Exception:
                log.exception("tick failed")  # and goes on: without it nothing would ever be let go
            await asyncio.sleep(_TICK_S)

    def _watch(self) -> None:
        """Have the senses watch what is listed now. Milliseconds in a large fleet, so only when that may have changed.

        Discovery's reports and new generations alone change it: `Fleet.tick` lets go of what no pool lists any more.
        """
        fleet = self.fleet
        self._senses.watch(targets_of(fleet, self.generation.config.scrape.dcgm))
        self._state.stale_after_s = self._senses.stale_after_s
        self._senses.index(index_order(self.generation.config.pools, fleet.addresses_of))

    # -- generations

    def _apply(self, generation: Generation) -> None:
        """Make a generation the one in force."""
        clusters = clusters_of(generation.config)  # first, since it alone may fail: then nothing has changed yet
        self.fleet.configure(generation)
        gone = {pool.name for pool in self.generation.config.pools} - {pool.name for pool in generation.config.pools}
        self.generation = self.pipeline.generation = generation
        config = generation.config
        self._key_file.configure(config.access.api_keys_file)
        self._set_gate()
        self._quotas.configure(config)
        self._breaking.configure(config)
        self._retry_budgets.configure(config)
        self._idempotency.configure(config)
        self.pipeline.guard = guard_of(config, self.pipeline.guard, self.metrics, time.monotonic)
        self.metrics.patterns_in_force(config.guard.patterns if config.guard else ())
        self.pipeline.rooms.configure(config, self.fleet.placements)
        self.flights.access_log_timeout_s = config.wire.access_log_timeout_s
        self.flights.max_open = config.limits.open_requests
        self.flights.max_unsettled = config.limits.unsettled_requests
        self._senses.configure(config)
        self._publisher.configure(config, clusters)
        self._discovery.configure(config.pools)
        for name in gone:  # after discovery has ended too: it counts by pool
            self.metrics.pool_gone(name)
        self.metrics.indexed_pools(pool.name for pool in config.pools if pool.precise is not None)
        self._watch()
        self._keep(config)

    def _set_gate(self) -> None:
        """Let in whom the config and the key file say now."""
        self.pipeline.gate = gate_of(self.generation.config.access, self._key_file.keys)

    def _keep(self, config: Config) -> None:
        if self._last_good is None:
            return
        try:
            write_last_good(self._last_good, config)
        except OSError as error:
            log.warning("cannot keep the config, a crash would go back to an older one", error=str(error))

    def _discovered(self, pool: str, endpoints: list[Discovered]) -> None:
        self.fleet.set_endpoints(pool, endpoints)
        self._watch()

    def _on_config(self, _text: str | None) -> None:
        """The config file has (perhaps) changed."""
        if self._config_path is None:
            raise AssertionError("nothing is followed without a path")
        try:
            found = load(self._config_path)
        except ConfigError as error:
            self.metrics.reloaded(ok=False)
            log.warning("config rejected, the old one stays in force", error=str(error))
            return
        _warn_of_fixed_parts(self.generation.config, found)
        config = _with_fixed_parts_of(self.generation.config, found)
        if config == self.generation.config:
            return
        try:
            self._apply(Generation(self.generation.number + 1, config))
        except Exception:
            self.metrics.reloaded(ok=False)
            log.exception("config cannot be put into force")
            return
        self.metrics.reloaded(ok=True)
        self.metrics.generation_in_force(self.generation.number)
        log.info("config reloaded", generation=self.generation.number)

    # -- Operations, for the admin API

    def ready(self) -> tuple[bool, str]:
        """Discovery has reported for every pool and we are not stopping."""
        if self.pipeline.draining:
            return False, "stopping"
        waiting = [pool.name for pool in self.generation.config.pools if not self.fleet.synced(pool.name)]
        return (False, f"discovery has not reported for: {', '.join(waiting)}") if waiting else (True, "")

    def describe_fleet(self) -> list[dict[str, Any]]:
        """Every endpoint."""
        return self.fleet.describe()

    def breakers(self) -> dict[str, Any]:
        """The breakers of models and zones; an endpoint's is part of its description."""
        return self._breaking.describe()

    def decisions(self, limit: int, request_id: str | None) -> list[dict[str, Any]]:
        """The newest decisions."""
        return self.decision_log.read(limit, request_id)

    def refusals(self, limit: int) -> list[dict[str, Any]]:
        """The newest refusals."""
        return self.decision_log.read_refusals(limit)

    async def explain(self, path: str, body: bytes, tenant: str | None) -> dict[str, Any]:
        """Where a body would go now, if `tenant` sent it."""
        return await self.pipeline.explain_matched(path, body, tenant)

    def profiles(self) -> dict[str, Any]:
        """By pool: its profile as learned, ready for `hardware`."""
        return {name: asdict(placement.ledger.learned()) for name, placement in self.fleet.placements.items()}

    def tenants(self) -> dict[str, Any]:
        """What each tenant seen of late has running, has left and has spent."""
        return self._quotas.describe()

    def queues(self) -> dict[str, Any]:
        """Who waits, by pool."""
        return self.pipeline.rooms.describe()

    def config(self) -> dict[str, Any]:
        """The generation in force."""
        return {"generation": self.generation.number, "config": self.generation.config.model_dump(mode="json")}

    def drain(self, address: str, *, drain: bool) -> bool:
        """Drain an endpoint or take it back. False if no pool lists it (any more)."""
        slot = self._state.slot_of(address)
        if slot is None or self._state.state[slot] == State.STOPPED:
            return False
        self.fleet.observe(address, Evidence.DRAIN if drain else Evidence.UNDRAIN)
        return True

    def metrics_page(self) -> bytes:
        """The Prometheus page."""
        return self.metrics.page()

    def _stream_counts(self) -> dict[str, float]:
        flights = self.flights
        return {
            "ext_proc_streams_opened_total": flights.opened,
            "ext_proc_streams_ended_total": flights.ended,
            "ext_proc_streams_open": flights.open_count,
            "requests_unsettled": flights.unsettled_count,
            "guard_clients_forgotten_total": 0 if self.pipeline.guard is None else self.pipeline.guard.forgotten,
            "prefill_rates_misread_total": sum(p.ledger.misreadings for p in self.fleet.placements.values()),
        }

    def _pool_loads(self) -> dict[str, PoolLoad]:
        rooms, placements = self.pipeline.rooms, self.fleet.placements.copy()  # it may be asked in another thread
        return {name: pool_load(one, self._state, rooms.waiting(name)) for name, one in placements.items()}


def _request_log(config: Config, metrics: Metrics) -> RequestLog | None:
    wanted = config.observe.request_log
    return None if wanted is None else RequestLog(wanted, metrics.request_log_lost, time.monotonic)


_FIXED_PARTS = (
    # sockets are bound once
    "listen",
    "admin.listen",
    "observe.metrics",
    # held by parts that live as long as the process
    "limits.endpoints",
    "limits.senses_buffer_bytes",
    "limits.tenants",
    "observe.decisions",
    "observe.log",
    "observe.request_log",
    # parts of Envoy's listener and routes, which stand in its bootstrap
    "wire.response_headers",
    "timeouts.silence_s",
    "timeouts.stream_idle_s",
    "limits.request_body_bytes",
)
"""What only a restart of the whole puts into effect: a reload leaves it as it is, and so does a crash."""


def _warn_of_fixed_parts(old: Config, new: Config) -> None:
    changed = [part for part in _FIXED_PARTS if _field(old, part) != _field(new, part)]
    if old.access.in_envoy != new.access.in_envoy:
        changed.append("access")
    if changed:
        log.warning("changed, but in effect at the next start only", fields=changed)


def _field(config: Config, path: str) -> object:
    return attrgetter(path)(config)


# -- the last good config


def load_to_serve(path: Path, last_good: Path | None) -> tuple[Config, str]:
    """The config to start with, and the faults of the file at `path` if they keep it from being that one.

    Raises ConfigError if neither file can be used.
    """
    kept = _load_kept(last_good) if last_good else None
    try:
        config = load(path)
    except ConfigError as error:
        if kept is None:
            raise
        return kept, str(error)
    return (_with_fixed_parts_of(kept, config) if kept else config), ""


def _load_kept(last_good: Path) -> Config | None:
    try:
        return load(last_good)
    except ConfigError as error:
        log.warning("the last good config cannot be used", error=str(error))
        return None


def _with_fixed_parts_of(held: Config, config: Config) -> Config:
    """`config`, but with what is fixed until a restart of the whole as in `held`."""
    for part in _FIXED_PARTS:
        config = _with(config, part, _field(held, part))
    # keys come and go; but whether there are any is known to Envoy, which shows us credentials or does not
    return config if config.access.in_envoy == held.access.in_envoy else _with(config, "access", held.access)


def _with(section: _Section, path: str, value: object) -> _Section:
    name, _, rest = path.partition(".")
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
