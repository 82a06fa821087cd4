"""Breakers of models and zones from end to end, but for Envoy: requests in, access-log entries in, refusals out."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.breaking import Breaking
from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.fleet import Fleet
from extproc.flight import BROKE, Attempt, Completion, Flight, Flights
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.reply import Answer, Pending, Route
from policies.fleet_state import FleetState
from vllm_adapters.health import Listing

POOLS = """
probe: {failed_requests: 1000000}
pools:
  - {name: p, models: [m], policy: round-robin, endpoints: {file: p.yaml}}
  - {name: q, models: [n], policy: round-robin, endpoints: {file: q.yaml}}
"""
ALONE = "endpoint: null"
"""So that it is models and zones alone that react."""
POST = {":method": "POST", ":path": "/v1/chat/completions"}
MESSAGES = [{"role": "user", "content": "hello"}]
BODY = json.dumps({"model": "m", "messages": MESSAGES}).encode()
RESET, TIMEOUT = "upstream_remote_reset", "upstream_request_timeout"


class House:
    """Two pools of three endpoints each, the first in zones a, a and b, the second in none."""

    def __init__(self, breakers: str = ALONE, pools: str = POOLS) -> None:
        self.now_s = 1_000.0
        self.metrics = Metrics()
        self.state = FleetState()
        generation = Generation(1, parse(f"breakers: {{{breakers}}}\n{pools}"))
        self.fleet = Fleet(self.state, self.metrics, self.clock)
        self.fleet.configure(generation)
        for pool, zones in (("p", ("a", "a", "b")), ("q", (None, None, None))):
            listed = [Discovered(f"10.0.{pool == 'q':d}.{n}:80", zone=zone) for n, zone in enumerate(zones)]
            self.fleet.set_endpoints(pool, listed)
        self.fleet.acknowledged(self.fleet.assignments())
        self.probe()
        self.breaking = Breaking(generation.config, self.fleet, self.clock)
        self.metrics.observe_breakers(self.breaking.figures)
        log = DecisionLog(10)
        outcomes = Outcomes(self.fleet, self.metrics, log, breaking=self.breaking)
        self.flights = Flights(
            self.state, outcomes, self.clock, max_open=999, max_unsettled=999, access_log_timeout_s=9
        )
        self.pipeline = Pipeline(
            generation, self.fleet, self.flights, log, self.metrics,
            clock=self.clock, wall_clock=self.clock, rng=Random(1), breaking=self.breaking,
        )  # fmt: skip
        outcomes.on_release = self.pipeline.rooms.wake
        self.pipeline.rooms.configure(generation.config, self.fleet.placements)

    def clock(self) -> float:
        """Of everything here."""
        return self.now_s

    def probe(self) -> None:
        """Every endpoint answers a trial."""
        for address in list(self.fleet.addresses()):
            self.fleet.listed_models(address, Listing(frozenset({"m", "n"}), None))

    def configure(self, breakers: str, pools: str = POOLS) -> None:
        """Another generation, as the app puts it into force."""
        generation = Generation(2, parse(f"breakers: {{{breakers}}}\n{pools}"))
        self.fleet.configure(generation)
        self.pipeline.generation = generation
        self.breaking.configure(generation.config)

    def pass_time(self, seconds: float) -> None:
        """And let it be noticed."""
        self.now_s += seconds
        self.breaking.tick()

    def ask(self, model: str = "m") -> tuple[Flight, Route | Answer]:
        """One request."""
        flight = self.flights.open()
        reply = self.pipeline.decide(flight, POST, json.dumps({"model": model, "messages": MESSAGES}).encode())
        assert isinstance(reply, Route | Answer)
        return flight, reply

    def completion(self, flight: Flight, **fields: Any) -> Completion:
        """Its access-log entry: all went well, unless said otherwise."""
        values: dict[str, Any] = {
            "request_id": flight.request_id, "address": flight.served_by, "status": 200, "flags": (), "details": "",
            "attempts": 1, "failed": None, "duration_s": 4.0, "ttft_s": 0.5, "request_bytes": 1, "response_bytes": 1,
        }  # fmt: skip
        return Completion(**values | fields)

    def end(self, flight: Flight, **fields: Any) -> None:
        """The request is over."""
        flight.close()
        self.flights.on_completion(self.completion(flight, **fields))

    def run(self, count: int, model: str = "m", **fields: Any) -> list[Route | Answer]:
        """So many requests one after the other, all of which end in the same way."""
        replies = []
        for _ in range(count):
            flight, reply = self.ask(model)
            replies.append(reply)
            if isinstance(reply, Route):
                self.end(flight, **fields)
            flight.close()
        return replies

    def refused(self, model: str = "m") -> tuple[str, int] | None:
        """Why a request is refused now and when it may come again; None if it is not. It leaves no trace."""
        flight, reply = self.ask(model)
        if isinstance(reply, Route):
            self.end(flight, status=0, flags=("downstream_remote_reset",))
            return None
        flight.close()
        assert reply.status == 503
        return json.loads(reply.body)["error"]["code"], int(dict(reply.headers)["retry-after"])

    def endpoints(self, count: int = 12) -> set[str]:
        """Who is picked."""
        picked = set()
        for _ in range(count):
            flight, reply = self.ask()
            assert isinstance(reply, Route)
            picked.add(reply.addresses[0])
            self.end(flight, status=0, flags=("downstream_remote_reset",))
        return picked

    def value(self, name: str, **labels: str) -> float | None:
        """One figure of the metrics page."""
        return self.metrics.registry.get_sample_value(f"pointsman_{name}", labels)


FAILED = {"failed": RESET, "status": 503}
A, A2, B = "10.0.0.0:80", "10.0.0.1:80", "10.0.0.2:80"


# -- models


def test_a_model_that_fails_is_refused_at_once_and_says_how_long() -> None:
    """No engine is asked, the other pool serves; exactly when Retry-After says, one request is let through again."""
    house = House()
    house.run(20)
    replies = house.run(99, **FAILED)
    asked = sum(isinstance(reply, Route) for reply in replies)
    assert all(isinstance(reply, Answer) for reply in replies[asked:])
    assert house.value("refusals_total", reason="model_breaker", status="503") == 99 - asked
    assert house.refused() == ("model_breaker", 30)
    assert house.refused("n") is None
    house.pass_time(12.5)
    assert house.refused() == ("model_breaker", 18)
    house.pass_time(17.0)
    assert house.refused() == ("model_breaker", 1)
    house.pass_time(1.0)
    trial, reply = house.ask()
    assert isinstance(reply, Route)
    house.end(trial)
    assert house.refused() is None


def test_while_one_is_on_trial_others_wait_as_long_as_it_should_take() -> None:
    """By how long requests have taken; and a trial that fails brings another whole rest."""
    house = House()
    house.run(20)
    house.run(99, **FAILED)
    house.pass_time(30.0)
    trial, _ = house.ask()
    assert house.refused() == ("model_breaker", 4)
    house.pass_time(1.5)
    assert house.refused() == ("model_breaker", 3)
    house.end(trial, **FAILED)
    assert house.refused() == ("model_breaker", 30)
    assert house.value("model_breaker_trips_total", pool="p") == 2


@pytest.mark.parametrize("how", ["client gone", "no entry", "every endpoint broke"])
def test_a_trial_that_tells_nothing_is_followed_by_another(how: str) -> None:
    """Its client left, its access-log entry never came, or it would break any endpoint."""
    house = House()
    house.run(99, **FAILED)
    house.pass_time(30.0)
    trial, reply = house.ask()
    assert isinstance(reply, Route)
    assert house.refused() is not None
    if how == "client gone":
        house.end(trial, status=0, flags=("downstream_remote_reset",), failed=RESET)
    elif how == "no entry":
        trial.close()
        house.pass_time(10.0)
        house.flights.expire()
    else:
        house.end(trial, status=500, failed=BROKE, attempts=2)
    assert isinstance(house.ask()[1], Route)
    assert house.refused() is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"status": 400},
        {"status": 429},
        {"status": 422, "failed": None},
        {"status": 0, "flags": ("downstream_connection_termination",), "failed": RESET},
        {"status": 503, "flags": ("no_healthy_upstream",), "failed": "status_503", "address": None},
        {"status": 0, "address": None},
    ],
    ids=["400", "429", "422", "client left", "Envoy knew no address", "no answer"],
)
def test_what_is_not_the_endpoints_doing_trips_nothing(fields: dict[str, Any]) -> None:
    """However often it happens: no model, no zone, no endpoint."""
    house = House("")
    house.run(500, **fields)
    assert house.refused() is None
    assert house.endpoints() == {A, A2, B}
    assert {one["state"] for one in house.fleet.describe()} == {"ready"}
    assert [house.value(f"{kind}_trips_total", **{label: name}) for kind, label, name in
            (("model_breaker", "pool", "p"), ("zone_breaker", "zone", "a"))] in ([0, 0], [0, None])  # fmt: skip


def test_a_request_that_breaks_every_endpoint_trips_nothing() -> None:
    """However often a client sends it, and whichever of the logs tells of it first."""
    house = House("")
    for number in range(300):
        flight, reply = house.ask()
        assert isinstance(reply, Route)
        tries = [Attempt(flight.request_id, address, BROKE) for address in reply.addresses[:2]]
        house.flights.on_attempt(tries[0])
        if number % 2:
            house.flights.on_attempt(tries[1])
        house.end(flight, address=reply.addresses[1], status=500, failed=BROKE, attempts=2)
        house.probe()
    assert house.value("endpoints_acquitted_total", endpoint=A)
    assert house.refused() is None
    assert house.endpoints() == {A, A2, B}
    assert {one["failed_requests"] for one in house.fleet.describe()} == {0}
    told = house.breaking.describe()
    assert {(one["failed_requests"], one["trips"]) for kind in told.values() for one in kind.values()} == {(0, 0)}


def test_a_500_that_no_second_endpoint_was_asked_about_is_nothing_to_the_model() -> None:
    """One client's poison breaks every endpoint, and the retry budget is used up: nobody else is refused for it."""
    house = House()
    for number in range(300):
        flight, reply = house.ask()
        assert isinstance(reply, Route)
        broken = {"status": 500, "failed": BROKE, "attempts": 2 if number % 10 == 1 else 1}
        house.end(flight, **(broken if number % 2 else {}))
        house.probe()
    assert house.refused() is None
    assert house.breaking.describe()["models"]["p"]["failed_requests"] == 0


