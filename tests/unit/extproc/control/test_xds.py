"""The xDS server: many Envoys, one answer to who may be picked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from extproc.control.ads_session import CDS, EDS
from extproc.control.xds import Snapshot, XdsServer, encode_assignment

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Counted:
    """XdsEvents as lists."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.open = 0

    def pushed(self, type_name: str) -> None:
        """Sent."""
        self.seen.append(("pushed", type_name))

    def acked(self, type_name: str) -> None:
        """Taken over."""
        self.seen.append(("acked", type_name))

    def nacked(self, type_name: str, detail: str) -> None:
        """Refused."""
        self.seen.append(("nacked", type_name, detail))

    def connected(self, count: int) -> None:
        """Envoys connected."""
        self.open = count

    def refused(self) -> None:
        """A stream beyond the bound."""
        self.seen.append(("refused",))


class Refused(Exception):
    """The stream was not accepted."""


class Envoy:
    """One end of a discovery stream, in memory."""

    def __init__(self, connection: str = "test") -> None:
        self.connection = connection
        self.requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.responses: asyncio.Queue[bytes] = asyncio.Queue()

    def peer(self) -> str:
        """As grpcio's context."""
        return self.connection

    async def abort(self, code: object, _details: str) -> None:
        """As grpcio's context."""
        raise Refused(code)

    async def write(self, message: bytes) -> None:
        """As grpcio's context."""
        await self.responses.put(message)

    async def read(self) -> AsyncIterator[bytes]:
        """What the server reads."""
        while (message := await self.requests.get()) is not None:
            yield message

    def ask(self, type_url: str, *names: str, nonce: str = "", error: str | None = None) -> None:
        """Send a request."""
        request = discovery_pb2.DiscoveryRequest(type_url=type_url, resource_names=names, response_nonce=nonce)
        if error is not None:
            request.error_detail.message = error
        self.requests.put_nowait(request.SerializeToString())

    async def receive(self) -> discovery_pb2.DiscoveryResponse:
        """The next response."""
        async with asyncio.timeout(30):
            return discovery_pb2.DiscoveryResponse.FromString(await self.responses.get())


@asynccontextmanager
async def connected(server: XdsServer, connection: str = "test") -> AsyncIterator[Envoy]:
    """An open stream."""
    envoy = Envoy(connection)
    task = asyncio.create_task(server.stream(envoy.read(), envoy))
    try:
        yield envoy
        envoy.requests.put_nowait(None)
        await task
    finally:
        task.cancel()


def nothing() -> None:
    """Nobody listens."""


def published(*addresses: str, version: str = "1") -> Snapshot:
    """One pool with these addresses."""
    return Snapshot(version, {"chat": b""}, {"chat": frozenset(addresses)})


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until it is so."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - it waits for other tasks' turns, not for a moment
            await asyncio.sleep(0)


def test_without_an_envoy_all_published_addresses_count() -> None:
    """Somebody else's control plane rules then, and nothing is known before the first publish."""
    server = XdsServer(Counted(), nothing)
    assert server.acknowledged("chat") == frozenset()
    server.publish(published(A, B))
    assert server.acknowledged("chat") == {A, B}


async def test_a_new_address_waits_for_the_slowest_envoy() -> None:
    """An address counts once every subscribed Envoy has it, and a removed one stops counting at once."""
    changes: list[frozenset[str]] = []
    server = XdsServer(Counted(), lambda: changes.append(server.acknowledged("chat")))
    server.publish(published(A))
    async with connected(server) as quick, connected(server) as slow:
        for envoy in (quick, slow):
            envoy.ask(EDS, "chat")
            envoy.ask(EDS, "chat", nonce=(await envoy.receive()).nonce)
        server.publish(published(A, B, version="2"))
        quick.ask(EDS, "chat", nonce=(await quick.receive()).nonce)
        late = await slow.receive()
        await until(quick.requests.empty)
        assert server.acknowledged("chat") == {A}
        slow.ask(EDS, "chat", nonce=late.nonce)
        await until(lambda: server.acknowledged("chat") == {A, B})
        assert changes[-1] == {A, B}
        server.publish(published(B, version="3"))
        assert changes[-1] == {B}


async def test_an_envoy_that_leaves_no_longer_holds_anything_up() -> None:
    """A lagging Envoy's departure makes the address pickable, and the listener hears of it."""
    calls: list[int] = []
    events = Counted()
    server = XdsServer(events, lambda: calls.append(1))
    server.publish(published(A))
    async with connected(server) as envoy:
        envoy.ask(EDS, "chat")
        envoy.ask(EDS, "chat", nonce=(await envoy.receive()).nonce)
        await until(lambda: ("acked", "eds") in events.seen)
        server.publish(published(A, B, version="2"))
        assert server.acknowledged("chat") == {A}
        before = len(calls)
    assert server.acknowledged("chat") == {A, B}
    assert (events.open, len(calls)) == (0, before + 1)


async def test_a_returning_envoy_does_not_interrupt_the_fleet() -> None:
    """When Envoy reconnects, the addresses it is being sent stay pickable all along."""
    server = XdsServer(Counted(), nothing)
    server.publish(published(A))
    async with connected(server) as envoy:
        envoy.ask(CDS)
        envoy.ask(EDS, "chat")
        assert [(await envoy.receive()).type_url for _ in range(2)] == [CDS, EDS]
        assert server.acknowledged("chat") == {A}


