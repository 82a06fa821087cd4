"""One answer to "may this endpoint take traffic".

A pure state machine: evidence and the time go in, the state comes out. It knows nothing of sockets; who probes and
how often is the business of extproc.fleet. Evidence is kept per endpoint, so a restart of one says nothing of another.

    Starting -> Loading -> Warming -> Ready <-> Unhealthy          Ready -> Draining -> Stopped

Warming and Ready take traffic. A probe of an endpoint that takes none is more than its model list: it is a trial, one
generation of ours (half-open), since an engine that drains or whose core hangs lists its model all the same
(`wants_trial`). One taken out because requests failed rests first (`Thresholds.cooldown_s`), longer with each fall in
a row; else it would take traffic for half of every second. A restart ends the rest: what failed is no longer there.

Rejected: trusting `/health` alone. vLLM answers 200 there while it drains and before its model is usable, so Ready
needs the model list, and refused connections of real requests count as much as probes do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """Life-cycle state of an endpoint. Only READY and WARMING take new requests."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    UNHEALTHY = 3
    STOPPED = 4
    LOADING = 5
    """It answers, but does not list its model yet."""
    WARMING = 6
    """Takes a share of requests that grows with those it has served."""


TAKE_TRAFFIC = (State.READY, State.WARMING)


class Evidence(IntEnum):
    """Something seen of an endpoint."""

    PROBE_OK = 0
    """The model list was answered; and where the endpoint takes no traffic, a trial."""
    PROBE_REFUSED = 1
    """Nothing listens there: not started yet, or gone."""
    PROBE_FAILED = 2
    """It listens but answers wrongly or not in time."""
    SERVED = 3
    """A real request was answered."""
    FAILED = 4
    """A real request could not be served: connect failure, reset before the answer, 5xx."""
    DRAIN = 5
    """The operator or the discovery source wants it drained."""
    UNDRAIN = 6
    """The operator takes the drain back."""
    REMOVED = 7
    """The discovery source no longer lists it."""
    LISTED = 8
    """The discovery source lists it (again)."""
    RESTARTED = 9
    """Its engine is another process than before."""
    UNFIT = 10
    """A real request was answered 500 before any byte: the engine shuts down, or is broken."""
    NO_MODEL = 11
    """The model list was answered, but names none of the models it is there for."""
    STUCK = 12
    """It has requests and has made no progress with them for too long."""
    LOADING = 13
    """It says itself that it is on its way: a new process, whose port does not answer yet."""
    WARMED = 14
    """By its own count it has served so many requests since its start, whoever sent them (`warmed_by`)."""


LONGEST_COOLDOWN_S = 60.0
"""No fall, the hundredth in a row neither, keeps an endpoint out for longer than this."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How many failures in a row make an endpoint Unhealthy. Probes and real requests are counted apart.

    `cooldown_s`: how long failed requests keep it out the first time; doubled with each further fall in a row.
    `warm_up_requests`: how many a cold engine serves on its way to a whole share of the traffic.
    """

    failed_probes: int = 3
    failed_requests: int = 3
    cooldown_s: float = 5.0
    warm_up_requests: int = 0

    def rest_s(self, falls: int) -> float:
        """How long an endpoint stays out after its `falls`-th fall in a row, in seconds."""
        return min(self.cooldown_s * 2.0 ** min(falls - 1, _MOST_DOUBLINGS), LONGEST_COOLDOWN_S)


_FIRST_SHARE = 0.1
"""A cold engine's share at first: enough to warm it."""
_MOST_DOUBLINGS = 16
"""From the shortest cool-down that can be configured to the longest, and far from what a float cannot hold."""


