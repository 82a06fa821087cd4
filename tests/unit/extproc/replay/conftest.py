"""Small traces and fleets that several tests replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from extproc.replay.traces import Trace, TraceRequest

MakeTrace = Callable[..., Trace]


@pytest.fixture
def make_trace() -> MakeTrace:
    """Requests one second apart; `prompts` lists each one's block names, a block being 16 tokens."""

    def make(*prompts: list[int], output_tokens: int = 4, gap_s: float = 1.0) -> Trace:
        requests = [
            TraceRequest(number * gap_s, 16 * len(blocks) + 1, output_tokens, blocks, len(blocks))
            for number, blocks in enumerate(prompts)
        ]
        return Trace("small", 16, requests)

    return make
