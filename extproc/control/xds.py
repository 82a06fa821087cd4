"""The xDS server: moves discovery messages between Envoys and their sessions, and knows what all of them acknowledged.

Not here: the protocol's rules (ads_session.py), what is published, and who may be picked (snapshots.py, extproc.fleet).

Addresses are packed with the C-backed stubs: a thousand take a millisecond or two of the decision loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import grpc
import structlog
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf.message import DecodeError

from extproc.control.ads_session import CDS, EDS, Addresses, AdsSession, Request, Response, Snapshot

__all__ = ["Snapshot", "XdsEvents", "XdsServer"]

log = structlog.get_logger(__name__)

_TYPE_NAMES = {CDS: "cds", EDS: "eds"}


class XdsEvents(Protocol):
    """Who counts. `type_name` is "cds" or "eds"."""

    def pushed(self, type_name: str) -> None:
        """A response was sent."""

    def acked(self, type_name: str) -> None:
        """An Envoy has taken a response over."""

    def nacked(self, type_name: str, detail: str) -> None:
        """An Envoy has refused a response."""

    def connected(self, count: int) -> None:
        """So many Envoys are connected now."""

    def refused(self) -> None:
        """A stream beyond the bound was not taken."""


class _Stream:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.session = AdsSession()
        # holds at most one response per type: the session sends the next once the last is answered
        self.outbox: asyncio.Queue[Response] = asyncio.Queue()

    def enqueue(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self.outbox.put_nowait(response)


class XdsServer:
    """Serves one snapshot to every Envoy. Says nothing before the first, so our restart never empties a fleet."""

    def __init__(self, events: XdsEvents, on_change: Callable[[], None], *, max_streams: int = 1024) -> None:
        """`on_change` is called whenever `acknowledged` may answer differently. `max_streams` may be changed later."""
        self._events = events
        self._on_change = on_change
        self.max_streams = max_streams
        self._streams: set[_Stream] = set()
        self._snapshot: Snapshot | None = None
        self._encoded: dict[str, tuple[Addresses, bytes]] = {}

    def publish(self, snapshot: Snapshot) -> None:
        """Make this what every Envoy should know."""
        self._snapshot = snapshot
        self._encoded = {name: kept for name, kept in self._encoded.items() if name in snapshot.assignments}
        for stream in self._streams:
            stream.enqueue(stream.session.offer(snapshot))
        self._on_change()

    def acknowledged(self, cluster: str) -> Addresses:
        """The published addresses that every Envoy has acknowledged which takes this cluster or its addresses from us.

        With no such Envoy these are all: then another control plane tells Envoy, or there is nobody to tell.
        """
        published = self._snapshot.addresses(cluster) if self._snapshot else None
        vouched = [stream.session.vouched(cluster) for stream in self._streams]
        return (published or frozenset()).intersection(*(known for known in vouched if known is not None))

    async def stream(self, requests: Any, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        """The handler of a discovery stream, of one type or of all (ADS); messages are bytes."""
        if len(self._streams) >= self.max_streams:
            self._events.refused()
            log.error("xDS stream refused", peer=context.peer(), streams=len(self._streams))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many xDS streams (limits.xds_streams)")
        stream = _Stream(context.peer())
        self._enter(stream)
        try:
            # a stream we can no longer write to must end, or its session would hold every newcomer up
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(stream, context))
                await self._read(stream, requests)
                writer.cancel()
        finally:
            self._leave(stream)

    def _enter(self, stream: _Stream) -> None:
        self._streams.add(stream)
        if self._snapshot is not None:
            stream.enqueue(stream.session.offer(self._snapshot))
        self._count_envoys()

    def _leave(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        self._count_envoys()

    def _count_envoys(self) -> None:
        # an Envoy may open a stream per cluster, but all on one connection
        self._events.connected(len({stream.peer for stream in self._streams}))
        self._on_change()

    async def _read(self, stream: _Stream, requests: Any) -> None:  # noqa: ANN401 - grpcio has no types
        async for message in requests:
            try:
                request = _decode(message)
            except DecodeError:
                log.warning("not a discovery request, closing the stream", peer=stream.peer)
                return
            self._count(request, stream.peer)
            stream.enqueue(stream.session.receive(request))
            self._on_change()

    def _count(self, request: Request, peer: str) -> None:
        type_name = _TYPE_NAMES.get(request.type_url)
        if type_name is None or not request.nonce:
            return
        if request.error is None:
            self._events.acked(type_name)
            return
        self._events.nacked(type_name, request.error)
        log.error("Envoy refused its configuration", peer=peer, type=type_name, detail=request.error)

    async def _write(self, stream: _Stream, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        while True:
            response = await stream.outbox.get()
            await context.write(self._encode(response))
            self._events.pushed(_TYPE_NAMES[response.type_url])

    def _encode(self, response: Response) -> bytes:
        message = discovery_pb2.DiscoveryResponse(
            version_info=response.version, type_url=response.type_url, nonce=response.nonce
        )
        for name, content in response.resources.items():
            packed = content if isinstance(content, bytes) else self._encode_addresses(name, content)
            message.resources.add(type_url=response.type_url, value=packed)
        return bytes(message.SerializeToString())

    def _encode_addresses(self, cluster: str, addresses: Addresses) -> bytes:
        kept = self._encoded.get(cluster)
        if kept is None or kept[0] != addresses:
            kept = self._encoded[cluster] = (addresses, encode_assignment(cluster, addresses))
        return kept[1]


def encode_assignment(cluster: str, addresses: Iterable[str]) -> bytes:
    """A serialized ClusterLoadAssignment, addresses in a stable order."""
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster)
    hosts = message.endpoints.add().lb_endpoints
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        target = hosts.add().endpoint.address.socket_address
        target.address, target.port_value = host.strip("[]"), int(port)
    return bytes(message.SerializeToString())


def _decode(message: bytes) -> Request:
    """Raise DecodeError."""
    decoded = discovery_pb2.DiscoveryRequest.FromString(message)
    return Request(
        type_url=decoded.type_url,
        names=frozenset(decoded.resource_names),
        nonce=decoded.response_nonce,
        error=decoded.error_detail.message if decoded.HasField("error_detail") else None,
        version=decoded.version_info,
    )
