"""Endpoints from Kubernetes: the pods of a selector, of a Service, or of an InferencePool, as they come and go.

A pod that is being deleted is reported as terminating, so that it drains instead of vanishing. Not here: the API
server's protocol (kubernetes_api.py) and what its objects say (kubernetes_objects.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from extproc.config.sections.endpoint_sources import EndpointSlices, Kubernetes
from extproc.fleet.discovery.kubernetes_api import Collection, Mirror, Unread
from extproc.fleet.discovery.kubernetes_objects import (
    Endpoints,
    EndpointSlice,
    InferencePool,
    Pod,
    PoolSpec,
    endpoints_of_pods,
    endpoints_of_slices,
)
from extproc.fleet.discovery.sink import Sink

_PODS = "/api/v1/namespaces/{namespace}/pods"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
_INFERENCE_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"


async def follow_kubernetes(source: Kubernetes, sink: Sink) -> None:
    """Tell what `source` selects for as long as the task lives."""
    if source.pods is not None:
        await _Selected(source, sink).follow(source.pods.selector, (source.pods.port,))
    elif source.endpoint_slices is not None:
        await _follow_slices(source, source.endpoint_slices, sink)
    elif source.inference_pool is not None:
        await _Pool(source, source.inference_pool.name, sink).follow()


async def _follow_slices(source: Kubernetes, wanted: EndpointSlices, sink: Sink) -> None:
    collection = Collection(EndpointSlice, _SLICES, {"labelSelector": f"kubernetes.io/service-name={wanted.service}"})

    def tell(slices: list[EndpointSlice]) -> None:
        endpoints = endpoints_of_slices(slices, wanted.port, source.ip_family)
        sink.found(endpoints.found, skipped=endpoints.skipped)

    await Mirror(source, collection, tell, lambda why: sink.failed(why.reason, why)).follow()


class _Selected:
    """Pods by label. `why_stale` is what makes the list doubtful though the pods themselves can be read."""

    def __init__(self, source: Kubernetes, sink: Sink) -> None:
        self.why_stale: Unread | None = None
        self._last: Endpoints | None = None
        self._source = source
        self._sink = sink

    async def follow(self, selector: str, ports: Iterable[int | str]) -> None:
        """Mirror until cancelled."""
        wanted = tuple(ports)

        def tell(pods: list[Pod]) -> None:
            self._tell(endpoints_of_pods(pods, wanted, self._source.ip_family))

        collection = Collection(Pod, _PODS, {"labelSelector": selector})
        await Mirror(self._source, collection, tell, self.fail).follow()

    def _tell(self, endpoints: Endpoints) -> None:
        self._last = endpoints
        self._sink.found(endpoints.found, skipped=endpoints.skipped, stale=self.why_stale is not None)

    def fail(self, why: Unread) -> None:
        """Say that something could not be read."""
        self._sink.failed(why.reason, why)

    def trust(self) -> None:
        """What made the list doubtful is over."""
        if self.why_stale is not None:
            self.why_stale = None
            if self._last is not None:
                self._tell(self._last)


class _Pool:
    """An InferencePool, and the pods it selects. When it is gone, its last word counts: pods do not go with it."""

    def __init__(self, source: Kubernetes, name: str, sink: Sink) -> None:
        self._source = source
        self._name = name
        self._selected = _Selected(source, sink)
        self._spec: PoolSpec | None = None
        self._pods: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """Mirror until cancelled."""
        collection = Collection(InferencePool, _INFERENCE_POOLS, {"fieldSelector": f"metadata.name={self._name}"})
        try:
            await Mirror(self._source, collection, self._tell, self._fail).follow()
        finally:
            self._stop()

    def _tell(self, pools: list[InferencePool]) -> None:
        if not pools:
            self._fail(Unread("not_found", f"there is no InferencePool {self._name}"))
            return
        self._selected.trust()
        if pools[0].spec != self._spec:
            self._stop()
            self._spec = spec = pools[0].spec
            ports = [port.number for port in spec.target_ports]
            self._pods = asyncio.create_task(self._selected.follow(spec.label_selector, ports), name="pods of a pool")

    def _fail(self, why: Unread) -> None:
        self._selected.why_stale = why
        self._selected.fail(why)

    def _stop(self) -> None:
        if self._pods is not None:
            self._pods.cancel()
