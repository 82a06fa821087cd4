"""Outcomes: one word per request, and evidence to whom it concerns."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Attempt, Completion, Flight, Flights, Usage
from extproc.idempotency import Idempotency
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes, outcome_of
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.types import Decision, InferenceRequest, Kind
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
CONFIG = f"pools: [{{name: p, models: [m], endpoints: {{static: ['{FIRST}', '{SECOND}']}}}}]"


def completion(request_id: str = "", address: str | None = FIRST, **fields: Any) -> Completion:
    """A good request's entry, but for what is said otherwise."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "address": address,
        "status": 200,
        "flags": (),
        "details": "via_upstream",
        "attempts": 1,
        "failed": None,
        "duration_s": 2.0,
        "ttft_s": 0.5,
        "request_bytes": 10,
        "response_bytes": 20,
    }
    return Completion(**values | fields)


class House:
    """A ready fleet of two with everything that listens to flights."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.metrics = Metrics()
        self.state = FleetState()
        self.log = DecisionLog(10)
        self.fleet = Fleet(self.state, self.metrics, lambda: self.now_s)
        self.fleet.configure(Generation(1, parse(CONFIG)))
        self.fleet.set_endpoints("p", [FIRST, SECOND])
        self.fleet.acknowledged(self.fleet.assignments())
        for address in (FIRST, SECOND):
            self.fleet.listed_models(address, Listing(frozenset({"m"}), None))
        self.outcomes = Outcomes(self.fleet, self.metrics, self.log)
        self.flights = Flights(
            self.state, self.outcomes, lambda: self.now_s, max_open=9, max_unsettled=1, access_log_timeout_s=10
        )

    def start(self) -> Flight:
        """A request on its way, in the decision log."""
        flight = self.flights.open()
        request = InferenceRequest(Kind.CHAT, "m", "m", 10)
        placement = self.fleet.placements["p"]
        decision = placement.choose(request, self.state, 0.0, Random(1))
        assert isinstance(decision, Decision)
        flight.reserve(request, decision, placement, placement.commit(decision, request, self.state, 0.0))
        self.log.add(0.0, flight.request_id, request, decision)
        return flight

    def value(self, name: str, **labels: str) -> float | None:
        """One figure of the metrics page."""
        return self.metrics.registry.get_sample_value(f"pointsman_{name}", labels)

    def outcome(self, flight: Flight) -> Any:
        """What the decision log says became of it."""
        [record] = self.log.read(1, flight.request_id)
        return record["outcome"]

    def errors(self, address: str) -> float:
        """The endpoint's error EWMA."""
        return float(self.state.error_ewma[self.state.slot_of(address)])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "ok"),
        ({"status": 399}, "ok"),
        ({"status": 400}, "client_error"),
        ({"status": 499}, "client_error"),
        ({"status": 503, "failed": "status_503"}, "endpoint_failed"),
        ({"status": 0, "failed": "upstream_remote_reset"}, "endpoint_failed"),
        ({"status": 200, "failed": "upstream_remote_reset"}, "endpoint_failed"),
        ({"status": 0, "flags": ("downstream_connection_termination",)}, "client_gone"),
        ({"status": 200, "flags": ("downstream_remote_reset",)}, "client_gone"),
        ({"status": 0, "flags": ("downstream_remote_reset",), "failed": "upstream_remote_reset"}, "client_gone"),
        ({"status": 503, "flags": ("no_healthy_upstream",), "failed": "status_503"}, "no_known_address"),
        (
            {"status": 200, "flags": ("upstream_request_timeout",), "failed": "upstream_request_timeout"},
            "endpoint_failed",
        ),
        ({"status": 200, "flags": ("upstream_request_timeout",)}, "timed_out"),
        ({"status": 200, "flags": ("stream_idle_timeout",)}, "timed_out"),
        ({"status": 500, "address": None}, "gateway_failed"),
        ({"status": 0}, "no_answer"),
    ],
)
def test_every_end_has_one_word(fields: dict[str, Any], word: str) -> None:
    """The cause nearest to its author comes first: our pick, then the client, then the endpoint."""
    assert outcome_of(completion(**fields)) == word


