"""The same requests through a real vLLM and through the simulator, with /metrics of both over time.

    make bench-fidelity [ARGS='--seeds 5 --requests 120 --picture FILE']

Conversations with shared beginnings, as token ids, so that both count alike; a KV cache far too small for them, more
clients than sequences that may run: evictions, queueing and preemption all the time. The simulator gets the real
engine's capacity and limits, and step times that a warm-up measures.

Concurrency makes no two runs alike, on the real side either. What is done about it: a fixed number of clients, each
sending the next request of one list as soon as it has its answer, and the first ones started one after the other. So
the order in which requests are sent is the same, and when one is sent hangs on the engine's own progress, not on a
clock; and there are so many clients that the queue hardly ever empties: a request a step late changes nothing. Answers
are as long as asked for; the next turn repeats the engine's own answer token by token, so texts differ between the two
engines and lengths do not.

It does not say that the simulator's times are right for any GPU, and judges no policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import aiohttp
import typer

from extproc.replay.readers import read
from extproc.replay.traces import Trace, TraceRequest
from vllm_adapters.metrics import EngineFigures, parse_metrics
from vllm_adapters.simulator.hardware import Hardware
from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.server import SimulatedServer
from vllm_adapters.simulator.text import TOKEN_BYTES

MODEL = "mid"
CLIENTS = 14
"""More than twice the sequences that run."""
_VOCABULARY = range(300, 600)
"""Ids that stand for words in the model that tests/engine/make_model.py makes."""
_SAMPLE_S = 0.1
_BETWEEN_STARTS_S = 0.05
"""From one client's first request to the next one's, so that they arrive in order."""
_PATIENCE_S = 600.0
_WARM_UP_TOKENS = (64, 256, 448)
_WARM_UP_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What both engines have: blocks of KV cache, tokens in one, sequences at once, tokens per step."""

    blocks: int = 72
    block_tokens: int = 32
    sequences: int = 6
    batched_tokens: int = 512

    @property
    def capacity_tokens(self) -> int:
        """Of the KV cache."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: its prompt is that of request number `follows` and the answer to it, then `ids`."""

    ids: tuple[int, ...]
    output_tokens: int
    follows: int | None = None


@dataclass(slots=True)
class Answered:
    """What one engine made of one request; times in seconds from sending it."""

    text: list[int]  # prompt and answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0


@dataclass(slots=True)
class Series:
    """What /metrics said, and how long after the first request in seconds."""

    at_s: list[float] = field(default_factory=list)
    pages: list[EngineFigures] = field(default_factory=list)

    def grown(self, name: str) -> float:
        """How much a counter has grown from the first look to the last."""
        return _figure(self.pages[-1], name) - _figure(self.pages[0], name)


@dataclass(frozen=True, slots=True)
class Run:
    """One slice through one engine."""

    answers: list[Answered]
    series: Series

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, by the answers' usage."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One slice through both."""

    seed: int
    real: Run
    simulated: Run

    @property
    def difference(self) -> float:
        """Of prefix-hit tokens, the simulator's over the real engine's, minus 1."""
        return (self.simulated.cached_tokens - self.real.cached_tokens) / max(1, self.real.cached_tokens)

    @property
    def agreement(self) -> float:
        """Share of requests with the very same number of cached tokens."""
        pairs = zip(self.real.answers, self.simulated.answers, strict=True)
        return sum(a.cached_tokens == b.cached_tokens for a, b in pairs) / len(self.real.answers)


def _figure(page: EngineFigures, name: str) -> float:
    return float(getattr(page, name) or 0.0)


# -- what is asked


