"""A router without sockets, for measuring what its own work costs: real parsing, fleet, placement, flights, counters.

Sixteen to a thousand endpoints that all take traffic, the default policy, prompts of which each shares half with three
others, and always a few requests under way, so that costs differ and prefixes are found. Messages go in as Envoy would
send them; nothing is mocked but the wire. Not here: what is measured (stages.py).
"""

from __future__ import annotations

import time
from collections import deque
from itertools import cycle
from random import Random

import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from benchmarks.http_load import bodies
from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.flight import Flight, Flights
from extproc.observe.decisions import DecisionLog
from extproc.observe.metrics import Metrics
from extproc.outcomes import Outcomes
from extproc.pipeline import Pipeline
from extproc.wire.processor import Exchange
from policies.fleet_state import FleetState
from vllm_adapters.health import Listing
from vllm_adapters.metrics import EngineFigures

HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    "content-type": "application/json",
    "x-forwarded-for": "203.0.113.7",
    "x-request-id": "6c1e8a55-0d0f-4f1f-8a56-0a7f12d3e4aa",
}
"""What our own Envoy shows us of a client's; there are some ten more."""
HOLD_S = 600.0
_UNDER_WAY = 16
_LISTING = Listing(frozenset({"sim"}), 2_000_000)


class Scene:
    """One router. `bodies` are the prompts' bodies, `messages` the same as Envoy sends them."""

    def __init__(self, endpoints: int, body_bytes: int) -> None:
        addresses = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000" for number in range(endpoints)]
        config = parse(
            yaml.safe_dump({"pools": [{"name": "chat", "models": ["sim"], "endpoints": {"static": addresses}}]})
        )
        self.state, self.metrics = FleetState(max_endpoints=4_096), Metrics()
        fleet = Fleet(self.state, self.metrics, time.monotonic)
        log, limits = DecisionLog(config.observe.decisions), config.limits
        outcomes = Outcomes(fleet, self.metrics, log)
        self.flights = Flights(
            self.state, outcomes, time.monotonic,
            max_open=limits.open_requests, max_unsettled=1_000, access_log_timeout_s=10,
        )  # fmt: skip
        self.generation, self.rng = Generation(1, config), Random(7)
        self.pipeline = Pipeline(
            self.generation, fleet, self.flights, log, self.metrics,
            clock=time.monotonic, wall_clock=time.time, rng=self.rng,
        )  # fmt: skip
        fleet.configure(self.generation)
        fleet.set_endpoints("chat", addresses)
        fleet.acknowledged(fleet.assignments())
        for address in addresses:
            fleet.listed_models(address, _LISTING)
            fleet.scraped(address, EngineFigures(waiting=0, running=0, kv_used=0.0, kv_capacity_tokens=440_000))
        self.placement = fleet.placements["chat"]
        self.state.stale_after_s = float("inf")  # nobody scrapes here
        self.headers_message = _headers_message(body_bytes)
        self.bodies = bodies(body_bytes)
        self.messages = [_body_message(body) for body in self.bodies]
        self._next = cycle(self.messages)
        self._open: deque[Flight] = deque()

    def request(self) -> None:
        """A whole request: both messages in, both answers out; the oldest of those under way ends."""
        flight = self.flights.open()
        exchange = Exchange(flight, self.pipeline, self.metrics, HOLD_S)
        exchange.receive(self.headers_message)
        exchange.receive(next(self._next))
        self.keep(flight)

    def keep(self, flight: Flight) -> None:
        """This one is under way now."""
        self._open.append(flight)
        if len(self._open) > _UNDER_WAY:
            self._open.popleft().close()


def _headers_message(body_bytes: int) -> bytes:
    message = ext_proc.ProcessingRequest()
    for name, value in {**HEADERS, "content-length": str(body_bytes)}.items():
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    message.metadata_context.SetInParent()
    message.protocol_config.request_body_mode = (
        message.protocol_config.DESCRIPTOR.fields_by_name["request_body_mode"]
        .enum_type.values_by_name["BUFFERED"]
        .number
    )
    return bytes(message.SerializeToString())


def _body_message(body: bytes) -> bytes:
    message = ext_proc.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, True
    message.metadata_context.SetInParent()
    return bytes(message.SerializeToString())
