"""One answer to "may this endpoint take traffic".

A pure state machine: evidence and the time go in, the state comes out. It knows nothing of sockets; who probes and
how often is the business of extproc.fleet. Evidence is kept per endpoint, so a restart of one says nothing of another.

    Starting -> Ready <-> Unhealthy          Ready -> Draining -> Stopped

An endpoint taken out by its probes is back with its first good one. One taken out because requests failed answers its
probes all along, so it rests first (`Thresholds.cooldown_s`), longer with each fall in a row; else it would take
traffic for half of every second. A restart ends the rest: what failed is no longer there.

Rejected: trusting `/health` alone. vLLM answers 200 there while it drains and before its model is usable, so Ready
needs the model list, and refused connections of real requests count as much as probes do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """Life-cycle state of an endpoint. Only READY takes new requests."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    UNHEALTHY = 3
    STOPPED = 4


class Evidence(IntEnum):
    """Something seen of an endpoint."""

    PROBE_OK = 0
    """The model list was answered."""
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


LONGEST_COOLDOWN_S = 60.0
"""No fall, the hundredth in a row neither, keeps an endpoint out for longer than this."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """How many failures in a row make an endpoint Unhealthy. Probes and real requests are counted apart.

    `cooldown_s`: how long failed requests keep it out the first time; doubled with each further fall in a row.
    """

    failed_probes: int = 3
    failed_requests: int = 3
    cooldown_s: float = 5.0

    def rest_s(self, falls: int) -> float:
        """How long an endpoint stays out after its `falls`-th fall in a row, in seconds."""
        return min(self.cooldown_s * 2.0 ** min(falls - 1, _MOST_DOUBLINGS), LONGEST_COOLDOWN_S)


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

    def observe(self, evidence: Evidence, now_s: float) -> bool:
        """Take one piece of evidence. True if the state changed."""
        self._count(evidence)
        after, reason = self._next(evidence, now_s)
        if after is self.state:
            self.reason = reason
            return False
        if after is State.STARTING:
            self.falls = 0  # taken in anew, by discovery or the operator
        if after is not State.UNHEALTHY:
            self.rests_until_s = -math.inf
        self.state, self.reason, self.since_s = after, reason, now_s
        return True

    def _count(self, evidence: Evidence) -> None:
        if evidence is Evidence.PROBE_OK:
            self._count_good_probe()
        elif evidence in (Evidence.PROBE_REFUSED, Evidence.PROBE_FAILED):
            self.failed_probes += 1
        elif evidence is Evidence.SERVED:
            self._count_served()
        elif evidence is Evidence.FAILED:
            self.failed_requests += 1
        if evidence in (Evidence.PROBE_REFUSED, Evidence.RESTARTED):
            # What failed the requests is gone; what answers there next is another process.
            self.rests_until_s = -math.inf

    def _count_good_probe(self) -> None:
        self.failed_probes = 0
        if self.state is not State.READY:
            # Back through a probe: the failed requests belong to the time before.
            self.failed_requests = 0

    def _count_served(self) -> None:
        self.failed_requests = 0
        if self.state is State.READY:
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
        if evidence is Evidence.PROBE_OK and now_s >= self.rests_until_s:
            return State.READY, "answers its model list"
        if self.state is State.STARTING and self.failed_probes:
            refused = evidence is Evidence.PROBE_REFUSED
            return (
                State.STARTING,
                "connection refused" if refused else f"{self.failed_probes} probes failed, no model list",
            )
        if self.state is State.READY:
            if evidence is Evidence.PROBE_REFUSED:
                return State.UNHEALTHY, "connection refused"
            if self.failed_probes >= self.thresholds.failed_probes:
                return State.UNHEALTHY, f"{self.failed_probes} probes failed in a row"
            if self.failed_requests >= self.thresholds.failed_requests:
                return State.UNHEALTHY, self._fall(now_s)
        return self.state, self.reason

    def _fall(self, now_s: float) -> str:
        """Begin the rest that failed requests bring. Returns the reason."""
        self.falls += 1
        rest_s = self.thresholds.rest_s(self.falls)
        self.rests_until_s = now_s + rest_s
        return f"{self.failed_requests} requests failed in a row, out for {rest_s:g} s"
