"""What a trace is: requests with their arrival, sizes and prefix blocks. Readers of files are in readers.py.

Text is never needed. A prompt is a list of block hashes, of `block_tokens` each, that says which prompts begin alike;
the hashes go on with the blocks of the answer, since a later turn of the conversation may begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrives_s` from the trace's start; with `after`, `think_s` after that request's end instead.

    `blocks`: hashes of the full blocks of prompt and answer, the first `prompt_blocks` of them the prompt's.
    """

    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    prompt_blocks: int
    session: str | None = None
    after: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. `jitter_s`: how far arrivals may be moved from seed to seed."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    jitter_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """Mean arrivals per second as recorded."""
        return len(self.requests) / max(1e-9, max(request.arrives_s for request in self.requests))

    @property
    def closed(self) -> bool:
        """Whether sessions wait for their answers."""
        return any(request.after is not None for request in self.requests)

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def fitted(self, kv_capacity_tokens: int) -> Trace:
        """Requests cut down to what an engine of this size can run: a prompt of 60 % of its cache, 90 % with answer."""
        return replace(
            self, requests=[_fit(request, kv_capacity_tokens, self.block_tokens) for request in self.requests]
        )

    def at_rate(self, requests_per_s: float, seed: int) -> Trace:
        """The same requests, faster or slower, each moved by up to `jitter_s` of the trace's own time."""
        rng, factor = Random(seed), self.requests_per_s / requests_per_s
        moved = [
            replace(request, arrives_s=(request.arrives_s + self.jitter_s * rng.random()) * factor)
            for request in self.requests
        ]
        return replace(self, requests=moved)  # not sorted: `after` refers to positions

    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that one engine of endless memory would find, were requests served one by one."""
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            total += request.prompt_tokens
            usable = min(request.prompt_blocks, (request.prompt_tokens - 1) // self.block_tokens)
            for position in range(usable):
                if request.blocks[position] not in seen:
                    break
                hits += self.block_tokens
            seen.update(request.blocks)
        return hits / total if total else 0.0


def _fit(request: TraceRequest, capacity: int, block_tokens: int) -> TraceRequest:
    prompt = min(request.prompt_tokens, int(0.6 * capacity))
    output = max(1, min(prompt + request.output_tokens, int(0.9 * capacity)) - prompt)
    if (prompt, output) == (request.prompt_tokens, request.output_tokens):
        return request
    blocks = request.blocks[: (prompt + output) // block_tokens]
    return replace(
        request,
        prompt_tokens=prompt,
        output_tokens=output,
        blocks=blocks,
        prompt_blocks=min(request.prompt_blocks, prompt // block_tokens, len(blocks)),
    )
