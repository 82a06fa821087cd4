"""Plays sessions through the openai client: every session a task of its own, streaming, histories growing.

What an answer was is told at once by `on_outcome`; nothing is added up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from httpx import HTTPError
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

from extproc.demo.figures import Outcome
from extproc.demo.workload import Session

_PATIENCE_S = 60.0
"""How long a client waits for its answer before that counts as an error."""


async def play(
    sessions: Sequence[Session], base_url: str, model: str, answer_tokens: int, on_outcome: Callable[[Outcome], None]
) -> None:
    """All sessions at once, from their starts to their ends."""
    openai = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=_PATIENCE_S)
    async with openai as client, asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(_converse(client, session, model, answer_tokens, on_outcome))


async def _converse(
    client: AsyncOpenAI, session: Session, model: str, answer_tokens: int, on_outcome: Callable[[Outcome], None]
) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": session.system}]
    for turn in session.turns:
        await asyncio.sleep(turn.after_s)
        messages.append({"role": "user", "content": turn.question})
        outcome, text = await _ask(client, messages, model, answer_tokens)
        on_outcome(outcome)
        messages.append({"role": "assistant", "content": text})


async def _ask(
    client: AsyncOpenAI, messages: list[ChatCompletionMessageParam], model: str, answer_tokens: int
) -> tuple[Outcome, str]:
    """One streamed answer: how it went, and its text."""
    began = perf_counter()
    ttft_s, text = None, ""
    try:
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=answer_tokens, stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                ttft_s = ttft_s or perf_counter() - began
                text += chunk.choices[0].delta.content
    except (OpenAIError, HTTPError) as error:  # an answer that breaks off raises what httpx raised
        return Outcome(error=f"{type(error).__name__}: {error}"), text
    return (Outcome(ttft_s=ttft_s), text) if ttft_s else (Outcome(error="an answer without text"), text)
