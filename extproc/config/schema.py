"""The configuration file's shape. These models are the reference: `pointsman check --schema` prints them.

Not here: reading files (loading.py) and what a running system makes of a config (generations.py). Every bound of the
running system has its field under `limits`.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import re2
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from extproc.config.policy_kinds import Policy
from extproc.names import STRIPPED_HEADERS
from policies.placement.profiles import Profile

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""Bounded by what Envoy's and gRPC's messages can hold."""
ModelName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
"""It goes into a header, so no control characters."""
Share = Annotated[float, Field(ge=0, le=1)]
RuleHeader = Annotated[
    str,
    StringConstraints(pattern=r"^x-(gateway|pointsman)-[a-z0-9-]{1,60}$"),
]
"""Envoy shows us these whatever the config says; others would never match."""


def check_address(value: str) -> str:
    """`value` in the one spelling Envoy uses, if it is `IP:port` (IPv6 in brackets). Raises ValueError saying so."""
    match = _ADDRESS.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not IP:port, for example 127.0.0.1:8001 or [::1]:8001")
    host, port = match.groups()
    try:
        ip = ip_address(host.strip("[]"))
    except ValueError as error:
        raise ValueError(f"{value!r} is not IP:port: {error}") from None
    if not 0 < int(port) <= _LAST_PORT or port.startswith("0"):
        raise ValueError(f"{value!r} has a port outside 1-{_LAST_PORT}")
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


_LAST_PORT = 65_535


def check_reachable(value: str) -> str:
    """`value` if it is `name:port`, or `IP:port` of one machine. Raises ValueError saying so."""
    if is_name(value):
        check_address(f"127.0.0.1:{value.rpartition(':')[2]}")
        return value
    address = check_address(value)
    if is_wildcard(address):
        raise ValueError(f"{address} is an address to listen on, not one to connect to")
    return address


def is_name(address: str) -> bool:
    """`address` begins with a host name, not an IP."""
    return re.match(r"[A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*:[^:]*$", address) is not None


def is_wildcard(address: str) -> bool:
    """`address` (as check_address spells it) stands for every one of the machine's own."""
    return address.startswith(("0.0.0.0:", "[::]:"))


def _refuse_twice(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} given more than once: {', '.join(twice)}")


