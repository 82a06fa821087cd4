"""One vLLM-like engine in virtual time: continuous batching, chunked prefill, paged prefix cache, preemption.

Pure: no clock, no I/O, no randomness. The driver asks for a step, lets its duration pass (on a virtual clock or a
real one) and ends it; in between it may submit and abort. A step costs time in proportion to what *changes* in it
(admissions, first tokens, full blocks, ends), never to the number of sequences decoding: those are sums, and a
heap says which of them is due next.

Not modelled: speculative decoding, LoRA, priorities, prefill and decode on different machines.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_adapters.simulator.blocks import BlockCache
from vllm_adapters.simulator.hardware import H100_8B, Hardware

RequestId: TypeAlias = Hashable

MAX_BATCHED_TOKENS = 8192  # tokens per step: vLLM's default for online serving on an H100
MAX_NUM_SEQS = 256  # sequences running at once: vLLM's default on most GPUs
BLOCK_SIZE_TOKENS = 16  # vLLM's default on CUDA


class PromptTooLarge(Exception):
    """The request could not run even with the whole cache to itself."""


@dataclass(slots=True, eq=False)
class Running:
    """One request inside the engine. Callers read `prompt_tokens`, `output_tokens` and `cached_tokens`, no more.

    `cached_tokens` is what `usage.prompt_tokens_details` would say: the hit at the first admission.
    """

    request_id: RequestId
    block_hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    prefill_target: int = 0  # tokens to have in the cache before decoding: the prompt, after preemption also the output
    computed: int = 0  # tokens in the cache, as of `decoding_since` when decoding
    generated: int = 0  # output tokens, likewise
    decoding_since: int | None = None  # number of the step, None while prefilling or waiting
    held: int = 0  # complete blocks, from the start of `block_hashes`
    private: int = 0  # blocks after those
    epoch: int = 0  # counts stays in the running batch; what refers to an earlier stay is void
    admitted_before: bool = False


@dataclass(slots=True)
class Step:
    """What one step brought about. Every other decoding request got one more token."""

    first_tokens: list[RequestId] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)


class Engine:
    """The engine. `start_step` plans and says how long it takes; `end_step` applies it. Totals only ever grow."""

    def __init__(
        self,
        hardware: Hardware = H100_8B,
        *,
        kv_capacity_tokens: int | None = None,
        block_size_tokens: int = BLOCK_SIZE_TOKENS,
        max_num_seqs: int = MAX_NUM_SEQS,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
    ) -> None:
        self.hardware = hardware
        self.block_size_tokens = block_size_tokens
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.cache = BlockCache((kv_capacity_tokens or hardware.kv_capacity_tokens) // block_size_tokens)
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.prefix_queries_tokens_total = 0
        self.prefix_hits_tokens_total = 0
        self.preemptions_total = 0
        self._waiting: OrderedDict[RequestId, Running] = OrderedDict()
        self._running: dict[RequestId, Running] = {}  # in order of admission: the last is preempted first
        self._prefilling: dict[RequestId, Running] = {}
        self._chunks: list[tuple[Running, int, int]] | None = None  # sequence, its epoch, tokens; None between steps
        self._due: list[tuple[int, int, Running, int]] = []  # step, tie-break, sequence, its epoch
        self._events = 0
        self._step = 0
        self._decoding = 0
        self._decoding_kv_tokens = 0
        self._head_refused = False  # the first in the queue found no room, and nothing was freed since

    # -- figures

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def kv_used(self) -> float:
        """0..1, blocks of requests in the batch only: an idle engine with a full cache says 0."""
        return self.cache.used / self.cache.capacity

    def holds(self, block_hashes: Sequence[int]) -> int:
        """How many blocks from the start of `block_hashes` are in the cache without a gap."""
        return self.cache.holds(block_hashes)

    def generated(self, request: Running) -> int:
        """Output tokens of `request` so far."""
        if request.decoding_since is None:
            return request.generated
        return request.generated + self._step - request.decoding_since

    def _computed(self, request: Running) -> int:
        if request.decoding_since is None:
            return request.computed
        return request.computed + self._step - request.decoding_since

    # -- requests in and out

    def submit(
        self, request_id: RequestId, block_hashes: Sequence[int], prompt_tokens: int, output_tokens: int
    ) -> Running:
        """Queue a request. `block_hashes`: one per full block of the prompt and, if known, of the output after it.

        Raises PromptTooLarge if it cannot fit the cache. `output_tokens` is what it will generate, at least 1.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if request_id in self._waiting or request_id in self._running:
            raise ValueError(f"request {request_id!r} is already here")
        if self._blocks_for(prompt_tokens + output_tokens) > self.cache.capacity:
            raise PromptTooLarge(f"{prompt_tokens} + {output_tokens} tokens do not fit the cache")
        request = Running(request_id, block_hashes, prompt_tokens, output_tokens, prefill_target=prompt_tokens)
        self._waiting[request_id] = request
        return request

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request and free what it holds, at once. False if it is not here (any more)."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._head_refused = False
            return True
        request = self._running.get(request_id)
        if request is None:
            return False
        self._leave(request)
        return True

    # -- steps

    def step(self) -> tuple[float, Step] | None:
        """Start and end one step: its duration in seconds and outcome. None when there is nothing to do."""
        duration_s = self.start_step()
        return None if duration_s is None else (duration_s, self.end_step())

    def start_step(self) -> float | None:
        """Admit, cut chunks, and say how long the step takes in seconds. None when there is nothing to do."""
        if self._chunks is not None:
            raise RuntimeError("the step before has not ended")
        chunks = self._plan()
        if not chunks and not self._decoding:
            return None
        self._chunks = chunks
        prefill_tokens, attention_tokens = 0, 0.0
        for request, _, tokens in chunks:
            prefill_tokens += tokens
            attention_tokens += tokens * (request.computed + 0.5 * tokens)
        return self.hardware.duration_s(
            prefill_tokens=prefill_tokens,
            attention_tokens=attention_tokens,
            decodes=self._decoding,
            kv_tokens=self._decoding_kv_tokens,
        )

    def end_step(self) -> Step:
        """Apply the step that was started."""
        chunks, self._chunks = self._chunks, None
        if chunks is None:
            raise RuntimeError("no step was started")
        outcome = Step()
        self._step += 1
        self._decoding_kv_tokens += self._decoding
        self.generation_tokens_total += self._decoding
        if self._due and self._due[0][0] <= self._step:
            self._settle_due(outcome)
        for request, epoch, tokens in chunks:
            if request.epoch == epoch:
                self._prefilled(request, tokens, outcome)
        return outcome

    # -- planning

    def _plan(self) -> list[tuple[Running, int, int]]:
        budget = self.max_batched_tokens - self._decoding  # decoding comes first, one token each
        chunks: list[tuple[Running, int, int]] = []
        for request in self._prefilling.values():
            if budget <= 0:
                return chunks
            budget -= self._cut(request, budget, chunks)
        while budget > 0 and self._waiting and len(self._running) < self.max_num_seqs:
            admitted = self._admit()
            if admitted is None:
                break
            budget -= self._cut(admitted, budget, chunks)
        return chunks

    @staticmethod
    def _cut(request: Running, budget: int, chunks: list[tuple[Running, int, int]]) -> int:
        tokens = min(budget, request.prefill_target - request.computed)
        chunks.append((request, request.epoch, tokens))
        return tokens

    def _admit(self) -> Running | None:
        """Move the head of the queue into the batch with blocks for its whole prompt. None if there is no room."""
        if self._head_refused:
            return None
        request = next(iter(self._waiting.values()))
        size = self.block_size_tokens
        # The last token is computed even on a full hit: its logits give the first output token.
        hit = self.cache.holds(request.block_hashes, (request.prefill_target - 1) // size)
        private = self._blocks_for(request.prefill_target + 1) - hit
        if not self.cache.acquire(request.block_hashes[:hit], private):
            self._head_refused = True
            return None
        request.held, request.private, request.computed = hit, private, hit * size
        del self._waiting[request.request_id]
        self._running[request.request_id] = self._prefilling[request.request_id] = request
        self._count_hit(request)
        return request

    def _count_hit(self, request: Running) -> None:
        if request.admitted_before:  # a preempted request finding its own blocks again is no hit
            return
        request.admitted_before = True
        request.cached_tokens = request.computed
        self.prefix_queries_tokens_total += request.prompt_tokens
        self.prefix_hits_tokens_total += request.computed

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    # -- outcomes

    def _prefilled(self, request: Running, tokens: int, outcome: Step) -> None:
        request.computed += tokens
        self._publish(request, request.computed)
        if request.computed < request.prefill_target:
            return
        del self._prefilling[request.request_id]
        if not request.generated:
            outcome.first_tokens.append(request.request_id)
            self.prompt_tokens_total += request.prompt_tokens
        request.generated += 1
        self.generation_tokens_total += 1
        if request.generated >= request.output_tokens:
            self._finish(request, outcome)
        else:
            self._start_decoding(request)

    def _start_decoding(self, request: Running) -> None:
        request.decoding_since = self._step
        self._decoding += 1
        self._decoding_kv_tokens += request.computed
        self._schedule(request)

    def _schedule(self, request: Running) -> None:
        """Note the step at which a decoding request needs attention: its end, or a full last block."""
        room = (request.held + request.private) * self.block_size_tokens - self._computed(request)
        left = request.output_tokens - self.generated(request)
        self._events += 1
        heapq.heappush(self._due, (self._step + min(room, left), self._events, request, request.epoch))

    def _settle_due(self, outcome: Step) -> None:
        """End those that are done, then give the others their next block: the ends may make room."""
        growing: list[tuple[Running, int]] = []
        while self._due and self._due[0][0] <= self._step:
            _, _, request, epoch = heapq.heappop(self._due)
            if request.epoch != epoch:
                continue
            if self.generated(request) >= request.output_tokens:
                self._finish(request, outcome)
            else:
                growing.append((request, epoch))
        for request, epoch in growing:
            if request.epoch == epoch:
                self._grow(request, outcome)

    def _grow(self, request: Running, outcome: Step) -> None:
        self._publish(request, self._computed(request))
        epoch = request.epoch
        while not self.cache.acquire((), 1):
            self._preempt(outcome)
            if request.epoch != epoch:  # it was the last one in itself
                return
        request.private += 1
        self._schedule(request)

    def _publish(self, request: Running, computed: int) -> None:
        """Make the full blocks visible to others."""
        full = min(computed // self.block_size_tokens, len(request.block_hashes))
        while request.held < full:
            self.cache.complete(request.block_hashes[request.held])
            request.held += 1
            request.private -= 1

    def _finish(self, request: Running, outcome: Step) -> None:
        self._publish(request, self._computed(request))
        outcome.finished.append(request.request_id)
        self._leave(request)

    def _preempt(self, outcome: Step) -> None:
        """Send the last one in back to the head of the queue; it recomputes what the cache does not keep."""
        request = next(reversed(self._running.values()))
        self._leave(request)
        request.prefill_target = request.prompt_tokens + request.generated
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        outcome.preempted.append(request.request_id)
        self.preemptions_total += 1

    def _leave(self, request: Running) -> None:
        """Take a request out of the batch and give back all it holds. Its `generated` stays right."""
        computed, generated = self._computed(request), self.generated(request)
        if request.decoding_since is not None:
            self._decoding -= 1
            self._decoding_kv_tokens -= computed
        del self._running[request.request_id]
        self._prefilling.pop(request.request_id, None)
        self.cache.release(request.block_hashes[: request.held], request.private)
        request.held = request.private = request.computed = 0
        request.generated, request.decoding_since = generated, None
        request.epoch += 1
        self._head_refused = False
