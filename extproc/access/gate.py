"""The gate: from a request's headers and verified claims to the caller's identity, or a refusal.

Any one of the configured sources lets a caller in. The tenant comes from these sources alone: a key's entry, a claim
that Envoy verified, the header of a trusted hop. A claim counts only as dynamic metadata, which no client can write: a
gateway that has no JWT filter sends none, so its callers are refused, not believed.

Immutable: a changed config or key file makes another gate. One look-up and one SHA-256 per key a request brings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from extproc.access.keys import digest_of
from extproc.config.sections.callers import LONGEST_TENANT, Access, ApiKey
from extproc.names import CREDENTIAL_HEADERS, RETRY_AFTER_S
from policies.types import Reason, Refusal

_AUTHORIZATION, _API_KEY = CREDENTIAL_HEADERS
_BEARER = "bearer "


@dataclass(init=False)
class Caller:
    """Who asks; never changed. `key_name` only where an API key said so."""

    tenant: str
    key_name: str | None

    def __init__(self, tenant: str, key_name: str | None = None) -> None:
        self.tenant = tenant
        self.key_name = key_name


class Gate:
    """Who may enter, and as whom. `file_keys` None: there is a file, and it could not be read yet."""

    def __init__(self, access: Access, file_keys: tuple[ApiKey, ...] | None) -> None:
        self._takes_keys = access.takes_keys
        self._tenant_header = access.tenant_header
        # a key that stands in both places is the config's
        keys = (*(file_keys or ()), *access.api_keys)
        self._callers = {key.sha256: Caller(key.tenant, key.name) for key in keys}
        self._incomplete = file_keys is None
        self._claim = access.jwt.tenant_claim if access.jwt else None

    def admit(self, headers: Mapping[str, str], claims: Mapping[str, str] | None) -> Caller | Refusal:
        """The caller, or a 401 that says what is missing. `claims`: of a token that the gateway verified."""
        caller = self._by_claim(claims) or self._by_key(headers) or self._by_hop(headers)
        return caller if caller is not None else self._turn_away(headers, claims)

    def _by_claim(self, claims: Mapping[str, str] | None) -> Caller | None:
        if claims is None or self._claim is None:
            return None
        return _caller(claims.get(self._claim, ""))

    def _by_key(self, headers: Mapping[str, str]) -> Caller | None:
        if not self._takes_keys:
            return None
        for key in _keys_in(headers):
            caller = self._callers.get(digest_of(key))
            if caller is not None:
                return caller
        return None

    def _by_hop(self, headers: Mapping[str, str]) -> Caller | None:
        name = self._tenant_header
        return None if name is None else _caller(headers.get(name, ""))

    def _turn_away(self, headers: Mapping[str, str], claims: Mapping[str, str] | None) -> Refusal:
        if claims is not None and self._claim is not None:
            return _refuse(f"the token has no usable claim {self._claim!r}", Reason.WRONG_CREDENTIALS)
        if not any(name in headers for name in CREDENTIAL_HEADERS):
            return _refuse(_HOW, Reason.NO_CREDENTIALS)
        if self._incomplete:
            message = "API keys cannot be checked at the moment"
            return Refusal(503, "server_error", message, Reason.KEYS_UNREADABLE, retry_after_s=RETRY_AFTER_S)
        return _refuse("the API key or token sent is not valid here", Reason.WRONG_CREDENTIALS)


def gate_of(access: Access, file_keys: tuple[ApiKey, ...] | None) -> Gate | None:
    """The gate of a config, None where everybody may call."""
    return Gate(access, file_keys if access.api_keys_file else ()) if access.guarded else None


_HOW = "no credentials: send an API key or token as `Authorization: Bearer ...`, or an API key as `x-api-key`"


def _refuse(message: str, reason: Reason) -> Refusal:
    return Refusal(401, "invalid_request_error", message, reason)


def _keys_in(headers: Mapping[str, str]) -> Iterator[str]:
    """OpenAI's clients send a bearer token, Anthropic's a header of their own; some send both."""
    authorization = headers.get(_AUTHORIZATION, "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        yield authorization[len(_BEARER) :].strip()
    if _API_KEY in headers:
        yield headers[_API_KEY].strip()


def _caller(tenant: str) -> Caller | None:
    """None for a name that would not fit where names go: never cut, or two tenants could become one."""
    return Caller(tenant) if 0 < len(tenant) <= LONGEST_TENANT and tenant.isprintable() else None
