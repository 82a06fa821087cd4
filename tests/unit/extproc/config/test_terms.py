"""The terms on which requests go to engines: which headers, and how few sets of them."""

from __future__ import annotations

import math

import pytest

from extproc.config.loading import ConfigError, parse
from extproc.config.terms import Terms
from extproc.names import RETRY_ON, STREAMED_HEADER
from extproc.reply import Headers
from policies.types import InferenceRequest, Kind

POOL = "pools: [{name: p, models: [m], endpoints: {static: []}}]"
FIRST_BYTE = "x-envoy-upstream-rq-per-try-timeout-ms"
TOTAL = "x-envoy-upstream-rq-timeout-ms"


def terms(config: str = "") -> Terms:
    """Of the one pool, under this config."""
    found = parse(f"{config}\n{POOL}")
    return Terms(found, found.pools[0])


def asked(
    of: Terms, *, kind: Kind = Kind.CHAT, stream: bool = False, max_tokens: int | None = None, retry: bool = True
) -> dict[str, str]:
    """The headers of one request to an engine with a context of 100,000 tokens that writes 50 a second."""
    return dict(_asked(of, kind, stream, max_tokens, retry))


def _asked(of: Terms, kind: Kind, stream: bool, max_tokens: int | None, retry: bool) -> Headers:  # noqa: FBT001
    request = InferenceRequest(kind, "m", "m", 10, stream=stream, max_tokens=max_tokens)
    return of.headers(request, context_tokens=100_000.0, tokens_per_s=50.0, retry=retry)


def test_retries_are_told_in_headers() -> None:
    """Number, kinds and statuses; the engine's own way to say that it drains is one of them."""
    told = asked(terms("retries: {attempts: 2, statuses: [503, 504]}\ntimeouts: {first_byte_s: null, total: null}"))
    assert told == {
        "x-envoy-max-retries": "2",
        "x-envoy-retry-on": RETRY_ON,
        "x-envoy-retriable-status-codes": "500,503,504",
    }


def test_one_that_may_not_be_tried_again_says_so_and_keeps_its_time_limits() -> None:
    """Zero must be sent, or the route's own default applies."""
    once = asked(terms(), stream=True, retry=False)
    assert once == {"x-envoy-max-retries": "0", FIRST_BYTE: "300000", TOTAL: asked(terms(), stream=True)[TOTAL]}


def test_only_a_stream_has_to_begin_in_time() -> None:
    """The headers of a whole answer come when all of it is there."""
    assert asked(terms("timeouts: {first_byte_s: 2.5}"), stream=True)[FIRST_BYTE] == "2500"
    assert FIRST_BYTE not in asked(terms("timeouts: {first_byte_s: 2.5}"))
    assert FIRST_BYTE not in asked(terms("timeouts: {first_byte_s: null}"), stream=True)


def test_more_tokens_get_more_time() -> None:
    """600 s to begin with; 20,000 tokens take 400 s at 50 a second, half as much again is allowed for them."""
    limits_s = [int(asked(terms(), max_tokens=tokens)[TOTAL]) / 1000 for tokens in (1, 20_000, 90_000)]
    assert limits_s[0] == pytest.approx(750)  # 600.03 rounded up
    assert 1_200 <= limits_s[1] <= 1.25 * 1_200
    assert 3_300 <= limits_s[2] <= 1.25 * 3_300


def test_answers_that_are_written_in_turns_get_the_time_of_all() -> None:
    """An engine that runs 256 at once writes 2,560 in ten turns."""
    request = InferenceRequest(Kind.COMPLETION, "m", "m", 10, max_tokens=9_000, choices=2_560)
    told = dict(terms().headers(request, context_tokens=100_000.0, tokens_per_s=50.0, waves=10))
    assert told[TOTAL] == asked(terms(), max_tokens=90_000)[TOTAL]


def test_without_max_tokens_the_context_counts() -> None:
    """An answer is never longer than that."""
    assert asked(terms())[TOTAL] == asked(terms(), max_tokens=100_000)[TOTAL] != asked(terms(), max_tokens=10)[TOTAL]


def test_where_nothing_says_how_long_it_gets_the_upper_bound_holds() -> None:
    """A context that no engine told of."""
    request = InferenceRequest(Kind.CHAT, "m", "m", 10)
    told = dict(terms().headers(request, context_tokens=math.inf, tokens_per_s=50.0))
    assert told[TOTAL] == "14400000"


@pytest.mark.parametrize("kind", [Kind.REALTIME, Kind.OTHER])
def test_what_has_no_end_has_no_limit(kind: Kind) -> None:
    """A WebSocket, a gRPC stream."""
    assert TOTAL not in asked(terms(), kind=kind)
    assert TOTAL not in asked(terms("timeouts: {total: null}"))


def test_silence_is_watched_where_it_is_configured() -> None:
    """Of streams, by a route of their own, which this header leads to."""
    assert asked(terms("timeouts: {silence_s: 20}"), stream=True)[STREAMED_HEADER] == "1"
    assert STREAMED_HEADER not in asked(terms("timeouts: {silence_s: 20}"))
    assert STREAMED_HEADER not in asked(terms(), stream=True)


def test_there_are_few_sets_and_each_is_made_once() -> None:
    """However many requests there are: rendering is cached by them."""
    of, seen = terms("timeouts: {silence_s: 20}"), {}
    for max_tokens in range(1, 200_000, 37):
        for stream in (False, True):
            for retry in (False, True):
                headers = _asked(of, Kind.CHAT, stream, max_tokens, retry)
                assert seen.setdefault(headers, headers) is headers
    assert len(seen) <= 4 * 16


@pytest.mark.parametrize(
    ("timeouts", "words"),
    [
        ("{first_byte_s: 600}", "would have no effect"),
        ("{total: {least_s: 10}}", "would have no effect"),
        ("{total: {least_s: 20000}}", "more than most_s"),
        ("{total: {margin: 0.5}}", "greater than or equal to 1"),
        ("{silence_s: 0}", "greater than 0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(timeouts: str, words: str) -> None:
    """Envoy would pass over them without a word."""
    with pytest.raises(ConfigError, match=words):
        terms(f"timeouts: {timeouts}")
