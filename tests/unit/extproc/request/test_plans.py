"""From a request to a plan: where it leads, and how its body is edited for that."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.flight import Flight, Flights
from extproc.request.apis import OTHER, by_path
from extproc.request.plans import Incoming, Plan, make_plan
from extproc.request.splice import apply
from extproc.request.stored import Made, StoredResponses
from policies.fleet_state import FleetState
from policies.types import Kind, Reason, Refusal

CONFIG = """
limits: {request_body_bytes: 10000}
routing:
  paths: [{prefix: /custom, pool: chat}, {prefix: /custom/deep/, pool: embed}]
pools:
  - {name: chat, models: [served], aliases: {gpt-4o: served}, endpoints: {static: ["10.0.0.1:80"]}}
  - {name: embed, models: [bge], aliases: {ada: bge}, endpoints: {static: ["10.0.0.2:80"]}}
"""
FORM = "multipart/form-data; boundary=b"
HAS_SERVED = "10.0.0.1:80"


class Nobody:
    """FlightEvents that nobody hears; here nothing happens to flights."""

    moved = failed = settled = missing = lambda *_: None


def flight(served_by: str | None = HAS_SERVED) -> Flight:
    """One that was served."""
    made = Flights(
        FleetState(),
        Nobody(),
        lambda: 0.0,
        max_open=1,
        max_unsettled=1,
        access_log_timeout_s=1,
    ).open()
    made.served_by = served_by
    return made


class Desk:
    """Plans requests under one config."""

    def __init__(self, config: str = CONFIG) -> None:
        self.generation = Generation(1, parse(config))
        self.stored = StoredResponses()

    def ask(self, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Plan | Refusal:
        """What becomes of one request."""
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        api = by_path(path.partition("?")[0]) or OTHER
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return make_plan(self.generation, self.stored, Incoming(api, {":path": path, **named}, raw, "f" * 24))

    def plan(self, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Plan:
        """The plan of a request that leads somewhere."""
        plan = self.ask(path, body, **headers)
        assert isinstance(plan, Plan), plan
        return plan

    def refusal(self, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Refusal:
        """Why a request leads nowhere."""
        refusal = self.ask(path, body, **headers)
        assert isinstance(refusal, Refusal), refusal
        return refusal


@pytest.fixture
def desk() -> Desk:
    """Under the config above."""
    return Desk()


@pytest.fixture
def desk_with_default() -> Desk:
    """The same, with a default model behind an alias."""
    return Desk(CONFIG.replace("routing:", "routing:\n  default_model: ada"))


# -- prompts


@pytest.mark.parametrize(
    ("path", "fields", "prompt"),
    [
        ("/v1/responses", {"input": 1, "tools": 2, "instructions": 3}, b"321"),
        ("/v1/messages", {"messages": 1, "tools": 2, "system": 3}, b"321"),
        ("/v1/embeddings", {"input": 1}, b"1"),
        ("/v1/rerank", {"documents": 1, "query": 2}, b"21"),
        ("/score", {"text_2": 1, "text_1": 2}, b"21"),
        ("/classify", {"input": 1}, b"1"),
        ("/tokenize", {"prompt": 1}, b""),
        ("/v1/messages/count_tokens", {"messages": 1}, b""),
    ],
)
def test_a_prompt_is_its_fields_in_the_templates_order(
    desk: Desk, path: str, fields: dict[str, int], prompt: bytes
) -> None:
    """Whatever their order in the body."""
    plan = desk.plan(path, {**fields, "model": "bge"})
    assert plan.request.prompt == prompt
    assert (plan.target.pool.name, plan.request.model) == ("embed", "bge")


def test_a_salt_and_a_model_keep_prefixes_apart(desk: Desk) -> None:
    """In every API, not in chat alone."""
    body = {"model": "bge", "input": "x" * 1_000}
    plain = desk.plan("/v1/embeddings", body).request.block_hashes
    assert plain == desk.plan("/v1/embeddings", {**body, "model": "ada"}).request.block_hashes
    assert set(plain).isdisjoint(desk.plan("/v1/embeddings", {**body, "cache_salt": "s"}).request.block_hashes)
    assert set(plain).isdisjoint(desk.plan("/v1/embeddings", {**body, "model": "served"}).request.block_hashes)


def test_the_limit_of_a_response_is_read(desk: Desk) -> None:
    """It has a name of its own there."""
    assert desk.plan("/v1/responses", {"model": "served", "input": "x", "max_output_tokens": 9}).request.max_tokens == 9


# -- models


def test_a_form_is_routed_by_its_model_and_an_alias_replaced(desk: Desk) -> None:
    """In place, and nothing else of the form."""
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--b--\r\n'
    plan = desk.plan("/v1/audio/transcriptions", body % b"ada", content_type=FORM)
    assert apply(body % b"ada", plan.splices) == body % b"bge"
    assert desk.plan("/v1/audio/transcriptions", body % b"bge", content_type=FORM).splices == ()
    assert plan.request.kind is Kind.AUDIO


def test_the_default_model_is_written_where_none_is_named(desk_with_default: Desk) -> None:
    """In front of other fields, in the place of null, into an empty object, before a form's parts."""
    for body, edited in {
        b' {"input":1}': b' {"model":"bge","input":1}',
        b'{"input":1,"model": null }': b'{"input":1,"model": "bge" }',
    }.items():
        assert apply(body, desk_with_default.plan("/v1/embeddings", body).splices) == edited
    assert apply(b"{ }", desk_with_default.plan("/tokenize", b"{ }").splices) == b'{"model":"bge" }'
    form = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--b--\r\n'
    edited = apply(form, desk_with_default.plan("/v1/audio/translations", form, content_type=FORM).splices)
    assert edited == b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nbge\r\n' + form


