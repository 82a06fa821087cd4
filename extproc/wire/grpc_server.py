"""The grpcio servers: one for Envoy (ext_proc, access logs, xDS), one for health checks.

Handlers take raw bytes and decode them themselves: a generated servicer costs 8-13 % more CPU per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.config.sections.listen import Listen

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
ADS = "envoy.service.discovery.v3.AggregatedDiscoveryService"
EDS = "envoy.service.endpoint.v3.EndpointDiscoveryService"

_HEALTH_NAMES = ("", "liveness", "readiness", "inference-extension", EXT_PROC)
"""What gateways and kubelets ask for: the empty name, Kubernetes' two, the endpoint-picker protocol's, and Envoy's."""

_STREAMS = 100_000
"""Announced to Envoy as the stream limit; requests are bounded by limits.open_requests, not here."""
_WINDOW_BYTES = 256 * 1024
"""What a stream may send ahead of our reading. By default a body of 64 KB does not fit, and waits half-way for leave to
go on; that is a tenth of its CPU."""
_HEADROOM_BYTES = 1 << 20
"""Over the largest body, for headers and framing; also what Envoy's first access-log message (its node) needs."""


class PortTaken(Exception):
    """The address cannot be listened on."""


class BadCertificate(Exception):
    """A certificate, key or CA file cannot be used."""


def envoy_server(
    listen: Listen, handlers: Mapping[tuple[str, str], Any], *, largest_body_bytes: int
) -> grpc.aio.Server:
    """A server for `(service, method) -> grpc handler`, in plaintext and, if asked for, over TLS.

    Raises PortTaken and BadCertificate.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", largest_body_bytes + _HEADROOM_BYTES),
            ("grpc.max_send_message_length", largest_body_bytes + _HEADROOM_BYTES),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # Two routers on one port would each see a part of the requests and none would count right.
            ("grpc.so_reuseport", 0),
            # Envoy pings every 5 s to notice when we hang; grpcio takes that for abuse, drops the connection after a
            # while, and with it every reservation whose stream was quiet.
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
            # And we ping Envoy: one whose machine vanishes sends no goodbye, and would hold its reservations for the
            # two hours of grpcio's default.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
        ]
    )
    for (service, method), handler in handlers.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    _bind(server, "listen.grpc", listen.grpc)
    if listen.grpc_tls is not None:
        from extproc.wire.certificates import server_credentials  # what makes certificates takes long to import

        _bind(server, "listen.grpc_tls", listen.grpc_tls, server_credentials(listen.tls))
    return server


def bidirectional(handler: Any) -> Any:  # noqa: ANN401 - grpcio has no types
    """A raw-bytes stream-stream handler."""
    return grpc.stream_stream_rpc_method_handler(handler)


def client_streaming(handler: Any) -> Any:  # noqa: ANN401 - grpcio has no types
    """A raw-bytes stream-unary handler."""
    return grpc.stream_unary_rpc_method_handler(handler)


class HealthServer:
    """gRPC health checks; everything serves or nothing does."""

    def __init__(self, address: str) -> None:
        """Raise PortTaken."""
        self._servicer = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        _bind(self._server, "listen.health", address)

    async def start(self) -> None:
        """Listen; not serving until told."""
        await self.set_serving(serving=False)
        await self._server.start()

    async def set_serving(self, *, serving: bool) -> None:
        """Tell every watcher. Liveness stays up while we run."""
        status = health_pb2.HealthCheckResponse
        for name in _HEALTH_NAMES:
            alive = serving or name == "liveness"
            await self._servicer.set(name, status.SERVING if alive else status.NOT_SERVING)

    async def stop(self) -> None:
        """Stop listening."""
        await self._server.stop(0)


def _bind(server: grpc.aio.Server, field: str, address: str, credentials: Any = None) -> None:  # noqa: ANN401 - grpcio has no types
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # grpcio's words name neither the cause nor anything an operator could do
        raise PortTaken(f"{field}: cannot listen on {address}; does another Pointsman run?") from error
