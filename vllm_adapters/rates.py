"""One endpoint's counters from scrape to scrape: rates, what ended since, and whether the engine is another one now.

A counter only grows within a run of its engine. One that is smaller than before began anew: what it counts now came
since, and never is there a negative rate. No I/O and no clock; who scrapes says when.

Rates are over intervals of several scrapes. Tokens come in bursts, one step of an engine at a time, and a scrape every
fifth of a second sees a burst or none.
"""

from __future__ import annotations

import msgspec

from vllm_adapters.metrics import EngineFigures

INTERVAL_S = 5.0
"""An interval is closed by the first scrape this long after it began."""


class Rates(msgspec.Struct, frozen=True):
    """Per second, over the last closed interval; None where the engine has not told enough.

    `hit_ratio`: of the prompt tokens that were looked up in the prefix cache, the share found there, 0..1. Of an
    interval without any it says nothing, so the one before stands.
    """

    generated_tokens_per_s: float | None = None
    prefilled_tokens_per_s: float | None = None
    preemptions_per_s: float | None = None
    hit_ratio: float | None = None


class Change(msgspec.Struct, frozen=True):
    """What one scrape shows that the one before did not. Made by C, as policies/types.py has it.

    `restarted`: the engine is another run than before. `finished`: requests that ended, by reason. `hit_tokens`: of
    prompts, found cached; None where the engine does not count them. `closed`: an interval is over, rates are new.
    """

    restarted: bool = False
    finished: dict[str, float] = {}
    closed: bool = False
    hit_tokens: float | None = None


class _Known(msgspec.Struct):
    """The newest that pages said of what tells runs apart; a page may leave some of it out."""

    started_at_s: float | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    steps: float | None = None

    @classmethod
    def of(cls, figures: EngineFigures) -> _Known:
        # vLLM's progress may be tokens on one page and steps on the next, and it tells its start anyway
        steps = figures.progress if figures.dialect != "vllm" else None
        return cls(figures.started_at_s, figures.prefix_queries_tokens, figures.prefix_hits_tokens, steps)

    def before_another_run(self, now: _Known) -> bool:
        """Another start time, or a counter that went down."""
        return (
            (self.started_at_s != now.started_at_s and None not in (self.started_at_s, now.started_at_s))
            or _fell(self.prefix_queries_tokens, now.prefix_queries_tokens)
            or _fell(self.prefix_hits_tokens, now.prefix_hits_tokens)
            or _fell(self.steps, now.steps)
        )

    def update(self, now: _Known) -> None:
        for name in self.__struct_fields__:
            if (told := getattr(now, name)) is not None:
                setattr(self, name, told)


def _fell(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now < before


class Counters:
    """The counters of one endpoint."""

    __slots__ = ("_began", "_began_at_s", "_finished", "_known", "rates")

    def __init__(self) -> None:
        self.rates = Rates()
        self._known = _Known()
        self._finished: dict[str, float] | None = None
        self._began: EngineFigures | None = None
        self._began_at_s = 0.0

    def take(self, figures: EngineFigures, now_s: float) -> Change:
        """One page, read at `now_s`."""
        known = _Known.of(figures)
        restarted = self._known.before_another_run(known)
        hits_before = self._known.prefix_hits_tokens
        if restarted:
            self._known = _Known()
            self._began = None  # an interval does not reach over a restart
            self._finished = {}
        self._known.update(known)
        finished = self._ended(figures.finished)
        return Change(restarted, finished, self._close(figures, now_s), _grown_since(hits_before, known))

    def _ended(self, finished: dict[str, float]) -> dict[str, float]:
        before, self._finished = self._finished, finished or self._finished
        if before is None or before == finished:
            return {}  # the first page: nobody knows since when; or nothing has ended
        counts = {reason: _grown(before.get(reason), count) for reason, count in finished.items()}
        return {reason: count for reason, count in counts.items() if count}

    def _close(self, figures: EngineFigures, now_s: float) -> bool:
        began, passed_s = self._began, now_s - self._began_at_s
        if began is None:
            self._began, self._began_at_s = figures, now_s
        if began is None or passed_s < INTERVAL_S:
            return False
        self.rates = Rates(
            _per_second(began.generated_tokens, figures.generated_tokens, passed_s),
            _per_second(began.prefilled_tokens, figures.prefilled_tokens, passed_s),
            _per_second(began.preemptions, figures.preemptions, passed_s),
            self._hit_ratio(began, figures),
        )
        self._began, self._began_at_s = figures, now_s
        return True

    def _hit_ratio(self, began: EngineFigures, now: EngineFigures) -> float | None:
        if None in (now.prefix_queries_tokens, now.prefix_hits_tokens):
            return now.hit_ratio
        queried = _grown(began.prefix_queries_tokens, now.prefix_queries_tokens or 0.0)
        hits = _grown(began.prefix_hits_tokens, now.prefix_hits_tokens or 0.0)
        # two counters are not read at the same instant
        return min(1.0, hits / queried) if queried else self.rates.hit_ratio


def _grown_since(hits_before: float | None, known: _Known) -> float | None:
    hits = known.prefix_hits_tokens
    return None if hits is None or hits_before is None else _grown(hits_before, hits)


def _grown(before: float | None, now: float) -> float:
    return now if before is None or now < before else now - before


def _per_second(before: float | None, now: float | None, passed_s: float) -> float | None:
    """None where either page lacks it; a counter that began anew has grown by all it counts."""
    return None if before is None or now is None else _grown(before, now) / passed_s
