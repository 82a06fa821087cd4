"""Requests that wait: the room around the queue, on a clock that the test sets. Turns and prices are the policies'."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import math
import tracemalloc
from random import Random
from typing import Any

import pytest
import yaml

from extproc import waiting
from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Flight, Flights
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.quotas import Quotas
from extproc.reply import Answer, Pending, Reply, Route
from extproc.senses.messages import Match, Matched
from policies.fleet_state import FleetState
from policies.types import Decision
from vllm_adapters.health import Listing

CONFIG = """
access: {tenant_header: x-tenant}
tenants: {default: {tokens: {per_s: 1.0e-6, burst: 1.0e+6}, concurrency: 50}}
pools:
  - name: chat
    models: [served]
    endpoints: {static: ["10.0.0.1:8000", "10.0.0.2:8000"]}
    queue: {endpoint_requests: 1}
"""
POST = {":method": "POST", ":path": "/v1/chat/completions", "x-tenant": "acme"}
MESSAGES = [{"role": "user", "content": "word " * 200}]
BODY = json.dumps({"model": "served", "max_tokens": 100, "messages": MESSAGES}).encode()


class House:
    """Two endpoints that take one request each, and a router whose clock stands still unless it is told to go on."""

    def __init__(self, **queue: Any) -> None:
        self.now_s = 100.0
        self.document = yaml.safe_load(CONFIG)
        self.document["pools"][0]["queue"].update(queue)
        config = parse(yaml.safe_dump(self.document))
        self.metrics, self.state, self.log = Metrics(), FleetState(), DecisionLog(100)
        self.fleet = Fleet(self.state, self.metrics, self.clock)
        self.quotas = Quotas(config, self.metrics, self.clock)
        outcomes = Outcomes(self.fleet, self.metrics, self.log, None, self.quotas)
        self.flights = Flights(
            self.state, outcomes, self.clock, max_open=100, max_unsettled=100, access_log_timeout_s=10
        )
        self.pipeline = Pipeline(
            Generation(1, config), self.fleet, self.flights, self.log, self.metrics,
            clock=self.clock, wall_clock=self.clock, rng=Random(7), quotas=self.quotas,
        )  # fmt: skip
        outcomes.on_release = self.pipeline.rooms.wake
        self.use(config)
        self.fleet.set_endpoints("chat", ["10.0.0.1:8000", "10.0.0.2:8000"])
        self.fleet.acknowledged(self.fleet.assignments())
        for address in list(self.fleet.addresses()):
            self.fleet.listed_models(address, Listing(frozenset({"served"}), 100_000))

    def clock(self) -> float:
        """What time it is."""
        return self.now_s

    def use(self, config: Any) -> None:
        """As App does."""
        generation = Generation(self.pipeline.generation.number + 1, config)
        self.fleet.configure(generation)
        self.pipeline.generation = generation
        self.pipeline.rooms.configure(config, self.fleet.placements)

    def reload(self, **queue: Any) -> None:
        """Other settings of the queue."""
        self.document["pools"][0]["queue"].update(queue)
        self.use(parse(yaml.safe_dump(self.document)))

    def ask(self, hold_s: float = math.inf, body: bytes = BODY, **headers: str) -> tuple[Flight, Reply | Pending]:
        """One request; its stream stays open."""
        flight = self.flights.open()
        flight.hold_s = hold_s
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return flight, self.pipeline.decide(flight, POST | named, body)

    def fill(self) -> list[Flight]:
        """Both endpoints are taken."""
        flights = []
        for _ in range(2):
            flight, reply = self.ask()
            assert isinstance(reply, Route)
            flights.append(flight)
        return flights

    def wait(self, **headers: Any) -> tuple[Flight, asyncio.Future[Reply]]:
        """One request that has to wait."""
        flight, reply = self.ask(**headers)
        assert isinstance(reply, Pending)
        return flight, reply.ready

    def waiting(self) -> dict[str, int]:
        """By class."""
        return {name: one["waiting"] for name, one in self.pipeline.rooms.describe()["chat"]["classes"].items()}

    def left(self, how: str, class_name: str = "real-time") -> float:
        """How many have left in this way."""
        labels = {"pool": "chat", "class": class_name, "how": how}
        return self.metrics.registry.get_sample_value("pointsman_queue_left_total", labels) or 0.0

    def account(self) -> dict[str, float | None]:
        """What the tenant has taken."""
        return self.quotas.describe()["acme"]


async def soon(ready: asyncio.Future[Reply]) -> Reply:
    """It comes, on the real loop's time."""
    async with asyncio.timeout(30):
        return await asyncio.shield(ready)


