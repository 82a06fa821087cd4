"""What the plugin accumulates and sends is what is read; and what others may send harms nobody."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapters.metrics import EngineLoad
from vllm_adapters.pushed import LARGEST_MESSAGE_BYTES, NotPushed, Pushed, parse_pushed
from vllm_adapters.stat_logger.accumulator import LONGEST_NAME, MOST_ADAPTERS, MOST_LISTED, MOST_STEPS, Accumulator
from vllm_adapters.stat_logger.wire import Engine, encode


def scheduler(**fields: Any) -> SimpleNamespace:
    """As vLLM's SchedulerStats, as far as they are read."""
    defaults: dict[str, Any] = {
        "num_running_reqs": 0, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0,
        "prefix_cache_stats": SimpleNamespace(queries=0, hits=0), "running_lora_adapters": {},
        "waiting_lora_adapters": {},
    }  # fmt: skip
    return SimpleNamespace(**defaults | fields)


def iteration(**fields: Any) -> SimpleNamespace:
    """As vLLM's IterationStats, as far as they are read."""
    defaults: dict[str, Any] = {
        "time_to_first_tokens_iter": [], "finished_requests": [], "num_generation_tokens": 0, "num_prompt_tokens": 0,
        "num_preempted_reqs": 0,
    }  # fmt: skip
    return SimpleNamespace(**defaults | fields)


def finished(**fields: Any) -> SimpleNamespace:
    """As vLLM's FinishedRequestStats, as far as they are read."""
    defaults: dict[str, Any] = {
        "request_id": "r1", "finish_reason": "length", "num_prompt_tokens": 100, "num_generation_tokens": 20,
        "num_cached_tokens": 64, "e2e_latency": 1.5, "queued_time": 0.25,
    }  # fmt: skip
    return SimpleNamespace(**defaults | fields)


def sent(accumulator: Accumulator) -> Pushed:
    """The next message, as it is read."""
    return parse_pushed(encode(accumulator.take()))


@pytest.fixture
def accumulator() -> Accumulator:
    """With one engine, initialized."""
    made = Accumulator("a1")
    made.add_engine(Engine(index=0, max_num_seqs=128, kv_capacity_tokens=65_536))
    return made


def test_a_step_arrives_as_a_scrape_would_tell_it(accumulator: Accumulator) -> None:
    """Levels and counters under the names that a page's have, the deferred ones counted as waiting."""
    accumulator.started_at_s = 1_700_000_000.25
    stats = scheduler(
        num_running_reqs=2, num_waiting_reqs=3, num_skipped_waiting_reqs=1, kv_cache_usage=0.5,
        prefix_cache_stats=SimpleNamespace(queries=700, hits=64),
    )  # fmt: skip
    accumulator.step(0, stats, iteration(num_generation_tokens=2, num_prompt_tokens=700, num_preempted_reqs=1))
    figures = sent(accumulator).figures
    assert (figures.running, figures.waiting, figures.kv_used) == (2, 4, 0.5)
    assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens) == (700, 64)
    assert (figures.prefilled_tokens, figures.generated_tokens, figures.preemptions) == (700, 2, 1)
    assert (figures.progress, figures.kv_capacity_tokens) == (1, 65_536)
    assert figures.started_at_s == 1_700_000_000.25
    assert figures.engines == ()


def test_levels_and_counters_stand_in_every_message(accumulator: Accumulator) -> None:
    """A lost message loses none of them."""
    accumulator.step(0, scheduler(num_running_reqs=7, prefix_cache_stats=SimpleNamespace(queries=9, hits=1)), None)
    accumulator.take()
    second = sent(accumulator)
    assert (second.seq, second.figures.running, second.figures.prefix_queries_tokens) == (2, 7, 9)


def test_what_happened_stands_in_one_message(accumulator: Accumulator) -> None:
    """First tokens and ended requests once, their totals always."""
    accumulator.step(
        0, scheduler(), iteration(time_to_first_tokens_iter=[0.1, 0.2], finished_requests=[finished()])
    )  # fmt: skip
    first, second = sent(accumulator), sent(accumulator)
    assert (first.first_tokens, first.ttfts_s) == (2, (0.1, 0.2))
    [request] = first.finished
    assert (request.request_id, request.reason, request.prompt, request.generated) == ("r1", "length", 100, 20)
    assert (request.cached, request.e2e_s, request.queued_s) == (64, 1.5, 0.25)
    assert first.largest_request_tokens == 120
    assert (second.first_tokens, second.finished, second.largest_request_tokens) == (0, (), 0)
    assert (second.totals.first_tokens, second.totals.finished) == (2, {"length": 1})
    assert second.figures.finished == {"length": 1.0}


