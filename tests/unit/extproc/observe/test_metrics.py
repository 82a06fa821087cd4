"""Metrics: series that come and go with endpoints, and gauges read when asked."""

from __future__ import annotations

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from extproc.observe.collectors import StateCollector
from extproc.observe.metrics import Metrics
from extproc.senses.messages import Indexed
from extproc.wire.messages import Phase
from policies.fleet_state import FleetState
from policies.lifecycle import State

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class House:
    """Metrics over a fleet with a clock."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.state = FleetState(stale_after_s=0.6)
        self.metrics = Metrics()
        self.streams = {"ext_proc_streams_opened_total": 7.0, "ext_proc_streams_open": 2.0}
        self.metrics.observe_state(self.state, lambda: self.streams, lambda: self.now_s)

    def value(self, name: str, **labels: str) -> float | None:
        """One figure."""
        return self.metrics.registry.get_sample_value(f"pointsman_{name}", labels)

    def naming(self, address: str) -> set[str]:
        """Every family with a series of this endpoint."""
        return {
            family.name
            for family in text_string_to_metric_families(self.metrics.page().decode())
            for sample in family.samples
            if address in sample.labels.values()
        }


@pytest.fixture
def house() -> House:
    """Two endpoints."""
    house = House()
    house.state.add(A)
    house.state.add(B)
    return house


def test_a_routed_request_is_counted_with_its_tokens(house: House) -> None:
    """Per endpoint the requests, per pool the tokens."""
    house.metrics.decided("p", A, "routed", 100, 40)
    house.metrics.decided("p", A, "routed", 50, 0)
    house.metrics.decided("p", B, "routed", 10, 0)
    assert house.value("decisions_total", pool="p", endpoint=A, reason="routed") == 2
    assert house.value("decisions_total", pool="p", endpoint=B, reason="routed") == 1
    assert house.value("prefix_prompt_tokens_total", pool="p") == 160
    assert house.value("prefix_matched_tokens_total", pool="p") == 40


def count_everything(house: House, address: str) -> None:
    """One of each event that names an endpoint."""
    house.metrics.decided("p", address, "routed", 1, 1)
    house.metrics.attempt_failed(address, "status_503")
    house.metrics.endpoint_changed(address, State.STARTING, State.READY)
    house.metrics.endpoint_restarted(address)
    house.metrics.endpoint_tripped(address, spared=False)


def test_an_endpoints_series_go_with_it(house: House) -> None:
    """Counters and gauges alike; another endpoint's and the pool's stay."""
    for address in (A, B):
        count_everything(house, address)
    assert len(house.naming(A)) > 10
    slot = house.state.slot_of(A)
    assert slot is not None
    house.state.remove(slot)
    house.metrics.endpoint_gone(A)
    assert house.naming(A) == set()
    assert len(house.naming(B)) > 10
    assert house.value("prefix_prompt_tokens_total", pool="p") == 2


def test_an_endpoint_that_returns_is_counted_from_one(house: House) -> None:
    """Nothing is counted on a series that was dropped."""
    count_everything(house, A)
    house.metrics.endpoint_gone(A)
    count_everything(house, A)
    assert house.value("decisions_total", pool="p", endpoint=A, reason="routed") == 1
    assert house.value("attempts_failed_total", endpoint=A, why="status_503") == 1


def count_pool(house: House, pool: str) -> None:
    """One of each event that names a pool."""
    house.metrics.decided(pool, A, "routed", 1, 1)
    house.metrics.moved(pool)
    house.metrics.completed(pool, "ok", 0.1, 0.2)
    house.metrics.used_tokens(pool, 1, None, 0)
    house.metrics.endpoint_refused(pool)
    house.metrics.discovered(pool, ok=True)
    house.metrics.discovery_failed(pool, "timeout")
    house.metrics.discovery_state(pool, endpoints=1, skipped=1, stale=True)


def test_a_pools_series_go_with_it(house: House) -> None:
    """All of them, and no other's: a pool may be called as an outcome or a kind is."""
    for pool in ("ok", "p"):
        count_pool(house, pool)
    house.metrics.scraped(ok=True)
    house.metrics.pool_gone("ok")
    pools = {
        sample.labels["pool"]
        for family in text_string_to_metric_families(house.metrics.page().decode())
        for sample in family.samples
        if "pool" in sample.labels
    }
    assert pools == {"p"}
    assert house.value("completions_total", pool="p", outcome="ok") == 1
    assert house.value("scrapes_total", result="ok") == 1
    assert house.value("decisions_total", pool="p", endpoint=A, reason="routed") == 1


