"""What one client may take, whoever its tenant is: requests over time, and requests at once.

A client is a name; whose word for it is believed is decided elsewhere (extproc/guard.py). Those with requests running
are as many as there are requests; of the others as many are remembered as `most_idle` allows, and the longest unseen is
forgotten. One that comes back after that begins anew: with a full rate, never with another's place.

Rejected: one LRU map of all. It would forget clients whose requests still run, and let them have as many again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton  # C, where ipaddress takes ten times as long

from cachetools import LRUCache

from policies.admission.buckets import Bucket, Mean, Rate


class Limit(StrEnum):
    """Which limit a client has reached: the bounded label set of metrics."""

    REQUESTS = "requests"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What each client may take; None sets no limit."""

    requests: Rate | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A request that its client may not make now, and when it should come again."""

    limit: Limit
    retry_after_s: float


@dataclass(slots=True)
class _Client:
    bucket: Bucket | None = None
    running: int = 0
    duration_s: Mean = field(default_factory=Mean)


class Visit:
    """One request of a client's, from when it was let in until it is over; it hangs on its flight.

    Without `clients` it is nobody's, and takes nothing.
    """

    __slots__ = ("_client", "_clients", "_name", "_since_s")

    def __init__(
        self, clients: Clients | None = None, name: str = "", client: _Client | None = None, since_s: float = 0.0
    ) -> None:
        self._clients, self._name, self._client, self._since_s = clients, name, client, since_s

    def ended(self, now_s: float) -> None:
        """Give its place back; safe to call again."""
        clients, client = self._clients, self._client
        self._clients = self._client = None
        if clients is not None and client is not None:
            client.duration_s.saw(now_s - self._since_s)
            clients.left(self._name, client, now_s)


class Clients:
    """Every client of late. `forgotten`: how many of those let go still had something to make good for."""

    def __init__(self, allowance: Allowance, most_idle: int) -> None:
        self.forgotten = 0
        self._allowance = allowance
        self._running: dict[str, _Client] = {}
        self._most_idle = most_idle
        self._idle: LRUCache[str, _Client] = LRUCache(inf)  # the bound may change with a reload

    def __len__(self) -> int:
        return len(self._running) + len(self._idle)

    def configure(self, allowance: Allowance, most_idle: int) -> None:
        """Use new limits: requests at once stay counted, a rate that has changed begins full."""
        if allowance.requests != self._allowance.requests:
            for client in (*self._running.values(), *self._idle.values()):
                client.bucket = None
        self._allowance, self._most_idle = allowance, most_idle

    def enter(self, name: str, now_s: float) -> Visit | OverLimit:
        """Let one more request of this client's in, or say which limit it meets."""
        client = self._running.get(name) or self._idle.get(name) or _Client()
        over = self._over(client, now_s)
        if over is not None:
            if not client.running:  # it is remembered: that it came too often must outlast the refusal
                self._remember(name, client, now_s)
            return over
        self._idle.pop(name, None)
        self._running[name] = client
        client.running += 1
        if client.bucket is not None:
            client.bucket.take(1.0, now_s)
        return Visit(self, name, client, now_s)

    def left(self, name: str, client: _Client, now_s: float) -> None:
        """A request of this client's is over; for its Visit alone."""
        client.running -= 1
        if not client.running:
            self._running.pop(name, None)
            self._remember(name, client, now_s)

    def _over(self, client: _Client, now_s: float) -> OverLimit | None:
        """The limit that is met for longest: told of another, it would come again for nothing."""
        most, rate = self._allowance.concurrency, self._allowance.requests
        over = None
        if most is not None and client.running >= most:
            over = OverLimit(Limit.CONCURRENCY, client.duration_s.value / most)
        if rate is None:
            return over
        if client.bucket is None:
            client.bucket = Bucket(rate, now_s)
        wait_s = client.bucket.wait_s(1.0, now_s)
        if wait_s and (over is None or wait_s > over.retry_after_s):
            return OverLimit(Limit.REQUESTS, wait_s)
        return over

    def _remember(self, name: str, client: _Client, now_s: float) -> None:
        self._idle[name] = client
        while len(self._idle) > self._most_idle:
            _, gone = self._idle.popitem()
            self.forgotten += gone.bucket is not None and not gone.bucket.is_full(now_s)


# -- whose address


_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_NETWORK_BYTES = 8
"""What one subscriber has of IPv6: with another address for each request nobody would ever meet a limit."""


def client_address(forwarded_for: str, trusted_hops: int) -> str | None:
    """Who asks, by `x-forwarded-for` as the last of our proxies has left it; None where it names no address.

    Each proxy appends whom it was called by, and only what a trusted one appended is believed: the last entry is our
    Envoy's own word, and with so many `trusted_hops` before it the one that the first of them wrote. Where there are
    fewer entries than that, somebody has come past these hops: then the last one counts. Of IPv6 the network.
    """
    entries = forwarded_for.rsplit(",", trusted_hops + 1)
    if len(entries) <= trusted_hops:
        return _network(entries[-1])
    return _network(entries[-trusted_hops - 1]) or _network(entries[-1])


def _network(text: str) -> str | None:
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]  # some proxies write the port as well
    try:
        if ":" not in text:
            return inet_ntop(AF_INET, inet_pton(AF_INET, text))
        packed = inet_pton(AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return None
    if packed.startswith(_IPV4_MAPPED):
        return inet_ntop(AF_INET, packed[len(_IPV4_MAPPED) :])
    return f"{inet_ntop(AF_INET6, packed[:_NETWORK_BYTES] + bytes(_NETWORK_BYTES))}/{8 * _NETWORK_BYTES}"
