"""What `pointsman check` says of a valid config: in a few lines, what an operator might have meant otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config.policy_kinds import CustomPolicy
from extproc.config.pool_policies import policy_of
from extproc.config.schema import Config, Pool
from extproc.config.sections.callers import Access
from extproc.config.sections.endpoint_sources import Endpoints, Kubernetes
from policies.placement.scorers import AFFINITY_SCORERS
from policies.placement.weighted import WeightedSpec, bounded_weights


def pool_lines(config: Config) -> Iterator[str]:
    """Each pool in a line, and one more for each weight that does not count as it is written."""
    for pool in config.pools:
        shown = f"models {', '.join(pool.models)}; endpoints: {_source(pool.endpoints)}; policy: {_policy(pool)}"
        yield f"pool {pool.name}: {shown}"
        spec = policy_of(pool)
        if isinstance(spec, WeightedSpec):
            yield from (f"pool {pool.name}: {line}" for line in _bounded(spec))


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


def _policy(pool: Pool) -> str:
    if isinstance(pool.policy, CustomPolicy):
        return f"custom ({pool.policy.name})"
    return pool.policy if isinstance(pool.policy, str) else f"inline ({pool.policy.kind})"


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


def _bounded(spec: WeightedSpec) -> Iterator[str]:
    total = sum(scorer.weight for scorer in spec.scorers)
    for scorer, (name, counted) in zip(spec.scorers, bounded_weights(spec), strict=True):
        written = scorer.weight / total
        if name in AFFINITY_SCORERS and counted < written:
            yield f"{name} weighs {100 * written:.0f} %, counts {100 * counted:.0f} % (max_affinity_share)"
