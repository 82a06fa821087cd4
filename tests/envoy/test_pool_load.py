"""How loaded a pool is, through a real Envoy: what is asked of it, against the engines that may be asked."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from harness import HANG_GUARD_S, Engine, HeldStream, System, eventually, pool_of


def test_the_load_follows_requests_and_engines(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """Open streams over the places of the engines in service; a drained one takes its places and its streams away."""
    engines = make_engines(2, "--speed", "50")
    system = make_system(pools=[pool_of(engines, hardware={"max_num_seqs": 8}, policy="round-robin")])
    system.wait_pickable(*(engine.address for engine in engines))

    def load() -> tuple[float, ...]:
        return tuple(
            system.total(f"pointsman_pool_{what}", 'pool="chat"') for what in ("requests", "places", "load_ratio")
        )

    assert load() == (0, 16, 0)
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        streams = [HeldStream(client, system) for _ in range(4)]
        eventually(lambda: load() == (4, 16, 0.25), "four of sixteen places are taken")
        httpx.post(
            f"{system.admin_url}/v1/endpoints/{engines[0].address}:drain", timeout=HANG_GUARD_S
        ).raise_for_status()
        eventually(lambda: load() == (2, 8, 0.25), "what drains needs no place")
        for engine in engines:
            engine.release()
        for stream in streams:
            assert b"[DONE]" in stream.rest()
    eventually(lambda: load() == (0, 8, 0), "all are over")