@dataclass(slots=True)
class Lifecycle:
    """The state of one endpoint and the evidence it rests on.

    `since_s` is when the state was entered, `falls` how often in a row failed requests took it out, `rests_until_s`
    the time before which a good probe does not bring it back.
    """

    thresholds: Thresholds
    state: State = State.STARTING
    since_s: float = 0.0
    reason: str = "not probed yet"
    failed_probes: int = 0
    failed_requests: int = 0
    falls: int = 0
    rests_until_s: float = -math.inf
    cold: bool = True
    served: int = 0
    unfit: bool = False

    @property
    def share(self) -> float:
        """Of the traffic it would get if it were Ready, 0..1: one for all but a warming one."""
        if self.state is not State.WARMING:
            return 1.0
        return max(_FIRST_SHARE, self.served / self.thresholds.warm_up_requests)

    def wants_trial(self, now_s: float) -> bool:
        """A generation of ours is what stands between it and traffic."""
        out = self.state in (State.STARTING, State.LOADING, State.UNHEALTHY)
        return out and now_s >= self.rests_until_s

    def warmed_by(self, requests: int) -> None:
        """So many has the engine served since its start, by its own count. It need not serve them once more."""
        self.served = max(self.served, requests)

    def observe(self, evidence: Evidence, now_s: float) -> bool:
        """Take one piece of evidence. True if the state changed."""
        if evidence is Evidence.UNFIT:
            self.unfit = True
        self._count(evidence)
        after, reason = self._next(evidence, now_s)
        if after is self.state:
            self.reason = reason
            return False
        if after is State.STARTING:
            self.falls = 0  # taken in anew, by discovery or the operator
        if after is not State.UNHEALTHY:
            self.rests_until_s = -math.inf
        if after is State.READY:
            self.cold = False
        self.state, self.reason, self.since_s = after, reason, now_s
        return True

    def _count(self, evidence: Evidence) -> None:
        if evidence is Evidence.PROBE_OK:
            self._count_good_probe()
        elif evidence in (Evidence.PROBE_REFUSED, Evidence.PROBE_FAILED):
            self.failed_probes += 1
        elif evidence is Evidence.SERVED:
            self._count_served()
        elif evidence in (Evidence.FAILED, Evidence.UNFIT):
            self.failed_requests += 1
        if evidence in (Evidence.PROBE_REFUSED, Evidence.RESTARTED, Evidence.LOADING):
            self.cold, self.unfit, self.served = True, False, 0
            # What failed the requests is gone; what answers there next is another process.
            self.rests_until_s = -math.inf

    def _count_good_probe(self) -> None:
        self.failed_probes = 0
        if self.state not in TAKE_TRAFFIC and not self.unfit:
            # Back through a probe: the failed requests belong to the time before. But who answers our trials and
            # fails real requests with 500 would come and go for ever.
            self.failed_requests = 0

    def _count_served(self) -> None:
        self.failed_requests = 0
        self.unfit = False
        self.served += 1
        if self.state in TAKE_TRAFFIC:
            # While it is out, what it still serves was begun before the fall and says nothing of new requests.
            self.falls = 0

    def _next(self, evidence: Evidence, now_s: float) -> tuple[State, str]:
        if evidence is Evidence.REMOVED:
            return State.STOPPED, "no longer listed by discovery"
        if self.state is State.STOPPED:
            return (State.STARTING, "listed again") if evidence is Evidence.LISTED else (self.state, self.reason)
        if evidence is Evidence.DRAIN:
            return State.DRAINING, "drain requested"
        if self.state is State.DRAINING:
            return (State.STARTING, "drain taken back") if evidence is Evidence.UNDRAIN else (self.state, self.reason)
        return self._next_by_health(evidence, now_s)

    def _next_by_health(self, evidence: Evidence, now_s: float) -> tuple[State, str]:
        if evidence is Evidence.LOADING:
            return State.LOADING, "says that it loads"
        if evidence is Evidence.NO_MODEL and self.state is not State.UNHEALTHY:
            return State.LOADING, "does not list its model"
        if self.state in TAKE_TRAFFIC:
            return self._next_in_traffic(evidence, now_s)
        if evidence is Evidence.PROBE_OK and now_s >= self.rests_until_s:
            warms_up = self.cold and self.served < self.thresholds.warm_up_requests
            return State.WARMING if warms_up else State.READY, "answers"
        if self.state is not State.UNHEALTHY and evidence is Evidence.PROBE_REFUSED:
            return State.STARTING, "connection refused"
        if self.state is State.STARTING and self.failed_probes:
            return State.STARTING, f"{self.failed_probes} probes failed, no model list"
        return self.state, self.reason

    def _next_in_traffic(self, evidence: Evidence, now_s: float) -> tuple[State, str]:
        if evidence is Evidence.PROBE_REFUSED:
            return State.UNHEALTHY, "connection refused"
        if evidence is Evidence.STUCK:
            return State.UNHEALTHY, "has requests and makes no progress"
        if self.failed_probes >= self.thresholds.failed_probes:
            return State.UNHEALTHY, f"{self.failed_probes} probes failed in a row"
        if self.failed_requests >= self.thresholds.failed_requests:
            return State.UNHEALTHY, self._fall(now_s)
        if evidence is Evidence.UNFIT:
            return State.UNHEALTHY, "answered 500: shuts down, or is broken"
        if self.state is State.WARMING and self.served >= self.thresholds.warm_up_requests:
            return State.READY, f"warmed up by {self.served} requests"
        return self.state, self.reason

    def _fall(self, now_s: float) -> str:
        """Begin the rest that failed requests bring. Returns the reason."""
        self.falls += 1
        rest_s = self.thresholds.rest_s(self.falls)
        self.rests_until_s = now_s + rest_s
        return f"{self.failed_requests} requests failed in a row, out for {rest_s:g} s"
