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

    def decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Pending:
        """What to do with one request. Never raises: a fault of ours is a 500 with a counter and a log line."""
        try:
            outcome = self._decide(flight, headers, body)
        except Exception:
            log.exception("decision failed")
            outcome = Refusal(500, "server_error", "internal error while routing", Reason.INTERNAL_ERROR)
        if isinstance(outcome, Refusal):
            self._events.refused_with(outcome.reason, outcome.status)
            self._decisions.add_refusal(self._wall_clock(), flight.request_id, headers.get(":path", ""), outcome)
            return refuse(outcome)
        return outcome

    def _decide(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Reply | Refusal:
        generation = self.generation
        path = headers.get(":path", "").partition("?")[0]
        kind = _KINDS.get(path)
        if kind is None:
            return self._without_engine(generation, headers.get(":method", ""), path)
        refusal = self._gate(generation, headers, body)
        if refusal is not None:
            return refusal
        began = perf_counter()
        found = self._understand(generation, kind, headers, body)
        if isinstance(found, Refusal):
            return found
        target, request = found
        parsed_at = perf_counter()
        self._parse_s(parsed_at - began)
        return self._place(flight, target, request, body, parsed_at)

    def _without_engine(self, generation: Generation, method: str, path: str) -> Answer | Refusal:
        """What we answer ourselves: the model list, or that there is no such thing."""
        if path.rstrip("/") != _MODELS:
            return Refusal(404, _INVALID, f"no such path: {path[:200]}", Reason.UNKNOWN_PATH)
        if method not in {"GET", "HEAD"}:
            return _method_not_allowed(method, _MODELS)
        self._events.answered("models")
        return Answer(200, generation.models_body, reason="models")

    def _gate(self, generation: Generation, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        """Refusals that need no look into the body."""
        if headers.get(":method") != "POST":
            return _method_not_allowed(headers.get(":method", ""), headers.get(":path", ""))
        if self.draining:
            return Refusal(503, "server_error", "shutting down", Reason.SHUTTING_DOWN, retry_after_s=_RETRY_AFTER_S)
        if self._flights.full:
            return Refusal(
                429, "rate_limit_error", "too many requests in flight", Reason.TOO_MANY_REQUESTS,
                retry_after_s=_RETRY_AFTER_S,
            )  # fmt: skip
        limit = generation.config.limits.request_body_bytes
        if len(body) > limit:
            return Refusal(413, _INVALID, f"the body is larger than {limit} bytes", Reason.BODY_TOO_LARGE)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"", "identity"}:
            message = f"content-encoding {encoding[:40]!r} is not supported; send the body as it is"
            return Refusal(415, _INVALID, message, Reason.UNSUPPORTED_ENCODING)
        return None

    def _understand(
        self, generation: Generation, kind: Kind, headers: Mapping[str, str], body: bytes
    ) -> tuple[Target, InferenceRequest] | Refusal:
        parsed = parse_body(kind, body)
        if isinstance(parsed, Refusal):
            return parsed
        target = generation.targets.get(parsed.model)
        if target is None:
            return _unknown_model(parsed)
        session = headers.get("x-pointsman-session") or headers.get("x-session-id")
        return target, to_request(parsed, target.model, target.rates, session_key=session)

    def _place(
        self, flight: Flight, target: Target, request: InferenceRequest, body: bytes, began: float
    ) -> Route | Refusal:
        """Choose and commit, with nothing in between."""
        placement = self._fleet.placements[target.pool.name]
        now_s = self._clock()
        decision = placement.choose(request, self._fleet.state, now_s, self._rng, length=target.list_length)
        chosen_at = perf_counter()
        self._choose_s(chosen_at - began)
        if isinstance(decision, Unplaceable):
            return _no_ready_endpoint(target, decision)
        splices = () if request.model == request.asked_model else (model_splice(body, request.model),)
        flight.reserve(request, decision, placement, placement.commit(decision, request, self._fleet.state, now_s))
        self._note(flight, request, decision)
        self._commit_s(perf_counter() - chosen_at)
        return Route(
            target.pool.cluster_name, decision.addresses, flight.request_id, request.model, target.headers, splices
        )

    def _note(self, flight: Flight, request: InferenceRequest, decision: Decision) -> None:
        """Count and log the decision; the prompt goes no further than this."""
        request.prompt = b""
        self._events.decided(
            decision.pool, decision.addresses[0], Reason.ROUTED, request.input_tokens, decision.chosen_matched_tokens
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
        target, request = found
        placement: Placement = self._fleet.placements[target.pool.name]
        rng = Random(0)  # its own, so that asking does not change what live requests draw
        decision = placement.choose(request, self._fleet.state, self._clock(), rng, length=target.list_length)
        asked = {"asked_model": request.asked_model, "model": request.model, "input_tokens": request.input_tokens}
        if isinstance(decision, Unplaceable):
            return {**asked, "pool": target.pool.name, **explain_unplaceable(decision)}
        return {**asked, **explain(decision)}


def _method_not_allowed(method: str, path: str) -> Refusal:
    return Refusal(405, _INVALID, f"{method} is not allowed on {path[:200]}", Reason.METHOD_NOT_ALLOWED)


def _unknown_model(parsed: Parsed) -> Refusal:
    message = f"The model `{parsed.model[:200]}` does not exist or is not served here"
    return Refusal(404, _INVALID, message, Reason.UNKNOWN_MODEL, "model")


def _no_ready_endpoint(target: Target, nowhere: Unplaceable) -> Refusal:
    why = ", ".join(f"{len(addresses)} {name}" for name, addresses in nowhere.filtered) or "the pool is empty"
    message = f"no endpoint of pool {target.pool.name} can take the request now (failed filters: {why})"
    return Refusal(503, "server_error", message, Reason.NO_READY_ENDPOINT, retry_after_s=_RETRY_AFTER_S)
