"""The fleet: when an endpoint may be picked, and what is left of it when it goes."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.fleet import REMOVAL_GRACE_S, Fleet
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from policies.placement.placement import Unplaceable
from policies.types import Decision, InferenceRequest, Kind, Reservation
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures, EngineLoad

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
LISTING = Listing(frozenset({"m", "n"}), 4_096)


def config(*pools: str, **extra: str) -> Generation:
    """A generation of these pools; every pool's model has the pool's name."""
    entries = ", ".join(
        f"{{name: {name}, models: [{name}], endpoints: {{file: {name}.yaml}}, {extra.get(name, '')}}}" for name in pools
    )
    return Generation(1, parse(f"pools: [{entries}]"))


class Events:
    """FleetEvents as a list."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def endpoint_changed(self, address: str, before: State, after: State) -> None:
        """Another state."""
        self.seen.append((address, before.name, after.name))

    def endpoint_gone(self, address: str) -> None:
        """Freed."""
        self.seen.append((address, "gone"))

    def endpoint_restarted(self, address: str) -> None:
        """Restarted."""
        self.seen.append((address, "restarted"))

    def engine_finished(self, address: str, reason: str, count: float) -> None:
        """Ended by the engine's count."""
        self.seen.append((address, reason, count))

    def endpoint_tripped(self, address: str, *, spared: bool) -> None:
        """Not looked at."""

    def endpoint_refused(self, pool: str) -> None:
        """Not taken."""
        self.seen.append((pool, "refused"))


class House:
    """A fleet with its Envoy: what was published, and what was acknowledged."""

    def __init__(self, generation: Generation | None = None, *, max_endpoints: int = 16) -> None:
        self.now_s = 100.0
        self.events = Events()
        self.state = FleetState(max_endpoints=max_endpoints, initial_slots=2)
        self.publications: list[dict[str, frozenset[str]]] = []
        self.fleet = Fleet(self.state, self.events, lambda: self.now_s, self._publish)
        self.fleet.configure(generation or config("m"))

    def _publish(self) -> None:
        self.publications.append(self.fleet.assignments())

    def acknowledge(self) -> None:
        """Every Envoy has what was published."""
        self.fleet.acknowledged(self.fleet.assignments())

    def bring_up(self, pool: str, *addresses: str) -> None:
        """Listed, acknowledged, and answering."""
        self.fleet.set_endpoints(pool, addresses)
        self.acknowledge()
        for address in addresses:
            self.fleet.listed_models(address, LISTING)

    def slot(self, address: str) -> int:
        """Its slot now."""
        slot = self.state.slot_of(address)
        assert slot is not None
        return slot

    def state_of(self, address: str) -> State:
        """Its state in FleetState."""
        return State(self.state.state[self.slot(address)])

    def pick(self, pool: str = "m") -> set[str]:
        """Every endpoint that may be picked now."""
        request = InferenceRequest(Kind.CHAT, pool, pool, 100)
        decision = self.fleet.placements[pool].choose(request, self.state, self.now_s, Random(1), length=99)
        return set() if isinstance(decision, Unplaceable) else set(decision.addresses)

    def place(self, pool: str = "m") -> tuple[str, Reservation]:
        """Send one request of three blocks."""
        request = InferenceRequest(
            Kind.EMBEDDING, pool, pool, 300, block_hashes=[1, 2, 3], block_tokens=[100, 100, 100]
        )
        placement = self.fleet.placements[pool]
        decision = placement.choose(request, self.state, self.now_s, Random(1))
        assert isinstance(decision, Decision)
        return decision.addresses[0], placement.commit(decision, request, self.state, self.now_s)

    def serve(self, pool: str = "m") -> None:
        """Such a request from start to end."""
        _, reservation = self.place(pool)
        self.fleet.placements[pool].ended(reservation, self.now_s)
        self.state.release(reservation)

    def described(self, address: str) -> dict[str, Any]:
        """What the admin API tells of it."""
        [found] = [one for one in self.fleet.describe() if one["endpoint"] == address]
        return found


@pytest.fixture
def house() -> House:
    """A fleet of one pool without endpoints."""
    return House()


# -- coming


def test_an_endpoint_is_picked_once_published_acknowledged_and_answering(house: House) -> None:
    """All three, in whatever order the last two come."""
    house.fleet.set_endpoints("m", [A, B])
    assert house.publications[-1] == {"pool_m": frozenset({A, B})}
    assert house.pick() == set()
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == set()
    house.acknowledge()
    assert house.pick() == {A}
    house.fleet.listed_models(B, LISTING)
    assert house.pick() == {A, B}
    assert house.events.seen == [(A, "STARTING", "READY"), (B, "STARTING", "READY")]


def test_only_what_every_envoy_acknowledged_is_picked(house: House) -> None:
    """And no more once one of them no longer vouches for it."""
    house.bring_up("m", A, B)
    house.fleet.acknowledged({"pool_m": frozenset({B})})
    assert house.pick() == {B}
    house.fleet.acknowledged({})
    assert house.pick() == set()


def test_an_endpoint_serves_only_the_models_it_lists(house: House) -> None:
    """The other model of its pool is no help."""
    house = House(Generation(1, parse("pools: [{name: m, models: [m, another], endpoints: {file: m.yaml}}]")))
    house.bring_up("m", A)
    house.fleet.listed_models(A, Listing(frozenset({"another"}), None))
    assert house.state_of(A) is State.READY
    assert house.pick() == set()


def test_a_pool_in_anothers_cluster_needs_no_acknowledgement() -> None:
    """A mesh's Envoys learn of endpoints from the mesh; we publish nothing for it."""
    house = House(config("m", m="cluster: mesh"))
    house.fleet.set_endpoints("m", [A])
    assert house.publications[-1] == {}
    house.fleet.acknowledged({})
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == {A}