class Model(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(Model):
    """A certificate and its key, PEM files relative to the config file."""

    certificate: Path
    key: Path
    client_ca: Path | None = Field(None, description="callers must show a certificate that one of these signed")


class Listen(Model):
    """Where the parts listen. `http` is Envoy's; the rest are ours."""

    http: str = "127.0.0.1:8080"
    grpc: str = Field("127.0.0.1:9004", description="ext_proc, access logs and xDS, plaintext HTTP/2")
    grpc_from_envoy: str | None = Field(None, description="where Envoy finds `grpc`: IP:port or name:port")
    grpc_tls: str | None = Field(None, description="the same over TLS, by convention on port 9002")
    health: str = Field("127.0.0.1:9003", description="gRPC health checks")
    tls: Tls | None = Field(None, description="for `grpc_tls`; a self-signed certificate is made without it")
    http_tls: Tls | None = Field(None, description="for Envoy's `http`: clients speak TLS, HTTP/2 or HTTP/1.1 by ALPN")
    http3: str | None = Field(None, description="UDP, for HTTP/3 by Envoy as well; needs `http_tls`")

    _addresses = field_validator("http", "grpc", "health")(check_address)

    @field_validator("grpc_tls", "http3")
    @classmethod
    def _check_optional(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("grpc_from_envoy")
    @classmethod
    def _check_reachable(cls, value: str | None) -> str | None:
        return None if value is None else check_reachable(value)

    @property
    def envoy_dials(self) -> str:
        """The address of `grpc` for Envoy. A wildcard is none: what stands for it is right on the same host only."""
        if self.grpc_from_envoy is not None:
            return self.grpc_from_envoy
        host, _, port = self.grpc.rpartition(":")
        return f"{'[::1]' if '[' in host else '127.0.0.1'}:{port}" if is_wildcard(self.grpc) else self.grpc

    @model_validator(mode="after")
    def _http3_has_a_certificate(self) -> Self:
        if self.http3 is not None and self.http_tls is None:
            raise ValueError("http3 needs http_tls: there is no HTTP/3 without TLS")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        given = [address for address in (self.http, self.grpc, self.grpc_tls, self.health) if address]
        _refuse_twice("listen address", given)
        return self


Port = Annotated[int, Field(gt=0, le=_LAST_PORT)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
HostName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?$", max_length=254)
]
RecordType = Literal["A", "AAAA", "SRV"]


class Dns(Model):
    """Endpoints from DNS: the addresses of a name, or the targets of its SRV records."""

    name: HostName
    type: Literal["auto", RecordType] = Field(
        "auto", description="auto: SRV if the name begins with _; else A, and AAAA where there is no A"
    )
    port: Port | None = Field(None, description="for A and AAAA; SRV records bring their own")
    servers: tuple[str, ...] = Field((), description="IP:port of DNS servers; none: those of /etc/resolv.conf")
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

    @field_validator("servers")
    @classmethod
    def _check_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_address(server) for server in value)

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
    if isinstance(value, int) and not 0 < value <= _LAST_PORT:
        raise ValueError(f"a port is 1-{_LAST_PORT}, or the name of a container's port")
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

    address: str
    weight: float = Field(1.0, gt=0, le=1e6, description="for weighted turns")
    zone: Name | None = Field(None, description="where it runs; see the top level's `zone`")
    cost: float = Field(0.0, ge=0, le=1e12, description="for `least-cost`")
    gpus: tuple[GpuName, ...] = Field((), description="its own on its host, by index or UUID; see `scrape.dcgm`")

    _address = field_validator("address")(check_address)


class Endpoints(Model):
    """Where a pool's endpoints come from: exactly one source."""

    static: tuple[str | Endpoint, ...] | None = None
    file: Path | None = Field(None, description="YAML or JSON list of IP:port, watched; relative to the config file")
    dns: Dns | None = None
    kubernetes: Kubernetes | None = None

    @field_validator("static")
    @classmethod
    def _check_static(cls, value: tuple[str | Endpoint, ...] | None) -> tuple[str | Endpoint, ...] | None:
        if value is None:
            return None
        endpoints = tuple(check_address(one) if isinstance(one, str) else one for one in value)
        addresses = [one if isinstance(one, str) else one.address for one in endpoints]
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address is listed twice")
        return endpoints

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.static, self.file, self.dns, self.kubernetes].count(None) != 3:
            raise ValueError("give exactly one of: static, file, dns, kubernetes")
        return self


class KvEvents(Model):
    """Where engines publish KV events. Their own word (vLLM 0.32 tells) counts for more than the ports."""

    port: Port | None = Field(None, description="engines bind it, and we connect; none: as they say")
    replay_port: Port | None = Field(None, description="where they say events again")
    ranks: int = Field(1, ge=1, le=256, description="data-parallel engines behind an address, each a port further")
    bind: Annotated[str, StringConstraints(pattern=r"^tcp://[^/\s]+:\d{1,5}$")] | None = Field(
        None, description="engines connect to this address of ours, with topics kv@<ip:port>@<model>"
    )

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else "tcp://" + check_address(value.removeprefix("tcp://"))

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.bind is not None and self.port is not None:
            raise ValueError("give port if engines bind one, or bind if they connect to us, not both")
        return self


class Tiers(Model):
    """What a block is worth where it is kept, beside one that need not be brought back first."""

    gpu: Share = 1.0
    cpu: Share = 0.8
    disk: Share = 0.5


class PreciseIndex(Model):
    """Knowing from the engines themselves which blocks they hold, and in exact tokens what a prompt has."""

    tokenizer: Literal["engine"] | Path = Field(
        description="folder with the model's tokenizer, relative to the config file; `engine`: ask the engines"
    )
    events: KvEvents = KvEvents()
    budget_ms: float = Field(20, gt=0, le=1_000, description="a decision waits no longer for tokens and matches")
    tiers: Tiers = Tiers()
    max_blocks: Positive = Field(200_000, description="kept per engine, the oldest forgotten")
    max_body_bytes: Positive = Field(1024 * 1024, description="larger requests are matched approximately")
    max_waiting: Positive = Field(64, description="questions open at once; more are answered approximately")
    cached_bytes: Positive = Field(64 * 1024 * 1024, description="for the tokens of texts that were seen")

    @field_validator("tokenizer")
    @classmethod
    def _libraries_are_there(cls, value: str | Path) -> str | Path:
        missing = [name for name in ("tokenizers", "jinja2") if find_spec(name) is None]
        if value != "engine" and missing:
            raise ValueError(f"{' and '.join(missing)} missing: pip install '.[vllm]' in a clone, or take `engine`")
        return value


