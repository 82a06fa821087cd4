"""The common words that can be wrong."""

from __future__ import annotations

import math

import pytest

from policies.types import retry_after_s


@pytest.mark.parametrize(
    ("wait_s", "told"), [(0.0, 1), (-5.0, 1), (1.0, 1), (1.01, 2), (30.0, 30), (4_997.2, 4_998), (math.inf, 86_400)]
)
def test_a_retry_after_is_whole_and_never_too_early(wait_s: float, told: int) -> None:
    """Rounded up, a second at least, a day at most."""
    assert retry_after_s(wait_s) == told
