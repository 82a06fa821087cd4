"""The simulator beside real vLLM: the same requests find the same tokens cached."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from harness import free_ports
from real_engines import SETTINGS, Vllm, model, python_with_vllm

from benchmarks.fidelity import CLIENTS, MODEL, Limits, compare, conversations, table, vllm_options
from vllm_adapters.simulator.engine import Engine
from vllm_adapters.simulator.text import block_hashes, render_token_ids

pytestmark = pytest.mark.timeout(1_800)  # a hang guard; the first run makes the environment: 3 GB

SCRIPT = Path(__file__).parent / "scheduler_trace.py"


# -- without a model: step by step


def workload(seed: int) -> dict[str, Any]:
    """120 requests of 14 conversations on a cache for three of them, some beginning alike, some twice the same."""
    rng, size, blocks = Random(seed), 8, Random(seed).choice([40, 60, 100])
    beginnings = [tokens(rng, length) for length in (0, 16, 37)]
    texts: dict[int, list[int]] = {}
    requests, at = [], 0
    for _ in range(120):
        thread = rng.randrange(14)
        text = texts.get(thread) or list(rng.choice(beginnings))
        if len(text) > blocks * size // 2:
            text = list(rng.choice(beginnings))
        prompt = text + tokens(rng, rng.randint(1, 60))
        if rng.random() < 0.2:  # whole blocks only: found entirely, the last one is computed again
            prompt = prompt[: max(1, len(prompt) // size * size)]
        answer = tokens(rng, rng.randint(1, 50))
        requests.append({"at": at, "prompt": prompt, "answer": answer})
        texts[thread] = prompt + answer
        at += rng.choice([0, 0, 1, 3, 8, 15]) + 300 * (rng.random() < 0.02)
    return {
        "requests": requests, "blocks": blocks, "block_tokens": size, "sequences": rng.choice([4, 8, 16]),
        "batched_tokens": rng.choice([32, 64, 256]),
    }  # fmt: skip


def tokens(rng: Random, count: int) -> list[int]:
    """Some ids."""
    return [rng.randrange(10, 600) for _ in range(count)]


def simulate(work: dict[str, Any]) -> dict[str, Any]:
    """What the simulator's engine makes of it, in the form of scheduler_trace.py."""
    size = work["block_tokens"]
    engine = Engine(
        kv_capacity_tokens=work["blocks"] * size, block_size_tokens=size, max_num_seqs=work["sequences"],
        max_batched_tokens=work["batched_tokens"],
    )  # fmt: skip
    coming, requests = deque(enumerate(work["requests"])), []
    steps: list[list[list[int]]] = []
    finished: list[Any] = []
    planned = 0
    while engine.running or engine.waiting or coming:
        if not engine.running and not engine.waiting:
            planned = max(planned, coming[0][1]["at"])
        while coming and coming[0][1]["at"] <= planned:
            number, request = coming.popleft()
            hashes = block_hashes(render_token_ids(request["prompt"] + request["answer"]), 1, size)
            requests.append(engine.submit(number, hashes, len(request["prompt"]), len(request["answer"])))
        if engine.start_step() is None:
            continue
        planned += 1
        steps.append(in_step(engine))
        finished += engine.end_step().finished
    cached = [request.cached_tokens for request in requests]
    return {"steps": steps, "cached": cached, "finished": finished, "preemptions": engine.preemptions_total}


def in_step(engine: Engine) -> list[list[Any]]:
    """Requests of the step under way in order of the batch, with their tokens."""
    chunks = {request.request_id: count for request, _, count in engine._chunks or ()}
    in_batch = engine._running.values()
    return [
        [request.request_id, chunks.get(request.request_id, 1)]
        for request in in_batch
        if request.request_id in chunks or request.decoding_since is not None
    ]


def test_step_by_step_as_vllms_own_scheduler() -> None:
    """Under evictions, preemption and full batches: each step's tokens, each hit, the order of ends, all the same."""
    workloads = [workload(seed) for seed in range(10)]
    done = subprocess.run(
        [str(python_with_vllm()), str(SCRIPT), str(model(MODEL))],
        input=json.dumps(workloads), capture_output=True, text=True, check=False, env={**os.environ, **SETTINGS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout)
    assert all(trace["preemptions"] and sum(trace["cached"]) for trace in theirs)
    for work, trace in zip(workloads, theirs, strict=True):
        assert simulate(work) == trace


# -- over HTTP, with a model


@pytest.fixture
def small_vllm(tmp_path: Path) -> Iterator[Vllm]:
    """A server with the benchmark's small cache."""
    server = Vllm(tmp_path, free_ports(1)[0], MODEL, *vllm_options(Limits()), VLLM_SERVER_DEV_MODE="1")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_as_many_tokens_are_found_cached_as_in_vllm(small_vllm: Vllm) -> None:
    """Many clients on a cache for a few of 12 conversations: hits within 2 %, for most requests to the token."""
    slices = {11: conversations(48, 11)}
    (found,) = asyncio.run(compare(f"http://{small_vllm.address}", Limits(), slices, clients=CLIENTS))
    print(table([found]))
    real, simulated = found.real.series, found.simulated.series
    assert real.grown("preemptions") + simulated.grown("preemptions") > 0
    assert max(page.waiting or 0 for page in real.pages) > 0
    assert found.real.cached_tokens == real.grown("prefix_hits_tokens")
    assert found.simulated.cached_tokens == simulated.grown("prefix_hits_tokens")
    assert abs(found.difference) <= 0.02
    assert found.agreement >= 0.8