def test_the_window_is_the_engines() -> None:
    """As its model list says; unknown is zero."""
    house = House()
    house.bring_up("m", A)
    assert house.state.context_tokens[house.slot(A)] == 4_096
    house.fleet.listed_models(A, Listing(frozenset({"m"}), None))
    assert house.state.context_tokens[house.slot(A)] == math.inf


def test_no_pool_is_published_before_its_discovery_reported() -> None:
    """Or our restart would empty an Envoy's cluster."""
    house = House(config("m", "n"))
    assert house.fleet.assignments() == {}
    house.fleet.set_endpoints("m", [A])
    assert house.fleet.assignments() == {"pool_m": frozenset({A})}
    assert [house.fleet.synced(pool) for pool in "mn"] == [True, False]
    house.fleet.set_endpoints("n", [])
    assert house.fleet.synced("n")
    assert house.fleet.assignments() == {"pool_m": frozenset({A}), "pool_n": frozenset()}


def test_listing_the_same_again_changes_nothing(house: House) -> None:
    """Discovery reports whole lists."""
    house.bring_up("m", A, B)
    before = list(house.events.seen)
    house.fleet.set_endpoints("m", [B, A])
    assert house.events.seen == before
    assert house.pick() == {A, B}


def test_evidence_of_a_stranger_is_ignored(house: House) -> None:
    """A late probe or log entry of an endpoint that is gone."""
    house.fleet.observe(A, Evidence.FAILED)
    house.fleet.listed_models(A, LISTING)
    house.fleet.scraped(A, EngineFigures(running=1, waiting=1))
    assert house.events.seen == []
    assert list(house.fleet.addresses()) == []


# -- going


def test_a_leaver_is_unpicked_then_unpublished_then_freed(house: House) -> None:
    """In that order: what is under way to Envoy still finds the address, and running answers end in peace."""
    house.bring_up("m", A, B)
    house.fleet.set_endpoints("m", [B])
    assert house.pick() == {B}
    assert house.state_of(A) is State.STOPPED
    assert list(house.fleet.addresses()) == [B]
    assert house.publications[-1] == {"pool_m": frozenset({A, B})}
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert house.publications[-1] == {"pool_m": frozenset({A, B})}
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert house.publications[-1] == {"pool_m": frozenset({B})}
    assert house.state.slot_of(A) is None
    assert house.events.seen[-2:] == [(A, "READY", "STOPPED"), (A, "gone")]


def test_a_slot_is_freed_only_when_nothing_runs_on_it(house: House) -> None:
    """Unpublished after the grace, but its slot waits for the last answer."""
    house.bring_up("m", A)
    _, reservation = house.place()
    house.fleet.set_endpoints("m", [])
    house.now_s += 10 * REMOVAL_GRACE_S
    house.fleet.tick()
    assert house.publications[-1] == {"pool_m": frozenset()}
    assert house.state.slot_of(A) is not None
    house.state.release(reservation)
    house.fleet.tick()
    assert house.state.slot_of(A) is None
    assert house.events.seen[-1] == (A, "gone")


def test_ticking_without_leavers_publishes_nothing(house: House) -> None:
    """It runs a few times a second."""
    house.bring_up("m", A)
    before = len(house.publications)
    for _ in range(5):
        house.now_s += 1
        house.fleet.tick()
    assert len(house.publications) == before


def test_listed_again_within_the_grace_it_keeps_its_slot(house: House) -> None:
    """It must answer a probe again, is never unpublished, and its running requests stay booked."""
    house.bring_up("m", A)
    slot = house.slot(A)
    _, reservation = house.place()
    house.fleet.set_endpoints("m", [])
    house.fleet.set_endpoints("m", [A])
    assert (house.slot(A), house.state_of(A)) == (slot, State.STARTING)
    house.now_s += 10 * REMOVAL_GRACE_S
    house.fleet.tick()
    assert all(A in published["pool_m"] for published in house.publications[1:])
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == {A}
    assert house.state.in_flight[slot] == 1
    house.state.release(reservation)


def test_listed_again_while_its_last_answer_runs_it_keeps_its_slot(house: House) -> None:
    """After the grace: published and acknowledged anew, on the slot that its request still holds."""
    house.bring_up("m", A)
    slot = house.slot(A)
    _, reservation = house.place()
    house.fleet.set_endpoints("m", [])
    house.now_s += 10 * REMOVAL_GRACE_S
    house.fleet.tick()
    house.acknowledge()
    house.bring_up("m", A)
    assert house.slot(A) == slot
    assert house.pick() == {A}
    house.state.release(reservation)


def test_a_newcomer_on_a_freed_slot_inherits_nothing(house: House) -> None:
    """Neither figures nor prefix credit nor models of the one before."""
    house.bring_up("m", A)
    _, reservation = house.place()
    ledger = house.fleet.placements["m"].ledger
    rates = ledger.rate(np.array([0])).tolist()
    house.fleet.scraped(A, EngineFigures(running=9, waiting=9, kv_used=0.9))
    house.state.in_flight[:] = 0
    slot = house.slot(A)
    house.fleet.set_endpoints("m", [])
    ledger.timed(reservation, 0.05)  # told after it left
    house.now_s += 10
    house.fleet.tick()
    house.fleet.set_endpoints("m", [B])
    assert house.slot(B) == slot
    assert ledger.rate(np.array([slot])).tolist() == rates
    assert house.fleet.placements["m"].index.held_tokens(slot) == 0
    assert (house.state.waiting[slot], house.state.models(slot)) == (0, frozenset())
    assert (bool(house.state.routable[slot]), house.state_of(B)) == (False, State.STARTING)
    assert house.described(B)["observed_age_s"] is None


