"""The pipeline: where requests go, why they are refused, and that asking changes nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from extproc.access.gate import gate_of
from extproc.access.keys import digest_of
from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.sections import observing
from extproc.config.sections.callers import Access
from extproc.fleet.fleet import Fleet
from extproc.flight import Completion, Flight, Flights, Stage
from extproc.idempotency import Idempotency
from extproc.observe.decisions import DecisionLog
from extproc.observe.request_log import RequestLog
from extproc.pipeline import Pipeline
from extproc.reply import Answer, Pending, Route
from extproc.request.splice import apply
from extproc.retries import RetryBudgets
from extproc.senses.messages import Match, Matched
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence, State
from policies.placement.policy import FormulaSpec, Scored
from policies.placement.view import View
from policies.types import Reservation
from vllm_adapters.health import Listing

CONFIG = """
limits: {request_body_bytes: 100000, open_requests: 4}
pools:
  - name: chat
    models: [served]
    aliases: {gpt-4o: served}
    endpoints: {static: ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]}
  - name: other
    models: [lone]
    cluster: mesh_cluster
    endpoints: {static: ["10.0.1.1:8000"]}
  - name: bare
    models: [nothing]
    endpoints: {file: none.yaml}
"""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHAT_ADDRESSES = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
POST = {":method": "POST", ":path": CHAT}


class Histogram:
    """A clock that is not looked at."""

    def __init__(self, seen: Counter[str], name: str) -> None:
        self._seen, self._name = seen, name

    def observe(self, seconds: float) -> None:
        """One step took so long."""
        assert seconds >= 0
        self._seen[self._name] += 1


class Counted:
    """PipelineEvents, FleetEvents and FlightEvents, as far as these tests look at them."""

    def __init__(self) -> None:
        self.decisions: list[tuple[str, str, str, int, int]] = []
        self.refusals: list[tuple[str, int]] = []
        self.answers: list[str] = []
        self.fallbacks: list[str] = []
        self.left: list[tuple[str, str]] = []
        self.steps: Counter[str] = Counter()
        self.large_bodies: list[str] = []

    def decided(self, pool: str, endpoint: str, reason: str, prompt_tokens: int, matched_tokens: int) -> None:
        """Routed."""
        self.decisions.append((pool, endpoint, reason, prompt_tokens, matched_tokens))

    def refused_with(self, reason: str, status: int) -> None:
        """Refused."""
        self.refusals.append((reason, status))

    def large_body(self, result: str) -> None:
        """Count it."""
        self.large_bodies.append(result)

    def answered(self, what: str) -> None:
        """Answered here."""
        self.answers.append(what)

    def fell_back(self, reason: str) -> None:
        """Knew less than it should."""
        self.fallbacks.append(reason)

    def queue_changed(self, pool: str, class_name: str, waiting: int, held_bytes: int) -> None:
        """Not looked at."""

    def queue_left(self, pool: str, class_name: str, how: str, waited_s: float) -> None:  # noqa: ARG002 - WaitingEvents
        """Waits no more."""
        self.left.append((class_name, how))

    def queue_class_known(self, pool: str, class_name: str) -> None:
        """Not looked at."""

    def queue_class_gone(self, pool: str, class_name: str) -> None:
        """Not looked at."""

    def usage_asked(self, by: str) -> None:
        """Not looked at."""

    def stage(self, name: str) -> Histogram:
        """The clock of one step."""
        return Histogram(self.steps, name)

    def endpoint_changed(self, address: str, before: State, after: State) -> None:
        """Not looked at."""

    def endpoint_gone(self, address: str) -> None:
        """Not looked at."""

    def endpoint_restarted(self, address: str) -> None:
        """Not looked at."""

    def engine_finished(self, address: str, reason: str, count: float) -> None:
        """Not looked at."""

    def endpoint_tripped(self, address: str, *, spared: bool) -> None:
        """Not looked at."""

    def endpoint_refused(self, pool: str) -> None:
        """Not looked at."""

    def moved(self, flight: Flight, from_slot: int, to_slot: int) -> None:
        """Not looked at."""

    def failed(self, flight: Flight, address: str, why: str) -> None:
        """Not looked at."""

    def settled(self, flight: Flight, completion: Completion) -> None:
        """Not looked at."""

    def retried(self, flight: Flight, count: int) -> None:
        """Not looked at."""

    def released(self, flight: Flight) -> None:
        """Its place is free."""

    def missing(self, flight: Flight) -> None:
        """Not looked at."""


class House:
    """A pipeline over a fleet that is ready and acknowledged."""

    def __init__(self, config: str = CONFIG) -> None:
        self.now_s = 100.0
        self.events = Counted()
        self.state = FleetState()
        self.generation = Generation(1, parse(config))
        self.fleet = Fleet(self.state, self.events, lambda: self.now_s)
        self.flights = Flights(
            self.state,
            self.events,
            lambda: self.now_s,
            max_open=self.generation.config.limits.open_requests,
            max_unsettled=100,
            access_log_timeout_s=10,
        )
        self.log = DecisionLog(10)
        self.pipeline = Pipeline(
            self.generation,
            self.fleet,
            self.flights,
            self.log,
            self.events,
            clock=lambda: self.now_s,
            wall_clock=lambda: 1.78e9,
            rng=Random(7),
        )
        self.fleet.configure(self.generation)
        self.pipeline.rooms.configure(self.generation.config, self.fleet.placements)
        for pool in self.generation.config.pools:
            self.fleet.set_endpoints(pool.name, pool.endpoints.static or ())
        self.fleet.acknowledged(self.fleet.assignments())
        for address in list(self.fleet.addresses()):
            self.fleet.listed_models(address, Listing(frozenset({"served", "lone"}), 100_000))
            self.state.observed_at_s[self.state.slot_of(address)] = self.now_s

    def ask(self, body: bytes | dict[str, Any], **headers: str) -> Route | Answer:
        """One request on a new stream; the stream stays open."""
        self.flight = self.flights.open()
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        reply = self.pipeline.decide(
            self.flight, POST | {name.replace("_", "-"): v for name, v in headers.items()}, raw
        )
        assert isinstance(reply, Route | Answer)
        return reply

    def at(self, method: str, path: str, body: bytes = b"{}") -> Answer:
        """One request by method and path that is answered here."""
        reply = self.pipeline.decide(self.flights.open(), {":method": method, ":path": path}, body)
        assert isinstance(reply, Answer)
        return reply

    def booked(self) -> tuple[int, int, int]:
        """All that is out."""
        state = self.state
        return (
            int(state.in_flight.sum()),
            int(state.in_flight_prompt_tokens.sum()),
            int(state.in_flight_uncached_tokens.sum()),
        )


def chat(model: str = "served", words: int = 500, **fields: Any) -> dict[str, Any]:
    """A body for chat."""
    return {"model": model, "messages": [{"role": "user", "content": "word " * words}], **fields}


def error_of(answer: Route | Answer) -> dict[str, Any]:
    """The error object a client sees, with the headers it comes with."""
    assert isinstance(answer, Answer)
    assert ("content-type", "application/json") in answer.headers
    document = json.loads(answer.body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return dict(document["error"])


@pytest.fixture
def house() -> House:
    """Three ready endpoints in `chat`, one in a mesh's cluster, none in `bare`."""
    return House()


