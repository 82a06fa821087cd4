"""One Envoy's xDS stream as a pure state machine: requests and snapshots go in, the responses to send come out.

Not here: bytes, sockets and who listens (xds.py). It speaks clusters (CDS) and their addresses (EDS) only; listeners
and routes are the bootstrap's and are never answered.

Rejected: delta xDS. A fleet is a few kilobytes, and a list that says everything cannot drift. Rejected: a queue of
snapshots. Only the newest matters to an Envoy that was slow, so each type has one response in flight and the next is
made from whatever is newest by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

CDS = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
EDS = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

Addresses: TypeAlias = frozenset[str]
Resources: TypeAlias = dict[str, bytes | Addresses]
"""By cluster name: a serialized Cluster, or the addresses of one."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What every Envoy should know. Never changed once published.

    `unread`: clusters without addresses because discovery has tried to read them and could not.
    """

    version: str
    clusters: Mapping[str, bytes]
    assignments: Mapping[str, Addresses]
    unread: Set[str] = frozenset()

    def addresses(self, cluster: str) -> Addresses | None:
        """The addresses of a cluster; None while discovery has not reported them.

        Then nothing is said to an Envoy that may hold some, since it was there before we restarted: it keeps them. A
        new one waits a little for the cluster (initial_fetch_timeout), but is not kept waiting for one of `unread`.
        """
        return self.assignments.get(cluster)


@dataclass(frozen=True, slots=True)
class Request:
    """A DiscoveryRequest, as far as it matters here."""

    type_url: str
    names: frozenset[str] = frozenset()
    nonce: str = ""
    error: str | None = None
    version: str = ""
    """What the Envoy holds, as whoever sent it called it; empty for one that holds nothing yet."""


@dataclass(frozen=True, slots=True)
class Response:
    """A DiscoveryResponse to send."""

    type_url: str
    version: str
    nonce: str
    resources: Resources


@dataclass(slots=True)
class _Subscription:
    names: frozenset[str]
    nonce: str = ""
    sent: Resources | None = None
    """In flight until it is answered."""
    held: Resources | None = None
    """What the Envoy has acknowledged."""
    refused: Resources = field(default_factory=dict)
    """What it has not, and what is not offered again until it has changed."""
    owed: set[str] = field(default_factory=set)
    """What must be sent although it is held."""

    def forget_all_but(self, names: frozenset[str]) -> None:
        self.names = names
        self.held = {name: value for name, value in (self.held or {}).items() if name in names}

    def forget(self, names: Set[str]) -> None:
        self.held = {name: value for name, value in (self.held or {}).items() if name not in names}
        self.refused = {name: value for name, value in self.refused.items() if name not in names}


class AdsSession:
    """What one Envoy asked for, was sent and has acknowledged."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._clusters: _Subscription | None = None
        self._addresses: _Subscription | None = None
        self._returns = False
        self._came_with: frozenset[str] = frozenset()
        """The clusters it asked addresses for at first."""
        self._came_empty = False
        """It held no address of any cluster when it asked first."""
        self._trusted: frozenset[str] | None = None
        """The clusters it is believed to have before it acknowledges their addresses; None: whatever it is asked."""
        self._nonces = 0

    def offer(self, snapshot: Snapshot) -> list[Response]:
        """Take a newer snapshot; return what to send now."""
        self._snapshot = snapshot
        return self._due()

    def receive(self, request: Request) -> list[Response]:
        """Take a request (a subscription, an ACK or a NACK); return what to send now."""
        if request.type_url == CDS:
            if self._clusters is None:
                self._clusters, self._returns = _Subscription(request.names), bool(request.version)
            self._clusters_asked(self._clusters, request)
        elif request.type_url == EDS:
            if self._addresses is None:
                self._addresses, self._came_with = _Subscription(request.names), request.names
                self._came_empty = not request.version
            self._addresses_asked(self._addresses, request)
        return self._due()

    def vouched(self, cluster: str) -> Addresses | None:
        """The addresses this Envoy is known to have for a cluster; None while it has no say.

        An Envoy that arrives vouches for what it was sent first. One that comes back to us has its addresses still,
        a new one serves only once it has them, and nobody's requests may pause for either. A cluster that comes later
        is strict: none of its addresses is there before Envoy has acknowledged the cluster and them.
        """
        if self._may_lack(cluster):
            return frozenset()
        arriving = self._trusted is None or cluster in self._trusted
        subscription = self._addresses or _Subscription(frozenset())
        for known in (subscription.held, subscription.sent if arriving else None):
            addresses = (known or {}).get(cluster)
            if isinstance(addresses, frozenset):
                return addresses
        return None if arriving else frozenset()

    def _may_lack(self, cluster: str) -> bool:
        """Whether it has not got the cluster yet, or is just being told to drop it."""
        if self._clusters is None or self._trusted is None:
            return False
        lists = (self._clusters.held, self._clusters.sent)
        return any(listed is not None and cluster not in listed for listed in lists)

    def _clusters_asked(self, subscription: _Subscription, request: Request) -> None:
        if not _is_current(subscription, request) or subscription.sent is None:
            return
        answered, subscription.sent = subscription.sent, None
        self._note_arrival(answered, refused=request.error is not None)
        if request.error is not None:
            subscription.refused = answered
            return
        self._forget_clusters((subscription.held or {}).keys() - answered.keys())
        subscription.held, subscription.refused = answered, {}

    def _note_arrival(self, answered: Resources, *, refused: bool) -> None:
        """Its first answer ends the time in which it is believed to have whatever we publish."""
        if self._trusted is not None:
            return
        if self._returns:
            self._trusted = self._came_with
        elif not refused:  # a new one that accepts nothing serves nobody: it has no say
            self._trusted = frozenset(answered)

    def _forget_clusters(self, gone: Set[str]) -> None:
        # should one come again, it starts without addresses
        self._trusted = (self._trusted or frozenset()) - gone
        if self._addresses is not None:
            self._addresses.forget(gone)

    def _addresses_asked(self, subscription: _Subscription, request: Request) -> None:
        if not _is_current(subscription, request):
            return
        if subscription.sent is not None:
            self._addresses_answered(subscription, refused=request.error is not None)
        elif request.nonce and request.names == subscription.names:
            # the same question again: a cluster warms anew and waits for addresses that we think it has
            subscription.owed.update(request.names)
        subscription.forget_all_but(request.names)

    def _addresses_answered(self, subscription: _Subscription, *, refused: bool) -> None:
        answered, subscription.sent = subscription.sent or {}, None
        if refused:
            subscription.refused.update(answered)
            return
        subscription.held = {**(subscription.held or {}), **answered}
        subscription.refused = {k: v for k, v in subscription.refused.items() if k not in answered}

    def _due(self) -> list[Response]:
        """Clusters before their addresses: make before break."""
        if self._snapshot is None:
            return []
        responses = []
        if clusters := self._clusters_due(self._snapshot):
            responses.append(clusters)
        if addresses := self._addresses_due(self._snapshot):
            responses.append(addresses)
        return responses

    def _clusters_due(self, snapshot: Snapshot) -> Response | None:
        subscription = self._clusters
        if subscription is None or subscription.sent is not None:
            return None
        wanted: Resources = {
            name: cluster
            for name, cluster in snapshot.clusters.items()
            if not subscription.names or name in subscription.names
        }
        if wanted == subscription.held or (subscription.refused and wanted == subscription.refused):
            return None
        self._owe_addresses(wanted, subscription.held or {})
        return self._send(CDS, subscription, wanted)

    def _owe_addresses(self, wanted: Resources, held: Resources) -> None:
        # a cluster that changes warms anew, and stays out until it has been sent its addresses again
        if self._addresses is not None:
            self._addresses.owed.update(name for name, cluster in wanted.items() if held.get(name, cluster) != cluster)

    def _addresses_due(self, snapshot: Snapshot) -> Response | None:
        subscription = self._addresses
        if subscription is None or subscription.sent is not None:
            return None
        held = subscription.held or {}
        news: Resources = {}
        for name in subscription.names:
            addresses = self._sayable(snapshot, name, held)
            unheard = addresses not in (held.get(name), subscription.refused.get(name))
            if addresses is not None and (unheard or name in subscription.owed):
                news[name] = addresses
        subscription.owed -= news.keys()
        return self._send(EDS, subscription, news) if news else None

    def _sayable(self, snapshot: Snapshot, name: str, held: Resources) -> Addresses | None:
        """A cluster's addresses, or none of them where there is no telling yet and this Envoy has none to lose."""
        addresses = snapshot.addresses(name)
        new = self._clusters is not None and not self._returns and self._came_empty
        if addresses is None and name in snapshot.unread and new and not held.get(name):
            return frozenset()
        return addresses

    def _send(self, type_url: str, subscription: _Subscription, resources: Resources) -> Response:
        self._nonces += 1
        subscription.nonce, subscription.sent = str(self._nonces), resources
        version = self._snapshot.version if self._snapshot else ""
        return Response(type_url, version, subscription.nonce, resources)


def _is_current(subscription: _Subscription, request: Request) -> bool:
    """Whether it speaks of the newest response. One overtaken by a newer response is followed by another request."""
    return request.nonce == subscription.nonce
