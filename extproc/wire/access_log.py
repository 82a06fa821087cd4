"""Envoy's access-log stream, joined to the flights it speaks of.

Two logs arrive over one service: the downstream log, one entry per finished request (`Completion`), and the upstream
log, entries for attempts that failed or ran elsewhere than first chosen (`Attempt`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio
import structlog

from extproc.flight import Attempt, Completion, Flights
from extproc.names import OWN_DETAILS
from extproc.wire.log_entries import read_access_log
from extproc.wire.messages import Malformed

log = structlog.get_logger(__name__)


class AccessLogEvents(Protocol):
    """Who counts entries."""

    def entry(self, *, kind: str, result: str) -> None:
        """One entry came: kind `request` or `attempt`; result `joined`, `unknown`, `unrouted`, `error`."""

    def malformed(self, service: str) -> None:
        """Bytes came that are no message of the protocol."""

    def answered_by_envoy(self, status: int) -> None:
        """Envoy answered a request itself, before or instead of any endpoint."""

    def no_known_address(self) -> None:
        """Envoy knew none of the addresses we picked and answered 503 itself."""


class AccessLog:
    """The grpc.aio handler of `AccessLogService.StreamAccessLogs`, over raw bytes."""

    def __init__(
        self, flights: Flights, events: AccessLogEvents, on_stray: Callable[[Completion], None] = lambda _: None
    ) -> None:
        """`on_stray` gets the entries that belong to no flight; not those of answers of ours."""
        self._flights = flights
        self._events = events
        self._on_stray = on_stray

    async def stream(self, _requests: object, context: Any) -> bytes:  # noqa: ANN401 - grpcio has no types
        """Read entries until Envoy closes the stream."""
        try:
            while (raw := await context.read()) is not grpc.aio.EOF:
                self.receive(raw)
        except asyncio.CancelledError:
            pass  # Envoy went away: the entries it still held are lost, and their flights time out as missing
        return b""

    def receive(self, raw: bytes) -> None:
        """Take one message of the stream."""
        try:
            entries = read_access_log(raw)
        except Malformed as error:
            self._events.malformed("access_log")
            log.warning("malformed access-log message", error=str(error))
            return
        for entry in entries:
            try:
                self._take(entry)
            except Exception:
                # One entry that trips us must not end the stream and take all the others with it.
                log.exception("access-log entry not processed")
                self._events.entry(kind="request", result="error")

    def _take(self, entry: Attempt | Completion | Malformed) -> None:
        if isinstance(entry, Completion):
            self._join(entry)
        elif isinstance(entry, Attempt):
            self._events.entry(kind="attempt", result="joined" if self._flights.on_attempt(entry) else "unknown")
        else:
            self._events.malformed("access_log")
            log.warning("malformed access-log entry", error=str(entry))

    def _join(self, entry: Completion) -> None:
        if entry.odd:
            self._events.malformed("access_log")
            log.warning("a figure nobody can mean", figure=entry.odd, endpoint=entry.address)
        if "no_healthy_upstream" in entry.flags:
            self._events.no_known_address()
        if self._flights.on_completion(entry):
            self._events.entry(kind="request", result="joined")
            return
        self._events.entry(kind="request", result=self._not_joined(entry))
        if not entry.details.startswith(OWN_DETAILS):
            self._on_stray(entry)

    def _not_joined(self, entry: Completion) -> str:
        """`unrouted`: we answered it or it ended before we could. `unknown`: routed, but not by this process."""
        if entry.address is not None:
            return "unknown"
        if 100 <= entry.status < 600 and not entry.details.startswith(OWN_DETAILS):
            self._events.answered_by_envoy(entry.status)
        return "unrouted"