async def test_a_refusal_is_counted_and_changes_nothing() -> None:
    """A NACK reaches the counter with its detail; the old addresses stay acknowledged and the stream stays open."""
    events = Counted()
    server = XdsServer(events, nothing)
    server.publish(published(A))
    async with connected(server) as envoy:
        envoy.ask(EDS, "chat")
        envoy.ask(EDS, "chat", nonce=(await envoy.receive()).nonce)
        await until(lambda: ("acked", "eds") in events.seen)
        server.publish(published(A, B, version="2"))
        envoy.ask(EDS, "chat", nonce=(await envoy.receive()).nonce, error="bad address")
        await until(lambda: ("nacked", "eds", "bad address") in events.seen)
        assert server.acknowledged("chat") == {A}
        assert events.open == 1


async def test_garbage_ends_its_stream_only() -> None:
    """A stream that does not speak xDS is closed; the server goes on."""
    events = Counted()
    server = XdsServer(events, nothing)
    async with connected(server) as envoy:
        envoy.requests.put_nowait(b"\xff\xff\xff")
        await until(lambda: events.open == 0)
    server.publish(published(A))
    assert server.acknowledged("chat") == {A}


async def test_the_number_of_streams_is_bounded() -> None:
    """A stream beyond the bound is refused and counted."""
    events = Counted()
    server = XdsServer(events, nothing, max_streams=1)
    async with connected(server):
        await asyncio.sleep(0)
        late = Envoy()
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
            await server.stream(late.read(), late)
        assert events.seen == [("refused",)]


async def test_envoys_are_counted_and_not_their_streams() -> None:
    """One may open a stream for every cluster, all on its one connection."""
    events = Counted()
    server = XdsServer(events, nothing)
    async with connected(server, "first"), connected(server, "first"), connected(server, "second"):
        await until(lambda: events.open == 2)
        await asyncio.sleep(0)
        assert events.open == 2
    assert events.open == 0


async def test_a_stream_that_cannot_be_written_to_no_longer_counts() -> None:
    """It ends, although nothing says so on the side we read from: its session would wait for an answer for ever."""

    class Deaf(Envoy):
        async def write(self, message: bytes) -> None:
            raise OSError(message)

    events = Counted()
    server = XdsServer(events, nothing)
    envoy = Deaf()
    stream = asyncio.create_task(server.stream(envoy.read(), envoy))
    envoy.ask(EDS, "chat")
    server.publish(published(A))
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup):
            await stream
    assert events.open == 0
    server.publish(published(A, B, version="2"))
    assert server.acknowledged("chat") == {A, B}


async def test_a_new_cluster_waits_for_an_envoy_that_does_not_know_it() -> None:
    """None of its addresses counts until Envoy has taken over the cluster and then its addresses."""
    server = XdsServer(Counted(), nothing)
    server.publish(published(A))
    async with connected(server) as envoy:
        envoy.ask(CDS)
        envoy.ask(CDS, nonce=(await envoy.receive()).nonce)
        envoy.ask(EDS, "chat")
        old = await envoy.receive()
        envoy.ask(EDS, "chat", nonce=old.nonce)
        await until(envoy.requests.empty)
        both = {"chat": frozenset({A}), "code": frozenset({B})}
        server.publish(Snapshot("2", {"chat": b"", "code": b""}, both))
        clusters = await envoy.receive()
        assert server.acknowledged("code") == frozenset()
        envoy.ask(CDS, nonce=clusters.nonce)
        envoy.ask(EDS, "chat", "code", nonce=old.nonce)
        addresses = await envoy.receive()
        assert server.acknowledged("code") == frozenset()
        assert server.acknowledged("chat") == {A}
        envoy.ask(EDS, "chat", "code", nonce=addresses.nonce)
        await until(lambda: server.acknowledged("code") == {B})


async def test_a_returning_envoy_says_which_version_it_holds() -> None:
    """By that it is told from a new one: a cluster it has not got is not believed there."""
    server = XdsServer(Counted(), nothing)
    server.publish(Snapshot("2", {"chat": b"", "code": b""}, {"chat": frozenset({A}), "code": frozenset({B})}))
    async with connected(server) as envoy:
        first = discovery_pb2.DiscoveryRequest(type_url=CDS, version_info="1")
        envoy.requests.put_nowait(first.SerializeToString())
        envoy.ask(EDS, "chat")
        envoy.ask(CDS, nonce=(await envoy.receive()).nonce)
        await until(lambda: server.acknowledged("code") == frozenset())
        assert server.acknowledged("chat") == {A}


def test_addresses_are_encoded_as_envoy_reads_them() -> None:
    """IPv4 and IPv6 addresses come out without brackets, with their ports, in a stable order."""
    encoded = encode_assignment("chat", {"[::1]:8001", "10.0.0.1:8000"})
    assignment = endpoint_pb2.ClusterLoadAssignment.FromString(encoded)
    hosts = [one.endpoint.address.socket_address for one in assignment.endpoints[0].lb_endpoints]
    assert assignment.cluster_name == "chat"
    assert [(host.address, host.port_value) for host in hosts] == [("10.0.0.1", 8000), ("::1", 8001)]


def test_an_empty_cluster_is_a_valid_assignment() -> None:
    """No addresses encode as a named, empty assignment."""
    assignment = endpoint_pb2.ClusterLoadAssignment.FromString(encode_assignment("chat", ()))
    assert assignment.cluster_name == "chat"
    assert not any(locality.lb_endpoints for locality in assignment.endpoints)
