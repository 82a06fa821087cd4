"""One vLLM-like engine in virtual time: continuous batching, chunked prefill, paged prefix cache, preemption.

Pure: no clock, no I/O, no randomness. The driver asks for a step, lets its duration pass (on a virtual clock or a
real one) and ends it; in between it may submit and abort. A step costs time in proportion to what *changes* in it
(admissions, first tokens, full blocks, ends), never to the number of sequences decoding: those are sums, and a
heap says which of them is due next.

Blocks move as under vLLM's asynchronous scheduling, which plans a step while the one before still computes: a block
can be hit as soon as the step that fills it is planned, and a request that ended in a step gives back its place and
its blocks only after the next one was planned. tests/engine/test_fidelity.py holds it to vLLM's own scheduler.

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
    held: list[int] = field(default_factory=list)  # complete blocks, one for each of the first `block_hashes`
    private: int = 0  # blocks after those
    epoch: int = 0  # counts stays in the running batch; what refers to an earlier stay is void
    turn: int = 0  # number of its last admission: the order of the running batch
    admitted_before: bool = False
    done: bool = False  # generated everything; it may hold its blocks for one more plan


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
        self._due: list[tuple[int, int, Running, int]] = []  # step, turn, sequence, its epoch
        self._growing: list[tuple[Running, int]] = []  # need a block to go on, in order of turn
        self._leaving: list[Running] = []  # ended in the step before; in the batch until the next is planned
        self._preempted: list[RequestId] = []  # by the plan of the step in progress
        self._turns = 0
        self._step = 0
        self._decoding = 0
        self._decoding_kv_tokens = 0
        self._head_refused = False  # the first in the queue found no room, and nothing has changed for it since
        self._head_missing: int | None = None  # the first block it did not find

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
        if request is None or request.done:
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
        while not chunks and not self._decoding:
            if not self._leaving and (self._head_refused or not self._waiting):
                return None
            self._let_go()
            chunks = self._plan()
        self._let_go()
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
        outcome, self._preempted = Step(preempted=self._preempted), []
        self._step += 1
        self._decoding_kv_tokens += self._decoding
        self.generation_tokens_total += self._decoding
        for request, epoch, tokens in chunks:
            if request.epoch == epoch:
                self._prefilled(request, tokens, outcome)
        if self._due and self._due[0][0] <= self._step:
            self._settle_due(outcome)
        return outcome

    # -- planning

    def _plan(self) -> list[tuple[Running, int, int]]:
        preempted = self.preemptions_total
        self._grow()
        budget = self.max_batched_tokens - self._decoding  # decoding comes first, one token each
        chunks: list[tuple[Running, int, int]] = []
        for request in tuple(self._prefilling.values()):
            if budget <= 0:
                return chunks
            budget -= self._go_on(request, budget, chunks)
        if self.preemptions_total > preempted:  # who had to go is not let in again at once, nor is anybody else
            return chunks
        while budget > 0 and self._waiting and len(self._running) < self.max_num_seqs:
            admitted = self._admit(budget)
            if admitted is None:
                break
            budget -= self._cut(admitted, budget, chunks)
        return chunks

    def _grow(self) -> None:
        """Give those whose last block is full the next one, in the order of the batch."""
        growing, self._growing = self._growing, []
        for request, epoch in growing:
            if request.epoch == epoch and self._make_room(request, 1):
                self._publish(request, self._computed(request))
                self._schedule(request)

    def _go_on(self, request: Running, budget: int, chunks: list[tuple[Running, int, int]]) -> int:
        """Cut the next chunk of a prompt, with blocks for it; the tokens, 0 if it had to make room itself."""
        tokens = min(budget, request.prefill_target - request.computed)
        blocks = self._blocks_for(request.computed + tokens) - len(request.held) - request.private
        return self._cut(request, budget, chunks) if self._make_room(request, blocks) else 0

    def _make_room(self, request: Running, blocks: int) -> bool:
        """Take blocks for a running request, from the last ones in if need be. False if it was the last one itself."""
        epoch = request.epoch
        while not self.cache.acquire((), blocks):
            self._preempt()
            if request.epoch != epoch:
                return False
        request.private += blocks
        return True

    def _cut(self, request: Running, budget: int, chunks: list[tuple[Running, int, int]]) -> int:
        tokens = min(budget, request.prefill_target - request.computed)
        chunks.append((request, request.epoch, tokens))
        # What is planned can be hit: whoever does is computed after it, in the same step or a later one.
        self._publish(request, request.computed + tokens)
        return tokens

    def _admit(self, budget: int) -> Running | None:
        """Move the head of the queue into the batch if there is room for its whole prompt, else None.

        It takes blocks for its first chunk only.
        """
        if self._head_refused:
            return None
        request = next(iter(self._waiting.values()))
        size, target = self.block_size_tokens, request.prefill_target
        # The last token is computed even on a full hit: its logits give the first output token.
        usable = (target - 1) // size
        hit = self.cache.holds(request.block_hashes, usable)
        private = self._blocks_for(min(target, hit * size + budget)) - hit
        found = self.cache.found(request.block_hashes, hit)
        if not self.cache.acquire(found, private, spare=self._blocks_for(target) - hit - private):
            self._head_refused = True
            self._head_missing = request.block_hashes[hit] if hit < min(usable, len(request.block_hashes)) else None
            return None
        request.held, request.private, request.computed = found, private, hit * size
        self._turns += 1
        request.turn = self._turns
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
        if request.computed < request.prefill_target:
            return
        del self._prefilling[request.request_id]
        if not request.generated:
            outcome.first_tokens.append(request.request_id)
            self.prompt_tokens_total += request.prompt_tokens
        request.generated += 1
        self.generation_tokens_total += 1
        request.decoding_since = self._step
        self._decoding += 1
        self._decoding_kv_tokens += request.computed
        self._schedule(request)

    def _schedule(self, request: Running) -> None:
        """Note the step at which a decoding request needs attention: its end, or a full last block."""
        room = (len(request.held) + request.private) * self.block_size_tokens - self._computed(request)
        left = request.output_tokens - self.generated(request)
        heapq.heappush(self._due, (self._step + min(room, left), request.turn, request, request.epoch))

    def _settle_due(self, outcome: Step) -> None:
        """End those that are done; the next plan gives the others their next block."""
        while self._due and self._due[0][0] <= self._step:
            _, _, request, epoch = heapq.heappop(self._due)
            if request.epoch != epoch:
                continue
            if self.generated(request) >= request.output_tokens:
                self._finish(request, outcome)
            else:
                self._growing.append((request, epoch))

    def _publish(self, request: Running, computed: int) -> None:
        """Make the full blocks visible to others."""
        full = min(computed // self.block_size_tokens, len(request.block_hashes))
        for position in range(len(request.held), full):
            block = request.block_hashes[position]
            request.held.append(self.cache.complete(block))
            request.private -= 1
            if block == self._head_missing:
                self._head_refused = False

    def _finish(self, request: Running, outcome: Step) -> None:
        outcome.finished.append(request.request_id)
        self._stop_decoding(request)
        request.done = True
        self._leaving.append(request)

    def _let_go(self) -> None:
        """Take those that ended in the step before out of the batch."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._publish(request, request.computed)
            self._leave(request)

    def _preempt(self) -> None:
        """Send the last one in back to the head of the queue; it recomputes what the cache does not keep."""
        request = next(reversed(self._running.values()))
        self._leave(request)
        self.preemptions_total += 1
        if request.done:  # it had ended, nothing is left to do
            self._leaving.remove(request)
            return
        request.prefill_target = request.prompt_tokens + request.generated
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self._preempted.append(request.request_id)

    def _stop_decoding(self, request: Running) -> None:
        """Leave the sums of those that decode. Its `generated` and `computed` stay right."""
        if request.decoding_since is None:
            return
        computed, generated = self._computed(request), self.generated(request)
        self._decoding -= 1
        self._decoding_kv_tokens -= computed
        request.computed, request.generated, request.decoding_since = computed, generated, None

    def _leave(self, request: Running) -> None:
        """Take a request out of the batch and give back all it holds. Its `generated` stays right."""
        self._stop_decoding(request)
        del self._running[request.request_id]
        self._prefilling.pop(request.request_id, None)
        self.cache.release(request.held, request.private)
        request.held, request.private, request.computed = [], 0, 0
        request.epoch += 1
        self._head_refused = False