def test_a_pool_that_returns_is_counted_from_one(house: House) -> None:
    """Nothing is counted on a series that was dropped."""
    count_pool(house, "p")
    house.metrics.pool_gone("p")
    count_pool(house, "p")
    assert house.value("completions_total", pool="p", outcome="ok") == 1
    assert house.value("prefix_matched_tokens_total", pool="p") == 1


def test_nothing_is_kept_of_endpoints_and_pools_that_are_gone(house: House) -> None:
    """However many come and go, in whichever order."""
    count_everything(house, A)
    count_pool(house, "p")
    kept = len(house.metrics._children), {owner: len(c) for owner, c in house.metrics._children_of.items()}
    for number in range(20):
        address, pool = f"10.1.0.{number}:80", f"pool-{number}"
        house.metrics.decided("p", address, "routed", 1, 1)
        house.metrics.decided(pool, address, "routed", 1, 1)
        house.metrics.decided(pool, A, "routed", 1, 1)
        count_everything(house, address)
        count_pool(house, pool)
        for gone in (house.metrics.endpoint_gone, house.metrics.pool_gone)[:: 1 if number % 2 else -1]:
            gone(address if gone == house.metrics.endpoint_gone else pool)
    assert (len(house.metrics._children), {o: len(c) for o, c in house.metrics._children_of.items()}) == kept


def test_a_series_is_looked_up_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """prometheus_client's look-up checks, converts and locks each time; no event of a request may pay for that."""
    looked_up: list[tuple[str, ...]] = []
    look_up = MetricWrapperBase.labels

    def noting(family: MetricWrapperBase, *labels: str) -> MetricWrapperBase:
        looked_up.append(labels)
        return look_up(family, *labels)

    monkeypatch.setattr(MetricWrapperBase, "labels", noting)
    for _ in range(3):
        count_everything(house, A)
        count_pool(house, "p")
        report_everything(house.metrics)
    assert len(looked_up) == len(house.metrics._children)


def test_a_page_can_be_made_while_the_fleet_changes(house: House) -> None:
    """In another thread: here an endpoint comes and one goes between any two figures."""
    [collector] = [c for c in house.metrics.registry._collector_to_names if isinstance(c, StateCollector)]
    for number, _family in enumerate(collector.collect()):
        house.state.add(f"10.2.0.{number}:80")
        slot = house.state.slot_of(B)
        if slot is not None:
            house.state.remove(slot)
    assert house.naming(B) == set()
    assert "10.2.0.1:80" in house.metrics.page().decode()


def test_an_endpoint_nobody_counted_can_go(house: House) -> None:
    """It was listed and unlisted without a request."""
    house.metrics.endpoint_gone("10.9.9.9:1")
    assert house.naming("10.9.9.9:1") == set()


def test_the_fleets_figures_are_read_when_asked(house: House) -> None:
    """As they are at that moment."""
    slot = house.state.slot_of(A)
    assert slot is not None
    house.state.reserve(slot, prompt_tokens=100, uncached_tokens=10)
    house.state.waiting[slot], house.state.running[slot], house.state.kv_used[slot] = 3, 4, 0.5
    house.state.kv_capacity_tokens[slot], house.state.error_ewma[slot] = 65_536, 0.25
    figures = {
        name: house.value(name, endpoint=A)
        for name in (
            "in_flight",
            "in_flight_prompt_tokens",
            "endpoint_waiting",
            "endpoint_running",
            "endpoint_kv_used_ratio",
            "endpoint_kv_capacity_tokens",
            "endpoint_error_ratio",
        )
    }
    assert list(figures.values()) == [1, 100, 3, 4, 0.5, 65_536, 0.25]
    assert house.value("in_flight", endpoint=B) == 0


