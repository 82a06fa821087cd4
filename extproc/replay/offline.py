"""A trace through one policy and simulated engines, in virtual time. Deterministic: the seed decides everything.

The policy under test is the product's own Placement over the product's own FleetState; engines are the simulator's.
Only the clock is virtual: events in a heap, none of them waits. What a live fleet adds (Envoy, HTTP, scrapes that come
late) costs milliseconds where the engines cost seconds; scrapes are modelled, for policies that live by them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Literal

from extproc.replay.engine_index import EngineIndex
from extproc.replay.quiet_engine import QuietEngine
from extproc.replay.traces import Trace, TraceRequest
from policies.admission.binding import Binder, BindingSpec, WaitingRequest
from policies.admission.queue import ClassSpec, Queue, QueueSpec
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.placement import Placement, Unplaceable
from policies.placement.policy import PolicySpec
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import HARDWARE as PROFILES
from policies.types import Decision, InferenceRequest, Kind, Reservation
from vllm_adapters.simulator.engine import MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Running, Step
from vllm_adapters.simulator.hardware import H100_8B, HARDWARE

_SCRAPE_DELAY_S = 0.02
"""From an engine's page to the router's view of it."""
_STUCK_AFTER_S = 86_400.0
"""Nothing but scrapes for a day: no engine will ever take what is left."""


class Stuck(Exception):
    """Requests are left that no engine takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Something that happens to an engine `at_s`: it dies, or joins with an empty cache (it was absent before)."""

    at_s: float
    what: Literal["kill", "join"]
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines, and what the router sees of them.

    `speeds[i]` multiplies engine i's; those not named have 1. `first_tokens`: seen as they come, told when the answer
    ends (`timed`), or never. `notice_s`: how long a dead engine is still believed to live.
    """

    engines: int = 8
    hardware: str = H100_8B.name
    kv_capacity_tokens: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    speeds: tuple[float, ...] = ()
    scrape_interval_s: float = 0.5
    first_tokens: Literal["seen", "timed", "never"] = "seen"
    notice_s: float = 1.0
    disturbances: tuple[Disturbance, ...] = ()

    @property
    def capacity_tokens(self) -> int:
        """KV cache of one engine."""
        return self.kv_capacity_tokens or HARDWARE[self.hardware].kv_capacity_tokens


@dataclass(slots=True)
class Outcome:
    """What became of one request; times are the virtual clock's, negative while they are not known.

    `placed_s`: when an engine got it, later than it arrived if it was held. `cached_tokens`: of its prompt, found by
    the engine; `predicted_tokens`: promised by the router's index.
    """

    arrived_s: float = -1.0
    placed_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    engine: int = -1
    cached_tokens: int = 0
    predicted_tokens: int = 0
    reservation: Reservation | None = None
    running: Running | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment, by engine: requests inside, and the engine's counters of prompt tokens and hits."""

    at_s: float
    load: tuple[int, ...]
    queried_tokens: tuple[int, ...]
    hit_tokens: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """A finished replay. `ended_s`: when its last request was answered.

    `drained_*`: with a fixed number in flight, when the last one was sent, and how many had been answered by then.
    """

    trace: Trace
    fleet: Fleet
    outcomes: list[Outcome]
    ended_s: float
    preemptions: int
    drained_s: float = 0.0
    drained_count: int = 0
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class _Held(WaitingRequest):
    """A request that waits to be placed, by its number in the trace."""

    number: int


_ENDLESS = QueueSpec((ClassSpec("all", places=2**62, max_wait_s=float("inf")),), max_bytes=2**62)
_BIND_S = 0.05
"""Who waits is looked at again so often: work is done where nobody sees it."""


class _Node:
    """One engine and what the replay knows of it."""

    __slots__ = ("busy", "engine", "quiet_ends_s", "run", "slot", "speed", "up")

    def __init__(self, engine: QuietEngine, slot: int, speed: float) -> None:
        self.engine = engine
        self.slot = slot
        self.speed = speed
        self.up = True
        self.busy = False
        self.run = 0  # counts changes of plan: a step announced before the last one is void
        self.quiet_ends_s: list[float] = []  # of the quiet steps it is passing over