class PrefixIndex(Model):
    """How is known what endpoints hold of a prompt, beside our own book-keeping, which always goes on."""

    precise: PreciseIndex | None = Field(None, description="from the engines' KV events; none unless asked for")


class Pool(Model):
    """Endpoints that serve the same models and share one placement policy and one prefix index."""

    name: Name
    models: Annotated[tuple[ModelName, ...], Field(min_length=1)]
    aliases: dict[ModelName, ModelName] = Field(
        default_factory=dict, description="name a client may use -> model of this pool"
    )
    endpoints: Endpoints
    policy: str | Policy = "default"
    cluster: str | None = Field(None, description="Envoy cluster, if not ours; default: pool_<name>")
    protocol: Literal["http", "grpc"] = Field("http", description="what the engines speak, always in plaintext")
    retry_500: bool = Field(True, description="a 500 before any byte of the answer: vLLM's while it shuts down")
    kv_capacity_tokens: Positive = Field(131_072, description="KV cache size until the engine reports its own")
    metrics_path: Annotated[str, StringConstraints(pattern=r"^/[^\s?#]*$")] = Field(
        "/metrics", description="of the engines; trtllm-serve's is /prometheus/metrics"
    )
    metrics_port: Annotated[int, Field(gt=0, le=_LAST_PORT)] | None = Field(
        None, description="none: the endpoint's own; Triton's is 8002"
    )
    calibrate_index: bool = Field(
        True, description="believe in less cache than an engine reports where it keeps less of what was promised"
    )
    hardware: str | Profile = Field("8b-h100", description="what the model costs there, by name or in figures")
    prefix_index: PrefixIndex = PrefixIndex()
    bytes_per_token: float = Field(4.0, gt=0, le=1e6)
    tokens_per_cjk_character: float = Field(1.5, gt=0, le=1e6)
    tokens_per_image: Positive = Field(1024, description="estimate for one inline image")

    @property
    def cluster_name(self) -> str:
        """The Envoy cluster that holds this pool's endpoints."""
        return self.cluster or f"pool_{self.name}"

    @property
    def precise(self) -> PreciseIndex | None:
        """Its precise index, if it has one."""
        return self.prefix_index.precise

    @model_validator(mode="after")
    def _aliases_point_here(self) -> Self:
        for alias, model in self.aliases.items():
            if model not in self.models:
                raise ValueError(f"alias {alias!r} points to {model!r}; this pool serves {list(self.models)}")
            if alias in self.models:
                raise ValueError(f"{alias!r} is both a model and an alias")
        return self


class PathRule(Model):
    """Paths of no API we know that lead to a pool all the same."""

    prefix: Annotated[str, StringConstraints(pattern=r"^/")] = Field(description="whole segments: /a is not /ab")
    pool: Name
    headers: dict[RuleHeader, str] = Field(
        default_factory=dict, description="the request must carry these, with exactly these values"
    )

    @field_validator("headers")
    @classmethod
    def _clients_may_send(cls, headers: dict[str, str]) -> dict[str, str]:
        if removed := sorted(headers.keys() & set(STRIPPED_HEADERS)):
            raise ValueError(f"removed from what clients send, so it never matches: {', '.join(removed)}")
        return headers


class Routing(Model):
    """Where requests go that do not say it themselves."""

    default_model: str | None = Field(None, description="for requests that name no model")
    paths: tuple[PathRule, ...] = ()
    allow_engine_admin: bool = Field(False, description="let path rules lead to the engines' own administration")


