"""The demo's conversations: who says what and when, and how much of it a perfect cache would know already.

Pure and seeded: the same arguments give the same conversations, so that every policy is asked the same. Not here:
sending them (clients.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from vllm_adapters.simulator.text import (
    TOKEN_BYTES,
    Message,
    answer,
    block_hashes,
    chain_seed,
    count_tokens,
    render_chat,
)

_CACHE_ROOM = 1.5
"""KV cache of an engine as a multiple of its even share of all conversations."""
_WORDS = (
    "account",
    "agree",
    "clause",
    "cover",
    "deliver",
    "fee",
    "form",
    "goods",
    "lease",
    "limit",
    "loan",
    "month",
    "notice",
    "offer",
    "order",
    "party",
    "pay",
    "place",
    "price",
    "proof",
    "renew",
    "scope",
    "term",
    "unit",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much there is of everything. Lengths in tokens of the simulated engines, times in seconds.

    Sessions of one app share its system prompt; each has a document of its own and asks `turns` questions about it.
    """

    sessions: int = 40
    turns: int = 5
    apps: int = 4
    system_tokens: int = 1_000
    document_tokens: int = 4_000
    question_tokens: int = 80
    answer_tokens: int = 24
    arrivals_s: float = 6.0
    think_s: float = 1.5

    @property
    def longest_tokens(self) -> int:
        """Upper bound of a whole conversation's length."""
        headers_tokens = 8 * (2 * self.turns + 2)
        turn_tokens = self.question_tokens + self.answer_tokens
        return self.system_tokens + self.document_tokens + self.turns * turn_tokens + headers_tokens

    def kv_capacity_tokens(self, engines: int) -> int:
        """KV cache per engine: enough if every session stays where it is, far too little if each goes everywhere."""
        share_tokens = self.sessions * self.longest_tokens / engines
        return int(max(_CACHE_ROOM * share_tokens, 2 * self.longest_tokens))


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, asked so long after the answer before it (the first: after the start)."""

    after_s: float
    question: str


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: the shared beginning, and its own questions; the document is part of the first."""

    system: str
    turns: tuple[Turn, ...]


def plan(shape: Shape, seed: int) -> list[Session]:
    """All sessions, the same for the same arguments."""
    rng = Random(seed)
    systems = [_text(rng, shape.system_tokens) for _ in range(shape.apps)]
    return [
        Session(systems[number % shape.apps], tuple(_turns(shape, number / shape.sessions, rng)))
        for number in range(shape.sessions)
    ]


def _turns(shape: Shape, arrival: float, rng: Random) -> Iterator[Turn]:
    document = _text(rng, shape.document_tokens)
    yield Turn(arrival * shape.arrivals_s, f"{document}\n{_text(rng, shape.question_tokens)}")
    for _ in range(shape.turns - 1):
        # at least a little: nobody answers before having read
        yield Turn(shape.think_s * (0.5 + rng.random()), _text(rng, shape.question_tokens))


def _text(rng: Random, tokens: int) -> str:
    size = tokens * TOKEN_BYTES
    return " ".join(rng.choices(_WORDS, k=size // 2))[:size]


def ideal_hit_rate(sessions: Sequence[Session], model: str, answer_tokens: int, block_tokens: int) -> float:
    """Share of all prompt tokens that one engine with endless cache would find in it: no fleet can do better."""
    seen: set[int] = set()
    asked_tokens = hit_tokens = 0
    for prompt, reply in _exchanges(sessions, model, answer_tokens):
        hashes = block_hashes(prompt + reply, chain_seed(model, None), block_tokens)
        prompt_blocks = (count_tokens(prompt) - 1) // block_tokens
        asked_tokens += count_tokens(prompt)
        hit_tokens += _leading(hashes[:prompt_blocks], seen) * block_tokens
        seen.update(hashes)
    return hit_tokens / asked_tokens if asked_tokens else 0.0


def _exchanges(sessions: Sequence[Session], model: str, answer_tokens: int) -> Iterator[tuple[bytes, bytes]]:
    """Every prompt as the engine sees it, and the answer it will give."""
    for session in sessions:
        messages = [Message("system", session.system)]
        for turn in session.turns:
            messages.append(Message("user", turn.question))
            prompt = render_chat(messages)
            reply = answer(prompt, chain_seed(model, None), answer_tokens)
            messages.append(Message("assistant", reply.decode()))
            yield prompt, reply


def _leading(hashes: Sequence[int], seen: set[int]) -> int:
    return next((position for position, one in enumerate(hashes) if one not in seen), len(hashes))