def code_of(reply: Reply | Pending) -> tuple[int, str]:
    """Status and code of an error."""
    assert isinstance(reply, Answer)
    return reply.status, json.loads(reply.body)["error"]["code"]


async def test_the_end_of_one_request_lets_the_next_go() -> None:
    """Which is committed by then, and given back like any other."""
    house = House()
    first, second = house.fill()
    flight, ready = house.wait()
    assert house.waiting() == {"real-time": 1, "batch": 0}
    house.now_s += 3
    first.close()
    route = await soon(ready)
    assert isinstance(route, Route)
    assert int(house.state.in_flight.sum()) == 2
    [record] = house.log.read(1)
    assert (record["waited_s"], record["class"]) == (3.0, "real-time")
    second.close()
    flight.close()
    assert int(house.state.in_flight.sum()) == 0
    assert house.left("bound") == 1


async def test_an_explanation_says_whether_a_request_would_wait() -> None:
    """And takes no place."""
    house = House()
    assert house.pipeline.explain("/v1/chat/completions", BODY)["would_wait"] is False
    house.fill()
    assert house.pipeline.explain("/v1/chat/completions", BODY)["would_wait"] is True
    assert house.waiting() == {"real-time": 0, "batch": 0}


async def test_who_leaves_gives_back_what_it_took() -> None:
    """Its place, its bytes, its tenant's tokens; once."""
    house = House()
    for flight in house.fill():
        flight.close()
    house.fill()
    before = house.account()["tokens_left"]
    flight, ready = house.wait()
    ready.cancel()
    flight.close()
    flight.close()
    assert house.waiting() == {"real-time": 0, "batch": 0}
    assert house.account()["tokens_left"] == pytest.approx(before)
    assert house.account()["running"] == 2
    assert house.left("client_gone") == 1
    assert house.pipeline.rooms.describe()["chat"]["held_bytes"] == 0


async def test_who_is_about_to_leave_takes_no_place() -> None:
    """Its stream is being cancelled while its turn comes: the next one goes instead."""
    house = House()
    first, _ = house.fill()
    _, gone = house.wait()
    _, stays = house.wait()
    gone.cancel()
    first.close()
    assert isinstance(await soon(stays), Route)
    assert int(house.state.in_flight.sum()) == 2


async def test_who_has_waited_in_vain_has_it_all_back() -> None:
    """503 with a Retry-After, no tokens charged, and a refusal in the log."""
    house = House()
    house.fill()
    before = house.account()["tokens_left"]
    _, ready = house.wait()
    house.now_s += 31
    answer = await soon(ready)
    assert code_of(answer) == (503, "queue_timeout")
    assert dict(answer.headers)["retry-after"] == "30"  # nothing has gone yet, so nobody knows better
    assert house.account()["tokens_left"] == pytest.approx(before)
    assert house.log.read_refusals(1)[0]["reason"] == "queue_timeout"


async def test_a_gateway_that_is_not_known_to_wait_is_not_made_to() -> None:
    """It goes at once, which is counted; one that waits a little is answered before it gives up."""
    house = House()
    house.fill()
    _, reply = house.ask(hold_s=0.0)
    assert isinstance(reply, Route)
    assert house.log.read(1)[0]["fallbacks"] == ["cannot_wait"]
    _, ready = house.wait(hold_s=10.0)
    house.now_s += 9.1
    assert code_of(await soon(ready)) == (503, "queue_timeout")


async def test_a_full_queue_refuses() -> None:
    """429; the tenant has its tokens back."""
    house = House(classes=[{"name": "only", "places": 1}])
    house.fill()
    _, _ = house.wait()
    before = house.account()["tokens_left"]
    _, reply = house.ask()
    assert code_of(reply) == (429, "queue_full")
    assert house.account()["tokens_left"] == pytest.approx(before)
    assert house.left("full", "only") == 1


