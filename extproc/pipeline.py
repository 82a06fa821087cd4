"""One request, from headers and body to a reply: parse, choose, commit, render. Every step is a plain call.

`decide` knows no transport. It reads one generation from start to end, and there is no await between choosing and
committing. What a refused request may have cost is nothing: the reservation is the last thing taken.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from time import perf_counter
from typing import Any, Final, Protocol, cast

import structlog

from extproc.access.gate import gate_of
from extproc.asked import Asked
from extproc.breaking import Breaking
from extproc.config.generations import Generation, Target
from extproc.config.schema import Pool
from extproc.fleet.fleet import Fleet
from extproc.flight import Flight, Flights, Stage
from extproc.guard import Guard
from extproc.idempotency import Idempotency
from extproc.names import FORGED_HEADERS, IDEMPOTENCY_HEADER, RETRY_AFTER_S
from extproc.observe.decisions import DecisionLog, explain, explain_unplaceable
from extproc.observe.request_log import RequestLog
from extproc.precise import Found, Matcher
from extproc.precise import apply as apply_found
from extproc.quotas import Quotas
from extproc.reading import READ_AT_ONCE_BYTES, BodyReader, ReadingEvents
from extproc.reply import Answer, Headers, Pending, Reply, Route, error_body, refuse
from extproc.request.apis import (
    BY_PATH,
    OTHER,
    Api,
    ModelIn,
    api_of,
    by_path,
    canonical,
    guess,
    is_engine_admin,
    is_grpc,
    is_multipart,
    model_id,
    path_of,
    without_path,
)
from extproc.request.encodings import SUPPORTED, inflates_beyond
from extproc.request.plans import (
    Incoming,
    Plan,
    Read,
    encoding_of,
    make_plan,
    plain_body,
    too_large,
    unknown_model,
    unknown_path,
)
from extproc.request.stored import Made, StoredResponses
from extproc.request.urgency import PRIORITY_HEADER, Urgency, flow_of, slo_ttft_s
from extproc.retries import RetryBudgets
from extproc.waiting import INTERNAL_ERROR, Held, WaitingEvents, WaitingRoom, WaitingRooms
from policies.placement.placement import Placement, Unplaceable
from policies.types import Decision, Fallback, InferenceRequest, Kind, Reason, Refusal, Reservation

log = structlog.get_logger(__name__)

_INVALID = "invalid_request_error"
# every request asks: by the enum each takes ten times as long
_NOWHERE: Final = ModelIn.NOWHERE
_FORM: Final = ModelIn.FORM
_INFLATED_AT_ONCE_BYTES: Final = 256 * 1024
"""What is inflated on the loop: about a millisecond of text."""


class PipelineEvents(WaitingEvents, ReadingEvents, Protocol):
    """Who counts what the pipeline does."""

    def decided(self, pool: str, endpoint: str, reason: str, prompt_tokens: int, matched_tokens: int) -> None:
        """One request was routed."""

    def refused_with(self, reason: str, status: int) -> None:
        """We answered with an error."""

    def answered(self, what: str) -> None:
        """We answered without an engine."""

    def fell_back(self, reason: str) -> None:
        """A decision rested on less than it should."""

    def usage_asked(self, by: str) -> None:
        """A tenant's stream was, or was not, asked for its usage."""

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
        request_log: RequestLog | None = None,
        quotas: Quotas | None = None,
        breaking: Breaking | None = None,
        retry_budgets: RetryBudgets | None = None,
        idempotency: Idempotency | None = None,
    ) -> None:
        # Global state: swapped by a reload
        self.generation = generation
        self.gate = gate_of(generation.config.access, None)
        self.guard: Guard | None = None
        self.draining = False
        # What outlives generations
        self._fleet = fleet
        self._flights = flights
        self._decisions = decisions
        self._request_log = request_log
        self._quotas = quotas
        self._breaking = breaking
        self._retry_budgets = retry_budgets
        self._idempotency = idempotency
        self._stored = StoredResponses()
        self.matcher = Matcher()
        self.reader = BodyReader(lambda: self.generation.config.limits.large_body_bytes, events)
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng
        self.rooms = WaitingRooms(self, events, fleet.state, rng, clock)
        # Counters, looked up once
        self._events = events
        self._parse_s = events.stage("parse").observe
        self._choose_s = events.stage("choose").observe
        self._commit_s = events.stage("commit").observe

    # -- live requests

    def stop(self) -> None:
        """Take no more requests, and let nobody wait any longer."""
        self.draining = True
        self.rooms.turn_all_away(_SHUTTING_DOWN)

    @property
    def hold_s(self) -> float:
        """How long a gateway waits for us that does not say so itself."""
        return self.generation.config.wire.hold_s

    @property
    def largest_body_bytes(self) -> int:
        """No more of a body is held than this."""
        return self.generation.largest_body_bytes

    def refuse_early(self, flight: Flight, headers: Mapping[str, str]) -> Answer | None:
        """The refusal of a request whose headers alone condemn it, so that its body need not be sent; else None."""
        refusal = self._judge_headers(self.generation, flight, headers)
        return None if refusal is None else self._refuse(flight, headers, refusal)

    def decide(
        self,
        flight: Flight,
        headers: Mapping[str, str],
        body: bytes,
        read: Read | Refusal | None = None,
        found: Found | None = None,
    ) -> Reply | Pending:
        """What to do with one request. Never raises: a fault of ours is a 500 with a counter and a log line.

        `read`: what was found in the body; None to have it read, at once or in steps. `found`: what the engines hold
        of the prompt, if that was asked before.
        """
        try:
            outcome = self._decide(flight, headers, body, read, found)
        except Exception as error:
            log.exception("decision failed", error=str(error))
            outcome = INTERNAL_ERROR
        if not isinstance(outcome, Refusal):
            return outcome
        self._refund(flight)  # it went nowhere, whatever kept it
        return self._refuse(flight, headers, outcome, len(body))

    def _read_in_steps(self, incoming: Incoming, flight: Flight) -> Pending | Refusal:
        reading = self.reader.read(self.generation, incoming, _USABLE_HOLD * flight.hold_s or None)
        if isinstance(reading, Refusal):
            return reading
        decided = asyncio.ensure_future(self._decide_read(incoming, flight, reading))
        decided.add_done_callback(lambda _: reading.cancel())  # also if it was cancelled before it began to wait
        return Pending(decided)

    async def _decide_read(self, incoming: Incoming, flight: Flight, reading: asyncio.Task[Read | Refusal]) -> Reply:
        """The decision, once the body has been read. Cancelled with its stream, before anything is taken."""
        try:
            read = await reading
        except Exception as error:
            log.exception("reading failed", error=str(error))
            read = INTERNAL_ERROR
        reply = self.decide(flight, incoming.headers, incoming.body, read)
        return await reply.ready if isinstance(reply, Pending) else reply

    async def _decide_matched(
        self,
        flight: Flight,
        headers: Mapping[str, str],
        body: bytes,
        read: Read | Refusal | None,
        asked: asyncio.Future[Found],
    ) -> Reply:
        """The decision, once the senses have answered, or their time is over. Cancelled with its stream, as above.

        It is planned once more: the world, and the config, may have moved meanwhile.
        """
        reply = self.decide(flight, headers, body, read, await asked)
        return await reply.ready if isinstance(reply, Pending) else reply

    def _refuse(
        self, flight: Flight, headers: Mapping[str, str], refusal: Refusal, body_bytes: int | None = None
    ) -> Answer:
        path = path_of(headers)
        api = by_path(path)
        self._events.refused_with(refusal.reason, refusal.status)
        self._decisions.add_refusal(self._wall_clock(), flight.request_id, path, refusal, flight.tenant)
        if self._request_log is not None:
            self._request_log.refused(flight, path, refusal, kind=api.kind if api else None, request_bytes=body_bytes)
        return refuse(refusal, anthropic=api is not None and api.anthropic, grpc=is_grpc(headers))

    def _decide(
        self,
        flight: Flight,
        headers: Mapping[str, str],
        body: bytes,
        read: Read | Refusal | None,
        found: Found | None,
    ) -> Reply | Pending | Refusal:
        generation = self.generation
        refusal = self._judge_headers(generation, flight, headers)
        flight.judged_by = None  # an open stream must not keep a config
        if refusal is not None:
            return refusal
        if len(body) > generation.largest_body_bytes:
            return too_large(generation)
        api = flight.api or (guess(headers, body) if without_path(headers) else OTHER)
        if read is not None and isinstance(read, Read) and read.generation is not generation:
            read = None  # by another config; in steps again, if it is large
        incoming = Incoming(api, headers, body, flight.request_id, read, flight.tenant)
        if read is None and _reads_slowly(headers, body) and api.model_in in _WITH_BODIES:
            return self._read_in_steps(incoming, flight)
        if api.model_in is _NOWHERE:
            return self._answer_models(generation, flight, headers)
        return self._decide_on(generation, flight, incoming, found)

    def _decide_on(
        self, generation: Generation, flight: Flight, incoming: Incoming, found: Found | None
    ) -> Reply | Pending | Refusal:
        """The decision on a request that an engine is to answer."""
        headers, body, read = incoming.headers, incoming.body, incoming.read
        began = perf_counter()
        plan = make_plan(generation, self._stored, incoming)
        if isinstance(plan, Refusal):
            return plan
        request = plan.request
        if flight.subset is not None:
            request.subset = _both(flight.subset, request.subset)
        request.tenant = incoming.tenant
        objection = self._objection(plan, flight, incoming, found)
        if objection is not None:
            return replace(objection, asked_model=request.asked_model)
        if found is not None:
            apply_found(found, request)
        elif plan.target.precise and request.prompt:
            return self._look_up(flight, headers, body, read, plan)
        if not FORGED_HEADERS.isdisjoint(headers):
            plan = _without_forged(generation, headers, plan)
        parsed_at = perf_counter()
        self._parse_s(parsed_at - began)
        return self._place(Asked(generation, flight, headers, plan, body, read, found), parsed_at)

    def _answer_models(self, generation: Generation, flight: Flight, headers: Mapping[str, str]) -> Answer | Refusal:
        """The model list, or what stands there of one model."""
        path, space = path_of(headers), generation.space_of(flight.tenant)
        asked = model_id(path)
        body = space.model_body(asked) if asked else space.models_body
        if body is None:
            return unknown_model(asked)
        self._events.answered("models")
        if self._request_log is not None:
            self._request_log.answered(flight, path)
        return Answer(200, body, reason="models")

    def _look_up(
        self, flight: Flight, headers: Mapping[str, str], body: bytes, read: Read | Refusal | None, plan: Plan
    ) -> Reply | Pending | Refusal:
        """Find out what the engines hold of the prompt, and decide then. A tenant over its quota asks for nothing."""
        over_quota = None if self._quotas is None else self._quotas.judge(flight, plan.request.input_tokens)
        if over_quota is not None:
            return replace(over_quota, asked_model=plan.request.asked_model)
        text = read.plain if isinstance(read, Read) else cast("bytes", plain_body(self.generation, headers, body))
        asked = self._ask(plan, path_of(headers), text)
        if isinstance(asked, asyncio.Future):
            return Pending(asyncio.ensure_future(self._decide_matched(flight, headers, body, read, asked)))
        return self._decide(flight, headers, body, read, asked)

    def _ask(self, plan: Plan, path: str, plain: bytes) -> asyncio.Future[Found] | Fallback:
        """Have the senses say what the engines hold of the prompt."""
        pool, request, state = plan.target.pool, plan.request, self._fleet.state
        if pool.precise is None:
            raise AssertionError("only a pool with a precise index has one to ask")
        adapter = request.model if state.adapters.having(request.model, len(state.addresses)).any() else None
        return self.matcher.ask(pool.name, pool.precise, path, plain, request, adapter)

    def _admit(self, flight: Flight, headers: Mapping[str, str]) -> Refusal | None:
        """Establish who asks, once per request; a refusal for those who may not."""
        if self.gate is None or flight.caller is not None:
            return None
        admitted = self.gate.admit(headers, flight.claims)
        if isinstance(admitted, Refusal):
            return admitted
        flight.caller, flight.claims = admitted, None
        return None

    def _let_in(self, flight: Flight, headers: Mapping[str, str]) -> Refusal | None:
        """Establish who asks, and that this client may ask now."""
        guard = self.guard
        if guard is None:
            return self._admit(flight, headers)
        return guard.before_access(flight, headers) or self._admit(flight, headers) or guard.after_access(flight)

    def _judge_headers(self, generation: Generation, flight: Flight, headers: Mapping[str, str]) -> Refusal | None:
        """Refusals that need no look into the body. Who may not call learns nothing else.

        What one config finds right it does not look at again when the body has come; only we may be too busy by then.
        """
        if flight.judged_by is generation:
            return self._too_busy(flight.api)
        if self.guard is not None or self.gate is not None:
            turned_away = self._let_in(flight, headers)
            if turned_away is not None:
                return turned_away
        api = flight.api = api_of(headers)
        refusal = None
        if api is None or headers.get(":method", "") not in api.methods:
            refusal = _judge_path(generation, headers, api)
        if refusal is None:
            refusal = self._too_busy(api)
        if refusal is None and (api is None or api.model_in is not _NOWHERE):
            refusal = _judge_content(generation, headers, api)
        flight.judged_by = generation if refusal is None else None
        return refusal

    def _too_busy(self, api: Api | None) -> Refusal | None:
        """The refusal of all that takes a place."""
        if not self.draining and not self._flights.full:
            return None
        if api is not None and api.model_in is _NOWHERE:
            return None
        return _SHUTTING_DOWN if self.draining else _too_many_requests()

    def _place(self, asked: Asked, began: float) -> Reply | Pending | Refusal:
        """Choose and commit, with nothing in between; or wait for a place."""
        flight, target, request = asked.flight, asked.plan.target, asked.plan.request
        placement = self._fleet.placements[target.pool_name]
        flight.must_be_open()  # before anything is taken for it
        room = self._room_for(asked) if target.queued else None
        if isinstance(room, Refusal):
            return room
        if self._quotas is not None:
            over_quota = self._charge(self._quotas, flight, placement, request)
            if over_quota is not None:
                return over_quota
        now_s = self._clock()
        if room is None:
            decision = placement.choose(request, self._fleet.state, now_s, self._rng, length=target.list_length)
        elif (found := room.at_once(request, now_s, target.list_length)) is None:
            return room.enter(self._held(asked, placement, room, now_s))
        else:
            decision = found
        chosen_at = perf_counter()
        self._choose_s(chosen_at - began)
        if isinstance(decision, Unplaceable):
            return replace(self._unplaceable(target, decision), asked_model=request.asked_model)
        return self._commit(asked, placement, decision, chosen_at)

    def _room_for(self, asked: Asked) -> WaitingRoom | Refusal | None:
        """Where the request may wait, with its class noted; a refusal if it names a class that there is none of."""
        pool, request, flight = asked.plan.target.pool, asked.plan.request, asked.flight
        room = self.rooms.of(pool.name)
        if room is None or pool.queue is None:
            return None
        urgency = asked.generation.urgency_of(asked.headers, pool, flight.tenant)
        if urgency is None and flight.waits_since_s is None:
            return _unknown_class(asked.headers, pool)
        urgency = urgency or Urgency(pool.queue.classes[0].name)  # the class is gone while it waited
        request.class_name, request.priority = urgency.class_name, urgency.priority
        request.slo_ttft_s = slo_ttft_s(asked.headers)
        if not _has_work(request):
            return None
        if not flight.hold_s:
            request.without += (Fallback.CANNOT_WAIT,)
            return None
        request.may_wait = True
        return room

    def _commit(self, asked: Asked, placement: Placement, decision: Decision, began: float) -> Route:
        """Take the place that was chosen. `began`: when, by the clock of `perf_counter`."""
        flight, plan, generation = asked.flight, asked.plan, asked.generation
        request, target = plan.request, plan.target
        now_s = self._clock()
        if flight.waits_since_s is not None:  # whichever way it has found its place in the end
            decision.waited_s = now_s - flight.waits_since_s
        reservation = placement.commit(decision, request, self._fleet.state, now_s)
        flight.reserve(request, decision, placement, reservation)
        if self._breaking is not None:
            self._breaking.placed(flight)
        if self._quotas is not None and flight.charge is not None:
            self._expect_report(asked, self._quotas, reservation)
        if plan.response_id is not None:
            most = generation.config.limits.stored_responses
            self._stored.remember(plan.response_id, Made(flight, request.model), most)
        if plan.usage_asked_by is not None:
            self._events.usage_asked(plan.usage_asked_by)
        terms = self._terms(target, placement, request, decision)
        self._events.decided(
            decision.pool, decision.addresses[0], decision.choice, request.input_tokens, decision.chosen_matched_tokens
        )
        for fallback in decision.fallbacks:
            self._events.fell_back(fallback)
        self._decisions.add(self._wall_clock(), flight.request_id, request, decision)
        if self._request_log is not None:
            self._request_log.routed(flight, path_of(asked.headers), request, decision.addresses[0])
        request.prompt = b""  # it goes no further than this
        self._commit_s(perf_counter() - began)
        return Route(
            target.cluster_name,
            decision.addresses,
            flight.request_id,
            request.model,
            terms + generation.engine_priority(asked.headers, target, request),
            plan.splices,
            remove_headers=plan.remove_headers + generation.hidden_headers,
            list_for_all=target.list_for_all,
        )

    def _terms(self, target: Target, placement: Placement, request: InferenceRequest, decision: Decision) -> Headers:
        """How often it is tried and how long it may take, for Envoy."""
        budgets = self._retry_budgets
        retry = budgets is None or not target.terms.retries or budgets.admit(target.pool_name)
        if not retry:
            decision.fallbacks += (Fallback.RETRY_BUDGET,)
        slot, state = decision.order[0], self._fleet.state
        return target.terms.headers(
            request,
            context_tokens=state.window(slot),
            tokens_per_s=placement.ledger.decode_rate,
            waves=placement.waves(request, slot, state),
            retry=retry,
        )

    def _expect_report(self, asked: Asked, quotas: Quotas, reservation: Reservation) -> None:
        """The plugin of an engine that pushes tells what a stream used, should its answer not."""
        if asked.flight.streamed and self._fleet.state.silence_s[reservation.slot]:
            quotas.reports.expect(asked.flight, asked.headers.get("x-request-id", ""))

    # -- those that wait, and have waited

    def _held(self, asked: Asked, placement: Placement, room: WaitingRoom, now_s: float) -> Held:
        """The request's ticket for the queue."""
        request = asked.plan.request
        return Held(
            request.class_name or "",
            request.tenant or flow_of(asked.headers),
            request.input_tokens + placement.ledger.answer_tokens(request),
            held_bytes=_held_bytes(asked),
            priority=request.priority,
            deadline_s=math.inf if request.slo_ttft_s is None else now_s + request.slo_ttft_s,
            most_wait_s=_USABLE_HOLD * asked.flight.hold_s,
            request=request,
            asked=asked,
            again=partial(self.decide, asked.flight, asked.headers, asked.body, asked.read, asked.found),
            room=room,
        )

    def carry(self, held: Held, decision: Decision) -> Reply:
        """It goes, if it still may."""
        broken = self._broken(held.asked.plan)
        if broken is not None:
            return self.turn_away(held, broken)
        try:
            held.asked.flight.must_be_open()
            placement = self._fleet.placements[held.asked.plan.target.pool.name]
            return self._commit(held.asked, placement, decision, perf_counter())
        except Exception as error:
            log.exception("decision failed", error=str(error))
            return self.turn_away(held, INTERNAL_ERROR)

    def turn_away(self, held: Held, refusal: Refusal) -> Reply:
        """It has waited in vain."""
        asked = held.asked
        self._refund(asked.flight)
        refusal = replace(refusal, asked_model=asked.plan.request.asked_model)
        return self._refuse(asked.flight, asked.headers, refusal, len(asked.body))

    def abandoned(self, held: Held) -> None:
        """Its client has gone: no engine has seen it."""
        self._refund(held.asked.flight)

    def _refund(self, flight: Flight) -> None:
        """Give back what was taken for a request that goes nowhere."""
        if flight.key_hold is not None and flight.stage is not Stage.RESERVED:
            flight.key_hold.free()
        if self._quotas is not None and flight.stage is not Stage.RESERVED:
            self._quotas.refund(flight)

    def _objection(self, plan: Plan, flight: Flight, incoming: Incoming, found: Found | None) -> Refusal | None:
        """Why a request that could be read may not go on; else it holds its key, if it has one, from here on."""
        objection = None if self._breaking is None else self._broken(plan)
        # the guard has looked already where the engines were asked what they hold
        if objection is None and self.guard is not None and found is None:
            objection = self.guard.judge(plan.request)
        if objection is None and self._idempotency is not None and IDEMPOTENCY_HEADER in incoming.headers:
            objection = self._idempotency.hold(flight, incoming.headers, incoming.body)
        return objection

    def _broken(self, plan: Plan) -> Refusal | None:
        """The refusal of a request to a model of which too many have failed."""
        return None if self._breaking is None else self._breaking.judge(plan.target.pool_name)

    def _unplaceable(self, target: Target, nowhere: Unplaceable) -> Refusal:
        """Why nobody takes the request."""
        if self._breaking is not None and nowhere.last_filter == "busy":
            return self._breaking.all_busy(target.pool.name)
        return _no_ready_endpoint(target, nowhere)

    @staticmethod
    def _charge(quotas: Quotas, flight: Flight, placement: Placement, request: InferenceRequest) -> Refusal | None:
        """Take what the request is predicted to use from its tenant's quota; a refusal where that is used up."""
        if flight.charge is not None or not quotas.apply_to(flight):
            return None
        refusal = quotas.admit(flight, request.input_tokens + placement.ledger.answer_tokens(request))
        return None if refusal is None else replace(refusal, asked_model=request.asked_model)

    # -- the same choice, without carrying it out

    def explain(self, path: str, body: bytes, tenant: str | None = None, found: Found | None = None) -> dict[str, Any]:
        """Where this body of `tenant`'s would go now and why; `error` says why it would be refused.

        `path`: of an API with a JSON body.
        """
        plan = self._explained(path, body, tenant)
        if isinstance(plan, dict):
            return plan
        target, request = plan.target, plan.request
        broken = self._broken(plan)
        if broken is not None:
            return _told(broken, path)
        if found is not None:
            apply_found(found, request)
        placement: Placement = self._fleet.placements[target.pool.name]
        request.may_wait = target.pool.queue is not None and _has_work(request)
        rng = Random(0)  # its own, so that asking does not change what live requests draw
        decision = placement.choose(request, self._fleet.state, self._clock(), rng, length=target.list_length)
        asked = {
            "asked_model": request.asked_model,
            "model": request.model,
            "input_tokens": request.input_tokens,
            "tenant": tenant,
        }
        if isinstance(decision, Unplaceable):
            return {**asked, "pool": target.pool.name, **explain_unplaceable(decision)}
        return {**asked, "would_wait": self._would_wait(plan), **explain(decision)}

    def _would_wait(self, plan: Plan) -> bool:
        """Whether the request would find no room at once, were it of its pool's first class."""
        room = self.rooms.of(plan.target.pool.name)
        if room is None:
            return False
        return room.binder.at_once(plan.request, self._fleet.state, self._clock(), Random(0)) is None

    async def explain_matched(self, path: str, body: bytes, tenant: str | None = None) -> dict[str, Any]:
        """The same, with what the engines hold of the prompt where the pool has a precise index."""
        plan = self._explained(path, body, tenant)
        if isinstance(plan, dict) or plan.target.pool.precise is None or not plan.request.prompt:
            return self.explain(path, body, tenant)
        asked = self._ask(plan, path, body)
        return self.explain(path, body, tenant, await asked if isinstance(asked, asyncio.Future) else asked)

    def _explained(self, path: str, body: bytes, tenant: str | None) -> Plan | dict[str, Any]:
        plan = make_plan(self.generation, self._stored, Incoming(BY_PATH[path], {}, body, "", tenant=tenant))
        if isinstance(plan, Plan):
            forbidden = None if self.guard is None else self.guard.would_refuse(plan.request)
            if forbidden is None:
                return plan
            plan = forbidden
        return _told(plan, path)