LONGEST_TENANT = 128
"""Characters of a tenant's name, whoever gives it."""
TenantName = Annotated[str, StringConstraints(pattern=rf"^[^\x00-\x1f\x7f]{{1,{LONGEST_TENANT}}}$")]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""As Envoy spells them: in lower case."""


class ApiKey(Model):
    """One key. The key itself stands nowhere: `pointsman key` makes one and prints this of it."""

    name: Name
    tenant: TenantName
    sha256: str = Field(description="of the key, as 64 hex digits")

    @field_validator("sha256")
    @classmethod
    def _is_a_digest(cls, value: str) -> str:
        # who puts the key itself here must not find it in an error message
        if re.fullmatch(r"[0-9a-fA-F]{64}", value) is None:
            raise ValueError("not a SHA-256 as 64 hex digits; `pointsman key` makes a key and prints its line")
        return value.lower()


def _keys_differ(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    _refuse_twice("key name", [key.name for key in keys])
    _refuse_twice("sha256", [key.sha256 for key in keys])
    return keys


ApiKeys = Annotated[tuple[ApiKey, ...], AfterValidator(_keys_differ)]


class Jwt(Model):
    """Tokens that Envoy verifies, and which of their claims names the tenant."""

    issuer: Annotated[str, StringConstraints(min_length=1)] = Field(description="what the claim `iss` must be")
    audiences: tuple[str, ...] = Field(description="one of these must be in the claim `aud`; [] accepts any")
    tenant_claim: Annotated[str, StringConstraints(min_length=1)] = Field(
        "tenant", description="whose value is the tenant; dots lead into objects"
    )
    jwks_file: Path | None = Field(None, description="the issuer's public keys, relative to the config file")
    jwks_uri: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+/\S*$")] | None = Field(
        None, description="the same, fetched by Envoy"
    )
    jwks_ca: Path = Field(
        Path("/etc/ssl/certs/ca-certificates.crt"), description="who may sign the certificate of an https `jwks_uri`"
    )

    @field_validator("jwks_uri")
    @classmethod
    def _has_a_port(cls, value: str | None) -> str | None:
        if value is not None:
            _ = urlsplit(value).port  # raises ValueError for one that is none
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_file is None) == (self.jwks_uri is None):
            raise ValueError("give exactly one of: jwks_file, jwks_uri")
        return self


class Access(Model):
    """Who may call, and as whom. Any one of the sources given lets a caller in; with none, everybody may call."""

    api_keys: ApiKeys = ()
    api_keys_file: Path | None = Field(None, description="YAML or JSON list of the same, watched")
    jwt: Jwt | None = None
    tenant_header: HeaderName | None = Field(
        None, description="header that names the tenant, set by a gateway before us"
    )
    forward_credentials: bool = Field(False, description="let engines see the keys and tokens of clients")

    @property
    def takes_keys(self) -> bool:
        """API keys let callers in, even if there is none (any more)."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def guarded(self) -> bool:
        """Not everybody may call."""
        return self.takes_keys or self.jwt is not None or self.tenant_header is not None

    @property
    def in_envoy(self) -> tuple[object, ...]:
        """What of this stands in the configuration Envoy was started with."""
        return self.takes_keys, self.jwt, self.tenant_header, self.forward_credentials


Amount = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Rate(Model):
    """A bucket that fills with `per_s` a second, up to `burst`."""

    per_s: Amount
    burst: Amount | None = Field(None, description="at once; none: what ten seconds bring, and one at least")

    @property
    def most(self) -> float:
        """What the bucket holds."""
        return max(10 * self.per_s, 1.0) if self.burst is None else self.burst


class Budget(Model):
    """Tokens per period; periods are counted from 1970-01-01 in UTC, so those of a day begin at midnight."""

    tokens: Amount
    period_s: Annotated[float, Field(ge=1, le=1e12, allow_inf_nan=False)] = 86_400


class Quota(Model):
    """What one tenant may take; what is not given is not limited."""

    requests: Rate | None = None
    tokens: Rate | None = Field(None, description="of prompts and answers, cached or not")
    concurrency: Positive | None = Field(None, description="requests at once")
    budget: Budget | None = None
    may_borrow: bool = Field(False, description="take from `tenants.spare` when its own `tokens` are used up")
    pools: Annotated[tuple[Name, ...], Field(min_length=1)] | None = Field(
        None, description="the pools it sees; the models of others do not exist for it. None: all"
    )


