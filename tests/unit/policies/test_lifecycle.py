"""The life-cycle: which evidence leads where, and where none does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.breakers import BreakerSpec
from policies.lifecycle import LONGEST_COOLDOWN_S, TAKE_TRAFFIC, Evidence, Lifecycle, State, Thresholds

STARTING, READY, DRAINING, UNHEALTHY, STOPPED, LOADING, WARMING, DEGRADED = State
THRESHOLDS = Thresholds(failed_probes=3, failed_requests=2, cooldown_s=5.0)
WARMED = Thresholds(failed_probes=3, failed_requests=2, cooldown_s=5.0, warm_up_requests=4)


def in_state(state: State) -> Lifecycle:
    """An endpoint brought to `state` by evidence."""
    lifecycle = Lifecycle(WARMED if state is WARMING else THRESHOLDS)
    path = {
        STARTING: [],
        READY: [Evidence.PROBE_OK],
        DRAINING: [Evidence.PROBE_OK, Evidence.DRAIN],
        UNHEALTHY: [Evidence.PROBE_OK, Evidence.PROBE_REFUSED],
        STOPPED: [Evidence.REMOVED],
        LOADING: [Evidence.NO_MODEL],
        WARMING: [Evidence.PROBE_OK],
        DEGRADED: [Evidence.PROBE_OK, Evidence.SPARED],
    }[state]
    for evidence in path:
        lifecycle.observe(evidence, 1.0)
    assert lifecycle.state is state
    return lifecycle


MOVES = {
    (STARTING, Evidence.PROBE_OK): READY,
    (STARTING, Evidence.DRAIN): DRAINING,
    (STARTING, Evidence.REMOVED): STOPPED,
    (STARTING, Evidence.NO_MODEL): LOADING,
    (STARTING, Evidence.LOADING): LOADING,
    (LOADING, Evidence.PROBE_OK): READY,
    (LOADING, Evidence.PROBE_REFUSED): STARTING,
    (LOADING, Evidence.DRAIN): DRAINING,
    (LOADING, Evidence.REMOVED): STOPPED,
    **{
        (serving, evidence): after
        for serving in (READY, WARMING, DEGRADED)
        for evidence, after in (
            (Evidence.UNFIT, UNHEALTHY),
            (Evidence.STUCK, UNHEALTHY),
            (Evidence.TRIPPED, UNHEALTHY),
            (Evidence.SPARED, DEGRADED),
            (Evidence.NO_MODEL, LOADING),
            (Evidence.LOADING, LOADING),
            (Evidence.PROBE_REFUSED, UNHEALTHY),
            (Evidence.DRAIN, DRAINING),
            (Evidence.REMOVED, STOPPED),
        )
    },
    (DEGRADED, Evidence.RESTARTED): READY,
    (UNHEALTHY, Evidence.PROBE_OK): READY,
    (UNHEALTHY, Evidence.LOADING): LOADING,
    (UNHEALTHY, Evidence.DRAIN): DRAINING,
    (UNHEALTHY, Evidence.REMOVED): STOPPED,
    (DRAINING, Evidence.UNDRAIN): STARTING,
    (DRAINING, Evidence.REMOVED): STOPPED,
    (STOPPED, Evidence.LISTED): STARTING,
}


def test_what_an_engine_served_before_counts_as_warm_up() -> None:
    """By its own count: it need not serve it once more. But not what its process before has served."""
    lifecycle = Lifecycle(WARMED)
    lifecycle.warmed_by(4)
    lifecycle.observe(Evidence.PROBE_OK, 1.0)
    assert lifecycle.state is READY
    lifecycle.observe(Evidence.LOADING, 2.0)
    lifecycle.observe(Evidence.PROBE_OK, 3.0)
    assert (lifecycle.state, lifecycle.share) == (WARMING, 0.1)
    lifecycle.warmed_by(3)
    assert not lifecycle.observe(Evidence.WARMED, 4.0)
    assert lifecycle.share == 0.75
    lifecycle.warmed_by(4)
    assert lifecycle.observe(Evidence.WARMED, 5.0)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("evidence", Evidence)
def test_one_piece_of_evidence_leads_where_the_diagram_says(state: State, evidence: Evidence) -> None:
    """Every pair of state and evidence; what the table does not name changes nothing."""
    lifecycle = in_state(state)
    expected = MOVES.get((state, evidence), state)
    assert lifecycle.observe(evidence, 9.0) is (expected is not state)
    assert lifecycle.state is expected
    assert lifecycle.since_s == (9.0 if expected is not state else 1.0 if state is not STARTING else 0.0)


def test_a_cold_engine_warms_up_by_what_it_serves() -> None:
    """A tenth of its share at first, then in proportion; at the fourth answer it is as good as any."""
    lifecycle = in_state(WARMING)
    shares = []
    for _ in range(4):
        shares.append(lifecycle.share)
        lifecycle.observe(Evidence.SERVED, 2.0)
    assert shares == [0.1, 0.25, 0.5, 0.75]
    assert (lifecycle.state, lifecycle.share) == (READY, 1.0)


@pytest.mark.parametrize(("evidence", "after"), [(Evidence.PROBE_FAILED, READY), (Evidence.PROBE_REFUSED, WARMING)])
def test_only_an_engine_that_is_cold_again_warms_up_again(evidence: Evidence, after: State) -> None:
    """Who did not answer for a while still has its cache; who refused connections is another process."""
    lifecycle = in_state(WARMING)
    for _ in range(4):
        lifecycle.observe(Evidence.SERVED, 2.0)
    for _ in range(3):
        lifecycle.observe(evidence, 3.0)
    lifecycle.observe(Evidence.PROBE_OK, 4.0)
    assert lifecycle.state is after


def test_a_500_takes_an_endpoint_out_until_a_trial() -> None:
    """An engine that shuts down lists its model to the end; and there is no rest, for it may have been the request."""
    lifecycle = in_state(READY)
    assert not lifecycle.wants_trial(1.0)
    lifecycle.observe(Evidence.UNFIT, 2.0)
    assert lifecycle.state is UNHEALTHY
    assert lifecycle.wants_trial(2.0)
    lifecycle.observe(Evidence.PROBE_OK, 2.1)
    assert lifecycle.state is READY


def test_who_passes_trials_and_fails_requests_rests() -> None:
    """The second 500 in a row is one too many, whatever trials said in between; a request served ends the row."""
    lifecycle = in_state(READY)
    for evidence in (Evidence.UNFIT, Evidence.PROBE_OK, Evidence.SERVED, Evidence.UNFIT, Evidence.PROBE_OK):
        lifecycle.observe(evidence, 2.0)
    assert lifecycle.state is READY
    lifecycle.observe(Evidence.UNFIT, 3.0)
    assert not lifecycle.wants_trial(7.9)
    assert lifecycle.wants_trial(8.0)


@pytest.mark.parametrize("state", State)
def test_trials_are_for_those_that_want_traffic_and_get_none(state: State) -> None:
    """Not for those in service, nor for those that are to get none."""
    assert in_state(state).wants_trial(9.0) is (state in {STARTING, LOADING, UNHEALTHY})


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
    assert (lifecycle.state, lifecycle.reason) == (UNHEALTHY, "2 requests failed in a row, out for 5 s")


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
    lifecycle.observe(Evidence.PROBE_OK, 7.0)
    assert lifecycle.state is READY
    assert not lifecycle.observe(Evidence.FAILED, 8.0)
    assert lifecycle.observe(Evidence.FAILED, 9.0)


# -- the rest after failed requests


def fall(lifecycle: Lifecycle, now_s: float) -> None:
    """Requests fail until a ready endpoint is out."""
    assert lifecycle.state is READY
    for _ in range(THRESHOLDS.failed_requests):
        lifecycle.observe(Evidence.FAILED, now_s)
    assert lifecycle.state is UNHEALTHY


def back_after_s(lifecycle: Lifecycle, now_s: float) -> float:
    """How long good probes, ten a second, take to bring it back."""
    for tenth in range(10_000):
        if lifecycle.observe(Evidence.PROBE_OK, now_s + tenth / 10):
            return tenth / 10
    raise AssertionError("never back")


def test_an_endpoint_that_fails_requests_rests_though_its_probes_are_good() -> None:
    """A model list says nothing of generation; without the rest it would be back within half a second."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    assert not lifecycle.observe(Evidence.PROBE_OK, 14.9)
    assert lifecycle.observe(Evidence.PROBE_OK, 15.0)
    assert lifecycle.state is READY