async def test_a_compressed_body_counts_with_what_it_inflates_to() -> None:
    """Kilobytes that are megabytes in memory find no place where only kilobytes are left."""
    house = House(classes=[{"name": "only"}], max_bytes=150_000)
    house.fill()
    content = [{"role": "user", "content": "x" * 100_000}]
    body = gzip.compress(json.dumps({"model": "served", "max_tokens": 100, "messages": content}).encode())
    assert len(body) < 1_000
    house.wait(body=body, content_encoding="gzip")
    _, reply = house.ask(body=body, content_encoding="gzip")
    assert code_of(reply) == (429, "queue_full")


@pytest.mark.parametrize("prompt_bytes", [20, 70_000])
async def test_what_stands_beside_a_compressed_prompt_does_not_wait_with_it(prompt_bytes: int) -> None:
    """Metadata of 150 KB inflated from a few hundred bytes: the queue does not count it, so nobody may keep it."""
    house = House(classes=[{"name": "only"}], max_bytes=10_000_000)
    house.fill()
    asked = {"model": "served", "max_tokens": 1, "messages": "x" * prompt_bytes, "metadata": {"pad": " " * 150_000}}
    body = gzip.compress(json.dumps(asked).encode())
    house.wait(body=body, content_encoding="gzip")
    before = house.pipeline.rooms.describe()["chat"]["held_bytes"]
    tracemalloc.start()
    try:
        for _ in range(20):
            house.wait(body=body, content_encoding="gzip")
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted_bytes = house.pipeline.rooms.describe()["chat"]["held_bytes"] - before
    assert kept_bytes < 2 * counted_bytes + 20 * 20_000


async def test_a_request_without_a_prompt_never_waits() -> None:
    """It asks for no generation: to count tokens, say."""
    house = House()
    house.fill()
    body = json.dumps({"model": "served", "prompt": "word " * 200}).encode()
    reply = house.pipeline.decide(house.flights.open(), {**POST, ":path": "/tokenize"}, body)
    assert isinstance(reply, Route)


async def test_a_request_with_a_precise_match_waits_like_any_other() -> None:
    """First for the senses, then for room; a client that leaves then gives its place up like any other."""
    house = House()
    house.document["pools"][0]["prefix_index"] = {"precise": {"tokenizer": "engine"}}
    house.use(parse(yaml.safe_dump(house.document)))
    questions: list[Match] = []
    house.pipeline.matcher.tell = lambda question: questions.append(question) is None

    async def matched() -> tuple[Flight, asyncio.Future[Reply]]:
        flight, reply = house.ask()
        assert isinstance(reply, Pending)
        house.pipeline.matcher.answered(Matched(questions[-1].number, 200))
        await asyncio.sleep(0.01)
        return flight, reply.ready

    taken = [await matched() for _ in range(2)]
    for _, ready in taken:
        assert isinstance(await soon(ready), Route)
    stays, leaves = await matched(), await matched()
    assert house.waiting()["real-time"] == 2
    leaves[1].cancel()
    leaves[0].close()
    assert house.waiting()["real-time"] == 1
    taken[0][0].close()
    assert isinstance(await soon(stays[1]), Route)


async def test_a_new_config_is_seen_by_those_that_wait() -> None:
    """They keep their place and the time they came; a class that is gone is the first one from now on."""
    house = House()
    first, _ = house.fill()
    _, ready = house.wait(x_pointsman_priority="batch")
    house.now_s += 20
    house.reload(classes=[{"name": "only", "max_wait_s": 25}], endpoint_requests=1)
    assert house.waiting() == {"only": 1}
    first.close()
    assert isinstance(await soon(ready), Route)
    [record] = house.log.read(1)
    assert (record["class"], record["waited_s"]) == ("only", 20.0)
    labels = {"pool": "chat", "class": "batch"}
    assert house.metrics.registry.get_sample_value("pointsman_queue_requests", labels) is None


