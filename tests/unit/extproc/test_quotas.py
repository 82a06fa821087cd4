"""Quotas: what requests of tenants cost, by how they end."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.access.gate import Caller
from extproc.config.generations import Generation
from extproc.config.loading import ConfigError, parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Completion, Flight, Flights, Usage
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.quotas import Quotas
from extproc.reply import Answer, Route
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence
from vllm_adapters.health import Listing
from vllm_adapters.pushed import FinishedRequest

ENGINE = "10.0.0.1:8000"
HEADERS = {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json"}
POOLS = """
access: {tenant_header: x-tenant}
pools:
  - {name: chat, models: [m], endpoints: {static: ["10.0.0.1:8000"]}}
  - {name: small, models: [s], endpoints: {static: ["10.0.0.1:8000"]}}
"""
DAY_S = 86_400.0


class House:
    """A pipeline over one engine, for tenants with quotas."""

    def __init__(self, tenants: str) -> None:
        self.now_s = 100 * DAY_S
        config = parse(f"tenants: {tenants}\n{POOLS}")
        self.generation = Generation(1, config)
        self.metrics, self.state = Metrics(), FleetState()
        self.fleet = Fleet(self.state, self.metrics, lambda: self.now_s)
        self.fleet.configure(self.generation)
        for pool in ("chat", "small"):
            self.fleet.set_endpoints(pool, [ENGINE])
        self.fleet.acknowledged({"pool_chat": frozenset({ENGINE}), "pool_small": frozenset({ENGINE})})
        self.fleet.listed_models(ENGINE, Listing(frozenset({"m", "s"}), 4_096))
        self.quotas = Quotas(config, self.metrics, lambda: self.now_s, lambda: self.now_s)
        log = DecisionLog(10)
        self.flights = Flights(
            self.state,
            Outcomes(self.fleet, self.metrics, log, quotas=self.quotas),
            lambda: self.now_s,
            max_open=99,
            max_unsettled=99,
            access_log_timeout_s=10,
        )
        self.pipeline = Pipeline(
            self.generation,
            self.fleet,
            self.flights,
            log,
            self.metrics,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            rng=Random(0),
            quotas=self.quotas,
        )

    def ask(self, tenant: str, model: str = "m", path: str | None = None) -> tuple[Flight, Any]:
        """One request and what becomes of it."""
        flight = self.flights.open()
        flight.caller = Caller(tenant)
        body = json.dumps({"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "x" * 360}]})
        headers = HEADERS if path is None else {":path": path, ":method": "GET"}
        return flight, self.pipeline.decide(flight, headers, b"" if path else body.encode())

    def routed(self, tenant: str, model: str = "m") -> Flight:
        """One that is let in."""
        flight, reply = self.ask(tenant, model)
        assert isinstance(reply, Route)
        return flight

    def refused(self, tenant: str, model: str = "m") -> tuple[int, dict[str, Any], str | None]:
        """One that is not: status, error and Retry-After."""
        flight, reply = self.ask(tenant, model)
        flight.close()
        assert isinstance(reply, Answer)
        return reply.status, json.loads(reply.body)["error"], dict(reply.headers).get("retry-after")

    def end(self, flight: Flight, **fields: Any) -> None:
        """The stream ends, and the access log tells how."""
        flight.close()
        told = {
            "address": ENGINE, "status": 200, "flags": (), "details": "", "attempts": 1, "failed": None,
            "duration_s": 1.0, "ttft_s": 0.1, "request_bytes": 1, "response_bytes": 1,
        }  # fmt: skip
        self.flights.on_completion(Completion(request_id=flight.request_id, **{**told, **fields}))

    def left(self, tenant: str, what: str = "tokens_left") -> float | None:
        """What the accounts say."""
        return self.quotas.describe()[tenant][what]


@pytest.fixture
def house() -> House:
    """`acme` with all kinds of limits; others with none."""
    return House(
        "{named: {acme: {requests: {per_s: 1, burst: 5}, tokens: {per_s: 10, burst: 1000}, concurrency: 3,"
        " budget: {tokens: 3000}}, guest: {pools: [small]}}}"
    )


def test_a_request_reserves_what_it_is_predicted_to_use_and_settles_by_what_it_used(house: House) -> None:
    """Ninety or so tokens of prompt and at most a hundred of answer; then what the engine says."""
    flight = house.routed("acme")
    reserved = 1000 - (house.left("acme") or 0)
    assert 180 <= reserved <= 220
    house.end(flight, usage=Usage(80, 40, None))
    assert house.left("acme") == 1000 - 120
    assert house.left("acme", "budget_spent_tokens") == 120
    assert house.left("acme", "running") == 0


def test_what_is_told_of_a_tenant_is_for_people(house: House) -> None:
    """To a tenth of a token, however long the fractions are that are reckoned with."""
    house.routed("acme")
    house.now_s += 1 / 3
    told = house.quotas.describe()["acme"]
    assert all(figure is None or figure == round(figure, 1) for figure in told.values()), told
    assert told["requests_left"] == 4.3


@pytest.mark.parametrize(
    ("how", "cost", "requests"),
    [
        ({"status": 503, "failed": "connect_failure", "ttft_s": None}, 0, 0),
        ({"status": 503, "address": None, "flags": ("no_healthy_upstream",)}, 0, 0),
        ({"status": 400}, 0, 1),
        ({"flags": ("downstream_connection_termination",)}, "predicted", 1),
        ({}, "predicted", 1),
        ({"flags": ("downstream_connection_termination",), "usage": Usage(80, 7, None)}, 87, 1),
        ({"failed": "reset", "flags": ("upstream_connection_termination",)}, "predicted", 1),
        ({"failed": "status_500", "status": 500}, 0, 0),
    ],
    ids=["no engine", "nobody known", "bad request", "client left", "no usage", "left late", "broke off", "500"],
)
def test_what_a_request_costs_goes_by_how_it_ended(
    house: House, how: dict[str, Any], cost: int | str, requests: int
) -> None:
    """Nothing if nothing came of it, and not by the client's doing."""
    flight = house.routed("acme")
    predicted = 1000 - (house.left("acme") or 0)
    house.end(flight, **how)
    assert house.left("acme") == 1000 - (predicted if cost == "predicted" else cost)
    assert house.left("acme", "requests_left") == 5 - requests