def test_each_fall_in_a_row_doubles_the_rest_to_a_bound() -> None:
    """A broken engine gets less and less to fail; the hundredth fall is no worse than the fifth."""
    lifecycle, now_s, rests = in_state(READY), 10.0, []
    for _ in range(100):
        fall(lifecycle, now_s)
        rests.append(back_after_s(lifecycle, now_s))
        now_s += rests[-1]
    assert rests == [5, 10, 20, 40, *[60] * 96]


def test_a_request_served_after_the_return_ends_the_row_of_falls() -> None:
    """It is healed: the next rest is the short one."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    lifecycle.observe(Evidence.PROBE_OK, 15.0)
    lifecycle.observe(Evidence.SERVED, 16.0)
    fall(lifecycle, 20.0)
    assert back_after_s(lifecycle, 20.0) == 5


def test_a_request_served_while_out_does_not() -> None:
    """It was begun before the fall."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    lifecycle.observe(Evidence.SERVED, 11.0)
    lifecycle.observe(Evidence.PROBE_OK, 15.0)
    fall(lifecycle, 20.0)
    assert back_after_s(lifecycle, 20.0) == 10


def test_failures_while_out_do_not_prolong_the_rest() -> None:
    """Requests begun before the fall fail later; the rest counts from the fall."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    for _ in range(9):
        lifecycle.observe(Evidence.FAILED, 14.0)
    assert lifecycle.observe(Evidence.PROBE_OK, 15.0)


@pytest.mark.parametrize("evidence", [Evidence.PROBE_REFUSED, Evidence.RESTARTED])
def test_a_restart_ends_the_rest(evidence: Evidence) -> None:
    """Another process answers there: it is back with its first good probe, not seconds later."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    lifecycle.observe(evidence, 10.5)
    assert lifecycle.observe(Evidence.PROBE_OK, 10.6)
    assert lifecycle.state is READY


