"""What the pipeline answers, as plain data. A transport turns it into bytes for its caller's mode.

`Route` sends the request on, `Answer` ends it here, `Pending` means the answer comes later (a queue). Nothing here
knows protobuf, HTTP framing or Envoy's modes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import msgspec

from extproc.error_object import error_object
from extproc.request.splice import Splice
from policies.types import Reason, Refusal

Headers: TypeAlias = tuple[tuple[str, str], ...]

_JSON: Final = ("content-type", "application/json")


@dataclass(init=False)
class Route:
    """Send the request to `cluster`, to the first of `addresses` that Envoy can reach. Never changed once made.

    `headers` are set on the request to the engine, `remove_headers` taken from it. `splices` edit the body.
    `request_id` joins the access log to us. `list_for_all`: the operator says that every caller understands a list of
    addresses.
    """

    cluster: str
    addresses: tuple[str, ...]
    request_id: str
    model: str
    headers: Headers
    splices: tuple[Splice, ...]
    list_for_all: bool
    remove_headers: tuple[str, ...]

    def __init__(
        self,
        cluster: str,
        addresses: tuple[str, ...],
        request_id: str,
        model: str,
        headers: Headers = (),
        splices: tuple[Splice, ...] = (),
        remove_headers: tuple[str, ...] = (),
        *,
        list_for_all: bool = False,
    ) -> None:
        self.cluster = cluster
        self.addresses = addresses
        self.request_id = request_id
        self.model = model
        self.headers = headers
        self.splices = splices
        self.list_for_all = list_for_all
        self.remove_headers = remove_headers

    def for_one_address_callers(self) -> Route:
        """The route for callers of whom only some understand a list: the first address alone, unless told otherwise."""
        return self if self.list_for_all else replace(self, addresses=self.addresses[:1])


@dataclass(init=False)
class Answer:
    """Answer the client ourselves. `reason` becomes Envoy's response_code_details."""

    status: int
    body: bytes
    headers: Headers
    reason: str

    def __init__(self, status: int, body: bytes, headers: Headers = (_JSON,), reason: str = "answered") -> None:
        self.status = status
        self.body = body
        self.headers = headers
        self.reason = reason


Reply: TypeAlias = Route | Answer


@dataclass(init=False)
class Pending:
    """The reply comes when `ready` resolves. Only the transport's task awaits it; cancelling it gives up the place."""

    ready: asyncio.Future[Reply]

    def __init__(self, ready: asyncio.Future[Reply]) -> None:
        self.ready = ready


def refuse(refusal: Refusal, *, anthropic: bool = False, grpc: bool = False) -> Answer:
    """A refusal as the client sees it: OpenAI's error object or Anthropic's, and Retry-After where waiting helps.

    For a gRPC call Envoy makes a gRPC status of the HTTP one, and its message of the body: there, the words alone.
    """
    if grpc:
        return Answer(refusal.status, refusal.message.encode(), (), refusal.reason)
    headers: Headers = (_JSON,)
    if refusal.retry_after_s is not None:
        headers = (_JSON, ("retry-after", str(refusal.retry_after_s)))
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers = (_JSON, ("www-authenticate", 'Bearer realm="pointsman"'))
    if refusal.reason in _WORTH_RETRYING:
        headers = (*headers, ("x-should-retry", _WORTH_RETRYING[refusal.reason]))
    body = msgspec.json.encode(error_body(refusal, anthropic=anthropic))
    return Answer(refusal.status, body, headers, refusal.reason)


def error_body(refusal: Refusal, *, anthropic: bool) -> dict[str, Any]:
    """What the client reads of a refusal, in the shape that its API's clients parse: OpenAI's or Anthropic's."""
    return _anthropic_error(refusal) if anthropic else _openai_error(refusal)


def _openai_error(refusal: Refusal) -> dict[str, Any]:
    return error_object(refusal.type, _CODES.get(refusal.reason, refusal.reason), refusal.message, refusal.param)


def _anthropic_error(refusal: Refusal) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(refusal.status, "api_error" if refusal.status >= _SERVER_ERROR else refusal.type)
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


_CODES = {
    Reason.UNKNOWN_MODEL: "model_not_found",
    Reason.WRONG_CREDENTIALS: "invalid_api_key",
    Reason.CLIENT_REQUESTS: "rate_limit_exceeded",
    Reason.CLIENT_CONCURRENCY: "rate_limit_exceeded",
    Reason.QUOTA_REQUESTS: "rate_limit_exceeded",
    Reason.QUOTA_TOKENS: "rate_limit_exceeded",
    Reason.QUOTA_CONCURRENCY: "rate_limit_exceeded",
    Reason.QUOTA_BUDGET: "insufficient_quota",
}
"""Codes that OpenAI's clients know by name; elsewhere the code is our reason."""

_WORTH_RETRYING = {Reason.DUPLICATE_UNDER_WAY: "true", Reason.DUPLICATE_ANSWERED: "false"}
"""OpenAI's clients try every 409 again unless told that it is of no use."""

_SERVER_ERROR = 500
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types that Anthropic's clients know by name, by status."""
