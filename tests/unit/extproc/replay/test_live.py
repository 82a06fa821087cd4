"""A trace as text and in faster time. The run itself: tests/envoy/test_replay.py."""

from __future__ import annotations

import pytest

from extproc.config.pool_policies import presets
from extproc.config.sections.queueing import PoolQueue
from extproc.replay.entrants import Entrant, entrants
from extproc.replay.live import _pool, text_of
from extproc.replay.offline import Fleet
from extproc.replay.traces import TraceRequest
from extproc.waiting import binding_spec
from vllm_adapters.simulator.text import TOKEN_BYTES, block_hashes, count_tokens

_BLOCK = 64


def _hashes(request: TraceRequest, number: int) -> list[int]:
    return block_hashes(text_of(request, number, _BLOCK).encode(), 0, _BLOCK)


def test_prompts_begin_alike_where_the_traces_do() -> None:
    """As far as their blocks are the same, and no further: neither by what fills no block nor by another request."""
    first = TraceRequest(0.0, 4 * _BLOCK + 10, 5, [1, 2, 3, 4], 4)
    second = TraceRequest(1.0, 4 * _BLOCK + 10, 5, [1, 2, 9, 4], 4)
    one, other = _hashes(first, 0), _hashes(second, 1)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False]
    assert text_of(first, 0, _BLOCK) != text_of(first, 1, _BLOCK)


def test_a_prompt_is_as_long_as_the_trace_says() -> None:
    """In the simulator's tokens, blocks and rest."""
    for tokens in (1, 63, 64, 65, 1_000):
        request = TraceRequest(0.0, tokens, 5, list(range(tokens // _BLOCK)), tokens // _BLOCK)
        text = text_of(request, 3, _BLOCK)
        assert count_tokens(text.encode()) == tokens
        assert len(text) == tokens * TOKEN_BYTES


def test_what_a_policy_is_told_of_times_passes_as_fast_as_they_do() -> None:
    """At ten times the speed a band of three seconds is 0.3; rates are ten times as high."""
    pool = _pool(Entrant("default", presets()["default"]), Fleet(), 10.0)
    assert pool["policy"]["affinity_band_s"] == 0.3
    assert pool["hardware"]["prefill_tokens_per_s"] == 250_000
    assert pool["hardware"]["sequence_s"] == 15e-7
    assert "queue" not in pool
    lmetric = presets()["lmetric"]
    assert _pool(Entrant("lmetric", lmetric), Fleet(), 10.0)["policy"]["kind"] == lmetric.kind


@pytest.mark.parametrize("held", ["late", "queue"])
def test_an_entrant_that_holds_requests_has_a_queue_as_the_offline_one(held: str) -> None:
    """The same rule of room and of detours, in the faster time; and nobody is refused."""
    [entrant] = entrants([f"default+{held}"])
    queue = PoolQueue.model_validate(_pool(entrant, Fleet(), 2.0)["queue"])
    told, binding = binding_spec(queue), entrant.binding
    assert binding is not None
    assert told.late is binding.late
    assert told.longest_detour_s == binding.longest_detour_s / 2
    assert told.room.busy_s == binding.room.busy_s / 2
    assert queue.classes[0].places > 1_000_000