def test_a_good_request_is_counted_and_told() -> None:
    """In the metrics by pool, in the decision log under its id."""
    house = House()
    flight = house.start()
    flight.close()
    house.flights.on_completion(completion(flight.request_id, SECOND, usage=Usage(30, 8, 16)))
    assert house.value("completions_total", pool="p", outcome="ok") == 1
    assert house.value("ttft_seconds_sum", pool="p") == 0.5
    assert house.state.ttft_1m_s[house.state.slot_of(SECOND)] == 0.5
    assert house.value("request_seconds_sum", pool="p") == 2.0
    tokens = {
        kind: house.value("usage_tokens_total", pool="p", kind=kind) for kind in ("prompt", "cached", "completion")
    }
    assert tokens == {"prompt": 30, "cached": 16, "completion": 8}
    [record] = house.log.read(1, flight.request_id)
    assert record["served_by"] == SECOND
    assert record["outcome"] == {
        "outcome": "ok",
        "status": 200,
        "flags": [],
        "details": "via_upstream",
        "attempts": 1,
        "failed": None,
        "ttft_s": 0.5,
        "duration_s": 2.0,
        "usage": {"prompt_tokens": 30, "completion_tokens": 8, "cached_tokens": 16},
    }


def test_what_was_not_measured_is_not_counted() -> None:
    """No time, no usage: the histograms stay empty rather than gain a zero."""
    house = House()
    flight = house.start()
    house.flights.on_completion(completion(flight.request_id, duration_s=None, ttft_s=None))
    assert house.value("completions_total", pool="p", outcome="ok") == 1
    assert house.value("ttft_seconds_count", pool="p") is None
    assert house.value("usage_tokens_total", pool="p", kind="prompt") is None
    assert house.outcome(flight)["usage"] is None


def test_failed_requests_take_an_endpoint_out() -> None:
    """Three in a row, each counted by its cause; the other endpoint is not touched."""
    house = House()
    for _ in range(3):
        flight = house.start()
        house.flights.on_completion(completion(flight.request_id, FIRST, status=503, failed="status_503"))
        flight.close()
    assert house.value("attempts_failed_total", endpoint=FIRST, why="status_503") == 3
    assert house.state.state[house.state.slot_of(FIRST)] == State.UNHEALTHY
    assert house.state.state[house.state.slot_of(SECOND)] == State.READY
    assert house.errors(FIRST) == pytest.approx(1 - 0.9**3)
    assert house.errors(SECOND) == 0


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_of_any_kind_is_evidence_of_life(status: int) -> None:
    """A client error was served too: it ends the row of failures."""
    house = House()
    for _ in range(5):
        for failed, code in (("status_503", 503), ("status_503", 503), (None, status)):
            flight = house.start()
            house.flights.on_completion(completion(flight.request_id, FIRST, status=code, failed=failed))
            flight.close()
    assert house.state.state[house.state.slot_of(FIRST)] == State.READY


@pytest.mark.parametrize("flag", ["downstream_remote_reset", "downstream_connection_termination"])
@pytest.mark.parametrize("failed", [None, "upstream_remote_reset", "status_503"])
def test_a_client_that_left_is_no_evidence(flag: str, failed: str | None) -> None:
    """Neither for the endpoint nor against it, whatever became of its connection afterwards."""
    house = House()
    for _ in range(5):
        flight = house.start()
        entry = completion(flight.request_id, FIRST, status=0, flags=(flag,), failed=failed)
        house.flights.on_completion(entry)
        flight.close()
    assert house.value("completions_total", pool="p", outcome="client_gone") == 5
    assert house.errors(FIRST) == 0
    assert house.value("attempts_failed_total", endpoint=FIRST, why=str(failed)) is None
    assert house.state.state[house.state.slot_of(FIRST)] == State.READY


