"""One request, from headers and body to a reply: parse, choose, commit, render. Every step is a plain call.

`decide` knows no transport. It reads one generation from start to end, and there is no await between choosing and
committing. What a refused request may have cost is nothing: the reservation is the last thing taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from time import perf_counter
from typing import Any, Protocol

import structlog

from extproc.config.generations import Generation, Target
from extproc.fleet.fleet import Fleet
from extproc.flight import Flight, Flights
from extproc.observe.decisions import DecisionLog, explain, explain_unplaceable
from extproc.reply import Answer, Pending, Reply, Route, refuse
from extproc.request.parsing import Parsed, model_splice, parse_body, to_request
from extproc.request.splice import Splice
from policies.placement.placement import Placement, Unplaceable
from policies.types import Decision, InferenceRequest, Kind, Reason, Refusal

log = structlog.get_logger(__name__)

_KINDS = {"/v1/chat/completions": Kind.CHAT, "/v1/completions": Kind.COMPLETION}
_MODELS = "/v1/models"
_INVALID = "invalid_request_error"
_RETRY_AFTER_S = 1
"""An endpoint is back within a second of answering, so that is when trying again makes sense."""


class PipelineEvents(Protocol):
    """Who counts what the pipeline does."""

    def decided(self, pool: str, endpoint: str, reason: str, prompt_tokens: int, matched_tokens: int) -> None:
        """One request was routed."""

    def refused_with(self, reason: str, status: int) -> None:
        """We answered with an error."""

    def answered(self, what: str) -> None:
        """We answered without an engine."""

    def fell_back(self, reason: str) -> None:
        """A decision rested on less than it should."""

    def stage(self, name: str) -> Any:  # noqa: ANN401 - prometheus_client's Histogram, or a stand-in with observe()
        """The clock of one step."""


class Pipeline:
    """`decide` for live requests and `explain` for the same choice without carrying it out."""

    def __init__(
        self,
        generation: Generation,
        fleet: Fleet,
        flights: Flights,
        decisions: DecisionLog,
        events: PipelineEvents,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        rng: Random,
    ) -> None:
        # Global state: swapped by a reload
        self.generation = generation
        self.draining = False
        # What outlives generations
        self._fleet = fleet
        self._flights = flights
        self._decisions = decisions
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        # Counters, looked up once
        self._events = events
        self._parse_s = events.stage("parse").observe
        self._choose_s = events.stage("choose").observe
        self._commit_s = events.stage("commit").observe

    # -- live requests

    @property
    def largest_body_bytes(self) -> int:
        """No more of a body is held than this."""
        return self.generation.config.limits.request_body_bytes

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:
        """The refusal of a request whose headers alone condemn it, so that its body need not be sent; else None."""
        refusal = self._judge_headers(self.generation, headers)
        return None if refusal is None else self._refuse(flight, headers, refusal)

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:
        """What to do with one request. Never raises: a fault of ours is a 500 with a counter and a log line."""
        try:
            outcome = self._decide(flight, headers, body)
        except Exception:
            log.exception("decision failed")
            outcome = Refusal(500, "server_error", "internal error while routing", Reason.INTERNAL_ERROR)
        return self._refuse(flight, headers, outcome) if isinstance(outcome, Refusal) else outcome

    def _refuse(self, flight: Flight, headers: Mapping[str, str], refusal: Refusal) -> Answer:
        self._events.refused_with(refusal.reason, refusal.status)
        self._decisions.add_refusal(self._wall_clock(), flight.request_id, _path(headers), refusal)
        return refuse(refusal)

    def _decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Refusal:
        generation = self.generation
        refusal = self._judge_headers(generation, headers)
        if refusal is not None:
            return refusal
        kind = _KINDS.get(_path(headers))
        if kind is None:
            self._events.answered("models")
            return Answer(200, generation.models_body, reason="models")
        if len(body) > generation.config.limits.request_body_bytes:
            return _too_large(generation)
        began = perf_counter()
        found = self._understand(generation, kind, headers, body)
        if isinstance(found, Refusal):
            return found
        target, request, splices = found
        request.subset = flight.subset
        parsed_at = perf_counter()
        self._parse_s(parsed_at - began)
        return self._place(flight, target, request, splices, parsed_at)

    def _judge_headers(self, generation: Generation, headers: Mapping[str, str]) -> Refusal | None:
        """Refusals that need no look into the body."""
        path, method = _path(headers), headers.get(":method", "")
        if path not in _KINDS:
            return _judge_without_engine(method, path)
        if method != "POST":
            return _method_not_allowed(method, path)
        if self.draining:
            return Refusal(503, "server_error", "shutting down", Reason.SHUTTING_DOWN, retry_after_s=_RETRY_AFTER_S)
        if self._flights.full:
            return _too_many_requests()
        if _declared_bytes(headers) > generation.config.limits.request_body_bytes:
            return _too_large(generation)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        return None if encoding in {"", "identity"} else _unsupported_encoding(encoding)

    def _understand(
        self, generation: Generation, kind: Kind, headers: Mapping[str, str], body: bytes
    ) -> tuple[Target, InferenceRequest, tuple[Splice, ...]] | Refusal:
        """Where the request leads, what it asks, and how its body must be edited for that."""
        parsed = parse_body(kind, body)
        if isinstance(parsed, Refusal):
            return parsed
        target = generation.targets.get(parsed.model)
        if target is None:
            return _unknown_model(parsed)
        session = headers.get("x-pointsman-session") or headers.get("x-session-id")
        splices = () if target.model == parsed.model else (model_splice(body, parsed, target.model),)
        return target, to_request(parsed, target.model, target.rates, session_key=session), splices

    def _place(
        self, flight: Flight, target: Target, request: InferenceRequest, splices: tuple[Splice, ...], began: float
    ) -> Route | Refusal:
        """Choose and commit, with nothing in between."""
        placement = self._fleet.placements[target.pool.name]
        now_s = self._clock()
        decision = placement.choose(request, self._fleet.state, now_s, self._rng, length=target.list_length)
        chosen_at = perf_counter()
        self._choose_s(chosen_at - began)
        if isinstance(decision, Unplaceable):
            return _no_ready_endpoint(target, decision)
        flight.reserve(request, decision, placement, placement.commit(decision, request, self._fleet.state, now_s))
        self._note(flight, request, decision)
        self._commit_s(perf_counter() - chosen_at)
        return Route(
            target.pool.cluster_name,
            decision.addresses,
            flight.request_id,
            request.model,
            target.headers,
            splices,
            target.list_for_all,
        )

    def _note(self, flight: Flight, request: InferenceRequest, decision: Decision) -> None:
        """Count and log the decision; the prompt goes no further than this."""
        request.prompt = b""
        self._events.decided(
            decision.pool, decision.addresses[0], decision.choice, request.input_tokens, decision.chosen_matched_tokens
        )
        for fallback in decision.fallbacks:
            self._events.fell_back(fallback)
        self._decisions.add(self._wall_clock(), flight.request_id, request, decision)

    # -- the same choice, without carrying it out

    def explain(self, path: str, body: bytes) -> dict[str, Any]:
        """Where this body would go now and why; `error` says why it would be refused."""
        generation = self.generation
        kind = _KINDS.get(path)
        if kind is None:
            return {"error": f"not a routed path: {path}; there are: {', '.join(_KINDS)}"}
        found = self._understand(generation, kind, {}, body)
        if isinstance(found, Refusal):
            return {"error": found.message, "status": found.status, "reason": found.reason}
        target, request, _ = found
        placement: Placement = self._fleet.placements[target.pool.name]
        rng = Random(0)  # its own, so that asking does not change what live requests draw
        decision = placement.choose(request, self._fleet.state, self._clock(), rng, length=target.list_length)
        asked = {"asked_model": request.asked_model, "model": request.model, "input_tokens": request.input_tokens}
        if isinstance(decision, Unplaceable):
            return {**asked, "pool": target.pool.name, **explain_unplaceable(decision)}
        return {**asked, **explain(decision)}


def _path(headers: Mapping[str, str]) -> str:
    """Without the query: some clients put their key there."""
    return headers.get(":path", "").partition("?")[0]


_LONGEST_LENGTH = 15
"""Digits of a content-length that is read; a longer one is simply too much."""


def _declared_bytes(headers: Mapping[str, str]) -> float:
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal():
        return 0
    return int(length) if len(length) <= _LONGEST_LENGTH else float("inf")


def _judge_without_engine(method: str, path: str) -> Refusal | None:
    """Only the model list is answered without an engine."""
    if path.rstrip("/") != _MODELS:
        return Refusal(404, _INVALID, f"no such path: {path[:200]}", Reason.UNKNOWN_PATH)
    return None if method in {"GET", "HEAD"} else _method_not_allowed(method, _MODELS)


def _too_large(generation: Generation) -> Refusal:
    limit = generation.config.limits.request_body_bytes
    return Refusal(413, _INVALID, f"the body is larger than {limit} bytes", Reason.BODY_TOO_LARGE)


def _too_many_requests() -> Refusal:
    message = "too many requests in flight"
    return Refusal(429, "rate_limit_error", message, Reason.TOO_MANY_REQUESTS, retry_after_s=_RETRY_AFTER_S)


def _unsupported_encoding(encoding: str) -> Refusal:
    message = f"content-encoding {encoding[:40]!r} is not supported; send the body as it is"
    return Refusal(415, _INVALID, message, Reason.UNSUPPORTED_ENCODING)


def _method_not_allowed(method: str, path: str) -> Refusal:
    return Refusal(405, _INVALID, f"{method} is not allowed on {path[:200]}", Reason.METHOD_NOT_ALLOWED)


def _unknown_model(parsed: Parsed) -> Refusal:
    message = f"The model `{parsed.model[:200]}` does not exist or is not served here"
    return Refusal(404, _INVALID, message, Reason.UNKNOWN_MODEL, "model")


def _no_ready_endpoint(target: Target, nowhere: Unplaceable) -> Refusal:
    why = ", ".join(f"{len(addresses)} {name}" for name, addresses in nowhere.filtered) or "the pool is empty"
    message = f"no endpoint of pool {target.pool.name} can take the request now (failed filters: {why})"
    return Refusal(503, "server_error", message, Reason.NO_READY_ENDPOINT, retry_after_s=_RETRY_AFTER_S)
