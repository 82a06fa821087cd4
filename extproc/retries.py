"""The retry budgets of a running system, one per pool. They outlive config generations, by the pool's name.

Not here: how a budget works (policies/admission/retry_budget.py), and the retries themselves, which are Envoy's.
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.config.schema import Config
from policies.admission.retry_budget import RetryBudget


class RetryBudgets:
    """By pool."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._budgets: dict[str, RetryBudget] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Use new limits; what was seen stays. Pools that are gone are forgotten."""
        retries, before = config.retries, self._budgets
        self._budgets = {}
        for pool in config.pools:
            budget = before.get(pool.name) or RetryBudget(retries.budget, retries.budget_floor)
            budget.share, budget.floor = retries.budget, retries.budget_floor
            self._budgets[pool.name] = budget

    def admit(self, pool: str) -> bool:
        """One more request goes to this pool; whether it may be retried."""
        budget = self._budgets.get(pool)
        return budget is None or budget.admit(self._clock())

    def retried(self, pool: str, count: int) -> None:
        """So many retries of one of its requests were seen."""
        budget = self._budgets.get(pool)
        if budget is not None:
            budget.retried(count, self._clock())
