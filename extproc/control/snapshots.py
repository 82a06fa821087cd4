"""From the fleet to xDS: what Envoy should know, published whenever it changes, and what it acknowledged, told back.

The seam between fleet (plain sets of addresses) and control (Envoy's messages).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from extproc.config.schema import Config
from extproc.control.xds import Snapshot, XdsServer
from extproc.fleet.fleet import Fleet


class PublishEvents(Protocol):
    """Who counts xDS messages."""

    def xds(self, event: str, type_name: str) -> None:
        """One xDS message was pushed, acknowledged or rejected."""

    def xds_sessions(self, count: int) -> None:
        """How many Envoys are connected."""


class Publisher:
    """Keeps Envoys and fleet in step: publish, wait for every acknowledgement, then let the endpoint be picked."""

    def __init__(self, fleet: Fleet, events: PublishEvents) -> None:
        self._fleet = fleet
        self._xds = XdsServer(_Counted(events), on_change=self._acknowledged)
        self._clusters: dict[str, bytes] = {}
        self._published: tuple[Mapping[str, bytes], Mapping[str, frozenset[str]]] | None = None
        self._version = 0
        fleet.on_assignments = self._publish

    def configure(self, config: Config) -> None:
        """Use the clusters of a new generation."""
        # Importing envoy-data-plane takes about a second, so only a process that serves xDS pays for it.
        from extproc.control.envoy_config import pool_cluster

        self._clusters = {
            pool.cluster_name: bytes(pool_cluster(config, pool)) for pool in config.pools if pool.cluster is None
        }
        self._publish()

    async def stream(self, requests: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        """The handler of StreamAggregatedResources."""
        await self._xds.stream(requests, context)

    def _publish(self) -> None:
        wanted = (self._clusters, self._fleet.assignments())
        if wanted == self._published or not self._clusters:
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