# -- routed


def test_a_request_goes_to_its_models_pool(house: House) -> None:
    """The pool's cluster, its endpoints in order of preference, the terms, our id, and no edit."""
    route = house.ask(chat())
    assert isinstance(route, Route)
    assert route.cluster == "pool_chat"
    assert sorted(route.addresses) == sorted(CHAT_ADDRESSES)
    assert route.request_id == house.flight.request_id
    assert route.model == "served"
    assert dict(route.headers).keys() == {
        "x-envoy-max-retries",
        "x-envoy-retry-on",
        "x-envoy-retriable-status-codes",
        "x-envoy-upstream-rq-timeout-ms",
    }
    assert route.splices == ()


def test_a_limit_on_time_fits_the_engine_chosen_and_what_the_pool_has_learned(house: House) -> None:
    """Its context where the request names no length; the pace that answers had of late."""

    def limit_ms() -> int:
        route = house.ask(chat())
        assert isinstance(route, Route)
        house.flight.close()
        return int(dict(route.headers)["x-envoy-upstream-rq-timeout-ms"])

    at_first = limit_ms()
    assert 3_600_000 <= at_first <= 1.25 * 3_600_000  # 600 s and 1.5 x 100,000 tokens at 50 a second
    for _ in range(200):
        house.fleet.placements["chat"].ledger.decoded(Reservation(0, 1, 10, 10), 2_000, 21.0, 1.0)
    assert limit_ms() < 0.8 * at_first


def test_a_pool_in_anothers_cluster_is_routed_there(house: House) -> None:
    """By the name the config gives."""
    route = house.ask(chat("lone"))
    assert isinstance(route, Route)
    assert (route.cluster, route.addresses) == ("mesh_cluster", ("10.0.1.1:8000",))


def test_an_alias_is_replaced_in_the_body(house: House) -> None:
    """By a splice: the engine sees the name it serves, every other byte is the client's."""
    body = b'{ "temperature":1e0,  "model" : "gpt-4o", "messages":["\\u4f60"] }'
    route = house.ask(body)
    assert isinstance(route, Route)
    assert apply(body, route.splices) == body.replace(b"gpt-4o", b"served")
    assert route.model == "served"


def test_what_was_taken_is_booked_and_given_back_at_the_end(house: House) -> None:
    """On the first of the addresses, for the estimated tokens, until the stream ends."""
    route = house.ask(chat())
    assert isinstance(route, Route)
    slot = house.state.slot_of(route.addresses[0])
    assert house.flight.request is not None
    tokens = house.flight.request.input_tokens
    assert tokens == pytest.approx(2_540 / 4, rel=0.02)
    assert house.state.in_flight[slot] == 1
    assert house.booked() == (1, tokens, tokens)
    house.flight.close()
    assert house.booked() == (0, 0, 0)


def test_a_decision_is_counted_with_its_tokens(house: House) -> None:
    """The second turn of a conversation matches what the first one left."""
    first = house.ask(chat(words=2_000))
    assert isinstance(first, Route)
    [(pool, endpoint, reason, tokens, matched)] = house.events.decisions
    assert (pool, endpoint, reason, matched) == ("chat", first.addresses[0], "load", 0)
    second = house.ask(chat(words=2_000))
    assert isinstance(second, Route)
    assert second.addresses[0] == first.addresses[0]
    assert house.events.decisions[1][3] == tokens
    assert 0.9 * tokens < house.events.decisions[1][4] <= tokens
    assert house.events.steps == {"parse": 2, "choose": 2, "commit": 2}
    assert house.events.refusals == []


def test_an_alias_shares_the_cache_of_its_model(house: House) -> None:
    """The prefix is the engine's, whatever name the client used."""
    house.ask(chat("served", words=2_000))
    house.ask(chat("gpt-4o", words=2_000))
    assert house.events.decisions[1][4] > 0


def test_the_prompt_goes_no_further_than_the_decision(house: House) -> None:
    """After the reply neither the flight nor the decision log holds a byte of it."""
    house.ask(chat(words=10, user="u"))
    request = house.flight.request
    assert request is not None
    assert request.prompt == b""
    assert request.session_key == "u"
    assert "word" not in json.dumps(house.log.read(10))


def test_the_query_is_not_part_of_the_path(house: House) -> None:
    """`?x=1` changes nothing."""
    reply = house.pipeline.decide(
        house.flights.open(), {":method": "POST", ":path": CHAT + "?x=1"}, json.dumps(chat()).encode()
    )
    assert isinstance(reply, Route)


@pytest.mark.parametrize("header", ["x_pointsman_session", "x_session_id"])
def test_a_session_may_be_named_by_header(house: House, header: str) -> None:
    """And comes before the body's."""
    house.ask(chat(user="u"), **{header: "s"})
    assert house.flight.request is not None
    assert house.flight.request.session_key == "s"


@pytest.mark.parametrize(("policy", "fallbacks"), [("weighted", ["stale_figures"]), ("default", [])])
def test_stale_figures_are_a_counted_fallback(policy: str, fallbacks: list[str]) -> None:
    """Nothing was scraped for a while: routed all the same, and not in silence, by a policy that looks at scrapes."""
    house = House(CONFIG.replace("name: chat\n", f"name: chat\n    policy: {policy}\n"))
    house.now_s += 60
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == fallbacks


def test_a_prompt_that_no_window_holds_is_left_to_the_engine(house: House) -> None:
    """Our count is an estimate: routed, and counted as resting on one."""
    for address in CHAT_ADDRESSES:
        house.fleet.listed_models(address, Listing(frozenset({"served"}), 100))
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == ["context_estimate"]


def test_a_single_endpoint_is_given_where_lists_are_not_understood() -> None:
    """`wire.endpoint_list: single`."""
    route = House("wire: {endpoint_list: single}\n" + CONFIG).ask(chat())
    assert isinstance(route, Route)
    assert len(route.addresses) == 1


def test_the_list_is_as_long_as_configured() -> None:
    """And no longer than there are endpoints."""
    route = House("wire: {endpoint_list_length: 2}\n" + CONFIG).ask(chat())
    assert isinstance(route, Route)
    assert len(route.addresses) == 2


def test_no_retries_are_said_so() -> None:
    """Zero must be sent, or the route's own default applies."""
    route = House("retries: {attempts: 0}\n" + CONFIG).ask(chat())
    assert isinstance(route, Route)
    assert dict(route.headers)["x-envoy-max-retries"] == "0"
    assert "x-envoy-retry-on" not in dict(route.headers)


