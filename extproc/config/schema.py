"""The configuration file's shape: the whole, and a pool. The models here and in sections/ are the reference.

`pointsman check --schema` prints them. Not here: reading files (loading.py) and what a running system makes of a config
(generations.py). Every bound of the running system has its field under `limits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from extproc.config.policy_kinds import Policy
from extproc.config.sections.breakers import Breakers
from extproc.config.sections.callers import Access, Tenants
from extproc.config.sections.endpoint_sources import Endpoints
from extproc.config.sections.fields import (
    LAST_PORT,
    Model,
    ModelName,
    Name,
    Positive,
    RuleHeader,
    given_twice,
    refuse,
)
from extproc.config.sections.guard import Guard
from extproc.config.sections.listen import Listen
from extproc.config.sections.observing import Admin, Observe
from extproc.config.sections.prefix_index import PreciseIndex, PrefixIndex
from extproc.config.sections.queueing import PoolQueue
from extproc.config.sections.upstream import Retries, Timeouts, Wire
from extproc.config.sections.watching import Probe, Scrape
from extproc.config.spaces import sections, space_faults
from extproc.names import STRIPPED_HEADERS
from policies.placement.profiles import Profile


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
    metrics_port: Annotated[int, Field(gt=0, le=LAST_PORT)] | None = Field(
        None, description="none: the endpoint's own; Triton's is 8002"
    )
    calibrate_index: bool = Field(
        True, description="believe in less cache than an engine reports where it keeps less of what was promised"
    )
    hardware: str | Profile = Field("8b-h100", description="what the model costs there, by name or in figures")
    prefix_index: PrefixIndex = PrefixIndex()
    queue: PoolQueue | None = Field(None, description="none: every request goes at once, and waits inside an engine")
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
        refuse(self._faults_of_aliases())
        return self

    def _faults_of_aliases(self) -> Iterator[str]:
        for alias, model in self.aliases.items():
            if model not in self.models:
                yield f"alias {alias!r} points to {model!r}; this pool serves {list(self.models)}"
            if alias in self.models:
                yield f"{alias!r} is both a model and an alias"


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


class Limits(Model):
    """Every bound of the running system."""

    request_body_bytes: Positive = 32 * 1024 * 1024
    large_body_bytes: Positive = Field(
        512 * 1024 * 1024,
        description="of bodies over 1 MiB, or that inflate to more than 256 KiB, wait to be read; beyond it 503",
    )
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
    clients: Positive = Field(
        10_000, description="that `guard` remembers beside those with requests running; the longest unseen is forgotten"
    )
    json_nesting: Positive | None = Field(
        None, description="of request bodies; none: as deep as our parser goes, a bit less than a thousand"
    )
    prompt_items: Positive | None = Field(
        None, description="in any one list of a prompt: messages, tools, texts; token ids do not count"
    )
    prompt_tokens: Positive | None = Field(None, description="of a prompt, as estimated")
    usage_reports: Positive = Field(
        10_000,
        description="streams of tenants that engines may yet tell the usage of; beyond it the estimate stands",
    )
    idempotency_keys: Positive = Field(
        100_000, description="of answered requests, kept for `retries.idempotency_window_s` or until there are more"
    )
    stored_responses: Positive = Field(10_000, description="answers of /v1/responses whose endpoint is remembered")


class Config(Model):
    """One configuration file."""

    listen: Listen = Listen()
    zone: Name | None = Field(None, description="where this Pointsman runs; endpoints elsewhere are remote")
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    routing: Routing = Routing()
    access: Access = Access()
    tenants: Tenants | None = Field(None, description="needs `access`")
    guard: Guard | None = Field(None, description="limits of each client, and what no prompt may hold")
    wire: Wire = Wire()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    scrape: Scrape = Scrape()
    probe: Probe = Probe()
    breakers: Breakers = Breakers()
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
    def _fits_together(self) -> Self:
        refuse(
            [
                *self._names_given_twice(),
                *self._faults_of_tenants(),
                *self._faults_of_guard(),
                *self._unknown_classes(),
                *self._faults_of_routing(),
            ]
        )
        return self

    def _names_given_twice(self) -> Iterator[str]:
        yield from given_twice("pool name", [pool.name for pool in self.pools])
        yield from given_twice("cluster", [pool.cluster_name for pool in self.pools])
        binds = [pool.precise.events.bind for pool in self.pools if pool.precise and pool.precise.events.bind]
        yield from given_twice("prefix_index.precise.events.bind", binds)
        names = [name for pool in self.pools for name in (*pool.models, *pool.aliases)]
        yield from given_twice("model or alias", names)

    def _faults_of_tenants(self) -> Iterator[str]:
        if self.tenants is None:
            return
        if not self.access.guarded:
            yield "tenants: without `access` no request has a tenant, and no quota would ever apply"
        yield from space_faults(self.tenants, self.pools)

    def _faults_of_guard(self) -> Iterator[str]:
        if self.guard is not None and self.guard.client != "address" and not self.access.guarded:
            yield f"guard.client: {self.guard.client} needs `access`, or no request has one; use address without it"

    def _unknown_classes(self) -> Iterator[str]:
        queues = [pool.queue for pool in self.pools if pool.queue is not None]
        classes = list(dict.fromkeys(one.name for queue in queues for one in queue.classes))
        there_are = f"there are: {', '.join(classes)}" if classes else "no pool has a queue"
        for where, quota in sections(self.tenants):
            if quota.best_class is not None and quota.best_class not in classes:
                yield f"tenants.{where}.best_class: no class {quota.best_class!r} in a queue; {there_are}"

    def _faults_of_routing(self) -> Iterator[str]:
        routing, pools = self.routing, {pool.name for pool in self.pools}
        for rule in routing.paths:
            if rule.pool not in pools:
                yield f"routing.paths: {rule.prefix} leads to pool {rule.pool!r}; there are: {sorted(pools)}"
        names = {name for pool in self.pools for name in (*pool.models, *pool.aliases)}
        if routing.default_model is not None and routing.default_model not in names:
            yield f"routing.default_model is {routing.default_model!r}; there are: {sorted(names)}"
