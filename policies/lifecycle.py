"""One answer to "may this endpoint take traffic".

A pure state machine: evidence and the time go in, the state comes out. It knows nothing of sockets; who probes and
how often is the business of extproc.fleet. Evidence is kept per endpoint, so a restart of one says nothing of another.

    Starting -> Loading -> Warming -> Ready <-> Unhealthy          Ready -> Draining -> Stopped
                                      Ready <-> Degraded

Warming, Ready and Degraded take traffic, the first and the last a share of it only. A probe of an endpoint that takes
none is more than its model list: it is a trial, one generation of ours (half-open), since an engine that drains or
whose core hangs lists its model all the same (`wants_trial`). One taken out because requests failed rests first
(`Thresholds.cooldown_s`), longer with each fall in a row; else it would take traffic for half of every second. A
restart ends the rest: what failed is no longer there.

So does the endpoint's breaker (admission/breakers.py): one of whose requests too many fail, though never so many in a
row, rests for `BreakerSpec.open_s`, and comes back by a trial of ours and as Degraded, until real requests have gone
well. Whether its pools can do without it is for the fleet to say: it asks `errs_too_much` after each failure, and
answers with TRIPPED or SPARED.

Rejected: trusting `/health` alone. vLLM answers 200 there while it drains and before its model is usable, so Ready
needs the model list, and refused connections of real requests count as much as probes do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from policies.admission.breakers import BreakerSpec, Window


class State(IntEnum):
    """Life-cycle state of an endpoint. Only READY, WARMING and DEGRADED take new requests."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    UNHEALTHY = 3
    STOPPED = 4
    LOADING = 5
    """It answers, but does not list its model yet."""
    WARMING = 6
    """Takes a share of requests that grows with those it has served."""
    DEGRADED = 7
    """Takes a small share of requests until it has served some again: too many timed out, or failed."""


TAKE_TRAFFIC = (State.READY, State.WARMING, State.DEGRADED)
_READY: Final = State.READY  # asked for with every answer: a member is found far sooner by a name of our own


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
    TIMED_OUT = 15
    """A real request was not answered in time."""
    TRIPPED = 16
    """Too many of its requests have failed of late (`errs_too_much`), and its pools can do without it."""
    SPARED = 17
    """The same, but they cannot."""
    ACQUITTED = 18
    """What it was said to have failed was the request's own fault."""


FAILURES = (Evidence.FAILED, Evidence.UNFIT, Evidence.TIMED_OUT)
"""A real request came to nothing at the endpoint."""
_ANOTHER_PROCESS = (Evidence.PROBE_REFUSED, Evidence.RESTARTED, Evidence.LOADING)

LONGEST_COOLDOWN_S = 60.0
"""No fall, the hundredth in a row neither, keeps an endpoint out for longer than this."""


@dataclass(init=False)
class Thresholds:
    """How many failures in a row make an endpoint Unhealthy. Probes and real requests are counted apart.

    `cooldown_s`: how long failed requests keep it out the first time; doubled with each further fall in a row.
    `warm_up_requests`: how many a cold engine serves on its way to a whole share of the traffic.
    `timeouts`: so many in a row make it Degraded; None: they are failed requests as any other. `breaker`: so many
    errors, in a row or not, take it out; None: none do.
    """

    failed_probes: int
    failed_requests: int
    cooldown_s: float
    warm_up_requests: int
    timeouts: int | None
    breaker: BreakerSpec | None

    def __init__(
        self,
        failed_probes: int = 3,
        failed_requests: int = 3,
        cooldown_s: float = 5.0,
        warm_up_requests: int = 0,
        timeouts: int | None = None,
        breaker: BreakerSpec | None = None,
    ) -> None:
        self.failed_probes = failed_probes
        self.failed_requests = failed_requests
        self.cooldown_s = cooldown_s
        self.warm_up_requests = warm_up_requests
        self.timeouts = timeouts
        self.breaker = breaker

    def rest_s(self, falls: int) -> float:
        """How long an endpoint stays out after its `falls`-th fall in a row, in seconds."""
        return min(self.cooldown_s * 2.0 ** min(falls - 1, _MOST_DOUBLINGS), LONGEST_COOLDOWN_S)


_FIRST_SHARE = 0.1
"""A cold engine's share at first: enough to warm it."""
_DEGRADED_SHARE = 0.1
"""Enough to see whether it is better."""
_SERVED_AGAIN = 3
"""Requests in a row that end Degraded, where the number of timeouts in a row that begin it does not say."""
_WINDOW_S = 120.0
_MOST_DOUBLINGS = 16
"""From the shortest cool-down that can be configured to the longest, and far from what a float cannot hold."""


