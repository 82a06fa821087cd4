"""Lists of endpoints from text, and what becomes of an address that is listed twice."""

from __future__ import annotations

import pytest

from extproc.fleet.discovery.endpoints import BadEndpoints, Discovered, as_discovered, parse_endpoints


@pytest.mark.parametrize(
    "text",
    [
        "- 10.0.0.1:80\n- '[::1]:81'\n",
        '["10.0.0.1:80", "[::1]:81"]',
        '{"endpoints": ["10.0.0.1:80", "[::1]:81"], "comment": "ours"}',
        "endpoints:\n  - 10.0.0.1:80\n  - '[::1]:81'\n",
    ],
    ids=["yaml", "json", "json mapping", "yaml mapping"],
)
def test_a_list_is_read_from_yaml_and_json(text: str) -> None:
    """Bare, or under `endpoints` beside whatever else a file may hold."""
    assert [endpoint.address for endpoint in parse_endpoints(text)] == ["10.0.0.1:80", "[::1]:81"]


def test_an_address_listed_twice_counts_once() -> None:
    """Its first place is kept: a file made by a script may repeat itself."""
    found = parse_endpoints("[10.0.0.2:80, 10.0.0.1:80, 10.0.0.2:80]")
    assert found == [Discovered("10.0.0.2:80"), Discovered("10.0.0.1:80")]


def test_an_endpoint_may_have_more_to_say() -> None:
    """Weight, zone and cost beside the address; addresses alone may stand in the same list."""
    found = parse_endpoints("[{address: '[0::1]:80', weight: 2, zone: eu-1a, cost: 0.5}, 10.0.0.1:80]")
    assert found == [Discovered("[::1]:80", weight=2.0, zone="eu-1a", cost=0.5), Discovered("10.0.0.1:80")]


def test_an_empty_list_is_a_list() -> None:
    """Scaled to zero on purpose."""
    assert parse_endpoints("[]") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; write `\\[\\]` if there are no endpoints"),
        ("# none yet", "the file is empty"),
        ("endpoints:", "expected a list"),
        ("{", "not YAML or JSON"),
        ("[" * 100_000, "not YAML or JSON"),
        ("- " * 100_000, "not YAML or JSON"),
        ("10.0.0.1:80", "expected a list"),
        ("{hosts: [10.0.0.1:80]}", "expected a list"),
        ("{endpoints: 10.0.0.1:80}", "expected a list"),
        ("[17]", "^\\[0\\]: should be IP:port, or a mapping with an `address`"),
        ("- \n", "^\\[0\\]: should be IP:port"),
        ("[{adress: 10.0.0.1:80}]", r"^\[0\].address: required, .*; \[0\].adress: unknown key; did you mean 'address'"),
        ("[{address: 'engine:80'}]", "is not IP:port"),
        ("[{address: 10.0.0.1:80, weight: 0}]", "weight: Input should be greater than 0"),
        ("[engine:80]", "is not IP:port"),
        ("[10.0.0.1]", "is not IP:port"),
        ("[10.0.0.1:0]", "port outside 1-65535"),
        ("[10.0.0.1:80, 10.0.0.256:80]", "10.0.0.256:80' is not IP:port"),
    ],
)
def test_anything_else_is_refused_in_words(text: str, message: str) -> None:
    """An empty or half-written file must not read as an empty fleet."""
    with pytest.raises(BadEndpoints, match=message):
        parse_endpoints(text)


def test_every_fault_is_there_and_the_message_has_the_first_few() -> None:
    """A file of a thousand wrong lines is no line of the log."""
    with pytest.raises(BadEndpoints) as told:
        parse_endpoints("\n".join(f"- engine-{number}" for number in range(7)))
    assert [fault.split(":")[0] for fault in told.value.faults] == [f"[{number}]" for number in range(7)]
    assert "engine-4" in str(told.value)
    assert str(told.value).endswith("; and 2 more")


def test_an_address_listed_twice_is_terminating_only_if_both_are() -> None:
    """A pod on its host's network and its successor have the same address for a while."""
    gone, there = Discovered("10.0.0.1:80", terminating=True), Discovered("10.0.0.1:80")
    assert as_discovered([gone, there]) == as_discovered([there, gone]) == {"10.0.0.1:80": there}
    assert as_discovered([gone, gone]) == {"10.0.0.1:80": gone}