async def test_a_queue_that_goes_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited is decided anew, some in each turn of the loop; who leaves meanwhile has all back."""
    monkeypatch.setattr(waiting, "_LONGEST_WAKE_S", -1.0)
    house = House()
    house.fill()
    waited = [house.wait() for _ in range(20)]
    del house.document["pools"][0]["queue"]
    house.use(parse(yaml.safe_dump(house.document)))
    assert sum(ready.done() for _, ready in waited) <= 1
    before = house.account()["tokens_left"]
    gone, ready = waited.pop()
    ready.cancel()
    gone.close()
    for _, ready in waited:
        assert isinstance(await soon(ready), Route)
    await asyncio.sleep(0)
    assert house.account()["running"] == 21
    assert house.account()["tokens_left"] > before
    assert house.left("reconfigured") == 20


async def test_when_we_stop_nobody_is_left_waiting() -> None:
    """503 at once; and nobody else is taken."""
    house = House()
    house.fill()
    _, ready = house.wait()
    house.pipeline.stop()
    assert code_of(await soon(ready)) == (503, "shutting_down")
    assert code_of(house.ask()[1]) == (503, "shutting_down")
    assert house.account()["running"] == 2
    assert house.left("shut_down") == 1


async def test_a_fault_while_one_goes_is_its_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a 500, the next one its place."""
    house = House()
    first, _ = house.fill()
    _, unlucky = house.wait()
    _, lucky = house.wait()
    placement = house.fleet.placements["chat"]
    policy = placement.policy

    class FailsOnce:
        name, rank = policy.name, policy.rank

        def committed(self, _decision: Decision) -> None:
            monkeypatch.setattr(placement, "policy", policy)
            raise RuntimeError("torn")

    monkeypatch.setattr(placement, "policy", FailsOnce())
    first.close()
    assert code_of(await soon(unlucky)) == (500, "internal_error")
    assert isinstance(await soon(lucky), Route)