def test_a_model_whose_answers_take_longer_than_its_rest_closes_again() -> None:
    """The trial is through after 45 s, and so may all others be."""
    house = House()
    house.run(99, **FAILED)
    house.pass_time(30.0)
    trial, _ = house.ask()
    house.pass_time(30.0)
    assert isinstance(house.ask()[1], Route)
    house.pass_time(15.0)
    house.end(trial, duration_s=45.0)
    assert house.breaking.describe()["models"]["p"]["position"] == "closed"
    assert house.refused() is None


def test_one_dead_endpoint_does_not_speak_for_its_model() -> None:
    """Even if it cuts off most of what is under way: the others serve, so the model is not refused."""
    house = House()
    for _ in range(60):
        flight, _ = house.ask()
        house.end(flight, **(FAILED if flight.served_by == A else {}))
    for _ in range(200):
        flight, _ = house.ask()
        if flight.served_by == A:
            house.end(flight, **FAILED)
    assert house.refused() is None


def test_a_failure_that_another_endpoint_made_good_is_none_of_the_models() -> None:
    """The client has his answer."""
    house = House()
    for _ in range(100):
        flight, _ = house.ask()
        served = B if flight.served_by != B else A
        house.flights.on_attempt(Attempt(flight.request_id, flight.served_by, RESET))
        house.end(flight, address=served, attempts=2)
    assert house.breaking.describe()["models"]["p"]["failed_requests"] == 0
    assert house.breaking.describe()["models"]["p"]["recent_requests"] == 100