def test_a_newcomer_inherits_no_credit_given_after_its_predecessor_left(house: House) -> None:
    """A request may move to a slot that has already left the pool."""
    house.bring_up("m", A)
    slot = house.slot(A)
    house.fleet.set_endpoints("m", [])
    house.fleet.placements["m"].index.insert(slot, [1, 2], [100, 100], house.now_s)
    house.now_s += 10
    house.fleet.tick()
    house.fleet.set_endpoints("m", [B])
    assert house.slot(B) == slot
    assert house.fleet.placements["m"].index.held_tokens(slot) == 0


def test_a_newcomer_to_a_second_pool_inherits_no_credit_there() -> None:
    """Its slot may have been another endpoint's in that pool."""
    house = House(config("m", "n"))
    house.bring_up("n", A)
    slot = house.slot(A)
    house.fleet.set_endpoints("n", [])
    house.fleet.placements["n"].index.insert(slot, [1, 2], [100, 100], house.now_s)
    house.now_s += 10
    house.fleet.tick()
    house.bring_up("m", B)
    house.bring_up("n", B)
    assert house.slot(B) == slot
    assert house.fleet.placements["n"].index.held_tokens(slot) == 0


def test_draining_is_not_leaving(house: House) -> None:
    """Picked no more, but published and watched until it is unlisted or taken back."""
    house.bring_up("m", A, B)
    house.fleet.observe(A, Evidence.DRAIN)
    assert house.pick() == {B}
    assert house.fleet.assignments() == {"pool_m": frozenset({A, B})}
    assert set(house.fleet.addresses()) == {A, B}
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == {B}
    house.fleet.observe(A, Evidence.UNDRAIN)
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == {A, B}


# -- what engines say


def test_a_scrape_fills_the_columns_with_its_time(house: House) -> None:
    """And what the engine does not report is zero."""
    house.bring_up("m", A)
    house.fleet.scraped(A, EngineFigures(running=3, waiting=2, kv_used=0.5))
    slot = house.slot(A)
    state = house.state
    assert (state.running[slot], state.waiting[slot], state.kv_used[slot]) == (3, 2, 0.5)
    assert state.observed_at_s[slot] == 100.0
    house.fleet.scraped(A, EngineFigures(running=1, waiting=0))
    assert state.kv_used[slot] == 0


def test_the_index_has_exactly_the_capacity_the_engine_reports(house: House) -> None:
    """The config's figure until then; shrinking evicts at once."""
    house.bring_up("m", A)
    slot = house.slot(A)
    assert house.state.kv_capacity_tokens[slot] == 131_072
    house.serve()
    assert house.fleet.placements["m"].index.held_tokens(slot) == 300
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, kv_capacity_tokens=250))
    assert house.state.kv_capacity_tokens[slot] == 250
    assert house.fleet.placements["m"].index.held_tokens(slot) == 200
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0))
    assert house.state.kv_capacity_tokens[slot] == 250


def test_a_restarted_engine_loses_its_prefix_credit(house: House) -> None:
    """At the first scrape with another start time, and only that engine."""
    house.bring_up("m", A)
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=1_000.0))
    house.place()
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=1_000.0))
    index = house.fleet.placements["m"].index
    assert index.held_tokens(house.slot(A)) == 300
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0))
    assert index.held_tokens(house.slot(A)) == 300
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2_000.0))
    assert index.held_tokens(house.slot(A)) == 0
    assert house.events.seen[-1] == (A, "restarted")
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2_000.0))
    assert house.events.seen.count((A, "restarted")) == 1


@pytest.mark.parametrize("counter", ["prefix_queries_tokens", "prefix_hits_tokens"])
def test_a_counter_that_goes_down_is_a_restart(house: House, counter: str) -> None:
    """Also of an engine whose page tells no start time; one that grows, stays or is missing is none."""
    house.bring_up("m", A)
    index = house.fleet.placements["m"].index
    house.place()
    for value in (500.0, 500.0, None, 700.0):
        house.fleet.scraped(A, EngineFigures(running=0, waiting=0, **{counter: value}))
    assert index.held_tokens(house.slot(A)) == 300
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0))
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, **{counter: 600.0}))
    assert index.held_tokens(house.slot(A)) == 0
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, **{counter: 600.0}))
    assert house.events.seen.count((A, "restarted")) == 1


def test_a_restart_ends_the_rest_after_failed_requests(house: House) -> None:
    """What failed them is gone: the next good probe brings the endpoint back, the configured rest or not."""
    house.fleet.configure(
        Generation(2, parse("probe: {cooldown_ms: 7000}\npools: [{name: m, models: [m], endpoints: {file: m.yaml}}]"))
    )
    house.bring_up("m", A)
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=1.0))
    for _ in range(3):
        house.fleet.observe(A, Evidence.FAILED)
    house.now_s += 6.9
    house.fleet.listed_models(A, LISTING)
    assert house.state_of(A) is State.UNHEALTHY
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2.0))
    house.fleet.listed_models(A, LISTING)
    assert house.state_of(A) is State.READY


def test_a_restart_told_twice_counts_once(house: House) -> None:
    """By the start time at first, and by counters that the first page after it lacked."""
    house.bring_up("m", A)
    before = EngineFigures(running=0, waiting=0, started_at_s=1.0, prefix_queries_tokens=900.0)
    house.fleet.scraped(A, before)
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2.0))
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2.0, prefix_queries_tokens=10.0))
    assert house.events.seen.count((A, "restarted")) == 1


