"""Discovery by DNS, against a small DNS server of our own: what is asked, what is believed, when it is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from pydantic import ValidationError

from extproc.config.sections.endpoint_sources import Dns, Endpoints
from extproc.fleet.discovery import dns as discovery_dns
from extproc.fleet.discovery.dns import _Follower, follow_dns
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.sink import Sink

HANG_S = 60
SOA = "example. 30 IN SOA ns.example. me.example. 1 2 3 4 30"


class Server(asyncio.DatagramProtocol):
    """A DNS server over UDP. `zone` holds records; a name that is not in it does not exist."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str]] = {}
        self.extra: list[str] = []  # additional section of every answer
        self.rcode: dns.rcode.Rcode | None = None  # the answer to everything
        self.silent = False
        self.asked: list[tuple[str, str]] = []
        self.address = ""

    def connection_made(self, transport: Any) -> None:
        """Listening."""
        self._transport = transport
        self.address = "{}:{}".format(*transport.get_extra_info("sockname"))

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """One question."""
        query = dns.message.from_wire(data)
        question = query.question[0]
        self.asked.append((question.name.to_text(), dns.rdatatype.to_text(question.rdtype)))
        if not self.silent:
            self._transport.sendto(self._answer(query).to_wire(), addr)

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name, kind = self.asked[-1]
        names = {name for name, _ in self.zone}
        if self.rcode is not None or name not in names:
            answer.set_rcode(dns.rcode.NXDOMAIN if self.rcode is None else self.rcode)
            answer.authority.append(rrset(SOA))
            return answer
        answer.answer.extend(rrset(record) for record in self.zone.get((name, kind), []))
        answer.additional.extend(rrset(record) for record in self.extra)
        return answer

    def close(self) -> None:
        """Stop listening."""
        self._transport.close()


def rrset(text: str) -> dns.rrset.RRset:
    """`name ttl IN type data`, several data separated by `|`."""
    name, ttl, _, kind, data = text.split(" ", 4)
    return dns.rrset.from_text(name, int(ttl), "IN", kind, *data.split("|"))


class House:
    """A follower of the server's `fleet.example`, and what it told."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.lists: list[list[str]] = []
        self.failures: list[str] = []
        self.stale = False
        self.sink = Sink("p", self._report, self)

    def follower(self, **fields: Any) -> _Follower:
        """One that asks our server."""
        return _Follower(self.source(**fields), self.sink, Random(1))

    def source(self, **fields: Any) -> Dns:
        """Its configuration."""
        given = {"name": "fleet.example.", "port": 80, "servers": [self.server.address], **fields}
        return Dns.model_validate({name: value for name, value in given.items() if value is not None})

    def _report(self, _pool: str, endpoints: list[Discovered]) -> None:
        self.lists.append([endpoint.address for endpoint in endpoints])

    def discovered(self, pool: str, *, ok: bool) -> None:
        """DiscoveryEvents."""

    def discovery_failed(self, pool: str, reason: str) -> None:  # noqa: ARG002
        """DiscoveryEvents."""
        self.failures.append(reason)

    def discovery_state(self, pool: str, *, endpoints: int, skipped: int, stale: bool) -> None:  # noqa: ARG002
        """DiscoveryEvents."""
        self.stale = stale


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A server that listens while the test lasts."""
    loop = asyncio.get_running_loop()
    _, server = await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
    yield House(server)
    server.close()


def serve(house: House, *records: str) -> None:
    """The server has these records now."""
    house.server.zone.clear()
    for record in records:
        name, _, _, kind, _ = record.split(" ", 4)
        house.server.zone.setdefault((name, kind), []).append(record)


# -- records


async def test_every_address_of_the_name_is_an_endpoint(house: House) -> None:
    """At the configured port."""
    serve(house, "fleet.example. 30 IN A 10.0.0.1|10.0.0.2")
    await house.follower().turn()
    assert [sorted(addresses) for addresses in house.lists] == [["10.0.0.1:80", "10.0.0.2:80"]]
    assert not house.stale


async def test_an_engine_with_both_kinds_of_address_is_listed_once(house: House) -> None:
    """By its IPv4 address; IPv6 counts where there is no other, or where it is asked for."""
    serve(house, "fleet.example. 30 IN A 10.0.0.1", "fleet.example. 30 IN AAAA fd00::1")
    await house.follower().turn()
    await house.follower(type="AAAA").turn()
    serve(house, "fleet.example. 30 IN AAAA fd00::2")
    await house.follower().turn()
    assert house.lists == [["10.0.0.1:80"], ["[fd00::1]:80"], ["[fd00::2]:80"]]


async def test_a_name_that_stands_for_another_is_followed(house: House) -> None:
    """A CNAME's shorter time to live counts too."""
    serve(house, "fleet.example. 7 IN CNAME other.example.")
    house.server.zone["fleet.example.", "A"] = [
        "fleet.example. 7 IN CNAME other.example.", "other.example. 50 IN A 10.0.0.1",
    ]  # fmt: skip
    assert await house.follower().turn() == 7
    assert house.lists == [["10.0.0.1:80"]]


