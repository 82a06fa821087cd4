from __future__ import annotations

import pytest

from vllm_adapters.simulator.engine import Engine, PromptTooLarge, RequestId, Step
from vllm_adapters.simulator.hardware import H100_8B, H100X4_70B, Hardware


def chain(name: int, blocks: int) -> list[int]:
    """Hashes of a text of `blocks` full blocks that shares nothing with another name's."""
    return [name * 100_000 + position for position in range(blocks)]


def run(engine: Engine) -> tuple[float, list[Step]]:
    """Step until idle: the time it took in seconds, and the outcomes."""
    elapsed_s, outcomes = 0.0, []
    while (stepped := engine.step()) is not None:
        elapsed_s += stepped[0]
        outcomes.append(stepped[1])
    return elapsed_s, outcomes


def finished(outcomes: list[Step]) -> list[RequestId]:
    """Requests in the order in which they ended."""
    return [request for outcome in outcomes for request in outcome.finished]


def small(tokens: int = 64, **changes: int) -> Engine:
    """An engine with a cache of a few blocks of 4 tokens."""
    return Engine(kv_capacity_tokens=tokens, block_size_tokens=4, **changes)


def assert_idle(engine: Engine) -> None:
    """Nothing runs and nothing is held."""
    assert (engine.running, engine.waiting, engine.kv_used, engine.cache.private) == (0, 0, 0.0, 0)
    assert engine.step() is None
    assert (engine._decoding, engine._decoding_kv_tokens) == (0, 0)


# -- how long things take


@pytest.mark.parametrize(("hardware", "itl_s"), [(H100_8B, 7.6e-3), (H100X4_70B, 17.1e-3)])
def test_time_between_tokens_of_a_lone_request(hardware: Hardware, itl_s: float) -> None:
    """One short request on an idle engine decodes at the speed of reading the weights."""
    engine = Engine(hardware)
    engine.submit("a", chain(1, 64), 1024, 101)
    prefill_s = engine.step()
    assert prefill_s is not None
    elapsed_s, outcomes = run(engine)
    assert len(outcomes) == 100
    assert elapsed_s / 100 == pytest.approx(itl_s, rel=0.03)


def test_time_to_first_token_of_a_long_prompt() -> None:
    """12k tokens take two chunks, and about 0.6 s with the attention over what came before."""
    engine = Engine()
    engine.submit("a", chain(1, 750), 12_000, 1)
    elapsed_s, outcomes = run(engine)
    assert [outcome.first_tokens for outcome in outcomes] == [[], ["a"]]
    assert elapsed_s == pytest.approx(0.58, rel=0.03)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    """Chunked prefill: a running request gets a token in every step, a slow one."""
    engine = Engine()
    running = engine.submit("a", chain(1, 6), 100, 50)
    engine.step()
    engine.submit("b", chain(2, 1000), 16_000, 1)
    stepped = engine.step()
    assert stepped is not None
    assert (stepped[0] > 0.3, stepped[1].first_tokens, engine.generated(running)) == (True, [], 2)


def test_the_chunk_budget_is_shared() -> None:
    """A step prefills what is left of 8192 tokens after one per decoding request."""
    engine = Engine()
    engine.submit("a", (), 100, 50)
    engine.step()
    second = engine.submit("b", (), 9000, 1)
    engine.step()
    assert second.computed == 8191


def test_the_batch_is_bounded() -> None:
    """max_num_seqs requests run, the others wait in order."""
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.submit(name, (), 10, 2)
    engine.start_step()
    assert (engine.running, engine.waiting) == (2, 1)
    engine.end_step()
    assert finished(run(engine)[1]) == ["a", "b", "c"]


# -- the prefix cache


def test_the_next_turn_hits_prompt_and_answer() -> None:
    """Blocks of generated text are cached too, up to the last token, which was never computed."""
    engine = Engine()
    conversation = chain(1, 30)
    turns = [engine.submit(1, conversation, 100, 60)]
    run(engine)
    assert engine.holds(conversation) == 9  # 159 tokens were computed
    turns.append(engine.submit(2, conversation, 200, 10))
    run(engine)
    turns.append(engine.submit(3, conversation, 330, 1))
    run(engine)
    assert [turn.cached_tokens for turn in turns] == [0, 9 * 16, 13 * 16]
    assert engine.prefix_queries_tokens_total == 100 + 200 + 330
    assert engine.prefix_hits_tokens_total == (9 + 13) * 16
    assert_idle(engine)


def test_without_hashes_for_the_answer_only_the_prompt_is_kept() -> None:
    """Blocks past the given hashes are private and gone with their request."""
    engine = Engine()
    engine.submit(1, chain(1, 6), 100, 60)
    run(engine)
    assert (engine.holds(chain(1, 10)), engine.cache.idle) == (6, 6)


def test_a_full_hit_still_computes_the_last_token() -> None:
    """A prompt whose every block is cached is prefilled from its last block on."""
    engine = Engine()
    engine.submit("a", chain(1, 4), 64, 1)
    run(engine)
    again = engine.submit("b", chain(1, 4), 64, 1)
    _, outcomes = run(engine)
    assert again.cached_tokens == 48
    assert outcomes[0].first_tokens == ["b"]


def test_blocks_can_be_hit_once_their_computation_is_planned() -> None:
    """A request admitted in the same step as its twin finds all that the twin's chunk will fill, and no more."""
    engine = Engine(max_batched_tokens=300)
    twins = [engine.submit(name, chain(1, 16), 256, 1) for name in ("a", "b")]
    late = engine.submit("c", chain(1, 40), 640, 1)
    engine.start_step()
    assert [twin.cached_tokens for twin in (*twins, late)] == [0, 240, 256]
    assert engine.holds(chain(1, 40)) == 17


