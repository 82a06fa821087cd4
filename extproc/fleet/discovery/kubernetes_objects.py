"""What objects of Kubernetes say of endpoints: pods, EndpointSlices, InferencePools. Only the fields that we read.

Pure: objects go in, endpoints come out. An object that is no endpoint yet (a pod that is not ready) is nothing; one
that ought to be one and cannot (no such port, no address of the family asked for) is counted as skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from extproc.config.sections.fields import check_address
from extproc.fleet.discovery.endpoints import Discovered

_ZONE_LABEL = "topology.kubernetes.io/zone"


class _Part(msgspec.Struct, rename="camel"):
    """Base of all: names as Kubernetes writes them, other fields passed over."""


class Metadata(_Part):
    """An object's name and version."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class ContainerPort(_Part):
    """A port that a container declares."""

    container_port: int
    name: str = ""


class Container(_Part):
    """A container, or an init container; one of these that is restarted always is a sidecar."""

    ports: list[ContainerPort] | None = None
    restart_policy: str | None = None


class PodSpec(_Part):
    """What runs in a pod."""

    containers: list[Container] = []
    init_containers: list[Container] | None = None


class Condition(_Part):
    """One of a pod's conditions."""

    type: str
    status: str


class PodIp(_Part):
    """One of a pod's addresses."""

    ip: str = ""


class PodStatus(_Part):
    """How a pod is."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(name="podIP", default="")
    pod_ips: list[PodIp] | None = msgspec.field(name="podIPs", default=None)


class Pod(_Part):
    """core/v1 Pod."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def terminating(self) -> bool:
        """Being deleted: what runs on it may end within its grace period."""
        return self.metadata.deletion_timestamp is not None

    @property
    def zone(self) -> str | None:
        """Where it runs, if its labels say so: Kubernetes itself puts this on nodes only, unless told to."""
        return (self.metadata.labels or {}).get(_ZONE_LABEL)

    @property
    def is_endpoint(self) -> bool:
        """Ready, or no longer, since it is terminating. One whose containers have ended may lose its address."""
        if self.status.phase in {"Succeeded", "Failed"} or not self.addresses:
            return False
        return self.terminating or any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())

    @property
    def addresses(self) -> list[str]:
        """Its addresses, the first one first."""
        listed = [ip.ip for ip in self.status.pod_ips or () if ip.ip]
        return listed or ([self.status.pod_ip] if self.status.pod_ip else [])

    def port(self, wanted: int | str) -> int | None:
        """The number of a port that may be given by name."""
        if isinstance(wanted, int):
            return wanted
        sidecars = [c for c in self.spec.init_containers or () if c.restart_policy == "Always"]
        ports = (port for c in (*self.spec.containers, *sidecars) for port in c.ports or ())
        return next((port.container_port for port in ports if port.name == wanted), None)


class EndpointConditions(_Part):
    """Each may be unknown."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(_Part):
    """What an address belongs to."""

    kind: str = ""
    name: str = ""


class SliceEndpoint(_Part):
    """One endpoint of a slice; its addresses are all the same to Kubernetes, and the first is to be used."""

    addresses: list[str] = []
    conditions: EndpointConditions = msgspec.field(default_factory=EndpointConditions)
    target_ref: TargetRef | None = None
    zone: str | None = None


class SlicePort(_Part):
    """A port of all endpoints of a slice. Without a number it means any."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(_Part):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: Metadata
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None

    def port(self, wanted: int | str | None) -> int | None:
        """The number of the port wanted; without a wish of the only one."""
        tcp = [port for port in self.ports or () if port.port is not None and port.protocol in {None, "TCP"}]
        if wanted is None:
            return tcp[0].port if len(tcp) == 1 else None
        return next((port.port for port in tcp if wanted in (port.name, port.port)), None)


class TargetPort(_Part):
    """A port of every pod of an InferencePool."""

    number: int


class PoolSelector(_Part):
    """Labels that its pods have."""

    match_labels: dict[str, str]


class PoolSpec(_Part):
    """What an InferencePool selects."""

    selector: PoolSelector
    target_ports: list[TargetPort]

    @property
    def label_selector(self) -> str:
        """As a query takes it."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.selector.match_labels.items()))


class InferencePool(_Part):
    """inference.networking.k8s.io/v1 InferencePool."""

    metadata: Metadata
    spec: PoolSpec


@lru_cache(maxsize=8_192)  # a change of one pod makes the whole list anew
def _address(host: str, port: int | None) -> str:
    return check_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


@dataclass(slots=True)
class Endpoints:
    """What objects come to. `skipped` ought to have been endpoints and could not."""

    found: list[Discovered] = field(default_factory=list)
    skipped: int = 0

    def add(self, host: str | None, port: int | None, *, terminating: bool, zone: str | None) -> None:
        """One endpoint, if there is an address and a port."""
        try:
            address = _address(host or "", port)
        except ValueError:
            self.skipped += 1
        else:
            self.found.append(Discovered(address, terminating=terminating, zone=zone))


def endpoints_of_pods(pods: Iterable[Pod], ports: Iterable[int | str], family: str) -> Endpoints:
    """Each pod at each port: an engine that is data-parallel serves each rank at a port of its own."""
    endpoints = Endpoints()
    wanted = list(ports)
    for pod in pods:
        if pod.is_endpoint:
            host = next((ip for ip in pod.addresses if family in ("any", _family(ip))), None)
            for port in wanted:
                endpoints.add(host, pod.port(port), terminating=pod.terminating, zone=pod.zone)
    return endpoints


def _family(ip: str) -> str:
    return "IPv6" if ":" in ip else "IPv4"


def endpoints_of_slices(slices: Iterable[EndpointSlice], port: int | str | None, family: str) -> Endpoints:
    """Every ready or terminating endpoint once, though it may have a slice per address family."""
    endpoints = Endpoints()
    families: dict[tuple[str, str], str] = {}  # object -> family by which it is listed
    for part, endpoint in _in_order(slices, family):
        ref = endpoint.target_ref
        if ref is not None and families.setdefault((ref.kind, ref.name), part.address_type) != part.address_type:
            continue
        conditions = endpoint.conditions
        if conditions.terminating or conditions.ready is not False:  # unknown means ready
            host = endpoint.addresses[0] if endpoint.addresses else None
            endpoints.add(host, part.port(port), terminating=bool(conditions.terminating), zone=endpoint.zone)
    return endpoints


def _in_order(slices: Iterable[EndpointSlice], family: str) -> Iterator[tuple[EndpointSlice, SliceEndpoint]]:
    """IPv4 first, so that it is what an endpoint with both is listed by; host names (FQDN) last, as none of ours."""
    for part in sorted(slices, key=lambda part: (part.address_type == "FQDN", part.address_type)):
        if family in ("any", part.address_type):
            for endpoint in part.endpoints or ():
                yield part, endpoint
