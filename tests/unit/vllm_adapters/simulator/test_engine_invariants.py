from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_adapters.simulator.engine import Engine

BLOCK_TOKENS = 4
CAPACITY_TOKENS = 80


class EngineUnderStress(RuleBasedStateMachine):
    """Random submissions from a few overlapping texts, aborts and half steps, on a cache that is always short."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            kv_capacity_tokens=CAPACITY_TOKENS, block_size_tokens=BLOCK_TOKENS, max_num_seqs=4, max_batched_tokens=16
        )
        self.next_id = 0
        self.requests: dict[int, object] = {}
        self.stepping = False

    @rule(text=st.integers(0, 2), shared=st.integers(0, 8), prompt=st.integers(1, 40), output=st.integers(1, 40))
    def submit(self, text: int, shared: int, prompt: int, output: int) -> None:
        """A prompt that shares its first blocks with others of the same text."""
        hashes = [text * 100 + position for position in range(shared)]
        hashes += [1000 + self.next_id * 100 + position for position in range(20 - shared)]
        self.requests[self.next_id] = self.engine.submit(self.next_id, hashes, prompt, output)
        self.next_id += 1

    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        """Any request, alive or not."""
        here = self.engine.running + self.engine.waiting
        gone = self.engine.abort(which)
        assert self.engine.running + self.engine.waiting == here - gone
        if gone:
            del self.requests[which]

    @rule()
    def start(self) -> None:
        """Begin a step unless one is under way."""
        if not self.stepping:
            self.stepping = self.engine.start_step() is not None

    @rule()
    def end(self) -> None:
        """End the step under way."""
        if self.stepping:
            outcome = self.engine.end_step()
            self.stepping = False
            for request_id in outcome.finished:
                request = self.requests.pop(request_id)
                assert self.engine.generated(request) == request.output_tokens

    @invariant()
    def blocks_are_conserved(self) -> None:
        """Every block is free, idle, held or private; and held exactly as often as live requests hold it."""
        cache, running = self.engine.cache, self.engine._running.values()
        assert cache.free >= 0
        assert 0.0 <= self.engine.kv_used <= 1.0
        assert cache.private == sum(request.private for request in running)
        assert sum(cache._holders.values()) == sum(len(request.held) for request in running)
        assert not set(cache._holders) & set(cache._idle)

    @invariant()
    def sums_are_what_they_sum(self) -> None:
        """The aggregates that stand for the decoding requests agree with them."""
        decoding = [r for r in self.engine._running.values() if r.decoding_since is not None]
        assert self.engine._decoding == len(decoding)
        assert self.engine._decoding_kv_tokens == sum(self.engine._computed(request) for request in decoding)
        busy = len(decoding) + len(self.engine._prefilling)
        assert busy + len(self.engine._leaving) == len(self.engine._running)

    @invariant()
    def requests_have_the_room_they_use(self) -> None:
        """No request has more tokens in the cache than its blocks hold."""
        for request in self.engine._running.values():
            assert self.engine._computed(request) <= (len(request.held) + request.private) * BLOCK_TOKENS

    def teardown(self) -> None:
        """Whatever happened, all requests left come to their end and nothing stays behind."""
        self.end()
        for _ in range(100_000):
            stepped = self.engine.step()
            if stepped is None:
                break
            for request_id in stepped[1].finished:
                del self.requests[request_id]
        assert not self.requests
        assert (self.engine.running, self.engine.waiting, self.engine.cache.used) == (0, 0, 0)
        assert (self.engine._decoding, self.engine._decoding_kv_tokens) == (0, 0)


class TestEngineUnderStress(EngineUnderStress.TestCase):  # type: ignore[misc,name-defined]
    """Nothing leaks and nothing is lost under any order of submit, abort and step."""

    settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