def test_without_a_default_a_missing_model_is_refused(desk: Desk) -> None:
    """In JSON, form and query."""
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--b--\r\n'
    for refusal in (
        desk.refusal("/v1/embeddings", b'{"input":1}'),
        desk.refusal("/v1/audio/translations", form, content_type=FORM),
        desk.refusal("/v1/realtime?model="),
    ):
        assert (refusal.status, refusal.param) == (400, "model")


@pytest.mark.parametrize(
    ("query", "model"), [("?model=bge", "bge"), ("?a=b&model=ad%61", "bge"), ("?model=gpt-4o", "served")]
)
def test_a_socket_is_routed_by_its_query(desk: Desk, query: str, model: str) -> None:
    """By name or alias; nothing of it is edited."""
    plan = desk.plan(f"/v1/realtime{query}")
    assert (plan.request.model, plan.splices) == (model, ())


def test_an_unknown_model_of_a_query_is_404(desk: Desk) -> None:
    """As in a body."""
    assert desk.refusal("/v1/realtime?model=nope").reason is Reason.UNKNOWN_MODEL


@pytest.mark.parametrize(
    ("path", "pool"),
    [("/custom", "chat"), ("/custom/x", "chat"), ("/custom/deep", "embed"), ("/custom/deep/x", "embed")],
)
def test_the_longest_rule_leads(desk: Desk, path: str, pool: str) -> None:
    """By whole segments; nothing is read of the body."""
    plan = desk.plan(path, b"\0")
    assert (plan.target.pool.name, plan.request.kind, plan.splices) == (pool, Kind.OTHER, ())


def test_a_path_beside_the_rules_is_404(desk: Desk) -> None:
    """`/customs` is not below `/custom`."""
    assert desk.refusal("/customs").reason is Reason.UNKNOWN_PATH


# -- compressed bodies


def test_a_compressed_body_is_read_and_left(desk: Desk) -> None:
    """No edit, no header removed."""
    packed = gzip.compress(b'{"model":"bge","input":"x"}')
    plan = desk.plan("/v1/embeddings", packed, content_encoding="gzip")
    assert (plan.request.prompt, plan.splices, plan.remove_headers) == (b'"x"', (), ())


def test_a_compressed_body_that_must_be_edited_becomes_plain(desk: Desk) -> None:
    """Whole, and its header goes."""
    packed = gzip.compress(b'{"model":"ada","input":"x"}')
    plan = desk.plan("/v1/embeddings", packed, content_encoding="GZIP")
    assert apply(packed, plan.splices) == b'{"model":"bge","input":"x"}'
    assert plan.remove_headers == ("content-encoding",)


def test_a_body_that_inflates_too_far_is_413(desk: Desk) -> None:
    """By the limit on bodies."""
    assert desk.refusal("/v1/embeddings", gzip.compress(b" " * 10_001), content_encoding="gzip").status == 413


# -- stored answers


