"""The publisher: what Envoys are told when pools come, change and go, and that their answers reach the fleet."""

from __future__ import annotations

import pytest

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.control.snapshots import Publisher, Snapshot, clusters_of
from extproc.control.xds import XdsServer
from extproc.fleet.fleet import REMOVAL_GRACE_S, Fleet
from extproc.observe.metrics import Metrics
from policies.fleet_state import FleetState

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class House:
    """A fleet and its publisher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.snapshots: list[Snapshot] = []
        self.state = FleetState()
        metrics = Metrics()
        self.fleet = Fleet(self.state, metrics, lambda: self.now_s)
        self.publisher = Publisher(self.fleet, metrics)
        publish = XdsServer.publish

        def noted(server: XdsServer, snapshot: Snapshot) -> None:
            self.snapshots.append(snapshot)
            publish(server, snapshot)

        monkeypatch.setattr(XdsServer, "publish", noted)

    def configure(self, *pools: str, limits: str = "{}") -> None:
        """Use a config of these pools, in the order in which a running system tells its parts."""
        entries = ", ".join(f"{{models: [m{n}], endpoints: {{file: f}}, {pool}}}" for n, pool in enumerate(pools))
        generation = Generation(1, parse(f"limits: {limits}\npools: [{entries}]"))
        self.fleet.configure(generation)
        self.publisher.configure(generation.config, clusters_of(generation.config))

    def told(self) -> dict[str, frozenset[str] | None]:
        """The clusters that Envoys have been told of last, with their addresses."""
        return {name: self.snapshots[-1].addresses(name) for name in self.snapshots[-1].clusters}


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    """Two pools with an endpoint each."""
    house = House(monkeypatch)
    house.configure("name: m", "name: n")
    house.fleet.set_endpoints("m", [A])
    house.fleet.set_endpoints("n", [B])
    return house


def test_a_cluster_is_published_with_its_addresses(house: House) -> None:
    """And where there is no Envoy, they may be picked."""
    assert house.told() == {"pool_m": {A}, "pool_n": {B}}
    assert house.state.routable[:2].all()


def test_a_removed_pools_cluster_stays_for_the_grace(house: House) -> None:
    """Both are in every snapshot until then, and gone in the next."""
    house.configure("name: n")
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert all(set(snapshot.clusters) == {"pool_m", "pool_n"} for snapshot in house.snapshots)
    assert house.told() == {"pool_m": {A}, "pool_n": {B}}
    house.now_s += REMOVAL_GRACE_S / 2
    house.fleet.tick()
    assert house.told() == {"pool_n": {B}}


def test_a_renamed_pools_old_cluster_stays_beside_the_new(house: House) -> None:
    """The new one has its addresses as soon as discovery reports."""
    house.configure("name: o", "name: n")
    house.fleet.set_endpoints("o", [A])
    assert house.told() == {"pool_m": {A}, "pool_n": {B}, "pool_o": {A}}
    house.now_s += REMOVAL_GRACE_S
    house.fleet.tick()
    assert house.told() == {"pool_n": {B}, "pool_o": {A}}


def test_a_pool_that_cannot_be_read_is_published_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no addresses, not with an empty list of them, until it has some."""
    house = House(monkeypatch)
    house.configure("name: m", "name: n")
    house.fleet.set_endpoints("m", [A])
    house.fleet.could_not_read("n")
    assert house.told() == {"pool_m": {A}, "pool_n": None}
    assert house.snapshots[-1].unread == {"pool_n"}
    house.fleet.set_endpoints("n", [B])
    assert house.told() == {"pool_m": {A}, "pool_n": {B}}
    assert house.snapshots[-1].unread == frozenset()


def test_the_last_cluster_of_ours_leaves_too(house: House) -> None:
    """When every pool has moved to clusters of the platform's, Envoy is told that we have none."""
    house.configure("name: m, cluster: theirs-m", "name: n, cluster: theirs-n")
    assert house.told() == {"pool_m": {A}, "pool_n": {B}}
    house.now_s += REMOVAL_GRACE_S
    house.fleet.tick()
    assert house.told() == {}


def test_without_clusters_of_ours_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that there are none: whoever asks is told by somebody else."""
    house = House(monkeypatch)
    house.configure("name: m, cluster: theirs")
    house.fleet.set_endpoints("m", [A])
    assert house.snapshots == []
    assert house.state.routable[0]


def test_the_bound_of_streams_is_the_configs(house: House) -> None:
    """A reload changes it."""
    house.configure("name: m", limits="{xds_streams: 7}")
    assert house.publisher._xds.max_streams == 7
