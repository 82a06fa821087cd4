"""What becomes of requests, passed on to whom it concerns: the fleet's evidence, the metrics, the logs."""

from __future__ import annotations

from collections.abc import Callable

from extproc.breaking import Breaking
from extproc.fleet.fleet import Fleet
from extproc.flight import BROKE, TIMED_OUT, Completion, Flight, Usage
from extproc.idempotency import Idempotency
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.observe.request_log import RequestLog
from extproc.quotas import Quotas
from policies.lifecycle import Evidence


class Outcomes:
    """The FlightEvents of a running system."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        decisions: DecisionLog,
        request_log: RequestLog | None = None,
        quotas: Quotas | None = None,
        breaking: Breaking | None = None,
        idempotency: Idempotency | None = None,
    ) -> None:
        self.on_release: Callable[[str], None] = lambda _pool: None
        self.on_retry: Callable[[str, int], None] = lambda _pool, _count: None
        self._quotas = quotas
        self._breaking = breaking
        self._idempotency = idempotency
        self._fleet = fleet
        self._metrics = metrics
        self._decisions = decisions
        self._request_log = request_log

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:  # noqa: ARG002 - FlightEvents
        """Another endpoint serves the request than the one chosen."""
        self._metrics.moved(self._pool(flight))

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """An endpoint could not serve the request."""
        if self._fleet.state.slot_of(address) is not None:
            self._metrics.attempt_failed(address, why)
            self._hold_against(flight, address, why)
            if self._breaking is not None:
                self._breaking.failed(flight, address, why)

    def _hold_against(self, flight: Flight, address: str, why: str) -> None:
        """A request that a second endpoint answers 500 as well is to blame itself, not they."""
        if why != BROKE:
            self._fleet.observe(address, Evidence.TIMED_OUT if why in TIMED_OUT else Evidence.FAILED)
        elif flight.broke is None:
            flight.broke = address
            self._fleet.observe(address, Evidence.UNFIT)
        else:
            self._metrics.acquitted(flight.broke)
            self._fleet.observe(flight.broke, Evidence.ACQUITTED)

    def retried(self, flight: Flight, count: int) -> None:
        """The request was tried again."""
        self._metrics.retried(self._pool(flight), count)
        self.on_retry(flight.pool, count)

    def released(self, flight: Flight) -> None:
        """A request has given its place back: there may be room for another."""
        self.on_release(flight.pool)

    def settled(self, flight: Flight, completion: Completion) -> None:
        """The access-log entry came."""
        pool, outcome = self._pool(flight), outcome_of(completion)
        if completion.address is not None and outcome in {"ok", "client_error"}:
            self._fleet.served(completion.address, completion.ttft_s if outcome == "ok" else None)
        self._metrics.completed(pool, outcome, completion.ttft_s, completion.duration_s)
        usage = completion.usage
        if usage is not None:
            self._metrics.used_tokens(pool, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            self._metrics.compared(pool, *_compared(flight, usage))
        if self._quotas is not None:
            self._quotas.settle(flight, outcome, completion)
        if self._breaking is not None:
            self._breaking.settled(flight, outcome, completion)
        if self._idempotency is not None:
            self._idempotency.settle(flight, outcome)
        self._decisions.finish(flight.request_id, flight.served_by, outcome, completion)
        if self._request_log is not None:
            self._request_log.settled(flight, completion, outcome)

    def missing(self, flight: Flight) -> None:
        """The access-log entry did not come in time."""
        self._metrics.entry_missing()
        if self._quotas is not None:
            self._quotas.settle(flight, _UNTOLD, None)
        if self._breaking is not None:
            self._breaking.forgot(flight)
        if self._idempotency is not None:
            self._idempotency.settle(flight, _UNTOLD)
        self._decisions.finish(flight.request_id, flight.served_by, _UNTOLD)
        if self._request_log is not None:
            self._request_log.missing(flight, _UNTOLD)

    def stray(self, completion: Completion) -> None:
        """An access-log entry came for a request that we did not route, or do not know (any more)."""
        if self._request_log is not None:
            self._request_log.stray(completion, outcome_of(completion))

    def _pool(self, flight: Flight) -> str:
        """The pool's name as a label; empty once it is gone, or the last requests would bring its series back."""
        return flight.pool if flight.pool in self._fleet.placements else ""


def _compared(flight: Flight, usage: Usage) -> tuple[float, int]:
    """Prompt tokens that were believed cached and that were found, of an answer that tells; else none of either.

    The belief is a share of the prompt as we count it, told in tokens as the engine counts them.
    """
    reservation = flight.reservation
    if usage.cached_tokens is None or reservation is None or not reservation.prompt_tokens:
        return 0.0, 0
    return reservation.cached_tokens / reservation.prompt_tokens * usage.prompt_tokens, usage.cached_tokens


_UNTOLD = "no access-log entry"


def outcome_of(completion: Completion) -> str:
    """One word for how a request ended."""
    flags = completion.flags  # few have any
    if flags and "no_healthy_upstream" in flags:
        return "no_known_address"
    if flags and completion.client_left:
        return "client_gone"
    if completion.failed is not None:
        return "endpoint_failed"
    if flags and completion.timed_out:
        return "timed_out"
    if completion.status >= 500:
        return "gateway_failed"
    if completion.status >= 400:
        return "client_error"
    return "ok" if completion.status else "no_answer"