class Tenants(Model):
    """Quotas by tenant. Who a request's tenant is, `access` says."""

    default: Quota = Field(Quota(), description="of each tenant that is not named")
    named: dict[TenantName, Quota] = Field(default_factory=dict)
    spare: Rate | None = Field(None, description="tokens for those that may borrow")

    def of(self, tenant: str) -> Quota:
        """One tenant's quota."""
        return self.named.get(tenant, self.default)


class Wire(Model):
    """How we talk to Envoy."""

    endpoint_list: Literal["auto", "list", "single"] = "auto"
    endpoint_list_length: int = Field(3, ge=1, le=8)
    response_headers: tuple[Literal["request_id", "endpoint", "model"], ...] = Field(
        ("request_id",), description="x-pointsman-* headers that clients see"
    )
    access_log_timeout_s: float = Field(
        10, gt=0, le=86_400, allow_inf_nan=False, description="an access-log entry later than this counts as missing"
    )
    strict_pin: bool = Field(True, description="503 when Envoy knows none of the picked addresses, never its choice")


class Timeouts(Model):
    """Limits on upstream time, as Envoy applies them."""

    connect_ms: Positive = 1_000
    stream_idle_s: Positive = Field(900, description="no byte either way for this long ends a stream")
    upstream_idle_s: float = Field(
        4,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="idle upstream connections close after this; vLLM's after 5 s",
    )


class Retries(Model):
    """Envoy's retries, before any byte of the answer reached the client."""

    attempts: int = Field(1, ge=0, le=5)
    statuses: tuple[Annotated[int, Field(ge=500, le=599)], ...] = (502, 503)


class Dcgm(Model):
    """NVIDIA's DCGM exporter on every endpoint's host."""

    port: Annotated[int, Field(gt=0, le=_LAST_PORT)] = 9400
    interval_ms: Positive = Field(1_000, description="between two reads; an exporter measures every 30 s by default")


class Scrape(Model):
    """Reading /metrics from every endpoint."""

    interval_ms: Positive = 200
    timeout_ms: Positive = 1_000
    backoff_max_ms: Positive = 5_000
    stale_after_intervals: float = Field(3, gt=0)
    pushes: bool = Field(True, description="listen to engines that push their figures; false reads /metrics alone")
    kv_alarm: float = Field(0.75, gt=0, le=1, description="share of an engine's KV cache in use that raises an alarm")
    dcgm: Dcgm | None = Field(None, description="none unless asked for; `{}` asks for it")


class Probe(Model):
    """Asking every endpoint for its model list; and one that takes no traffic for a generation of one token."""

    interval_ms: Positive = 500
    timeout_ms: Positive = 2_000
    failed_probes: Positive = 3
    failed_requests: Positive = 3
    cooldown_ms: int = Field(
        5_000,
        ge=0,
        le=60_000,
        description="failed requests keep an endpoint out for this, doubled with each fall in a row",
    )
    trial: bool = Field(True, description="an endpoint takes traffic only once a generation of ours was answered")
    trial_timeout_ms: Positive = 30_000
    no_progress_ms: Positive = Field(10_000, description="an engine with requests that does no step for this is stuck")
    warm_up_requests: int = Field(
        0, ge=0, le=1_000_000, description="a cold engine's share of the traffic grows over so many"
    )


class Limits(Model):
    """Every bound of the running system."""

    request_body_bytes: Positive = 32 * 1024 * 1024
    endpoints: Positive = 4_096
    open_requests: Positive = 100_000
    unsettled_requests: Positive = Field(100_000, description="finished requests waiting for their access-log entry")
    envoy_connections: Positive = Field(100_000, description="circuit breaker thresholds in generated Envoy config")
    xds_streams: Positive = Field(
        1_024, description="one per Envoy; one per Envoy and pool beside its own control plane"
    )
    senses_buffer_bytes: Positive = Field(
        8 * 1024 * 1024,
        description="reports of the senses that wait to be taken; beyond it what nobody awaits is dropped",
    )
    tenants: Positive = Field(
        10_000, description="whose quotas' state is kept; above it the longest unseen is forgotten"
    )
    stored_responses: Positive = Field(10_000, description="answers of /v1/responses whose endpoint is remembered")


