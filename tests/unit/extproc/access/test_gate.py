"""The gate: which headers and claims make which caller, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.access.gate import Caller, Gate, gate_of
from extproc.access.keys import digest_of
from extproc.config.sections.callers import Access, ApiKey
from policies.types import Refusal

KEY = "pm-0123"
ENTRY = ApiKey(name="laptop", tenant="acme", sha256=digest_of(KEY))
JWT = {"issuer": "i", "audiences": (), "jwks_file": "x", "tenant_claim": "org.id"}
ACME = Caller("acme", "laptop")


def gate(file_keys: tuple[ApiKey, ...] | None = (), **access: Any) -> Gate:
    """A gate over one kind of access."""
    return Gate(Access.model_validate(access), file_keys)


def reason(admitted: Caller | Refusal) -> tuple[int, str]:
    """Why somebody was not let in."""
    assert isinstance(admitted, Refusal)
    return admitted.status, admitted.reason


def test_without_sources_there_is_no_gate() -> None:
    """And requests pay nothing."""
    assert gate_of(Access(), None) is None
    assert gate_of(Access(forward_credentials=True), None) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    ],
)
def test_a_key_lets_in_from_either_header(headers: dict[str, str]) -> None:
    """Of two that are sent one suffices."""
    assert gate(api_keys=[ENTRY]).admit(headers, None) == ACME


@pytest.mark.parametrize("value", ["", KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {digest_of(KEY)}"])
def test_what_is_no_bearer_token_is_no_key(value: str) -> None:
    """The digest least of all."""
    assert reason(gate(api_keys=[ENTRY]).admit({"authorization": value}, None)) == (401, "wrong_credentials")


def test_nothing_sent_is_told_from_something_wrong() -> None:
    """The first is a mistake in the set-up, the second perhaps an old key."""
    assert reason(gate(api_keys=[ENTRY]).admit({}, None)) == (401, "no_credentials")


def test_keys_of_the_file_count_beside_those_of_the_config() -> None:
    """Under the config's name where both have one."""
    other = ApiKey(name="server", tenant="other", sha256=digest_of("pm-9"))
    double = ENTRY.model_copy(update={"name": "double", "tenant": "else"})
    both = gate((other, double), api_keys=[ENTRY], api_keys_file="f")
    assert both.admit({"x-api-key": "pm-9"}, None) == Caller("other", "server")
    assert both.admit({"x-api-key": KEY}, None) == ACME


def test_a_file_never_read_is_not_the_clients_fault() -> None:
    """A 401 would have clients throw away good keys. A key of the config is good all the same."""
    access = Access(api_keys=(ENTRY,), api_keys_file="f")
    unread = gate_of(access, None)
    assert unread is not None
    assert reason(unread.admit({"x-api-key": "pm-9"}, None)) == (503, "keys_unreadable")
    assert unread.admit({"x-api-key": KEY}, None) == ACME


def test_a_claim_counts_only_where_tokens_are_accepted() -> None:
    """Some gateway's own filter may have verified a token for reasons of its own."""
    claims = {"org.id": "acme"}
    assert gate(jwt=JWT).admit({}, claims) == Caller("acme")
    assert reason(gate(api_keys=[ENTRY]).admit({}, claims)) == (401, "no_credentials")


@pytest.mark.parametrize("claims", [{}, {"org.id": ""}, {"org.id": "x" * 129}, {"org.id": "a\nb"}, {"org": "acme"}])
def test_a_token_without_a_usable_tenant_lets_nobody_in(claims: dict[str, str]) -> None:
    """A name is never cut: two tenants could become one."""
    assert reason(gate(jwt=JWT).admit({}, claims)) == (401, "wrong_credentials")


def test_a_token_is_no_key() -> None:
    """Without keys the header is not looked at: Envoy has verified the token, or it has not."""
    assert reason(gate(jwt=JWT).admit({"authorization": f"Bearer {KEY}"}, None)) == (401, "wrong_credentials")


def test_the_header_of_a_hop_counts_only_where_it_is_trusted() -> None:
    """By its very name."""
    trusting = gate(tenant_header="x-tenant")
    assert trusting.admit({"x-tenant": "acme"}, None) == Caller("acme")
    assert reason(trusting.admit({"x-pointsman-tenant": "acme"}, None)) == (401, "no_credentials")
    assert reason(gate(api_keys=[ENTRY]).admit({"x-tenant": "acme"}, None)) == (401, "no_credentials")


def test_the_stronger_word_counts() -> None:
    """A verified claim before a key, a key before a header."""
    every = gate(api_keys=[ENTRY], jwt=JWT, tenant_header="x-tenant")
    headers = {"x-api-key": KEY, "x-tenant": "by-hop"}
    assert every.admit(headers, {"org.id": "by-token"}) == Caller("by-token")
    assert every.admit(headers, None) == ACME
    assert every.admit({"x-tenant": "by-hop"}, None) == Caller("by-hop")
