"""What one pass of late binding costs: the whole window priced against the whole fleet, by stage.

    make bench-binding [ARGS='--passes 300']

Pure computation, no processes: a placement, a full queue of two classes and fifty tenants, prompts of 8,000 tokens most
of which begin as something that an endpoint holds. Three kinds of pass:

- `full`: no endpoint has room, which is what most passes find in overload;
- `one goes`: every eighth endpoint has room, and the first of the queue have waited long enough to go there;
- `looks up`: the same, and as many prompts as a pass looks up have to be;
- `in vain`: every eighth endpoint has room, but everybody has just come and waits for what another one holds.

CPU time of the thread, so other work on the machine counts only by what it does to caches and clocks; how fast the
machine was meanwhile shows in a loop of always the same additions, timed between the passes. Stages are timed in runs
of their own, by wrapping the pass's functions.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import typer

from policies.admission.binding import Binder, BindingSpec, WaitingRequest
from policies.admission.queue import ClassSpec, Queue, QueueSpec
from policies.admission.room import RoomSpec
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.placement import Placement, Unplaceable
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import HARDWARE
from policies.types import InferenceRequest, Kind

_BLOCK_TOKENS, _BLOCKS, _SHARED_BLOCKS = 64, 125, 100
_KV_TOKENS = 440_000
_RUNNING = 12
_ROOM_EVERY = 8
_TENANTS = 50
_CLASSES = (
    ClassSpec("real-time", weight=7, places=10_000, overflow="batch"),
    ClassSpec("batch", weight=3, places=10_000),
)
_BUDGET_MS = 1.0
_FORGOTTEN = 4
"""As many as a pass looks up."""
_WARM_UP = 10
_STAGES = ("survey", "_look_up", "_price", "choose")
_Stopwatch = dict[str, float]


class Scene:
    """A fleet under load, and a queue in front of it."""

    def __init__(self, endpoints: int, *, room_every: int | None, waited_s: float = 10.0, waiting: int = 1_200) -> None:
        self.now_s, self.rng = 0.0, Random(1)
        self.state = FleetState(stale_after_s=float("inf"), max_endpoints=endpoints)
        self.slots = [self._endpoint(number) for number in range(endpoints)]
        ledger, index = Ledger(HARDWARE["8b-h100"]), PrefixIndex(_KV_TOKENS)
        self.placement = Placement("bench", MarginalCostSpec().build("default"), index, ledger)
        self.placement.set_members(self.slots)
        self.busy = [slot for position, slot in enumerate(self.slots) if room_every is None or position % room_every]
        self._run_requests()
        queue = Queue[WaitingRequest](QueueSpec(_CLASSES, max_bytes=2**62))
        self.binder = Binder(self.placement, queue, BindingSpec(room=RoomSpec(endpoint_requests=_RUNNING)))
        for number in range(waiting):
            ticket = self._waiting(number)
            queue.offer(ticket, -waited_s * self.rng.random())
            self.binder.came(ticket, self.state, self.now_s, self.rng)

    def _endpoint(self, number: int) -> int:
        slot = self.state.add(f"10.{number // 62500}.{number // 250 % 250}.{number % 250 + 1}:8000")
        self.state.state[slot] = State.READY
        self.state.routable[slot] = True
        self.state.kv_capacity_tokens[slot] = _KV_TOKENS
        self.state.set_models(slot, frozenset({"m"}))
        self.state.observed_at_s[slot] = 0.0
        return slot

    def _run_requests(self) -> None:
        """Every endpoint serves some conversations; those without room serve as many as they may."""
        for slot in self.slots:
            for conversation in range(_RUNNING if slot in self.busy else _RUNNING - 1):
                self._commit(slot, self._request(slot * _RUNNING + conversation))
            self.placement.ledger.forget(slot)  # their prompts are done

    def _commit(self, slot: int, request: InferenceRequest) -> None:
        only = np.zeros(len(self.state.generation), np.bool_)
        only[slot] = True
        decision = self.placement.choose(request, self.state, self.now_s, self.rng, length=1, room=only)
        if isinstance(decision, Unplaceable):
            raise TypeError(decision)
        self.placement.commit(decision, request, self.state, self.now_s)

    def _request(self, conversation: int) -> InferenceRequest:
        """A turn of a conversation: it begins as the others of it do, and ends in a way of its own."""
        shared = [hash((conversation, block)) & 2**62 - 1 for block in range(_SHARED_BLOCKS)]
        own = [self.rng.getrandbits(62) for _ in range(_BLOCKS - _SHARED_BLOCKS)]
        request = InferenceRequest(Kind.CHAT, "m", "m", _BLOCK_TOKENS * _BLOCKS, stream=True)
        request.block_hashes, request.block_tokens = [*shared, *own], [_BLOCK_TOKENS] * _BLOCKS
        return request

    def _waiting(self, number: int) -> WaitingRequest:
        """It goes on with a conversation that a busy endpoint holds."""
        request = self._request(self.rng.choice(self.busy) * _RUNNING + self.rng.randrange(_RUNNING))
        request.class_name = _CLASSES[number % 2].name
        tenant = f"tenant-{self.rng.randrange(_TENANTS)}"
        return WaitingRequest(request.class_name, tenant, float(request.input_tokens), request=request)

    def one_pass(self) -> None:
        """As at a wake."""
        next(self.binder.bindings(self.state, self.now_s, self.rng), None)


def forget_some(scene: Scene) -> None:
    """The first of the queue are not known."""
    for ticket in scene.binder.queue.window(_FORGOTTEN):
        ticket.prospects = None


def measure(scene: Scene, passes: int, before: Callable[[Scene], None]) -> tuple[list[float], float]:
    """Milliseconds of CPU of each pass, and of the loop that says how fast the machine was."""
    took, loops = [], []
    for _ in range(passes + _WARM_UP):
        before(scene)
        took.append(_cpu_ms(scene.one_pass))
        loops.append(_cpu_ms(_loop))
    return sorted(took[_WARM_UP:]), statistics.median(loops)


def _cpu_ms(what: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    what()
    return (time.thread_time_ns() - began) / 1e6


def _loop() -> int:
    total = 0
    for number in range(10_000):
        total += number
    return total


def timed(name: str, into: _Stopwatch, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also writes down what it took."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever it takes and gives
        began = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            into[name] += (time.thread_time_ns() - began) / 1e6

    return run


def stages(scene: Scene, passes: int, before: Callable[[Scene], None]) -> dict[str, float]:
    """Median milliseconds of each stage in a pass, all its calls together."""
    into: _Stopwatch = defaultdict(float)
    owners = {name: scene.placement if name in {"survey", "choose"} else scene.binder for name in _STAGES}
    plain = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, owner in owners.items():
        setattr(owner, name, timed(name, into, plain[name]))
    rows = []
    for _ in range(passes):
        before(scene)
        into.clear()
        scene.one_pass()
        rows.append(dict(into))
    for name, owner in owners.items():
        setattr(owner, name, plain[name])
    return {name.strip("_"): statistics.median(row.get(name, 0.0) for row in rows) for name in _STAGES}


@dataclass(frozen=True)
class Case:
    """A kind of pass."""

    name: str
    room_every: int | None = _ROOM_EVERY
    waited_s: float = 10.0
    before: Callable[[Scene], None] = lambda _: None


CASES = (Case("full", None), Case("one goes"), Case("looks up", before=forget_some), Case("in vain", waited_s=0.0))


def report(endpoints: int, case: Case, passes: int) -> None:
    """One line."""
    scene = Scene(endpoints, room_every=case.room_every, waited_s=case.waited_s)
    took, loop_ms = measure(scene, passes, case.before)
    p10, p50, p90 = (took[len(took) * share // 10] for share in (1, 5, 9))
    told = "  ".join(f"{name} {ms:.2f}" for name, ms in stages(scene, passes, case.before).items())
    over = "  OVER" if p50 > _BUDGET_MS else ""
    typer.echo(
        f"{endpoints:5} {case.name:9} p10 {p10:.2f}  p50 {p50:.2f}  p90 {p90:.2f}{over}  loop {loop_ms:.2f}  ({told})"
    )


def main(passes: int = 200) -> None:
    """Print a line per fleet and kind of pass."""
    typer.echo(f"CPU of one pass in ms, {passes} passes each; budget {_BUDGET_MS:g} ms")
    for endpoints in (8, 32, 256, 1024):
        for case in CASES:
            report(endpoints, case, passes)


if __name__ == "__main__":
    typer.run(main)
