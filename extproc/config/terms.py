"""On what terms a request goes to its engines: how often and why it is tried again, and how long it may take.

Told to Envoy in request headers, so that they are the same in our own and in one whose routes are not ours. A pool has
some dozens of different sets of them, each made once: a request picks one. Not here: what an answer may take
(policies/admission/time_limits.py); `timeouts.connect_ms`, `stream_idle_s` and `upstream_idle_s`, for which Envoy knows
no headers (extproc/control).
"""

from __future__ import annotations

from typing import Final

from extproc.config.schema import Config, Pool
from extproc.names import RETRY_ON, STREAMED_HEADER
from extproc.reply import Headers
from policies.admission.time_limits import TimeLimits, longest_answer
from policies.types import InferenceRequest, Kind

_DRAIN_STATUS: Final = 500
"""What vLLM answers to new requests once it has got SIGTERM, before any byte of an answer."""
_UNLIMITED: Final = -1
_REALTIME: Final = Kind.REALTIME


class Terms:
    """Those of one pool, under one config. `retries`: whether there are any."""

    def __init__(self, config: Config, pool: Pool) -> None:
        total = config.timeouts.total
        self._limits = None if total is None else TimeLimits(**total.model_dump())
        self.retries: bool = config.retries.attempts > 0
        self._retry_headers = _retry_headers(config, pool)
        self._streamed = _streamed_headers(config)
        self._sets: dict[tuple[bool, int, bool], Headers] = {}

    def headers(
        self,
        request: InferenceRequest,
        *,
        context_tokens: float,
        tokens_per_s: float,
        waves: int = 1,
        retry: bool = True,
    ) -> Headers:
        """Request headers for Envoy.

        `context_tokens`: the most a prompt and its answer may have together. `tokens_per_s`: how fast one answer is
        written, and `waves` in how many turns all of them are. `retry`: whether it may be tried again.
        """
        streamed = request.stream and request.kind is not _REALTIME
        step = _UNLIMITED
        if self._limits is not None:
            longest = longest_answer(request.kind, request.max_tokens, context_tokens)
            if longest is not None:
                step = self._limits.step(waves * longest, tokens_per_s)
        terms = streamed, step, retry
        made = self._sets.get(terms)
        if made is None:
            made = self._sets[terms] = self._make(streamed, step, retry)
        return made

    def _make(self, streamed: bool, step: int, retry: bool) -> Headers:  # noqa: FBT001 - as in the key
        headers = self._retry_headers if retry else _NO_RETRY
        if streamed:
            headers += self._streamed
        if self._limits is not None and step != _UNLIMITED:
            headers += (("x-envoy-upstream-rq-timeout-ms", _ms(self._limits.steps[step])),)
        return headers


_NO_RETRY: Final[Headers] = (("x-envoy-max-retries", "0"),)


def _retry_headers(config: Config, pool: Pool) -> Headers:
    retries = config.retries
    if not retries.attempts:
        return _NO_RETRY
    statuses = sorted({*retries.statuses, *((_DRAIN_STATUS,) if pool.retry_500 else ())})
    return (
        ("x-envoy-max-retries", str(retries.attempts)),
        ("x-envoy-retry-on", RETRY_ON),
        ("x-envoy-retriable-status-codes", ",".join(map(str, statuses))),
    )


def _streamed_headers(config: Config) -> Headers:
    """What holds for streamed answers alone: of a whole one nothing comes until all of it has been generated."""
    first_byte_s, headers = config.timeouts.first_byte_s, []
    if first_byte_s is not None:
        headers.append(("x-envoy-upstream-rq-per-try-timeout-ms", _ms(first_byte_s)))
    if config.timeouts.silence_s is not None:
        headers.append((STREAMED_HEADER, "1"))
    return tuple(headers)


def _ms(seconds: float) -> str:
    return str(max(round(seconds * 1000), 1))
