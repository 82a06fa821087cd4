"""A tenant's own view of the fleet: the models there are for it, their names, and the policies that place its requests.

Checked when the config is read, for each section of `tenants` (`default` and every named one). Not here: what a tenant
may take (quotas), and the view as a running system uses it (generations.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


def check_spaces(tenants: Tenants, pools: Iterable[Pool]) -> None:
    """Raise ValueError for a section that names what its tenant does not see, with its place and what there is."""
    all_pools = tuple(pools)
    for where, quota in sections(tenants):
        try:
            _refuse_unknown("it sees no pool", quota.pools or (), {pool.name for pool in all_pools}, "pools")
            _check(quota, seen_by(quota, all_pools))
        except ValueError as error:
            raise ValueError(f"tenants.{where}.{error}") from None


def _check(quota: Quota, pools: list[Pool]) -> None:
    models = {model for pool in pools for model in pool.models}
    _refuse_unknown("no model that it sees is called", quota.aliases.values(), models, "aliases")
    for alias in quota.aliases:
        if alias in models:
            raise ValueError(f"aliases: {alias!r} is a model's own name; an alias must be another")
    names = {*models, *(alias for pool in pools for alias in pool.aliases), *quota.aliases}
    if quota.default_model is not None:
        _refuse_unknown("it sees no model", (quota.default_model,), names, "default_model")
    _refuse_unknown("it sees no pool", quota.policies, {pool.name for pool in pools}, "policies")


def _refuse_unknown(what: str, names: Iterable[str], known: Iterable[str] | Mapping[str, object], field: str) -> None:
    there = set(known)
    for name in names:
        if name not in there:
            raise ValueError(f"{field}: {unknown(what, name, there)}")
