"""A load that does not wait for answers, for the benches through a real Envoy; and what is made of it.

Poisson arrivals, streamed answers. An open loop, because one that waits for answers slows down with the fleet and so
hides what overload does. The client shares the machine with everything else: times hold its milliseconds too.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp

_PATIENCE_S = 300.0
_TOTAL = re.compile(rb'"total_tokens": ?(\d+)')
_TAIL_BYTES = 2_000


@dataclass(frozen=True)
class Stream:
    """Requests of one kind. `per_s`: on average. `prompt_tokens`: of four bytes each, no two prompts alike."""

    name: str
    per_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int = 300
    answer_tokens: int = 40


@dataclass
class Answer:
    """What became of a request. Seconds; `waited_s`: to the first byte of any answer. -1: there was none."""

    stream: str
    asked_s: float
    status: int = 0
    waited_s: float = -1.0
    ttft_s: float = -1.0
    ended_s: float = -1.0
    retry_after_s: int | None = None
    tokens: int = 0


class Load:
    """Sends streams of requests to one URL and keeps what became of them."""

    def __init__(self, url: str, seed: int) -> None:
        self.answers: list[Answer] = []
        self._url = f"{url}/v1/chat/completions"
        self._dice = random.Random(seed)
        self._number = seed * 1_000_000

    async def run(self, streams: Iterable[Stream], for_s: float) -> list[Answer]:
        """Arrivals for so long, and then all the answers that are still to come."""
        begin = len(self.answers)
        timeout, connector = aiohttp.ClientTimeout(total=_PATIENCE_S), aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for stream in streams:
                tasks.create_task(self._arrivals(client, stream, for_s, tasks))
        return self.answers[begin:]

    async def _arrivals(
        self, client: aiohttp.ClientSession, stream: Stream, for_s: float, tasks: asyncio.TaskGroup
    ) -> None:
        due_s = time.monotonic()
        until_s = due_s + for_s
        while (due_s := due_s + self._dice.expovariate(stream.per_s)) < until_s:
            await asyncio.sleep(due_s - time.monotonic())
            tasks.create_task(self.ask(client, stream))

    async def ask(self, client: aiohttp.ClientSession, stream: Stream) -> Answer:
        """One request, to the end of its answer."""
        self._number += 1
        answer = Answer(stream.name, time.monotonic())
        self.answers.append(answer)
        body = _body(stream, self._number)
        async with client.post(self._url, json=body, headers=dict(stream.headers)) as response:
            answer.status, answer.waited_s = response.status, time.monotonic() - answer.asked_s
            answer.retry_after_s = int(response.headers.get("retry-after", "0")) or None
            tail = b""
            async for chunk in response.content.iter_any():
                if answer.ttft_s < 0 and answer.status == 200:
                    answer.ttft_s = time.monotonic() - answer.asked_s
                tail = (tail + chunk)[-_TAIL_BYTES:]
        answer.ended_s = time.monotonic() - answer.asked_s
        total = _TOTAL.search(tail)
        answer.tokens = int(total.group(1)) if total else 0
        return answer


def _body(stream: Stream, number: int) -> dict[str, object]:
    words = f"request {number} " * (stream.prompt_tokens * 4 // 10)
    content = words[: stream.prompt_tokens * 4]
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": stream.answer_tokens,
        "stream": True,
    }


def quantiles_ms(answers: Iterable[Answer]) -> dict[str, float]:
    """TTFT of those that were answered: count, p50, p95 and p99 in ms."""
    times = sorted(1000 * one.ttft_s for one in answers if one.ttft_s >= 0)
    if not times:
        return {"count": 0}
    told = {f"p{share}": times[min(len(times) - 1, len(times) * share // 100)] for share in (50, 95, 99)}
    return {"count": len(times), **told}


def statuses(answers: Iterable[Answer]) -> dict[str, int]:
    """How many by status; `none` were not answered at all."""
    return dict(sorted(Counter(str(one.status) if one.ended_s >= 0 else "none" for one in answers).items()))