class Log(Model):
    """Structured logs. Prompts never appear unless asked for."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else json")


def _check_pattern(value: str) -> str:
    try:
        re2.compile(value, quiet_re2())
    except re2.error as error:
        said = error.args[0]
        why = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        raise ValueError(f"no regular expression that RE2 understands: {why}") from None
    return value


def quiet_re2() -> re2.Options:
    """Options under which RE2 does not write to standard error what it raises as well."""
    options = re2.Options()
    options.log_errors = False
    return options


Pattern = Annotated[str, AfterValidator(_check_pattern)]


class RequestLog(Model):
    """A line of JSON per finished request."""

    file: Path | None = Field(None, description="relative to the config file; standard output without one")
    max_bytes: Positive = Field(100 * 1024 * 1024, description="a file grown to this is put aside")
    backups: int = Field(5, ge=1, le=1_000, description="files put aside that are kept")
    queue: Positive = Field(10_000, description="lines waiting to be written; more are dropped and counted")
    prompts: bool = Field(False, description="log the beginning of every prompt")
    prompt_bytes: Positive = Field(4_096, le=1_048_576, description="so much of it")
    redact: tuple[Literal["email", "credit_card", "api_key"], ...] = ("email", "credit_card", "api_key")
    redact_patterns: dict[Name, Pattern] = Field(
        default_factory=dict, description="name -> regular expression (RE2); each match becomes [name]"
    )


class Observe(Model):
    """What can be seen from outside."""

    metrics: str = "0.0.0.0:9090"
    decisions: int = Field(1_000, ge=0, description="decisions kept for /v1/decisions")
    log: Log = Log()
    request_log: RequestLog | None = Field(None, description="none unless asked for; `{}` asks for one")

    _addresses = field_validator("metrics")(check_address)


class Admin(Model):
    """The operator's HTTP API."""

    listen: str = "127.0.0.1:9700"

    _addresses = field_validator("listen")(check_address)


class Config(Model):
    """One configuration file."""

    listen: Listen = Listen()
    zone: Name | None = Field(None, description="where this Pointsman runs; endpoints elsewhere are remote")
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    routing: Routing = Routing()
    access: Access = Access()
    tenants: Tenants | None = Field(None, description="needs `access`")
    wire: Wire = Wire()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    scrape: Scrape = Scrape()
    probe: Probe = Probe()
    limits: Limits = Limits()
    observe: Observe = Observe()
    admin: Admin = Admin()

    @field_validator("access")
    @classmethod
    def _access_names_somebody(cls, access: Access) -> Access:
        # who writes the section means to close the door; nothing in it would leave it open without a word
        if not access.guarded:
            raise ValueError(
                "names nobody who may call: give api_keys, api_keys_file, jwt or tenant_header, or leave `access` out"
            )
        return access

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        _refuse_twice("pool name", [pool.name for pool in self.pools])
        _refuse_twice("cluster", [pool.cluster_name for pool in self.pools])
        binds = [pool.precise.events.bind for pool in self.pools if pool.precise and pool.precise.events.bind]
        _refuse_twice("prefix_index.precise.events.bind", binds)
        _refuse_twice("model or alias", [name for pool in self.pools for name in (*pool.models, *pool.aliases)])
        return self

    @model_validator(mode="after")
    def _tenants_can_be_told_apart(self) -> Self:
        if self.tenants is None:
            return self
        if not self.access.guarded:
            raise ValueError("tenants: without `access` no request has a tenant, and no quota would ever apply")
        pools = {pool.name for pool in self.pools}
        for where, quota in (("default", self.tenants.default), *self.tenants.named.items()):
            if unknown := sorted(set(quota.pools or ()) - pools):
                raise ValueError(f"tenants: {where} sees pool {unknown[0]!r}; there are: {sorted(pools)}")
        return self

    @model_validator(mode="after")
    def _routing_leads_somewhere(self) -> Self:
        routing, pools = self.routing, {pool.name for pool in self.pools}
        for rule in routing.paths:
            if rule.pool not in pools:
                raise ValueError(
                    f"routing.paths: {rule.prefix} leads to pool {rule.pool!r}; there are: {sorted(pools)}"
                )
        names = {name for pool in self.pools for name in (*pool.models, *pool.aliases)}
        if routing.default_model is not None and routing.default_model not in names:
            raise ValueError(f"routing.default_model is {routing.default_model!r}; there are: {sorted(names)}")
        return self