def test_a_request_gives_back_its_blocks_after_the_next_plan() -> None:
    """A step is planned before it is known who ended in the last one: place and blocks come free a step later."""
    engine = small(tokens=40, max_num_seqs=2)
    engine.submit("ends", (), 20, 1)
    engine.submit("goes on", (), 4, 9)
    engine.step()
    third = engine.submit("third", (), 8, 1)
    engine.start_step()
    assert (engine.running, engine.waiting) == (1, 1)
    engine.end_step()
    engine.start_step()
    assert (engine.running, engine.waiting) == (2, 0)
    engine.end_step()
    assert engine.generated(third) == 1


def test_what_has_ended_cannot_be_aborted() -> None:
    """Nor is it preempted in vain: it only waits for the next plan to give back its blocks."""
    engine = small(tokens=16)
    engine.submit("long", (), 8, 8)
    engine.step()
    engine.submit("ends", (), 4, 1)
    engine.step()
    assert not engine.abort("ends")
    _, outcomes = run(engine)
    assert finished(outcomes) == ["long"]
    assert [outcome.preempted for outcome in outcomes if outcome.preempted] == []
    assert_idle(engine)


def test_the_oldest_conversation_is_evicted_tail_first() -> None:
    """When room is needed the end of the least recently used text goes first."""
    engine = small(tokens=64)
    for name in (1, 2):
        engine.submit(name, chain(name, 6), 24, 1)
        run(engine)
    engine.submit(3, chain(3, 6), 24, 1)
    run(engine)
    assert [engine.holds(chain(name, 6)) for name in (1, 2, 3)] == [4, 6, 6]


# -- scarcity


def test_a_prompt_waits_until_there_is_room_for_all_of_it() -> None:
    """Admission wants room for the whole prompt, in order of arrival; nobody overtakes."""
    engine = small(tokens=64)
    engine.submit("a", chain(1, 10), 40, 5)
    engine.submit("b", chain(2, 10), 40, 5)
    engine.submit("c", chain(3, 1), 4, 1)
    engine.start_step()
    assert (engine.running, engine.waiting) == (1, 2)
    engine.end_step()
    assert finished(run(engine)[1]) == ["a", "c", "b"]
    assert_idle(engine)


def test_the_last_one_in_is_preempted_and_recomputed() -> None:
    """Out of blocks, the youngest goes back to the head of the queue and still yields every token once."""
    engine = small(tokens=64)
    old = engine.submit("old", chain(1, 16), 24, 30)
    young = engine.submit("young", chain(2, 16), 24, 30)
    _, outcomes = run(engine)
    preempted = [request for outcome in outcomes for request in outcome.preempted]
    assert set(preempted) == {"young"}
    assert engine.preemptions_total == len(preempted) > 0
    assert finished(outcomes) == ["old", "young"]
    assert [engine.generated(request) for request in (old, young)] == [30, 30]
    assert sum(len(outcome.first_tokens) for outcome in outcomes) == 2
    assert (engine.generation_tokens_total, engine.prompt_tokens_total) == (60, 48)
    assert engine.prefix_queries_tokens_total == 48
    assert_idle(engine)


def test_a_request_that_can_never_fit_is_refused() -> None:
    """Prompt and output together must fit the cache."""
    engine = small(tokens=64)
    with pytest.raises(PromptTooLarge):
        engine.submit("a", (), 60, 5)
    engine.submit("b", (), 60, 4)
    assert finished(run(engine)[1]) == ["b"]


# -- abort


def test_abort_frees_everything_at_once() -> None:
    """In the queue, in prefill, in decode, and in the middle of a step."""
    engine = Engine(max_batched_tokens=64, max_num_seqs=2)
    engine.submit("decoding", chain(1, 2), 32, 10)
    engine.step()
    engine.submit("prefilling", chain(2, 20), 320, 10)
    engine.submit("waiting", chain(3, 2), 32, 10)
    engine.start_step()
    assert (engine.running, engine.waiting) == (2, 1)
    assert all(engine.abort(name) for name in ("decoding", "prefilling", "waiting"))
    assert (engine.running, engine.waiting, engine.kv_used) == (0, 0, 0.0)
    outcome = engine.end_step()
    assert outcome == Step()
    assert_idle(engine)
    assert not engine.abort("decoding")


def test_a_name_can_be_used_again_after_abort() -> None:
    """What was planned for the first bearer of a name does not touch the second."""
    engine = Engine()
    engine.submit("a", (), 32, 3)
    engine.step()
    engine.start_step()
    engine.abort("a")
    again = engine.submit("a", (), 32, 5)
    engine.end_step()
    assert engine.generated(again) == 0
    assert finished(run(engine)[1]) == ["a"]
    assert engine.generated(again) == 5


# -- misuse


def test_a_live_name_is_not_accepted_twice() -> None:
    """Two requests need two names."""
    engine = Engine()
    engine.submit("a", (), 1, 1)
    with pytest.raises(ValueError, match="already here"):
        engine.submit("a", (), 1, 1)


def test_steps_are_started_and_ended_in_turn() -> None:
    """A step that was not started cannot end, and two cannot be under way."""
    engine = Engine()
    with pytest.raises(RuntimeError, match="no step"):
        engine.end_step()
    engine.submit("a", (), 1, 1)
    engine.start_step()
    with pytest.raises(RuntimeError, match="not ended"):
        engine.start_step()


def test_a_step_costs_no_more_with_more_decoding() -> None:
    """The work of a step does not grow with the batch: the heap is the only thing it looks at."""
    engine = Engine(block_size_tokens=512)
    for name in range(200):
        engine.submit(name, (), 10, 400)
    engine.step()
    assert engine._plan() == []
    assert all(due > engine._step + 300 for due, *_ in engine._due)
