"""Whether an engine that speaks gRPC can be used: the standard health service, for such an engine has no model list.

A server without that service answers UNIMPLEMENTED; it answers, so it is taken to be well.
"""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from policies.lifecycle import Evidence

_CHECK = "/grpc.health.v1.Health/Check"
# else all channels to an address share their back-off, and an engine that is back is found seconds later
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


async def check(address: str, timeout_s: float) -> Evidence:
    """Ask over a connection of its own."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        ask = channel.unary_unary(_CHECK, response_deserializer=health_pb2.HealthCheckResponse.FromString)
        try:
            answer = await ask(health_pb2.HealthCheckRequest().SerializeToString(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return _evidence(error)
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Evidence.PROBE_OK if serving else Evidence.PROBE_FAILED


def _evidence(error: grpc.aio.AioRpcError) -> Evidence:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Evidence.PROBE_OK
    refused = error.code() is grpc.StatusCode.UNAVAILABLE and "onnection refused" in (error.details() or "")
    return Evidence.PROBE_REFUSED if refused else Evidence.PROBE_FAILED