def test_the_highest_kv_usage_since_the_message_before_is_told(accumulator: Accumulator) -> None:
    """A peak between two messages is not lost; the next begins at the present usage."""
    for usage in (0.25, 0.75, 0.5):
        accumulator.step(0, scheduler(kv_cache_usage=usage), None)
    first, second = sent(accumulator), sent(accumulator)
    assert (first.figures.kv_used, first.kv_peak) == (0.5, 0.75)
    assert second.kv_peak == 0.5


def test_engines_behind_one_address_are_folded_as_on_a_page() -> None:
    """Counts and capacities summed, usage averaged; each one's load beside them."""
    accumulator = Accumulator("a1")
    for index in (1, 0):
        accumulator.add_engine(Engine(index=index, kv_capacity_tokens=1_000, max_num_seqs=8))
    accumulator.step(0, scheduler(num_running_reqs=1, kv_cache_usage=0.25), iteration())
    accumulator.step(1, scheduler(num_running_reqs=2, num_waiting_reqs=5, kv_cache_usage=0.75), iteration())
    pushed = sent(accumulator)
    figures = pushed.figures
    assert (figures.running, figures.waiting, figures.kv_used, figures.kv_capacity_tokens) == (3, 5, 0.5, 2_000)
    assert (figures.progress, pushed.most_running) == (2, 16)
    assert figures.engines == (EngineLoad("0", 0, 1, 0.25), EngineLoad("1", 5, 2, 0.75))


def test_adapters_are_those_with_requests() -> None:
    """A name is in both of vLLM's maps while it is in either; zeros mean nothing."""
    accumulator = Accumulator("a1")
    accumulator.add_engine(Engine(index=0, max_loras=2))
    both = {"running_lora_adapters": {"a": 1, "b": 0}, "waiting_lora_adapters": {"a": 0, "b": 3}}
    accumulator.step(0, scheduler(**both), None)
    figures = sent(accumulator).figures
    assert (figures.max_adapters, figures.running_adapters, figures.waiting_adapters) == (2, {"a"}, {"b"})
    accumulator.step(0, scheduler(), None)
    assert sent(accumulator).figures.running_adapters == frozenset()


def test_a_server_loads_until_its_engine_is_there() -> None:
    """Before, there are no figures at all, not even that nothing runs."""
    accumulator = Accumulator("a1")
    pushed = sent(accumulator)
    assert (pushed.phase, pushed.figures.running, pushed.figures.waiting) == ("loading", None, None)
    accumulator.add_engine(Engine(index=0))
    pushed = sent(accumulator)
    assert (pushed.phase, pushed.figures.running) == ("serving", 0)


def test_one_that_drains_goes_on_draining(accumulator: Accumulator) -> None:
    """Whatever is initialized after it."""
    accumulator.set_phase("draining")
    accumulator.add_engine(Engine(index=1))
    assert sent(accumulator).phase == "draining"


@pytest.mark.parametrize(
    "missing", ["num_running_reqs", "kv_cache_usage", "prefix_cache_stats", "running_lora_adapters"]
)
def test_what_vllm_no_longer_tells_disturbs_nothing(accumulator: Accumulator, missing: str) -> None:
    """The figure stays as it was, the others come, and the trouble is counted."""
    stats = scheduler(num_waiting_reqs=2)
    delattr(stats, missing)
    accumulator.step(0, stats, iteration(time_to_first_tokens_iter=[0.5]))
    pushed = sent(accumulator)
    assert pushed.troubles == 1
    assert pushed.first_tokens == 1


class Broken:
    """A figure that is made out as it is read, and cannot be."""

    def __int__(self) -> int:
        raise RuntimeError("changed during iteration")


@pytest.mark.parametrize("wrong", [None, "many", object(), float("nan"), Broken()])
def test_what_vllm_tells_otherwise_disturbs_nothing(accumulator: Accumulator, wrong: object) -> None:
    """Neither in the scheduler's stats nor in the iteration's."""
    accumulator.step(0, scheduler(num_running_reqs=wrong), iteration(finished_requests=wrong))
    accumulator.step(0, scheduler(), iteration(finished_requests=[finished(num_prompt_tokens=wrong)]))
    assert accumulator.take().troubles == 3


def test_there_is_news_until_it_is_taken(accumulator: Accumulator) -> None:
    """An engine, a step, a phase; then nothing, until something happens again."""
    news = [accumulator.has_news]
    for happens in (
        lambda: None,
        lambda: accumulator.step(0, scheduler(), None),
        lambda: accumulator.set_phase("draining"),
    ):
        accumulator.take()
        happens()
        news.append(accumulator.has_news)
    assert news == [True, False, True, True]