def test_where_too_much_is_retried_the_next_request_is_sent_once() -> None:
    """Counted as a fallback, and told in the decision; another pool has a budget of its own."""
    house = House("retries: {budget: 0.5, budget_floor: 2}\n" + CONFIG.replace("open_requests: 4", "open_requests: 99"))
    budgets = house.pipeline._retry_budgets = RetryBudgets(house.generation.config, lambda: house.now_s)

    def tries(model: str = "served") -> str:
        route = house.ask(chat(model, words=1))
        assert isinstance(route, Route)
        return dict(route.headers)["x-envoy-max-retries"]

    assert tries() == "1"
    budgets.retried("chat", 2)
    assert tries() == "0"
    assert house.events.fallbacks == ["retry_budget"]
    assert house.log.read(1)[0]["fallbacks"] == ["retry_budget"]
    assert tries("lone") == "1"
    house.now_s += 20
    assert tries() == "1"


def test_where_nothing_is_ever_retried_there_is_no_budget_to_use_up() -> None:
    """And so nothing to do without."""
    house = House("retries: {attempts: 0, budget: 0, budget_floor: 0}\n" + CONFIG)
    house.pipeline._retry_budgets = RetryBudgets(house.generation.config, lambda: house.now_s)
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == []


def test_what_is_asked_twice_under_one_key_is_done_once(house: House) -> None:
    """The second is refused, before it takes anything; when the first came to nothing, the third goes."""
    keys = house.pipeline._idempotency = Idempotency(house.generation.config, lambda: house.now_s)
    assert isinstance(house.ask(chat(), idempotency_key="k"), Route)
    first, taken = house.flight, house.booked()
    second = house.ask(chat(), idempotency_key="k")
    assert isinstance(second, Answer)
    assert error_of(second)["code"] == "duplicate_under_way"
    assert dict(second.headers).items() >= {"x-should-retry": "true", "retry-after": "1"}.items()
    assert house.booked() == taken
    first.close()
    keys.settle(first, "endpoint_failed")
    assert isinstance(house.ask(chat(), idempotency_key="k"), Route)


def test_a_request_that_is_refused_has_not_used_its_key(house: House) -> None:
    """Nobody could take it; the same key may be sent again while its stream is still open."""
    house.pipeline._idempotency = Idempotency(house.generation.config, lambda: house.now_s)
    for address in CHAT_ADDRESSES:
        house.fleet.observe(address, Evidence.DRAIN)
    for _ in range(2):
        refused = house.ask(chat(), idempotency_key="k")
        assert isinstance(refused, Answer)
        assert error_of(refused)["code"] == "no_ready_endpoint"


def test_text_completions_are_routed_alike(house: House) -> None:
    """By `prompt`."""
    reply = house.pipeline.decide(
        house.flights.open(), {":method": "POST", ":path": TEXT}, b'{"model":"served","prompt":"Once"}'
    )
    assert isinstance(reply, Route)


# -- answered here


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models?limit=1"])
def test_the_model_list_is_ours(house: House, method: str, path: str) -> None:
    """Every model and alias, in OpenAI's form, with what an alias stands for."""
    answer = house.at(method, path)
    assert answer.status == 200
    document = json.loads(answer.body)
    assert document["object"] == "list"
    roots = {entry["id"]: entry["root"] for entry in document["data"]}
    assert roots == {"served": "served", "gpt-4o": "served", "lone": "lone", "nothing": "nothing"}
    assert {entry["object"] for entry in document["data"]} == {"model"}
    assert house.events.answers == ["models"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_one_model_is_told_as_in_the_list(house: House, method: str) -> None:
    """An alias too; a query changes nothing."""
    listed = {entry["id"]: entry for entry in json.loads(house.at("GET", "/v1/models").body)["data"]}
    for name, entry in listed.items():
        answer = house.at(method, f"/v1/models/{name}?x=1")
        assert (answer.status, json.loads(answer.body)) == (200, entry)
    assert set(house.events.answers) == {"models"}
    assert house.events.refusals == []


@pytest.mark.parametrize("written", ["Qwen/Qwen2.5-7B-Instruct", "Qwen%2FQwen2.5-7B-Instruct"])
def test_a_model_with_a_slash_in_its_name_is_found(written: str) -> None:
    """As clients escape it, or do not."""
    house = House(CONFIG.replace("lone", "Qwen/Qwen2.5-7B-Instruct"))
    answer = house.at("GET", f"/v1/models/{written}")
    assert json.loads(answer.body)["id"] == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/models/served/x", "/v1/models/%73erved2", "/v1/models/../x"])
def test_a_model_that_there_is_not_is_not_found(house: House, path: str) -> None:
    """In OpenAI's form, and counted as a refusal."""
    answer = house.at("GET", path)
    error = error_of(answer)
    assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert house.events.refusals == [("unknown_model", 404)]
    assert house.events.answers == []


def test_other_calls_below_the_model_list_are_not_ours() -> None:
    """They are for a path rule, where there is one."""
    rule = "routing: {paths: [{prefix: /v1/models, pool: chat}]}\n"
    house = House(CONFIG + rule)
    call = {":method": "POST", ":path": "/v1/models/served:predict"}
    assert isinstance(house.pipeline.decide(house.flights.open(), call, b"{}"), Route)
    assert house.at("GET", "/v1/models/served").status == 200
    assert error_of(House().at("DELETE", "/v1/models/served"))["code"] == "unknown_path"


# -- refused


def test_a_policy_whose_scores_are_none_costs_a_500_and_is_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log; the client learns nothing of our policies, and nothing is taken."""

    class Broken(FormulaSpec):
        def scored(self, view: View) -> Scored:
            return np.full(len(view.slots), np.nan), {}

    monkeypatch.setattr(house.fleet.placements["chat"], "policy", Broken().build("theirs"))
    with capture_logs() as logs:
        error = error_of(house.ask(chat()))
    assert (error["code"], house.events.refusals) == ("internal_error", [("internal_error", 500)])
    assert [entry["error"].partition(" ranks ")[0] for entry in logs] == ["policy 'theirs'"]
    assert house.booked()[0] == 0


def refused_line(house: House, folder: Path, ask: Callable[[], object]) -> dict[str, Any]:
    """The request log's line of what `ask` has refused."""
    log = RequestLog(observing.RequestLog(file=folder / "log"), lambda _: house.events, lambda: house.now_s)  # type: ignore[arg-type, return-value]
    house.pipeline._request_log = log
    ask()
    log.close()
    [line] = (folder / "log").read_text().splitlines()
    return dict(json.loads(line))


def test_an_unknown_path_is_refused(house: House) -> None:
    """404, naming it, cut to a sane length."""
    error = error_of(house.at("POST", "/v1/" + "x" * 10_000))
    assert error["message"].startswith("no such path: /v1/xxx")
    assert len(error["message"]) < 300
    assert house.events.refusals == [("unknown_path", 404)]


@pytest.mark.parametrize(
    ("body", "named"),
    [({"messages": [], "model": "nobody"}, "nobody"), ({"messages": [], "model": "m" * 300}, "m" * 256), ({}, None)],
)
def test_a_refusals_line_has_what_was_read_of_the_request(
    house: House, tmp_path: Path, body: dict[str, Any], named: str | None
) -> None:
    """For accounting: the API, the model asked for, the body's size."""
    line = refused_line(house, tmp_path, lambda: house.ask(body))
    assert (line["kind"], line["asked_model"], line["request_bytes"]) == ("chat", named, len(json.dumps(body)))


def test_a_request_that_nobody_can_take_has_its_model_in_its_line(house: House, tmp_path: Path) -> None:
    """Whose pool it was is what is asked first."""
    for address in list(house.fleet.addresses()):
        house.fleet.observe(address, Evidence.DRAIN)
    line = refused_line(house, tmp_path, lambda: house.ask(chat("gpt-4o")))
    assert (line["reason"], line["asked_model"]) == ("no_ready_endpoint", "gpt-4o")


def test_what_is_refused_before_its_body_comes_has_no_size(house: House, tmp_path: Path) -> None:
    """Not 0: nobody knows."""
    house.pipeline.draining = True
    line = refused_line(house, tmp_path, lambda: house.pipeline.refuse_early(house.flights.open(), POST))
    assert (line["kind"], line["request_bytes"]) == ("chat", None)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep", "/reset_prefix_cache", "/v1/chat", "", "/"])
def test_engine_administration_is_not_routed(house: House, path: str) -> None:
    """Only the paths of inference are."""
    assert house.at("POST", path).status == 404


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("DELETE", TEXT), ("PUT", CHAT), ("POST", "/v1/models"), ("", CHAT)]
)
def test_a_wrong_method_is_refused(house: House, method: str, path: str) -> None:
    """405, naming both."""
    answer = house.at(method, path)
    assert answer.status == 405
    assert error_of(answer)["message"] == f"{method} is not allowed on {path}"
    assert house.events.refusals == [("method_not_allowed", 405)]


