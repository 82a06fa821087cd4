"""The KV forecast: lines, saw-teeth, silence, and an alarm that does not flutter."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from policies.kv_forecast import BIN_S, WINDOW_BINS, KvForecast, trend

WINDOW_S = BIN_S * WINDOW_BINS


def watch(usage: Callable[[float], float], seconds: float, every_s: float = 0.1) -> tuple[KvForecast, list[float]]:
    """A forecast fed for so long, and when its alarm began."""
    forecast, alarms = KvForecast(0.75), []
    for step in range(round(seconds / every_s)):
        now_s = step * every_s
        if forecast.observe(min(1.0, usage(now_s)), now_s):
            alarms.append(now_s)
    return forecast, alarms


@pytest.mark.parametrize("every_s", [0.02, 0.2, 1.0])
def test_a_line_is_foreseen(every_s: float) -> None:
    """Usage that grows by a hundredth per second from 0.3 and stands at 0.5 is full in 50 s, however often told."""
    forecast, _ = watch(lambda now_s: 0.3 + 0.01 * now_s, 20, every_s)
    assert forecast.full_in_s == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("usage", [lambda _: 0.6, lambda now_s: 0.9 - 0.02 * now_s], ids=["level", "falling"])
def test_what_does_not_rise_is_never_full(usage: Callable[[float], float]) -> None:
    """Infinite, not a large number."""
    assert watch(usage, 20)[0].full_in_s == math.inf


def test_a_full_cache_is_full_now() -> None:
    """Zero seconds, and the alarm."""
    forecast, _ = watch(lambda _: 1.0, 20)
    assert (forecast.full_in_s, forecast.alarm) == (0.0, True)


def test_one_request_that_ends_does_not_turn_the_trend() -> None:
    """A rise with a fall by a whole request in it is the same rise; least squares would see half of it."""
    forecast, _ = watch(lambda now_s: 0.2 + 0.03 * now_s - (0.25 if now_s > 12 else 0), 16)
    assert 10 < forecast.full_in_s < 40


def test_teeth_around_a_level_are_no_rise() -> None:
    """Usage that climbs for two seconds and falls back, again and again, as a steady load looks, fills nothing."""
    jitter = random.Random(7)
    forecast, _ = watch(lambda now_s: 0.5 + 0.05 * (now_s % 2) + jitter.uniform(-0.01, 0.01), 40)
    assert forecast.full_in_s > 300


def test_nothing_is_foreseen_from_a_moment() -> None:
    """The first seconds tell no trend, nor does what was before a long silence."""
    assert watch(lambda now_s: 0.1 * now_s, 3)[0].full_in_s == math.inf
    forecast, _ = watch(lambda now_s: 0.01 * now_s, 20)
    assert forecast.full_in_s < math.inf
    forecast.observe(0.2, 20 + 2 * WINDOW_S)
    assert forecast.full_in_s == math.inf


def test_the_alarm_begins_once_and_ends_below_where_it_began() -> None:
    """Usage that dances around the threshold raises it once; it ends only well below, and begins again."""
    forecast = KvForecast(0.75)
    told = [forecast.observe(used, now_s) for now_s, used in enumerate([0.74, 0.76, 0.74, 0.76, 0.71, 0.76])]
    assert told == [False, True, False, False, False, False]
    assert not forecast.observe(0.69, 7)
    assert not forecast.alarm
    assert forecast.observe(0.76, 8)


def test_another_engine_begins_anew() -> None:
    """Nothing of the last one's cache is left."""
    forecast, _ = watch(lambda now_s: 0.3 + 0.03 * now_s, 20)
    assert forecast.alarm
    forecast.forget()
    assert (forecast.alarm, forecast.full_in_s, forecast.used) == (False, math.inf, 0.0)


def test_the_window_is_bounded() -> None:
    """However long and often it is told."""
    forecast, _ = watch(lambda _: 0.5, 200, 0.05)
    assert len(forecast._bins) == WINDOW_BINS


def test_the_trend_is_the_median_slope() -> None:
    """One point far off changes nothing."""
    line = [(float(n), 0.1 * n) for n in range(9)]
    assert trend(line) == pytest.approx(0.1)
    assert trend([*line, (9.0, -5.0)]) == pytest.approx(0.1)
