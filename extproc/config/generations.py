"""A generation: everything that follows from one config file and never changes afterwards.

A reload builds the next generation and swaps one reference. What lives longer (fleet state, prefix indexes, counts)
is kept by name elsewhere, so a reload loses nothing. A request sees one generation from start to end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(init=False)
class Target:
    """Where a model name leads: the pool, and the name its engines know. Never changed.

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

    def __init__(
        self, pool: Pool, model: str, rates: TokenRates, terms: Terms, list_length: int, *, list_for_all: bool
    ) -> None:
        self.pool = pool
        self.pool_name = pool.name
        self.queued = pool.queue is not None
        self.precise = pool.precise is not None
        self.model = model
        self.rates = rates
        self.list_length = list_length
        self.list_for_all = list_for_all
        self.terms = terms
        self.cluster_name = pool.cluster_name


class Space:
    """What of the fleet there is for a tenant, or for everybody: names it may use, and where they lead.

    `pools`: those that it sees; None where everybody sees all of them, and is placed by their own policies.
    `policies`: pool -> the name of the policy that its requests are placed by there, where that is not the pool's own.
    `injects_usage`: its streams are asked for their usage by us, if not by the client.
    """

    def __init__(
        self,
        targets: dict[str, Target],
        default_model: str | None,
        pools: frozenset[str] | None = None,
        policies: dict[str, str] | None = None,
        *,
        injects_usage: bool = False,
    ) -> None:
        self.targets = targets
        self.default_model = default_model
        self.pools = pools
        self.policies: dict[str, str] = policies or {}
        self.injects_usage = injects_usage
        self._models_body: bytes | None = None
        self._created_s: int = int(time.time())

    def sees(self, target: Target) -> bool:
        """Whether a pool exists here."""
        return self.pools is None or target.pool_name in self.pools

    @property
    def models_body(self) -> bytes:
        """The answer to GET /v1/models: every model and alias, in OpenAI's form. Made once."""
        if self._models_body is None:
            entries = [self._entry(name, target) for name, target in self.targets.items()]
            self._models_body = msgspec.json.encode({"object": "list", "data": entries})
        return self._models_body

    def model_body(self, name: str) -> bytes | None:
        """The answer to GET /v1/models/{name}: its entry in that list; None where there is no such model."""
        target = self.targets.get(name)
        return None if target is None else msgspec.json.encode(self._entry(name, target))

    def _entry(self, name: str, target: Target) -> dict[str, str | int]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": OURSELVES,
            "root": target.model,
        }


class _Rule:
    """A path rule; `prefix` ends with a slash. It holds for a request that has all of `headers`."""

    def __init__(self, prefix: str, headers: list[tuple[str, str]], target: Target) -> None:
        self.prefix = prefix
        self.headers = headers
        self.target = target

    def holds(self, ended: str, headers: Mapping[str, str]) -> bool:
        """Whether it is for a path, with a slash at its end, and for these headers."""
        return ended.startswith(self.prefix) and all(headers.get(name) == value for name, value in self.headers)