def test_a_failure_at_an_unknown_address_makes_no_series() -> None:
    """A label value that Envoy, not the fleet, chose would be unbounded."""
    house = House()
    flight = house.start()
    house.flights.on_attempt(Attempt(flight.request_id, "10.9.9.9:1", "status_503"))
    assert house.value("attempts_failed_total", endpoint="10.9.9.9:1", why="status_503") is None


def test_a_retry_is_counted_and_told_to_the_budget() -> None:
    """By pool."""
    house = House()
    told: list[tuple[str, int]] = []
    house.outcomes.on_retry = lambda pool, count: told.append((pool, count))
    flight = house.start()
    house.flights.on_attempt(Attempt(flight.request_id, "10.0.0.2:80", "x", 2))
    house.flights.on_completion(completion(flight.request_id, attempts=3))
    assert house.value("retries_total", pool="p") == 2
    assert told == [("p", 1), ("p", 1)]


def test_a_key_is_settled_by_what_became_of_its_request() -> None:
    """Kept after an answer; free where nobody tells how it ended."""
    house = House()
    keys = house.outcomes._idempotency = Idempotency(parse(CONFIG), lambda: house.now_s)
    headers = {"idempotency-key": "k"}

    def is_taken() -> bool:
        flight = house.flights.open()
        refusal = keys.hold(flight, headers, b"")
        flight.close()
        return refusal is not None

    untold, answered = house.start(), house.start()
    assert keys.hold(untold, headers, b"") is None
    untold.close()
    assert is_taken()
    house.flights.access_log_timeout_s = -1
    house.flights.expire()
    assert not is_taken()
    assert keys.hold(answered, headers, b"") is None
    house.flights.on_completion(completion(answered.request_id))
    answered.close()
    house.now_s += 60
    assert is_taken()


def test_a_failover_is_counted_for_its_pool() -> None:
    """Once per move."""
    house = House()
    flight = house.start()
    elsewhere = SECOND if flight.served_by == FIRST else FIRST
    house.flights.on_attempt(Attempt(flight.request_id, elsewhere, None))
    assert house.value("requests_moved_total", pool="p") == 1


def test_an_entry_that_never_came_is_counted_and_told() -> None:
    """The decision log does not leave the outcome open for ever."""
    house = House()
    first, second = house.start(), house.start()
    first.close()
    second.close()
    assert house.value("access_log_missing_total") == 1
    assert house.outcome(first) == {"outcome": "no access-log entry"}
    assert house.outcome(second) is None


def test_the_last_requests_of_a_removed_pool_do_not_bring_its_series_back() -> None:
    """They are counted for no pool."""
    house = House()
    flight = house.start()
    house.fleet.configure(Generation(2, parse(CONFIG.replace("name: p", "name: q"))))
    house.metrics.pool_gone("p")
    house.flights.on_completion(completion(flight.request_id, SECOND))
    assert house.value("completions_total", pool="p", outcome="ok") is None
    assert house.value("completions_total", pool="", outcome="ok") == 1


def test_an_answer_told_of_late_teaches_no_stranger() -> None:
    """The slot may be another endpoint's by the time the access log says how it went."""
    house = House()
    flight = house.start()
    assert flight.reservation is not None
    flight.streamed = True
    ledger = house.fleet.placements["p"].ledger
    flight.close()
    house.state.generation[flight.reservation.slot] += 1
    house.flights.on_completion(completion(flight.request_id, FIRST, ttft_s=0.1))
    assert not any(ledger.rate_time_s)
    assert flight.placement is None


@pytest.mark.parametrize("why", ["upstream_request_timeout", "stream_idle_timeout"])
def test_timeouts_degrade_an_endpoint_instead_of_taking_it_out(why: str) -> None:
    """Three in a row, whatever limit it was."""
    house = House()
    for _ in range(3):
        flight = house.start()
        house.flights.on_attempt(Attempt(flight.request_id, FIRST, why))
        flight.close()
    assert house.state.state[house.state.slot_of(FIRST)] == State.DEGRADED


