"""The guard for live requests: whose a request is, its client's limits, and what its prompt must not hold.

Not here: the limits themselves (policies/admission/clients.py) and the search (policies/admission/patterns.py). A
client's address is Envoy's word alone: the last entry of `x-forwarded-for`, or what a trusted proxy before it appended.
Where nobody tells an address, its request is not limited, and counted: all as one client would lock everybody out.

What was found in a prompt is told by the pattern's name. The prompt itself reaches no log and no metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from extproc.config.schema import Config
from extproc.config.sections import guard
from extproc.flight import Flight
from extproc.names import FORWARDED_FOR_HEADER
from extproc.request.tokens import image_spans, without
from policies.admission.buckets import Rate
from policies.admission.clients import Allowance, Clients, Limit, OverLimit, Visit, client_address
from policies.admission.patterns import Patterns, PatternSpec, Searched
from policies.types import InferenceRequest, Reason, Refusal, retry_after_s

_REASONS = {
    Limit.REQUESTS: (Reason.CLIENT_REQUESTS, "too many requests from this client"),
    Limit.CONCURRENCY: (Reason.CLIENT_CONCURRENCY, "this client has as many requests at once as it may"),
}


class GuardEvents(Protocol):
    """Who counts what the guard sees."""

    def pattern_found(self, pattern: str, action: str) -> None:
        """A prompt holds what a pattern describes."""

    def searched_partly(self) -> None:
        """A prompt is longer than what is searched of one."""

    def client_unknown(self) -> None:
        """A request was not limited, since nobody says whose it is."""


class Guard:
    """One `guard` section in force. `clock` is the one flights are opened by."""

    def __init__(self, section: guard.Guard, most_idle: int, events: GuardEvents, clock: Callable[[], float]) -> None:
        self._events = events
        self._clock = clock
        self._clients = Clients(_allowance(section), most_idle)
        self._heed(section)

    def _heed(self, section: guard.Guard) -> None:
        """Note what every request asks of a section: of a pydantic model each attribute takes five times as long."""
        self._client = section.client
        self._trusted_hops = section.trusted_hops
        self._limits = section.requests is not None or section.concurrency is not None
        self._patterns = _patterns(section)

    def adopt(self, section: guard.Guard, most_idle: int) -> None:
        """Use a changed section. What runs stays counted, unless clients are told apart otherwise than before."""
        if section.client == self._client:
            self._clients.configure(_allowance(section), most_idle)
        else:
            self._clients = Clients(_allowance(section), most_idle)
        self._heed(section)

    @property
    def forgotten(self) -> int:
        """Clients let go that had not made good for what they had taken."""
        return self._clients.forgotten

    # -- who asks, and how often

    def before_access(self, flight: Flight, headers: Mapping[str, str]) -> Refusal | None:
        """Let a request of an address in, or refuse it: before it is asked for a key, so that keys cannot be tried."""
        if self._client != "address" or flight.visit is not None or not self._limits:
            return None
        told = headers.get(FORWARDED_FOR_HEADER, "")
        return self._enter(flight, client_address(told, self._trusted_hops))

    def after_access(self, flight: Flight) -> Refusal | None:
        """Let a request of a tenant or of a key in, or refuse it."""
        if self._client == "address" or flight.visit is not None or not self._limits:
            return None
        caller = flight.caller
        if caller is None:
            return self._enter(flight, None)
        by_key = self._client == "key" and caller.key_name is not None
        return self._enter(flight, f"key {caller.key_name}" if by_key else f"tenant {caller.tenant}")

    def _enter(self, flight: Flight, client: str | None) -> Refusal | None:
        if client is None:
            self._events.client_unknown()
            flight.visit = Visit()
            return None
        entered = self._clients.enter(client, self._clock())
        if isinstance(entered, OverLimit):
            return _refusal(entered)
        flight.visit = entered
        return None

    # -- what is asked

    def judge(self, request: InferenceRequest) -> Refusal | None:
        """A refusal for a prompt that a pattern forbids; what was found is counted."""
        searched = self._search(request)
        if searched is None:
            return None
        if searched.partly:
            self._events.searched_partly()
        for pattern in searched.found:
            self._events.pattern_found(pattern.name, "refuse" if pattern.refuses else "count")
        return _forbidden(searched)

    def would_refuse(self, request: InferenceRequest) -> Refusal | None:
        """The same, without counting."""
        searched = self._search(request)
        return None if searched is None else _forbidden(searched)

    def _search(self, request: InferenceRequest) -> Searched | None:
        if self._patterns is None or not request.prompt:
            return None
        prompt = bytes(request.prompt)
        images = image_spans(prompt)  # what is in them is no text, and would take its place
        return self._patterns.search(without(prompt, images) if images else prompt)


def guard_of(config: Config, before: Guard | None, events: GuardEvents, clock: Callable[[], float]) -> Guard | None:
    """The guard of a config, None where it has none; the one `before` if there was one, with what it knows."""
    if config.guard is None:
        return None
    if before is None:
        return Guard(config.guard, config.limits.clients, events, clock)
    before.adopt(config.guard, config.limits.clients)
    return before


def _allowance(section: guard.Guard) -> Allowance:
    rate = section.requests
    return Allowance(None if rate is None else Rate(rate.per_s, rate.most), section.concurrency)


def _patterns(section: guard.Guard) -> Patterns | None:
    if not section.patterns:
        return None
    specs = [PatternSpec(name, one.regex, one.action == "refuse") for name, one in section.patterns.items()]
    return Patterns(specs, section.search_bytes)


def _refusal(over: OverLimit) -> Refusal:
    reason, what = _REASONS[over.limit]
    wait_s = retry_after_s(over.retry_after_s)
    return Refusal(429, "rate_limit_error", f"{what}; try again in {wait_s} s", reason, retry_after_s=wait_s)


def _forbidden(searched: Searched) -> Refusal | None:
    pattern = searched.refused
    if pattern is None:
        return None
    message = f"the prompt holds what is not allowed here ({pattern.name})"
    return Refusal(403, "invalid_request_error", message, Reason.PATTERN)