SRV = ("_http._tcp.fleet.example. 30 IN SRV 0 5 8001 a.example.|0 5 8002 b.example.|9 5 8003 spare.example.",
       "a.example. 30 IN A 10.0.0.1", "b.example. 12 IN AAAA fd00::2", "spare.example. 1 IN A 10.0.0.9")  # fmt: skip


async def test_srv_records_bring_their_ports(house: House) -> None:
    """Each target of the first priority at its port and address; the shortest time to live of all counts."""
    serve(house, *SRV)
    assert await house.follower(name="_http._tcp.fleet.example.", port=None).turn() == 12
    assert [sorted(addresses) for addresses in house.lists] == [["10.0.0.1:8001", "[fd00::2]:8002"]]


async def test_addresses_that_come_with_srv_records_are_not_asked_for(house: House) -> None:
    """As a cluster's DNS sends them: one question for the whole fleet."""
    serve(house, SRV[0])
    house.server.extra = list(SRV[1:3])
    await house.follower(name="_http._tcp.fleet.example.", port=None).turn()
    assert [sorted(addresses) for addresses in house.lists] == [["10.0.0.1:8001", "[fd00::2]:8002"]]
    assert house.server.asked == [("_http._tcp.fleet.example.", "SRV")]


async def test_a_target_of_which_a_server_says_nothing_is_left_out(house: House) -> None:
    """And `.` says that the service is not there."""
    serve(house, SRV[0], SRV[1])
    await house.follower(name="_http._tcp.fleet.example.", port=None).turn()
    serve(house, "_http._tcp.fleet.example. 30 IN SRV 0 0 0 .")
    await house.follower(name="_http._tcp.fleet.example.", port=None, empty_after=1).turn()
    assert house.lists == [["10.0.0.1:8001"], []]


async def test_an_unchanged_list_is_not_told_again(house: House) -> None:
    """Servers turn their answers round; a fleet in another order is the same fleet."""
    follower = house.follower()
    serve(house, "fleet.example. 30 IN A 10.0.0.1|10.0.0.2")
    await follower.turn()
    serve(house, "fleet.example. 30 IN A 10.0.0.2|10.0.0.1")
    await follower.turn()
    assert len(house.lists) == 1


# -- time


@pytest.mark.parametrize(("ttl", "pause_s"), [(0, 5), (30, 30), (86_400, 60)])
async def test_the_time_to_live_counts_within_bounds(house: House, ttl: int, pause_s: float) -> None:
    """A record good for a day would hide a day's changes; one good for nothing would keep the server busy."""
    serve(house, f"fleet.example. {ttl} IN A 10.0.0.1")
    assert await house.follower(refresh_min_s=5, refresh_max_s=60).turn() == pause_s


