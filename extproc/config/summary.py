"""What `pointsman check` says of a valid config: in a few lines, what an operator might have meant otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config.policy_kinds import CustomPolicy, Policy
from extproc.config.pool_policies import policy_of
from extproc.config.schema import Config
from extproc.config.sections.callers import Access
from extproc.config.sections.endpoint_sources import Endpoints, Kubernetes
from extproc.config.sections.queueing import PoolQueue
from extproc.config.spaces import sections, seen_by
from policies.placement.scorers import AFFINITY_SCORERS
from policies.placement.weighted import WeightedSpec, bounded_weights


def pool_lines(config: Config) -> Iterator[str]:
    """Each pool in a line, and one more for each weight that does not count as it is written."""
    for pool in config.pools:
        shown = f"models {', '.join(pool.models)}; endpoints: {_source(pool.endpoints)}; policy: {_policy(pool.policy)}"
        yield f"pool {pool.name}: {shown}"
        spec = policy_of(pool)
        if isinstance(spec, WeightedSpec):
            yield from (f"pool {pool.name}: {line}" for line in _bounded(spec))
        if pool.queue is not None:
            yield f"pool {pool.name}: {_queue(pool.queue)}"


def guard_lines(config: Config) -> Iterator[str]:
    """What one client may have, and what is searched for."""
    guard = config.guard
    if guard is None:
        return
    limits = (
        f"{guard.requests.per_s:g} requests a second" if guard.requests else "",
        f"{guard.concurrency} at once" if guard.concurrency else "",
    )
    each = f"each {guard.client}: {', '.join(filter(None, limits))}" if any(limits) else ""
    patterns = f"patterns: {', '.join(sorted(guard.patterns))}" if guard.patterns else ""
    yield f"guard: {'; '.join(filter(None, (each, patterns)))}"


def tenant_lines(config: Config) -> Iterator[str]:
    """Each tenant whose view of the fleet is its own, in a line."""
    for where, quota in sections(config.tenants):
        own = (
            ", ".join(f"{alias} is {model}" for alias, model in sorted(quota.aliases.items())),
            f"without a model: {quota.default_model}" if quota.default_model else "",
            "policies: " * bool(quota.policies) + ", ".join(f"{n} {_policy(p)}" for n, p in quota.policies.items()),
        )
        if quota.pools is None and not any(own):
            continue
        who = "tenants not named" if where == "default" else f"tenant {where.removeprefix('named.')}"
        sees = f"sees {', '.join(pool.name for pool in seen_by(quota, config.pools))}"
        yield f"{who}: {'; '.join(filter(None, (sees, *own)))}"


def access_line(access: Access, keys: int) -> str:
    """Who may call. `keys`: how many API keys there are, in the config and the file together."""
    if not access.guarded:
        return "access: everybody may call"
    where = f" ({access.api_keys_file})" if access.api_keys_file else ""
    sources = (
        f"{keys} API keys{where}" if access.takes_keys else "",
        f"tokens of {access.jwt.issuer}" if access.jwt else "",
        f"tenants that a gateway names in {access.tenant_header}" if access.tenant_header else "",
    )
    return f"access: {'; '.join(filter(None, sources))}"


def _policy(policy: str | Policy) -> str:
    if isinstance(policy, CustomPolicy):
        return f"custom ({policy.name})"
    return policy if isinstance(policy, str) else f"inline ({policy.kind})"


def _source(endpoints: Endpoints) -> str:
    if endpoints.file is not None:
        return f"file {endpoints.file}"
    if endpoints.dns is not None:
        return f"DNS {'/'.join(endpoints.dns.record_types)} of {endpoints.dns.name}"
    if endpoints.kubernetes is not None:
        return f"Kubernetes, {_objects(endpoints.kubernetes)}"
    return f"{len(endpoints.static or ())} static"


def _objects(kubernetes: Kubernetes) -> str:
    where = f" in namespace {kubernetes.namespace}" if kubernetes.namespace else ""
    if kubernetes.pods is not None:
        return f"pods {kubernetes.pods.selector}{where}"
    if kubernetes.endpoint_slices is not None:
        return f"EndpointSlices of {kubernetes.endpoint_slices.service}{where}"
    return f"InferencePool {kubernetes.inference_pool.name if kubernetes.inference_pool else ''}{where}"


def _queue(queue: PoolQueue) -> str:
    classes = ", ".join(f"{one.name} (weight {one.weight:g}, {one.places} places)" for one in queue.classes)
    return f"queue of {classes}; late binding {'on' if queue.late_binding else 'off'}"


def _bounded(spec: WeightedSpec) -> Iterator[str]:
    total = sum(scorer.weight for scorer in spec.scorers)
    for scorer, (name, counted) in zip(spec.scorers, bounded_weights(spec), strict=True):
        written = scorer.weight / total
        if name in AFFINITY_SCORERS and counted < written:
            yield f"{name} weighs {100 * written:.0f} %, counts {100 * counted:.0f} % (max_affinity_share)"
