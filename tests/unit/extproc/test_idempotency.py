"""`Idempotency-Key` for live requests: who is turned away, in which words, and what makes a key free again."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.access.gate import Caller
from extproc.config.loading import parse
from extproc.config.schema import Config
from extproc.flight import Flight, Flights
from extproc.idempotency import Idempotency
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.placement import Placement
from policies.placement.prefix_index import PrefixIndex
from policies.placement.rotation import RoundRobin
from policies.types import Decision, InferenceRequest, Kind, Reason, Refusal

POST = {":method": "POST", ":path": "/v1/chat/completions", "idempotency-key": "k"}


def config(retries: str = "{}", limits: str = "{}") -> Config:
    """A config with these."""
    return parse(f"retries: {retries}\nlimits: {limits}\npools: [{{name: p, models: [m], endpoints: {{static: []}}}}]")


class House:
    """Keys, and flights that hold them."""

    def __init__(self, found: Config | None = None) -> None:
        self.now_s = 0.0
        self.idempotency = Idempotency(found or config(), lambda: self.now_s)
        self.state = FleetState()
        slot = self.state.add("10.0.0.1:80")
        self.state.state[slot], self.state.routable[slot] = State.READY, True
        self.state.set_models(slot, frozenset({"m"}))
        self.placement = Placement("p", RoundRobin(), PrefixIndex(1_000))
        self.placement.set_members([slot])
        events: Any = SimpleNamespace(released=lambda _flight: None, missing=self.missing)
        self.flights = Flights(
            self.state, events, lambda: self.now_s, max_open=9, max_unsettled=9, access_log_timeout_s=10
        )

    def missing(self, flight: Flight) -> None:
        """As Outcomes does."""
        self.idempotency.settle(flight, "no access-log entry")

    def comes(self, body: bytes = b"{}", tenant: str | None = None, **headers: str) -> tuple[Flight, Refusal | None]:
        """One request, and what is said to it."""
        flight = self.flights.open()
        if tenant is not None:
            flight.caller = Caller(tenant)
        sent = POST | {f":{name}" if name in {"path", "method"} else name: value for name, value in headers.items()}
        return flight, self.idempotency.hold(flight, sent, body)

    def starts(self) -> Flight:
        """One that gets its place."""
        flight, refusal = self.comes()
        assert refusal is None
        request = InferenceRequest(Kind.CHAT, "m", "m", 10)
        decision = self.placement.choose(request, self.state, self.now_s, Random(1))
        assert isinstance(decision, Decision)
        flight.reserve(
            request, decision, self.placement, self.placement.commit(decision, request, self.state, self.now_s)
        )
        return flight

    def is_free(self) -> bool:
        """Whether the key could be had now."""
        flight, refusal = self.comes()
        flight.close()
        return refusal is None


def test_a_second_request_is_told_of_the_first() -> None:
    """409 and worth trying again while it is under way, 409 and in vain once it is answered, 422 with another body."""
    house = House()
    first = house.starts()
    _, busy = house.comes()
    _, other = house.comes(b'{"other": 1}')
    first.close()
    house.idempotency.settle(first, "ok")
    _, answered = house.comes()
    assert busy is not None
    assert (busy.status, busy.reason, busy.retry_after_s) == (409, Reason.DUPLICATE_UNDER_WAY, 1)
    assert other is not None
    assert (other.status, other.reason, other.retry_after_s) == (422, Reason.IDEMPOTENCY_KEY_REUSED, None)
    assert answered is not None
    assert (answered.status, answered.reason, answered.retry_after_s) == (409, Reason.DUPLICATE_ANSWERED, None)
    assert all(first.request_id in refusal.message for refusal in (busy, other, answered))
    house.now_s += 601
    assert house.is_free()


@pytest.mark.parametrize(
    "outcome",
    ["endpoint_failed", "client_gone", "client_error", "timed_out", "no_known_address", "gateway_failed", "no_answer"],
)
def test_after_anything_but_an_answer_the_key_is_free(outcome: str) -> None:
    """So that a retry is safe and not in vain."""
    house = House()
    flight = house.starts()
    flight.close()
    assert not house.is_free()
    house.idempotency.settle(flight, outcome)
    assert house.is_free()


def test_the_outcome_may_come_before_the_end() -> None:
    """The access log and the stream are two; neither undoes what the other has said."""
    house = House()
    flight = house.starts()
    house.idempotency.settle(flight, "ok")
    flight.close()
    house.now_s += 5
    assert not house.is_free()


def test_a_request_that_got_no_place_has_not_used_its_key() -> None:
    """Refused, or its client left while it waited."""
    house = House()
    flight, refusal = house.comes()
    assert refusal is None
    flight.close()
    assert house.is_free()


def test_where_no_access_log_comes_the_key_is_free_soon_after_the_end() -> None:
    """Within a second, though the entry is waited for longer; and nothing is kept of it."""
    house = House()
    flight = house.starts()
    flight.close()
    house.now_s += 1.1
    assert house.is_free()
    house.now_s += 10
    house.flights.expire()
    assert len(house.idempotency._keys) == 0


def test_a_request_that_is_decided_twice_does_not_stand_in_its_own_way() -> None:
    """After it has waited, say."""
    house = House()
    flight, _ = house.comes()
    assert house.idempotency.hold(flight, POST, b"{}") is None


def test_tenants_do_not_share_keys() -> None:
    """A key is a word of its tenant's own."""
    house = House()
    assert house.comes(tenant="a")[1] is None
    assert house.comes(tenant="b")[1] is None
    assert house.comes(tenant="a")[1] is not None


@pytest.mark.parametrize(
    "headers",
    [{"idempotency-key": ""}, {"method": "GET"}, {"content-type": "application/grpc"}],
    ids=["empty", "a GET", "gRPC"],
)
def test_what_has_no_key_or_needs_none_passes(headers: dict[str, str]) -> None:
    """As often as it comes."""
    house = House()
    assert [house.comes(**headers)[1] for _ in range(2)] == [None, None]


def test_the_path_is_part_of_the_request() -> None:
    """The same body to another API is another request."""
    house = House()
    house.comes()
    _, refusal = house.comes(path="/v1/completions")
    assert refusal is not None
    assert refusal.status == 422


def test_a_key_of_any_length_is_not_kept() -> None:
    """Memory is bounded by the number of keys."""
    house = House()
    assert house.comes(**{"idempotency-key": "x" * 255})[1] is None
    _, refusal = house.comes(**{"idempotency-key": "x" * 256})
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (400, Reason.INVALID_REQUEST)


def test_a_reload_changes_the_window_and_can_switch_it_off() -> None:
    """What is held stays held."""
    house = House(config("{idempotency_window_s: 10}"))
    house.idempotency.settle(house.starts(), "ok")
    house.idempotency.configure(config("{idempotency_window_s: null}"))
    assert house.is_free()
    house.idempotency.configure(config("{idempotency_window_s: 10}", "{idempotency_keys: 1}"))
    assert not house.is_free()
    house.now_s += 11
    assert house.is_free()