@pytest.mark.parametrize("probes", [[Evidence.PROBE_REFUSED], [Evidence.PROBE_FAILED] * 3], ids=["refused", "failed"])
def test_an_endpoint_taken_out_by_its_probes_is_back_with_the_first_good_one(probes: list[Evidence]) -> None:
    """Also after falls: what took it out is what brings it back."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    lifecycle.observe(Evidence.PROBE_OK, 15.0)
    for evidence in probes:
        lifecycle.observe(evidence, 16.0)
    assert lifecycle.state is UNHEALTHY
    assert lifecycle.observe(Evidence.PROBE_OK, 16.1)


@pytest.mark.parametrize("pair", [(Evidence.DRAIN, Evidence.UNDRAIN), (Evidence.REMOVED, Evidence.LISTED)])
def test_an_endpoint_taken_in_anew_does_not_rest(pair: tuple[Evidence, Evidence]) -> None:
    """The operator or the discovery source says so; its row of falls is over too."""
    lifecycle = in_state(READY)
    fall(lifecycle, 10.0)
    for evidence in (*pair, Evidence.PROBE_OK):
        lifecycle.observe(evidence, 10.1)
    assert lifecycle.state is READY
    fall(lifecycle, 20.0)
    assert back_after_s(lifecycle, 20.0) == 5


def test_no_cooldown_is_no_rest() -> None:
    """Configured to 0, the first good probe brings it back."""
    lifecycle = in_state(READY)
    lifecycle.thresholds = Thresholds(3, 2, 0.0)
    fall(lifecycle, 10.0)
    assert lifecycle.observe(Evidence.PROBE_OK, 10.0)


# -- timeouts in a row, and the breaker

PATIENT = Thresholds(failed_requests=3, timeouts=3)
BREAKER = BreakerSpec(error_ratio=0.1, window_s=120.0, least_requests=20, open_s=180.0)
BROKEN = Thresholds(failed_requests=3, breaker=BREAKER)


def serving(thresholds: Thresholds) -> Lifecycle:
    """An endpoint in service."""
    lifecycle = Lifecycle(thresholds)
    lifecycle.observe(Evidence.PROBE_OK, 0.0)
    return lifecycle


def flaky(lifecycle: Lifecycle, now_s: float, *, good: int = 9) -> bool:
    """Requests of which every so many end badly, until it errs too much or 200 have ended; whether it does."""
    for number in range(200):
        failed = number % (good + 1) == good
        lifecycle.observe(Evidence.FAILED if failed else Evidence.SERVED, now_s)
        if failed and lifecycle.errs_too_much(now_s):
            return True
    return False


def tripped(now_s: float = 100.0) -> Lifecycle:
    """An endpoint that its breaker has taken out."""
    lifecycle = serving(BROKEN)
    assert flaky(lifecycle, now_s, good=4)
    assert lifecycle.observe(Evidence.TRIPPED, now_s)
    return lifecycle


def test_timeouts_in_a_row_degrade_an_endpoint() -> None:
    """It is not out, and gets little; they are no failed requests, which would take it out."""
    lifecycle = serving(PATIENT)
    for evidence in (Evidence.TIMED_OUT, Evidence.TIMED_OUT, Evidence.SERVED, Evidence.TIMED_OUT, Evidence.TIMED_OUT):
        lifecycle.observe(evidence, 1.0)
    assert (lifecycle.state, lifecycle.share) == (READY, 1.0)
    assert lifecycle.observe(Evidence.TIMED_OUT, 2.0)
    assert (lifecycle.state, lifecycle.share) == (DEGRADED, 0.1)
    assert lifecycle.reason == "3 requests in a row were not answered in time"


def test_a_degraded_endpoint_is_back_once_it_has_served_as_many_in_a_row() -> None:
    """A failure in between begins the row anew, whatever kind it is."""
    lifecycle = serving(PATIENT)
    for _ in range(5):
        lifecycle.observe(Evidence.TIMED_OUT, 1.0)
    for evidence in (Evidence.SERVED, Evidence.SERVED, Evidence.FAILED, Evidence.SERVED, Evidence.SERVED):
        assert not lifecycle.observe(evidence, 2.0)
    assert lifecycle.observe(Evidence.SERVED, 3.0)
    assert (lifecycle.state, lifecycle.share) == (READY, 1.0)
    assert lifecycle.reason == "served 3 requests in a row again"


def test_without_a_limit_on_timeouts_they_are_failed_requests() -> None:
    """As any other."""
    lifecycle = serving(Thresholds(failed_requests=3))
    for _ in range(3):
        lifecycle.observe(Evidence.TIMED_OUT, 1.0)
    assert (lifecycle.state, lifecycle.reason) == (UNHEALTHY, "3 requests failed in a row, out for 5 s")


def test_a_degraded_endpoint_that_was_cold_goes_on_warming_up() -> None:
    """What it has served counts; but it has not served enough."""
    lifecycle = serving(Thresholds(warm_up_requests=10, timeouts=2))
    for evidence in (Evidence.TIMED_OUT, Evidence.TIMED_OUT, Evidence.SERVED, Evidence.SERVED):
        lifecycle.observe(evidence, 1.0)
    assert (lifecycle.state, lifecycle.share) == (WARMING, 0.2)


@pytest.mark.parametrize(("good", "errs"), [(9, False), (8, True)], ids=["every tenth fails", "every ninth"])
def test_an_endpoint_errs_too_much_beyond_its_share_of_errors(good: int, *, errs: bool) -> None:
    """Though there are never two failures in a row."""
    lifecycle = serving(BROKEN)
    assert flaky(lifecycle, 1.0, good=good) is errs
    assert lifecycle.state is READY  # it is for the fleet to say what follows


def test_a_tripped_endpoint_rests_whatever_its_probes_say() -> None:
    """For `open_s`; a trial is wanted only then."""
    lifecycle = tripped(100.0)
    assert (lifecycle.state, lifecycle.reason) == (UNHEALTHY, "failed 4 of 20 requests, out for 180 s")
    assert not lifecycle.observe(Evidence.PROBE_OK, 279.9)
    assert not lifecycle.wants_trial(279.9)
    assert lifecycle.wants_trial(280.0)


def test_a_tripped_endpoint_comes_back_with_a_small_share() -> None:
    """After the trial of ours real requests have to go well, and then it is as good as any."""
    lifecycle = tripped(100.0)
    lifecycle.observe(Evidence.PROBE_OK, 280.0)
    assert (lifecycle.state, lifecycle.share) == (DEGRADED, 0.1)
    for _ in range(3):
        lifecycle.observe(Evidence.SERVED, 281.0)
    assert lifecycle.state is READY
    assert not flaky(lifecycle, 282.0, good=9)


def test_a_tripped_endpoint_that_fails_again_rests_again() -> None:
    """At once, not after another twenty."""
    lifecycle = tripped(100.0)
    lifecycle.observe(Evidence.PROBE_OK, 280.0)
    lifecycle.observe(Evidence.SERVED, 281.0)
    lifecycle.observe(Evidence.FAILED, 282.0)
    assert lifecycle.errs_too_much(282.0)
    lifecycle.observe(Evidence.TRIPPED, 282.0)
    assert lifecycle.reason == "failed again, out for 180 s"
    assert not lifecycle.wants_trial(461.9)
    assert lifecycle.wants_trial(462.0)


@pytest.mark.parametrize("evidence", [Evidence.PROBE_REFUSED, Evidence.RESTARTED])
def test_a_restart_ends_the_breakers_rest_and_forgets_its_errors(evidence: Evidence) -> None:
    """Another process answers there; what still fails was sent to the one before."""
    lifecycle = tripped(100.0)
    lifecycle.observe(evidence, 110.0)
    for _ in range(50):
        lifecycle.observe(Evidence.FAILED, 110.0)
    assert not lifecycle.errs_too_much(110.0)
    assert lifecycle.observe(Evidence.PROBE_OK, 111.0)
    assert lifecycle.state is READY
    lifecycle.observe(Evidence.FAILED, 112.0)
    assert not lifecycle.errs_too_much(112.0)


@pytest.mark.parametrize("evidence", [Evidence.PROBE_REFUSED, Evidence.RESTARTED, Evidence.LOADING])
def test_what_the_process_before_did_counts_for_nothing(evidence: Evidence) -> None:
    """Neither its errors nor its timeouts."""
    lifecycle = serving(Thresholds(failed_requests=99, timeouts=3, breaker=BREAKER))
    for seen in (*[Evidence.FAILED] * 19, *[Evidence.TIMED_OUT] * 2, evidence, Evidence.PROBE_OK, Evidence.TIMED_OUT):
        lifecycle.observe(seen, 1.0)
    assert not lifecycle.errs_too_much(1.0)
    assert lifecycle.state is READY


def test_a_breakers_rest_cuts_no_longer_one_short() -> None:
    """One that fails in a row, again and again, rests longer for that."""
    lifecycle = serving(Thresholds(failed_requests=2, cooldown_s=60.0, breaker=BreakerSpec(0.1, open_s=1.0)))
    for _ in range(20):
        lifecycle.observe(Evidence.FAILED, 100.0)
    lifecycle.observe(Evidence.TRIPPED, 100.0)
    assert not lifecycle.wants_trial(159.9)


def test_what_a_tripped_endpoint_served_while_it_was_out_does_not_count() -> None:
    """It was begun before; the requests that show whether it is well come afterwards."""
    lifecycle = tripped(100.0)
    for _ in range(5):
        lifecycle.observe(Evidence.SERVED, 101.0)
    lifecycle.observe(Evidence.PROBE_OK, 280.0)
    lifecycle.observe(Evidence.PROBE_OK, 281.0)
    assert lifecycle.state is DEGRADED


@pytest.mark.parametrize("pair", [(Evidence.DRAIN, Evidence.UNDRAIN), (Evidence.REMOVED, Evidence.LISTED)])
def test_a_tripped_endpoint_taken_in_anew_is_as_good_as_any(pair: tuple[Evidence, Evidence]) -> None:
    """The operator or the discovery source says so."""
    lifecycle = tripped(100.0)
    for evidence in (*pair, Evidence.PROBE_OK):
        lifecycle.observe(evidence, 101.0)
    assert lifecycle.state is READY


def test_an_endpoint_out_for_failures_in_a_row_may_trip_as_well() -> None:
    """Then it rests for longer; but what fails during that rest was sent before and does not prolong it."""
    lifecycle = serving(BROKEN)
    for _ in range(20):
        lifecycle.observe(Evidence.FAILED, 100.0)
    assert lifecycle.state is UNHEALTHY
    assert lifecycle.errs_too_much(100.0)
    lifecycle.observe(Evidence.TRIPPED, 100.0)
    for _ in range(50):
        lifecycle.observe(Evidence.FAILED, 120.0)
    assert not lifecycle.errs_too_much(120.0)
    assert lifecycle.wants_trial(280.0)


def test_an_endpoint_that_cannot_be_done_without_is_degraded_instead() -> None:
    """And back once it serves; its errors are counted anew."""
    lifecycle = serving(BROKEN)
    assert flaky(lifecycle, 1.0, good=4)
    lifecycle.observe(Evidence.SPARED, 1.0)
    assert (lifecycle.state, lifecycle.reason) == (DEGRADED, "failed 4 of 20 requests, but cannot be done without")
    lifecycle.observe(Evidence.FAILED, 2.0)
    assert not lifecycle.errs_too_much(2.0)
    for _ in range(3):
        lifecycle.observe(Evidence.SERVED, 2.0)
    assert lifecycle.state is READY


def test_what_was_the_requests_own_fault_is_taken_back() -> None:
    """A client that breaks every engine cannot take one out."""
    lifecycle = serving(BROKEN)
    for number in range(100):
        lifecycle.observe(Evidence.UNFIT, float(number))
        assert not lifecycle.errs_too_much(float(number))
        lifecycle.observe(Evidence.ACQUITTED, float(number))
        lifecycle.observe(Evidence.PROBE_OK, float(number))
    assert lifecycle.state is READY


def test_thresholds_may_change_while_it_rests() -> None:
    """The rest that has begun goes on; another window starts empty."""
    lifecycle = tripped(100.0)
    lifecycle.configure(Thresholds(breaker=BreakerSpec(0.1, window_s=60.0, open_s=10.0)))
    assert not lifecycle.wants_trial(279.9)
    lifecycle.configure(Thresholds())
    assert not lifecycle.errs_too_much(281.0)
    assert lifecycle.observe(Evidence.PROBE_OK, 281.0)


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
    """Back only by a good probe, a drain ends only by undrain or removal, stopped ends only by being listed."""
    lifecycle = Lifecycle(thresholds)
    for moment, seen in enumerate(evidence):
        before, since_s = lifecycle.state, lifecycle.since_s
        changed = lifecycle.observe(seen, float(moment))
        after = lifecycle.state
        assert changed is (after is not before)
        assert lifecycle.since_s == (float(moment) if changed else since_s)
        if after in TAKE_TRAFFIC and before not in TAKE_TRAFFIC:
            assert seen is Evidence.PROBE_OK
        if before is DRAINING and changed:
            assert (seen, after) in {(Evidence.UNDRAIN, STARTING), (Evidence.REMOVED, STOPPED)}
        if before is STOPPED and changed:
            assert (seen, after) == (Evidence.LISTED, STARTING)
        if after is UNHEALTHY and changed:
            assert before in TAKE_TRAFFIC
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


HEALTH = (
    Evidence.PROBE_OK,
    Evidence.PROBE_REFUSED,
    Evidence.PROBE_FAILED,
    Evidence.SERVED,
    Evidence.FAILED,
    Evidence.RESTARTED,
)


@settings(deadline=None)
@given(
    history=st.lists(st.tuples(st.sampled_from(HEALTH), st.floats(0, 30)), max_size=80),
    cooldown_s=st.floats(0, LONGEST_COOLDOWN_S),
)
def test_in_no_history_is_a_rest_cut_short_or_drawn_out(
    history: list[tuple[Evidence, float]], cooldown_s: float
) -> None:
    """After failed requests: out for the cool-down at least unless it restarted, for the longest one at most."""
    lifecycle = Lifecycle(Thresholds(3, 2, cooldown_s))
    now_s, fell_at_s, restarted = 0.0, -math.inf, False
    for seen, pause_s in history:
        now_s += pause_s
        before = lifecycle.state
        changed = lifecycle.observe(seen, now_s)
        if changed and lifecycle.state is UNHEALTHY:
            fell_at_s, restarted = (now_s if seen is Evidence.FAILED else -math.inf), False
        restarted |= seen in {Evidence.PROBE_REFUSED, Evidence.RESTARTED}
        if changed and lifecycle.state is READY:
            assert restarted or now_s >= fell_at_s + cooldown_s
        if before is UNHEALTHY and seen is Evidence.PROBE_OK and not changed:
            assert not restarted
            assert now_s < fell_at_s + LONGEST_COOLDOWN_S


def test_an_endpoint_that_never_was_ready_says_why() -> None:
    """Not "not probed yet" for ever: the operator reads what the probes find."""
    lifecycle = Lifecycle(Thresholds())
    lifecycle.observe(Evidence.PROBE_FAILED, 1.0)
    lifecycle.observe(Evidence.PROBE_FAILED, 2.0)
    assert (lifecycle.state, lifecycle.reason) == (State.STARTING, "2 probes failed, no model list")
    lifecycle.observe(Evidence.PROBE_REFUSED, 3.0)
    assert (lifecycle.state, lifecycle.reason, lifecycle.since_s) == (State.STARTING, "connection refused", 0.0)
