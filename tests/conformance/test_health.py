"""The health port's names, as gateways and kubelets ask for them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.wire.grpc_server import HealthServer, PortTaken

NAMES = ("", "readiness", "liveness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _server() -> tuple[HealthServer, str]:
    while True:
        address = f"127.0.0.1:{random.randrange(20_000, 32_000)}"
        with contextlib.suppress(PortTaken):
            return HealthServer(address), address


@pytest.fixture
async def health() -> AsyncIterator[tuple[HealthServer, health_pb2_grpc.HealthStub]]:
    """The product's health server and a client of it."""
    server, address = _server()
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield server, health_pb2_grpc.HealthStub(channel)
    await server.stop()


@pytest.mark.parametrize("name", NAMES)
async def test_every_name_tells_whether_we_serve(
    health: tuple[HealthServer, health_pb2_grpc.HealthStub], name: str
) -> None:
    """Not before the first discovery, then yes, and no more when we stop; alone `liveness` says yes throughout."""
    server, client = health
    told = []
    for serving in (None, True, False):
        if serving is not None:
            await server.set_serving(serving=serving)
        told.append((await client.Check(health_pb2.HealthCheckRequest(service=name))).status)
    assert told == ([SERVING] * 3 if name == "liveness" else [NOT_SERVING, SERVING, NOT_SERVING])


async def test_an_unknown_name_is_not_found(health: tuple[HealthServer, health_pb2_grpc.HealthStub]) -> None:
    """As gRPC's health protocol wants it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health[1].Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