def test_the_error_average_follows_requests_and_not_probes(house: House) -> None:
    """A tenth of the newest outcome each time."""
    house.bring_up("m", A)
    house.fleet.observe(A, Evidence.FAILED)
    house.fleet.observe(A, Evidence.PROBE_FAILED)
    assert house.state.error_ewma[house.slot(A)] == pytest.approx(0.1)
    house.fleet.observe(A, Evidence.SERVED)
    assert house.state.error_ewma[house.slot(A)] == pytest.approx(0.09)


# -- several pools


def test_two_pools_may_share_an_address() -> None:
    """One slot and one count; each pool's cluster has it, each index its own credit."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", A)
    assert len(house.state) == 1
    assert house.fleet.assignments() == {"pool_m": frozenset({A}), "pool_n": frozenset({A})}
    assert house.pick("m") == house.pick("n") == {A}
    house.place("m")
    assert house.fleet.placements["m"].index.held_tokens(house.slot(A)) == 300
    assert house.fleet.placements["n"].index.held_tokens(house.slot(A)) == 0
    assert house.described(A)["pools"] == ["m", "n"]


def test_leaving_one_of_two_pools_keeps_it_in_the_other() -> None:
    """Unpicked by the one, untouched in the other, and freed when both have let go."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", A)
    house.fleet.set_endpoints("m", [])
    assert (house.pick("m"), house.pick("n")) == (set(), {A})
    assert house.state_of(A) is State.READY
    house.now_s += 10
    house.fleet.tick()
    assert house.fleet.assignments() == {"pool_m": frozenset(), "pool_n": frozenset({A})}
    assert house.state.slot_of(A) is not None
    house.fleet.set_endpoints("n", [])
    house.now_s += 10
    house.fleet.tick()
    assert house.state.slot_of(A) is None


def test_a_shared_address_is_picked_where_envoy_knows_it() -> None:
    """Each cluster for itself: a new pool that Envoy does not take over costs the old one nothing."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.place("m")
    house.fleet.set_endpoints("n", [A])
    house.fleet.acknowledged({"pool_m": frozenset({A}), "pool_n": frozenset()})
    assert (house.pick("m"), house.pick("n")) == ({A}, set())
    house.fleet.acknowledged({"pool_m": frozenset(), "pool_n": frozenset({A})})
    assert (house.pick("m"), house.pick("n")) == (set(), {A})
    house.acknowledge()
    assert (house.pick("m"), house.pick("n")) == ({A}, {A})


def test_of_two_configured_capacities_the_smaller_holds() -> None:
    """Only one can be right, and an index too large misleads more; the engine's own figure ends the guess."""
    house = House(config("m", "n", m="kv_capacity_tokens: 300", n="kv_capacity_tokens: 200"))
    house.bring_up("m", A)
    assert house.state.kv_capacity_tokens[house.slot(A)] == 300
    house.bring_up("n", A)
    assert house.state.kv_capacity_tokens[house.slot(A)] == 200
    house.fleet.set_endpoints("n", [])
    assert house.state.kv_capacity_tokens[house.slot(A)] == 300
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, kv_capacity_tokens=100))
    house.bring_up("n", A)
    assert house.state.kv_capacity_tokens[house.slot(A)] == 100
    house.serve("n")
    assert house.fleet.placements["n"].index.held_tokens(house.slot(A)) == 100


def test_capacity_and_restarts_reach_every_pool_of_an_address() -> None:
    """Both indexes speak of the same cache."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", A)
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=1.0, kv_capacity_tokens=200))
    house.serve("m")
    house.serve("n")
    indexes = [house.fleet.placements[pool].index for pool in ("m", "n")]
    assert [index.held_tokens(house.slot(A)) for index in indexes] == [200, 200]
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, started_at_s=2.0))
    assert [index.held_tokens(house.slot(A)) for index in indexes] == [0, 0]


# -- reload


def test_a_reload_keeps_counts_and_credit(house: House) -> None:
    """Another policy for the pool: same slots, same bookings, same index."""
    house.bring_up("m", A, B)
    address, reservation = house.place()
    index = house.fleet.placements["m"].index
    house.fleet.configure(config("m", m="policy: round-robin"))
    placement = house.fleet.placements["m"]
    assert placement.policy.name == "round-robin"
    assert placement.index is index
    assert index.held_tokens(house.slot(address)) == 300
    assert house.state.in_flight[house.slot(address)] == 1
    assert house.pick() == {A, B}
    house.state.release(reservation)


def test_a_request_from_before_a_reload_moves_by_what_is_true_after_it(house: House) -> None:
    """Who joined since gets load and credit; who left since does not, for nobody would take them back."""
    house.bring_up("m", A)
    placement = house.fleet.placements["m"]
    request = InferenceRequest(Kind.EMBEDDING, "m", "m", 300, block_hashes=[1, 2, 3], block_tokens=[100, 100, 100])
    _, reservation = house.place()
    house.fleet.configure(config("m", m="policy: round-robin"))
    house.bring_up("m", A, B)
    moved = placement.moved(request, reservation, house.slot(B), house.state, house.now_s)
    index, ledger = house.fleet.placements["m"].index, house.fleet.placements["m"].ledger
    assert (index.held_tokens(house.slot(A)), index.held_tokens(house.slot(B))) == (0, 300)
    assert ledger.pending[house.slot(B)] == 1
    house.fleet.set_endpoints("m", [B])
    slot = house.slot(A)
    placement.moved(request, moved, slot, house.state, house.now_s)
    assert (index.held_tokens(slot), ledger.pending[slot]) == (0, 0)


def test_a_burst_that_nobody_took_leaves_no_credit(house: House) -> None:
    """The second believed to find what the first was only about to bring."""
    house.bring_up("m", A)
    placement = house.fleet.placements["m"]
    both = [house.place()[1] for _ in range(2)]
    assert [reservation.cached_tokens for reservation in both] == [0, 300]
    for reservation in both:
        placement.failed(reservation)
        placement.ended(reservation, house.now_s)
    assert placement.index.held_tokens(house.slot(A)) == 0


def test_a_policy_that_cannot_be_made_changes_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's, say: the pools are as they were."""
    house.bring_up("m", A)

    def fail(_pool: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("extproc.fleet.fleet.build_policy", fail)
    with pytest.raises(ValueError, match="no"):
        house.fleet.configure(config("n"))
    assert set(house.fleet.placements) == {"m"}
    assert house.pick() == {A}


def test_an_unchanged_pool_keeps_its_placement(house: House) -> None:
    """And with it whose turn it was."""
    before = house.fleet.placements["m"]
    house.fleet.configure(config("m", "n"))
    assert house.fleet.placements["m"] is before


def test_a_removed_pool_goes_with_its_endpoints() -> None:
    """No placement at once; its cluster and addresses after the grace, since replies under way name them."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", B)
    house.fleet.configure(config("n"))
    assert set(house.fleet.placements) == {"n"}
    assert list(house.fleet.addresses()) == [B]
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert house.publications[-1] == {"pool_m": frozenset({A}), "pool_n": frozenset({B})}
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert house.publications[-1] == {"pool_n": frozenset({B})}
    assert house.state.slot_of(A) is None
    assert house.fleet.synced("n")


def test_a_pool_that_moves_to_anothers_cluster_leaves_ours_after_the_grace() -> None:
    """Its endpoints stay, and replies under way still find our cluster with all of them."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", B)
    house.fleet.configure(config("m", "n", m="cluster: mesh"))
    assert house.publications[-1] == {"pool_m": frozenset({A}), "pool_n": frozenset({B})}
    house.now_s += REMOVAL_GRACE_S
    house.fleet.tick()
    assert house.publications[-1] == {"pool_n": frozenset({B})}
    house.acknowledge()
    assert house.pick("m") == {A}


