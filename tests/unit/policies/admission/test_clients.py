"""Clients: how much each may take, under a virtual clock, and whose word tells them apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.buckets import Rate
from policies.admission.clients import Allowance, Clients, Limit, OverLimit, Visit, client_address

TWO_AT_ONCE = Allowance(concurrency=2)
ONE_IN_TEN_S = Allowance(requests=Rate(0.1, 2))


def entered(clients: Clients, name: str, now_s: float = 0.0) -> Visit:
    """A request that is let in."""
    visit = clients.enter(name, now_s)
    assert isinstance(visit, Visit)
    return visit


def refused(clients: Clients, name: str, now_s: float = 0.0) -> OverLimit:
    """One that is not."""
    over = clients.enter(name, now_s)
    assert isinstance(over, OverLimit)
    return over


def test_each_has_its_own_rate_and_is_told_when_to_come_again() -> None:
    """The burst at once, then as the rate says; whoever comes when told is let in. Others notice nothing."""
    clients = Clients(ONE_IN_TEN_S, 10)
    for _ in range(2):
        entered(clients, "a").ended(1.0)
    over = refused(clients, "a", 1.0)
    assert over == OverLimit(Limit.REQUESTS, pytest.approx(9.0))
    assert isinstance(clients.enter("a", 9.9), OverLimit)
    entered(clients, "a", 1.0 + over.retry_after_s)
    entered(clients, "b", 1.0)


def test_a_place_is_given_back_once() -> None:
    """However often it is said that the request is over."""
    clients = Clients(TWO_AT_ONCE, 10)
    first, _ = entered(clients, "a"), entered(clients, "a")
    over = refused(clients, "a")
    assert over.limit is Limit.CONCURRENCY
    assert over.retry_after_s == pytest.approx(0.5)  # half a request's usual second
    for _ in range(3):
        first.ended(5.0)
    entered(clients, "a")
    refused(clients, "a")


def test_where_both_limits_are_met_the_longer_wait_is_told() -> None:
    """Whichever that is."""
    slow_rate = Clients(Allowance(requests=Rate(0.01, 1), concurrency=1), 10)
    entered(slow_rate, "a")
    assert refused(slow_rate, "a") == OverLimit(Limit.REQUESTS, pytest.approx(100.0))
    slow_answers = Clients(Allowance(requests=Rate(5.0, 1), concurrency=1), 10)
    entered(slow_answers, "a")
    assert refused(slow_answers, "a") == OverLimit(Limit.CONCURRENCY, pytest.approx(1.0))


def test_a_flood_of_others_gives_nobody_more_places() -> None:
    """Clients with requests running are not forgotten; of the others the longest unseen are."""
    clients = Clients(TWO_AT_ONCE, 3)
    for _ in range(2):
        entered(clients, "a")
    for number in range(100):
        entered(clients, f"other {number}").ended(0.0)
    refused(clients, "a")
    assert len(clients) == 1 + 3


def test_forgetting_one_who_had_used_up_its_rate_is_counted() -> None:
    """It comes back with a full one; one that had made good for it would have that anyway."""
    clients = Clients(ONE_IN_TEN_S, 1)
    entered(clients, "a").ended(0.0)
    entered(clients, "b", 100.0).ended(100.0)
    assert clients.forgotten == 0
    entered(clients, "c", 101.0).ended(101.0)
    assert clients.forgotten == 1


def test_a_refusal_is_remembered_like_a_visit() -> None:
    """Who was turned away does not begin anew with the next request."""
    clients = Clients(ONE_IN_TEN_S, 10)
    for _ in range(2):
        entered(clients, "a").ended(0.0)
    for _ in range(5):
        refused(clients, "a")
    assert len(clients) == 1


def test_a_reload_keeps_what_runs_and_begins_a_changed_rate_anew() -> None:
    """A new limit on requests at once holds for those that are there."""
    clients = Clients(ONE_IN_TEN_S, 10)
    for _ in range(2):
        entered(clients, "a")
    clients.configure(Allowance(ONE_IN_TEN_S.requests, concurrency=2), 10)
    assert refused(clients, "a", 20.0).limit is Limit.CONCURRENCY
    clients.configure(ONE_IN_TEN_S, 10)
    for _ in range(2):
        entered(clients, "a", 20.0)
    assert refused(clients, "a", 20.0).limit is Limit.REQUESTS
    clients.configure(Allowance(Rate(0.1, 3)), 10)
    entered(clients, "a", 20.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 30)), max_size=60))
def test_nobody_ever_has_more_at_once_than_allowed_and_nothing_is_left_behind(
    happened: list[tuple[str, bool, int]],
) -> None:
    """Requests come and go in any order, with hardly anybody remembered between two visits."""
    clients, open_visits, running = Clients(TWO_AT_ONCE, 1), list[tuple[str, Visit]](), Counter[str]()
    for now_s, (name, comes, which) in enumerate(happened):
        if comes:
            outcome = clients.enter(name, now_s)
            assert isinstance(outcome, Visit) == (running[name] < 2)
            if isinstance(outcome, Visit):
                open_visits.append((name, outcome))
                running[name] += 1
        elif open_visits:
            left, visit = open_visits.pop(which % len(open_visits))
            visit.ended(now_s)
            running[left] -= 1
    for _, visit in open_visits:
        visit.ended(99.0)
    assert len(clients) <= 1


@pytest.mark.parametrize(
    ("forwarded_for", "trusted_hops", "address"),
    [
        ("203.0.113.7", 0, "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7", 0, "203.0.113.7"),  # what a client wrote itself is before what Envoy appends
        ("6.6.6.6, 203.0.113.7, 10.0.0.1", 1, "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7, 10.0.0.1, 10.0.0.2", 2, "203.0.113.7"),
        ("203.0.113.7", 1, "203.0.113.7"),  # who comes past the proxy is known by our own Envoy's word
        ("6.6.6.6, 203.0.113.7", 2, "203.0.113.7"),
        ("nonsense, 203.0.113.7", 1, "203.0.113.7"),
        ("203.0.113.7:4711", 0, "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", 0, "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::9]:4711", 0, "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.7", 0, "203.0.113.7"),
        ("fe80::1%eth0", 0, "fe80::/64"),
        ("1.2.3.4\0", 0, None),
        ("caf\u00e9", 0, None),
        ("unknown", 0, None),
        ("", 0, None),
        ("", 3, None),
    ],
)
def test_a_client_is_known_by_what_trusted_proxies_appended(
    forwarded_for: str, trusted_hops: int, address: str | None
) -> None:
    """Nothing that it writes itself changes its name."""
    assert client_address(forwarded_for, trusted_hops) == address
