"""What a tenant may take: requests and tokens over time, requests at once, a budget per period.

Tokens are reserved at admission by what the request is predicted to use, and corrected when it is known what it used:
less comes back, more becomes a debt that the bucket works off before it admits again. Every charge is settled exactly
once, whatever becomes of its request:

- answered: by the usage that the engine reports, or an estimate where it reports none;
- failed before any of the answer: refunded whole, the request too;
- abandoned by the client: as answered, for the engine has worked.

A tenant has what is his and nothing of another's; `spare` is a bucket of its own that those who are allowed to may
take from when theirs is empty.

Who the tenant is, is decided elsewhere (extproc/access). State is kept for as many tenants as `most_tenants` allows. Of
those longest unseen one is forgotten who owes nothing, whose account tells no more than a new one; those named in the
config and those with requests running are not forgotten at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from policies.admission.buckets import Bucket, Mean, Rate


class Quota(StrEnum):
    """Which limit a tenant has reached: the bounded label set of metrics."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class QuotaSpec:
    """Limits of one tenant; None sets none.

    `budget_tokens` per period of `budget_period_s`, counted from the epoch of the clock that is passed in.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None
    budget_tokens: float | None = None
    budget_period_s: float = 86_400.0
    may_borrow: bool = False


@dataclass(frozen=True, slots=True)
class OverQuota:
    """A request that its tenant may not make now, and when he should come again."""

    quota: Quota
    retry_after_s: float


@dataclass(slots=True)
class _Account:
    """One tenant's state. `spent` in the budget's present period."""

    spec: QuotaSpec
    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0
    period: int = 0
    spent: float = 0.0
    duration_s: Mean = field(default_factory=Mean)

    def owes_nothing(self, now_s: float) -> bool:
        """Its buckets are full and its budget is untouched: a new account would be the same."""
        full = all(bucket is None or bucket.is_full(now_s) for bucket in (self.requests, self.tokens))
        return full and not (self.spent and self.spec.budget_tokens)


@dataclass(slots=True)
class Charge:
    """What one request has taken; it hangs on its flight.

    `ended` when the request is over, settled when its usage is known; each counts once.
    """

    account: _Account
    tokens: float
    since_s: float
    borrowed: bool
    period: int
    running: bool = True
    settled: bool = False

    def ended(self) -> None:
        """Give its place among the tenant's running requests back."""
        if self.running:
            self.running = False
            self.account.running -= 1


_LOOKED_AT = 64
"""Accounts that are looked at for one to forget: a flood of new tenants must not cost a walk over all for each."""