class Replay:
    """One trace, one policy, one fleet. `in_flight`: keep so many requests under way instead of following arrivals.

    `exact`: the policy is told what the engines really hold. `sample_s`: look at the fleet this often.
    `policy`: its name, for messages. `binding`: how requests are held that find no room; without it none are.
    """

    def __init__(
        self,
        trace: Trace,
        spec: PolicySpec,
        fleet: Fleet,
        *,
        seed: int = 1,
        in_flight: int | None = None,
        exact: bool = False,
        sample_s: float | None = None,
        policy: str = "replay",
        binding: BindingSpec | None = None,
    ) -> None:
        self._trace = trace.fitted(fleet.capacity_tokens)
        self._fleet = fleet
        self._in_flight = in_flight
        self._sample_s = sample_s
        self._rng = Random(seed)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._state = FleetState(stale_after_s=float("inf"), max_endpoints=fleet.engines)
        tokens = spec.index_tokens or fleet.capacity_tokens
        self._exact = EngineIndex(tokens, self._held_by) if exact else None
        self._placement = Placement(
            "replay",
            spec.build(policy),
            PrefixIndex(tokens) if self._exact is None else self._exact,
            Ledger(PROFILES[fleet.hardware]),
            filters=spec.filters,
        )
        self._binder = None if binding is None else Binder(self._placement, Queue[_Held](_ENDLESS), binding)
        self._nodes = [self._node(number) for number in range(fleet.engines)]
        self._set_members()
        requests = self._trace.requests
        self._outcomes = [Outcome() for _ in requests]
        self._followers: dict[int, list[int]] = {}
        self._held: deque[int] = deque()
        self._ended = 0
        self._progress_s = 0.0
        self._run = Run(self._trace, fleet, self._outcomes, 0.0, 0)

    def _node(self, number: int) -> _Node:
        fleet, slot = self._fleet, self._state.add(f"10.0.{number // 250}.{number % 250 + 1}:8000")
        engine = QuietEngine(
            HARDWARE[fleet.hardware],
            kv_capacity_tokens=fleet.capacity_tokens,
            block_size_tokens=self._trace.block_tokens,
            max_num_seqs=fleet.max_num_seqs,
            max_batched_tokens=fleet.max_batched_tokens,
        )
        self._state.state[slot] = State.READY
        self._state.routable[slot] = True
        self._state.kv_capacity_tokens[slot] = fleet.capacity_tokens
        self._state.set_models(slot, frozenset({"m"}))
        self._state.observed_at_s[slot] = 0.0
        return _Node(engine, slot, fleet.speeds[number] if number < len(fleet.speeds) else 1.0)

    def _set_members(self) -> None:
        self._placement.set_members(node.slot for node in self._nodes if node.up)

    # -- the clock

    def _at(self, time_s: float, what: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), what, args))

    def run(self) -> Run:
        """To the last answer."""
        self._schedule()
        events, total = self._events, len(self._outcomes)
        while events and self._ended < total:
            self._now_s, _, what, args = heapq.heappop(events)
            what(*args)
        self._run.ended_s = self._now_s
        self._run.preemptions = sum(node.engine.preemptions_total for node in self._nodes)
        return self._run

    def _schedule(self) -> None:
        requests = self._trace.requests
        independent = []
        for number, request in enumerate(requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(number)
            else:
                independent.append(number)
        if self._in_flight is None:
            for number in independent:
                self._at(requests[number].arrives_s, self._arrive, number)
        else:
            self._waiting = deque(independent)
            for _ in range(min(self._in_flight, len(independent))):
                self._at(0.0, self._arrive, self._waiting.popleft())
        for node in self._nodes:
            self._at(self._fleet.scrape_interval_s * self._rng.random(), self._scrape, node)
        if self._sample_s:
            self._at(0.0, self._sample)
        for disturbance in self._fleet.disturbances:
            self._plan(disturbance)

    def _plan(self, disturbance: Disturbance) -> None:
        node = self._nodes[disturbance.engine]
        if disturbance.what == "join":
            node.up = False
            self._set_members()
            self._at(disturbance.at_s, self._join, node)
        else:
            self._at(disturbance.at_s, self._kill, node)

    # -- requests

    def _arrive(self, number: int) -> None:
        outcome = self._outcomes[number]
        if outcome.arrived_s < 0:
            outcome.arrived_s = self._now_s
        request = self._trace.requests[number]
        asked = _as_asked(request, self._trace.block_tokens)
        if self._exact is not None:
            self._exact.ask(request)
        if self._binder is not None:
            decision = self._binder.at_once(asked, self._state, self._now_s, self._rng, length=1)
            if decision is None:
                self._hold(self._binder, number, asked)
                return
        else:
            decision = self._placement.choose(asked, self._state, self._now_s, self._rng, length=1)
        if isinstance(decision, Unplaceable):
            self._held.append(number)
            return
        self._place(number, asked, decision)

    def _hold(self, binder: Binder[_Held], number: int, asked: InferenceRequest) -> None:
        if not len(binder.queue):
            self._at(self._now_s + _BIND_S, self._bind_again)
        ticket = _Held("all", "", asked.input_tokens, request=asked, number=number)
        binder.queue.offer(ticket, self._now_s)
        binder.came(ticket, self._state, self._now_s, self._rng)
        self._bind()

    def _bind(self) -> None:
        """Whoever can go now, goes."""
        binder = self._binder
        while binder is not None:
            for bound in binder.bindings(self._state, self._now_s, self._rng, length=1):
                binder.queue.take(bound.ticket, self._now_s)
                self._place(bound.ticket.number, bound.ticket.request, bound.decision)
            if not binder.unfinished:
                return

    def _bind_again(self) -> None:
        self._bind()
        if self._binder is not None and len(self._binder.queue):
            self._at(self._now_s + _BIND_S, self._bind_again)

    def _place(self, number: int, asked: InferenceRequest, decision: Decision) -> None:
        outcome, request = self._outcomes[number], self._trace.requests[number]
        outcome.reservation = self._placement.commit(decision, asked, self._state, self._now_s)
        outcome.placed_s = self._now_s
        outcome.predicted_tokens = decision.chosen_matched_tokens
        outcome.engine = decision.order[0]
        node = self._nodes[outcome.engine]
        self._wake(node)
        outcome.running = node.engine.submit(number, request.blocks, request.prompt_tokens, request.output_tokens)
        self._start(node)

    def _held_by(self, slot: int, request: TraceRequest) -> int:
        size = self._trace.block_tokens
        usable = min(request.prompt_blocks, (request.prompt_tokens - 1) // size)
        return self._nodes[slot].engine.cache.holds(request.blocks, usable) * size

    def _end(self, number: int) -> None:
        outcome, request = self._outcomes[number], self._trace.requests[number]
        outcome.ended_s = self._now_s
        self._ended += 1
        self._progress_s = self._now_s
        if outcome.running is not None:
            outcome.cached_tokens, outcome.running = outcome.running.cached_tokens, None
        self._tell_first_token(outcome)
        self._give_back(outcome)
        self._placement.ledger.answered(request.output_tokens)
        self._bind()
        for follower in self._followers.get(number, ()):
            self._at(self._now_s + self._trace.requests[follower].think_s, self._arrive, follower)
        if self._in_flight is not None:
            self._refill()

    def _tell_first_token(self, outcome: Outcome) -> None:
        if self._fleet.first_tokens == "timed" and outcome.reservation is not None:
            self._placement.ledger.timed(outcome.reservation, outcome.first_token_s - outcome.placed_s)

    def _give_back(self, outcome: Outcome) -> None:
        reservation, outcome.reservation = outcome.reservation, None
        if reservation is not None:
            self._placement.ended(reservation, self._now_s)
            self._state.release(reservation)

    def _refill(self) -> None:
        if self._waiting:
            self._at(self._now_s, self._arrive, self._waiting.popleft())
        elif not self._run.drained_s:
            self._run.drained_s, self._run.drained_count = self._now_s, self._ended

    # -- engines

    def _start(self, node: _Node) -> None:
        if node.busy or not node.up:
            return
        quiet = node.engine.quiet_steps()
        if quiet > 1:
            node.busy = True
            node.quiet_ends_s = node.engine.quiet_ends_s(quiet, self._now_s, node.speed)
            self._at(node.quiet_ends_s[-1], self._quiet_over, node, node.run)
            return
        duration_s = node.engine.start_step()
        if duration_s is not None:
            node.busy = True
            self._at(self._now_s + duration_s / node.speed, self._step, node, node.run)

    def _quiet_over(self, node: _Node, run: int) -> None:
        if run != node.run:
            return
        node.engine.skip(len(node.quiet_ends_s))
        node.quiet_ends_s = []
        node.busy = False
        self._start(node)

    def _wake(self, node: _Node) -> None:
        """Bring an engine that passes over quiet steps to now: in the middle of one of them."""
        ends_s = node.quiet_ends_s
        if not ends_s or not node.up:
            return
        passed = bisect_right(ends_s, self._now_s)
        node.engine.skip(passed)
        node.quiet_ends_s = []
        node.run += 1
        node.busy = passed < len(ends_s)
        if node.busy:
            node.engine.start_step()
            self._at(ends_s[passed], self._step, node, node.run)

    def _step(self, node: _Node, run: int) -> None:
        if run != node.run:
            return
        node.busy = False
        self._take(node.engine.end_step())
        self._start(node)

    def _take(self, step: Step) -> None:
        for number in step.first_tokens:
            outcome = self._outcomes[number]  # type: ignore[call-overload] # an engine names requests by what it was given
            if outcome.first_token_s < 0:
                outcome.first_token_s = self._now_s
            if self._fleet.first_tokens == "seen" and outcome.reservation is not None:
                self._placement.first_token(outcome.reservation, self._now_s)
        if step.first_tokens and self._fleet.first_tokens == "seen":
            self._bind()
        for number in step.finished:
            self._end(number)  # type: ignore[arg-type] # as above

    def _scrape(self, node: _Node) -> None:
        if self._now_s > self._progress_s + _STUCK_AFTER_S:
            raise Stuck(f"{len(self._outcomes) - self._ended} requests are left and no engine takes them")
        engine = node.engine
        figures = (engine.waiting, engine.running, engine.kv_used)
        self._at(self._now_s + _SCRAPE_DELAY_S, self._scraped, node, figures)
        self._at(self._now_s + self._fleet.scrape_interval_s, self._scrape, node)

    def _scraped(self, node: _Node, figures: tuple[float, float, float]) -> None:
        waiting, running, kv_used = figures
        self._state.scraped(node.slot, waiting=waiting, running=running, kv_used=kv_used, now_s=self._now_s)

    def _sample(self) -> None:
        engines = [node.engine for node in self._nodes]
        load = tuple(engine.waiting + engine.running for engine in engines)
        queried = tuple(engine.prefix_queries_tokens_total for engine in engines)
        hits = tuple(engine.prefix_hits_tokens_total for engine in engines)
        self._run.samples.append(Sample(self._now_s, load, queried, hits))
        self._at(self._now_s + (self._sample_s or 0.0), self._sample)

    # -- disturbances

    def _kill(self, node: _Node) -> None:
        node.run += 1
        node.up = False
        self._at(self._now_s + self._fleet.notice_s, self._noticed, node)

    def _noticed(self, node: _Node) -> None:
        self._set_members()
        lost = [n for n, o in enumerate(self._outcomes) if o.engine == node.slot and o.arrived_s >= 0 and o.ended_s < 0]
        for number in lost:
            outcome = self._outcomes[number]
            self._give_back(outcome)
            outcome.first_token_s, outcome.engine, outcome.running = -1.0, -1, None
            self._arrive(number)

    def _join(self, node: _Node) -> None:
        node.up = True
        self._set_members()
        while self._held:
            self._at(self._now_s, self._arrive, self._held.popleft())


def _as_asked(request: TraceRequest, block_tokens: int) -> InferenceRequest:
    """The request as the router sees it: sizes and hashes, no answer."""
    blocks: Sequence[int] = request.asked_blocks or request.blocks[: request.prompt_blocks]
    return InferenceRequest(
        Kind.CHAT,
        "m",
        "m",
        request.prompt_tokens,
        stream=True,
        block_hashes=blocks,
        block_tokens=request.asked_tokens or [block_tokens] * len(blocks),
        session_key=request.session,
    )