@dataclass(init=False)
class Lifecycle:
    """The state of one endpoint and the evidence it rests on.

    `since_s` is when the state was entered, `falls` how often in a row failed requests took it out, `rests_until_s`
    the time before which a good probe does not bring it back. `timeouts` and `good` are in a row; `errors` is what the
    breaker goes by, and `tripped`: it has taken the endpoint out, and real requests have yet to show that it is well.
    """

    thresholds: Thresholds
    state: State
    since_s: float
    reason: str
    failed_probes: int
    failed_requests: int
    falls: int
    rests_until_s: float
    cold: bool
    served: int
    unfit: bool
    timeouts: int
    good: int
    tripped: bool
    errors: Window

    def __init__(self, thresholds: Thresholds, *, state: State = State.STARTING, since_s: float = 0.0) -> None:
        self.state = state
        self.since_s = since_s
        self.reason = "not probed yet"
        self.failed_probes = 0
        self.failed_requests = 0
        self.falls = 0
        self.rests_until_s = -math.inf
        self.cold = True
        self.served = 0
        self.unfit = False
        self.timeouts = 0
        self.good = 0
        self.tripped = False
        self.errors = Window(_WINDOW_S)
        self.configure(thresholds)

    def configure(self, thresholds: Thresholds) -> None:
        """Go by these from now on."""
        self.thresholds = thresholds
        if thresholds.breaker is not None and thresholds.breaker.window_s != self.errors.window_s:
            self.errors = Window(thresholds.breaker.window_s)

    @property
    def share(self) -> float:
        """Of the traffic it would get if it were Ready, 0..1: one for all but a warming and a degraded one."""
        if self.state is State.DEGRADED:
            return _DEGRADED_SHARE
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

    def errs_too_much(self, now_s: float) -> bool:
        """Its breaker should open. To be asked after a failure, and answered with TRIPPED or SPARED."""
        breaker = self.thresholds.breaker
        if breaker is None or (self.state not in TAKE_TRAFFIC and self.state is not State.UNHEALTHY):
            return False
        if self.tripped:
            return self.state is State.DEGRADED  # the one that should have shown that it is well
        bad, total = self.errors.counts(now_s)
        return breaker.exceeded_by(bad, total)

    def still_serves(self, now_s: float) -> bool:
        """Take it that a real request was answered, where nothing could be better than it is. False: `observe` it."""
        if self.state is not _READY:
            return False
        self._count_served(now_s)
        return True

    def observe(self, evidence: Evidence, now_s: float) -> bool:
        """Take one piece of evidence. True if the state changed."""
        if evidence is Evidence.SERVED and self.still_serves(now_s):
            return False
        if evidence is Evidence.UNFIT:
            self.unfit = True
        self._count(evidence, now_s)
        after, reason = self._next(evidence, now_s)
        if after is self.state:
            self.reason = reason
            return False
        self._enter(after)
        self.state, self.reason, self.since_s = after, reason, now_s
        return True

    def _enter(self, state: State) -> None:
        """Forget what no longer counts in the new state."""
        if state is State.STARTING:
            self.falls = 0  # taken in anew, by discovery or the operator
        if state is not State.UNHEALTHY:
            self.rests_until_s = -math.inf
        if state is State.READY:
            self.cold = False
        if state is State.DEGRADED:
            self.timeouts = self.good = 0
        elif state is not State.UNHEALTHY:
            self.tripped = False

    def _count(self, evidence: Evidence, now_s: float) -> None:
        if evidence is Evidence.SERVED:
            self._count_served(now_s)
        elif evidence is Evidence.ACQUITTED:
            self.errors.take_back()
            self._count_good()
        elif evidence is Evidence.PROBE_OK:
            self._count_good_probe()
        elif evidence in (Evidence.PROBE_REFUSED, Evidence.PROBE_FAILED):
            self.failed_probes += 1
        elif evidence in FAILURES:
            self._count_failure(evidence, now_s)
        if evidence in _ANOTHER_PROCESS:
            self.cold, self.unfit, self.served = True, False, 0
            # What failed the requests is gone; what answers there next is another process.
            self.rests_until_s = -math.inf
            self.timeouts, self.tripped = 0, False
            self.errors.clear()

    def _count_failure(self, evidence: Evidence, now_s: float) -> None:
        self.good = 0
        if evidence is Evidence.TIMED_OUT and self.thresholds.timeouts is not None:
            self.timeouts += 1
        else:
            self.failed_requests += 1
        if self.state in TAKE_TRAFFIC or not self.cold:  # else it was the process before that failed it
            self.errors.saw(now_s, good=False)

    def _count_good_probe(self) -> None:
        self.failed_probes = 0
        if self.state not in TAKE_TRAFFIC and not self.unfit:
            # Back through a probe: the failed requests belong to the time before. But who answers our trials and
            # fails real requests with 500 would come and go for ever.
            self.failed_requests = 0

    def _count_served(self, now_s: float) -> None:
        self.errors.saw(now_s, good=True)
        self._count_good()

    def _count_good(self) -> None:
        self.failed_requests = self.timeouts = 0
        self.good += 1
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
        if evidence is Evidence.TRIPPED and self.state is State.UNHEALTHY:
            return State.UNHEALTHY, self._trip(now_s)
        if evidence is Evidence.PROBE_OK and now_s >= self.rests_until_s:
            return self._back("answers")
        if self.state is not State.UNHEALTHY and evidence is Evidence.PROBE_REFUSED:
            return State.STARTING, "connection refused"
        if self.state is State.STARTING and self.failed_probes:
            return State.STARTING, f"{self.failed_probes} probes failed, no model list"
        return self.state, self.reason

    def _next_in_traffic(self, evidence: Evidence, now_s: float) -> tuple[State, str]:
        why_out = self._why_out(evidence, now_s)
        if why_out:
            return State.UNHEALTHY, why_out
        if evidence is Evidence.SPARED:
            return State.DEGRADED, f"{self._take_errors(now_s)}, but cannot be done without"
        if self.state is State.DEGRADED:
            return self._next_degraded(evidence)
        if self.thresholds.timeouts is not None and self.timeouts >= self.thresholds.timeouts:
            return State.DEGRADED, f"{self.timeouts} requests in a row were not answered in time"
        if self.state is State.WARMING and self.served >= self.thresholds.warm_up_requests:
            return State.READY, f"warmed up by {self.served} requests"
        return self.state, self.reason

    def _why_out(self, evidence: Evidence, now_s: float) -> str:
        """Why it takes no more traffic; empty if it does."""
        if evidence is Evidence.PROBE_REFUSED:
            return "connection refused"
        if evidence is Evidence.STUCK:
            return "has requests and makes no progress"
        if evidence is Evidence.TRIPPED:
            return self._trip(now_s)
        if self.failed_probes >= self.thresholds.failed_probes:
            return f"{self.failed_probes} probes failed in a row"
        if self.failed_requests >= self.thresholds.failed_requests:
            return self._fall(now_s)
        return "answered 500: shuts down, or is broken" if evidence is Evidence.UNFIT else ""

    def _next_degraded(self, evidence: Evidence) -> tuple[State, str]:
        if evidence is Evidence.RESTARTED:
            return self._back("restarted")
        if self.good >= (self.thresholds.timeouts or _SERVED_AGAIN):
            self.tripped = False
            return self._back(f"served {self.good} requests in a row again")
        return self.state, self.reason

    def _back(self, why: str) -> tuple[State, str]:
        """The state in which it takes traffic again."""
        if self.tripped:
            return State.DEGRADED, f"{why} after too many errors; to serve some requests first"
        warms_up = self.cold and self.served < self.thresholds.warm_up_requests
        return State.WARMING if warms_up else State.READY, why

    def _trip(self, now_s: float) -> str:
        """Begin the rest that too many errors bring. Returns the reason."""
        errors = self._take_errors(now_s)
        self.tripped = True
        if self.thresholds.breaker is None:
            return errors  # switched off since it was asked
        rest_s = self.thresholds.breaker.open_s
        self.rests_until_s = max(self.rests_until_s, now_s + rest_s)
        return f"{errors}, out for {rest_s:g} s"

    def _take_errors(self, now_s: float) -> str:
        """Say how many they were, and count anew."""
        bad, total = self.errors.counts(now_s)
        self.errors.clear()
        return "failed again" if self.tripped else f"failed {bad} of {total} requests"

    def _fall(self, now_s: float) -> str:
        """Begin the rest that failed requests bring. Returns the reason."""
        self.falls += 1
        rest_s = self.thresholds.rest_s(self.falls)
        self.rests_until_s = now_s + rest_s
        return f"{self.failed_requests} requests failed in a row, out for {rest_s:g} s"