def test_an_endpoint_is_in_exactly_one_state(house: House) -> None:
    """1 for its own, 0 for every other."""
    slot = house.state.slot_of(A)
    assert slot is not None
    house.state.state[slot] = State.DRAINING
    told = {state: house.value("endpoint_state", endpoint=A, state=state.name.lower()) for state in State}
    assert told == {state: float(state is State.DRAINING) for state in State}


def test_staleness_follows_the_last_good_scrape(house: House) -> None:
    """Never seen is stale and has no age."""
    slot = house.state.slot_of(A)
    assert slot is not None
    assert house.value("endpoint_stale", endpoint=A) == 1
    assert house.value("endpoint_observed_age_seconds", endpoint=A) is None
    house.state.observed_at_s[slot] = 9.5
    assert house.value("endpoint_stale", endpoint=A) == 0
    assert house.value("endpoint_observed_age_seconds", endpoint=A) == 0.5
    house.now_s = 10.2
    assert house.value("endpoint_stale", endpoint=A) == 1


def test_stream_counts_are_counters_and_gauges_by_name(house: House) -> None:
    """`_total` only ever grows."""
    page = house.metrics.page().decode()
    assert "# TYPE pointsman_ext_proc_streams_opened_total counter" in page
    assert "# TYPE pointsman_ext_proc_streams_open gauge" in page
    assert house.value("ext_proc_streams_opened_total") == 7
    house.streams["ext_proc_streams_open"] = 5.0
    assert house.value("ext_proc_streams_open") == 5


def test_a_finished_request_fills_the_histograms(house: House) -> None:
    """With what was measured, and no zeros for what was not."""
    house.metrics.completed("p", "ok", 0.2, 3.0)
    house.metrics.completed("p", "client_gone", None, 1.0)
    assert house.value("completions_total", pool="p", outcome="ok") == 1
    assert house.value("ttft_seconds_count", pool="p") == 1
    assert house.value("ttft_seconds_bucket", pool="p", le="0.25") == 1
    assert house.value("ttft_seconds_bucket", pool="p", le="0.1") == 0
    assert house.value("request_seconds_sum", pool="p") == 4.0


def report_everything(metrics: Metrics) -> None:
    """One of each event that names neither an endpoint nor, but for a few, a pool."""
    metrics.refused_with("body_too_large", 413)
    metrics.answered("models")
    metrics.fell_back("stale_figures")
    metrics.moved("p")
    metrics.used_tokens("p", 30, None, 0)
    metrics.message(Phase.REQUEST_BODY)
    metrics.malformed("ext_proc")
    metrics.entry(kind="request", result="joined")
    metrics.entry_missing()
    metrics.no_known_address()
    metrics.answered_by_envoy(503)
    metrics.xds("acked", "Cluster")
    metrics.xds_sessions(2)
    metrics.reloaded(ok=True)
    metrics.reloaded(ok=False)
    metrics.generation_in_force(4)
    metrics.endpoint_refused("p")
    metrics.endpoint_tripped(A, spared=False)
    metrics.endpoint_tripped(A, spared=True)
    metrics.scraped(ok=True)
    metrics.probed(ok=False)
    metrics.discovered("p", ok=True)
    metrics.discovery_failed("p", "timeout")
    metrics.discovery_state("p", endpoints=3, skipped=2, stale=True)
    metrics.stage("parse").observe(1e-4)