@pytest.mark.parametrize("off", ["model: null", "model: {error_ratio: null}"])
def test_the_models_breaker_can_be_switched_off(off: str) -> None:
    """Then it is tried again and again."""
    house = House(f"{ALONE}, {off}")
    house.run(99, **FAILED)
    assert house.refused() is None
    assert house.value("model_breaker", pool="p") is None


def test_where_every_endpoint_is_busy_requests_are_refused_at_once() -> None:
    """With the time in which the next of those running should end; and no more once one has."""
    house = House("endpoint: {most_requests: 2, queue_share: 0.5}")
    house.run(9)
    running = [house.ask()[0] for _ in range(6)]
    assert house.refused() == ("all_busy", 1)
    assert house.refused("n") is None
    house.end(running[0])
    assert house.refused() is None


def test_a_busy_pools_retry_after_is_when_a_place_should_be_free() -> None:
    """Requests that take a minute, three of them: one ends every twenty seconds."""
    house = House("endpoint: {most_requests: 1, queue_share: 0.5}")
    house.run(30, duration_s=60.0)
    for _ in range(3):
        house.ask()
    assert house.refused() == ("all_busy", 20)


@pytest.mark.parametrize(
    ("path", "hold_s", "refused"),
    [("/v1/chat/completions", 60.0, False), ("/v1/chat/completions", 0.0, True), ("/tokenize", 60.0, True)],
    ids=["may wait", "its gateway does not wait", "never waits"],
)
async def test_beside_a_queue_who_may_not_wait_is_refused_while_all_are_busy(
    path: str, hold_s: float, *, refused: bool
) -> None:
    """At once: full engines get no more from anybody. Whoever may wait does."""
    queue = POOLS.replace("p.yaml}", "p.yaml}, queue: {endpoint_requests: 2}")
    house = House("endpoint: {most_requests: 2, queue_share: 0.5}", queue)
    for _ in range(6):
        running = house.flights.open()
        running.hold_s = 60.0
        assert isinstance(house.pipeline.decide(running, POST, BODY), Route)
    flight = house.flights.open()
    flight.hold_s = hold_s
    body = json.dumps({"model": "m", "prompt": "hello", "messages": MESSAGES}).encode()
    reply = house.pipeline.decide(flight, POST | {":path": path}, body)
    assert isinstance(reply, Answer if refused else Pending)
    if isinstance(reply, Answer):
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "all_busy")
    flight.close()


