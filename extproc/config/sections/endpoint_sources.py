"""Where a pool's endpoints come from: lists, files, DNS, Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from extproc.config.sections.fields import LAST_PORT, Model, Name, Port, Positive, Seconds, check_address

HostName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?$", max_length=254)
]
Address = Annotated[str, AfterValidator(check_address)]
RecordType = Literal["A", "AAAA", "SRV"]


class Dns(Model):
    """Endpoints from DNS: the addresses of a name, or the targets of its SRV records."""

    name: HostName
    type: Literal["auto", RecordType] = Field(
        "auto", description="auto: SRV if the name begins with _; else A, and AAAA where there is no A"
    )
    port: Port | None = Field(None, description="for A and AAAA; SRV records bring their own")
    servers: tuple[Address, ...] = Field((), description="IP:port of DNS servers; none: those of /etc/resolv.conf")
    refresh_min_s: Seconds = Field(5, description="asked again when the records' time to live is over, but not before")
    refresh_max_s: Seconds = Field(60, description="... and not later than after this")
    timeout_s: Seconds = Field(5, description="for one question, all servers tried")
    empty_after: Positive = Field(3, description="answers in a row that name nothing, before the list is emptied")

    @property
    def record_types(self) -> tuple[RecordType, ...]:
        """What to ask for; the first type that there are records of counts."""
        if self.type != "auto":
            return (self.type,)
        return ("SRV",) if self.name.startswith("_") else ("A", "AAAA")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.port is None) != (self.record_types == ("SRV",)):
            raise ValueError("give a port for A and AAAA records, and none for SRV, which bring their own")
        if self.refresh_min_s > self.refresh_max_s:
            raise ValueError(f"refresh_min_s is more than refresh_max_s, {self.refresh_max_s:g}")
        return self


LabelSelector = Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]


def _check_port_or_name(value: int | str | None) -> int | str | None:
    if isinstance(value, int) and not 0 < value <= LAST_PORT:
        raise ValueError(f"a port is 1-{LAST_PORT}, or the name of a container's port")
    if isinstance(value, str) and not re.fullmatch(r"[a-z0-9-]*[a-z][a-z0-9-]*", value):
        raise ValueError("the name of a port is of a-z, 0-9 and -, with a letter in it")
    return value


class Pods(Model):
    """Pods by their labels."""

    selector: LabelSelector = Field(description="as kubectl -l takes it, for example app=vllm,sleeping!=true")
    port: int | str = Field(description="number, or name of a container's port")

    _ports = field_validator("port")(_check_port_or_name)


class EndpointSlices(Model):
    """What a Service selects."""

    service: ObjectName
    port: int | str | None = Field(None, description="name or number of the target port, if there are several")

    _ports = field_validator("port")(_check_port_or_name)


class InferencePool(Model):
    """Pods as an InferencePool selects them, each of its target ports an endpoint."""

    name: ObjectName


class Kubernetes(Model):
    """Endpoints from a Kubernetes API server, watched: exactly one of pods, endpoint_slices, inference_pool."""

    namespace: ObjectName | None = Field(None, description="none: our own pod's; outside of a cluster `default`")
    pods: Pods | None = None
    endpoint_slices: EndpointSlices | None = None
    inference_pool: InferencePool | None = None
    ip_family: Literal["any", "IPv4", "IPv6"] = Field("any", description="of engines that have both; any: their first")
    api_server: Annotated[str, StringConstraints(pattern=r"^https?://[^/?#@]+/?$")] | None = Field(
        None, description="none: the cluster we run in"
    )
    ca_file: Path | None = Field(None, description="who signed the API server's certificate; none: as api_server")
    token_file: Path | None = Field(None, description="read for each request, since it rotates; none: as api_server")
    max_objects: Positive = Field(5_000, description="pods or slices; more are not read at all")
    watch_s: Seconds = Field(
        60, description="how long one watch lasts; a dead connection is noticed then at the latest"
    )
    timeout_s: Seconds = Field(15, description="for one answer that is not a watch")
    retry_max_s: Seconds = Field(30, description="longest pause after failures")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if [self.pods, self.endpoint_slices, self.inference_pool].count(None) != 2:
            raise ValueError("give exactly one of: pods, endpoint_slices, inference_pool")
        return self


GpuName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class Endpoint(Model):
    """One endpoint and what policies may go by. `cost` in any unit, as long as it is the same for all."""

    address: Address
    weight: float = Field(1.0, gt=0, le=1e6, description="for weighted turns")
    zone: Name | None = Field(None, description="where it runs; see the top level's `zone`")
    cost: float = Field(0.0, ge=0, le=1e12, description="for `least-cost`")
    gpus: tuple[GpuName, ...] = Field((), description="its own on its host, by index or UUID; see `scrape.dcgm`")


def _spelled(listed: object) -> str | None:
    """How an endpoint of a list is given, by the name of what reads it; None for what is neither."""
    if isinstance(listed, str):
        return "str"
    return "Endpoint" if isinstance(listed, dict | Endpoint) else None


Listed = Annotated[
    Annotated[Address, Tag("str")] | Annotated[Endpoint, Tag("Endpoint")],
    Discriminator(
        _spelled,
        custom_error_type="no_endpoint",
        custom_error_message="should be IP:port, or a mapping with an `address`",
    ),
]
"""An endpoint as lists have it, in the config and in files."""


class Endpoints(Model):
    """Where a pool's endpoints come from: exactly one source."""

    static: tuple[Listed, ...] | None = None
    file: Path | None = Field(None, description="YAML or JSON list of IP:port, watched; relative to the config file")
    dns: Dns | None = None
    kubernetes: Kubernetes | None = None

    @field_validator("static")
    @classmethod
    def _no_address_twice(cls, value: tuple[str | Endpoint, ...] | None) -> tuple[str | Endpoint, ...] | None:
        if value is None:
            return None
        addresses = [one if isinstance(one, str) else one.address for one in value]
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address is listed twice")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.static, self.file, self.dns, self.kubernetes].count(None) != 3:
            raise ValueError("give exactly one of: static, file, dns, kubernetes")
        return self