def test_steps_that_nobody_takes_are_bounded_and_not_lost(accumulator: Accumulator) -> None:
    """Where the publisher's thread gets no turn, they are folded as they come."""
    for _ in range(3 * MOST_STEPS):
        accumulator.step(0, scheduler(), iteration(num_generation_tokens=1))
        assert len(accumulator._steps) <= MOST_STEPS
    assert sent(accumulator).figures.progress == 3 * MOST_STEPS


def test_one_message_is_bounded(accumulator: Accumulator) -> None:
    """However much happens at once, and however long the names are, a receiver may take it."""
    adapters = {f"{number}" * LONGEST_NAME: 1 for number in range(10, 1_000)}
    many = [finished(request_id="\u20ac" * 10_000) for _ in range(10_000)]
    stats = scheduler(running_lora_adapters=adapters, waiting_lora_adapters=adapters)
    accumulator.step(0, stats, iteration(time_to_first_tokens_iter=[0.1] * 10_000, finished_requests=many))
    data = encode(accumulator.take())
    assert len(data) <= LARGEST_MESSAGE_BYTES
    pushed = parse_pushed(data)
    assert (pushed.first_tokens, len(pushed.ttfts_s)) == (10_000, MOST_LISTED)
    assert (len(pushed.finished), pushed.left_out) == (MOST_LISTED, 10_000 - MOST_LISTED)
    assert len(pushed.figures.running_adapters) == MOST_ADAPTERS


def test_memory_of_the_largest_request_is_told_where_it_is_known(accumulator: Accumulator) -> None:
    """Tokens always, bytes if the engine's memory is configured."""
    accumulator.step(0, scheduler(), iteration(finished_requests=[finished()]))
    message = accumulator.take()
    assert parse_pushed(encode(message)).largest_request_bytes is None
    message.kv_bytes_per_token = 1024.0
    assert parse_pushed(encode(message)).largest_request_bytes == 120 * 1024


# -- what others may send

_GOOD: dict[str, Any] = {"v": 1, "run": "a1", "seq": 1, "phase": "serving", "engines": [{"running": 1}]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": 2}, {"run": ""}, {"run": "x" * 65}, {"seq": 0}, {"seq": -1}, {"seq": 1 << 63}, {"phase": "asleep"},
        {"engines": [{}] * 257}, {"engines": [{"running": -1}]}, {"engines": [{"running": 1 << 60}]},
        {"engines": [{"kv_used": 1.5}]}, {"engines": [{"kv_used": float("nan")}]},
        {"engines": [{"kv_capacity_tokens": 1 << 41}]}, {"engines": [{"lora_running": {str(n): 1 for n in range(65)}}]},
        {"started_at_s": float("inf")}, {"ttfts_s": [0.1] * 101}, {"ttfts_s": [-1.0]}, {"server_port": 70_000},
        {"finished": [["r", "length", 1, 1, 1, float("nan"), 0.0]]}, {"finished": [["r"]]},
        {"totals": {"finished": {str(n): 1 for n in range(9)}}}, {"kv_bytes_per_token": float("nan")},
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_no_message(wrong: dict[str, Any]) -> None:
    """Out of range, endless, or too many."""
    parse_pushed(msgspec.msgpack.encode(_GOOD))
    with pytest.raises(NotPushed):
        parse_pushed(msgspec.msgpack.encode(_GOOD | wrong))


def test_what_is_too_large_is_not_looked_at() -> None:
    """Whatever it holds."""
    with pytest.raises(NotPushed):
        parse_pushed(msgspec.msgpack.encode(_GOOD | {"more": "x" * LARGEST_MESSAGE_BYTES}))


def test_a_newer_plugin_may_tell_more() -> None:
    """Unknown fields are passed over."""
    assert parse_pushed(msgspec.msgpack.encode(_GOOD | {"more": [1, {"deep": None}]})).figures.running == 1


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa1b" + b"\x91" * 50_000 + b"\xc0", b"\x81\xa1v\xcf" + b"\xff" * 8]
)
def test_hostile_bytes_are_no_message(data: bytes) -> None:
    """Nothing but NotPushed is raised."""
    with pytest.raises(NotPushed):
        parse_pushed(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_not(data: bytes) -> None:
    """Nothing but NotPushed is raised."""
    with pytest.raises(NotPushed):
        parse_pushed(data)


@given(st.data())
def test_a_message_that_was_tampered_with_is_one_or_not(data: st.DataObject) -> None:
    """One byte is another; nothing but NotPushed is raised."""
    accumulator = Accumulator("a1")
    accumulator.add_engine(Engine(index=0, max_loras=1))
    accumulator.step(0, scheduler(running_lora_adapters={"a": 1}), iteration(finished_requests=[finished()]))
    message = bytearray(encode(accumulator.take()))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(NotPushed):
        parse_pushed(bytes(message))