def _told(refusal: Refusal, path: str) -> dict[str, Any]:
    """What a client of that API would read, under which status, and the reason as metrics and logs have it."""
    error = error_body(refusal, anthropic=BY_PATH[path].anthropic)
    return {**error, "status": refusal.status, "reason": refusal.reason}


def _has_work(request: InferenceRequest) -> bool:
    """An engine has to compute something for it, so it may have to wait."""
    return request.kind not in _NEVER_WAIT and request.input_tokens > 0


_NEVER_WAIT = frozenset({Kind.TOKENIZE, Kind.REALTIME, Kind.OTHER})
_USABLE_HOLD: Final = 0.9
"""Of the time a gateway waits for us; the rest is for the answer to get there."""


def _without_forged(generation: Generation, headers: Mapping[str, str], plan: Plan) -> Plan:
    """Remove what no client may send and this one did, also where the gateway is not ours and has not done so.

    A trusted hop's tenant is no forgery.
    """
    forged = FORGED_HEADERS & headers.keys() - {generation.config.access.tenant_header}
    return Plan(
        plan.target,
        plan.request,
        splices=plan.splices,
        remove_headers=(*plan.remove_headers, *sorted(forged)),
        response_id=plan.response_id,
        usage_asked_by=plan.usage_asked_by,
    )


