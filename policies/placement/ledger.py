"""The ledger: what each endpoint still has to prefill by our own accounts, and how fast it turns out to do it.

One per pool, written by Placement as requests are committed, get their first token and end; read by policies that
predict. It needs nothing from the engines. Three figures per endpoint matter:

- *pending work*: of requests without a first token; without an end, where first tokens cannot be seen;
- the *backlog*: a bucket that fills with each request's work and leaks at the endpoint's prefill rate, never above
  the pending work. Without the leak a fleet whose first tokens are unseen would count prefilled prompts as still to
  come; without the bound a rate learned too low never recovers (measured: three times the TTFT);
- the *prefill rate*: work done over time taken, of the last half minute of prefilling, pulled towards the pool's by two
  seconds' worth of it, and the pool's in the same way towards the profile's. An endpoint of which nothing is known is
  taken to be like the others. Were it like the profile, where that is too low, a quiet fleet would never send it
  anything, and so never learn better.

And two of the pool's answers: how long they are, and the *decode rate*: the pace that nine in ten of them keep. Time
limits rest on it (policies/admission/time_limits.py), and must fit the slow ones; a mean would cut those of a pool's
older half. It is followed in bounded steps, nine times as wide downwards as upwards, so no single reading moves it far,
and a fleet that gets busier is believed sooner than one that gets idle.

Rejected: exact per-request queues per endpoint. The order inside an engine is its own affair, and sums are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from policies.past import Moment, Past
from policies.placement.profiles import Profile
from policies.types import Floats, InferenceRequest, Kind, Reservation, Slots, one_by_one

_GENERATE: Final = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSE, Kind.MESSAGE})
_RATE_MEMORY_S: Final = 30.0
"""Seconds of prefilling after which an observation counts 1/e."""
_PRIOR_S: Final = 2.0
"""The profile's rate counts as much as this many seconds of observation; so does the pool's, for each endpoint."""
_POOL_STEP: Final = 0.05
"""The pool's rate has changed once it is this far from what the endpoints' were pulled towards: all change with it."""
_OUTPUT_MEMORY: Final = 0.999
"""Of each finished request's weight, what is left after the next: about the last thousand count."""
_PRIOR_REQUESTS: Final = 20.0
"""The profile's answer length counts as much as this many requests."""
_SHORTEST_S: Final = 1e-4
_MOST_TIMES_PRIOR: Final = 20.0
"""An observed rate further than this factor from the profile's is a misreading, not a rate."""

_DECODE_STEP: Final = 0.2
"""A slower answer takes the decode rate down by 0.9 of this, a faster one up by 0.1 of it, in its logarithm."""
_SLOW_SHARE: Final = 0.1
"""Of answers that are written more slowly than the decode rate."""
_FEWEST_TIMED = 8
"""Tokens after the first: fewer, and the pace is that of the network."""
_FEWEST_OF_WHOLE = 64
"""The same where the first token was not seen: fewer, and the pace is that of the prefill."""

_SLOWEST, _FASTEST = 1e-2, 1e6
"""Tokens per second between which any answer is written."""


class Prices:
    """A profile's figures as plain attributes, which compiled code reads in a fiftieth of the time. They never change.

    `work` is the profile's, of floats alone.
    """

    def __init__(self, profile: Profile) -> None:
        self.prefill_tokens_per_s: float = profile.prefill_tokens_per_s
        self.attention_per_token: float = profile.attention_per_token
        self.request_tokens: float = profile.request_tokens
        self.sequence_s: float = profile.sequence_s
        self.kv_token_s: float = profile.kv_token_s
        self.most_running: float = float(profile.max_num_seqs)

    def work(self, prompt_tokens: float, uncached_tokens: float) -> float:
        """In the same steps, so to the last bit."""
        last_token = 1.0 + self.attention_per_token * prompt_tokens
        return uncached_tokens * (last_token - 0.5 * self.attention_per_token * uncached_tokens) + self.request_tokens


