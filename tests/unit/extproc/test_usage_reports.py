"""Usage that engines report afterwards: joined to requests, waited for, and never another's."""

from __future__ import annotations

import pytest

from extproc.flight import Flight, Flights
from extproc.usage_reports import UsageReports
from policies.fleet_state import FleetState
from vllm_adapters.pushed import FinishedRequest


class Nobody:
    """FlightEvents that nobody hears."""

    moved = failed = released = settled = missing = lambda *_: None


class House:
    """Reports under a clock of ours."""

    def __init__(self, most: int = 100) -> None:
        self.now_s = 50.0
        self.reports = UsageReports(most, lambda: self.now_s)
        self.flights = Flights(
            FleetState(), Nobody(), lambda: self.now_s, max_open=9, max_unsettled=9, access_log_timeout_s=1
        )

    def sent(self, sent_id: str) -> Flight:
        """A request that went out under this id."""
        flight = self.flights.open()
        self.reports.expect(flight, sent_id)
        return flight

    def told(self, name: str, prompt: int, generated: int) -> None:
        """An engine tells of one that has ended."""
        self.reports.take([FinishedRequest(name, "stop", prompt, generated, 0, 1.0, 0.0)])

    def due(self, after_s: float) -> list[int | None]:
        """What those have used that have waited for so long."""
        self.now_s += after_s
        return [tokens for _, tokens in self.reports.due()]


@pytest.fixture
def house() -> House:
    """With room for a hundred."""
    return House()


@pytest.mark.parametrize("told_first", [True, False])
def test_a_report_is_joined_to_its_request_whichever_comes_first(house: House, *, told_first: bool) -> None:
    """The end of the answer or the engine's word. It is waited for, but not for long."""
    flight = house.sent("a")
    if told_first:
        house.told("chatcmpl-a", 30, 12)
    assert house.reports.wait_for(flight)
    assert house.due(1.0) == []
    if not told_first:
        house.told("chatcmpl-a", 30, 12)
    assert house.due(1.5) == [42]
    assert house.due(9.0) == []


def test_several_choices_and_prompts_are_one_request(house: House) -> None:
    """A prompt counts once, whatever number of answers it has; of several prompts each."""
    choices, prompts = house.sent("a"), house.sent("b")
    for _ in range(3):
        house.told("chatcmpl-a", 30, 10)
    house.told("cmpl-b-0", 5, 1)
    house.told("cmpl-b-1", 7, 2)
    assert house.reports.wait_for(choices)
    assert house.reports.wait_for(prompts)
    assert house.due(3.0) == [60, 15]


def test_where_nobody_tells_the_wait_ends_without_an_answer(house: House) -> None:
    """An engine whose client left says nothing of the request."""
    assert house.reports.wait_for(house.sent("a"))
    house.told("chatcmpl-b", 30, 12)
    assert house.due(3.0) == [None]


def test_an_id_that_is_used_twice_tells_nothing(house: House) -> None:
    """Neither of the second nor of the first, if that is not settled: a client may choose ids."""
    first, second = house.sent("a"), house.sent("a")
    house.told("chatcmpl-a", 1, 1)
    assert not house.reports.wait_for(second)
    assert not house.reports.wait_for(first)
    third = house.sent("c")
    assert house.reports.wait_for(third)
    house.told("chatcmpl-c", 1, 1)
    house.sent("c")
    assert house.due(3.0) == [None]


@pytest.mark.parametrize("sent_id", ["", "x" * 101])
def test_a_request_that_could_not_be_found_is_not_waited_for(house: House, sent_id: str) -> None:
    """Without an id, or with one that the plugin would cut."""
    assert not house.reports.wait_for(house.sent(sent_id))


def test_no_more_are_remembered_and_kept_waiting_than_allowed() -> None:
    """The oldest are forgotten; whoever waits too long is settled early."""
    house = House(most=3)
    flights = [house.sent(f"{n}") for n in range(5)]
    for n in range(5):
        house.told(f"chatcmpl-{n}", n, 0)
    assert all(house.reports.wait_for(flight) for flight in flights)
    assert house.due(0.0) == [None, None]
    assert house.due(3.0) == [2, 3, 4]
