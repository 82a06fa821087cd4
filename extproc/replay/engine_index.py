"""What the engines really hold, where a policy would otherwise have the router's own idea of it.

For comparisons: of policies that read the engines' KV events (exact, and as late as the events, here not at all), and
of what the router's own book-keeping loses. It knows nothing of prompts on their way into a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from extproc.replay.traces import TraceRequest
from policies.placement.prefix_index import Matched, PrefixIndex
from policies.types import Floats, ListedSlots, Slots

Holds = Callable[[int, TraceRequest], int]
"""(slot, request) -> tokens of its prompt that the engine at `slot` could use now."""


class EngineIndex(PrefixIndex):
    """A prefix index whose matches are the engines' own. `ask` says whose prompt the next match is about."""

    def __init__(self, default_capacity_tokens: int, holds: Holds) -> None:
        super().__init__(default_capacity_tokens)
        self._holds = holds
        self._request: TraceRequest | None = None

    def ask(self, request: TraceRequest) -> None:
        """The next matches are for this one."""
        self._request = request

    def match(self, hashes: Sequence[int], tokens: Sequence[int], slots: Slots) -> Floats:  # noqa: ARG002 - as ours
        """Contiguous tokens that each engine holds of the prompt, shape (n,)."""
        request = self._request
        if request is None:
            return np.zeros(len(slots))
        return np.array([float(self._holds(int(slot), request)) for slot in slots])

    def match_listed(self, hashes: Sequence[int], tokens: Sequence[int], slots: ListedSlots) -> Matched:
        """The same of listed slots."""
        matched: list[float] = self.match(hashes, tokens, np.array(slots.listed)).tolist()
        return Matched(slots, [], matched)
