from __future__ import annotations

from typing import Any

import pytest

from vllm_adapters.simulator.options import SimOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": "abacus"}, "8b-h100"),
        ({"models": ()}, "at least 1"),
        ({"count": 0}, "at least 1"),
        ({"speed": 0.0}, "more than 0"),
        ({"port": 65_536}, "there is no port 65536: the last one is 65535"),
        ({"port": 65_535, "count": 2}, "there is no port 65536"),
        ({"kv_capacity_tokens": 1000, "max_model_len": 2000}, "992 tokens of KV cache"),
    ],
)
def test_settings_that_cannot_run_are_refused(changes: dict[str, Any], message: str) -> None:
    """The message says what is wrong, before anything is started."""
    with pytest.raises(ValueError, match=message):
        SimOptions(**changes)


def test_the_engine_is_as_asked() -> None:
    """Capacity is whole blocks; what is not given comes from the hardware."""
    engine = SimOptions(kv_capacity_tokens=1000, max_model_len=900, block_size=32, max_num_seqs=3).engine()
    assert (engine.cache.capacity, engine.block_size_tokens, engine.max_num_seqs) == (31, 32, 3)
    assert SimOptions(hardware="8b-l40s").capacity_tokens == 190_000