def test_a_pool_removed_by_one_reload_stays_for_its_grace_through_the_next() -> None:
    """Which neither prolongs nor ends it."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", B)
    house.fleet.configure(config("n"))
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.configure(config("n", n="policy: round-robin"))
    assert "pool_m" in house.publications[-1]
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert "pool_m" not in house.publications[-1]


def test_a_pool_whose_source_cannot_be_read_is_told_apart_and_not_published() -> None:
    """At once, and until its source lists something; after that a failure says nothing of it."""
    house = House(config("m", "n"))
    house.fleet.set_endpoints("m", [A])
    published = len(house.publications)
    house.fleet.could_not_read("n")
    house.fleet.could_not_read("n")
    house.fleet.could_not_read("m")
    assert len(house.publications) == published + 1
    assert house.fleet.unread_clusters() == {"pool_n"}
    assert house.publications[-1] == {"pool_m": frozenset({A})}
    house.fleet.set_endpoints("n", [B])
    assert house.fleet.unread_clusters() == frozenset()
    house.fleet.could_not_read("n")
    assert house.fleet.unread_clusters() == frozenset()


def test_a_pool_that_is_gone_or_not_ours_is_no_unread_cluster() -> None:
    """Neither has one that anybody waits for."""
    house = House(config("m", "n", n="cluster: theirs"))
    for pool in ("m", "n", "nobody"):
        house.fleet.could_not_read(pool)
    assert house.fleet.unread_clusters() == {"pool_m"}
    house.fleet.configure(config("n", n="cluster: theirs"))
    assert house.fleet.unread_clusters() == frozenset()


def test_a_pool_that_returns_must_be_discovered_anew() -> None:
    """Not synced, and not published as empty, until its source has reported."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", B)
    house.fleet.configure(config("n"))
    house.fleet.configure(config("m", "n"))
    assert not house.fleet.synced("m")
    assert house.publications[-1] == {"pool_n": frozenset({B})}
    house.bring_up("m", A)
    assert house.pick("m") == {A}


def test_a_new_configured_capacity_reaches_endpoints_that_report_none(house: House) -> None:
    """At once, and what no longer fits is evicted; an engine's own figure stays."""
    house.bring_up("m", A, B)
    house.fleet.scraped(B, EngineFigures(running=0, waiting=0, kv_capacity_tokens=5_000))
    index = house.fleet.placements["m"].index
    index.insert(house.slot(A), [1, 2, 3], [100, 100, 100], house.now_s)
    house.fleet.configure(config("m", m="kv_capacity_tokens: 250"))
    assert house.state.kv_capacity_tokens[house.slot(A)] == 250
    assert house.state.kv_capacity_tokens[house.slot(B)] == 5_000
    assert index.held_tokens(house.slot(A)) == 200
    index.insert(house.slot(B), [1, 2, 3], [100, 100, 100], house.now_s)
    assert index.held_tokens(house.slot(B)) == 300


def test_new_thresholds_apply_to_endpoints_that_are_there(house: House) -> None:
    """One failed probe suffices after the reload."""
    house.bring_up("m", A)
    generation = Generation(
        2, parse("probe: {failed_probes: 1}\npools: [{name: m, models: [m], endpoints: {file: m.yaml}}]")
    )
    house.fleet.configure(generation)
    house.fleet.observe(A, Evidence.PROBE_FAILED)
    assert house.state_of(A) is State.UNHEALTHY


# -- bounds


def test_endpoints_beyond_the_bound_are_refused_and_counted() -> None:
    """The others serve; the refused one is neither published nor watched."""
    house = House(max_endpoints=2)
    house.bring_up("m", A, B, C)
    assert house.events.seen.count(("m", "refused")) == 1
    assert house.pick() == {A, B}
    assert house.fleet.assignments() == {"pool_m": frozenset({A, B})}
    assert set(house.fleet.addresses()) == {A, B}


