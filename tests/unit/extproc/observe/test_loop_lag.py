"""How late the loop is, on a clock of the test's own."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from extproc.observe.loop_lag import BOUNDS_S, EVERY_S, LoopLag
from extproc.observe.metrics import Metrics


class Clocks:
    """The world's and the thread's."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 10.0

    def lag(self) -> LoopLag:
        """A probe by these."""
        return LoopLag(lambda: self.now_s, lambda: self.cpu_s)


async def test_lateness_is_counted_and_our_own_share_of_it() -> None:
    """No more of it is our own than what our thread computed meanwhile; a timer that is early is not late."""
    clocks = Clocks()
    lag = clocks.lag()
    for late_s, used_s in ((0.03, 0.2), (0.03, 0.0007), (-0.001, 0.01)):
        lag.start()
        clocks.now_s += EVERY_S + late_s
        clocks.cpu_s += used_s
        lag.tick()
        lag.stop()
    assert round(lag.all.total_s, 6) == 0.06
    assert round(lag.own.total_s, 6) == 0.0307
    assert (lag.all.counts[0], lag.all.counts[BOUNDS_S.index(0.05)]) == (1, 2)
    assert lag.own.counts[BOUNDS_S.index(0.001)] == 1


async def test_only_what_was_used_since_shortly_before_counts_as_our_own() -> None:
    """What requests took long before says nothing of why the timer is late; if all was late, it may."""
    clocks = Clocks()
    lag = clocks.lag()
    lag.start()
    clocks.now_s, clocks.cpu_s = clocks.now_s + EVERY_S - 0.001, clocks.cpu_s + 0.03
    assert round(lag.near(), 6) == 0.001
    clocks.now_s, clocks.cpu_s = clocks.now_s + 0.011, clocks.cpu_s + 0.0004
    lag.tick()
    assert round(lag.own.total_s, 6) == 0.0004
    lag.start()
    clocks.now_s, clocks.cpu_s = clocks.now_s + EVERY_S + 0.02, clocks.cpu_s + 0.015
    assert lag.near() < 0
    lag.tick()
    assert round(lag.own.total_s, 6) == 0.0154
    assert round(lag.all.total_s, 6) == 0.03
    lag.stop()


async def test_it_goes_on_by_itself_until_stopped() -> None:
    """On the running loop, from timer to timer."""
    lag = LoopLag()
    lag.start()
    while sum(lag.all.counts) < 3:  # noqa: ASYNC110 - counts tell nobody
        await asyncio.sleep(0.01)
    lag.stop()
    before = sum(lag.own.counts)
    await asyncio.sleep(2 * EVERY_S)
    assert sum(lag.own.counts) == before


def test_the_page_shows_it_as_a_histogram() -> None:
    """With every bound, cumulated."""
    clocks, metrics = Clocks(), Metrics()
    lag = clocks.lag()
    metrics.observe_loop(lag)
    lag.all.observe(0.0015)
    lag.all.observe(3.0)
    registry: CollectorRegistry = metrics.registry
    name = "pointsman_loop_lag_seconds"
    found = [
        registry.get_sample_value(f"{name}_bucket", {"of": "all", "le": end}) for end in ("0.001", "0.002", "+Inf")
    ]
    assert found == [0, 1, 2]
    assert registry.get_sample_value(f"{name}_sum", {"of": "all"}) == 3.0015
