"""The fault matrix: what fails, times whether the answer is streamed, through a real Envoy.

For each: which endpoints see how many tries, what the client gets, what becomes of the endpoint, what the tenant pays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import faulty_engines as engines
import httpx
import pytest
from faulty_engines import EngineThread, FaultyEngine
from harness import HANG_GUARD_S, System, chat, eventually, free_ports

CHAT = "/v1/chat/completions"
TENANT = "x-tenant"
REQUESTS = 3
"""As many as take an endpoint out, or degrade it."""
LIMITS = {"connect_ms": 500, "first_byte_s": 1, "silence_s": 1, "total": {"allowance_s": 2, "least_s": 2, "most_s": 2}}
QUOTA = {"budget": {"tokens": 1e9}, "concurrency": 1_000}

WHOLE, BROKEN = "whole", "broken off"
UNAVAILABLE, TIMEOUT = (503, "upstream_unavailable"), (504, "upstream_timeout")
USED, PREDICTED, NOTHING = "as the engine counted", "as predicted", "nothing"
HEALTHY, OUT, DEGRADED = "ready", "unhealthy", "degraded"


@dataclass(frozen=True)
class Row:
    """What becomes of three requests, of which a broken endpoint is offered each and a good one is the alternative.

    `got`: the answer, whole or broken off; or the error, as status and code. `bad`, `good`: tries that the engines saw.
    `failed`: tries held against the broken one. `charged`: tokens, of all three.
    """

    fault: str
    stream: bool
    got: str | tuple[int, str | int]
    bad: int
    good: int
    failed: int
    state: str
    charged: str


def _both(fault: str, *expected: Any) -> list[Row]:
    return [Row(fault, stream, *expected) for stream in (False, True)]


TABLE = [
    *_both("connect refused", WHOLE, 0, 3, 3, OUT, USED),
    Row("black hole", False, TIMEOUT, 3, 0, 3, DEGRADED, NOTHING),
    Row("black hole", True, WHOLE, 3, 3, 3, DEGRADED, USED),
    *_both("reset before headers", WHOLE, 3, 3, 3, OUT, USED),
    *_both("reset after headers", BROKEN, 3, 0, 3, OUT, PREDICTED),
    *_both("500", WHOLE, 3, 3, 3, OUT, USED),
    *_both("503", WHOLE, 3, 3, 3, OUT, USED),
    *_both("504", (504, 504), 3, 0, 3, OUT, NOTHING),
    *_both("slow first token", WHOLE, 3, 0, 0, HEALTHY, USED),
    Row("no first token", False, TIMEOUT, 3, 0, 3, DEGRADED, NOTHING),
    Row("no first token", True, BROKEN, 3, 0, 3, DEGRADED, NOTHING),
    *_both("stalled", BROKEN, 3, 0, 3, DEGRADED, PREDICTED),
    *_both("4xx", (422, 422), 3, 0, 0, HEALTHY, NOTHING),
    *_both("all down", UNAVAILABLE, 0, 0, 3, OUT, NOTHING),
]

BEHAVIOURS = {
    "black hole": engines.never_answer,
    "reset before headers": engines.reset_before_headers,
    "reset after headers": engines.reset_after_headers,
    "500": engines.refuse_with(500),
    "503": engines.refuse_with(503),
    "504": engines.refuse_with(504),
    "slow first token": engines.begin_slowly,
    "no first token": engines.never_begin,
    "stalled": engines.stall,
    "4xx": engines.refuse_with(422),
}


def _name(row: Row) -> str:
    return f"{row.fault}-{'stream' if row.stream else 'whole'}".replace(" ", "-")


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    """Where the engines live."""
    made = EngineThread()
    yield made
    made.close()


class Pool:
    """Endpoints for one case, in the order in which they are picked: by their cost, or in turn."""

    def __init__(
        self, thread: EngineThread, name: str, zones: tuple[str | None, ...] = (None, None), *, in_turn: bool = False
    ) -> None:
        self.name = name
        self.zones = zones
        self.policy = "round-robin" if in_turn else {"scorers": [{"name": "cost"}]}
        self.engines = [FaultyEngine(thread, name, port) for port in free_ports(len(zones))]

    def config(self) -> dict[str, Any]:
        """Its section."""
        listed = [
            {"address": engine.address, "cost": float(cost), **({"zone": zone} if zone else {})}
            for cost, (engine, zone) in enumerate(zip(self.engines, self.zones, strict=True))
        ]
        return {"name": self.name, "models": [self.name], "endpoints": {"static": listed}, "policy": self.policy}

    @property
    def addresses(self) -> list[str]:
        """Of its endpoints."""
        return [engine.address for engine in self.engines]

    @property
    def seen(self) -> int:
        """Requests that its engines have had."""
        return sum(engine.seen for engine in self.engines)

    def behave(self, *behaviours: engines.Behaviour) -> None:
        """All of them, in turn, each for itself."""
        for engine in self.engines:
            engine.behave = engines.in_turn(*behaviours)


class House:
    """One system over all pools. Nobody probes the endpoints once they are ready, so that only requests count."""

    def __init__(self, make: Callable[[dict[str, Any]], System], pools: list[Pool], **config: Any) -> None:
        self.pools = {pool.name: pool for pool in pools}
        settings = {
            "pools": [pool.config() for pool in pools],
            "probe": {"interval_ms": 600_000, "cooldown_ms": 60_000},
            "scrape": {"interval_ms": 60_000},
            "timeouts": LIMITS,
            "access": {"tenant_header": TENANT},
            "tenants": {"default": QUOTA},
            "headers": {TENANT: "nobody"},
        }
        self.system = make(settings | config)
        eventually(self._all_ready, "every endpoint may be picked")

    def _all_ready(self) -> bool:
        fleet = self.system.fleet()
        addresses = (address for pool in self.pools.values() for address in pool.addresses)
        return all(fleet[address]["state"] == "ready" and fleet[address]["routable"] for address in addresses)

    def ask(self, pool: str, *, stream: bool = False, tenant: str | None = None) -> tuple[str, str | tuple[int, Any]]:
        """One request's id, and what its client got."""
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = chat(model=pool, **options)
        text = b""
        with (
            httpx.Client(timeout=HANG_GUARD_S) as client,
            client.stream("POST", self.system.url + CHAT, json=body, headers={TENANT: tenant or pool}) as answer,
        ):
            request_id: str = answer.headers.get("x-pointsman-request-id", "")
            try:
                for chunk in answer.iter_raw():
                    text += chunk
            except httpx.RemoteProtocolError:
                assert answer.status_code == 200
                assert is_well_formed_so_far(text, stream=stream)
                return request_id, BROKEN
        return request_id, got(answer, text, stream=stream)

    def ask_many(self, pool: str, count: int, *, stream: bool = False) -> Counter[str | tuple[int, Any]]:
        """So many requests, ten at once, by what their clients got."""
        with ThreadPoolExecutor(10) as clients:
            asked = [clients.submit(self.ask, pool, stream=stream) for _ in range(count)]
            return Counter(one.result()[1] for one in asked)

    def failed(self, address: str) -> int:
        """Tries held against an endpoint."""
        return int(self.system.total("pointsman_attempts_failed_total", address))

    def account(self, tenant: str) -> dict[str, Any]:
        """What a tenant has running and has spent."""
        told = httpx.get(f"{self.system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]
        return dict(told[tenant])

    def breaker(self, kind: str, name: str) -> dict[str, Any]:
        """Of a model or a zone."""
        fleet = httpx.get(f"{self.system.admin_url}/v1/fleet", timeout=HANG_GUARD_S).json()
        return dict(fleet["breakers"][kind][name])

    def states(self, pool: str) -> list[str]:
        """Of its endpoints."""
        fleet = self.system.fleet()
        return [fleet[address]["state"] for address in self.pools[pool].addresses]

    def nothing_leaked(self) -> None:
        """No stream, no place on an endpoint, no tenant's place; and every request was told of."""
        eventually(lambda: self.system.total("pointsman_ext_proc_streams_open") == 0, "no stream is open")
        eventually(lambda: self.system.total("pointsman_requests_unsettled") == 0, "all is settled")
        eventually(lambda: set(self.system.in_flight().values()) == {0}, "no endpoint has any")
        accounts = httpx.get(f"{self.system.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"]
        assert {account["running"] for account in accounts.values()} <= {0}


def got(answer: httpx.Response, text: bytes, *, stream: bool) -> str | tuple[int, Any]:
    """An answer that came whole, checked: JSON, a finished stream, or an error that says what is wrong."""
    assert text
    if answer.status_code == 200:
        if stream:
            assert is_well_formed_so_far(text, stream=True)
            assert text.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(text)["choices"]
        return WHOLE
    assert answer.headers["content-type"] == "application/json"
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
    error = json.loads(text)["error"]
    assert error["message"]
    return answer.status_code, error["code"]


def is_well_formed_so_far(text: bytes, *, stream: bool) -> bool:
    """Whole events; or the beginning of a JSON document. Nothing of ours is mixed in."""
    if not stream:
        return text == b'{"choices": '
    *events, rest = text.split(b"\n\n")
    for event in events:
        assert event == b"data: [DONE]" or json.loads(event.removeprefix(b"data: "))
    return rest == b""


@pytest.fixture(scope="module")
def house(thread: EngineThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A pool for each row, and some more."""
    made: list[System] = []

    def make(config: dict[str, Any]) -> System:
        made.append(System(tmp_path_factory.mktemp("system"), config))
        made[0].start()
        return made[0]

    alone = ("flaky", "storm-whole", "storm-stream", "hopeless-whole", "hopeless-stream")
    pools = [Pool(thread, name) for name in (*map(_name, TABLE), *alone)]
    pools.append(Pool(thread, "ailing", in_turn=True))
    pools += [
        Pool(thread, name, (f"{name}-east", f"{name}-east", f"{name}-west"), in_turn=True)
        for name in ("dark-whole", "dark-stream", "dim")
    ]
    breakers = {"model": {"least_requests": 10, "open_s": 2}, "zone": {"least_requests": 3}}
    house = House(make, pools, breakers=breakers)
    yield house
    made[0].stop()
    print(made[0].log.read_text()[-4000:])


@pytest.mark.parametrize("row", TABLE, ids=_name)
def test_every_fault_ends_as_the_table_says(house: House, row: Row) -> None:
    """One row at a time: tries, answers, charges, and where the endpoint stands afterwards."""
    pool = house.pools[_name(row)]
    bad, good = pool.engines
    if row.fault in {"connect refused", "all down"}:
        bad.refuse_connections()
    else:
        bad.behave = BEHAVIOURS[row.fault]
    if row.fault == "all down":
        good.refuse_connections()
    predicted = 0
    for number in range(REQUESTS):
        house.system.wait_pickable(bad.address)
        request_id, answer = house.ask(pool.name, stream=row.stream)
        assert answer == row.got
        predicted += house.system.decision(request_id)["input_tokens"] + chat()["max_tokens"]  # once it is settled
        held = row.failed * (number + 1) // REQUESTS
        eventually(lambda: house.failed(bad.address) >= held, "it is held against the endpoint")  # noqa: B023
    assert (bad.seen, good.seen) == (row.bad, row.good)
    assert house.failed(bad.address) == row.failed
    eventually(lambda: house.system.fleet()[bad.address]["state"] == row.state, f"it is {row.state}")
    charged = {USED: REQUESTS * 10, PREDICTED: predicted, NOTHING: 0}[row.charged]
    assert house.account(pool.name) == {
        "running": 0, "requests_left": None, "tokens_left": None, "budget_spent_tokens": charged,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_storm_of_4xx_trips_nothing(house: House, *, stream: bool) -> None:
    """A hundred bad requests get the engine's own answers: no retry, no breaker, no tokens."""
    pool = house.pools["storm-stream" if stream else "storm-whole"]
    pool.engines[0].behave = engines.refuse_with(400, 404, 422, 429)
    told = house.ask_many(pool.name, 100, stream=stream)
    assert told == {(status, status): 25 for status in (400, 404, 422, 429)}
    assert [engine.seen for engine in pool.engines] == [100, 0]
    eventually(lambda: house.breaker("models", pool.name)["recent_requests"] == 100, "all is told of")
    assert house.breaker("models", pool.name)["failed_requests"] == 0
    assert house.states(pool.name) == [HEALTHY, HEALTHY]
    assert house.failed(pool.addresses[0]) == 0
    assert house.account(pool.name)["budget_spent_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_pool_that_fails_wholly_is_not_tried_again_and_again(house: House, *, stream: bool) -> None:
    """Every engine breaks every request off: few more tries than requests, and each client gets an error in JSON."""
    pool = house.pools["hopeless-stream" if stream else "hopeless-whole"]
    pool.behave(engines.reset_before_headers)
    told = house.ask_many(pool.name, 100, stream=stream)
    assert {answer[0] for answer in told} == {503}
    assert told[UNAVAILABLE] < 100
    assert pool.seen <= 120
    assert house.states(pool.name) == [OUT, OUT]
    assert house.account(pool.name)["budget_spent_tokens"] == 0


def test_an_endpoint_that_fails_now_and_then_is_taken_out(house: House) -> None:
    """Every fifth of its requests, never two in a row; for three minutes, and the admin API says why."""
    pool = house.pools["flaky"]
    pool.engines[0].behave = engines.in_turn(*[engines.answer] * 4, engines.refuse_with(504))
    address = pool.addresses[0]
    for _ in range(20):
        house.system.decision(house.ask(pool.name)[0])
    told = house.system.fleet()[address]
    assert (told["state"], told["state_reason"]) == (OUT, "failed 4 of 20 requests, out for 180 s")
    assert told["rests_s"] > 60
    assert house.system.total("pointsman_endpoint_breaker_trips_total", address, "out") == 1
    assert house.ask_many(pool.name, 10) == {WHOLE: 10}
    assert [engine.seen for engine in pool.engines] == [20, 10]


def test_a_model_that_fails_is_refused_at_once_and_tried_again(house: House) -> None:
    """Both endpoints fail every second request. No engine is asked while the breaker rests; then one that goes well."""
    pool = house.pools["ailing"]
    pool.behave(engines.answer, engines.refuse_with(504))
    for _ in range(30):
        request_id, answer = house.ask(pool.name)
        if answer == (503, "model_breaker"):
            break
        house.system.decision(request_id)
    assert house.breaker("models", pool.name)["position"] == "open"
    pool.behave(engines.answer)
    seen = pool.seen
    refused = httpx.post(
        house.system.url + CHAT, json=chat(model=pool.name), headers={TENANT: pool.name}, timeout=HANG_GUARD_S
    )
    if refused.status_code == 503:  # else this machine took two seconds for it
        assert refused.json()["error"]["code"] == "model_breaker"
        assert int(refused.headers["retry-after"]) <= 2
        assert pool.seen == seen
    eventually(lambda: house.ask(pool.name)[1] == WHOLE, "one is let through")
    eventually(lambda: house.breaker("models", pool.name)["position"] == "closed", "it went well")
    assert house.ask_many(pool.name, 20) == {WHOLE: 20}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_when_a_zone_is_dark_another_serves(house: House, *, stream: bool) -> None:
    """Its endpoints refuse connections. What cannot be saved by a retry is an error in JSON, and soon nothing is."""
    pool = house.pools["dark-stream" if stream else "dark-whole"]
    for engine in pool.engines[:2]:
        engine.refuse_connections()
    for _ in range(9):
        request_id, answer = house.ask(pool.name, stream=stream)
        assert answer in (WHOLE, UNAVAILABLE)
        house.system.decision(request_id)
    eventually(lambda: house.breaker("zones", f"{pool.name}-east")["position"] == "open", "the zone is avoided")
    served = pool.engines[2].seen
    assert house.ask_many(pool.name, 20, stream=stream) == {WHOLE: 20}
    assert pool.engines[2].seen == served + 20
    assert house.breaker("zones", f"{pool.name}-west")["position"] == "closed"
    assert house.account(pool.name)["budget_spent_tokens"] == 10 * pool.engines[2].seen


def test_a_zone_that_fails_in_part_is_passed_over_while_there_is_another(house: House) -> None:
    """Its endpoints stay in service, and have all the traffic again once the other zone has nobody."""
    pool = house.pools["dim"]
    for engine in pool.engines[:2]:
        engine.behave = engines.in_turn(engines.answer, engines.reset_before_headers)
    for _ in range(20):
        request_id, answer = house.ask(pool.name)
        assert answer in (WHOLE, UNAVAILABLE)  # by the retry, which may meet the other one's bad turn
        house.system.decision(request_id)
    eventually(lambda: house.breaker("zones", "dim-east")["position"] == "open", "the zone is avoided")
    assert house.states(pool.name) == [HEALTHY] * 3
    assert [house.system.fleet()[address]["avoided"] for address in pool.addresses] == [True, True, False]
    decision = house.system.decision(house.ask(pool.name)[0])
    assert decision["endpoints"] == pool.addresses[2:]
    assert {"filter": "zone", "endpoints": sorted(pool.addresses[:2])} in [
        {**one, "endpoints": sorted(one["endpoints"])} for one in decision["filtered"]
    ]
    pool.behave(engines.answer)
    httpx.post(f"{house.system.admin_url}/v1/endpoints/{pool.addresses[2]}:drain").raise_for_status()
    assert house.ask_many(pool.name, 10) == {WHOLE: 10}


def test_after_all_that_nothing_is_left_behind(house: House) -> None:
    """No stream, no place on an endpoint, no tenant's place; every request was told of, and served as it should be."""
    house.nothing_leaked()
    assert house.system.total("pointsman_access_log_missing_total") == 0
    assert house.system.total("pointsman_no_known_address_total") == 0
    assert house.system.total("pointsman_refusals_total", "internal_error") == 0