def test_a_freed_place_is_taken_at_the_next_report() -> None:
    """Discovery lists the refused one again and there is room now."""
    house = House(max_endpoints=2)
    house.bring_up("m", A, B, C)
    house.fleet.set_endpoints("m", [B, C])
    house.now_s += 10
    house.fleet.tick()
    house.bring_up("m", B, C)
    assert house.pick() == {B, C}


# -- shutting down

A_GOING = Discovered(A, terminating=True)


def test_an_endpoint_that_shuts_down_drains_and_stays_with_envoy(house: House) -> None:
    """It is picked no more, what runs on it ends, and Envoy keeps it until the source lists it no longer."""
    house.bring_up("m", A, B)
    house.fleet.set_endpoints("m", [A_GOING, B])
    assert house.state_of(A) is State.DRAINING
    assert house.pick() == {B}
    house.now_s += REMOVAL_GRACE_S + 1
    house.fleet.tick()
    assert house.fleet.assignments() == {"pool_m": {A, B}}
    house.fleet.set_endpoints("m", [B])
    assert house.state_of(A) is State.STOPPED


def test_its_successor_at_the_same_address_serves(house: House) -> None:
    """No longer shutting down, it begins anew and is probed."""
    house.bring_up("m", A)
    house.fleet.set_endpoints("m", [A_GOING])
    house.fleet.set_endpoints("m", [A])
    assert house.state_of(A) is State.STARTING
    house.fleet.listed_models(A, LISTING)
    assert house.pick() == {A}


def test_an_operators_drain_outlives_what_the_source_says(house: House) -> None:
    """A list that says nothing of a shutdown does not take it back."""
    house.bring_up("m", A)
    house.fleet.observe(A, Evidence.DRAIN)
    house.fleet.set_endpoints("m", [A_GOING])
    assert house.described(A)["drained_by"] == ["operator", "pool m"]
    house.fleet.set_endpoints("m", [A])
    assert house.state_of(A) is State.DRAINING
    house.fleet.observe(A, Evidence.UNDRAIN)
    assert house.state_of(A) is State.STARTING


def test_an_operator_cannot_take_a_shutdown_back(house: House) -> None:
    """The source goes on saying so."""
    house.bring_up("m", A)
    house.fleet.set_endpoints("m", [A_GOING])
    house.fleet.observe(A, Evidence.UNDRAIN)
    assert house.state_of(A) is State.DRAINING


def test_a_shutdown_that_one_pool_tells_drains_for_all() -> None:
    """It is one process; when that pool lists it no more, the others' word counts."""
    house = House(config("m", "n"))
    house.bring_up("m", A)
    house.bring_up("n", A)
    house.fleet.set_endpoints("m", [A_GOING])
    assert house.pick("n") == set()
    house.fleet.set_endpoints("m", [])
    house.fleet.listed_models(A, LISTING)
    assert house.pick("n") == {A}


def test_an_endpoint_beyond_the_bound_cannot_drain() -> None:
    """There is nothing to drain, and that is no fault."""
    house = House(max_endpoints=1)
    house.bring_up("m", A)
    house.fleet.set_endpoints("m", [A, Discovered(B, terminating=True)])
    assert house.pick() == {A}


# -- described


def test_figures_have_no_more_digits_than_people_read(house: House) -> None:
    """Four after the point, and of what is small four that count; whole numbers stay whole."""
    house.bring_up("m", A)
    house.fleet.scraped(A, EngineFigures(running=3, waiting=2, kv_used=0.5, kv_capacity_tokens=12_345_678))
    slot, state = house.state.slot_of(A), house.state
    assert slot is not None
    state.ttft_1m_s[slot], state.error_ewma[slot] = 12.345678901, 0.00012345678
    told = house.described(A)
    assert (told["ttft_1m_s"], told["error_ewma"]) == (12.3457, 0.0001235)
    assert told["kv_capacity_tokens"] == 12_345_678.0


def test_an_endpoint_is_described_with_all_its_figures(house: House) -> None:
    """In plain values that JSON can hold."""
    house.bring_up("m", A)
    house.fleet.scraped(A, EngineFigures(running=3, waiting=2, kv_used=0.5, kv_capacity_tokens=65_536))
    house.place()
    house.now_s += 2.5
    told = house.described(A)
    assert told == {
        "endpoint": A,
        "pools": ["m"],
        "models": ["m", "n"],
        "generation": 1,
        "state": "ready",
        "state_reason": "answers",
        "drained_by": [],
        "state_age_s": 2.5,
        "observed_age_s": 2.5,
        "source": "none",
        "engine_phase": None,
        "max_running": None,
        "first_tokens": None,
        "requests_not_listed": None,
        "largest_request_tokens": None,
        "largest_request_bytes": None,
        "kv_bytes_per_token": None,
        "push_troubles": None,
        "kv_full_in_s": math.inf,
        "kv_alarm": False,
        "routable": True,
        "waiting": 2.0,
        "running": 3.0,
        "kv_used": 0.5,
        "kv_capacity_tokens": 65_536.0,
        "context_tokens": 4_096.0,
        "in_flight": 1,
        "in_flight_prompt_tokens": 300,
        "in_flight_uncached_tokens": 300,
        "error_ewma": 0.0,
        "ttft_1m_s": 0.0,
        "ttft_5m_s": 0.0,
        "prefix_hit_ratio": 0.0,
        "generated_tokens_per_s": 0.0,
        "prefilled_tokens_per_s": 0.0,
        "preemptions_per_s": 0.0,
        "weight": 1.0,
        "cost": 0.0,
        "remote": False,
        "avoided": False,
        "zone": None,
        "busy": False,
        "failed_requests": 0,
        "recent_requests": 0,
        "rests_s": 0.0,
        "max_adapters": 0.0,
        "traffic_share": 1.0,
        "has_metrics": True,
        "foreign": 5.0,
        "dialect": "vllm",
        "engines": [],
        "index_scale": 1.0,
        "gpu_used": None,
        "gpu_memory_used": None,
        "indexed_tokens": {"m": 300},
        "index_evidence": {"m": "none"},
        "prefill_tokens_per_s": {"m": 25_000.0},
        "backlog_tokens": {"m": 0},
    }