def test_a_request_that_breaks_two_engines_is_held_against_neither() -> None:
    """The first is out until its trial, as any that answers 500; the second stays, and there is no row of failures."""
    house = House()
    for _ in range(5):
        flight = house.start()
        for address in (FIRST, SECOND):
            house.flights.on_attempt(Attempt(flight.request_id, address, "status_500"))
        flight.close()
        states = [State(house.state.state[house.state.slot_of(address)]) for address in (FIRST, SECOND)]
        assert states == [State.UNHEALTHY, State.READY]
        assert house.fleet.wants_trial(FIRST)  # at once: it need not rest
        house.fleet.listed_models(FIRST, Listing(frozenset({"m"}), None))
    assert house.value("endpoints_acquitted_total", endpoint=FIRST) == 5


def _ask(house: House, conversation: int, usage: Usage | None) -> str:
    """One turn of a conversation whose prompt is 1,000 tokens by our count, nearly all in blocks; who served it."""
    hashes = [conversation * 100 + block for block in range(9)]
    request = InferenceRequest(Kind.EMBEDDING, "m", "m", 1_000, block_hashes=hashes, block_tokens=[100] * 9)
    placement, flight = house.fleet.placements["p"], house.flights.open()
    decision = placement.choose(request, house.state, house.now_s, Random(1), length=1)
    assert isinstance(decision, Decision)
    flight.reserve(request, decision, placement, placement.commit(decision, request, house.state, house.now_s))
    address = decision.addresses[0]
    assert house.flights.on_completion(completion(flight.request_id, address, usage=usage))
    flight.close()
    return address


def test_what_was_believed_cached_is_told_beside_what_was_found() -> None:
    """Of the same answers, in the engine's tokens: 90 % of a prompt that is twice as long as we think."""
    house = House()
    for usage in (Usage(2_000, 5, 0), Usage(2_000, 5, None), None, Usage(2_000, 5, 1_500)):
        _ask(house, 1, usage)
    page = house.metrics.page().decode()
    assert 'pointsman_prefix_predicted_tokens_total{pool="p"} 1800.0' in page
    assert 'pointsman_prefix_found_tokens_total{pool="p"} 1500.0' in page


@pytest.mark.parametrize(("calibrates", "scale"), [("true", 0.5), ("false", 1.0)])
def test_an_endpoint_that_keeps_less_than_it_reports_has_a_smaller_index(calibrates: str, scale: float) -> None:
    """By what its answers say: of the last hundred conversations it keeps fifty. Unless that is switched off."""
    house = House()
    one = f"pools: [{{name: p, models: [m], calibrate_index: {calibrates}, endpoints: {{static: ['{FIRST}']}}}}]"
    house.fleet.configure(Generation(2, parse(one)))
    house.fleet.set_endpoints("p", [FIRST])
    house.fleet.scraped(FIRST, EngineFigures(0, 0, kv_capacity_tokens=100_000))
    kept: dict[int, None] = {}
    draw = Random(1)
    for turn in range(3_000):
        house.now_s = 0.1 * turn
        conversation = draw.randrange(110)
        found = 1_800 if kept.pop(conversation, 0) is None else 0
        kept[conversation] = None
        while len(kept) > 50:
            kept.pop(next(iter(kept)))
        _ask(house, conversation, Usage(2_000, 5, found))
    house.fleet.scraped(FIRST, EngineFigures(0, 0, kv_capacity_tokens=100_000))
    slot = house.state.slot_of(FIRST)
    assert house.state.index_scale[slot] == pytest.approx(scale, rel=0.2)
    assert house.fleet.placements["p"].index.held_tokens(slot or 0) <= 1.01 * 100_000 * house.state.index_scale[slot]
    assert house.fleet.describe()[0]["index_evidence"] == {"p": "answers" if calibrates == "true" else "none"}
