"""Tenants' quotas for live requests: the wall clock, refusals in words, and which outcome costs what.

Not here: the accounts themselves (policies/admission/tenants.py) and who a tenant is (extproc/access). The wall clock,
so that a budget's period begins at midnight and not when we were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from extproc.config.schema import Config
from extproc.config.sections import callers
from extproc.flight import Completion, Flight
from extproc.usage_reports import UsageReports
from policies.admission.buckets import Rate
from policies.admission.tenants import Charge, OverQuota, Quota, QuotaSpec, Tenants
from policies.types import Reason, Refusal, retry_after_s

_REASONS = {
    Quota.REQUESTS: (Reason.QUOTA_REQUESTS, "rate_limit_error", "sent more requests than its rate allows"),
    Quota.TOKENS: (Reason.QUOTA_TOKENS, "rate_limit_error", "asked for more tokens than its rate allows"),
    Quota.CONCURRENCY: (Reason.QUOTA_CONCURRENCY, "rate_limit_error", "as many requests at once as it may have"),
    Quota.BUDGET: (Reason.QUOTA_BUDGET, "insufficient_quota", "used up its budget of tokens"),
}
_UNDONE = frozenset({"endpoint_failed", "gateway_failed", "no_known_address", "no_answer"})
"""Outcomes that are not the client's making; if he had nothing of an answer either, they cost nothing."""
_SERVER_ERROR = 500
_OTHERS = ""
"""The label of tenants that the config does not name: their number has no bound."""


class Source(StrEnum):
    """Who says what a request has used: the bounded label set of metrics."""

    USAGE = "usage"
    """Its answer, or nobody has to: it has used nothing."""
    REPORT = "report"
    """The engine's plugin, afterwards."""
    ESTIMATE = "estimate"


class QuotaEvents(Protocol):
    """Who counts what tenants use."""

    def tenant_used(self, tenant: str, tokens: float, source: str) -> None:
        """A request of a tenant was settled, by what this source says (`Source`)."""


class Quotas:
    """Admits requests of tenants, and settles what they have cost."""

    def __init__(
        self,
        config: Config,
        events: QuotaEvents,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the one flights are opened by."""
        self._events = events
        self._wall_clock = wall_clock
        self._clock = clock
        self.reports = UsageReports(config.limits.usage_reports, clock)
        self._tenants = Tenants({}, QuotaSpec(), most_tenants=config.limits.tenants)
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Use new limits; what runs and what was spent stays."""
        self._config = config.tenants
        self.reports.most = config.limits.usage_reports
        tenants = config.tenants or callers.Tenants.model_validate({})
        specs = {name: _spec(quota) for name, quota in tenants.named.items()}
        self._tenants.configure(specs, _spec(tenants.default), spare=_rate(tenants.spare))

    def apply_to(self, flight: Flight) -> bool:
        """Whether the request has a tenant, and tenants have quotas."""
        return self._config is not None and flight.tenant is not None

    def judge(self, flight: Flight, tokens: float) -> Refusal | None:
        """Whether a request of so many tokens would be refused; takes nothing."""
        if self._config is None or flight.tenant is None:
            return None
        over = self._tenants.judge(flight.tenant, tokens, self._wall_clock())
        return None if over is None else _refusal(flight.tenant, over)

    def admit(self, flight: Flight, tokens: float) -> Refusal | None:
        """Let a request of so many predicted tokens in, and hang its charge on its flight; or refuse it."""
        if self._config is None or flight.tenant is None:
            return None
        admitted = self._tenants.admit(flight.tenant, tokens, self._wall_clock())
        if isinstance(admitted, OverQuota):
            return _refusal(flight.tenant, admitted)
        flight.charge = admitted
        return None

    def describe(self) -> dict[str, dict[str, float | None]]:
        """What each tenant seen of late has running, has left and has spent; for the admin API."""
        return self._tenants.describe(self._wall_clock())

    def refund(self, flight: Flight) -> None:
        """The request went nowhere."""
        if flight.charge is not None:
            self._tenants.refund(flight.charge, self._wall_clock())

    def settle(self, flight: Flight, outcome: str, completion: Completion | None) -> None:
        """The request is over; `completion` is None where nobody tells how it went."""
        charge = flight.charge
        if charge is None or charge.settled:
            return
        usage = None if completion is None else completion.usage
        if usage is not None:
            self._settle(flight, charge, usage.prompt_tokens + usage.completion_tokens, Source.USAGE)
        elif completion is not None and outcome in _UNDONE and not _answered(completion):
            self._tenants.refund(charge, self._wall_clock())
        elif outcome == "client_error":
            self._settle(flight, charge, 0.0, Source.USAGE)  # the engine refused it before it computed anything
        elif not self.reports.wait_for(flight):
            self._settle(flight, charge, charge.tokens, Source.ESTIMATE)

    def tick(self) -> None:
        """Settle requests that have waited long enough for their engines' reports. Called a few times a second."""
        for flight, tokens in self.reports.due():
            charge = flight.charge
            if charge is not None and not charge.settled:
                source = Source.ESTIMATE if tokens is None else Source.REPORT
                self._settle(flight, charge, charge.tokens if tokens is None else tokens, source)

    def _settle(self, flight: Flight, charge: Charge, tokens: float, source: Source) -> None:
        now_s = self._wall_clock()
        late_s = self._clock() - flight.ended_at_s if flight.ended_at_s else 0.0  # it may have been told before its end
        self._tenants.settle(charge, tokens, now_s, ended_s=now_s - late_s)
        tenant = flight.tenant or _OTHERS
        named = self._config is not None and tenant in self._config.named
        self._events.tenant_used(tenant if named else _OTHERS, tokens, source)


def _answered(completion: Completion) -> bool:
    """The client had something of an answer, though it may have been cut."""
    return completion.ttft_s is not None and 0 < completion.status < _SERVER_ERROR


def _refusal(tenant: str, over: OverQuota) -> Refusal:
    reason, kind, what = _REASONS[over.quota]
    wait_s = retry_after_s(over.retry_after_s)
    message = f"tenant {tenant} has {what}; try again in {wait_s} s"
    return Refusal(429, kind, message, reason, retry_after_s=wait_s)


def _spec(quota: callers.Quota) -> QuotaSpec:
    spec = QuotaSpec(
        requests=_rate(quota.requests),
        tokens=_rate(quota.tokens),
        concurrency=quota.concurrency,
        may_borrow=quota.may_borrow,
    )
    budget = quota.budget
    return spec if budget is None else replace(spec, budget_tokens=budget.tokens, budget_period_s=budget.period_s)


def _rate(rate: callers.Rate | None) -> Rate | None:
    return None if rate is None else Rate(rate.per_s, rate.most)