def test_an_endpoint_that_never_answers_is_told_once(house: House) -> None:
    """Not silence for ever, and not a line per probe."""
    house.fleet.set_endpoints("m", [A])
    with capture_logs() as logs:
        for _ in range(8):
            house.fleet.observe(A, Evidence.PROBE_REFUSED)
    told = [entry for entry in logs if entry["event"] == "endpoint does not answer"]
    assert [(entry["log_level"], entry["reason"]) for entry in told] == [("warning", "connection refused")]


def test_an_endpoints_first_bytes_are_averaged(house: House) -> None:
    """Over a minute and over five; an address that left is no matter."""
    house.bring_up("m", A)
    house.fleet.served(A, 2.0)
    house.fleet.served(A, 1.0)
    house.fleet.served("10.9.9.9:1", 9.0)
    assert house.state.ttft_1m_s[house.slot(A)] == pytest.approx(1.5)
    house.now_s += 60
    house.fleet.served(A, 0.0)
    assert house.state.ttft_1m_s[house.slot(A)] == pytest.approx(3 / (2 + math.e))
    assert house.state.ttft_5m_s[house.slot(A)] > 0.9


def test_a_failure_counts_as_a_slow_answer(house: House) -> None:
    """An endpoint that fails at once must not draw traffic as the fastest one."""
    house.bring_up("m", A)
    house.fleet.observe(A, Evidence.FAILED)
    assert house.state.ttft_1m_s[house.slot(A)] == 10.0


def test_the_adapters_of_an_engine_are_known(house: House) -> None:
    """Those it lists from its model list, those it runs from its metrics."""
    house.bring_up("m", A)
    house.fleet.listed_models(A, Listing(frozenset({"m", "fr"}), None, frozenset({"fr"})))
    house.fleet.scraped(A, EngineFigures(running_adapters=frozenset({"fr"}), max_adapters=2))
    slot = house.slot(A)
    assert (house.state.adapters.of(slot), house.state.running_adapters.of(slot)) == ({"fr"}, {"fr"})
    assert house.state.max_adapters[slot] == 2


def test_the_engines_own_rates_are_told(house: House) -> None:
    """Over its last seconds, not since its start; nothing before they are known."""
    house.bring_up("m", A)
    slot, state = house.slot(A), house.state
    for scrape in range(3):
        house.fleet.scraped(
            A,
            EngineFigures(
                0, 0, 0.0, None, 1e6 + 400 * scrape, 9e5 + 300 * scrape,
                generated_tokens=50.0 * scrape, prefilled_tokens=400.0 * scrape, preemptions=5.0 * scrape,
            ),
        )  # fmt: skip
        told = (state.generated_tokens_per_s[slot], state.prefilled_tokens_per_s[slot], state.preemptions_per_s[slot])
        assert told == ((0, 0, 0) if scrape < 2 else (20, 160, 2))
        assert state.prefix_hit_ratio[slot] == (0 if scrape < 2 else pytest.approx(0.75))
        house.now_s += 2.5


def test_each_engine_behind_an_endpoint_is_told(house: House) -> None:
    """And what kind of engine it is; nothing before the first scrape."""
    house.bring_up("m", A)
    assert (house.described(A)["dialect"], house.described(A)["engines"]) == (None, [])
    engines = (EngineLoad("0", 0.0, 3.0, 1.0), EngineLoad("1", 0.0, 0.0, 0.0))
    house.fleet.scraped(A, EngineFigures(running=3, waiting=0, kv_used=0.5, dialect="sglang", engines=engines))
    told = house.described(A)
    assert told["dialect"] == "sglang"
    assert told["engines"][0] == {"engine": "0", "waiting": 0.0, "running": 3.0, "kv_used": 1.0}
    assert (told["running"], len(told["engines"])) == (3.0, 2)


def test_what_engines_ended_is_told(house: House) -> None:
    """By reason, from the second scrape on."""
    house.bring_up("m", A)
    for finished in ({"stop": 7.0}, {"stop": 9.0, "length": 1.0}):
        house.fleet.scraped(A, EngineFigures(running=0, waiting=0, finished=finished))
    assert house.events.seen[-2:] == [(A, "stop", 2.0), (A, "length", 1.0)]


@pytest.mark.parametrize(
    ("finished", "dialect", "state"),
    [
        ({"abort": 2.0}, "vllm", State.UNHEALTHY),
        ({"abort": 2.0, "stop": 1.0}, "vllm", State.READY),
        ({"stop": 1.0}, "vllm", State.READY),
        ({"abort": 2.0}, "sglang", State.READY),
    ],
)
def test_an_engine_that_only_gives_up_must_prove_itself(
    house: House, finished: dict[str, float], dialect: str, state: State
) -> None:
    """Paused or shutting down, it answers 200. One that serves others is at work; others count who left, too."""
    house.bring_up("m", A, B)
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, finished={"stop": 0.0, "abort": 0.0}, dialect=dialect))
    house.fleet.scraped(A, EngineFigures(running=0, waiting=0, finished=finished, dialect=dialect))
    assert house.state_of(A) is state
    house.fleet.listed_models(A, LISTING)
    assert house.state_of(A) is State.READY


