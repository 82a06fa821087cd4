"""The simulated engine's metrics page, read as the router reads it."""

from __future__ import annotations

import pytest

from vllm_adapters.metrics import parse_metrics
from vllm_adapters.simulator.books import Books
from vllm_adapters.simulator.engine import Engine
from vllm_adapters.simulator.exposition import DIALECTS, render
from vllm_adapters.simulator.options import SimOptions


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_engine_is_read_under_any_names(dialect: str) -> None:
    """One runs, one waits for the other's place, half of its cache is in use."""
    engine = Engine(kv_capacity_tokens=1_600, max_num_seqs=1)
    for number in range(2):
        engine.submit(number, [number * 100 + block for block in range(49)], 790, 50)
    engine.start_step()
    figures = parse_metrics(render(engine, Books(0), 'a "model"', dialect).encode())
    assert (figures.dialect, figures.running, figures.waiting) == (dialect, 1.0, 1.0)
    assert figures.kv_used == pytest.approx(0.5)
    assert figures.kv_capacity_tokens == 1_600


def test_what_is_found_cached_is_counted() -> None:
    """By vLLM's names and by SGLang's."""
    engine = Engine(kv_capacity_tokens=1_600)
    for number in range(2):
        engine.submit(number, [1, 2, 3], 64, 1)
        while engine.step() is not None:
            pass
    for dialect in ("vllm", "sglang"):
        figures = parse_metrics(render(engine, Books(0), "m", dialect).encode())
        assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens) == (128.0, 48.0)
        assert figures.generated_tokens == 2.0


def test_requests_that_ended_are_counted_by_reason() -> None:
    """As vLLM does."""
    books = Books(0)
    books.finished.update(stop=3, abort=1)
    finished = parse_metrics(render(Engine(), books, "m").encode()).finished
    assert finished == {"stop": 3.0, "length": 0.0, "abort": 1.0, "error": 0.0, "repetition": 0.0}


def test_names_of_no_engine_are_refused() -> None:
    """At once, not at the first scrape."""
    with pytest.raises(ValueError, match="sglang"):
        SimOptions(metrics="tgi")
