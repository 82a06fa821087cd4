"""`Idempotency-Key` for live requests: whose key it is, what makes two requests the same, refusals in words.

Not here: when a key is free (policies/admission/idempotency.py). The header itself goes on to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xxhash import xxh3_128_digest

from extproc.config.schema import Config
from extproc.flight import Flight
from extproc.names import IDEMPOTENCY_HEADER, RETRY_AFTER_S
from extproc.request.apis import is_grpc
from policies.admission.idempotency import IdempotencyKeys, Standing, Taken
from policies.types import Reason, Refusal

_INVALID = "invalid_request_error"
_NAME = "Idempotency-Key"
_LONGEST_KEY = 255
_ANSWERED = "ok"
"""The one outcome after which a request is not to be done again."""


class Idempotency:
    """Holds the keys of requests, and settles what becomes of them."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._keys = IdempotencyKeys(0.0, 0)
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Use new limits; what is held stays."""
        window_s = config.retries.idempotency_window_s
        self._enabled = window_s is not None
        self._keys.window_s, self._keys.most = window_s or 0.0, config.limits.idempotency_keys

    def hold(self, flight: Flight, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        """Hold the request's key on its flight, if it has one; a refusal where that is another's."""
        key = headers.get(IDEMPOTENCY_HEADER)
        if not key or not self._enabled or flight.key_hold is not None or not _is_once_only(headers):
            return None
        if len(key) > _LONGEST_KEY:
            message = f"{_NAME} is longer than {_LONGEST_KEY} characters"
            return Refusal(400, _INVALID, message, Reason.INVALID_REQUEST, _NAME)
        fingerprint = xxh3_128_digest(headers.get(":path", "").encode() + b"\0" + body)
        held = self._keys.take((flight.tenant, key), fingerprint, flight.request_id, self._clock())
        if isinstance(held, Taken):
            return _refusal(held)
        flight.key_hold = held
        return None

    def settle(self, flight: Flight, outcome: str) -> None:
        """The request is over, and this is what became of it."""
        if flight.key_hold is None:
            return
        if outcome == _ANSWERED:
            flight.key_hold.answered(self._clock())
        else:
            flight.key_hold.free()


def _is_once_only(headers: Mapping[str, str]) -> bool:
    """Only a POST does anything; and of a gRPC call we see no messages that could be compared."""
    return headers.get(":method", "POST") == "POST" and not is_grpc(headers)


def _refusal(taken: Taken) -> Refusal:
    first = taken.request_id
    if taken.standing is Standing.OTHER_BODY:
        message = f"this {_NAME} was used for another request, {first}: a key belongs to one request, byte for byte"
        return Refusal(422, _INVALID, message, Reason.IDEMPOTENCY_KEY_REUSED, _NAME)
    if taken.standing is Standing.UNDER_WAY:
        message = f"the request with this {_NAME} is under way: {first}"
        return Refusal(409, _INVALID, message, Reason.DUPLICATE_UNDER_WAY, _NAME, retry_after_s=RETRY_AFTER_S)
    message = f"the request with this {_NAME} has been answered: {first}"
    return Refusal(409, _INVALID, message, Reason.DUPLICATE_ANSWERED, _NAME)