def test_an_engine_with_requests_that_does_no_step_is_stuck() -> None:
    """Ten seconds without progress, though it answers its metrics and its model list; a step in between is enough."""
    house = House()
    house.bring_up("m", A, B)
    for after_s, progress in ((0, 5.0), (8, 5.0), (9, 6.0), (18, 6.0)):
        house.now_s = 100.0 + after_s
        house.fleet.scraped(A, EngineFigures(running=1, waiting=0, progress=progress))
        assert house.state_of(A) is State.READY
    house.now_s = 120.0
    house.fleet.scraped(A, EngineFigures(running=1, waiting=0, progress=6.0))
    assert house.state_of(A) is State.UNHEALTHY
    assert house.pick() == {B}
    assert house.fleet.wants_trial(A)


def test_an_engine_that_passed_its_trial_is_not_stuck_again_at_once() -> None:
    """Though its figures stand still, since whatever tells them does: it is given as long as any other."""
    house = House()
    house.bring_up("m", A, B)
    for after_s in (0, 20):
        house.now_s = 100.0 + after_s
        house.fleet.scraped(A, EngineFigures(running=1, waiting=0, progress=6.0))
    assert house.state_of(A) is State.UNHEALTHY
    house.fleet.listed_models(A, LISTING)
    for after_s, state in ((21, State.READY), (29, State.READY), (31, State.UNHEALTHY)):
        house.now_s = 100.0 + after_s
        house.fleet.scraped(A, EngineFigures(running=1, waiting=0, progress=6.0))
        assert house.state_of(A) is state


def test_an_idle_engine_need_not_make_progress() -> None:
    """Nor one that does not say how far it is."""
    house = House()
    house.bring_up("m", A, B)
    for after_s in (0, 100, 200):
        house.now_s = 100.0 + after_s
        house.fleet.scraped(A, EngineFigures(running=0, waiting=0, progress=5.0))
        house.fleet.scraped(B, EngineFigures(running=3, waiting=0))
    assert house.pick() == {A, B}


def test_an_engine_without_the_pools_model_is_loading() -> None:
    """It answers, but not for what it is there for; with the model it is ready."""
    house = House()
    house.fleet.set_endpoints("m", [A])
    house.acknowledge()
    house.fleet.listed_models(A, Listing(frozenset({"other"}), None))
    assert house.state_of(A) is State.LOADING
    house.fleet.listed_models(A, LISTING)
    assert house.state_of(A) is State.READY


def test_a_warming_endpoint_gets_the_share_it_can_bear() -> None:
    """A tenth of what it would get, in 1,000 decisions between two; all of it where there is no other."""
    generation = Generation(
        1, parse("probe: {warm_up_requests: 50}\npools: [{name: m, models: [m], endpoints: {file: m.yaml}}]")
    )
    house = House(generation)
    house.bring_up("m", A, B)
    for _ in range(50):
        house.fleet.observe(A, Evidence.SERVED)
    assert (house.state_of(A), house.state_of(B)) == (State.READY, State.WARMING)
    request, rng = InferenceRequest(Kind.CHAT, "m", "m", 100), Random(3)
    chosen = [house.fleet.placements["m"].choose(request, house.state, house.now_s, rng) for _ in range(1_000)]
    firsts = [decision.addresses[0] for decision in chosen if isinstance(decision, Decision)]
    assert 20 <= firsts.count(B) <= 90
    house.fleet.observe(A, Evidence.DRAIN)
    assert house.pick() == {B}


def test_what_an_endpoints_list_says_of_it_is_known(house: House) -> None:
    """Weight and cost as listed, and as listed anew; the defaults for those of which nothing is said."""
    house.fleet.set_endpoints("m", [Discovered(A, weight=2, cost=3), B])
    assert (house.state.weight[house.slot(A)], house.state.cost[house.slot(A)]) == (2, 3)
    assert (house.state.weight[house.slot(B)], house.state.cost[house.slot(B)]) == (1, 0)
    house.fleet.set_endpoints("m", [Discovered(A, weight=5), B])
    assert (house.state.weight[house.slot(A)], house.state.cost[house.slot(A)]) == (5, 0)


def test_only_a_known_other_zone_is_remote(house: House) -> None:
    """Neither ours nor an unknown one; and a reload may move us."""

    def remote() -> list[bool]:
        return [bool(house.state.remote[house.slot(address)]) for address in (A, B, C)]

    house.fleet.set_endpoints("m", [Discovered(A, zone="a"), Discovered(B, zone="b"), C])
    assert remote() == [False, False, False]
    for zone, expected in (("a", [False, True, False]), ("b", [True, False, False])):
        text = f"zone: {zone}\npools: [{{name: m, models: [m], endpoints: {{file: m.yaml}}}}]"
        house.fleet.configure(Generation(2, parse(text)))
        assert remote() == expected


def test_what_placement_makes_of_an_endpoint_is_told(house: House) -> None:
    """The believed prefill rate, and what is still to be prefilled there."""
    house.bring_up("m", A)
    assert house.described(A)["prefill_tokens_per_s"] == {"m": 25_000.0}
    house.place()
    assert house.described(A)["backlog_tokens"]["m"] > 300
    assert house.described(A)["indexed_tokens"] == {"m": 300}


def test_an_engine_without_metrics_is_not_one_whose_metrics_are_late() -> None:
    """Those that speak gRPC have none."""
    generation = Generation(
        1, parse("pools: [{name: m, models: [m], protocol: grpc, endpoints: {file: m.yaml}}, "
                 "{name: n, models: [n], endpoints: {file: n.yaml}}]")
    )  # fmt: skip
    house = House(generation)
    house.fleet.set_endpoints("m", [A])
    house.fleet.set_endpoints("n", [B])
    assert [bool(house.state.has_metrics[house.slot(address)]) for address in (A, B)] == [False, True]
