"""A tenant's own view of the fleet: the models there are for it, their names, and the policies that place its requests.

Checked when the config is read, for each section of `tenants` (`default` and every named one). Not here: what a tenant
may take (quotas), and the view as a running system uses it (generations.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from extproc.config.near_misses import unknown
from extproc.config.sections.callers import Quota, Tenants

if TYPE_CHECKING:
    from extproc.config.schema import Pool


def sections(tenants: Tenants | None) -> Iterator[tuple[str, Quota]]:
    """Every section that says something of tenants, by its place in the file."""
    if tenants is not None:
        yield "default", tenants.default
        for name, quota in tenants.named.items():
            yield f"named.{name}", quota


def seen_by(quota: Quota, pools: Iterable[Pool]) -> list[Pool]:
    """The pools that exist for it."""
    return [pool for pool in pools if quota.pools is None or pool.name in quota.pools]


def space_faults(tenants: Tenants, pools: Iterable[Pool]) -> Iterator[str]:
    """What a section names that its tenant does not see, with its place and what there is."""
    all_pools = tuple(pools)
    for where, quota in sections(tenants):
        there = {pool.name for pool in all_pools}
        no_pool = [*_unknown("it sees no pool", quota.pools or (), there, "pools")]
        # of pools that are not there nothing further can be said
        for fault in no_pool or _faults(quota, seen_by(quota, all_pools)):
            yield f"tenants.{where}.{fault}"


def _faults(quota: Quota, pools: list[Pool]) -> Iterator[str]:
    models = {model for pool in pools for model in pool.models}
    yield from _unknown("no model that it sees is called", quota.aliases.values(), models, "aliases")
    for alias in quota.aliases:
        if alias in models:
            yield f"aliases: {alias!r} is a model's own name; an alias must be another"
    names = {*models, *(alias for pool in pools for alias in pool.aliases), *quota.aliases}
    if quota.default_model is not None:
        yield from _unknown("it sees no model", (quota.default_model,), names, "default_model")
    yield from _unknown("it sees no pool", quota.policies, {pool.name for pool in pools}, "policies")


def _unknown(what: str, names: Iterable[str], there: set[str], field: str) -> Iterator[str]:
    for name in names:
        if name not in there:
            yield f"{field}: {unknown(what, name, there)}"
