"""A generation: everything that follows from one config file and never changes afterwards.

A reload builds the next generation and swaps one reference. What lives longer (fleet state, prefix indexes, counts)
is kept by name elsewhere, so a reload loses nothing. A request sees one generation from start to end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from extproc.config.pool_policies import name_for
from extproc.config.schema import Config, Pool
from extproc.config.sections.callers import Quota
from extproc.config.spaces import sections, seen_by
from extproc.config.terms import Terms
from extproc.names import CREDENTIAL_HEADERS
from extproc.request.bounds import Bounds
from extproc.request.tokens import TokenRates
from extproc.request.urgency import ENGINE_PRIORITY_HEADER, Urgency, engine_priority_of, urgency_of
from policies.types import InferenceRequest
from vllm_adapters.health import OURSELVES


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model name leads: the pool, and the name its engines know.

    What every request asks of the pool stands here too: of a pydantic model each attribute takes five times as long.
    """

    pool: Pool
    pool_name: str
    queued: bool
    precise: bool
    model: str
    rates: TokenRates
    list_length: int
    list_for_all: bool
    terms: Terms
    cluster_name: str


@dataclass(frozen=True)
class Space:
    """What of the fleet there is for a tenant, or for everybody: names it may use, and where they lead.

    `pools`: those that it sees; None where everybody sees all of them, and is placed by their own policies.
    `policies`: pool -> the name of the policy that its requests are placed by there, where that is not the pool's own.
    `injects_usage`: its streams are asked for their usage by us, if not by the client.
    """

    targets: Mapping[str, Target]
    default_model: str | None
    pools: frozenset[str] | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    injects_usage: bool = False

    def sees(self, target: Target) -> bool:
        """Whether a pool exists here."""
        return self.pools is None or target.pool.name in self.pools

    @cached_property
    def models_body(self) -> bytes:
        """The answer to GET /v1/models: every model and alias, in OpenAI's form."""
        created = int(time.time())
        entries = [
            {"id": name, "object": "model", "created": created, "owned_by": OURSELVES, "root": target.model}
            for name, target in self.targets.items()
        ]
        return msgspec.json.encode({"object": "list", "data": entries})


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

    @cached_property
    def largest_body_bytes(self) -> int:
        """A longer request body is not taken."""
        return self.config.limits.request_body_bytes

    @property
    def list_length(self) -> int:
        """How many endpoints are named to Envoy at most."""
        wire = self.config.wire
        return 1 if wire.endpoint_list == "single" else wire.endpoint_list_length

    def _target(self, pool: Pool, model: str, terms: Terms) -> Target:
        wire = self.config.wire
        rates = TokenRates(pool.bytes_per_token, pool.tokens_per_cjk_character, pool.tokens_per_image)
        return Target(
            pool,
            pool.name,
            pool.queue is not None,
            pool.precise is not None,
            model,
            rates,
            self.list_length,
            wire.endpoint_list == "list",
            terms,
            pool.cluster_name,
        )

    @cached_property
    def hidden_headers(self) -> tuple[str, ...]:
        """Request headers that end here: what lets a client in is no engine's business."""
        access = self.config.access
        ours = access.takes_keys or access.jwt is not None
        return CREDENTIAL_HEADERS if ours and not access.forward_credentials else ()

    def space_of(self, tenant: str | None) -> Space:
        """What of the fleet there is for this tenant."""
        if tenant is None or (tenants := self.config.tenants) is None:
            return self._whole
        return self._spaces[f"named.{tenant}" if tenant in tenants.named else "default"]

    @cached_property
    def _whole(self) -> Space:
        return Space(self.targets, self.config.routing.default_model)

    @cached_property
    def _spaces(self) -> dict[str, Space]:
        return {where: self._space(where, quota) for where, quota in sections(self.config.tenants)}

    def _space(self, where: str, quota: Quota) -> Space:
        seen = {pool.name for pool in seen_by(quota, self.config.pools)}
        targets = {name: target for name, target in self.targets.items() if target.pool.name in seen}
        targets |= {alias: self.targets[model] for alias, model in quota.aliases.items()}
        default = quota.default_model or self.config.routing.default_model
        policies = {pool: name_for(policy, where) for pool, policy in quota.policies.items()}
        injects_usage = self.config.tenants is not None and self.config.tenants.usage == "inject"
        return Space(targets, default if default in targets else None, frozenset(seen), policies, injects_usage)

    def urgency_of(self, headers: Mapping[str, str], pool: Pool, tenant: str | None) -> Urgency | None:
        """A request's class and priority in the pool's queue; None if it names a class that is none of it."""
        return urgency_of(headers, self._classes[pool.name], *self._best(tenant))

    def _best(self, tenant: str | None) -> tuple[str | None, int]:
        """The best class and priority that a tenant's requests may have."""
        quota = None if tenant is None or self.config.tenants is None else self.config.tenants.of(tenant)
        return (None, 0) if quota is None else (quota.best_class, quota.best_priority)

    @cached_property
    def _classes(self) -> dict[str, tuple[str, ...]]:
        queues = {pool.name: pool.queue for pool in self.config.pools}
        return {name: tuple(one.name for one in queue.classes) for name, queue in queues.items() if queue is not None}

    def engine_priority(
        self, headers: Mapping[str, str], target: Target, request: InferenceRequest
    ) -> tuple[tuple[str, str], ...]:
        """What the engine is told of the request's priority, as a header: lower is sooner, as in vLLM.

        By its class; else what the client itself says, within its tenant's bounds, as soon as there is anybody here
        whom it could pass by that.
        """
        if not target.queued and request.tenant is None:
            return ()
        base = self._engine_priorities.get((target.pool_name, request.class_name))
        if base is not None:
            return ((ENGINE_PRIORITY_HEADER, str(base + request.priority)),)
        bounded = engine_priority_of(headers, self._best(request.tenant)[1])
        return () if bounded is None else ((ENGINE_PRIORITY_HEADER, str(bounded)),)

    @cached_property
    def _engine_priorities(self) -> dict[tuple[str, str | None], int]:
        return {
            (pool.name, one.name): one.engine_priority
            for pool in self.config.pools
            if pool.queue is not None
            for one in pool.queue.classes
            if one.engine_priority is not None
        }
