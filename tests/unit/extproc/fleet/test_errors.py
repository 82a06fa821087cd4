"""The fleet and its endpoints' errors: who goes out for them, who is needed, and which zones are passed over."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.fleet import Fleet
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from policies.placement.placement import Unplaceable
from policies.types import InferenceRequest, Kind
from vllm_adapters.health import Listing

POOLS = "pools: [{name: p, models: [m], endpoints: {file: p.yaml}}, {name: q, models: [n], endpoints: {file: q.yaml}}]"
LISTING = Listing(frozenset({"m", "n"}), None)


class Trips:
    """FleetEvents; it keeps the trips."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def endpoint_tripped(self, address: str, *, spared: bool) -> None:
        """Kept."""
        self.seen.append((address, spared))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class House:
    """A fleet whose endpoints are named by their number."""

    def __init__(self, count: int = 4, config: str = "", zones: str = "") -> None:
        self.now_s = 1_000.0
        self.trips = Trips()
        self.state = FleetState()
        self.fleet = Fleet(self.state, self.trips, lambda: self.now_s)
        self.addresses = [f"10.0.0.{number}:80" for number in range(count)]
        self.zones = zones
        self.configure(config)
        self.list_for("p", *range(count))
        for address in self.addresses:
            self.fleet.listed_models(address, LISTING)

    def configure(self, config: str, pools: str = POOLS) -> None:
        """Another generation."""
        self.fleet.configure(Generation(1, parse(f"{config}\n{pools}")))

    def list_for(self, pool: str, *numbers: int) -> None:
        """What discovery says of a pool."""
        zones = dict(enumerate(self.zones))
        self.fleet.set_endpoints(pool, [Discovered(self.addresses[n], zone=zones.get(n)) for n in numbers])
        self.fleet.acknowledged(self.fleet.assignments())

    def fail(self, *numbers: int, good: int = 4) -> None:
        """Every fifth of some requests fails there, until that is too much."""
        for number in numbers:
            trips = len(self.trips.seen)
            for request in range(100):
                failed = request % (good + 1) == good
                self.fleet.observe(self.addresses[number], Evidence.FAILED if failed else Evidence.SERVED)
                if len(self.trips.seen) > trips:
                    break

    def states(self) -> list[State]:
        """Of each endpoint."""
        slots: Iterator[int | None] = map(self.state.slot_of, self.addresses)
        return [State(self.state.state[slot]) for slot in slots if slot is not None]

    def pick(self, *, may_wait: bool = False) -> set[str]:
        """Every endpoint that may be picked."""
        request = InferenceRequest(Kind.CHAT, "m", "m", 100, may_wait=may_wait)
        decision = self.fleet.placements["p"].choose(request, self.state, self.now_s, Random(1), length=99)
        return set() if isinstance(decision, Unplaceable) else set(decision.addresses)

    def told(self, number: int) -> dict[str, Any]:
        """What the admin API says of one."""
        [found] = [one for one in self.fleet.describe() if one["endpoint"] == self.addresses[number]]
        return found


def test_an_endpoint_with_too_many_errors_rests_and_comes_back_by_degrees() -> None:
    """A fifth of its requests failed, never two in a row; three minutes later a trial, a small share, and all again."""
    house = House()
    house.fail(0)
    assert house.trips.seen == [(house.addresses[0], False)]
    assert house.states() == [State.UNHEALTHY, *[State.READY] * 3]
    told = house.told(0)
    assert (told["state_reason"], told["rests_s"]) == ("failed 4 of 20 requests, out for 180 s", 180.0)
    house.now_s += 179.0
    house.fleet.listed_models(house.addresses[0], LISTING)
    assert house.states()[0] is State.UNHEALTHY
    assert not house.fleet.wants_trial(house.addresses[0])
    house.now_s += 1.0
    assert house.fleet.wants_trial(house.addresses[0])
    house.fleet.listed_models(house.addresses[0], LISTING)
    assert house.states()[0] is State.DEGRADED
    for _ in range(3):
        house.fleet.observe(house.addresses[0], Evidence.SERVED)
    assert house.states()[0] is State.READY


@pytest.mark.parametrize(("count", "most_out", "out"), [(1, 0.5, 0), (2, 0.5, 1), (4, 0.5, 2), (4, 0.1, 1), (4, 1, 3)])
def test_errors_never_empty_a_pool(count: int, most_out: float, out: int) -> None:
    """All fail in part, which is no reason to fail whole: some are out, the others serve what they can."""
    house = House(count, f"breakers: {{endpoint: {{most_out: {most_out}}}}}")
    house.fail(*range(count))
    assert house.states() == [State.UNHEALTHY] * out + [State.DEGRADED] * (count - out)
    assert [spared for _, spared in house.trips.seen] == [False] * out + [True] * (count - out)
    assert house.pick() == set(house.addresses[out:])
    if out < count:
        assert house.told(out)["state_reason"] == "failed 4 of 20 requests, but cannot be done without"


