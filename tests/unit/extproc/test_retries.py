"""Retry budgets by pool: what a reload changes and what it keeps."""

from __future__ import annotations

from extproc.config.loading import parse
from extproc.config.schema import Config
from extproc.retries import RetryBudgets


def config(retries: str, *pools: str) -> Config:
    """A config with these pools."""
    listed = ", ".join(f"{{name: {pool}, models: [{pool}], endpoints: {{static: []}}}}" for pool in pools)
    return parse(f"retries: {retries}\npools: [{listed}]")


def test_a_reload_keeps_what_was_seen_and_changes_the_limits() -> None:
    """Two retries use a floor of two up, but not one of three."""
    budgets = RetryBudgets(config("{budget: 0, budget_floor: 2}", "a"), lambda: 5.0)
    budgets.retried("a", 2)
    assert not budgets.admit("a")
    budgets.configure(config("{budget: 0, budget_floor: 3}", "a", "b"))
    assert budgets.admit("a")
    budgets.retried("a", 1)
    assert not budgets.admit("a")
    assert budgets.admit("b")


def test_a_pool_that_is_gone_is_forgotten() -> None:
    """Its last requests neither fail nor bring it back; under the same name it begins anew."""
    budgets = RetryBudgets(config("{budget: 0, budget_floor: 1}", "a"), lambda: 5.0)
    budgets.retried("a", 1)
    budgets.configure(config("{budget: 0, budget_floor: 1}", "b"))
    budgets.retried("a", 1)
    assert budgets.admit("a")
    budgets.configure(config("{budget: 0, budget_floor: 1}", "a"))
    assert budgets.admit("a")