class Pace:
    """How fast one endpoint prefills, when its backlog will be done, and how long that takes at most.

    Written by the Ledger alone.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.done_at_s = 0.0
        self.longest_s = 0.0


class Ledger:
    """Work by endpoint slot; columns grow with the highest slot seen. `misreadings`: observed rates not believed.

    Figures stand in lists: of an array one takes five times as long to read, and comes as numpy's float, which is slow
    too. What every decision reads is the attributes of a Pace, which compiled code reads sooner still; for who weighs
    many endpoints by arrays it stands in one as well, brought up to date when it is read.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.misreadings = 0
        self.outputs = 0.0
        self.output_tokens_sum = 0.0
        self._decode_rate: float | None = None
        self._size = 0
        self.pending: npt.NDArray[np.float64] = np.zeros(0)
        self.pending_tokens: npt.NDArray[np.float64] = np.zeros(0)
        self._pending: Any = one_by_one(self.pending)
        self._pending_tokens: Any = one_by_one(self.pending_tokens)
        self._paces: list[Pace] = []
        self._pace: npt.NDArray[np.float64] = np.zeros((3, 0))  # the same by row
        self._stirred: set[int] = set()  # slots of which other figures stand there
        self._past = Past()
        self.pending_work: list[float] = []
        self.bucket: list[float] = []
        self.bucket_at_s: list[float] = []
        self.rate_work: list[float] = []
        self.rate_time_s: list[float] = []
        self.since_s: list[float] = []
        self._seen_work = self._seen_time_s = 0.0  # the sums of what stands by slot
        self.expected_output_tokens = 0.0
        """Mean length of an answer."""
        self._profile = profile or Profile()
        self.prices = Prices(self._profile)
        self.pool_rate: float = self.prices.prefill_tokens_per_s
        """Prefill work per second that is believed of an endpoint as long as nothing is seen of it."""
        self._expect_answers()
        self._grow(16)

    @property
    def profile(self) -> Profile:
        """What is believed of the hardware as long as nothing better is known."""
        return self._profile

    @profile.setter
    def profile(self, profile: Profile) -> None:
        if profile == self._profile:
            return
        self._profile, self.prices = profile, Prices(profile)
        self._expect_answers()
        self._show_pool()

    # -- requests

    def committed(self, reservation: Reservation, now_s: float) -> None:
        """A request was placed."""
        slot = reservation.slot
        self._reach(slot)
        work = self.prices.work(float(reservation.prompt_tokens), float(reservation.uncached_tokens))
        backlog = self._backlog(slot, now_s)
        if not self._pending[slot]:
            self.since_s[slot] = now_s
        reservation.work, reservation.backlog, reservation.pending = work, backlog, True
        self._pending[slot] += 1.0
        self._pending_tokens[slot] += reservation.uncached_tokens
        self.pending_work[slot] += work
        self._fill(slot, backlog + work, now_s)

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        """The request's first token came: its prefill is done, and tells of the endpoint's rate."""
        if reservation.pending:
            slot = reservation.slot
            self._learn(slot, reservation.work, now_s - self.since_s[slot])
            self._done(reservation, now_s)
            self.since_s[slot] = now_s

    def ended(self, reservation: Reservation, now_s: float) -> None:
        """The request is over, or left the endpoint."""
        if reservation.pending:
            self._done(reservation, now_s)

    def timed(self, reservation: Reservation, ttft_s: float) -> None:
        """Told afterwards how long the first token took: the backlog it found and its own work were done by then.

        A rate thought too high understates the backlog and so brings itself down, one too low the other way. A crowded
        request teaches nothing: it waited for room, which is not the engine's pace (measured in overload: taking that
        for slowness costs a sixth of the goodput).
        """
        if reservation.crowded:
            return
        self._learn(reservation.slot, reservation.backlog + reservation.work, ttft_s)

    def answered(self, output_tokens: int) -> None:
        """A request was answered with so many tokens."""
        self.outputs = self.outputs * _OUTPUT_MEMORY + 1.0
        self.output_tokens_sum = self.output_tokens_sum * _OUTPUT_MEMORY + output_tokens
        self._expect_answers()

    def decoded(self, reservation: Reservation, output_tokens: int, upstream_s: float, ttft_s: float | None) -> None:
        """Told how long an answer of so many tokens took, from the request sent to its last byte.

        `ttft_s`: of this, until the first token; None where that cannot be seen, as of an answer that came whole. What
        we expected stands in for it then, and the answer counts half.
        """
        tokens = output_tokens / reservation.side_by_side - 1.0
        whole = ttft_s is None
        before_s = self._expected_ttft_s(reservation) if ttft_s is None else ttft_s
        if tokens >= (_FEWEST_OF_WHOLE if whole else _FEWEST_TIMED):
            pace = tokens / max(upstream_s - before_s, _SHORTEST_S)
            self._follow(pace, 0.5 * _DECODE_STEP if whole else _DECODE_STEP)

    def forget(self, slot: int) -> None:
        """The slot has another endpoint now, or the same one anew: its rate must be learned again."""
        self._reach(slot)
        self.bucket[slot] = 0.0
        self._see(slot, 0.0, 0.0)

    # -- what policies read

    def prefill(self, slots: Slots, now_s: float) -> tuple[Floats, Floats]:
        """Prefill work per second, and after how many seconds of it a new request has its turn, both of shape (n,)."""
        pace = self.paces_of(slots)  # to unpack the rows takes five times as long as to index them
        wait_s: Floats = np.minimum(np.maximum(pace[1] - now_s, 0.0), pace[2])
        return pace[0], wait_s

    def paces(self, slot: int) -> list[Pace]:
        """The same by slot, at least up to this one; done when is for the reader to compare with the time."""
        self._reach(slot)
        return self._paces

    def paces_of(self, slots: Slots) -> Floats:
        """The three figures of a Pace by row, shape (3, n), as they are now."""
        self._reach_all(slots)
        self._show_all()
        pace: Floats = self._pace.take(slots, 1)
        return pace

    def moment(self) -> Moment:
        """The same of all slots, to be read later as it is now."""
        self._show_all()
        return self._past.now(self._pace)

    def rate(self, slots: Slots) -> Floats:
        """Prefill work per second, shape (n,)."""
        self._reach_all(slots)
        self._show_all()
        rates: Floats = self._pace[0].take(slots)
        return rates

    def backlog(self, slots: Slots, now_s: float) -> Floats:
        """Work still to be done before a new request's turn, shape (n,)."""
        rate, wait_s = self.prefill(slots, now_s)
        return rate * wait_s

    def waiting_tokens(self, slots: Slots) -> Floats:
        """Uncached prompt tokens of requests without a first token, shape (n,)."""
        self._reach_all(slots)
        return self.pending_tokens[slots]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of one answer, which nine in ten of them reach."""
        return self.profile.decode_tokens_per_s if self._decode_rate is None else self._decode_rate

    def answer_tokens(self, request: InferenceRequest) -> float:
        """How long its answer will be, as far as the request allows it; none where nothing is generated."""
        if request.kind not in _GENERATE:
            return 0.0
        expected, most = self.expected_output_tokens, request.max_tokens
        return expected if most is None else min(expected, float(most))

    def answers_tokens(self, requests: Sequence[InferenceRequest]) -> Floats:
        """The same of w requests at once, shape (w, 1)."""
        return np.array([self.answer_tokens(request) for request in requests], np.float64)[:, None]

    def learned(self) -> Profile:
        """The profile with what was learned in its place: rates of all endpoints together, answers' length and pace."""
        return replace(
            self.profile,
            prefill_tokens_per_s=round(self._rate_of_all(), 1),
            output_tokens=round(self.expected_output_tokens, 1),
            decode_tokens_per_s=round(self.decode_rate, 2),
        )

    # -- inside

    def _expect_answers(self) -> None:
        prior_tokens = _PRIOR_REQUESTS * self._profile.output_tokens
        self.expected_output_tokens = (self.output_tokens_sum + prior_tokens) / (self.outputs + _PRIOR_REQUESTS)

    def _rate_of_all(self) -> float:
        """What was observed of all endpoints together."""
        return _pulled(self._seen_work, self._seen_time_s, self.prices.prefill_tokens_per_s)

    def _see(self, slot: int, work: float, time_s: float) -> None:
        """From now on this is what was observed of an endpoint."""
        self._seen_work += work - self.rate_work[slot]
        self._seen_time_s += time_s - self.rate_time_s[slot]
        self.rate_work[slot], self.rate_time_s[slot] = work, time_s
        if abs(self._rate_of_all() - self.pool_rate) > _POOL_STEP * self.pool_rate:
            self._show_pool()
        else:
            self._show(slot)

    def _show_pool(self) -> None:
        """Another rate may have been learned of all."""
        self._seen_work, self._seen_time_s = sum(self.rate_work), sum(self.rate_time_s)  # without what rounding added
        self.pool_rate = self._rate_of_all()
        for slot in range(self._size):
            self._show(slot)

    def _show(self, slot: int) -> None:
        """Another rate may have been learned."""
        self._paces[slot].rate = _pulled(self.rate_work[slot], self.rate_time_s[slot], self.pool_rate)
        self._fill(slot, self.bucket[slot], self.bucket_at_s[slot])

    def _learn(self, slot: int, work: float, time_s: float) -> None:
        time_s = max(time_s, _SHORTEST_S)
        prior = self.prices.prefill_tokens_per_s
        if not prior / _MOST_TIMES_PRIOR <= work / time_s <= prior * _MOST_TIMES_PRIOR:
            self.misreadings += 1
            return
        kept = math.exp(-time_s / _RATE_MEMORY_S)
        self._see(slot, self.rate_work[slot] * kept + work, self.rate_time_s[slot] * kept + time_s)

    def _expected_ttft_s(self, reservation: Reservation) -> float:
        slot = reservation.slot
        return (reservation.backlog + reservation.work) / self._paces[slot].rate

    def _follow(self, pace: float, step: float) -> None:
        """Move the decode rate one step towards being what nine in ten exceed."""
        rate = self.decode_rate
        moved = rate * math.exp(step * (_SLOW_SHARE - (pace < rate)))
        self._decode_rate = min(max(moved, _SLOWEST), _FASTEST)

    def _done(self, reservation: Reservation, now_s: float) -> None:
        slot = reservation.slot
        backlog = self._backlog(slot, now_s)
        self._pending[slot] -= 1.0
        self._pending_tokens[slot] -= reservation.uncached_tokens
        self.pending_work[slot] -= reservation.work
        if not self._pending[slot]:  # else rounding would add up over days
            self.pending_work[slot] = self._pending_tokens[slot] = 0.0
        self._fill(slot, min(backlog, self.pending_work[slot]), now_s)
        reservation.pending = False

    def _backlog(self, slot: int, now_s: float) -> float:
        """What is left in the bucket by now."""
        left = self.bucket[slot] - self._paces[slot].rate * (now_s - self.bucket_at_s[slot])
        return min(max(left, 0.0), self.pending_work[slot])

    def _fill(self, slot: int, work: float, at_s: float) -> None:
        """The bucket leaks from its time on, and is never above what is pending: in seconds, for `prefill`."""
        pace = self._paces[slot]
        self.bucket[slot], self.bucket_at_s[slot] = work, at_s
        pace.done_at_s, pace.longest_s = at_s + work / pace.rate, self.pending_work[slot] / pace.rate
        self._stirred.add(slot)

    def _show_all(self) -> None:
        if not self._stirred:
            return
        rate, done_at_s, longest_s = self._pace_by_slot
        for slot in self._stirred:
            pace = self._paces[slot]
            rate[slot], done_at_s[slot], longest_s[slot] = pace.rate, pace.done_at_s, pace.longest_s
            self._past.write(slot, pace.rate, pace.done_at_s, pace.longest_s)
        self._stirred.clear()

    def _reach_all(self, slots: Slots) -> None:
        if len(slots):
            self._reach(slots.item(-1))

    def _reach(self, slot: int) -> None:
        if slot >= self._size:
            self._grow(max(slot + 1, 2 * self._size))

    def _grow(self, size: int) -> None:
        first, more = self._size, size - self._size
        self.pending, self.pending_tokens = np.pad(self.pending, (0, more)), np.pad(self.pending_tokens, (0, more))
        self._pending, self._pending_tokens = one_by_one(self.pending), one_by_one(self.pending_tokens)
        self._pace = np.pad(self._pace, ((0, 0), (0, more)))
        self._past.lose()
        self._pace_by_slot: list[Any] = [one_by_one(row) for row in self._pace]
        for column in (
            self.pending_work, self.bucket, self.bucket_at_s, self.rate_work, self.rate_time_s, self.since_s
        ):  # fmt: skip
            column.extend([0.0] * more)
        self._paces += [Pace() for _ in range(more)]
        self._size = size
        for slot in range(first, size):
            self._show(slot)


def _pulled(work: float, time_s: float, towards: float) -> float:
    """The rate that was observed, pulled towards another."""
    return (work + _PRIOR_S * towards) / (time_s + _PRIOR_S)