async def test_who_waits_for_a_model_that_fails_is_refused_as_well() -> None:
    """As soon as his turn comes: he would only be failed by an engine."""
    house = House(pools=POOLS.replace("p.yaml}", "p.yaml}, queue: {endpoint_requests: 1}"))
    running = [house.ask()[0] for _ in range(3)]
    waits = house.flights.open()
    waits.hold_s = 60.0
    reply = house.pipeline.decide(waits, POST, BODY)
    assert isinstance(reply, Pending)
    for address in (A, B) * 20:
        trouble = house.flights.open()
        trouble.pool, trouble.served_by = "p", address
        house.breaking.settled(trouble, "endpoint_failed", house.completion(trouble, **FAILED))
    house.end(running[0])
    refused = await reply.ready
    assert isinstance(refused, Answer)
    assert json.loads(refused.body)["error"]["code"] == "model_breaker"
    assert house.pipeline.rooms.describe()["p"]["held_bytes"] == 0


# -- zones


def zone_fails(house: House, zone: str = "a", *, every: int = 2) -> None:
    """Of the requests to a zone every so many fail, until it is left alone."""
    for number in range(400):
        flight, reply = house.ask()
        assert isinstance(reply, Route)
        there = house.fleet.zone_of(reply.addresses[0]) == zone
        house.end(flight, **(FAILED if there and number % every == 0 else {}))
        if house.state.avoids_zones:
            return
    raise AssertionError(f"zone {zone} never avoided")


NO_MODEL = f"{ALONE}, model: null"


def test_a_zone_with_too_many_errors_is_avoided_and_tried_again() -> None:
    """Both its endpoints fail in part. After the rest one request tries; it goes well, and the zone is as any other."""
    house = House(NO_MODEL)
    zone_fails(house)
    assert house.endpoints() == {B}
    assert house.breaking.describe()["zones"]["a"]["position"] == "open"
    house.pass_time(179.0)
    assert house.endpoints() == {B}
    house.pass_time(1.0)
    assert not house.state.avoids_zones
    trial = next(flight for flight, _ in iter(house.ask, None) if flight.served_by != B)
    assert house.endpoints() == {B}  # as long as it is not known how that went
    house.end(trial)
    assert house.endpoints() == {A, A2, B}
    assert house.value("zone_breaker_trips_total", zone="a") == 1


def test_a_zone_whose_trial_fails_is_left_alone_again() -> None:
    """And one whose trial's client left is tried by the next."""
    house = House(NO_MODEL)
    zone_fails(house)
    house.pass_time(180.0)
    gone = next(flight for flight, _ in iter(house.ask, None) if flight.served_by != B)
    house.end(gone, status=0, flags=("downstream_remote_reset",))
    assert not house.state.avoids_zones
    trial = next(flight for flight, _ in iter(house.ask, None) if flight.served_by != B)
    house.end(trial, failed=TIMEOUT, status=504)
    house.pass_time(179.0)
    assert house.endpoints() == {B}
    assert house.value("zone_breaker", zone="a") == 2


def test_a_try_counts_for_its_zone_though_another_zone_made_it_good() -> None:
    """Requests to zone a are all answered, by b."""
    house = House(NO_MODEL)
    for _ in range(200):
        flight, _ = house.ask()
        if flight.served_by != B:
            why = BROKE if flight.served_by == A else RESET
            house.flights.on_attempt(Attempt(flight.request_id, flight.served_by, why))
        house.end(flight, address=B, attempts=2)
        house.probe()
        if house.state.avoids_zones:
            break
    assert house.breaking.describe()["zones"]["a"]["position"] == "open"
    assert house.breaking.describe()["zones"]["b"]["failed_requests"] == 0


