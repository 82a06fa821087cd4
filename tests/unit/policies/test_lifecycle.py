"""The life-cycle: which evidence leads where, and where none does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.lifecycle import Evidence, Lifecycle, State, Thresholds

STARTING, READY, DRAINING, UNHEALTHY, STOPPED = State
THRESHOLDS = Thresholds(failed_probes=3, failed_requests=2)


def in_state(state: State) -> Lifecycle:
    """An endpoint brought to `state` by evidence."""
    lifecycle = Lifecycle(THRESHOLDS)
    path = {
        STARTING: [],
        READY: [Evidence.PROBE_OK],
        DRAINING: [Evidence.PROBE_OK, Evidence.DRAIN],
        UNHEALTHY: [Evidence.PROBE_OK, Evidence.PROBE_REFUSED],
        STOPPED: [Evidence.REMOVED],
    }[state]
    for evidence in path:
        lifecycle.observe(evidence, 1.0)
    assert lifecycle.state is state
    return lifecycle


MOVES = {
    (STARTING, Evidence.PROBE_OK): READY,
    (STARTING, Evidence.DRAIN): DRAINING,
    (STARTING, Evidence.REMOVED): STOPPED,
    (READY, Evidence.PROBE_REFUSED): UNHEALTHY,
    (READY, Evidence.DRAIN): DRAINING,
    (READY, Evidence.REMOVED): STOPPED,
    (UNHEALTHY, Evidence.PROBE_OK): READY,
    (UNHEALTHY, Evidence.DRAIN): DRAINING,
    (UNHEALTHY, Evidence.REMOVED): STOPPED,
    (DRAINING, Evidence.UNDRAIN): STARTING,
    (DRAINING, Evidence.REMOVED): STOPPED,
    (STOPPED, Evidence.LISTED): STARTING,
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("evidence", Evidence)
def test_one_piece_of_evidence_leads_where_the_diagram_says(state: State, evidence: Evidence) -> None:
    """Every pair of state and evidence; what the table does not name changes nothing."""
    lifecycle = in_state(state)
    expected = MOVES.get((state, evidence), state)
    assert lifecycle.observe(evidence, 9.0) is (expected is not state)
    assert lifecycle.state is expected
    assert lifecycle.since_s == (9.0 if expected is not state else 1.0 if state is not STARTING else 0.0)


def test_a_new_endpoint_starts_unprobed() -> None:
    """Listed is not enough to take traffic."""
    lifecycle = Lifecycle(THRESHOLDS, since_s=5.0)
    assert (lifecycle.state, lifecycle.since_s, lifecycle.reason) == (STARTING, 5.0, "not probed yet")


def test_the_third_failed_probe_in_a_row_is_one_too_many() -> None:
    """Two are forgiven; the reason counts them."""
    lifecycle = in_state(READY)
    assert [lifecycle.observe(Evidence.PROBE_FAILED, 2.0) for _ in range(3)] == [False, False, True]
    assert lifecycle.state is UNHEALTHY
    assert lifecycle.reason == "3 probes failed in a row"


def test_a_good_probe_between_failed_ones_starts_the_count_anew() -> None:
    """In a row means in a row."""
    lifecycle = in_state(READY)
    for _ in range(5):
        lifecycle.observe(Evidence.PROBE_FAILED, 2.0)
        lifecycle.observe(Evidence.PROBE_FAILED, 2.0)
        lifecycle.observe(Evidence.PROBE_OK, 2.0)
    assert lifecycle.state is READY


def test_failed_requests_in_a_row_take_an_endpoint_out() -> None:
    """Real requests count as probes do, though the model list still answers."""
    lifecycle = in_state(READY)
    lifecycle.observe(Evidence.FAILED, 2.0)
    lifecycle.observe(Evidence.PROBE_OK, 2.0)
    assert lifecycle.observe(Evidence.FAILED, 3.0)
    assert (lifecycle.state, lifecycle.reason) == (UNHEALTHY, "2 requests failed in a row")


def test_a_served_request_starts_the_count_of_failed_ones_anew() -> None:
    """Every other request failing is bad, but not dead."""
    lifecycle = in_state(READY)
    for _ in range(5):
        lifecycle.observe(Evidence.FAILED, 2.0)
        lifecycle.observe(Evidence.SERVED, 2.0)
    assert lifecycle.state is READY


def test_probes_and_requests_are_counted_apart() -> None:
    """Two failed probes and one failed request are under both bounds."""
    lifecycle = in_state(READY)
    lifecycle.observe(Evidence.PROBE_FAILED, 2.0)
    lifecycle.observe(Evidence.PROBE_FAILED, 2.0)
    lifecycle.observe(Evidence.FAILED, 2.0)
    assert lifecycle.state is READY


def test_failures_from_before_the_return_do_not_count_after_it() -> None:
    """An endpoint that came back through a probe has its full allowance again."""
    lifecycle = in_state(READY)
    for _ in range(7):
        lifecycle.observe(Evidence.FAILED, 2.0)
    lifecycle.observe(Evidence.PROBE_OK, 3.0)
    assert lifecycle.state is READY
    assert not lifecycle.observe(Evidence.FAILED, 4.0)
    assert lifecycle.observe(Evidence.FAILED, 5.0)


def test_refused_connections_are_felt_at_once_and_say_why() -> None:
    """Nothing listens: no need to wait for a third."""
    lifecycle = in_state(READY)
    lifecycle.observe(Evidence.PROBE_REFUSED, 2.0)
    assert lifecycle.reason == "connection refused"


def test_a_drained_endpoint_needs_a_probe_to_come_back() -> None:
    """Taking the drain back is not evidence of health."""
    lifecycle = in_state(DRAINING)
    lifecycle.observe(Evidence.UNDRAIN, 2.0)
    assert lifecycle.state is STARTING
    lifecycle.observe(Evidence.PROBE_OK, 3.0)
    assert lifecycle.state is READY


@settings(deadline=None)
@given(
    evidence=st.lists(st.sampled_from(Evidence), max_size=60),
    thresholds=st.builds(Thresholds, st.integers(1, 4), st.integers(1, 4)),
)
def test_no_history_breaks_the_rules(evidence: list[Evidence], thresholds: Thresholds) -> None:
    """Ready only by a good probe, a drain ends only by undrain or removal, stopped ends only by being listed."""
    lifecycle = Lifecycle(thresholds)
    for moment, seen in enumerate(evidence):
        before, since_s = lifecycle.state, lifecycle.since_s
        changed = lifecycle.observe(seen, float(moment))
        after = lifecycle.state
        assert changed is (after is not before)
        assert lifecycle.since_s == (float(moment) if changed else since_s)
        if after is READY and changed:
            assert seen is Evidence.PROBE_OK
        if before is DRAINING and changed:
            assert (seen, after) in {(Evidence.UNDRAIN, STARTING), (Evidence.REMOVED, STOPPED)}
        if before is STOPPED and changed:
            assert (seen, after) == (Evidence.LISTED, STARTING)
        if after is UNHEALTHY and changed:
            assert before is READY
        if seen is Evidence.REMOVED:
            assert after is STOPPED


@settings(deadline=None)
@given(st.lists(st.sampled_from([Evidence.PROBE_OK, Evidence.PROBE_FAILED, Evidence.SERVED, Evidence.FAILED])))
def test_a_ready_endpoint_has_failed_less_often_than_allowed(evidence: list[Evidence]) -> None:
    """In no history is an endpoint Ready with a full row of failures behind it."""
    lifecycle = in_state(READY)
    for seen in evidence:
        lifecycle.observe(seen, 1.0)
        if lifecycle.state is READY:
            assert lifecycle.failed_probes < THRESHOLDS.failed_probes
            assert lifecycle.failed_requests < THRESHOLDS.failed_requests
