"""What is known of the engines, folded together step by step and taken out as messages. No vLLM, no I/O.

`step` runs in the thread that hands every token to its client, so it only puts the step's stats, which nobody changes
any more, into a queue. `take`, in the publisher's thread, folds what is there and makes a message of it. Rejected:
folding at once. Between two steps that code leaves the CPU's caches, and costs the serving thread ten times as much.

What vLLM hands over is not a stable interface: what is missing or of another kind leaves its figure out, is counted,
and raises nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

from .wire import LOADING, SERVING, VERSION, Engine, Finished, Message, Totals

MOST_LISTED = 100
"""Requests and first tokens that one message lists; the others are counted."""
MOST_ADAPTERS = 64
MOST_STEPS = 1_000
"""Waiting to be folded: seconds of them. Where the publisher's thread gets no turn, the serving one folds."""
LONGEST_NAME = 128
REASONS = ("stop", "length", "abort", "error", "repetition")


class Accumulator:
    """The state of one server, from any number of engines."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.phase = LOADING
        self.started_at_s: float | None = None
        self.server_port: int | None = None
        self.kv_bytes_per_token: float | None = None
        self._steps: deque[tuple[int, Any, Any]] = deque()
        self._engines: dict[int, Engine] = {}
        self._totals = Totals()
        self._changed = False
        self._sent = 0
        self._troubles = 0
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Nothing has happened since the message before."""
        self._first_tokens = 0
        self._ttfts: list[float] = []
        self._finished: list[Finished] = []
        self._left_out = 0
        self._largest = 0

    def add_engine(self, engine: Engine) -> None:
        """An engine is initialized."""
        with self._lock:
            self._engines[engine.index] = engine
            self._changed = True
        if self.phase == LOADING:
            self.set_phase(SERVING)

    def set_phase(self, phase: str) -> None:
        """The server is in another phase of its life."""
        self.phase = phase
        self._changed = True

    @property
    def has_news(self) -> bool:
        """Something has happened since the message before."""
        return self._changed or bool(self._steps)

    def trouble(self) -> None:
        """A figure could not be taken."""
        self._troubles += 1

    # -- once per step

    def step(self, index: int, scheduler: Any, iteration: Any) -> None:
        """Take what vLLM's SchedulerStats and IterationStats say of one step; either may be None. Never raises."""
        self._steps.append((index, scheduler, iteration))
        if len(self._steps) > MOST_STEPS:
            with self._lock:
                self._fold_all()

    def _fold_all(self) -> None:
        """What has come so far, in order. Under the lock."""
        for _ in range(len(self._steps)):
            self._fold(*self._steps.popleft())

    def _fold(self, index: int, scheduler: Any, iteration: Any) -> None:
        engine = self._engines.get(index)
        if engine is None:
            engine = self._engines[index] = Engine(index)
        if scheduler is not None:
            self._quietly(self._levels, engine, scheduler)
            self._quietly(self._prefixes, engine, scheduler)
            self._quietly(self._adapters, engine, scheduler)
        if iteration is not None:
            engine.steps += 1
            self._quietly(self._tokens, engine, iteration)
            self._quietly(self._fold_first_tokens, iteration)
            self._quietly(self._fold_finished, iteration)

    def _quietly(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except Exception:  # noqa: BLE001 - a property of theirs may raise anything, and the thread has to go on
            self.trouble()

    @staticmethod
    def _levels(engine: Engine, scheduler: Any) -> None:
        waiting = int(scheduler.num_waiting_reqs)
        engine.running = int(scheduler.num_running_reqs)
        engine.waiting = waiting + int(getattr(scheduler, "num_skipped_waiting_reqs", 0))
        engine.kv_used = used = float(scheduler.kv_cache_usage)
        if engine.kv_peak is None or used > engine.kv_peak:
            engine.kv_peak = used

    @staticmethod
    def _prefixes(engine: Engine, scheduler: Any) -> None:
        stats = scheduler.prefix_cache_stats
        if stats is not None:  # no prefix cache
            engine.prefix_queries += int(stats.queries)
            engine.prefix_hits += int(stats.hits)

    @staticmethod
    def _adapters(engine: Engine, scheduler: Any) -> None:
        if scheduler.running_lora_adapters or engine.lora_running:
            engine.lora_running = _counts(scheduler.running_lora_adapters)
        if scheduler.waiting_lora_adapters or engine.lora_waiting:
            engine.lora_waiting = _counts(scheduler.waiting_lora_adapters)

    @staticmethod
    def _tokens(engine: Engine, iteration: Any) -> None:
        engine.generated += int(iteration.num_generation_tokens)
        engine.preemptions += int(iteration.num_preempted_reqs)
        engine.prompt += int(iteration.num_prompt_tokens)

    def _fold_first_tokens(self, iteration: Any) -> None:
        ttfts = iteration.time_to_first_tokens_iter
        if ttfts:
            self._first_tokens += len(ttfts)
            self._totals.first_tokens += len(ttfts)
            self._ttfts += [float(ttft) for ttft in ttfts[: MOST_LISTED - len(self._ttfts)]]

    def _fold_finished(self, iteration: Any) -> None:
        for request in iteration.finished_requests:
            prompt, generated = int(request.num_prompt_tokens), int(request.num_generation_tokens)
            reason = _reason(request)
            totals = self._totals
            totals.finished[reason] = totals.finished.get(reason, 0) + 1
            totals.prompt += prompt
            totals.generated += generated
            self._largest = max(self._largest, prompt + generated)
            if len(self._finished) < MOST_LISTED:
                self._finished.append(_finished(request, reason, prompt, generated))
            else:
                self._left_out += 1

    # -- as often as is published

    def take(self) -> Message:
        """The next message: the state, and what happened since the one before.

        A flat copy of an engine does: what its fields refer to is replaced when it changes, never altered.
        """
        with self._lock:
            self._changed = False
            self._fold_all()
            self._sent += 1
            message = Message(
                v=VERSION, run=self.run, seq=self._sent, phase=self.phase, started_at_s=self.started_at_s,
                server_port=self.server_port, engines=[copy(engine) for engine in self._engines.values()],
                first_tokens=self._first_tokens, ttfts_s=self._ttfts, finished=self._finished,
                left_out=self._left_out, largest_request_tokens=self._largest,
                kv_bytes_per_token=self.kv_bytes_per_token, totals=deepcopy(self._totals), troubles=self._troubles,
            )  # fmt: skip
            self._begin()
            for engine in self._engines.values():
                engine.kv_peak = engine.kv_used
            return message


def _counts(by_name: dict[str, int]) -> dict[str, int]:
    """Adapters with requests. vLLM keeps a name in both its maps as long as it is in either."""
    used = [(str(name)[:LONGEST_NAME], int(count)) for name, count in by_name.items() if count]
    return dict(used[:MOST_ADAPTERS])


def _reason(request: Any) -> str:
    """How it ended. Others than these are counted together: names are kept for ever."""
    reason = str(request.finish_reason)
    return reason if reason in REASONS else "other"


def _finished(request: Any, reason: str, prompt: int, generated: int) -> Finished:
    return Finished(
        request_id=str(request.request_id)[:LONGEST_NAME],
        reason=reason,
        prompt=prompt,
        generated=generated,
        cached=int(getattr(request, "num_cached_tokens", 0)),
        e2e_s=float(request.e2e_latency),
        queued_s=float(request.queued_time),
    )
