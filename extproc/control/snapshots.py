"""From the fleet to xDS: what Envoy should know, published whenever it changes, and what it acknowledged, told back.

The seam between fleet (plain sets of addresses) and control (Envoy's messages).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from extproc.config.schema import Config
from extproc.control.clusters import pool_cluster
from extproc.control.xds import Snapshot, XdsServer
from extproc.fleet.fleet import Fleet


class PublishEvents(Protocol):
    """Who counts xDS messages."""

    def xds(self, event: str, type_name: str) -> None:
        """One xDS message was pushed, acknowledged or rejected, or a whole stream was refused."""

    def xds_sessions(self, count: int) -> None:
        """How many Envoys are connected."""


def clusters_of(config: Config) -> dict[str, bytes]:
    """Our clusters, serialized. Raises whatever a value that Envoy's messages cannot hold raises."""
    ours = [pool for pool in config.pools if pool.cluster is None]
    return {pool.cluster_name: pool_cluster(config, pool).SerializeToString(deterministic=True) for pool in ours}


class Publisher:
    """Keeps Envoys and fleet in step: publish, wait for every acknowledgement, then let the endpoint be picked."""

    def __init__(self, fleet: Fleet, events: PublishEvents) -> None:
        self._fleet = fleet
        self._xds = XdsServer(_Counted(events), on_change=self._acknowledged)
        self._clusters: dict[str, bytes] = {}
        self._configured: frozenset[str] = frozenset()
        self._published: tuple[Mapping[str, bytes], Mapping[str, frozenset[str]], frozenset[str]] | None = None
        self._version = 0
        fleet.on_assignments = self._publish

    def configure(self, config: Config, own: Mapping[str, bytes]) -> None:
        """Use the clusters of a new generation, as `clusters_of` made them."""
        self._configured = frozenset(own)
        self._clusters = {**self._clusters, **own}
        self._xds.max_streams = config.limits.xds_streams
        self._publish()

    async def stream(self, requests: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        """The handler of StreamAggregatedResources."""
        await self._xds.stream(requests, context)

    def _publish(self) -> None:
        assignments = self._fleet.assignments()
        # replies under way may name a cluster that has left the config: it stays as long as its addresses do
        self._clusters = {
            name: cluster for name, cluster in self._clusters.items() if name in self._configured or name in assignments
        }
        wanted = (self._clusters, assignments, self._fleet.unread_clusters())
        nothing_ever = self._published is None and not self._clusters
        if wanted == self._published or nothing_ever:
            self._acknowledged()
            return
        self._published = wanted
        self._version += 1
        self._xds.publish(Snapshot(str(self._version), *wanted))

    def _acknowledged(self) -> None:
        self._fleet.acknowledged({cluster: self._xds.acknowledged(cluster) for cluster in self._clusters})


class _Counted:
    """XdsEvents, as metrics."""

    def __init__(self, events: PublishEvents) -> None:
        self._events = events

    def pushed(self, type_name: str) -> None:
        self._events.xds("pushed", type_name)

    def acked(self, type_name: str) -> None:
        self._events.xds("acked", type_name)

    def nacked(self, type_name: str, _detail: str) -> None:
        self._events.xds("nacked", type_name)

    def connected(self, count: int) -> None:
        self._events.xds_sessions(count)

    def refused(self) -> None:
        self._events.xds("refused", "stream")
