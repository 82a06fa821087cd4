"""How long an answer may take: never less than it needs, and one of a few values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.time_limits import TimeLimits, longest_answer
from policies.types import Kind

LIMITS = TimeLimits(allowance_s=30.0, margin=1.5, least_s=60.0, most_s=1_000.0)


def limit_s(tokens: float, tokens_per_s: float) -> float:
    """What comes out of LIMITS."""
    return LIMITS.steps[LIMITS.step(tokens, tokens_per_s)]


@pytest.mark.parametrize(
    ("tokens", "expected_s"),
    [(0, 60.0), (1_000, 60.0), (5_000, 183.105), (20_000, 698.492), (math.inf, 1_000.0)],
    ids=["nothing", "little", "30 + 150 rounded up", "30 + 600 rounded up", "endless"],
)
def test_a_limit_is_made_of_allowance_tokens_and_margin(tokens: float, expected_s: float) -> None:
    """At 50 tokens a second; rounded up to the next step, and within the bounds."""
    wanted_s = 30.0 + 1.5 * tokens / 50.0
    steps = [60.0 * 1.25**number for number in range(13)]
    assert limit_s(tokens, 50.0) == expected_s
    assert expected_s == pytest.approx(min([step for step in steps if step >= wanted_s] or [1_000.0]), abs=1e-3)


@given(
    tokens=st.floats(0, 1e9) | st.just(math.inf),
    tokens_per_s=st.floats(1e-2, 1e6),
    allowance_s=st.floats(1e-3, 86_400),
    margin=st.floats(1, 1_000),
    bounds_s=st.tuples(st.floats(0.01, 86_400), st.floats(0.01, 86_400)),
)
def test_no_answer_is_cut_that_keeps_the_pace(
    tokens: float, tokens_per_s: float, allowance_s: float, margin: float, bounds_s: tuple[float, float]
) -> None:
    """Up to the upper bound the limit is at least what was asked for, at most a quarter more; and values are few."""
    least_s, most_s = sorted(bounds_s)
    limits = TimeLimits(allowance_s, margin, least_s, most_s)
    chosen_s = limits.steps[limits.step(tokens, tokens_per_s)]
    wanted_s = min(max(allowance_s + margin * tokens / tokens_per_s, least_s), most_s)
    assert wanted_s - 1e-3 <= chosen_s <= min(1.25 * wanted_s, most_s) + 1e-3
    assert list(limits.steps) == sorted(limits.steps)
    assert len(limits.steps) <= 2 + math.log(most_s / least_s, 1.25)


@pytest.mark.parametrize(
    ("kind", "max_tokens", "context_tokens", "longest"),
    [
        (Kind.CHAT, 100, 4_096.0, 100.0),
        (Kind.CHAT, 10_000, 4_096.0, 4_096.0),
        (Kind.MESSAGE, None, 4_096.0, 4_096.0),
        (Kind.COMPLETION, None, math.inf, math.inf),
        (Kind.AUDIO, None, 448.0, 448.0),
        (Kind.EMBEDDING, None, 4_096.0, 0.0),
        (Kind.REALTIME, None, 4_096.0, None),
        (Kind.OTHER, 100, 4_096.0, None),
    ],
)
def test_the_longest_answer_is_what_the_request_and_the_model_allow(
    kind: Kind, max_tokens: int | None, context_tokens: float, longest: float | None
) -> None:
    """Nothing is generated for embeddings; a conversation, and what we cannot read, has no limit at all."""
    assert longest_answer(kind, max_tokens, context_tokens) == longest