async def test_changes_are_followed(house: House) -> None:
    """Added, then removed, while the loop runs."""
    serve(house, "fleet.example. 0 IN A 10.0.0.1")
    task = asyncio.create_task(follow_dns(house.source(refresh_min_s=0.01), house.sink))
    await until(lambda: house.lists == [["10.0.0.1:80"]])
    serve(house, "fleet.example. 0 IN A 10.0.0.2")
    await until(lambda: house.lists[1:] == [["10.0.0.2:80"]])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_fault_nobody_thought_of_does_not_end_the_following(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the name is asked for again."""
    serve(house, "fleet.example. 0 IN A 10.0.0.1")
    reports = iter([ZeroDivisionError(), None])

    def found(_endpoints: object) -> None:
        if (fault := next(reports, None)) is not None:
            raise fault
        house.lists.append(["found"])

    monkeypatch.setattr(house.sink, "found", found)
    source = house.source(refresh_min_s=0.01, refresh_max_s=0.01)
    task = asyncio.create_task(follow_dns(source, house.sink))
    await until(lambda: bool(house.lists))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    """Wait until it is so."""

    async def wait() -> None:
        while not check():  # noqa: ASYNC110 - the server and the follower set no events
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), HANG_S)


# -- failures


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, dns.rcode.NOTIMP])
async def test_a_server_that_fails_keeps_the_last_good_list(house: House, rcode: dns.rcode.Rcode) -> None:
    """However often it does; counted with its reason, and stale until an answer comes."""
    follower = house.follower(timeout_s=0.5)
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    await follower.turn()
    house.server.rcode = rcode
    for _ in range(5):
        await follower.turn()
    assert house.lists == [["10.0.0.1:80"]]
    assert house.failures == ["server_failure"] * 5
    assert house.stale
    house.server.rcode = None
    await follower.turn()
    assert not house.stale


async def test_a_server_that_does_not_answer_keeps_the_last_good_list(house: House) -> None:
    """Nor does it hold up the loop."""
    follower = house.follower(timeout_s=0.1)
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    await follower.turn()
    house.server.silent = True
    turn = asyncio.create_task(follower.turn())
    await until(lambda: len(house.server.asked) > 1)
    assert not turn.done()
    await turn
    assert house.lists == [["10.0.0.1:80"]]
    assert house.failures == ["timeout"]


async def test_a_part_that_fails_is_no_answer(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets' addresses are part of an SRV answer: half a fleet is not the fleet."""
    follower = house.follower(name="_http._tcp.fleet.example.", port=None)
    serve(house, *SRV)
    await follower.turn()
    resolve = dns.asyncresolver.Resolver.resolve

    async def fail_for_b(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name) == "b.example.":
            raise dns.resolver.NoNameservers
        return await resolve(self, name, *args, **kwargs)

    monkeypatch.setattr(dns.asyncresolver.Resolver, "resolve", fail_for_b)
    await follower.turn()
    assert len(house.lists) == 1
    assert house.failures == ["server_failure"]


async def test_failures_back_off_to_the_longest_pause(house: House) -> None:
    """With jitter, and from the shortest again after an answer."""
    house.server.rcode = dns.rcode.SERVFAIL
    follower = house.follower(refresh_min_s=1, refresh_max_s=60)
    pauses = [await follower.turn() for _ in range(20)]
    assert all(1 <= pause <= 60 for pause in pauses)
    assert pauses[0] <= 2
    assert max(pauses) > 30
    assert len(set(pauses)) == 20
    house.server.rcode = None
    serve(house, "fleet.example. 9 IN A 10.0.0.1")
    assert await follower.turn() == 9
    house.server.rcode = dns.rcode.SERVFAIL
    assert await follower.turn() <= 2


# -- nothing there


@pytest.mark.parametrize("records", [[], ["fleet.example. 30 IN TXT hello"]], ids=["no such name", "no such record"])
async def test_nothing_there_empties_the_list_when_said_often_enough(house: House, records: list[str]) -> None:
    """Not before: until then it counts as a failure, and the name is asked for soon."""
    follower = house.follower(empty_after=3)
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    await follower.turn()
    serve(house, *records)
    assert [await follower.turn() for _ in range(2)] == [5, 5]
    assert house.lists == [["10.0.0.1:80"]]
    assert house.stale
    assert house.failures == ["empty", "empty"]
    await follower.turn()
    assert house.lists == [["10.0.0.1:80"], []]
    assert not house.stale


async def test_only_answers_in_a_row_count(house: House) -> None:
    """One that names endpoints begins the count anew; a failure neither counts nor clears."""
    follower = house.follower(empty_after=2)
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    await follower.turn()
    serve(house)
    await follower.turn()
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    await follower.turn()
    serve(house)
    await follower.turn()
    house.server.rcode = dns.rcode.SERVFAIL
    await follower.turn()
    assert house.lists == [["10.0.0.1:80"]]
    house.server.rcode = None
    await follower.turn()
    assert house.lists == [["10.0.0.1:80"], []]


# -- resolv.conf and configuration


async def test_without_servers_those_of_the_system_are_asked(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read anew each time, since it changes; a short name gets the domains to search."""
    serve(house, "fleet.example. 30 IN A 10.0.0.1")
    read = []

    def configured(self: Any, _file: str = "") -> None:
        read.append(None)
        self.nameservers = discovery_dns._resolver(house.source()).nameservers
        self.search = [dns.name.from_text("example.")]

    monkeypatch.setattr(dns.asyncresolver.Resolver, "read_resolv_conf", configured)
    follower = house.follower(servers=None, name="fleet")
    await follower.turn()
    await follower.turn()
    assert house.lists == [["10.0.0.1:80"]]
    assert len(read) == 2


async def test_no_servers_at_all_is_a_failure_as_any(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reason of its own."""

    def nothing(_self: Any, _file: str = "") -> None:
        raise dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(dns.asyncresolver.Resolver, "read_resolv_conf", nothing)
    await house.follower(servers=None).turn()
    assert house.failures == ["no_resolver"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "fleet.example"}, "give a port"),
        ({"name": "_http._tcp.fleet.example", "port": 80}, "none for SRV"),
        ({"name": "fleet.example", "type": "SRV", "port": 80}, "none for SRV"),
        ({"name": "fleet..example", "port": 80}, "pattern"),
        ({"name": "fleet.example", "port": 70_000}, "less than or equal"),
        ({"name": "fleet.example", "port": 80, "servers": ["dns.example"]}, "is not IP:port"),
        ({"name": "fleet.example", "port": 80, "refresh_min_s": 90}, "more than refresh_max_s"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    """When the file is read."""
    with pytest.raises(ValidationError, match=message):
        Endpoints.model_validate({"dns": fields})


def test_a_pool_has_one_source() -> None:
    """Not two."""
    with pytest.raises(ValidationError, match="exactly one of"):
        Endpoints.model_validate({"dns": {"name": "fleet.example", "port": 80}, "static": []})