class Generation:
    """One validated config and the tables made from it, all of them at once: requests only read.

    `targets`: every name a client may use -> where it leads. `bounds`: on the shape of requests; None where the config
    sets none. `largest_body_bytes`: a longer request body is not taken. `list_length`: how many endpoints are named to
    Envoy at most. `hidden_headers`: of requests; they end here, since what lets a client in is no engine's business.
    """

    def __init__(self, number: int, config: Config) -> None:
        self.number = number
        self.config = config
        wire, limits, tenants = config.wire, config.limits, config.tenants
        self.list_length: int = 1 if wire.endpoint_list == "single" else wire.endpoint_list_length
        self.largest_body_bytes: int = limits.request_body_bytes
        self.bounds: Bounds | None = None
        if (limits.json_nesting, limits.prompt_items, limits.prompt_tokens) != (None, None, None):
            self.bounds = Bounds(limits.json_nesting, limits.prompt_items, limits.prompt_tokens)
        self.targets: dict[str, Target] = _targets(config, self.list_length)
        self.hidden_headers: tuple[str, ...] = _hidden_headers(config)
        self._rules: list[_Rule] = _rules(config, self.targets)
        self._whole = Space(self.targets, config.routing.default_model)
        self._spaces: dict[str, Space] = {
            where: _space(config, self.targets, where, quota) for where, quota in sections(tenants)
        }
        self._named: dict[str, Quota] | None = None if tenants is None else tenants.named
        queues = {pool.name: pool.queue for pool in config.pools}
        self._classes: dict[str, tuple[str, ...]] = {
            name: tuple(one.name for one in queue.classes) for name, queue in queues.items() if queue is not None
        }
        self._engine_priorities: dict[tuple[str, str | None], int] = {
            (name, one.name): one.engine_priority
            for name, queue in queues.items()
            if queue is not None
            for one in queue.classes
            if one.engine_priority is not None
        }

    def target_of_path(self, path: str, headers: Mapping[str, str]) -> Target | None:
        """Where a path rule leads a canonical path; to the pool's first model, for want of another."""
        ended = f"{path}/"
        for rule in self._rules:
            if rule.holds(ended, headers):
                return rule.target
        return None

    def space_of(self, tenant: str | None) -> Space:
        """What of the fleet there is for this tenant."""
        named = self._named
        if tenant is None or named is None:
            return self._whole
        return self._spaces[f"named.{tenant}" if tenant in named else "default"]

    def urgency_of(self, headers: Mapping[str, str], pool: Pool, tenant: str | None) -> Urgency | None:
        """A request's class and priority in the pool's queue; None if it names a class that is none of it."""
        best_class, best_priority = self._best(tenant)
        return urgency_of(headers, self._classes[pool.name], best_class, best_priority)

    def _best(self, tenant: str | None) -> tuple[str | None, int]:
        """The best class and priority that a tenant's requests may have."""
        quota = None if tenant is None or self.config.tenants is None else self.config.tenants.of(tenant)
        return (None, 0) if quota is None else (quota.best_class, quota.best_priority)

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


def _targets(config: Config, list_length: int) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for_all = config.wire.endpoint_list == "list"
    for pool in config.pools:
        terms = Terms(config, pool)
        rates = TokenRates(pool.bytes_per_token, pool.tokens_per_cjk_character, pool.tokens_per_image)
        for name, model in (*((m, m) for m in pool.models), *pool.aliases.items()):
            targets[name] = Target(pool, model, rates, terms, list_length, list_for_all=for_all)
    return targets


def _rules(config: Config, targets: Mapping[str, Target]) -> list[_Rule]:
    """Path rules, the longest first, of these the one that asks for most headers; a slash ends every prefix."""
    pools = {pool.name: pool for pool in config.pools}
    rules = [
        _Rule(f"{rule.prefix.rstrip('/')}/", [*rule.headers.items()], targets[pools[rule.pool].models[0]])
        for rule in config.routing.paths
    ]
    return sorted(rules, key=lambda rule: (-len(rule.prefix), -len(rule.headers)))


def _hidden_headers(config: Config) -> tuple[str, ...]:
    access = config.access
    ours = access.takes_keys or access.jwt is not None
    return CREDENTIAL_HEADERS if ours and not access.forward_credentials else ()


def _space(config: Config, all_targets: Mapping[str, Target], where: str, quota: Quota) -> Space:
    seen = {pool.name for pool in seen_by(quota, config.pools)}
    targets = {name: target for name, target in all_targets.items() if target.pool_name in seen}
    targets |= {alias: all_targets[model] for alias, model in quota.aliases.items()}
    default = quota.default_model or config.routing.default_model
    policies = {pool: name_for(policy, where) for pool, policy in quota.policies.items()}
    injects_usage = config.tenants is not None and config.tenants.usage == "inject"
    return Space(
        targets, default if default in targets else None, frozenset(seen), policies, injects_usage=injects_usage
    )