def _held_bytes(asked: Asked) -> int:
    """The body, and of a compressed one what was inflated from it: kilobytes may have become megabytes."""
    body, read, plan = asked.body, asked.read, asked.plan
    inflated = len(read.plain) if isinstance(read, Read) and read.plain is not body else 0
    prompt = len(plan.request.prompt)  # one that was not compressed is no longer than its body, and goes with it
    return len(body) + inflated + (prompt if prompt > len(body) else 0) + sum(len(one.text) for one in plan.splices)


def _both(allowed: tuple[str, ...] | None, wanted: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The addresses that the gateway allows and the request needs; None for no constraint."""
    if allowed is None or wanted is None:
        return allowed if wanted is None else wanted
    return tuple(address for address in wanted if address in allowed or address.rpartition(":")[0] in allowed)


_LONGEST_LENGTH: Final = 15
"""Digits of a content-length that is read; a longer one is simply too much."""


def _declared_bytes(length: str) -> float:
    """What a content-length says; nothing where it is no number. Digit by digit: compiled, the fastest way."""
    declared = 0
    too_long = len(length) > _LONGEST_LENGTH
    for letter in length:
        digit = ord(letter) - 48
        if digit < 0 or digit > 9:
            return 0.0
        if not too_long:
            declared = 10 * declared + digit
    return math.inf if too_long else float(declared)


def _reads_slowly(headers: Mapping[str, str], body: bytes) -> bool:
    """A body that takes longer to read than others should wait for; a compressed one may be megabytes in kilobytes."""
    if len(body) > READ_AT_ONCE_BYTES:
        return True
    if "content-encoding" not in headers:
        return False
    return encoding_of(headers) in SUPPORTED and inflates_beyond(body, _INFLATED_AT_ONCE_BYTES)


def _judge_path(generation: Generation, headers: Mapping[str, str], api: Api | None) -> Refusal | None:
    """A path that is none of ours, or not with this method."""
    if without_path(headers):
        return None
    path = path_of(headers)
    if api is not None:
        return _method_not_allowed(headers.get(":method", ""), path)
    meant = canonical(path)
    if is_engine_admin(meant) and not generation.config.routing.allow_engine_admin:
        return _engine_admin(path)
    return unknown_path(path) if generation.target_of_path(meant, headers) is None else None


def _judge_content(generation: Generation, headers: Mapping[str, str], api: Api | None) -> Refusal | None:
    """Bodies that cannot be read, by what their headers say of them."""
    length = headers.get("content-length")
    if length is not None and _declared_bytes(length) > generation.largest_body_bytes:
        return too_large(generation)
    if api is None:
        return None
    if "content-encoding" in headers:
        encoding = encoding_of(headers)
        if encoding and encoding not in SUPPORTED:
            return _unsupported_encoding(encoding)
    if is_multipart(headers) != (api.model_in is _FORM) and api.model_in in _WITH_BODIES:
        return _unsupported_content_type(api)
    return None


_WITH_BODIES = {ModelIn.JSON: "application/json", ModelIn.FORM: "multipart/form-data"}


_SHUTTING_DOWN = Refusal(503, "server_error", "shutting down", Reason.SHUTTING_DOWN, retry_after_s=RETRY_AFTER_S)


def _too_many_requests() -> Refusal:
    message = "too many requests in flight"
    return Refusal(429, "rate_limit_error", message, Reason.TOO_MANY_REQUESTS, retry_after_s=RETRY_AFTER_S)


def _unknown_class(headers: Mapping[str, str], pool: Pool) -> Refusal:
    names = [] if pool.queue is None else [one.name for one in pool.queue.classes]
    said = headers.get(PRIORITY_HEADER, "")[:64]
    message = f"{PRIORITY_HEADER}: {said!r} is neither a class ({', '.join(names)}) nor a whole number"
    return Refusal(400, _INVALID, message, Reason.INVALID_REQUEST)


def _unsupported_encoding(encoding: str) -> Refusal:
    message = f"content-encoding {encoding[:40]!r} is not supported; send the body as it is, or as gzip or deflate"
    return Refusal(415, _INVALID, message, Reason.UNSUPPORTED_ENCODING)


def _unsupported_content_type(api: Api) -> Refusal:
    message = f"send the body as {_WITH_BODIES[api.model_in]}"
    return Refusal(415, _INVALID, message, Reason.UNSUPPORTED_CONTENT_TYPE)


def _engine_admin(path: str) -> Refusal:
    message = f"{path[:200]} belongs to the engines' own administration, which is not reachable through this gateway"
    return Refusal(404, _INVALID, message, Reason.ENGINE_ADMIN)


def _method_not_allowed(method: str, path: str) -> Refusal:
    return Refusal(405, _INVALID, f"{method} is not allowed on {path[:200]}", Reason.METHOD_NOT_ALLOWED)


_OUT = {
    "ready": "not ready",
    "model": "do not list the model",
    "subset": "outside the gateway's subset",
    "excluded": "excluded",
    "context": "too small a context",
    "busy": "busy",
}
"""What it means for endpoints that a filter removed them."""


def _no_ready_endpoint(target: Target, nowhere: Unplaceable) -> Refusal:
    why = ", ".join(f"{len(addresses)} {_OUT.get(name, name)}" for name, addresses in nowhere.filtered)
    message = f"no endpoint of pool {target.pool.name} can take the request now: {why or 'the pool is empty'}"
    return Refusal(503, "server_error", message, Reason.NO_READY_ENDPOINT, retry_after_s=RETRY_AFTER_S)
