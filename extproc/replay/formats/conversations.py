"""The trace that comes with Pointsman: made up, seeded, no file. Many conversations over a few system prompts.

Sessions start as a Poisson process and grow by question and answer; their system prompts are shared, a few of them by
most (Zipf). One session in ten is about a long document. Times between turns are fixed beforehand, as in recorded
traces: a question does not wait for a late answer. It is like recorded traffic in kind, not fitted to any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.traces import Trace, TraceRequest

REQUESTS = 3000
_BLOCK_TOKENS = 128
_JITTER_S = 3.0
_SURPLUS = 1.2
"""Sessions are made until there are this many times the requests wanted, and late turns left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths in tokens, their means where they vary; times in seconds."""

    system_prompts: int = 30
    system_tokens: tuple[int, int] = (500, 6000)
    zipf: float = 1.1
    session_gap_s: float = 1.0
    turns: float = 4.0
    between_turns_s: float = 30.0
    question_tokens: float = 300.0
    answer_tokens: float = 300.0
    document_share: float = 0.1
    document_tokens: tuple[int, int] = (8_000, 40_000)
    longest_tokens: int = 60_000


@dataclass(slots=True)
class _Session:
    """What has been said so far, and its blocks; `asks_s`: when the next question comes."""

    name: str
    asks_s: float
    tokens: int
    blocks: list[int] = field(default_factory=list)


def generate(requests: int = REQUESTS, seed: int = 1, shape: Shape | None = None) -> Trace:
    """The first so many requests, the same for the same arguments."""
    shape = shape or Shape()
    rng, names = Random(seed), BlockNames(f"conversations {seed}")
    systems = [_system(shape, number, rng, names) for number in range(shape.system_prompts)]
    weights = list(accumulate((rank + 1) ** -shape.zipf for rank in range(len(systems))))
    made: list[TraceRequest] = []
    at_s = 0.0
    while len(made) < _SURPLUS * requests:
        at_s += rng.expovariate(1 / shape.session_gap_s)
        (system,) = rng.choices(systems, cum_weights=weights)
        made += _session(shape, f"{len(made)}", at_s, system, rng, names)
    made.sort(key=lambda request: request.arrives_s)
    return Trace("generated", _BLOCK_TOKENS, made[:requests], _JITTER_S)


def _system(shape: Shape, number: int, rng: Random, names: BlockNames) -> _Session:
    tokens = rng.randint(*shape.system_tokens)
    blocks = [names.of("system", number, block) for block in range(tokens // _BLOCK_TOKENS)]
    return _Session("", 0.0, tokens, blocks)


def _session(
    shape: Shape, name: str, asks_s: float, system: _Session, rng: Random, names: BlockNames
) -> Iterator[TraceRequest]:
    """One conversation; its context is what was said before, and a document perhaps."""
    said = _Session(name, asks_s, system.tokens, system.blocks)
    if rng.random() < shape.document_share:
        said.tokens += rng.randint(*shape.document_tokens)
    for _ in range(1 + int(rng.expovariate(1 / (shape.turns - 1)))):
        prompt = said.tokens + 1 + int(rng.expovariate(1 / shape.question_tokens))
        answer = 1 + int(rng.expovariate(1 / shape.answer_tokens))
        if prompt + answer > shape.longest_tokens:
            return
        blocks, full = names.fill(said.blocks, (), prompt, answer, _BLOCK_TOKENS)
        yield TraceRequest(said.asks_s, prompt, answer, blocks, full, name)
        said.tokens, said.blocks = prompt + answer, blocks
        said.asks_s += rng.expovariate(1 / shape.between_turns_s)
