"""What a trace is: requests with their arrival, sizes and prefix blocks. Readers of files are in readers.py.

Text is never needed. A prompt is a list of block hashes, of `block_tokens` each, that says which prompts begin alike;
the hashes go on with the blocks of the answer, since a later turn of the conversation may begin with it. Where a trace
holds text, the router's own blocks of it are kept beside the engine's: they are cut and counted differently.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrives_s` from the trace's start; with `after`, `think_s` after that request's end instead.

    `blocks`: hashes of the full blocks of prompt and answer, the first `prompt_blocks` of them the prompt's.
    `asked_blocks` and `asked_tokens`: the prompt's blocks as the router cuts and counts them; if empty it sees the
    engine's.
    """

    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    prompt_blocks: int
    session: str | None = None
    after: int | None = None
    think_s: float = 0.0
    asked_blocks: Sequence[int] = ()
    asked_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Trace:
    """Requests; one that follows another stands after it. `jitter_s`: how far arrivals may move from seed to seed."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    jitter_s: float = 0.0

    @cached_property
    def span_s(self) -> float:
        """From the start to the last arrival that waits for no answer."""
        return max(1e-9, max((request.arrives_s for request in self.requests if request.after is None), default=0.0))

    @property
    def requests_per_s(self) -> float:
        """Mean arrivals per second as recorded."""
        return len(self.requests) / self.span_s

    @property
    def sessions_per_s(self) -> float:
        """Mean arrivals per second of requests that wait for no answer."""
        return sum(request.after is None for request in self.requests) / self.span_s

    @cached_property
    def closed(self) -> bool:
        """Whether sessions wait for their answers."""
        return any(request.after is not None for request in self.requests)

    @cached_property
    def digest(self) -> str:
        """The same for the same requests, whatever file they came from."""
        digest = hashlib.sha256(f"{self.block_tokens} {self.jitter_s}".encode())
        for request in self.requests:
            digest.update(
                repr((request.arrives_s, request.prompt_tokens, request.output_tokens, request.prompt_blocks,
                      request.session, request.after, request.think_s)).encode()
            )  # fmt: skip
            for numbers in (request.blocks, request.asked_blocks, request.asked_tokens):
                digest.update(array("Q", numbers).tobytes())
        return digest.hexdigest()

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def fitted(self, kv_capacity_tokens: int) -> Trace:
        """Requests cut down to what an engine of this size can run: a prompt of 60 % of its cache, 90 % with answer."""
        return replace(
            self, requests=[_fit(request, kv_capacity_tokens, self.block_tokens) for request in self.requests]
        )

    def at_rate(self, per_s: float, seed: int) -> Trace:
        """The same requests, faster or slower, each moved by up to `jitter_s` of the trace's own time.

        `per_s` counts requests, or sessions where these wait for their answers.
        """
        rng, factor = Random(seed), (self.sessions_per_s if self.closed else self.requests_per_s) / per_s
        moved = [
            replace(request, arrives_s=(request.arrives_s + self.jitter_s * rng.random()) * factor)
            for request in self.requests
        ]
        return replace(self, requests=moved)  # not sorted: `after` refers to positions

    def ideal_hit_rate(self, first: int = 0) -> float:
        """Share of prompt tokens that one engine of endless memory would find, were requests served one by one.

        Of the requests from number `first` on; those before only fill the cache.
        """
        seen: set[int] = set()
        hits = total = 0
        for number, request in enumerate(self.requests):
            if number >= first:
                total += request.prompt_tokens
                hits += self._found(request, seen)
            seen.update(request.blocks)
        return hits / total if total else 0.0

    def _found(self, request: TraceRequest, seen: set[int]) -> int:
        usable = min(request.prompt_blocks, (request.prompt_tokens - 1) // self.block_tokens)
        for position in range(usable):
            if request.blocks[position] not in seen:
                return position * self.block_tokens
        return usable * self.block_tokens


def _fit(request: TraceRequest, capacity: int, block_tokens: int) -> TraceRequest:
    prompt = min(request.prompt_tokens, int(0.6 * capacity))
    output = max(1, min(prompt + request.output_tokens, int(0.9 * capacity)) - prompt)
    if (prompt, output) == (request.prompt_tokens, request.output_tokens):
        return request
    blocks = request.blocks[: (prompt + output) // block_tokens]
    asked = _within(request.asked_tokens, prompt)
    return replace(
        request,
        asked_blocks=request.asked_blocks[:asked],
        asked_tokens=request.asked_tokens[:asked],
        prompt_tokens=prompt,
        output_tokens=output,
        blocks=blocks,
        prompt_blocks=min(request.prompt_blocks, prompt // block_tokens, len(blocks)),
    )


def _within(sizes: Sequence[int], limit: int) -> int:
    """How many of `sizes`, from the first, add up to at most `limit`."""
    total = 0
    for position, size in enumerate(sizes):
        total += size
        if total > limit:
            return position
    return len(sizes)