REFUSALS: dict[str, tuple[Callable[[House], Route | Answer], int, str]] = {
    "empty body": (lambda house: house.ask(b""), 400, "empty_body"),
    "not JSON": (lambda house: house.ask(b"{"), 400, "invalid_json"),
    "no model": (lambda house: house.ask({"messages": []}), 400, "invalid_request"),
    "no messages": (lambda house: house.ask({"model": "served"}), 400, "invalid_request"),
    "unknown model": (lambda house: house.ask(chat("nope")), 404, "unknown_model"),
    "too large": (lambda house: house.ask(b"x" * 100_001), 413, "body_too_large"),
    "compressed": (lambda house: house.ask(b"\x1f\x8b", content_encoding="gzip"), 415, "unsupported_encoding"),
    "empty pool": (lambda house: house.ask(chat("nothing")), 503, "no_ready_endpoint"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_has_its_status_and_reason(house: House, case: str) -> None:
    """Counted by reason, told in OpenAI's form, and nothing is booked or awaited."""
    ask, status, reason = REFUSALS[case]
    answer = ask(house)
    assert isinstance(answer, Answer)
    assert (answer.status, answer.reason) == (status, reason)
    assert error_of(answer)["message"]
    assert house.events.refusals == [(reason, status)]
    assert house.booked() == (0, 0, 0)
    assert house.flight.stage is Stage.OPEN
    assert house.log.read(10) == []
    house.flight.close()
    assert house.flights.unsettled_count == 0


EARLY: dict[str, tuple[dict[str, str], int, str]] = {
    "unknown path": ({":path": "/nope"}, 404, "unknown_path"),
    "wrong method": ({":method": "PUT"}, 405, "method_not_allowed"),
    "model list by POST": ({":path": "/v1/models"}, 405, "method_not_allowed"),
    "declared too large": ({"content-length": "100001"}, 413, "body_too_large"),
    "compressed": ({"content-encoding": "br"}, 415, "unsupported_encoding"),
}


@pytest.mark.parametrize("case", EARLY)
def test_what_headers_alone_condemn_is_refused_before_the_body_comes(house: House, case: str) -> None:
    """Counted and logged as any refusal."""
    headers, status, reason = EARLY[case]
    answer = house.pipeline.refuse_early(house.flights.open(), POST | headers)
    assert answer is not None
    assert (answer.status, answer.reason) == (status, reason)
    assert error_of(answer)["message"]
    assert house.events.refusals == [(reason, status)]
    assert [record["reason"] for record in house.log.read_refusals(9)] == [reason]


def test_a_process_that_takes_nothing_says_so_before_the_body_comes(house: House) -> None:
    """Draining, or full."""
    flights = [house.flights.open() for _ in range(5)]
    full = house.pipeline.refuse_early(flights[0], POST)
    house.pipeline.draining = True
    draining = house.pipeline.refuse_early(flights[0], POST)
    assert full is not None
    assert draining is not None
    assert (full.reason, draining.reason) == ("too_many_requests", "shutting_down")


@pytest.mark.parametrize(
    "headers", [{}, {"content-length": "100000"}, {"content-length": "many"}, {"content-encoding": "identity"}]
)
def test_headers_that_may_be_good_are_let_through(house: House, headers: dict[str, str]) -> None:
    """Nothing is counted: the body decides."""
    assert house.pipeline.refuse_early(house.flights.open(), POST | headers) is None
    assert house.events.refusals == []


def test_a_body_of_exactly_the_limit_is_read(house: House) -> None:
    """The bound is on what is larger."""
    body = json.dumps(chat(words=1)).encode()
    assert isinstance(house.ask(body + b" " * (100_000 - len(body))), Route)


def test_an_encoding_that_is_none_is_accepted(house: House) -> None:
    """`identity` says that nothing was done."""
    assert isinstance(house.ask(chat(), content_encoding="Identity"), Route)


def test_an_unknown_model_is_named(house: House) -> None:
    """With OpenAI's own code and the parameter."""
    error = error_of(house.ask(chat("nope" * 1_000)))
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`nopenope" in error["message"]
    assert len(error["message"]) < 300


def test_while_draining_nothing_new_is_taken(house: House) -> None:
    """503, and when to come again."""
    house.pipeline.draining = True
    answer = house.ask(chat())
    assert isinstance(answer, Answer)
    assert (answer.status, answer.reason) == (503, "shutting_down")
    assert dict(answer.headers)["retry-after"] == "1"
    assert house.at("GET", "/v1/models").status == 200


def test_at_the_bound_of_open_requests_the_next_is_shed(house: House) -> None:
    """429 with Retry-After; when one ends the next is taken."""
    flights = []
    for _ in range(4):
        assert isinstance(house.ask(chat()), Route)
        flights.append(house.flight)
    answer = house.ask(chat())
    assert isinstance(answer, Answer)
    assert (answer.status, answer.reason) == (429, "too_many_requests")
    assert error_of(answer)["type"] == "rate_limit_error"
    assert dict(answer.headers)["retry-after"] == "1"
    house.flight.close()
    flights[0].close()
    assert isinstance(house.ask(chat()), Route)


def test_when_no_endpoint_is_ready_the_filters_are_named(house: House) -> None:
    """503 that says how many were removed by what."""
    house.fleet.observe(CHAT_ADDRESSES[0], Evidence.DRAIN)
    house.fleet.observe(CHAT_ADDRESSES[1], Evidence.PROBE_REFUSED)
    house.fleet.state.set_models(house.fleet.state.slot_of(CHAT_ADDRESSES[2]), frozenset({"another"}))
    answer = house.ask(chat())
    assert isinstance(answer, Answer)
    assert (answer.status, dict(answer.headers)["retry-after"]) == (503, "1")
    error = error_of(answer)
    assert error["type"] == "server_error"
    assert error["message"] == "no endpoint of pool chat can take the request now: 2 not ready, 1 do not list the model"


def test_an_empty_pool_says_so(house: House) -> None:
    """Rather than blame a filter."""
    assert "the pool is empty" in error_of(house.ask(chat("nothing")))["message"]


def test_a_fault_of_ours_is_a_500_without_its_working(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as internal_error; the client sees neither the traceback nor the exception's text."""

    class Broken:
        def rank(self, *_given: object) -> None:
            raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(house.fleet.placements["chat"], "policy", Broken())
    answer = house.ask(chat())
    assert isinstance(answer, Answer)
    assert (answer.status, answer.reason) == (500, "internal_error")
    error = error_of(answer)
    assert (error["type"], error["message"]) == ("server_error", "internal error while routing")
    assert b"secret" not in answer.body
    assert b"Traceback" not in answer.body
    assert house.events.refusals == [("internal_error", 500)]
    assert house.booked() == (0, 0, 0)


def test_a_fault_after_the_reservation_gives_it_back_with_the_stream(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was booked before the fault hangs on the flight."""

    def broken(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(house.events, "decided", broken)
    answer = house.ask(chat())
    assert isinstance(answer, Answer)
    assert answer.status == 500
    house.flight.close()
    assert house.booked() == (0, 0, 0)


def test_a_reload_changes_where_the_next_request_goes(house: House) -> None:
    """A request sees one generation: the one in force when it is decided."""
    renamed = Generation(2, parse(CONFIG.replace("gpt-4o", "gpt-5")))
    house.fleet.configure(renamed)
    house.pipeline.generation = renamed
    assert isinstance(house.ask(chat("gpt-5")), Route)
    answer = house.ask(chat("gpt-4o"))
    assert isinstance(answer, Answer)
    assert answer.reason == "unknown_model"


# -- explained


def fingerprint(house: House) -> tuple[object, ...]:
    """Everything a decision could change."""
    placement = house.fleet.placements["chat"]
    return (
        house.booked(),
        len(placement.index),
        house.pipeline._rng.getstate(),
        len(house.events.decisions),
        len(house.events.refusals),
        dict(house.events.steps),
        house.flights.opened,
        house.log.read(10),
    )


def test_explaining_changes_nothing(house: House) -> None:
    """Not the counts, the index, the draws of live requests, the metrics or the log."""
    house.ask(chat(words=2_000))
    before = fingerprint(house)
    answers = [house.pipeline.explain(CHAT, json.dumps(chat(words=2_000)).encode()) for _ in range(3)]
    for body in (b"{", json.dumps(chat("nope")).encode(), json.dumps(chat("nothing")).encode()):
        house.pipeline.explain(CHAT, body)
    assert fingerprint(house) == before
    assert answers[0] == answers[1] == answers[2]


def test_an_explanation_says_where_and_why(house: House) -> None:
    """The same choice as a live request's, with every candidate's score and its parts."""
    route = house.ask(chat("gpt-4o", words=2_000))
    assert isinstance(route, Route)
    told = house.pipeline.explain(CHAT, json.dumps(chat("gpt-4o", words=2_000)).encode())
    assert (told["asked_model"], told["model"], told["pool"], told["policy"]) == ("gpt-4o", "served", "chat", "default")
    assert told["endpoints"][0] == route.addresses[0]
    assert told["matched_tokens"] > 0
    assert {candidate["endpoint"] for candidate in told["candidates"]} == set(CHAT_ADDRESSES)
    best = told["candidates"][0]
    assert best["endpoint"] == route.addresses[0]
    assert set(best["parts"]) == {"own", "stall", "decode", "eviction", "overflow", "band"}
    assert told["filtered"] == []


def test_an_explanation_names_who_was_filtered(house: House) -> None:
    """By filter and address, also when nobody is left."""
    for address in CHAT_ADDRESSES:
        house.fleet.observe(address, Evidence.DRAIN)
    told = house.pipeline.explain(CHAT, json.dumps(chat()).encode())
    assert told["endpoints"] == []
    assert told["filtered"] == [{"filter": "ready", "endpoints": list(CHAT_ADDRESSES)}]
    assert (told["pool"], told["model"]) == ("chat", "served")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, b"", (400, "empty_body")),
        (CHAT, json.dumps(chat("nope")).encode(), (404, "unknown_model")),
        ("/v1/messages", json.dumps(chat("nope")).encode(), (404, "unknown_model")),
        ("/v1/messages/count_tokens", b"{", (400, "invalid_json")),
    ],
)
def test_an_explanation_of_a_refusal_says_why(house: House, path: str, body: bytes, expected: tuple[int, str]) -> None:
    """As a client of that API would be told: the very same object, and the status; and the reason as in metrics."""
    answer = house.at("POST", path, body)
    told = {"status": answer.status, "reason": answer.reason}
    assert house.pipeline.explain(path, body) == {**json.loads(answer.body), **told}
    assert (answer.status, answer.reason) == expected


def test_the_decision_log_has_the_refusal(house: House) -> None:
    """Under the id the client was answered with."""
    house.ask(chat("nope"))
    [record] = house.log.read_refusals(10)
    assert record["request_id"] == house.flight.request_id
    assert (record["path"], record["status"], record["reason"]) == (CHAT, 404, "unknown_model")
    assert record["time"] == 1.78e9


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_query_is_kept_nowhere(house: House, method: str) -> None:
    """Some clients put their key there: neither the log of refusals nor the answer repeats it."""
    answer = house.at(method, CHAT + "?api-key=PRIVATE", b"")
    assert b"PRIVATE" not in answer.body
    assert "PRIVATE" not in json.dumps(house.log.read_refusals(1))


def test_the_decision_log_has_the_decision(house: House) -> None:
    """Under the id that Envoy was told."""
    route = house.ask(chat("gpt-4o"))
    assert isinstance(route, Route)
    [record] = house.log.read(10, route.request_id)
    assert record["time"] == 1.78e9
    assert (record["asked_model"], record["model"], record["rewritten"]) == ("gpt-4o", "served", True)
    assert record["endpoints"] == list(route.addresses)
    assert record["outcome"] is None


def test_a_length_of_thousands_of_digits_is_a_refusal_too(house: House) -> None:
    """Nothing a client writes there may raise."""
    found = house.pipeline.refuse_early(
        house.flights.open(),
        {":method": "POST", ":path": "/v1/chat/completions", "content-length": "9" * 5_000},
    )
    assert found is not None
    assert found.status == 413


# -- other APIs


def test_a_stored_answer_is_asked_for_where_it_was_really_served(house: House) -> None:
    """The flight learns later that another endpoint served it; that one has the answer."""
    route = house.ask({"model": "served", "input": "x"}, **{":path": "/v1/responses"})
    assert isinstance(route, Route)
    really = next(address for address in CHAT_ADDRESSES if address != route.addresses[0])
    house.flight.served(really)
    house.flight.close()
    again = house.ask(b"", **{":method": "GET", ":path": f"/v1/responses/resp_{route.request_id}"})
    assert isinstance(again, Route)
    assert again.addresses == (really,)


@pytest.mark.parametrize(("subset", "status"), [(("10.0.0.1", "10.0.0.2", "10.0.0.3"), None), (("10.9.9.9",), 503)])
def test_the_gateways_subset_holds_for_stored_answers_too(
    house: House, subset: tuple[str, ...], status: int | None
) -> None:
    """Where the one endpoint that has it is not allowed, nobody can answer."""
    route = house.ask({"model": "served", "input": "x"}, **{":path": "/v1/responses"})
    assert isinstance(route, Route)
    flight = house.flights.open()
    flight.subset = subset
    headers = {":method": "GET", ":path": f"/v1/responses/resp_{route.request_id}"}
    reply = house.pipeline.decide(flight, headers, b"")
    assert status == (reply.status if isinstance(reply, Answer) else None)


def test_anthropics_clients_get_anthropics_errors(house: House) -> None:
    """Below their paths alone."""
    answer = house.at("POST", "/v1/messages", b'{"model":"nope","messages":[]}')
    assert json.loads(answer.body)["error"]["type"] == "not_found_error"


def test_engine_administration_is_refused_in_words_unless_allowed() -> None:
    """Even where a rule covers everything; allowed, the rule leads there."""
    config = "routing: {paths: [{prefix: /, pool: chat}]}" + CONFIG
    assert "administration" in error_of(House(config).at("POST", "/sleep"))["message"]
    allowed = House(config.replace("routing: {", "routing: {allow_engine_admin: true, "))
    assert isinstance(allowed.ask(b"", **{":path": "/sleep"}), Route)


def test_a_gateway_that_hides_the_path_gets_it_guessed(house: House) -> None:
    """From the body, whatever the API."""
    for body in (b'{"model":"served","messages":[]}', b'{"model":"served","query":"x","documents":[]}'):
        assert house.pipeline.refuse_early(house.flights.open(), {}) is None
        assert isinstance(house.pipeline.decide(house.flights.open(), {}, body), Route)


@pytest.mark.parametrize(
    ("path", "content_type"),
    [(CHAT, "multipart/form-data; boundary=x"), ("/v1/audio/translations", "application/json")],
)
def test_a_form_and_json_are_not_the_same(house: House, path: str, content_type: str) -> None:
    """415 before the body comes; saying what to send."""
    headers = {":method": "POST", ":path": path, "content-type": content_type}
    answer = house.pipeline.refuse_early(house.flights.open(), headers)
    assert answer is not None
    assert (answer.status, answer.reason) == (415, "unsupported_content_type")


# -- bodies that take long to inflate


def packed(spaces: int) -> bytes:
    """A chat that is mostly blank."""
    return gzip.compress(b'{"model":"served",' + b" " * spaces + b'"messages":[]}')


LARGE = CONFIG.replace("100000", "2000000")
PACKED = {**POST, "content-encoding": "gzip"}


async def test_a_body_that_inflates_to_much_is_inflated_beside_the_loop() -> None:
    """The decision comes later, and is like any other; a short one comes at once."""
    house = House(LARGE)
    assert isinstance(house.pipeline.decide(house.flights.open(), PACKED, packed(1_000)), Route)
    later = house.pipeline.decide(house.flights.open(), PACKED, packed(1_000_000))
    assert isinstance(later, Pending)
    assert isinstance(await later.ready, Route)
    assert house.booked()[0] == 2


async def test_a_bomb_is_refused_once_its_limit_is_reached() -> None:
    """As any body that is too large."""
    house = House(LARGE)
    later = house.pipeline.decide(house.flights.open(), PACKED, packed(3_000_000))
    assert isinstance(later, Pending)
    answer = await later.ready
    assert isinstance(answer, Answer)
    assert (answer.status, house.events.refusals) == (413, [("body_too_large", 413)])


async def test_a_client_that_leaves_while_its_body_is_inflated_takes_nothing() -> None:
    """Its stream's end cancels what would have come."""
    house = House(LARGE)
    later = house.pipeline.decide(house.flights.open(), PACKED, packed(1_000_000))
    assert isinstance(later, Pending)
    later.ready.cancel()
    with pytest.raises(asyncio.CancelledError):
        await later.ready
    assert house.booked() == (0, 0, 0)


# -- large bodies

ROOMY = CONFIG.replace("100000", "8000000, large_body_bytes: 5000000")


def long_chat(size: int) -> bytes:
    """A chat whose prompt has so many bytes."""
    return b'{"model":"served","messages":[{"role":"user","content":"%s"}]}' % (b"word " * (size // 5))


async def test_small_requests_pass_between_the_steps_of_large_bodies() -> None:
    """One step of one body in a turn of the loop, first come first read; the decision is like any other."""
    house = House(ROOMY)
    large = [house.pipeline.decide(house.flights.open(), POST, long_chat(2_400_000)) for _ in range(2)]
    first, second = (pending.ready for pending in large if isinstance(pending, Pending))
    turns: list[int] = []
    while not second.done():
        turns.append(int(first.done()))
        await asyncio.sleep(0)
        small = house.flights.open()
        assert isinstance(house.pipeline.decide(small, POST, long_chat(100)), Route)
        small.close()
    assert min(turns.count(0), turns.count(1)) >= 4
    assert isinstance(first.result(), Route)
    assert house.events.large_bodies == ["read", "read"]
    assert house.pipeline.reader.held_bytes == 0
    at_once = house.pipeline.explain(CHAT, long_chat(2_400_000))["input_tokens"]
    assert max(prompt_tokens for _, _, _, prompt_tokens, _ in house.events.decisions) == at_once


async def test_more_large_bodies_than_may_wait_are_refused() -> None:
    """503 and when to try again; one alone is always read, and small ones go on."""
    house = House(ROOMY)
    first = house.pipeline.decide(house.flights.open(), POST, long_chat(6_000_000))
    assert isinstance(first, Pending)
    answer = house.pipeline.decide(house.flights.open(), POST, long_chat(1_200_000))
    assert isinstance(answer, Answer)
    assert house.events.refusals == [("too_many_large_bodies", 503)]
    assert ("retry-after", "1") in answer.headers
    assert isinstance(house.pipeline.decide(house.flights.open(), POST, long_chat(100)), Route)
    assert isinstance(await first.ready, Route)
    assert house.events.large_bodies == ["refused", "read"]


async def test_a_large_body_whose_client_leaves_is_read_no_further() -> None:
    """Before its turn or within it; the next is read, and what it held is given back."""
    house = House(ROOMY)
    waiting = [house.pipeline.decide(house.flights.open(), POST, long_chat(1_200_000)) for _ in range(3)]
    first, second, third = (pending.ready for pending in waiting if isinstance(pending, Pending))
    second.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert isinstance(await third, Route)
    await asyncio.gather(first, second, return_exceptions=True)
    assert sorted(house.events.large_bodies) == ["left", "left", "read"]
    assert house.pipeline.reader.held_bytes == 0
    assert house.booked()[0] == 1


async def test_a_large_body_waits_no_longer_than_its_gateway() -> None:
    """One that is not read by then is refused in words, and the next one of a patient gateway is read."""
    house = House(ROOMY)
    waiting = []
    for hold_s in (0.0, 1e-6, 600.0):
        flight = house.flights.open()
        flight.hold_s = hold_s
        waiting.append(house.pipeline.decide(flight, POST, long_chat(1_200_000)))
    unknown, hurried, patient = [await pending.ready for pending in waiting if isinstance(pending, Pending)]
    assert isinstance(unknown, Route)
    assert isinstance(hurried, Answer)
    assert b"could not be read in time" in hurried.body
    assert isinstance(patient, Route)
    assert house.events.refusals == [("too_many_large_bodies", 503)]
    assert sorted(house.events.large_bodies) == ["late", "read", "read"]
    assert house.pipeline.reader.held_bytes == 0


async def test_a_fault_while_a_large_body_is_read_is_a_counted_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere: the client gets an answer, the fault has a counter, and nothing stays held."""
    house = House(ROOMY)

    def broken(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr("extproc.reading.read_steps", broken)
    pending = house.pipeline.decide(house.flights.open(), POST, long_chat(1_200_000))
    assert isinstance(pending, Pending)
    answer = await pending.ready
    assert isinstance(answer, Answer)
    assert house.events.refusals == [("internal_error", 500)]
    assert house.events.large_bodies == ["failed"]
    assert house.pipeline.reader.held_bytes == 0


async def test_large_bodies_read_under_another_config_are_read_in_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once in one turn of the loop, which a reload would have all of them do."""
    house = House(ROOMY)
    pending = house.pipeline.decide(house.flights.open(), POST, long_chat(1_200_000))
    assert isinstance(pending, Pending)
    at_once: list[int] = []
    monkeypatch.setattr("extproc.request.plans._read_body", lambda _, incoming: at_once.append(len(incoming.body)))
    house.pipeline.generation = Generation(2, parse(ROOMY))
    house.fleet.configure(house.pipeline.generation)
    assert isinstance(await pending.ready, Route)
    assert at_once == []
    assert house.events.large_bodies == ["read", "read"]


# -- access

GUARDED = CONFIG + f"access: {{api_keys: [{{name: laptop, tenant: acme, sha256: {digest_of('pm-1')}}}]}}\n"
KEY = {"authorization": "Bearer pm-1"}


def test_without_a_key_nothing_is_said_but_that() -> None:
    """Neither early nor late, whatever else is wrong with the request."""
    house = House(GUARDED)
    for path in (CHAT, "/v1/models", "/nowhere", "/metrics", "/v1/responses/x"):
        headers = {":method": "POST", ":path": path}
        early = house.pipeline.refuse_early(house.flights.open(), headers)
        late = house.pipeline.decide(house.flights.open(), headers, b"not json")
        assert isinstance(early, Answer)
        assert early == late
        assert (early.status, dict(early.headers)["www-authenticate"]) == (401, 'Bearer realm="pointsman"')
    assert house.events.decisions == []
    assert set(house.events.refusals) == {("no_credentials", 401)}


def test_a_tenant_goes_with_its_request() -> None:
    """To the decision log and to refusals; the credentials stay behind."""
    house = House(GUARDED)
    route = house.ask(chat(), **KEY)
    assert isinstance(route, Route)
    assert set(route.remove_headers) == {"authorization", "x-api-key"}
    assert house.log.read(1)[0]["tenant"] == "acme"
    house.ask(chat("no such model"), **KEY)
    assert house.log.read_refusals(1)[0]["tenant"] == "acme"
    assert "pm-1" not in str(house.log.read(9)) + str(house.log.read_refusals(9))


def test_who_asks_is_established_once() -> None:
    """A key taken away while the body comes does not cut the request off, nor is it looked up twice."""
    house = House(GUARDED)
    flight = house.flights.open()
    assert house.pipeline.refuse_early(flight, POST | KEY) is None
    house.pipeline.gate = gate_of(Access(api_keys_file=Path("gone")), ())
    assert isinstance(house.pipeline.decide(flight, POST | KEY, json.dumps(chat()).encode()), Route)


def test_without_access_headers_pass_untouched(house: House) -> None:
    """Engines may have keys of their own."""
    route = house.ask(chat(), **KEY)
    assert isinstance(route, Route)
    assert route.remove_headers == ()
    assert house.log.read(1)[0]["tenant"] is None


def test_explain_tells_for_whom(house: House) -> None:
    """And the answers of other tenants are not there for it."""
    body = json.dumps(chat()).encode()
    assert house.pipeline.explain(CHAT, body, "acme")["tenant"] == "acme"
    follow = json.dumps({"model": "served", "input": "x", "previous_response_id": "resp_0"}).encode()
    assert house.pipeline.explain("/v1/responses", follow, "acme")["status"] == 404
    assert "error" not in house.pipeline.explain("/v1/responses", follow)


# -- a pool with a precise index

PRECISE = CONFIG.replace(
    "    aliases: {gpt-4o: served}\n",
    "    aliases: {gpt-4o: served}\n"
    "    prefix_index: {precise: {tokenizer: engine, budget_ms: 1000, max_waiting: 2, max_body_bytes: 50000}}\n",
)


class Asked(House):
    """A house whose pool `chat` asks the senses; what they are asked stands in `questions`."""

    def __init__(self, config: str = PRECISE) -> None:
        super().__init__(config)
        self.questions: list[Match] = []
        self.senses = True
        self.pipeline.matcher.tell = self._tell

    def _tell(self, question: Match) -> bool:
        self.questions.append(question)
        return self.senses

    def later(self, body: dict[str, Any]) -> Pending:
        """One request that has to wait."""
        self.flight = self.flights.open()
        reply = self.pipeline.decide(self.flight, POST, json.dumps(body).encode())
        assert isinstance(reply, Pending)
        return reply

    async def place(self, body: dict[str, Any], **answer: Any) -> Route:
        """One request, and what the senses say to it."""
        later = self.later(body)
        self.pipeline.matcher.answered(Matched(self.questions[-1].number, **answer))
        route = await later.ready
        assert isinstance(route, Route)
        return route

    @property
    def told(self) -> dict[str, Any]:
        """The newest decision in the log."""
        return self.log.read(1)[0]


def _known(**tokens: int) -> dict[str, int]:
    return {address: tokens.get(f"e{number}", 0) for number, address in enumerate(CHAT_ADDRESSES, 1)}


async def test_a_request_is_placed_by_what_the_engines_report() -> None:
    """Its length and its match are the exact ones, whatever our own book-keeping believes."""
    house = Asked()
    route = await house.place(chat(cache_salt="s"), input_tokens=777, tokens=_known(e3=640))
    assert route.addresses[0] == CHAT_ADDRESSES[2]
    assert house.events.decisions == [("chat", CHAT_ADDRESSES[2], "affinity", 777, 640)]
    assert (house.told["prefix_index"], house.told["fallbacks"]) == ("precise", [])
    (question,) = house.questions
    assert (question.pool, question.path, question.salt, question.adapter) == ("chat", CHAT, "s", None)
    assert json.loads(question.body) == chat(cache_salt="s")
    assert house.booked() == (1, 777, 137)


async def test_an_adapter_is_asked_for_by_name() -> None:
    """For an engine's blocks are an adapter's own."""
    house = Asked()
    for address in CHAT_ADDRESSES:
        house.fleet.listed_models(address, Listing(frozenset({"served"}), 100_000, frozenset({"served"})))
    await house.place(chat(), input_tokens=1, tokens=_known())
    assert house.questions[0].adapter == "served"


async def test_a_burst_sees_itself() -> None:
    """What a request in flight uses is in no event yet, and counts all the same; once it ended, only events count."""
    house = Asked()
    first = await house.place(chat(), input_tokens=800, tokens=_known())
    flight = house.flight
    second = await house.place(chat(), input_tokens=800, tokens=_known())
    assert second.addresses[0] == first.addresses[0]
    assert house.told["matched_tokens"] > 500
    for one in (flight, house.flight):
        one.close()
    await house.place(chat(), input_tokens=800, tokens=_known())
    assert house.told["matched_tokens"] == 0


async def test_for_a_blind_endpoint_our_own_books_count_too() -> None:
    """The engine may hold more than it was heard of; that it was so is said."""
    house = Asked()
    first = await house.place(chat(), input_tokens=800, tokens=_known())
    house.flight.close()
    again = await house.place(chat(), input_tokens=800, tokens=_known(), blind=[first.addresses[0]])
    assert again.addresses[0] == first.addresses[0]
    assert house.told["matched_tokens"] > 500
    assert house.told["fallbacks"] == ["prefix_blind"]
    assert house.events.fallbacks == ["prefix_blind"]


async def test_without_tokens_our_own_books_answer() -> None:
    """And it is counted why, and shown."""
    house = Asked()
    await house.place(chat(), why="not_text")
    assert (house.told["prefix_index"], house.told["fallbacks"]) == ("approximate", ["prefix_no_tokens"])
    assert house.events.fallbacks == ["prefix_no_tokens"]


async def test_a_late_answer_is_not_waited_for() -> None:
    """The budget is over; what comes after it changes nothing."""
    house = Asked(PRECISE.replace("budget_ms: 1000", "budget_ms: 1"))
    later = house.later(chat())
    assert isinstance(await later.ready, Route)
    assert house.events.fallbacks == ["prefix_late"]
    house.pipeline.matcher.answered(Matched(house.questions[0].number, 5))
    assert house.booked()[0] == 1


async def test_senses_that_fall_end_the_waiting() -> None:
    """At once; and while there are none nobody waits."""
    house = Asked()
    later = house.later(chat())
    house.pipeline.matcher.lost()
    assert isinstance(await later.ready, Route)
    house.senses = False
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == ["prefix_senses_down"] * 2


async def test_a_body_that_is_inflated_beside_the_loop_is_looked_up_as_well() -> None:
    """One wait after the other; and a client that leaves in the second one has taken nothing."""
    house = Asked(PRECISE.replace("100000", "2000000").replace("max_body_bytes: 50000", "max_body_bytes: 2000000"))
    body = gzip.compress(json.dumps(chat()).encode() + b" " * 1_000_000)
    for leaves in (False, True):
        later = house.pipeline.decide(house.flights.open(), PACKED, body)
        assert isinstance(later, Pending)
        asked = len(house.questions)
        while len(house.questions) == asked:  # noqa: ASYNC110 - a thread inflates meanwhile
            await asyncio.sleep(0.001)
        if leaves:
            later.ready.cancel()
            await asyncio.gather(later.ready, return_exceptions=True)
        house.pipeline.matcher.answered(Matched(house.questions[-1].number, 5, _known()))
        if not leaves:
            assert isinstance(await later.ready, Route)
        assert house.booked()[0] == 1
    await asyncio.sleep(0)
    assert house.booked()[0] == 1


def test_a_request_that_is_over_takes_nothing() -> None:
    """Whoever decides it late: what it took then would never be given back."""
    house = House(CONFIG)
    flight = house.flights.open()
    flight.close()
    assert isinstance(house.pipeline.decide(flight, POST, json.dumps(chat()).encode()), Answer)
    assert house.booked() == (0, 0, 0)


async def test_a_slow_pool_does_not_crowd_another_out() -> None:
    """Questions are counted by pool."""
    house = Asked(
        PRECISE.replace("max_waiting: 2", "max_waiting: 1").replace(
            "    models: [lone]\n",
            "    models: [lone]\n    prefix_index: {precise: {tokenizer: engine, budget_ms: 1000}}\n",
        )
    )
    house.later(chat())
    house.later(chat("lone"))
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == ["prefix_crowded"]


async def test_only_so_many_questions_are_open() -> None:
    """Those whose asker has given up included, until they are answered."""
    house = Asked()
    for _ in range(2):
        house.later(chat()).ready.cancel()
    assert isinstance(house.ask(chat()), Route)
    assert house.events.fallbacks == ["prefix_crowded"]
    house.pipeline.matcher.answered(Matched(house.questions[0].number, 5))
    house.later(chat()).ready.cancel()


async def test_a_client_that_leaves_while_it_waits_takes_nothing() -> None:
    """Its stream's end cancels what would have come."""
    house = Asked()
    later = house.later(chat())
    await asyncio.sleep(0)
    later.ready.cancel()
    with pytest.raises(asyncio.CancelledError):
        await later.ready
    house.pipeline.matcher.answered(Matched(house.questions[0].number, 5))
    assert house.booked() == (0, 0, 0)


def test_what_cannot_be_matched_is_not_asked() -> None:
    """A body that is too long, an API whose prompts we cannot make; and pools without an index say nothing of it."""
    house = Asked()
    house.ask(chat(words=15_000))
    house.pipeline.decide(house.flights.open(), {**POST, ":path": "/v1/responses"}, b'{"model":"served","input":"a"}')
    house.ask(chat("lone"))
    assert house.questions == []
    assert house.events.fallbacks == ["prefix_too_long", "prefix_no_tokens"]


async def test_an_explanation_asks_too() -> None:
    """And says which index answered."""
    house = Asked()
    asking = asyncio.ensure_future(house.pipeline.explain_matched(CHAT, json.dumps(chat()).encode()))
    await asyncio.sleep(0)
    house.pipeline.matcher.answered(Matched(house.questions[0].number, 777, _known(e2=64)))
    told = await asking
    assert (told["input_tokens"], told["prefix_index"], told["matched_tokens"]) == (777, "precise", 64)
    assert house.booked() == (0, 0, 0)
