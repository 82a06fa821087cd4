"""A tenant's own view of the fleet: its names, its default, its policies, over endpoints that it shares with others."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.access.gate import Caller
from extproc.config.generations import Generation
from extproc.config.loading import ConfigError, parse
from extproc.config.summary import tenant_lines
from extproc.fleet.fleet import Fleet
from extproc.flight import Flight, Flights
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.reply import Answer, Route
from extproc.request.splice import apply
from policies.fleet_state import FleetState
from vllm_adapters.health import Listing

CHAT = "/v1/chat/completions"
HEADERS = {":path": CHAT, ":method": "POST", "content-type": "application/json"}
ADDRESSES = [f"10.0.0.{n}:8000" for n in (1, 2, 3)]
POOLS = f"""
access: {{tenant_header: x-tenant}}
routing: {{default_model: big}}
pools:
  - {{name: large, models: [big, bigger], aliases: {{gpt-4o: big}}, endpoints: {{static: {json.dumps(ADDRESSES)}}}}}
  - {{name: small, models: [little], endpoints: {{static: {json.dumps(ADDRESSES)}}}}}
"""
TENANTS = """
tenants:
  default: {pools: [small], default_model: little}
  named:
    acme:
      aliases: {gpt-4o: bigger, fast: little}
      default_model: fast
      policies: {large: round-robin, small: {kind: weighted, scorers: [{name: least_request}]}}
    plain: {}
    narrow: {pools: [small]}
"""


class House:
    """A pipeline over three engines that serve everything."""

    def __init__(self, tenants: str = TENANTS) -> None:
        self.now_s = 1_000.0
        self.metrics, self.state, self.log = Metrics(), FleetState(), DecisionLog(50)
        self.fleet = Fleet(self.state, self.metrics, lambda: self.now_s)
        self.flights = Flights(
            self.state,
            Outcomes(self.fleet, self.metrics, self.log),
            lambda: self.now_s,
            max_open=99,
            max_unsettled=99,
            access_log_timeout_s=10,
        )
        generation = Generation(1, parse(tenants + POOLS))
        self.pipeline = Pipeline(
            generation,
            self.fleet,
            self.flights,
            self.log,
            self.metrics,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            rng=Random(0),
        )
        self.fleet.configure(generation)
        for pool in ("large", "small"):
            self.fleet.set_endpoints(pool, ADDRESSES)
        self.fleet.acknowledged(self.fleet.assignments())
        for address in ADDRESSES:
            self.fleet.listed_models(address, Listing(frozenset({"big", "bigger", "little"}), 100_000))

    def reload(self, tenants: str) -> None:
        """Another config comes into force."""
        generation = Generation(2, parse(tenants + POOLS))
        self.fleet.configure(generation)
        self.pipeline.generation = generation

    def flight(self, tenant: str | None) -> Flight:
        """A stream whose caller is known."""
        flight = self.flights.open()
        flight.caller = None if tenant is None else Caller(tenant)
        return flight

    def ask(self, tenant: str, model: str | None = None, content: str = "hi", path: str = CHAT) -> Route | Answer:
        """One request of a tenant's."""
        body = {"messages": [{"role": "user", "content": content}]} | ({"model": model} if model else {})
        self.body = json.dumps(body).encode()
        reply = self.pipeline.decide(self.flight(tenant), HEADERS | {":path": path}, self.body)
        assert isinstance(reply, Route | Answer)
        return reply

    def sent(self, tenant: str, model: str | None = None) -> tuple[str, Any]:
        """The cluster it goes to, and the model its engine reads."""
        reply = self.ask(tenant, model)
        assert isinstance(reply, Route), reply
        return reply.cluster, json.loads(apply(self.body, reply.splices))["model"]

    def models(self, tenant: str) -> dict[str, str]:
        """What `/v1/models` lists: names, and what is behind them."""
        reply = self.pipeline.decide(self.flight(tenant), {":method": "GET", ":path": "/v1/models"}, b"")
        assert isinstance(reply, Answer)
        return {entry["id"]: entry["root"] for entry in json.loads(reply.body)["data"]}

    def model(self, tenant: str, name: str) -> tuple[int, str]:
        """What is told of one: the status, and what is behind it or the code of the error."""
        reply = self.pipeline.decide(self.flight(tenant), {":method": "GET", ":path": f"/v1/models/{name}"}, b"")
        assert isinstance(reply, Answer)
        told = json.loads(reply.body)
        return reply.status, told["root"] if reply.status == 200 else told["error"]["code"]


def test_a_tenants_names_lead_where_it_says_and_nobody_elses_do() -> None:
    """Its own alias goes before a pool's of the same name; a stranger has neither it nor the pool."""
    house = House()
    assert house.sent("acme", "gpt-4o") == ("pool_large", "bigger")
    assert house.sent("acme", "fast") == ("pool_small", "little")
    assert house.sent("plain", "gpt-4o") == ("pool_large", "big")
    for tenant, model in (("plain", "fast"), ("narrow", "gpt-4o"), ("anybody", "fast"), ("anybody", "big")):
        refused = house.ask(tenant, model)
        assert isinstance(refused, Answer)
        assert refused.status == 404


def test_a_request_without_a_model_gets_its_tenants_default() -> None:
    """Else everybody's, if it sees that; else it must say."""
    house = House()
    assert house.sent("acme") == ("pool_small", "little")
    assert house.sent("plain") == ("pool_large", "big")
    assert house.sent("anybody") == ("pool_small", "little")
    refused = house.ask("narrow")
    assert isinstance(refused, Answer)
    assert refused.status == 400


