"""How the table reaches the router. A further transport is one more row of `TRANSPORTS`."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from callers import Caller, GrpcCaller
from house import House

from extproc.config.sections.listen import Listen
from extproc.names import EXT_PROC_SOCKET
from extproc.wire.access_log import AccessLog
from extproc.wire.envoy_lane import EnvoyLane
from extproc.wire.grpc_server import EXT_PROC, PortTaken, bidirectional, envoy_server


def _grpc_server(house: House, target: str) -> Any:
    listen = Listen.model_construct(grpc=target, grpc_tls=None)
    handlers = {(EXT_PROC, "Process"): bidirectional(house.processor.process)}
    return envoy_server(listen, handlers, largest_body_bytes=house.config.limits.request_body_bytes)


def _on_a_free_port(house: House) -> tuple[Any, str]:
    """A port below the range from which outgoing connections take theirs."""
    while True:
        target = f"127.0.0.1:{random.randrange(20_000, 32_000)}"
        with contextlib.suppress(PortTaken):
            return _grpc_server(house, target), target


@contextlib.asynccontextmanager
async def _serving(server: Any, target: str) -> AsyncIterator[Caller]:
    await server.start()
    caller = GrpcCaller(target)
    try:
        yield caller
    finally:
        await caller.close()
        await server.stop(None)


def grpc_over_tcp(house: House, folder: Path) -> AbstractAsyncContextManager[Caller]:  # noqa: ARG001 - as the others
    """The product's grpcio server on a port of loopback."""
    return _serving(*_on_a_free_port(house))


def grpc_over_unix(house: House, folder: Path) -> AbstractAsyncContextManager[Caller]:
    """The same on a Unix socket."""
    target = f"unix:{folder}/grpc.sock"
    return _serving(_grpc_server(house, target), target)


@contextlib.asynccontextmanager
async def envoy_lane(house: House, folder: Path) -> AsyncIterator[Caller]:
    """Our own HTTP/2 on a Unix socket, called by grpcio's client, which is stricter than Envoy."""
    access_log = AccessLog(house.flights, house.metrics)
    sockets = Path(tempfile.mkdtemp(dir=folder))
    lane = EnvoyLane(sockets, house.flights, house.pipeline, access_log, house.metrics, hold_s=600)
    await lane.start()
    caller = GrpcCaller(f"unix:{sockets}/{EXT_PROC_SOCKET}")
    try:
        yield caller
    finally:
        await caller.close()
        await lane.stop(0)


TRANSPORTS: dict[str, Callable[[House, Path], AbstractAsyncContextManager[Caller]]] = {
    "grpc-tcp": grpc_over_tcp,
    "grpc-unix": grpc_over_unix,
    "lane": envoy_lane,
}
