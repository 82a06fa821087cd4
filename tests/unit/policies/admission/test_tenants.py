"""Tenants: what each may take, under a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.buckets import Rate
from policies.admission.tenants import Charge, OverQuota, Quota, QuotaSpec, Tenants

FREE = QuotaSpec()


def tenants(spec: QuotaSpec, **rest: object) -> Tenants:
    """Accounts in which tenant `a` has these limits and others have none."""
    return Tenants({"a": spec}, FREE, **rest)  # type: ignore[arg-type]


def admitted(accounts: Tenants, tokens: float, now_s: float, tenant: str = "a") -> Charge:
    """A request that is let in."""
    charge = accounts.admit(tenant, tokens, now_s)
    assert isinstance(charge, Charge)
    return charge


def refused(accounts: Tenants, tokens: float, now_s: float) -> OverQuota:
    """One that is not."""
    over = accounts.admit("a", tokens, now_s)
    assert isinstance(over, OverQuota)
    return over


def test_requests_above_the_rate_are_told_when_to_come_again() -> None:
    """And when they do, they are let in; a moment before, not."""
    accounts = tenants(QuotaSpec(requests=Rate(per_s=2.0, burst=3.0)))
    for _ in range(3):
        admitted(accounts, 1.0, 0.0)
    over = refused(accounts, 1.0, 0.0)
    assert (over.quota, over.retry_after_s) == (Quota.REQUESTS, pytest.approx(0.5))
    assert refused(accounts, 1.0, 0.49).retry_after_s == pytest.approx(0.01)
    admitted(accounts, 1.0, 0.5)


def test_a_clock_that_is_set_back_stops_no_bucket() -> None:
    """A host that believed for a moment to be a day later: its tenants are not locked out until that day has come."""
    accounts = tenants(QuotaSpec(requests=Rate(per_s=2.0, burst=3.0)))
    for _ in range(3):
        admitted(accounts, 1.0, 86_400.0)
    assert refused(accounts, 1.0, 0.0).retry_after_s == pytest.approx(0.5)
    admitted(accounts, 1.0, 0.5)


def test_tokens_are_reserved_and_settled_by_what_was_used() -> None:
    """Less comes back; more is a debt, and nothing is admitted before it is worked off."""
    accounts = tenants(QuotaSpec(tokens=Rate(per_s=10.0, burst=100.0)))
    charge = admitted(accounts, 80.0, 0.0)
    assert refused(accounts, 50.0, 0.0).retry_after_s == pytest.approx(3.0)
    accounts.settle(charge, 30.0, 0.0)
    second = admitted(accounts, 70.0, 0.0)
    accounts.settle(second, 170.0, 0.0)
    over = refused(accounts, 1.0, 0.0)
    assert (over.quota, over.retry_after_s) == (Quota.TOKENS, pytest.approx(10.1))


def test_a_request_larger_than_the_bucket_is_let_out_of_a_full_one() -> None:
    """Else it could never go; it leaves a debt behind."""
    accounts = tenants(QuotaSpec(tokens=Rate(per_s=10.0, burst=100.0)))
    admitted(accounts, 500.0, 0.0)
    assert refused(accounts, 500.0, 0.0).retry_after_s == pytest.approx(50.0)


def test_a_failed_request_has_cost_nothing() -> None:
    """Neither tokens, nor its place, nor its turn."""
    accounts = tenants(QuotaSpec(requests=Rate(0.1, 1.0), tokens=Rate(1.0, 100.0), concurrency=1))
    charge = admitted(accounts, 100.0, 0.0)
    refused(accounts, 1.0, 0.0)
    accounts.refund(charge, 0.0)
    admitted(accounts, 100.0, 0.0)


def test_a_charge_is_settled_once() -> None:
    """Whoever comes second changes nothing."""
    accounts = tenants(QuotaSpec(tokens=Rate(1.0, 100.0), concurrency=2))
    charge = admitted(accounts, 60.0, 0.0)
    accounts.settle(charge, 50.0, 0.0)
    accounts.settle(charge, 0.0, 0.0)
    accounts.refund(charge, 0.0)
    assert accounts.running("a") == 0
    assert refused(accounts, 60.0, 0.0).retry_after_s == pytest.approx(10.0)


def test_requests_at_once_are_counted_and_the_wait_is_by_how_long_they_take() -> None:
    """Two at once that take four seconds each: one is over about every two."""
    accounts = tenants(QuotaSpec(concurrency=2))
    for turn in range(100):
        accounts.settle(admitted(accounts, 1.0, 4.0 * turn), 1.0, 4.0 * turn + 4.0)
    admitted(accounts, 1.0, 400.0)
    admitted(accounts, 1.0, 400.0)
    assert refused(accounts, 1.0, 400.0).retry_after_s == pytest.approx(2.0, rel=0.01)


def test_a_budget_is_full_again_with_the_next_period() -> None:
    """What is settled after the turn of the period was spent before it."""
    accounts = tenants(QuotaSpec(budget_tokens=100.0, budget_period_s=60.0))
    charge = admitted(accounts, 80.0, 50.0)
    over = refused(accounts, 30.0, 50.0)
    assert (over.quota, over.retry_after_s) == (Quota.BUDGET, pytest.approx(10.0))
    second = admitted(accounts, 100.0, 60.0)
    accounts.settle(charge, 1_000.0, 61.0)
    accounts.settle(second, 40.0, 61.0)
    admitted(accounts, 60.0, 61.0)


def test_a_request_larger_than_a_budget_takes_all_of_it() -> None:
    """Once per period; the wait that it is told comes true."""
    accounts = tenants(QuotaSpec(budget_tokens=100.0, budget_period_s=60.0))
    admitted(accounts, 500.0, 50.0)
    over = refused(accounts, 500.0, 50.0)
    admitted(accounts, 500.0, 50.0 + over.retry_after_s)


def test_only_who_may_borrow_takes_of_the_spare() -> None:
    """As much as there is; and what he brings back goes there."""
    spec = QuotaSpec(tokens=Rate(1.0, 10.0))
    accounts = Tenants({"a": spec, "b": QuotaSpec(tokens=spec.tokens, may_borrow=True)}, FREE, spare=Rate(1.0, 50.0))
    admitted(accounts, 10.0, 0.0)
    assert refused(accounts, 10.0, 0.0).quota is Quota.TOKENS
    admitted(accounts, 10.0, 0.0, "b")
    borrowed = admitted(accounts, 50.0, 0.0, "b")
    assert isinstance(accounts.admit("b", 50.0, 0.0), OverQuota)
    accounts.settle(borrowed, 0.0, 0.0)
    assert admitted(accounts, 50.0, 0.0, "b").borrowed


def test_one_tenants_flood_is_nothing_to_another() -> None:
    """His bucket is his own; those without limits have none."""
    accounts = Tenants({}, QuotaSpec(requests=Rate(1.0, 5.0), tokens=Rate(10.0, 100.0)))
    for _ in range(1_000):
        accounts.admit("flood", 1.0, 0.0)
    admitted(accounts, 100.0, 0.0, "calm")


def test_new_limits_apply_to_what_was_spent() -> None:
    """Those unchanged go on as they were; running requests stay counted."""
    old = QuotaSpec(requests=Rate(1.0, 2.0), tokens=Rate(1.0, 100.0))
    accounts = tenants(old)
    admitted(accounts, 100.0, 0.0)
    accounts.configure({"a": QuotaSpec(requests=Rate(1.0, 9.0), tokens=old.tokens, concurrency=2)}, FREE)
    assert refused(accounts, 10.0, 0.0).quota is Quota.TOKENS
    admitted(accounts, 1.0, 50.0)
    assert refused(accounts, 1.0, 50.0).quota is Quota.CONCURRENCY


def test_accounts_are_kept_up_to_a_bound() -> None:
    """Those with something running are never forgotten."""
    accounts = Tenants({}, QuotaSpec(concurrency=1), most_tenants=10)
    for number in range(5):
        admitted(accounts, 1.0, 0.0, f"busy{number}")
    for number in range(100):
        accounts.settle(admitted(accounts, 1.0, 0.0, f"idle{number}"), 1.0, 0.0)
    assert len(accounts._accounts) <= 10
    assert all(accounts.running(f"busy{number}") == 1 for number in range(5))


def test_a_newcomer_finds_room_among_busy_ones() -> None:
    """Though everybody there has something running; accounts are then as many as requests allow."""
    accounts = Tenants({}, QuotaSpec(concurrency=1), most_tenants=1)
    for number in range(3):
        admitted(accounts, 1.0, 0.0, f"t{number}")
    assert all(accounts.running(f"t{number}") == 1 for number in range(3))


def test_debts_are_remembered_longer_than_accounts_that_are_even() -> None:
    """Else a flood of other tenants would wipe out what one has spent; who is named is never forgotten."""
    spec = QuotaSpec(budget_tokens=100.0)
    accounts = Tenants({"named": spec}, spec, most_tenants=10)
    for tenant in ("named", "spender"):
        accounts.settle(admitted(accounts, 100.0, 0.0, tenant), 100.0, 0.0)
    for number in range(200):
        accounts.settle(admitted(accounts, 1.0, 0.0, f"t{number}"), 0.0, 0.0)
    for tenant in ("named", "spender"):
        assert isinstance(accounts.admit(tenant, 1.0, 0.0), OverQuota)
    assert len(accounts._accounts) <= 10


def test_named_and_busy_tenants_hide_nobody_that_may_be_forgotten() -> None:
    """However many of them have been unseen for longest: accounts stay within the bound, or a few beside it."""
    specs = {f"named{number}": FREE for number in range(70)}
    accounts = Tenants(specs, QuotaSpec(concurrency=1), most_tenants=300)
    for name in specs:
        accounts.settle(admitted(accounts, 1.0, 0.0, name), 1.0, 0.0)
    for number in range(130):
        admitted(accounts, 1.0, 0.0, f"busy{number}")
    most = 0
    for number in range(5_000):
        accounts.settle(admitted(accounts, 1.0, 0.0, f"t{number}"), 1.0, 0.0)
        most = max(most, len(accounts._accounts))
    assert most <= 300 + 200 // 64 + 1
    assert specs.keys() <= accounts._accounts.keys()
    assert all(accounts.running(f"busy{number}") == 1 for number in range(130))


def test_where_several_limits_are_met_the_longest_wait_is_told() -> None:
    """A moment for the request, an hour for the tokens: whoever comes again after the moment would do so in vain."""
    accounts = tenants(QuotaSpec(requests=Rate(2.0, 1.0), tokens=Rate(1.0, 5_000.0), concurrency=1))
    admitted(accounts, 5_000.0, 0.0)
    assert refused(accounts, 4_998.0, 0.0) == OverQuota(Quota.TOKENS, 4_998.0)


def test_who_borrows_is_held_to_his_other_limits_all_the_same() -> None:
    """Nothing is taken of the spare for a request that does not go."""
    spec = QuotaSpec(requests=Rate(0.5, 1.0), tokens=Rate(1.0, 10.0), may_borrow=True)
    accounts = tenants(spec, spare=Rate(1.0, 50.0))
    admitted(accounts, 10.0, 0.0)
    assert refused(accounts, 40.0, 0.0) == OverQuota(Quota.REQUESTS, 2.0)
    assert admitted(accounts, 40.0, 2.0).borrowed


RATES = st.none() | st.builds(Rate, st.floats(0.01, 10.0), st.floats(1.0, 1_000.0))


@given(
    st.builds(
        QuotaSpec,
        requests=RATES,
        tokens=RATES,
        budget_tokens=st.none() | st.floats(1.0, 1_000.0),
        budget_period_s=st.floats(1.0, 1_000.0),
    ),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(1.0, 500.0)), min_size=1, max_size=40),
)
def test_who_comes_again_when_told_is_let_in(spec: QuotaSpec, asked: list[tuple[float, float]]) -> None:
    """Whatever limits there are and however many are met."""
    accounts, now_s = tenants(spec), 0.0
    for pause_s, tokens in asked:
        now_s += pause_s
        over = accounts.admit("a", tokens, now_s)
        if isinstance(over, OverQuota):
            now_s += over.retry_after_s + 1e-3
            admitted(accounts, tokens, now_s)


def test_asking_takes_nothing() -> None:
    """The same answer as for a request, and no request."""
    accounts = tenants(QuotaSpec(requests=Rate(1.0, 1.0)))
    assert accounts.judge("a", 1.0, 0.0) is None
    assert accounts.judge("a", 1.0, 0.0) is None
    admitted(accounts, 1.0, 0.0)
    assert accounts.judge("a", 1.0, 0.0) == OverQuota(Quota.REQUESTS, 1.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "settle", "refund", "wait"]),
        st.sampled_from("abc"),
        st.floats(0.0, 50.0),
        st.integers(0, 5),
    ),
    max_size=120,
)


@given(STEPS)
def test_counts_are_exact_and_no_more_is_let_in_than_the_rate_gives(steps: list[tuple[str, str, float, int]]) -> None:
    """Over any history: running requests are those not settled; admissions stay below burst and rate times time."""
    spec = QuotaSpec(requests=Rate(2.0, 5.0), concurrency=4)
    accounts, now_s, open_charges, let_in = (
        Tenants({}, spec),
        0.0,
        list[tuple[str, Charge]](),
        dict.fromkeys("abc", 0.0),
    )
    for what, tenant, amount, which in steps:
        if what == "wait":
            now_s += amount / 50
        elif what == "admit":
            charge = accounts.admit(tenant, amount, now_s)
            if isinstance(charge, Charge):
                open_charges.append((tenant, charge))
                let_in[tenant] += 1
        elif open_charges:
            whose, charge = open_charges.pop(which % len(open_charges))
            if what == "settle":
                accounts.settle(charge, amount, now_s)
            else:
                accounts.refund(charge, now_s)
                let_in[whose] -= 1
    for tenant in "abc":
        assert accounts.running(tenant) == sum(whose == tenant for whose, _ in open_charges) <= 4
        assert let_in[tenant] <= 5.0 + 2.0 * now_s + 1e-6


def test_a_request_that_is_over_makes_room_before_its_usage_is_known() -> None:
    """The usage comes with the access log, a moment later; it is settled by that alone."""
    accounts = tenants(QuotaSpec(concurrency=1, tokens=Rate(1.0, 100.0)))
    charge = admitted(accounts, 60.0, 0.0)
    charge.ended()
    charge.ended()
    assert accounts.running("a") == 0
    accounts.settle(admitted(accounts, 10.0, 0.0), 10.0, 0.0)
    accounts.settle(charge, 20.0, 0.0)
    assert refused(accounts, 100.0, 0.0).retry_after_s == pytest.approx(30.0)
