"""Breakers of models and zones for live requests: whose outcome each sees, refusals in words, which zones to avoid.

Not here: when a breaker opens (policies/admission/breakers.py), and the breakers of endpoints, which their life-cycle
keeps (policies/lifecycle.py, by way of the fleet). State is kept by the name of the pool or zone and outlives config
generations.

A model's breaker goes by how requests ended for their clients, a zone's by each try at one of its endpoints. A request
that a second endpoint has answered 500 as well is to blame itself and counts for nobody, nor does one whose client
left. Where no second one was asked nobody knows whose fault a 500 is, and it is nothing to the model: else a client
whose requests break engines could have everybody's refused once the retry budget is used up.

Rejected: counting tries for models too. What another endpoint made good is no reason to refuse a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from extproc.config.schema import Config
from extproc.fleet.fleet import Fleet
from extproc.flight import BROKE, Completion, Flight
from policies.admission.breakers import Breaker, BreakerSpec, Position
from policies.types import Reason, Refusal, retry_after_s

log = structlog.get_logger(__name__)

_VERDICTS = {"ok": True, "client_error": True, "endpoint_failed": False}
"""How an outcome counts; all others tell nothing of the endpoints."""
_NO_TRIAL = 0
"""The number of requests that are not on trial."""
_DURATION_WEIGHT = 0.1
"""Of the newest request in a pool's mean: the last ten or so count."""


class BreakerFigures(NamedTuple):
    """One breaker for the metrics page: `kind` is "model" or "zone", `name` the pool's or zone's."""

    kind: str
    name: str
    position: Position
    trips: int


