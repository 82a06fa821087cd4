"""How long an answer may take as a whole, by what the request asks for: waiting and prefill, and its tokens.

    allowance_s + margin * tokens / decode rate, never less than least_s nor more than most_s

The limit is there for what will never end, not to hurry what is slow: it is rounded up, and the tokens are the most
that the answer can have. Only some twenty values come out, whatever goes in (`steps`), so that what is made of them can
be made once. Not here: who enforces it (Envoy) and how fast a pool decodes (policies/placement/ledger.py).

Rejected: the expected length in place of the longest. Who asks for 4,000 tokens and gets 300 as a rule must get 4,000
when they come.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from policies.types import Kind

_STEP: Final = 1.25
"""Each value is so many times the one below it: at most a quarter is added by rounding."""

_WITHOUT_TOKENS: Final = frozenset({Kind.EMBEDDING, Kind.RERANK, Kind.POOLING, Kind.TOKENIZE})
_ENDLESS: Final = frozenset({Kind.REALTIME, Kind.OTHER})
"""A conversation has no longest answer, and of what is routed by its path alone nothing is known."""


@dataclass(init=False)
class TimeLimits:
    """The bounds of the formula above, in seconds; `margin` has no unit. Never changed.

    `steps`: every value there is, in whole milliseconds, ascending.
    """

    allowance_s: float
    margin: float
    least_s: float
    most_s: float

    def __init__(self, allowance_s: float, margin: float, least_s: float, most_s: float) -> None:
        self.allowance_s = allowance_s
        self.margin = margin
        self.least_s = least_s
        self.most_s = most_s
        count = math.ceil(math.log(most_s / least_s, _STEP))
        values = [least_s * _STEP**number for number in range(count)]
        values.append(most_s)
        self.steps: tuple[float, ...] = tuple([round(value, 3) for value in values])

    def step(self, tokens: float, tokens_per_s: float) -> int:
        """Which of `steps` an answer of at most `tokens` may take at `tokens_per_s`; `tokens` may be endless."""
        wanted = self.allowance_s + self.margin * tokens / tokens_per_s
        return min(bisect_left(self.steps, wanted), len(self.steps) - 1)


def longest_answer(kind: Kind, max_tokens: int | None, context_tokens: float) -> float | None:
    """Tokens that an answer has at most; endless where nothing says so, None where no limit makes sense.

    Of the context nothing is taken off for the prompt, whose length is an estimate.
    """
    if kind in _ENDLESS:
        return None
    if kind in _WITHOUT_TOKENS:
        return 0.0
    return context_tokens if max_tokens is None else min(float(max_tokens), context_tokens)