def test_every_event_has_its_name(house: House) -> None:
    """What each of the parts reports, under the names the docs give."""
    report_everything(house.metrics)
    assert house.value("refusals_total", reason="body_too_large", status="413") == 1
    assert house.value("endpoint_breaker_trips_total", endpoint=A, result="out") == 1
    assert house.value("endpoint_breaker_trips_total", endpoint=A, result="spared") == 1
    assert house.value("answers_total", what="models") == 1
    assert house.value("fallbacks_total", reason="stale_figures") == 1
    assert house.value("requests_moved_total", pool="p") == 1
    assert house.value("usage_tokens_total", pool="p", kind="prompt") == 30
    assert house.value("usage_tokens_total", pool="p", kind="cached") is None
    assert house.value("ext_proc_messages_total", phase="request_body") == 1
    assert house.value("malformed_messages_total", service="ext_proc") == 1
    assert house.value("access_log_entries_total", kind="request", result="joined") == 1
    assert house.value("access_log_missing_total") == 1
    assert house.value("no_known_address_total") == 1
    assert house.value("envoy_answers_total", status="503") == 1
    assert house.value("xds_messages_total", event="acked", type="Cluster") == 1
    assert house.value("xds_sessions") == 2
    assert house.value("config_reloads_total", result="ok") == 1
    assert house.value("config_reloads_total", result="rejected") == 1
    assert house.value("config_generation") == 4
    assert house.value("endpoints_refused_total", pool="p") == 1
    assert house.value("scrapes_total", result="ok") == 1
    assert house.value("probes_total", result="failed") == 1
    assert house.value("discoveries_total", pool="p", result="ok") == 1
    assert house.value("discovery_failures_total", pool="p", reason="timeout") == 1
    assert house.value("discovery_endpoints", pool="p") == 3
    assert house.value("discovery_skipped", pool="p") == 2
    assert house.value("discovery_stale", pool="p") == 1
    assert house.value("stage_seconds_count", stage="parse") == 1


def test_every_name_has_the_prefix_and_a_help_text(house: House) -> None:
    """Ours, or the one that Prometheus's dashboards know every process by; no second series of creation times."""
    count_everything(house, A)
    families = list(text_string_to_metric_families(house.metrics.page().decode()))
    assert len(families) > 30
    assert all(family.name.startswith(("pointsman_", "process_")) and family.documentation for family in families)
    assert not [family.name for family in families if family.name.endswith("_created")]


def index(house: House) -> dict[str, float | None]:
    """What is shown of the precise index of pool p."""
    house.metrics.indexed(Indexed("p", 7, 1, {"gaps": 2}))
    return shown_index(house)


def shown_index(house: House) -> dict[str, float | None]:
    """Blocks, blind endpoints, events."""
    gauges = {name: house.value(name, pool="p") for name in ("precise_index_blocks", "precise_index_blind_endpoints")}
    return gauges | {"kv_events_total": house.value("kv_events_total", pool="p", what="gaps")}


NO_INDEX = {"precise_index_blocks": None, "precise_index_blind_endpoints": None, "kv_events_total": None}


def test_an_index_is_shown_while_its_pool_has_one(house: House) -> None:
    """Not before, not after, and a report under way brings nothing back; what else is known of the pool stays."""
    assert index(house) == NO_INDEX
    house.metrics.indexed_pools(["p", "q"])
    house.metrics.decided("p", A, "routed", 1, 1)
    assert index(house) == {"precise_index_blocks": 7, "precise_index_blind_endpoints": 1, "kv_events_total": 2}
    house.metrics.indexed_pools(["q"])
    assert (shown_index(house), index(house)) == (NO_INDEX, NO_INDEX)
    assert house.value("prefix_prompt_tokens_total", pool="p") == 1
    house.metrics.indexed_pools(["p"])
    assert index(house)["kv_events_total"] == 2


def test_the_senses_take_their_indexes_with_them(house: House) -> None:
    """Counts of what happened stay."""
    house.metrics.indexed_pools(["p"])
    index(house)
    house.metrics.senses_up(up=False)
    assert shown_index(house) == NO_INDEX | {"kv_events_total": 2}
    house.metrics.senses_up(up=True)
    assert index(house)["precise_index_blocks"] == 7
