"""Conversations over real engines: the cache is found again."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import aiohttp
import pytest
from harness import HANG_GUARD_S, System
from real_engines import Vllm

pytestmark = pytest.mark.timeout(1_800)  # a hang guard; the first run makes the environment: 3 GB

SESSIONS, TURNS, AT_ONCE = 20, 4, 4
WORDS = ["switch", "signal", "rail", "sleeper", "ballast", "point", "lever", "lamp", "block", "token", "bell", "yard"]


@dataclass
class Tally:
    """What the engines said of the prompts they got."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    follow_up_ttft_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of prompt tokens that were found cached."""
        return self.cached_tokens / self.prompt_tokens

    def __str__(self) -> str:
        return f"cached {self.share:.3f}, TTFT of follow-ups p50 {statistics.median(self.follow_up_ttft_s):.3f} s"


class Sessions:
    """20 conversations of 4 turns, interleaved; `flavour` makes their texts differ from any other run's."""

    def __init__(self, url: str, flavour: int) -> None:
        self._url = url
        self._rng = Random(flavour)
        self._room = asyncio.Semaphore(AT_ONCE)
        self.tally = Tally()

    async def run(self) -> Tally:
        """All of them."""
        timeout = aiohttp.ClientTimeout(total=4 * HANG_GUARD_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            openings = [self._text(250) for _ in range(SESSIONS)]
            messages = [[{"role": "user", "content": opening}] for opening in openings]
            for turn in range(TURNS):  # a turn of all before the next of any: whatever is reused was not just used
                order = list(range(SESSIONS))
                self._rng.shuffle(order)
                await asyncio.gather(*(self._turn(client, messages[number], turn) for number in order))
        return self.tally

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    async def _turn(self, client: aiohttp.ClientSession, messages: list[dict[str, str]], turn: int) -> None:
        body = {
            "model": "mid", "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with self._room:
            began, first, text = time.monotonic(), None, ""
            async with client.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if usage := chunk.get("usage"):
                        self.tally.prompt_tokens += usage["prompt_tokens"]
                        self.tally.cached_tokens += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                    elif delta := chunk["choices"][0]["delta"].get("content"):
                        first = first or time.monotonic()
                        text += delta
            assert first is not None
        if turn:
            self.tally.follow_up_ttft_s.append(first - began)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self._text(30)}]


def test_two_engines_find_nearly_as_much_cached_as_one_would(
    two_servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """Of what one engine alone finds in its cache, both together find nine tenths and more; in turn they do not."""
    alone = asyncio.run(Sessions(f"http://{two_servers[0].address}", 1).run())
    default = asyncio.run(Sessions(make_real_system(two_servers).url, 2).run())
    in_turn = asyncio.run(Sessions(make_real_system(two_servers, pool={"policy": "round-robin"}).url, 3).run())
    print(f"one engine: {alone}\ndefault:    {default}\nin turn:    {in_turn}")
    assert default.share >= 0.9 * alone.share
    assert in_turn.share < default.share
