"""Endpoints from DNS: a name's addresses, or the targets of its SRV records, asked for again as they expire.

A server that says "there is nothing" and one that fails are told apart. The first empties the list, but only when it
has said so a few times in a row: a resolver that has just lost its zone says so too. Not here: who is told (sink.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdataclass
import dns.rdatatype
import dns.resolver
import dns.rrset
import structlog

from extproc.config.sections.endpoint_sources import Dns
from extproc.config.sections.fields import check_address
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.sink import Sink

log = structlog.get_logger(__name__)

_MOST_QUESTIONS_AT_ONCE = 16
"""For the addresses of SRV targets: a DNS server need not take hundreds of packets at the same moment."""
_ADDRESS_TYPES = ("A", "AAAA")


@dataclass(slots=True)
class _Records:
    """What answers held, and for how long it is good, in seconds."""

    found: list[Discovered] = field(default_factory=list)
    ttl_s: float = float("inf")


async def follow_dns(source: Dns, sink: Sink) -> None:
    """Ask for `source` for as long as the task lives, and tell what is found."""
    follower = _Follower(source, sink, Random())
    while True:
        try:
            pause_s = await follower.turn()
        except Exception:
            log.exception("cannot follow", name=source.name)  # and goes on: nobody else would notice the end
            pause_s = source.refresh_max_s
        await asyncio.sleep(pause_s)


class _Follower:
    """Remembers how the last answers were: how many failed, and how many named nothing."""

    def __init__(self, source: Dns, sink: Sink, rng: Random) -> None:
        self._source = source
        self._sink = sink
        self._rng = rng
        self._failures = 0
        self._empty = 0

    async def turn(self) -> float:
        """Ask once. Returns how long to wait before the next turn, in seconds."""
        try:
            records = await self._ask()
        except (dns.exception.DNSException, OSError, ValueError) as error:
            self._sink.failed(_reason(error), f"{self._source.name}: {error!r}")
            self._failures += 1
            return self._backed_off_s()
        self._failures = 0
        self._take(records)
        return min(max(records.ttl_s, self._source.refresh_min_s), self._source.refresh_max_s)

    async def _ask(self) -> _Records:
        return await _Questions(self._source, await asyncio.to_thread(_resolver, self._source)).ask()

    def _take(self, records: _Records) -> None:
        self._empty = 0 if records.found else self._empty + 1
        if 0 < self._empty < self._source.empty_after:
            records.ttl_s = 0  # ask again soon: this decides whether there is a fleet
            self._sink.failed("empty", f"{self._source.name}: answer {self._empty} of {self._source.empty_after}")
        else:
            self._sink.found(records.found)

    def _backed_off_s(self) -> float:
        longest_s = min(self._source.refresh_min_s * 2.0 ** min(self._failures, 16), self._source.refresh_max_s)
        return self._rng.uniform(self._source.refresh_min_s, longest_s)


def _reason(error: Exception) -> str:
    if isinstance(error, dns.exception.Timeout):
        return "timeout"
    if isinstance(error, dns.resolver.NoNameservers):
        return "server_failure"
    return "no_resolver" if isinstance(error, dns.resolver.NoResolverConfiguration) else "fault"


class _Questions:
    """The questions of one turn."""

    def __init__(self, source: Dns, resolver: dns.asyncresolver.Resolver) -> None:
        self._source = source
        self._resolver = resolver
        self._slots = asyncio.Semaphore(_MOST_QUESTIONS_AT_ONCE)

    async def ask(self) -> _Records:
        """Records of the first type there are any of. Raises whatever the resolver does."""
        if self._source.record_types == ("SRV",):
            return await self._targets()
        return await self._addresses(self._source.name, self._source.record_types, self._source.port or 0)

    async def _addresses(self, name: str | dns.name.Name, kinds: Iterable[str], port: int) -> _Records:
        records = _Records()
        for kind in kinds:
            answer = await self._answer(name, kind)
            if answer is not None:
                records = _Records(_at(answer.rrset, port), answer.chaining_result.minimum_ttl)
            if records.found:
                break
        return records

    async def _targets(self) -> _Records:
        answer = await self._answer(self._source.name, "SRV")
        if answer is None:
            return _Records()
        first = min((record.priority for record in answer), default=0)
        records = [record for record in answer if record.priority == first and record.target != dns.name.root]
        targets = await asyncio.gather(*(self._target(record.target, record.port, answer) for record in records))
        ttls_s = (answer.chaining_result.minimum_ttl, *(target.ttl_s for target in targets))
        return _Records([endpoint for target in targets for endpoint in target.found], min(ttls_s))

    async def _target(self, target: dns.name.Name, port: int, answer: dns.resolver.Answer) -> _Records:
        """The addresses of one target: as they came with the answer, else by asking."""
        for kind in _ADDRESS_TYPES:
            rrset = answer.response.get_rrset(
                answer.response.additional, target, dns.rdataclass.IN, dns.rdatatype.from_text(kind)
            )
            if rrset is not None:
                return _Records(_at(rrset, port), rrset.ttl)
        return await self._addresses(target, _ADDRESS_TYPES, port)

    async def _answer(self, name: str | dns.name.Name, kind: str) -> dns.resolver.Answer | None:
        """None if there is no such name. It may have no record of the kind."""
        async with self._slots:
            try:
                return await self._resolver.resolve(
                    name, kind, lifetime=self._source.timeout_s, search=True, raise_on_no_answer=False
                )
            except dns.resolver.NXDOMAIN:
                return None


def _at(addresses: dns.rrset.RRset | None, port: int) -> list[Discovered]:
    return [Discovered(check_address(_joined(record.address, port))) for record in addresses or ()]


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolver(source: Dns) -> dns.asyncresolver.Resolver:
    """Reads /etc/resolv.conf if `source` names no servers."""
    resolver = dns.asyncresolver.Resolver(configure=not source.servers)
    if source.servers:
        resolver.nameservers = [
            dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))
            for host, _, port in (server.rpartition(":") for server in source.servers)
        ]
    return resolver
