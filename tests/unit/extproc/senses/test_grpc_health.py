"""What a gRPC engine's answer to a health check says of it."""

from __future__ import annotations

import socket

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses.grpc_health import check
from policies.fleet_state import FleetState
from policies.lifecycle import Evidence

GUARD_S = 30.0


@pytest.mark.parametrize(
    ("status", "evidence"),
    [
        (health_pb2.HealthCheckResponse.SERVING, Evidence.PROBE_OK),
        (health_pb2.HealthCheckResponse.NOT_SERVING, Evidence.PROBE_FAILED),
        (None, Evidence.PROBE_OK),
    ],
    ids=["serving", "not serving", "without the service"],
)
async def test_an_engine_that_answers_is_as_well_as_it_says(status: int | None, evidence: Evidence) -> None:
    """And well if it has no health service to ask."""
    server = grpc.aio.server()
    if status is not None:
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("", status)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await check(f"127.0.0.1:{port}", GUARD_S) is evidence
    await server.stop(None)


async def test_nobody_there_is_a_refusal() -> None:
    """Which takes an endpoint out at once, where silence takes its time."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        assert await check(f"127.0.0.1:{taken.getsockname()[1]}", GUARD_S) is Evidence.PROBE_REFUSED


async def test_silence_is_a_failed_probe() -> None:
    """A listener that never speaks."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert await check(f"127.0.0.1:{silent.getsockname()[1]}", 0.2) is Evidence.PROBE_FAILED


def test_a_grpc_engine_is_taken_to_serve_its_pools_models() -> None:
    """Of all its gRPC pools; of one that speaks HTTP nothing is assumed."""
    pools = """
pools:
  - {name: a, models: [m, n], protocol: grpc, endpoints: {static: ["10.0.0.1:1"]}}
  - {name: b, models: [o], protocol: grpc, endpoints: {static: ["10.0.0.1:1"]}}
  - {name: c, models: [p], endpoints: {static: ["10.0.0.2:1"]}}
"""
    fleet = Fleet(FleetState(), Metrics(), lambda: 0.0)
    fleet.configure(Generation(1, parse(pools)))
    for pool, address in (("a", "10.0.0.1:1"), ("b", "10.0.0.1:1"), ("c", "10.0.0.2:1")):
        fleet.set_endpoints(pool, [address])
    assumed = fleet.assumed_by_grpc("10.0.0.1:1")
    assert assumed is not None
    assert assumed.models == {"m", "n", "o"}
    assert fleet.assumed_by_grpc("10.0.0.2:1") is None
    assert fleet.assumed_by_grpc("10.0.0.3:1") is None
