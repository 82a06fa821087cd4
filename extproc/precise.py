"""Asks the senses what of a prompt each endpoint holds, for pools with a precise index, and waits only so long.

An answer that is late, or none, costs a request its budget at most: then the approximate index answers, for a reason
that is counted. So many questions may be open at once, those whose asker waits no more included: a tokenizer that is
too slow is not buried under what it can never do in time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TypeAlias

from extproc.config.schema import Pool
from extproc.config.sections.prefix_index import PreciseIndex
from extproc.senses.messages import Index, Indexed, KvEvents, Match, Matched, PreciseOf
from policies.types import Fallback, InferenceRequest, Precise

Found: TypeAlias = Precise | Fallback
"""What is held, or why that is not known."""

ASKED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Whose prompts become tokens in a way that can be followed."""


class Matcher:
    """The open questions. `tell` sends one to the senses, and is False while there are none."""

    def __init__(self) -> None:
        self.tell: Callable[[Match], bool] = lambda _question: False
        self.on_indexed: Callable[[Indexed], None] = lambda _message: None
        self._numbers = count()
        self._open: dict[int, tuple[str, asyncio.Future[Found]]] = {}
        self._waiting: Counter[str] = Counter()  # by pool: a slow one is not to crowd the others out

    def ask(
        self, pool: str, settings: PreciseIndex, path: str, body: bytes, request: InferenceRequest, adapter: str | None
    ) -> asyncio.Future[Found] | Fallback:
        """The answer to come, within the budget; or at once why there is none to wait for."""
        if path not in ASKED_PATHS:
            return Fallback.PREFIX_NO_TOKENS
        if len(body) > settings.max_body_bytes:
            return Fallback.PREFIX_TOO_LONG
        if self._waiting[pool] >= settings.max_waiting:
            return Fallback.PREFIX_CROWDED
        number = next(self._numbers)
        if not self.tell(Match(number, pool, path, body, adapter, request.cache_salt)):
            return Fallback.PREFIX_SENSES_DOWN
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Found] = loop.create_future()
        self._open[number] = pool, answer
        self._waiting[pool] += 1
        loop.call_later(settings.budget_ms / 1000, _settle, answer, Fallback.PREFIX_LATE)
        return answer

    def answered(self, message: Matched) -> None:
        """The senses answer, in time or not."""
        question = self._open.pop(message.number, None)
        if question is not None:
            pool, answer = question
            self._waiting[pool] -= 1
            _settle(answer, _found(message))

    def lost(self) -> None:
        """The senses fell: nobody will answer."""
        unanswered, self._open = self._open, {}
        self._waiting.clear()
        for _, answer in unanswered.values():
            _settle(answer, Fallback.PREFIX_SENSES_DOWN)


def _settle(answer: asyncio.Future[Found], found: Found) -> None:
    if not answer.done():
        answer.set_result(found)


def _found(message: Matched) -> Found:
    if message.why is not None:
        return Fallback.PREFIX_NO_TOKENS
    return Precise(message.input_tokens, message.tokens, frozenset(message.blind))


def apply(found: Found, request: InferenceRequest) -> None:
    """Let the request be placed by what was found. Its length is exact then, and so are shares of it."""
    if isinstance(found, Fallback):
        request.without = (found,)
        return
    request.precise = found
    request.block_tokens = _rescaled(request.block_tokens, request.input_tokens, found.input_tokens)
    request.input_tokens = found.input_tokens


def _rescaled(blocks: Sequence[int], estimated: int, exact: int) -> list[int]:
    """Shares of an estimate as shares of the exact number; in sum no more than that."""
    made, before, passed = [], 0, 0
    for tokens in blocks:
        passed += tokens
        after = passed * exact // max(1, estimated)
        made.append(after - before)
        before = after
    return made


def index_order(pools: Iterable[Pool], endpoints: Callable[[str], Sequence[str]]) -> Index:
    """What the senses have to keep for these pools, whose endpoints are such."""
    return Index([_precise_of(pool, pool.precise, endpoints(pool.name)) for pool in pools if pool.precise is not None])


def _precise_of(pool: Pool, settings: PreciseIndex, endpoints: Sequence[str]) -> PreciseOf:
    events = settings.events
    return PreciseOf(
        pool.name,
        list(endpoints),
        KvEvents(events.port, events.replay_port, events.ranks, events.bind),
        None if settings.tokenizer == "engine" else str(settings.tokenizer),
        settings.cached_bytes,
        settings.tiers.model_dump(),
        settings.max_blocks,
        round(settings.budget_ms),
    )
