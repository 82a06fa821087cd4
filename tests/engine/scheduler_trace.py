"""vLLM's own scheduler over requests, with no model: what is computed is known beforehand. Runs in vLLM's environment.

    scheduler_trace.py MODEL < WORKLOADS > TRACES

The loop is that of vLLM's engine core with asynchronous scheduling: a step is planned before the outcome of the one
before it is known. A request comes in once so many steps were planned (`at`).
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def make_scheduler(model: str, work: dict[str, Any]) -> AsyncScheduler:
    """A scheduler with one block more than the workload says: vLLM never gives away its first."""
    size, longest = work["block_tokens"], work["blocks"] * work["block_tokens"]
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=longest),
        scheduler_config=SchedulerConfig(
            max_num_seqs=work["sequences"], max_num_batched_tokens=work["batched_tokens"], max_model_len=longest,
            async_scheduling=True, is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(work["blocks"] + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = size, blocks.num_blocks
    return AsyncScheduler(
        vllm_config=config, kv_cache_config=blocks, structured_output_manager=StructuredOutputManager(config),
        block_size=size, log_stats=True,
    )  # fmt: skip


class Trace:
    """One workload on its way through the scheduler."""

    def __init__(self, scheduler: AsyncScheduler, work: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._hasher = get_request_block_hasher(work["block_tokens"], sha256)
        self._coming = deque(enumerate(work["requests"]))
        self._answers = [list(request["answer"]) for request in work["requests"]]
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Any, list[str]]] = deque()
        self.steps: list[list[list[int]]] = []
        self.cached: dict[int, int] = {}
        self.finished: list[int] = []

    def run(self) -> dict[str, Any]:
        """To the last answer."""
        scheduler, planned = self._scheduler, 0
        while True:
            busy = bool(scheduler.has_requests() or self._in_flight)
            if not busy and not self._coming:
                break
            planned = planned if busy else max(planned, self._coming[0][1]["at"])
            while self._coming and self._coming[0][1]["at"] <= planned:
                self._submit(*self._coming.popleft())
            planned += self._plan()
            if len(self._in_flight) == 2 or not scheduler.has_requests():
                self._take(*self._in_flight.popleft())
        preemptions = sum(request.num_preemptions for request in self._requests.values())
        cached = [self.cached[number] for number in range(len(self._answers))]
        return {"steps": self.steps, "cached": cached, "finished": self.finished, "preemptions": preemptions}

    def _submit(self, number: int, request: dict[str, Any]) -> None:
        sampling = SamplingParams(max_tokens=len(request["answer"]), ignore_eos=True, temperature=0)
        made = Request(str(number), request["prompt"], sampling, None, block_hasher=self._hasher)
        self._requests[str(number)] = made
        self._scheduler.add_request(made)

    def _plan(self) -> bool:
        """Plan a step; False if there was nothing to compute in it."""
        if not self._scheduler.has_requests():
            return False
        plan = self._scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            self.cached.setdefault(int(new.req_id), new.num_computed_tokens)
        sampled = [name for name in plan.num_scheduled_tokens if not self._requests[name].is_prefill_chunk]
        self._in_flight.append((plan, sampled))
        if plan.num_scheduled_tokens:
            self.steps.append([[int(name), count] for name, count in plan.num_scheduled_tokens.items()])
        return bool(plan.num_scheduled_tokens)

    def _take(self, plan: Any, sampled: list[str]) -> None:
        names = list(plan.num_scheduled_tokens)
        tokens = [[self._answers[int(name)].pop(0)] if name in sampled else [] for name in names]
        outcome = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)
        for outputs in self._scheduler.update_from_output(plan, outcome).values():
            self.finished += [int(one.request_id) for one in outputs.outputs if one.finished]


if __name__ == "__main__":
    init_none_hash(sha256)
    workloads = json.load(sys.stdin)
    json.dump([Trace(make_scheduler(sys.argv[1], work), work).run() for work in workloads], sys.stdout)