def test_the_model_list_is_the_tenants_own() -> None:
    """With what its names lead to."""
    house = House()
    assert house.models("acme") == {
        "big": "big", "bigger": "bigger", "gpt-4o": "bigger", "little": "little", "fast": "little",
    }  # fmt: skip
    assert house.models("plain")["gpt-4o"] == "big"
    assert house.models("narrow") == house.models("anybody") == {"little": "little"}


def test_one_model_is_told_to_those_who_see_it() -> None:
    """As it is theirs; to others it does not exist."""
    house = House()
    assert house.model("acme", "gpt-4o") == (200, "bigger")
    assert house.model("plain", "gpt-4o") == (200, "big")
    assert house.model("acme", "fast") == (200, "little")
    for tenant, name in (("narrow", "gpt-4o"), ("anybody", "big"), ("plain", "fast")):
        assert house.model(tenant, name) == (404, "model_not_found")


def test_its_requests_are_placed_by_its_policy_and_the_others_by_the_pools() -> None:
    """Over the same endpoints; the decision log and the explanation say by which. Turns are its own."""
    house = House()
    turns = []
    for _ in range(6):
        own, other = house.ask("acme", "big", "same prompt " * 200), house.ask("plain", "big", "same prompt " * 200)
        assert isinstance(own, Route)
        assert isinstance(other, Route)
        turns.append(own.addresses[0])
    assert turns[:3] == turns[3:]
    assert set(turns) == set(ADDRESSES)
    told = {(record["tenant"], record["policy"]) for record in house.log.read(12)}
    assert told == {("acme", "round-robin"), ("plain", "default")}
    body = b'{"model":"fast","messages":[]}'
    assert house.pipeline.explain(CHAT, body, "acme")["policy"] == "inline of acme"
    assert house.pipeline.explain(CHAT, b'{"model":"little","messages":[]}', "narrow")["policy"] == "default"


def test_what_one_brings_into_a_cache_another_finds_there() -> None:
    """One index for all policies of a pool."""
    house = House()
    prompt = "a long prompt that both send " * 200
    first = house.ask("acme", "big", prompt)
    assert isinstance(first, Route)
    second = house.ask("plain", "big", prompt)
    assert isinstance(second, Route)
    assert second.addresses[0] == first.addresses[0]
    assert house.log.read(1)[0]["matched_tokens"] > 0


def test_a_reload_keeps_whose_turn_it_is_unless_the_policy_changes() -> None:
    """And takes a policy away with its line: then the pool's own places the requests."""
    house = House()
    order = [house.ask("acme", "big").addresses[0] for _ in range(2)]  # type: ignore[union-attr]
    house.reload(TENANTS.replace("plain: {}", "plain: {concurrency: 3}"))
    order.append(house.ask("acme", "big").addresses[0])  # type: ignore[union-attr]
    assert sorted(order) == ADDRESSES
    house.reload(TENANTS.replace("large: round-robin, ", ""))
    house.ask("acme", "big")
    assert house.log.read(1)[0]["policy"] == "default"


def test_a_request_that_has_waited_through_a_reload_is_placed_by_the_pools_policy_if_its_own_is_gone() -> None:
    """It names what is no more."""
    house = House()
    house.reload(TENANTS.replace("policies:", "policies: {}\n#"))
    plan = house.pipeline._explained(CHAT, b'{"model":"big","messages":[]}', "acme")
    plan.request.policy = "round-robin"  # type: ignore[union-attr]
    placement = house.fleet.placements["large"]
    decision = placement.choose(plan.request, house.state, house.now_s, Random(0))  # type: ignore[union-attr]
    assert decision.policy == "default"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ("{named: {a: {pools: [smal]}}}", r"tenants\.named\.a\.pools: it sees no pool 'smal'; did you mean 'small'\?"),
        ("{named: {a: {aliases: {x: bigg}}}}", r"tenants\.named\.a\.aliases: .*'bigg'; did you mean 'big"),
        ("{named: {a: {pools: [small], aliases: {x: big}}}}", r"aliases: .*'big'.*there are: little"),
        ("{named: {a: {aliases: {x: gpt-4o}}}}", r"aliases: no model that it sees is called 'gpt-4o'"),
        ("{named: {a: {aliases: {big: little}}}}", r"'big' is a model's own name"),
        ("{default: {default_model: fast}}", r"tenants\.default\.default_model: it sees no model 'fast'"),
        ("{named: {a: {pools: [small], policies: {large: default}}}}", r"policies: it sees no pool 'large'"),
        ("{named: {a: {policies: {large: round-robbin}}}}",
         r"tenants\.named\.a\.policies\.large: no preset 'round-robbin'; did you mean 'round-robin'\?"),
        ("{named: {a: {policies: {large: {kind: weighted, scorers: [{name: nope}]}}}}}",
         r"tenants\.named\.a\.policies\.large: unknown scorer 'nope'"),
        ("{named: {a: {aliasses: {}}}}", r"tenants\.named\.a\.aliasses: unknown key; did you mean 'aliases'\?"),
    ],
)  # fmt: skip
def test_what_a_tenant_does_not_see_is_refused_with_place_and_cure(tenants: str, said: str) -> None:
    """When the file is read."""
    with pytest.raises(ConfigError, match=said):
        parse(f"tenants: {tenants}\n{POOLS}")


def test_check_shows_what_tenants_see() -> None:
    """A line for each that is not like everybody."""
    lines = list(tenant_lines(parse(TENANTS + POOLS)))
    acme = "fast is little, gpt-4o is bigger; without a model: fast"
    assert lines == [
        "tenants not named: sees small; without a model: little",
        f"tenant acme: sees large, small; {acme}; policies: large round-robin, small inline (weighted)",
        "tenant narrow: sees small",
    ]