class Breaking:
    """The breakers of all pools and zones. One that is switched off is not there."""

    def __init__(self, config: Config, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._models: dict[str, Breaker] = {}
        self._zones: dict[str, Breaker] = {}
        self._zone_spec: BreakerSpec | None = None
        self._mean_s: dict[str, float] = {}
        self._alert = False  # some breaker is not closed; else placing a request looks at none
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Use new limits; what was seen stays, but of pools that are gone."""
        model, zone = config.breakers.model, config.breakers.zone
        model_spec, self._zone_spec = None if model is None else model.spec, None if zone is None else zone.spec
        pools = [pool.name for pool in config.pools]
        self._models = _kept(self._models, pools, model_spec)
        self._zones = _kept(self._zones, self._zones, self._zone_spec)
        self._mean_s = {pool: self._mean_s[pool] for pool in pools if pool in self._mean_s}
        self._avoid_zones()

    # -- before a request is sent

    def judge(self, pool: str) -> Refusal | None:
        """The refusal of every request of a pool whose breaker is open; takes nothing."""
        breaker = self._models.get(pool)
        if breaker is None or breaker.is_closed:
            return None
        now_s = self._clock()
        if not breaker.is_shut(now_s):
            return None
        wait_s = breaker.retry_after_s(now_s, self._mean_s.get(pool, 0.0))
        return _refusal(f"too many requests to pool {pool} have failed of late", Reason.MODEL_BREAKER, wait_s)

    def all_busy(self, pool: str) -> Refusal:
        """The refusal of a request for which every endpoint of the pool is too busy: until one of theirs should end."""
        running = int(self._fleet.state.load(self._fleet.placements[pool].members)[0].sum())
        wait_s = self._mean_s.get(pool, 0.0) / max(running, 1)
        return _refusal(f"every endpoint of pool {pool} is busy", Reason.ALL_BUSY, wait_s)

    def placed(self, flight: Flight) -> None:
        """A request has its place. Where a breaker is half-open it is the one on trial."""
        if not self._alert:
            return
        now_s = self._clock()
        concerned = (self._models.get(flight.pool), self._zone_at(flight.served_by))
        passes = ((breaker, breaker.admit(now_s)) for breaker in concerned if breaker and not breaker.is_closed)
        flight.trials = tuple((breaker, number) for breaker, number in passes if number is not None)
        self._avoid_zones()

    # -- what became of it

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """A try failed. Whose fault a 500 is, is seen when the request is over."""
        if why != BROKE:
            self._zone_saw(flight, address, good=False)

    def settled(self, flight: Flight, outcome: str, completion: Completion) -> None:
        """The request is over."""
        good = _VERDICTS.get(outcome)
        broke = completion.failed == BROKE
        if good is not None and not broke:
            self._model_saw(flight, completion, good=good)
        if good and completion.address is not None:
            self._zone_saw(flight, completion.address, good=True)
        if flight.broke is not None and not (broke and completion.attempts > 1):
            self._zone_saw(flight, flight.broke, good=False)
        if flight.trials:
            self.forgot(flight)

    def forgot(self, flight: Flight) -> None:
        """Nothing (more) will be told of the request: another may be on trial."""
        for breaker, number in flight.trials:
            breaker.forgot(number)
        if flight.trials:
            flight.trials = ()
            self._avoid_zones()

    def _model_saw(self, flight: Flight, completion: Completion, *, good: bool) -> None:
        pool, took_s = flight.pool, completion.duration_s
        placement = self._fleet.placements.get(pool)
        if placement is None:
            return  # it is gone
        if good and took_s is not None:
            mean_s = self._mean_s.get(pool, took_s)
            self._mean_s[pool] = mean_s + _DURATION_WEIGHT * (took_s - mean_s)
        breaker = self._models.get(pool)
        if breaker is not None:
            alone = len(placement.members) < 2
            self._saw("model", pool, breaker, flight, good=good, by=None if alone else flight.served_by)

    def _zone_saw(self, flight: Flight, address: str, *, good: bool) -> None:
        breaker = self._zone_at(address)
        if breaker is not None and (zone := self._fleet.zone_of(address)) is not None:
            alone = self._fleet.zone_sizes[zone] < 2
            self._saw("zone", zone, breaker, flight, good=good, by=None if alone else address)

    def _saw(self, kind: str, name: str, breaker: Breaker, flight: Flight, *, good: bool, by: str | None) -> None:
        """`by`: the endpoint, if it is not the only one: then nobody but it can be to blame."""
        was_closed = breaker.is_closed
        trials = flight.trials
        number = next((number for one, number in trials if one is breaker), _NO_TRIAL) if trials else _NO_TRIAL
        if breaker.saw(number, self._clock(), good=good, by=by):
            log.warning("breaker opened", kind=kind, name=name, open_s=breaker.spec.open_s)
        elif was_closed:
            return
        elif breaker.is_closed:
            log.info("breaker closed", kind=kind, name=name)
        if breaker.is_closed != was_closed:
            self._look_around()

    def _zone_at(self, address: str | None) -> Breaker | None:
        zone = None if address is None or self._zone_spec is None else self._fleet.zone_of(address)
        if zone is None or self._zone_spec is None or zone not in self._fleet.zone_sizes:
            return None
        breaker = self._zones.get(zone)
        if breaker is None:
            breaker = self._zones[zone] = Breaker(self._zone_spec)
        return breaker

    # -- time passes

    def tick(self) -> None:
        """Let go of zones that nobody is in any more, and end rests. Called a few times a second."""
        for zone in self._zones.keys() - self._fleet.zone_sizes.keys():
            del self._zones[zone]
        self._look_around()

    def _look_around(self) -> None:
        self._alert = any(not one.is_closed for one in (*self._models.values(), *self._zones.values()))
        self._avoid_zones()

    def _avoid_zones(self) -> None:
        now_s = self._clock()
        self._fleet.avoid_zones(frozenset(zone for zone, breaker in self._zones.items() if breaker.is_shut(now_s)))

    # -- reading

    def figures(self) -> list[BreakerFigures]:
        """Every breaker, for the metrics page; may be called in another thread."""
        now_s = self._clock()
        kinds = (("model", list(self._models.items())), ("zone", list(self._zones.items())))
        return [
            BreakerFigures(kind, name, breaker.position(now_s), breaker.trips)
            for kind, breakers in kinds
            for name, breaker in breakers
        ]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every breaker, for the admin API."""
        now_s = self._clock()
        return {
            "models": {name: _describe(breaker, now_s) for name, breaker in self._models.items()},
            "zones": {name: _describe(breaker, now_s) for name, breaker in self._zones.items()},
        }


def _kept(breakers: dict[str, Breaker], names: Iterable[str], spec: BreakerSpec | None) -> dict[str, Breaker]:
    """A breaker for each of these, the old one where there is one."""
    if spec is None:
        return {}
    kept = {name: breakers.get(name) or Breaker(spec) for name in names}
    for breaker in kept.values():
        breaker.configure(spec)
    return kept


def _refusal(what: str, reason: Reason, wait_s: float) -> Refusal:
    again_s = retry_after_s(wait_s)
    return Refusal(503, "server_error", f"{what}; try again in {again_s} s", reason, retry_after_s=again_s)


def _describe(breaker: Breaker, now_s: float) -> dict[str, Any]:
    failed, requests = breaker.counts(now_s)
    return {
        "position": breaker.position(now_s).name.lower(),
        "failed_requests": failed,
        "recent_requests": requests,
        "rests_s": round(breaker.retry_after_s(now_s), 3),
        "trips": breaker.trips,
    }