def test_a_request_whose_log_entry_never_comes_costs_what_was_predicted(house: House) -> None:
    """Once it is given up; its place is free since its end."""
    flight = house.routed("acme")
    before = house.left("acme")
    flight.close()
    assert house.left("acme", "running") == 0
    house.now_s += 60
    house.flights.expire()
    assert house.left("acme") == pytest.approx(min(1000.0, (before or 0) + 600))
    assert b'pointsman_tenant_tokens_total{source="estimate",tenant="acme"}' in house.metrics.page()


@pytest.mark.parametrize(
    ("quota", "requests", "code", "retry_after"),
    [
        ("requests: {per_s: 0.1, burst: 2}", 2, "rate_limit_exceeded", "10"),
        ("tokens: {per_s: 4, burst: 400}", 1, "rate_limit_exceeded", None),
        ("concurrency: 2", 2, "rate_limit_exceeded", "1"),
        ("budget: {tokens: 250}", 1, "insufficient_quota", "86400"),
    ],
    ids=["requests", "tokens", "concurrency", "budget"],
)
def test_whoever_takes_more_is_told_when_to_come_again(
    quota: str, requests: int, code: str, retry_after: str | None
) -> None:
    """429, and if he comes then he is let in."""
    house = House(f"{{default: {{{quota}}}}}")
    running = [house.routed("acme") for _ in range(requests + (quota.startswith("tokens")))]
    status, error, told = house.refused("acme")
    assert (status, error["code"]) == (429, code)
    assert "acme" in error["message"]
    assert told is not None
    assert retry_after in (None, told)
    for flight in running:
        flight.close()
    house.now_s += int(told)
    house.routed("acme")


def test_a_refused_request_has_taken_nothing(house: House) -> None:
    """Neither one over the quota nor one that finds no endpoint."""
    running = [house.routed("acme") for _ in range(3)]
    tokens, requests = house.left("acme"), house.left("acme", "requests_left")
    assert house.refused("acme")[0] == 429
    assert (house.left("acme"), house.left("acme", "requests_left")) == (tokens, requests)
    for flight in running:
        house.end(flight, usage=Usage(1, 1, None))
    house.fleet.observe(ENGINE, Evidence.DRAIN)
    tokens, requests = house.left("acme"), house.left("acme", "requests_left")
    assert house.refused("acme")[0] == 503
    assert (house.left("acme"), house.left("acme", "requests_left")) == (tokens, requests)
    assert house.left("acme", "running") == 0