def test_a_response_gets_an_id_that_is_found_again(desk: Desk) -> None:
    """Ours, in front of the client's bytes."""
    body = b'{"model":"gpt-4o","input":"x"}'
    plan = desk.plan("/v1/responses", body)
    own = "resp_" + "f" * 24
    assert plan.response_id == own
    assert apply(body, plan.splices) == b'{"request_id":"%s","model":"served","input":"x"}' % own.encode()


def test_a_clients_own_id_is_kept(desk: Desk) -> None:
    """And nothing edited."""
    plan = desk.plan("/v1/responses", {"model": "served", "input": "x", "request_id": "mine"})
    assert (plan.response_id, plan.splices) == ("mine", ())


def test_where_tenants_are_told_apart_nobody_names_his_answers(desk: Desk) -> None:
    """Or he would claim one that we have forgotten, and that is another's."""
    body = json.dumps({"model": "served", "input": "x", "request_id": "resp_of_another"}).encode()
    headers = {":path": "/v1/responses", ":method": "POST"}
    incoming = Incoming(by_path("/v1/responses") or OTHER, headers, body, "f" * 24, tenant="acme")
    refusal = make_plan(desk.generation, desk.stored, incoming)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.param) == (400, "request_id")


def test_an_answer_that_is_not_stored_gets_no_id(desk: Desk) -> None:
    """The body is left as it came."""
    plan = desk.plan("/v1/responses", {"model": "served", "input": "x", "store": False})
    assert (plan.response_id, plan.splices) == (None, ())


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
def test_an_answer_is_asked_for_where_it_was_made(desk: Desk, path: str) -> None:
    """There alone, in its model's pool."""
    desk.stored.remember("resp_1", Made(flight(), "served"), 9)
    plan = desk.plan(path)
    assert (plan.request.subset, plan.target.pool.name, plan.response_id) == ((HAS_SERVED,), "chat", None)


def test_an_answer_nobody_knows_is_404(desk: Desk) -> None:
    """Never made, forgotten, or of a model that is gone."""
    desk.stored.remember("resp_gone", Made(flight(), "gone"), 9)
    desk.stored.remember("resp_nowhere", Made(flight(None), "served"), 9)
    for name in ("resp_never", "resp_gone", "resp_nowhere"):
        refusal = desk.refusal(f"/v1/responses/{name}")
        assert (refusal.status, refusal.reason) == (404, Reason.UNKNOWN_RESPONSE)


def test_an_answer_that_goes_on_from_another_stays_with_it(desk: Desk) -> None:
    """If the other is known; else the engine says what it does not have."""
    desk.stored.remember("resp_1", Made(flight(), "served"), 9)
    body = {"model": "served", "input": "x", "previous_response_id": "resp_1"}
    assert desk.plan("/v1/responses", body).request.subset == (HAS_SERVED,)
    assert desk.plan("/v1/responses", {**body, "previous_response_id": "resp_2"}).request.subset is None
    assert desk.plan("/v1/responses", {**body, "model": "bge"}).request.subset is None


def test_the_answer_least_asked_for_is_forgotten_first() -> None:
    """At the bound, which may shrink."""
    stored = StoredResponses()
    for name in ("a", "b", "c"):
        stored.remember(name, Made(flight(), "served"), 3)
    stored.find("a", None)
    stored.remember("d", Made(flight(), "served"), 2)
    assert len(stored) == 2
    assert stored.find("a", None) is not None
    assert stored.find("b", None) is stored.find("c", None) is None


def test_of_rules_for_one_path_the_one_that_asks_for_most_headers_counts() -> None:
    """Where all of them hold, with exactly their values; the longer path still comes first."""
    desk = Desk(
        CONFIG.replace(
            "paths: [",
            "paths: [{prefix: /custom, pool: embed, headers: {x-gateway-model-name: bge}}, "
            "{prefix: /custom, pool: chat, headers: {x-gateway-model-name: bge, x-pointsman-session: s}}, ",
        )
    )
    bge = {"x_gateway_model_name": "bge"}
    assert desk.plan("/custom/x").target.pool.name == "chat"
    assert desk.plan("/custom/x", **bge).target.pool.name == "embed"
    assert desk.plan("/custom/x", **bge, x_pointsman_session="s").target.pool.name == "chat"
    assert desk.plan("/custom/x", x_gateway_model_name="BGE").target.pool.name == "chat"
    assert desk.plan("/custom/deep/x", **bge).target.pool.name == "embed"