@pytest.mark.parametrize(
    ("count", "state"), [(3, State.DEGRADED), (4, State.DEGRADED), (5, State.DEGRADED), (6, State.UNHEALTHY)]
)
def test_those_out_for_other_reasons_are_no_help(count: int, state: State) -> None:
    """Two are dead; a third goes out for its errors only if half of the pool is left then."""
    house = House(count)
    for number in (1, 2):
        house.fleet.observe(house.addresses[number], Evidence.PROBE_REFUSED)
    house.fail(0)
    assert house.states()[0] is state


def test_an_endpoint_of_two_pools_stays_if_either_needs_it() -> None:
    """It is the only one of the second."""
    house = House(4)
    house.list_for("q", 0)
    house.fail(0, 1)
    assert house.states()[:2] == [State.DEGRADED, State.UNHEALTHY]


@pytest.mark.parametrize("off", ["endpoint: null", "endpoint: {error_ratio: null}"])
def test_the_breaker_can_be_switched_off(off: str) -> None:
    """Then only failures in a row count."""
    house = House(2, f"breakers: {{{off}}}")
    house.fail(0, good=1)
    assert house.states() == [State.READY] * 2
    for _ in range(3):
        house.fleet.observe(house.addresses[0], Evidence.FAILED)
    assert house.states()[0] is State.UNHEALTHY


@pytest.mark.parametrize(("config", "state"), [("", State.DEGRADED), ("{timeouts: null}", State.UNHEALTHY)])
def test_timeouts_in_a_row_degrade_unless_switched_off(config: str, state: State) -> None:
    """Then they are failed requests."""
    house = House(2, f"breakers: {{endpoint: {config or '{}'}}}")
    for _ in range(3):
        house.fleet.observe(house.addresses[0], Evidence.TIMED_OUT)
    assert house.states()[0] is state
    assert house.state.traffic_share[0] == (0.1 if state is State.DEGRADED else 1.0)


def test_breakers_outlive_a_reload() -> None:
    """What was counted counts, a rest goes on; new limits apply from now on."""
    house = House(4)
    for request in range(19):
        house.fleet.observe(house.addresses[0], Evidence.FAILED if request % 4 == 0 else Evidence.SERVED)
    house.fail(1)
    house.configure("breakers: {endpoint: {open_s: 5}}")
    assert house.states()[:2] == [State.READY, State.UNHEALTHY]
    assert house.told(1)["rests_s"] == 180.0
    assert house.told(0)["recent_requests"] == 19
    house.fleet.observe(house.addresses[0], Evidence.FAILED)
    assert house.told(0)["rests_s"] == 5.0


def test_busy_endpoints_are_left_alone_as_configured() -> None:
    """More than a share of what they bear; without such a figure nobody is busy."""
    house = House(2)
    house.state.in_flight[0] = 91
    assert house.pick() == set(house.addresses)
    house.configure("breakers: {endpoint: {most_requests: 100}}")
    assert house.pick() == {house.addresses[1]}
    assert [house.told(number)["busy"] for number in range(2)] == [True, False]
    house.state.in_flight[1] = 91
    assert house.pick() == set()
    house.configure("breakers: {endpoint: {most_requests: 100}, model: {all_busy: false}}")
    assert house.pick() == set(house.addresses)
    house.configure("breakers: {endpoint: {most_requests: 100, queue_share: null}}")
    assert house.pick() == set(house.addresses)


def test_nobody_is_too_busy_for_a_request_that_may_wait() -> None:
    """The queue's own bounds say who has room. One that may not wait is refused as where there is no queue."""
    house = House(2)
    house.configure("breakers: {endpoint: {most_requests: 100}}", POOLS.replace("p.yaml}", "p.yaml}, queue: {}"))
    house.state.in_flight[:2] = 91
    assert house.pick(may_wait=True) == set(house.addresses)
    assert house.pick() == set()


def test_avoided_zones_are_passed_over_and_a_newcomer_in_them_too() -> None:
    """As long as another zone has somebody."""
    house = House(3, zones="abb")
    house.fleet.avoid_zones(frozenset({"b"}))
    assert house.pick() == {house.addresses[0]}
    house.list_for("p", 0, 2)
    house.list_for("p", 0, 1, 2)
    assert house.pick() == {house.addresses[0]}
    assert [house.told(number)["avoided"] for number in range(3)] == [False, True, True]
    house.fleet.observe(house.addresses[0], Evidence.DRAIN)
    assert house.pick() == {house.addresses[2]}  # the other one has not answered yet
    house.fleet.avoid_zones(frozenset())
    assert not house.state.avoids_zones
    assert not house.state.avoided.any()


def test_zones_are_counted_by_who_is_listed() -> None:
    """Those that left do not count, nor do endpoints that do not say where they are."""
    house = House(4, zones="abb")
    assert house.fleet.zone_sizes == {"a": 1, "b": 2}
    house.list_for("p", 0, 2, 3)
    assert house.fleet.zone_sizes == {"a": 1, "b": 1}
    assert house.fleet.zone_of(house.addresses[3]) is None
    assert house.fleet.zone_of("10.9.9.9:80") is None