def test_one_dead_endpoint_does_not_speak_for_its_zone() -> None:
    """Its own breaker has it out; the other one of the zone serves on."""
    house = House(NO_MODEL)
    for _ in range(300):
        flight, _ = house.ask()
        house.end(flight, **(FAILED if flight.served_by == A else {}))
    assert not house.state.avoids_zones


def test_a_zone_of_one_endpoint_is_judged_by_it() -> None:
    """There is no other to judge it by."""
    house = House(NO_MODEL)
    zone_fails(house, "b", every=1)
    assert house.endpoints() == {A, A2}


def test_when_every_zone_is_avoided_none_is() -> None:
    """There is nobody else; what goes there meanwhile does not keep them shut."""
    house = House(NO_MODEL)
    house.run(300, **FAILED)
    assert house.endpoints() == {A, A2, B}
    assert {zone["position"] for zone in house.breaking.describe()["zones"].values()} == {"open"}
    house.pass_time(180.0)
    house.run(6)
    assert {zone["position"] for zone in house.breaking.describe()["zones"].values()} == {"closed"}


def test_a_zone_that_nobody_is_in_any_more_is_let_go() -> None:
    """With its series."""
    house = House(NO_MODEL)
    zone_fails(house)
    house.fleet.set_endpoints("p", [Discovered(B, zone="b")])
    house.breaking.tick()
    assert set(house.breaking.describe()["zones"]) == {"b"}
    assert house.value("zone_breaker", zone="a") is None
    assert not house.state.avoids_zones


def test_zones_can_be_switched_off() -> None:
    """At once, also one that is avoided just now."""
    house = House(NO_MODEL)
    zone_fails(house)
    house.configure(f"{NO_MODEL}, zone: null")
    assert house.endpoints() == {A, A2, B}
    house.run(300, **FAILED)
    assert house.endpoints() == {A, A2, B}


# -- generations, and what can be seen


def test_breakers_outlive_a_reload_and_go_with_their_pool() -> None:
    """A rest goes on under new limits; a pool that comes back is a new one."""
    house = House()
    house.run(99, **FAILED)
    house.run(9, "n")
    house.configure(f"{ALONE}, model: {{error_ratio: 0.5}}")
    assert house.refused() == ("model_breaker", 30)
    assert house.breaking.describe()["models"]["q"]["recent_requests"] == 9
    house.run(9, "n")
    house.run(16, "n", **FAILED)  # less than half
    assert house.refused("n") is None
    house.configure(ALONE, POOLS.replace("name: p", "name: other"))
    assert set(house.breaking.describe()["models"]) == {"other", "q"}
    house.configure(ALONE)
    assert house.breaking.describe()["models"]["p"]["trips"] == 0


def test_a_pool_that_comes_back_is_not_judged_by_how_long_requests_took_before() -> None:
    """It is another one."""
    house = House()
    house.run(9, duration_s=600.0)
    house.configure(ALONE, POOLS.replace("name: p", "name: other"))
    house.configure(ALONE)
    assert house.breaking.all_busy("p").retry_after_s == 1


def test_the_last_requests_of_a_removed_pool_bring_nothing_back() -> None:
    """They end, and are nobody's."""
    house = House()
    flight, _ = house.ask()
    house.configure(ALONE, POOLS.replace("name: p", "name: other"))
    house.end(flight)
    assert set(house.breaking.describe()["models"]) == {"other", "q"}


def test_explain_tells_of_an_open_breaker_and_takes_no_trial() -> None:
    """Asking changes nothing."""
    house = House()
    house.run(99, **FAILED)
    body = json.dumps({"model": "m", "messages": []}).encode()
    told = house.pipeline.explain("/v1/chat/completions", body)
    assert (told["status"], told["reason"]) == (503, "model_breaker")
    house.pass_time(30.0)
    assert "error" not in house.pipeline.explain("/v1/chat/completions", body)
    assert isinstance(house.ask()[1], Route)


def test_figures_and_description_agree() -> None:
    """For the metrics page and the admin API."""
    house = House()
    house.run(30)
    house.run(10, "n")
    assert house.breaking.describe()["models"]["p"] == {
        "position": "closed", "failed_requests": 0, "recent_requests": 30, "rests_s": 0.0, "trips": 0,
    }  # fmt: skip
    house.run(99, **FAILED)
    assert house.breaking.describe()["models"]["p"]["rests_s"] == 30.0
    assert house.value("model_breaker", pool="p") == 2
    assert house.value("model_breaker", pool="q") == 0
    house.pass_time(30.0)
    assert house.breaking.describe()["models"]["p"]["position"] == "half_open"
    assert house.value("model_breaker", pool="p") == 1