def test_a_fault_of_ours_costs_a_tenant_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's policy that raises, say: it is a 500, and the account is as before."""
    first = house.routed("acme")
    house.end(first, usage=Usage(1, 1, None))
    before = house.quotas.describe()["acme"]

    class Broken:
        def rank(self, *_given: object) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(house.fleet.placements["chat"], "policy", Broken())
    assert house.refused("acme")[0] == 500
    assert house.quotas.describe()["acme"] == before


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("pushes", [True, False])
def test_a_stream_without_usage_is_settled_by_what_its_engine_reports(
    house: House, *, told: bool, pushes: bool
) -> None:
    """Where its plugin pushes: after a while, and only then by the estimate. Its place is free at once."""
    slot = house.state.slot_of(ENGINE)
    assert slot is not None
    house.state.silence_s[slot] = 3.0 if pushes else 0.0
    flight = house.flights.open()
    flight.caller = Caller("acme")
    headers = HEADERS | {"x-request-id": "id-1"}
    reply = house.pipeline.decide(flight, headers, b'{"model":"m","stream":true,"max_tokens":100,"messages":[]}')
    assert isinstance(reply, Route)
    reserved = 1000 - (house.left("acme") or 0)
    house.end(flight)
    assert house.left("acme", "running") == 0
    if told:
        house.quotas.reports.take([FinishedRequest("chatcmpl-id-1", "stop", 7, 3, 0, 1.0, 0.0)])
    house.now_s += 3
    house.quotas.tick()
    used = 10 if told and pushes else reserved
    source = "report" if told and pushes else "estimate"
    assert house.left("acme", "budget_spent_tokens") == pytest.approx(used)
    labels = {"tenant": "acme", "source": source}
    assert house.metrics.registry.get_sample_value("pointsman_tenant_tokens_total", labels) == pytest.approx(used)


def test_the_wait_for_a_report_does_not_make_a_request_longer() -> None:
    """By how long they take, clients are told when to come again."""
    house = House("{default: {concurrency: 1}}")
    slot = house.state.slot_of(ENGINE)
    assert slot is not None
    house.state.silence_s[slot] = 3.0
    for number in range(20):
        flight = house.flights.open()
        flight.caller = Caller("acme")
        body = b'{"model":"m","stream":true,"max_tokens":100,"messages":[]}'
        assert isinstance(house.pipeline.decide(flight, HEADERS | {"x-request-id": f"id-{number}"}, body), Route)
        house.end(flight)
        house.now_s += 5
        house.quotas.tick()
    house.routed("acme")
    assert house.refused("acme")[2] == "1"


@pytest.mark.parametrize(("usage", "splices"), [("as_asked", 0), ("inject", 1)])
def test_streams_are_asked_for_their_usage_if_the_config_says_so(usage: str, splices: int) -> None:
    """By us where the client did not, and counted by who asked."""
    house = House(f"{{usage: {usage}}}")
    for said in ({}, {"include_usage": True}, {"include_usage": False}):
        flight = house.flights.open()
        flight.caller = Caller("acme")
        body = {"model": "m", "messages": [], "stream": True} | ({"stream_options": said} if said else {})
        reply = house.pipeline.decide(flight, HEADERS, json.dumps(body).encode())
        assert isinstance(reply, Route)
        assert len(reply.splices) == (0 if said else splices)
    counted = house.metrics.page().decode().count("pointsman_stream_usage_total{")
    assert counted == 3 * splices


def test_a_tenant_sees_its_pools_alone(house: House) -> None:
    """Other models do not exist for it, in the list neither."""
    house.routed("guest", "s")
    assert house.refused("guest", "m")[:2] == (404, house.refused("other", "unheard-of")[1] | {
        "message": "The model `m` does not exist or is not served here"
    })  # fmt: skip
    for tenant, models in (("guest", ["s"]), ("other", ["m", "s"])):
        _, listed = house.ask(tenant, path="/v1/models")
        assert [entry["id"] for entry in json.loads(listed.body)["data"]] == models


def test_new_quotas_apply_at_once_and_what_runs_stays_counted(house: House) -> None:
    """A reload."""
    house.routed("acme")
    house.quotas.configure(parse(f"tenants: {{named: {{acme: {{concurrency: 1}}}}}}\n{POOLS}"))
    assert house.refused("acme")[1]["code"] == "rate_limit_exceeded"
    house.quotas.configure(parse(POOLS))
    house.routed("acme")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("tenants: {}\npools: [{name: p, models: [m], endpoints: {static: []}}]", "without `access`"),
        (f"tenants: {{named: {{a: {{pools: [chatt]}}}}}}\n{POOLS}", "chatt"),
        (f"tenants: {{default: {{requests: {{per_s: 0}}}}}}\n{POOLS}", "per_s"),
        (f"tenants: {{default: {{budget: {{tokens: 9, period_s: 1.0e-300}}}}}}\n{POOLS}", "period_s"),
    ],
    ids=["nobody has a tenant", "unknown pool", "no rate", "no period"],
)
def test_quotas_that_make_no_sense_are_refused(config: str, complaint: str) -> None:
    """With the place and the reason."""
    with pytest.raises(ConfigError, match=complaint):
        parse(config)
