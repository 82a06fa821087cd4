"""The router under test, in this process: real parsing, fleet, flights, placement and counters.

Nothing is mocked. A fleet is stated as `P(index, queue, kv, adapters...)` and told to the fleet by the inputs that
discovery, probes and scrapes use. Not here: sockets (transports.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from typing import Any

import yaml
from callers import HANG_S

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Flights
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.wire.processor import Processor
from policies.fleet_state import FleetState
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures

POOL = {
    "name": "chat",
    "models": ["base", "sql-lora", "tweet-lora"],
    "aliases": {"gpt-4o": "base"},
    "endpoints": {"file": "told-by-the-test.yaml"},
    # spelled out: which preset is the default is not what a gateway relies on
    "policy": {
        "kind": "weighted",
        "scorers": [
            {"name": "queue_depth", "weight": 2},
            {"name": "kv_usage", "weight": 1},
            {"name": "least_request", "weight": 1},
        ],
    },
}
NOW_S = 100.0


class P:
    """One endpoint: requests waiting in it, KV cache in use (0..1), and the adapters it lists beside `base`."""

    def __init__(self, index: int, queue: int = 0, kv: float = 0.0, *adapters: str, ready: bool = True) -> None:
        self.address = address(index)
        self.models = frozenset({"base", *adapters})
        self.figures = EngineFigures(waiting=queue, running=0, kv_used=kv)
        self.ready = ready


def address(index: int) -> str:
    """Of the endpoint with that index; as in llm-d's tables."""
    return f"192.168.1.{index + 1}:8000"


class House:
    """One router over one fleet; `config` is laid over a single pool named `chat`."""

    def __init__(self, fleet: Iterable[P], config: dict[str, Any]) -> None:
        self.config = parse(yaml.safe_dump({"pools": [POOL], **config}))
        self.metrics = Metrics()
        self.state = FleetState(max_endpoints=self.config.limits.endpoints)
        self.fleet = Fleet(self.state, self.metrics, lambda: NOW_S)
        decisions = DecisionLog(10)
        limits = self.config.limits
        self.flights = Flights(
            self.state, Outcomes(self.fleet, self.metrics, decisions), lambda: NOW_S,
            max_open=limits.open_requests, max_unsettled=limits.unsettled_requests, access_log_timeout_s=10,
        )  # fmt: skip
        generation = Generation(1, self.config)
        self.pipeline = Pipeline(
            generation, self.fleet, self.flights, decisions, self.metrics,
            clock=lambda: NOW_S, wall_clock=lambda: 1.78e9, rng=Random(7),
        )  # fmt: skip
        self.processor = Processor(self.flights, self.pipeline, self.metrics)
        self.fleet.configure(generation)
        self._tell(list(fleet))

    def _tell(self, endpoints: list[P]) -> None:
        self.fleet.set_endpoints("chat", [endpoint.address for endpoint in endpoints])
        self.fleet.acknowledged(self.fleet.assignments())
        for endpoint in endpoints:
            if endpoint.ready:
                self.fleet.listed_models(endpoint.address, Listing(endpoint.models, 100_000))
                self.fleet.scraped(endpoint.address, endpoint.figures)

    def in_flight(self) -> dict[str, int]:
        """Requests booked, by endpoint; those without any are left out."""
        counts = {str(self.state.addresses[slot]): int(self.state.in_flight[slot]) for slot in self.state}
        return {name: count for name, count in counts.items() if count}

    def count(self, name: str, **labels: str) -> float:
        """One of the router's own counters."""
        return self.metrics.registry.get_sample_value(f"pointsman_{name}_total", labels) or 0.0

    def messages(self) -> float:
        """How many messages the router has read, of any kind."""
        families = (family for family in self.metrics.registry.collect() if family.name.endswith("ext_proc_messages"))
        return sum(s.value for family in families for s in family.samples if s.name.endswith("_total"))

    async def has_read(self, count: int) -> None:
        """Wait until the router has read so many messages."""
        async with asyncio.timeout(HANG_S):
            while self.messages() < count:  # noqa: ASYNC110 - counters tell nobody
                await asyncio.sleep(0.002)

    async def has_open(self, count: int) -> None:
        """Wait until so many streams are open."""
        async with asyncio.timeout(HANG_S):
            while self.flights.open_count != count:  # noqa: ASYNC110 - counters tell nobody
                await asyncio.sleep(0.002)

    async def is_empty(self) -> None:
        """Wait until every stream has ended, and see that nothing stayed booked."""
        await self.has_open(0)
        state = self.state
        assert self.in_flight() == {}
        assert not state.in_flight_prompt_tokens.any()
        assert not state.in_flight_uncached_tokens.any()
        for placement in self.fleet.placements.values():
            assert not placement.ledger.pending.any()
            assert not placement.ledger.pending_tokens.any()
            shelves = placement.index._shelves.values()
            assert not any(held.users for shelf in shelves for held in shelf.blocks.values())
