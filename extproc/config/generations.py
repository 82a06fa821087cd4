"""A generation: everything that follows from one config file and never changes afterwards.

A reload builds the next generation and swaps one reference. What lives longer (fleet state, prefix indexes, counts)
is kept by name elsewhere, so a reload loses nothing. A request sees one generation from start to end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from extproc.config.schema import Config, Pool
from extproc.config.terms import Terms
from extproc.names import CREDENTIAL_HEADERS
from extproc.request.bounds import Bounds
from extproc.request.tokens import TokenRates
from extproc.request.urgency import ENGINE_PRIORITY_HEADER, Urgency, urgency_of
from policies.types import InferenceRequest
from vllm_adapters.health import OURSELVES


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model name leads: the pool, and the name its engines know."""

    pool: Pool
    model: str
    rates: TokenRates
    list_length: int
    list_for_all: bool
    terms: Terms


@dataclass(frozen=True)
class Generation:
    """One validated config and the tables made from it."""

    number: int
    config: Config

    @cached_property
    def targets(self) -> dict[str, Target]:
        """Every name a client may use -> where it leads."""
        targets = {}
        for pool in self.config.pools:
            terms = Terms(self.config, pool)
            for name, model in (*((m, m) for m in pool.models), *pool.aliases.items()):
                targets[name] = self._target(pool, model, terms)
        return targets

    @cached_property
    def bounds(self) -> Bounds | None:
        """Bounds on the shape of requests; None where the config sets none."""
        limits = self.config.limits
        bounds = Bounds(limits.json_nesting, limits.prompt_items, limits.prompt_tokens)
        return None if bounds == Bounds() else bounds

    @cached_property
    def _rules(self) -> list[tuple[str, frozenset[tuple[str, str]], Target]]:
        """Path rules, the longest first, of these the one that asks for most headers; a slash ends every prefix."""
        pools = {pool.name: pool for pool in self.config.pools}
        rules = [
            (f"{rule.prefix.rstrip('/')}/", frozenset(rule.headers.items()), self.targets[pools[rule.pool].models[0]])
            for rule in self.config.routing.paths
        ]
        return sorted(rules, key=lambda rule: (-len(rule[0]), -len(rule[1])))

    def target_of_path(self, path: str, headers: Mapping[str, str]) -> Target | None:
        """Where a path rule leads a canonical path; to the pool's first model, for want of another."""
        ended = f"{path}/"
        return next(
            (
                target
                for prefix, wanted, target in self._rules
                if ended.startswith(prefix) and all(headers.get(name) == value for name, value in wanted)
            ),
            None,
        )

    @property
    def list_length(self) -> int:
        """How many endpoints are named to Envoy at most."""
        wire = self.config.wire
        return 1 if wire.endpoint_list == "single" else wire.endpoint_list_length

    def _target(self, pool: Pool, model: str, terms: Terms) -> Target:
        wire = self.config.wire
        rates = TokenRates(pool.bytes_per_token, pool.tokens_per_cjk_character, pool.tokens_per_image)
        return Target(pool, model, rates, self.list_length, wire.endpoint_list == "list", terms)

    @cached_property
    def hidden_headers(self) -> tuple[str, ...]:
        """Request headers that end here: what lets a client in is no engine's business."""
        access = self.config.access
        ours = access.takes_keys or access.jwt is not None
        return CREDENTIAL_HEADERS if ours and not access.forward_credentials else ()

    def sees(self, tenant: str | None, target: Target) -> bool:
        """Whether a pool exists for this tenant."""
        pools = self._pools_seen_by(tenant)
        return pools is None or target.pool.name in pools

    def _pools_seen_by(self, tenant: str | None) -> tuple[str, ...] | None:
        tenants = self.config.tenants
        return None if tenants is None or tenant is None else tenants.of(tenant).pools

    def urgency_of(self, headers: Mapping[str, str], pool: Pool, tenant: str | None) -> Urgency | None:
        """A request's class and priority in the pool's queue; None if it names a class that is none of it."""
        quota = None if tenant is None or self.config.tenants is None else self.config.tenants.of(tenant)
        best_class, best_priority = (None, 0) if quota is None else (quota.best_class, quota.best_priority)
        return urgency_of(headers, self._classes[pool.name], best_class, best_priority)

    @cached_property
    def _classes(self) -> dict[str, tuple[str, ...]]:
        queues = {pool.name: pool.queue for pool in self.config.pools}
        return {name: tuple(one.name for one in queue.classes) for name, queue in queues.items() if queue is not None}

    def engine_priority(self, pool: Pool, request: InferenceRequest) -> tuple[tuple[str, str], ...]:
        """What the engine is told of the request's class, as a header: lower is sooner, as in vLLM."""
        base = self._engine_priorities.get((pool.name, request.class_name))
        return () if base is None else ((ENGINE_PRIORITY_HEADER, str(base + request.priority)),)

    @cached_property
    def _engine_priorities(self) -> dict[tuple[str, str | None], int]:
        return {
            (pool.name, one.name): one.engine_priority
            for pool in self.config.pools
            if pool.queue is not None
            for one in pool.queue.classes
            if one.engine_priority is not None
        }

    def injects_usage(self, tenant: str | None) -> bool:
        """Whether a tenant's streams are asked for their usage by us, if not by the client."""
        tenants = self.config.tenants
        return tenants is not None and tenant is not None and tenants.usage == "inject"

    def models_body(self, tenant: str | None = None) -> bytes:
        """The answer to GET /v1/models: every model and alias that a tenant sees, in OpenAI's form."""
        pools = self._pools_seen_by(tenant)
        body = self._models_bodies.get(pools)
        if body is None:
            body = self._models_bodies[pools] = self._models_body(pools)
        return body

    @cached_property
    def _models_bodies(self) -> dict[tuple[str, ...] | None, bytes]:
        """By the pools seen, of which there are as many sets as the config writes down."""
        return {}

    def _models_body(self, pools: tuple[str, ...] | None) -> bytes:
        created = int(time.time())
        entries = [
            {"id": name, "object": "model", "created": created, "owned_by": OURSELVES, "root": target.model}
            for name, target in self.targets.items()
            if pools is None or target.pool.name in pools
        ]
        return msgspec.json.encode({"object": "list", "data": entries})