def conversations(requests: int, seed: int) -> list[Planned]:
    """Conversations of four turns behind one of three system prompts; a turn of all before the next of any."""
    rng, turns = Random(seed), 4
    systems = [_words(rng, 150) for _ in range(3)]
    threads = -(-requests // turns)
    last: list[int | None] = [None] * threads
    planned: list[Planned] = []
    for _ in range(turns):
        for thread in rng.sample(range(threads), threads):
            begins = rng.choice(systems) if last[thread] is None else ()
            ids = begins + _words(rng, rng.randint(20, 120))
            planned.append(Planned(ids, rng.randint(16, 112), last[thread]))
            last[thread] = len(planned) - 1
    return planned[:requests]


def of_trace(trace: Trace, limits: Limits, requests: int) -> list[Planned]:
    """A recorded trace's requests in their order, cut to what the cache can hold; answers are not taken up again."""
    fitted = trace.first(requests).fitted(limits.capacity_tokens)
    return [
        Planned(_ids_of(request, number, trace.block_tokens), request.output_tokens)
        for number, request in enumerate(fitted.requests)
    ]


def _ids_of(request: TraceRequest, number: int, block_tokens: int) -> tuple[int, ...]:
    """Equal blocks, equal ids; what fills no block is the request's own."""
    ids: tuple[int, ...] = ()
    for block in request.blocks[: request.prompt_blocks]:
        ids += _words(Random(block), block_tokens)
    return ids + _words(Random(f"request {number}"), request.prompt_tokens - len(ids))


def _words(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(_VOCABULARY, k=count))


# -- asking


class Client:
    """One engine's clients, and the eye on its metrics."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def play(self, planned: Sequence[Planned], clients: int) -> Run:
        """All requests in their order, `clients` of them at a time."""
        answers: list[asyncio.Future[Answered]] = [asyncio.get_running_loop().create_future() for _ in planned]
        numbers = iter(range(len(planned)))
        series = Series()
        watching = asyncio.create_task(self._watch(series))
        async with asyncio.TaskGroup() as group:
            for client in range(clients):
                group.create_task(self._work(client * _BETWEEN_STARTS_S, numbers, planned, answers))
        await asyncio.sleep(5 * _SAMPLE_S)  # the last step's figures
        watching.cancel()
        return Run([answer.result() for answer in answers], series)

    async def _work(
        self,
        after_s: float,
        numbers: Iterator[int],
        planned: Sequence[Planned],
        answers: list[asyncio.Future[Answered]],
    ) -> None:
        await asyncio.sleep(after_s)
        for number in numbers:
            request = planned[number]
            before = (await answers[request.follows]).text if request.follows is not None else []
            answers[number].set_result(await self.ask([*before, *request.ids], request.output_tokens))

    async def ask(self, prompt: list[int], output_tokens: int) -> Answered:
        """One request, to its end."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        answer, began_s = Answered(list(prompt)), time.perf_counter()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url} answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), time.perf_counter() - began_s)
        if len(answer.text) != len(prompt) + output_tokens or answer.prompt_tokens != len(prompt):
            raise RuntimeError(f"{self._url} counts otherwise: {answer}")
        return answer

    async def _watch(self, series: Series) -> None:
        began_s = time.perf_counter()
        while True:
            async with self._http.get(f"{self._url}/metrics") as response:
                series.pages.append(parse_metrics(await response.read()))
            series.at_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(_SAMPLE_S)


def _take(answer: Answered, event: dict[str, Any], after_s: float) -> None:
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return
    if "choices" not in event:
        raise RuntimeError(f"the stream says {event}")
    answer.ttft_s = answer.ttft_s or after_s
    answer.e2e_s = after_s
    for choice in event["choices"]:
        answer.text += choice["token_ids"] if "token_ids" in choice else _simulated_ids(choice["text"].encode())


def _simulated_ids(text: bytes) -> list[int]:
    """The simulator's tokens: as it reads token ids in a prompt, four bytes are one."""
    return [int.from_bytes(text[at : at + TOKEN_BYTES], "little") for at in range(0, len(text), TOKEN_BYTES)]


# -- step times


async def measure(client: Client, limits: Limits) -> Hardware:
    """Step times of the engine behind `client`, by a few requests of known sizes; it must be idle."""
    rng = Random("warm-up")
    for _ in range(2):
        await client.ask(list(_words(rng, 64)), 4)  # the first request after a start takes long
    small, middle, large = [await _prefill_s(client, rng, tokens) for tokens in _WARM_UP_TOKENS]
    alone_s = await _step_s(client, rng, 1, 32)
    full_s = await _step_s(client, rng, limits.sequences, 32)
    deep_s = await _step_s(client, rng, limits.sequences, 256)
    low, mid, high = _WARM_UP_TOKENS
    first, second = (middle - small) / (mid - low), (large - middle) / (high - mid)
    # with t = a + b n + c n^2 / 2 the slopes are b + c (n1 + n2) / 2
    attention_s = max(0.0, 2 * (second - first) / (high - low))
    token_s = max(1e-6, first - attention_s * (low + mid) / 2)
    sequence_s = max(0.0, (full_s - alone_s) / (limits.sequences - 1) - token_s)
    kv_read_s = max(0.0, (deep_s - full_s) / (limits.sequences * (256 - 32)))
    step_s = max(1e-3, alone_s - token_s - sequence_s)
    return Hardware("measured", step_s, 0.0, token_s, attention_s, sequence_s, kv_read_s, limits.capacity_tokens)


async def _prefill_s(client: Client, rng: Random, tokens: int) -> float:
    return min([(await client.ask(list(_words(rng, tokens)), 1)).ttft_s for _ in range(_WARM_UP_ROUNDS)])


async def _step_s(client: Client, rng: Random, at_once: int, context_tokens: int) -> float:
    """Seconds per step while so many decode behind prompts of that length."""
    tokens, prompts = 32, [list(_words(rng, context_tokens)) for _ in range(at_once)]
    for prompt in prompts:
        await client.ask(prompt, 1)  # cached: their prefill is not what is measured
    answers = await asyncio.gather(*(client.ask(prompt, tokens) for prompt in prompts))
    return statistics.median((answer.e2e_s - answer.ttft_s) / (tokens - 1) for answer in answers)


# -- both engines


def vllm_options(limits: Limits) -> tuple[str, ...]:
    """Of a vLLM with these limits. One block more: it never gives away its first."""
    return (
        "--num-gpu-blocks-override", str(limits.blocks + 1), "--kv-cache-memory-bytes", "128M",
        "--max-num-seqs", str(limits.sequences), "--max-num-batched-tokens", str(limits.batched_tokens),
        "--max-model-len", str(limits.capacity_tokens - limits.block_tokens),
    )  # fmt: skip


async def compare(url: str, limits: Limits, slices: dict[int, list[Planned]], clients: int) -> list[Comparison]:
    """Each slice (by its seed) through the real engine at `url`, then through a simulated one."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # vLLM closes after 5 s
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        real = Client(url, http)
        hardware = await measure(real, limits)
        typer.echo(f"measured: {hardware}")
        done = []
        for seed, planned in slices.items():
            await _forget(http, url)
            there = await real.play(planned, clients)
            async with _simulated(limits, hardware) as address:
                here = await Client(address, http).play(planned, clients)
            done.append(Comparison(seed, there, here))
        return done


async def _forget(http: aiohttp.ClientSession, url: str) -> None:
    """Empty the real engine's cache, as the simulated one's is at its start."""
    async with http.post(f"{url}/reset_prefix_cache") as response:
        if response.status != 200:
            raise RuntimeError("vLLM must run with VLLM_SERVER_DEV_MODE=1")


@contextlib.asynccontextmanager
async def _simulated(limits: Limits, hardware: Hardware) -> AsyncIterator[str]:
    options = SimOptions(
        port=0, models=(MODEL,), kv_capacity_tokens=limits.capacity_tokens, measured=hardware,
        max_model_len=limits.capacity_tokens - limits.block_tokens, max_num_seqs=limits.sequences,
        block_size=limits.block_tokens, max_batched_tokens=limits.batched_tokens,
    )  # fmt: skip
    server = SimulatedServer(options)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


# -- what came of it


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown, a row per seed: real, then simulated."""
    columns = ["seed", "requests", "prompt tokens", "prefix-hit tokens", "difference", "requests alike", "preemptions"]
    columns += ["TTFT p50 / p95 in s", "e2e p50 / p95 in s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in comparisons:
        real, simulated = one.real, one.simulated
        cells = [
            str(one.seed), str(len(real.answers)), str(real.prompt_tokens),
            f"{real.cached_tokens}, {simulated.cached_tokens}", f"{one.difference:+.2%}", f"{one.agreement:.0%}",
            f"{real.series.grown('preemptions'):.0f}, {simulated.series.grown('preemptions'):.0f}",
            f"{_spread(real, 'ttft_s')}, {_spread(simulated, 'ttft_s')}",
            f"{_spread(real, 'e2e_s')}, {_spread(simulated, 'e2e_s')}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(run: Run, name: str) -> str:
    cuts = statistics.quantiles([getattr(answer, name) for answer in run.answers], n=20)
    return f"{cuts[9]:.2f} / {cuts[18]:.2f}"


def draw(comparison: Comparison, path: Path) -> None:
    """Running, waiting, KV use and prefix hits over time, both engines in each panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = {
        "running": "running", "waiting": "waiting", "kv_used": "KV cache in use, 0..1",
        "prefix_hits_tokens": "prefix-hit tokens",
    }  # fmt: skip
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for run, who in ((comparison.real, "vLLM 0.32 on CPU"), (comparison.simulated, "simulator")):
            values = [_figure(page, name) for page in run.series.pages]
            since = values[0] if name == "prefix_hits_tokens" else 0.0
            axis.plot(run.series.at_s, [value - since for value in values], label=who, linewidth=1)
        axis.set_ylabel(label)
    axes[0].legend(loc="lower right")
    axes[-1].set_xlabel("seconds since the first request")
    figure.savefig(path, dpi=90)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="how many slices")] = 3,
    requests: Annotated[int, typer.Option(min=8, help="of one slice")] = 80,
    clients: Annotated[int, typer.Option(min=1, help="requests under way")] = CLIENTS,
    blocks: Annotated[int, typer.Option(min=16, help="KV cache, in blocks of 32 tokens")] = Limits().blocks,
    trace: Annotated[
        str | None, typer.Option(help="a trace to take requests from, as `pointsman replay` reads")
    ] = None,
    picture: Annotated[Path, typer.Option(help="where to draw the first slice")] = Path("fidelity.png"),
) -> None:
    """Start a vLLM on CPU (tests/engine/real_engines.py makes its environment once) and compare."""
    from harness import free_ports
    from real_engines import Vllm

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped as well
    limits = replace(Limits(), blocks=blocks)
    recorded = read(trace, requests=requests) if trace else None
    slices = {
        seed: of_trace(recorded, limits, requests) if recorded else conversations(requests, seed)
        for seed in range(1, seeds + 1)
    }
    with tempfile.TemporaryDirectory(prefix="pointsman-fidelity-") as folder:
        server = Vllm(Path(folder), free_ports(1)[0], MODEL, *vllm_options(limits), VLLM_SERVER_DEV_MODE="1")
        try:
            server.wait_ready()
            found = asyncio.run(compare(f"http://{server.address}", limits, slices, clients))
        finally:
            server.stop()
    typer.echo(table(found))
    draw(found[0], picture)


if __name__ == "__main__":
    typer.run(main)