async def test_a_policy_that_fails_in_a_wake_does_not_stop_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's fault: one request's 500 each, as without a queue."""
    house = House()
    first, _ = house.fill()
    _, ready = house.wait()

    class Fails:
        def price(self, *_given: Any) -> Any:
            raise RuntimeError("not mine")

    monkeypatch.setattr(house.fleet.placements["chat"], "pricing", Fails())
    first.close()
    assert code_of(await soon(ready)) == (500, "internal_error")
    assert house.left("failed") == 1
    assert house.account()["running"] == 1


async def test_a_policy_that_fails_when_one_comes_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered with an error, so it waits no more, and takes no place later."""
    house = House()
    house.fill()
    room = house.pipeline.rooms.of("chat")
    assert room is not None

    def fails(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError("not mine")

    monkeypatch.setattr(room.binder, "came", fails)
    flight, reply = house.ask()
    assert code_of(reply) == (500, "internal_error")
    assert house.waiting() == {"real-time": 0, "batch": 0}
    flight.close()
    assert house.account()["running"] == 2


async def test_who_waits_is_answered_in_time_though_nobody_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the queue can say whose turn it is: the limit on the wait holds all the same."""
    house = House(classes=[{"name": "only", "max_wait_s": 5}])
    house.fill()
    room = house.pipeline.rooms.of("chat")
    assert room is not None

    def fails(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError("torn")

    monkeypatch.setattr(room.binder.queue, "window", fails)
    flight, reply = house.ask()
    assert isinstance(reply, Pending)
    house.now_s += 6
    assert code_of(await soon(reply.ready)) == (503, "queue_timeout")
    flight.close()


async def test_a_client_that_leaves_as_its_wait_ends_has_its_tokens_back() -> None:
    """Its stream is being cancelled while it is told that it has waited in vain."""
    house = House()
    house.fill()
    before = house.account()["tokens_left"]
    flight, ready = house.wait()
    house.now_s += 31
    room = house.pipeline.rooms.of("chat")
    assert room is not None
    ready.cancel()
    room._expire()
    flight.close()
    assert house.account()["tokens_left"] == pytest.approx(before)
    assert house.account()["running"] == 2


async def test_a_client_that_leaves_while_it_is_decided_anew_leaves_nothing() -> None:
    """A reload has it asked of the senses what engines hold of its prompt: that question is given up."""
    house = House()
    first, _ = house.fill()
    flight, ready = house.wait()
    house.document["pools"][0]["prefix_index"] = {"precise": {"tokenizer": "engine"}}
    house.use(parse(yaml.safe_dump(house.document)))
    questions: list[Match] = []
    house.pipeline.matcher.tell = lambda question: questions.append(question) is None
    first.close()
    async with asyncio.timeout(30):
        while not questions:  # noqa: ASYNC110 - the room's wake tells nobody
            await asyncio.sleep(0.01)
    ready.cancel()
    flight.close()
    await asyncio.sleep(0)
    house.pipeline.matcher.answered(Matched(questions[0].number, 200))
    await asyncio.sleep(0.01)
    assert int(house.state.in_flight.sum()) == 1
    assert house.metrics.registry.get_sample_value(
        "pointsman_refusals_total", {"reason": "internal_error", "status": "500"}
    ) is None  # fmt: skip


async def test_what_overflows_is_of_the_class_it_waits_in() -> None:
    """In the log, for the engine, and for what a class may have of an endpoint."""
    house = House(classes=[{"name": "first", "places": 1, "overflow": "second"}, {"name": "second"}])
    first, second = house.fill()
    ready = [house.wait()[1] for _ in range(2)]
    first.close()
    second.close()
    for one in ready:
        assert isinstance(await soon(one), Route)
    assert sorted(record["class"] for record in house.log.read(2)) == ["first", "second"]


async def test_a_queue_that_has_begun_drains_as_fast_as_the_fleet_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many wait and all places come free at once: each pass lets one go to each endpoint, and the next comes soon."""
    house = House(endpoint_requests=15)
    bodies = [BODY.replace(b"word ", b"w%03d " % number) for number in range(48)]
    flights = [house.ask(body=body)[0] for body in bodies[:30]]
    ready = [house.wait(body=body)[1] for body in bodies[30:]]
    wakes: list[int] = []
    room = house.pipeline.rooms.of("chat")
    assert room is not None
    find = room.binder.bindings
    monkeypatch.setattr(room.binder, "bindings", lambda *given, **named: wakes.append(1) or find(*given, **named))
    monkeypatch.setattr(waiting, "_LONGEST_WAKE_S", math.inf)  # however slow the machine, a pass is a whole one
    for flight in flights:
        flight.close()
    for one in ready:
        assert isinstance(await soon(one), Route)
    assert len(wakes) <= 12


async def test_what_has_not_happened_yet_is_counted_as_none() -> None:
    """A series that appears with its first event shows that event in no rate."""
    house = House()
    ways = ("bound", "detour", "timeout", "client_gone", "full", "overflowed", "shut_down", "reconfigured", "failed")
    samples = [
        house.metrics.registry.get_sample_value(
            "pointsman_queue_left_total", {"pool": "chat", "class": name, "how": how}
        )
        for name in house.waiting()
        for how in ways
    ]
    assert samples == [0.0] * len(samples)
    assert samples


async def test_without_tenants_flows_take_turns_by_the_gateways_header() -> None:
    """Whoever sends much delays himself."""
    house = House()
    del house.document["access"], house.document["tenants"]
    house.use(parse(yaml.safe_dump(house.document)))
    house.pipeline.gate = None
    flights = house.fill()
    busy = [house.wait(x_gateway_inference_fairness_id="busy")[1] for _ in range(6)]
    _, rare = house.wait(x_gateway_inference_fairness_id="rare")
    for flight in flights:
        flight.close()
    assert isinstance(await soon(rare), Route)
    assert sum(ready.done() for ready in busy) == 1


async def test_wakes_are_coalesced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ends in one turn of the loop are one look at the queue."""
    house = House(endpoint_requests=20)
    flights = [house.ask()[0] for _ in range(40)]
    room = house.pipeline.rooms.of("chat")
    assert room is not None
    _, ready = house.wait()
    await asyncio.sleep(0.1)
    looks: list[float] = []
    find = room.binder.bindings
    monkeypatch.setattr(room.binder, "bindings", lambda *given, **named: looks.append(1) or find(*given, **named))
    for flight in flights:
        flight.close()
    assert isinstance(await soon(ready), Route)
    assert len(looks) <= 3