class Tenants:
    """The accounts. `specs` by tenant, `default` for all others; every call takes the time in seconds of one clock."""

    def __init__(
        self,
        specs: Mapping[str, QuotaSpec],
        default: QuotaSpec,
        *,
        spare: Rate | None = None,
        most_tenants: int = 10_000,
    ) -> None:
        self._specs = specs
        self._default = default
        self._spare_rate = spare
        self._spare: Bucket | None = None
        self._most_tenants = most_tenants
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def configure(self, specs: Mapping[str, QuotaSpec], default: QuotaSpec, *, spare: Rate | None = None) -> None:
        """Use new limits: what runs and what was spent stays, buckets whose rate has changed begin full."""
        self._specs, self._default = specs, default
        if spare != self._spare_rate:
            self._spare_rate, self._spare = spare, None
        for tenant, account in self._accounts.items():
            self._adopt(account, self._spec(tenant))

    def admit(self, tenant: str, tokens: float, now_s: float) -> Charge | OverQuota:
        """Take one request of so many predicted tokens, or say which limit it meets."""
        account = self._account(tenant, now_s)
        over, borrows = self._verdict(account, tokens, now_s)
        if over is not None:
            return over
        account.running += 1
        if account.requests is not None:
            account.requests.take(1.0, now_s)
        charge = Charge(account, tokens, now_s, borrows, account.period)
        self._take_tokens(charge, tokens, now_s)
        return charge

    def judge(self, tenant: str, tokens: float, now_s: float) -> OverQuota | None:
        """Which limit a request of so many tokens would meet; takes nothing."""
        return self._verdict(self._account(tenant, now_s), tokens, now_s)[0]

    def settle(self, charge: Charge, used_tokens: float, now_s: float, *, ended_s: float | None = None) -> None:
        """The request is over, now or since `ended_s`, and has used so much."""
        if self._settles(charge):
            charge.account.duration_s.saw((now_s if ended_s is None else ended_s) - charge.since_s)
            self._take_tokens(charge, used_tokens - charge.tokens, now_s)

    def refund(self, charge: Charge, now_s: float) -> None:
        """The request came to nothing, and not by its client's doing: it has cost nothing."""
        if self._settles(charge):
            self._take_tokens(charge, -charge.tokens, now_s)
            if charge.account.requests is not None:
                charge.account.requests.take(-1.0, now_s)

    def describe(self, now_s: float) -> dict[str, dict[str, float | None]]:
        """What each tenant seen of late has running, has left and has spent, to a tenth."""
        return {
            tenant: {
                "running": account.running,
                "requests_left": _left(account.requests, now_s),
                "tokens_left": _left(account.tokens, now_s),
                "budget_spent_tokens": round(account.spent, 1) if account.spec.budget_tokens is not None else None,
            }
            for tenant, account in self._accounts.items()
        }

    def running(self, tenant: str) -> int:
        """How many of his requests are admitted and not over."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.running

    # -- inside

    def _verdict(self, account: _Account, tokens: float, now_s: float) -> tuple[OverQuota | None, bool]:
        """The limit that is met for longest, if one is; and whether the request's tokens are borrowed."""
        met = list(self._met(account, tokens, now_s))
        if not met:
            return None, False
        borrows = any(over.quota is Quota.TOKENS for over in met) and self._may_borrow(account, tokens, now_s)
        if borrows:
            met = [over for over in met if over.quota is not Quota.TOKENS]
        over = max(met, key=_retry_after_s, default=None)
        return over, borrows and over is None

    def _met(self, account: _Account, tokens: float, now_s: float) -> Iterator[OverQuota]:
        """Every limit: told of one alone, he would come again for nothing."""
        spec = account.spec
        if spec.concurrency is not None and account.running >= spec.concurrency:
            yield OverQuota(Quota.CONCURRENCY, account.duration_s.value / max(spec.concurrency, 1))
        # one that wants more than a whole budget may have it, or it would be told for ever to come again
        if spec.budget_tokens is not None and account.spent + min(tokens, spec.budget_tokens) > spec.budget_tokens:
            yield OverQuota(Quota.BUDGET, (account.period + 1) * spec.budget_period_s - now_s)
        for quota, bucket, amount in (
            (Quota.REQUESTS, account.requests, 1.0),
            (Quota.TOKENS, account.tokens, tokens),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
            if wait_s:
                yield OverQuota(quota, wait_s)

    def _may_borrow(self, account: _Account, tokens: float, now_s: float) -> bool:
        if not account.spec.may_borrow or self._spare_rate is None:
            return False
        if self._spare is None:
            self._spare = Bucket(self._spare_rate, now_s)
        return not self._spare.wait_s(tokens, now_s)

    def _take_tokens(self, charge: Charge, tokens: float, now_s: float) -> None:
        account = charge.account
        bucket = self._spare if charge.borrowed else account.tokens
        if bucket is not None:
            bucket.take(tokens, now_s)
        if charge.period == account.period:  # what was admitted in an earlier period has been counted there
            account.spent = max(account.spent + tokens, 0.0)

    @staticmethod
    def _settles(charge: Charge) -> bool:
        """Whether this is the one time; its place is given back with it, if it was not before."""
        charge.ended()
        first, charge.settled = not charge.settled, True
        return first

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            self._make_room(now_s)
            account = self._accounts[tenant] = _Account(self._spec(tenant))
        self._accounts.move_to_end(tenant)
        spec = account.spec
        account.requests = account.requests or _bucket(spec.requests, now_s)
        account.tokens = account.tokens or _bucket(spec.tokens, now_s)
        period = int(now_s // spec.budget_period_s)
        if period != account.period:
            account.period, account.spent = period, 0.0
        return account

    def _make_room(self, now_s: float) -> None:
        """Forget of those longest unseen, if there are as many as may be: who owes nothing rather than another.

        Never one with requests running, nor one that is named: there are as many of these as the config has. They go
        to the end of the line, or as many as are looked at would hide all others; what is one too many for that is
        made up for by the next newcomers.
        """
        excess = len(self._accounts) - self._most_tenants + 1
        if excess <= 0:
            return
        unseen = list(islice(self._accounts.items(), _LOOKED_AT))
        idle = [(name, one) for name, one in unseen if not one.running and name not in self._specs]
        if len(idle) > 1:
            idle.sort(key=lambda item: not item[1].owes_nothing(now_s))
        for name, _ in idle[:excess]:
            del self._accounts[name]
        for name, account in unseen:
            if account.running or name in self._specs:
                self._accounts.move_to_end(name)

    def _spec(self, tenant: str) -> QuotaSpec:
        return self._specs.get(tenant, self._default)

    @staticmethod
    def _adopt(account: _Account, spec: QuotaSpec) -> None:
        if account.spec.requests != spec.requests:
            account.requests = None
        if account.spec.tokens != spec.tokens:
            account.tokens = None
        account.spec = spec


def _retry_after_s(over: OverQuota) -> float:
    return over.retry_after_s


def _left(bucket: Bucket | None, now_s: float) -> float | None:
    """What a bucket holds; less than nothing if it is in debt."""
    return None if bucket is None else round(bucket.level(now_s), 1)


def _bucket(rate: Rate | None, now_s: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, now_s)
